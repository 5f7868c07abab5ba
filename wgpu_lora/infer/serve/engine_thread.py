"""The thread that owns the engine, and the way of its tokens to the requests of the event loop.

event loop --commands--> engine thread --outputs--> text thread --pieces--> event loop
"""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from operator import methodcaller
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from wgpu_lora.errors import NoRoomError, UserError
from wgpu_lora.formats.peft_adapter import Matrices
from wgpu_lora.formats.peft_config import AdapterConfig
from wgpu_lora.formats.tokenizer.tokenizer import StreamDecoder, Tokenizer
from wgpu_lora.gpu.device_errors import DeviceLost
from wgpu_lora.infer.answers import StreamedAnswer
from wgpu_lora.infer.engine import Engine
from wgpu_lora.infer.request import EngineStats, Request, StepOutput, TokenLogprobs
from wgpu_lora.infer.serve.errors import RequestError, as_request_error, unknown_model

PREFIX, LABEL = "wgpu_lora:", ["model_name"]
SHORT = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10)  # seconds
LONG = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600)


class Metrics:
    """stats: what the engine said last. name: the base model's."""

    def __init__(self, name: str, stats: Callable[[], EngineStats]) -> None:
        self._name, self._stats = name, stats
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self.success = Counter(
            PREFIX + "request_success", "Answers by how they ended.", [*LABEL, "finished_reason"],
            registry=self.registry,
        )  # fmt: skip
        self.first_token, self.between_tokens, self.latency = (
            Histogram(PREFIX + name, text, LABEL, registry=self.registry, buckets=buckets)
            for name, text, buckets in (
                ("time_to_first_token_seconds", "From an answer's request to its first token.", LONG),
                ("inter_token_latency_seconds", "Between two tokens of an answer.", SHORT),
                ("e2e_request_latency_seconds", "From an answer's request to its end.", LONG),
            )
        )

    def collect(self) -> Iterator[Metric]:
        """The engine's figures; called by the registry."""
        stats = self._stats()
        gauges = {
            "num_requests_running": (stats.running, "Requests that are computed now."),
            "num_requests_waiting": (stats.waiting, "Requests that wait for a place."),
            "kv_cache_usage_perc": (stats.cache_usage, "Share of the cache's blocks in use, 1 for all."),
        }
        counters = {
            "prompt_tokens": (stats.prompt_tokens, "Tokens of prompts."),
            "generation_tokens": (stats.generated_tokens, "Tokens of answers."),
            "prefix_cache_queries": (stats.prompt_tokens, "Tokens looked up in the prefix cache."),
            "prefix_cache_hits": (stats.cached_tokens, "Tokens found there."),
        }
        for family, figures in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (value, text) in figures.items():
                metric = family(PREFIX + name, text, labels=LABEL)
                metric.add_metric([self._name], value)
                yield metric


AdapterFiles = tuple[AdapterConfig, Matrices]


class StreamedText(StreamedAnswer):
    """The text of an answer.

    Args:
        stop: not looked for in the first `min_tokens` tokens.
        markers: texts of special tokens that it has, even if it skips the others.
        prompt: what it continues.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop: Sequence[str],
        markers: Mapping[int, str],
        *,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        prompt: Sequence[int] = (),
    ) -> None:
        super().__init__(tokenizer, 0, stop, include_stop)
        self._decoder = StreamDecoder(tokenizer, skip_special_tokens, prompt)
        self._markers, self._stops, self._unstopped = markers if skip_special_tokens else {}, stop, min_tokens
        self.include_stop, self.length = include_stop, 0  # characters of the tokens so far

    def push(self, token: int) -> str:
        if self.stopped:
            return ""
        marker = self._markers.get(token)
        text = self._decoder.push(token) if marker is None else self._decoder.flush() + marker
        self.length += len(text)
        self._stop = () if self._unstopped > 0 else self._stops
        self._unstopped -= 1
        return self._emit(text, False)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._cut


@dataclass(frozen=True)
class Piece:
    """What is new of an answer. finish_reason, error: of its last piece.

    tokens: the new one, or none; one that ends the answer counts. offset: characters of the tokens before it.
    """

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    offset: int = 0
    logprobs: TokenLogprobs | None = None
    finish_reason: str | None = None
    error: RequestError | None = None


@dataclass(eq=False)
class RunningAnswer:
    """An answer that an engine computes. index: among those of its HTTP request, which share a queue of pieces.

    scores_only: whether only its prompt is asked for, and the token that an engine gives each request is left out.
    """

    index: int
    request: Request
    text: StreamedText
    pieces: asyncio.Queue[Piece]
    model: str
    scores_only: bool = False
    tokens: int = 0
    prompt_logprobs: list[TokenLogprobs] | None = None
    start_time: float = field(default_factory=time.monotonic)
    newest: float | None = None  # when its newest token came


class EngineThread:
    """An engine in a thread of its own, which event loops give answers to run.

    Args:
        make: opens the model anew and makes an engine with these adapters, once, after the device was lost.
        adapters: directories by name, all of them loaded into the engine.
        limit: answers that may run or wait.
        on_end: called from the thread when it ends by an error.
    """

    def __init__(
        self,
        engine: Engine,
        make: Callable[[Mapping[str, Path]], Engine],
        adapters: Mapping[str, Path],
        name: str,
        limit: int,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:
        self._engine, self._make, self._limit, self._on_end = engine, make, limit, on_end
        self.adapters = dict(adapters)
        self.failure: Exception | None = None  # that ended the thread
        self.stats = engine.stats()
        self.metrics = Metrics(name, lambda: self.stats)
        self._answers: dict[Request, RunningAnswer] = {}
        self._commands: queue.SimpleQueue[tuple[Future[Any], Callable[[Engine], Any]] | None] = queue.SimpleQueue()
        self._texts = ThreadPoolExecutor(1, "serve-text")
        self._remade = False
        self._memory = asyncio.Lock()  # of who waits for an adapter to be in memory: first come, first served
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._run, name="serve-engine", daemon=True)
        self._thread.start()

    # -- of the event loop ---------------------------------------------------------------------------------------------

    async def call(self, act: Callable[[Engine], Any]) -> Any:
        """What `act` returns or raises in the engine's thread, between two steps."""
        return await asyncio.wrap_future(self._submit(act))

    async def start(self, answers: Sequence[RunningAnswer], read: Callable[[Path], Awaitable[AdapterFiles]]) -> None:
        """Run answers of a request, whose pieces then come, once their adapter is in memory.

        Args:
            read: the files in an adapter's directory.

        Raises:
            RequestError: too many answers are unfinished (429); the adapter has been unloaded (404); or the engine has
                failed (503).
            UserError: the engine refuses one.
        """
        if len(self._answers) + len(answers) > self._limit:
            status = 429 if len(answers) <= self._limit else 400
            text = f"The server runs or holds {self._limit} answers at a time: ask again in a while, or for fewer."
            raise RequestError(text, status, code="rate_limit_exceeded")
        self._loop = asyncio.get_running_loop()
        self._answers |= {answer.request: answer for answer in answers}
        name, add = answers[0].request.adapter, partial(self._add, answers)
        try:
            if (name is None or not self._memory.locked()) and await self.call(add):
                return
            assert name is not None
            async with self._memory:
                while not await self.call(add):
                    if name not in self.adapters:
                        raise unknown_model(name)  # it has just been unloaded
                    await self._load(name, await read(self.adapters[name]))
        except BaseException:
            self.stop(answers)
            raise

    async def load(self, name: str, files: AdapterFiles) -> None:
        """Load one of `adapters` into the engine. Raises UserError if it does not fit."""
        async with self._memory:
            await self._load(name, files)

    async def _load(self, name: str, files: AdapterFiles) -> None:
        """Load an adapter once one in memory has no requests. Requests that come later wait, so that this will be."""
        while True:
            try:
                await self.call(partial(self._put, name, files))
                return
            except NoRoomError:
                await asyncio.sleep(0.01)

    def stop(self, answers: Sequence[RunningAnswer]) -> None:
        """End answers that are not finished; their pieces come no more."""
        for answer in answers:
            if self._answers.pop(answer.request, None):
                self._submit(methodcaller("abort", answer.request))

    def _submit(self, act: Callable[[Engine], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        if self.failure:
            future.set_exception(as_request_error(self.failure, 503))
        else:
            self._commands.put((future, act))
        return future

    def close(self) -> None:
        """End the thread after its step, and free the engine."""
        self._commands.put(None)
        self._thread.join()
        self._texts.shutdown()

    # -- of the engine's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                try:
                    if not self._obey(not self._engine.busy):
                        break
                    if self._engine.busy:
                        self._pass_on(self._engine.step())
                    self.stats = self._engine.stats()
                except Exception as error:
                    self._recover(error)
        except Exception as error:
            self.failure = error
            self._on_end()
        finally:
            if self.failure:
                self._fail(self.failure)
            while not self._commands.empty():
                if command := self._commands.get():
                    command[0].set_exception(as_request_error(self.failure, 503))
            with suppress(Exception):
                self._engine.close()

    def _obey(self, wait: bool) -> bool:
        """Carry out the commands that have come, the first of which is waited for; False at the end."""
        while True:
            try:
                command = self._commands.get(wait)
            except queue.Empty:
                return True
            if command is None:
                return False
            wait, (future, act) = False, command
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(act(self._engine))
                except Exception as error:
                    future.set_exception(as_request_error(error, 503) if isinstance(error, DeviceLost) else error)
                    if not isinstance(error, UserError) or isinstance(error, DeviceLost):
                        raise

    def _add(self, answers: Sequence[RunningAnswer], engine: Engine) -> bool:
        """Give answers to the engine; False if their adapter is not in memory."""
        name = answers[0].request.adapter
        if any(answer.request not in self._answers for answer in answers):
            raise as_request_error(self.failure, 503)  # they have been failed with those that ran
        if name is not None and name not in engine.slots.names:
            return False
        for answer in answers:
            engine.add(answer.request)
        return True

    def _put(self, name: str, files: AdapterFiles, engine: Engine) -> None:
        if name in self.adapters and name not in engine.slots.names:  # else it was unloaded, or the engine made again
            engine.load_adapter(name, *files)

    def _pass_on(self, outputs: list[StepOutput]) -> None:
        # The next step may set a request's finish_reason before this output is read.
        last = {output.request: number for number, output in enumerate(outputs)}
        ends = [output.request.finish_reason if last[output.request] == n else None for n, output in enumerate(outputs)]
        self._texts.submit(self._read, outputs, ends)

    def _recover(self, error: Exception) -> None:
        """End what runs with an error. If the device is lost, or the engine broken, make it again, once."""
        if isinstance(error, UserError):
            print(f"wgpu-lora: {error}", file=sys.stderr, flush=True)
        else:
            traceback.print_exception(error)
        self._fail(error)
        if isinstance(error, UserError) and not isinstance(error, DeviceLost):
            return
        if self._remade:
            raise error
        self._remade = True
        with suppress(Exception):
            self._engine.close()
        self._engine = self._make(dict(self.adapters))

    def _fail(self, error: Exception) -> None:
        for answer in list(self._answers.values()):
            self._answers.pop(answer.request, None)
            with suppress(Exception):
                self._engine.abort(answer.request)
            self._texts.submit(self._end, answer, Piece(answer.index, error=as_request_error(error, 503)))

    # -- of the texts' thread ------------------------------------------------------------------------------------------

    def _read(self, outputs: Sequence[StepOutput], ends: Sequence[str | None]) -> None:
        for output, end in zip(outputs, ends, strict=True):
            if answer := self._answers.get(output.request):
                try:
                    piece = self._piece(answer, output, end)
                except Exception as error:  # such as the tokenizer's child process that exceeded a limit
                    piece = Piece(answer.index, error=as_request_error(error, 503))
                if not (piece.finish_reason or piece.error):
                    self._send(answer, piece)
                elif self._answers.pop(output.request, None):
                    self._end(answer, piece)

    def _piece(self, answer: RunningAnswer, output: StepOutput, end: str | None) -> Piece:
        if end == "error":
            return Piece(answer.index, error=RequestError(output.request.error or "", 500))
        text, now, offset = "", time.monotonic(), answer.text.length
        token = output.end_token if output.token is None else output.token
        tokens = [] if token is None or answer.scores_only else [token]
        if tokens:
            if output.end_token is None or answer.text.include_stop:
                text = answer.text.push(tokens[0])
            answer.tokens += 1
            waited = self.metrics.first_token if answer.newest is None else self.metrics.between_tokens
            waited.labels(answer.model).observe(now - (answer.newest or answer.start_time))
            answer.newest = now
        if end or answer.text.stopped:
            text += answer.text.finish()
        if answer.text.stopped:
            end = "stop"
        if error := getattr(answer.request.grammar, "error", ""):
            sentence = f"The schema, regex or grammar exceeds a limit: {error!s:.300}"
            return Piece(answer.index, error=RequestError(sentence))
        end = "length" if end == "capacity" or (end and answer.scores_only) else end
        answer.prompt_logprobs = output.prompt_logprobs or answer.prompt_logprobs
        return Piece(answer.index, text, tokens, offset, output.logprobs if tokens else None, end)

    def _end(self, answer: RunningAnswer, piece: Piece) -> None:
        if answer.request.finish_reason is None:  # a stop string, or an error
            self._submit(methodcaller("abort", answer.request))
        self.metrics.latency.labels(answer.model).observe(time.monotonic() - answer.start_time)
        self.metrics.success.labels(answer.model, piece.finish_reason or "error").inc()
        self._send(answer, piece)

    def _send(self, answer: RunningAnswer, piece: Piece) -> None:
        assert self._loop
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(answer.pieces.put_nowait, piece)
