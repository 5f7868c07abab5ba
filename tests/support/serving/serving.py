"""A server in this process, whose engine is a deterministic fake."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from openai import OpenAI

from wgpu_lora.errors import UserError
from wgpu_lora.files.assets import DEMO_MODEL
from wgpu_lora.formats.peft_adapter import tensor_name, write_adapter
from wgpu_lora.formats.peft_config import AdapterConfig
from wgpu_lora.formats.tokenizer.local_tokenizer import LocalTokenizer
from wgpu_lora.formats.tokenizer.tokenizer import Tokenizer
from wgpu_lora.infer.request import EngineStats, Request, StepOutput, TokenLogprobs, uniform
from wgpu_lora.infer.serve.app import Access, make_app
from wgpu_lora.infer.serve.engine_thread import EngineThread
from wgpu_lora.infer.serve.grammars import Vocabulary
from wgpu_lora.infer.serve.http_server import HttpServer
from wgpu_lora.infer.serve.prompts import Limits
from wgpu_lora.infer.serve.service import Service
from wgpu_lora.models.model_files import read_model

VOCAB = 4099  # more than the tokenizer's, as in many models
NAME = "base"
LIMITS, OPEN = Limits(), Access()


def demo_tokenizer(template: str | None = None) -> Tokenizer:
    """The demo's tokenizer, with another chat template if one is given."""
    tokenizer = Tokenizer.load(DEMO_MODEL)
    assert tokenizer
    if template is None:
        return tokenizer
    backend = LocalTokenizer.open((DEMO_MODEL / "tokenizer.json").read_text(encoding="utf-8"))
    tokens = {"eos_token": tokenizer.eos_text or ""}
    return Tokenizer(backend, special_tokens=tokens, chat_templates={"default": template}, eos_ids=[tokenizer.eos_id])


def accepts(source: str | None, text: str) -> bool:
    """Whether a grammar, in llguidance's form, accepts a text as a whole answer."""
    tokenizer, words = demo_tokenizer(), np.zeros((VOCAB + 31) // 32, np.uint32)
    grammar = Vocabulary(tokenizer, VOCAB).compile(source or "")
    for token in [*tokenizer.encode(text), min(tokenizer.stop_ids)]:
        grammar.fill_mask(words)
        if not words[token // 32] >> (token % 32) & 1:
            return False
        if token not in tokenizer.stop_ids:
            grammar.accept(token)
    return True


@dataclass
class FakeEngine:
    """Draws each token from logits that depend on the newest two tokens and the adapter alone.

    script: the tokens of a request's answer instead, before its stop token; None for drawn ones.
    failure: raised by the next step. seconds: of a step.
    """

    script: Callable[[Request], list[int] | None] = lambda request: None
    max_model_len: int = 256
    sequences: int = 4
    seconds: float = 0.0
    failure: Exception | None = None
    adapters: dict[str, Any] = field(default_factory=dict)
    running: list[Request] = field(default_factory=list)
    waiting: list[Request] = field(default_factory=list)
    threads: set[int] = field(default_factory=set)  # that have called a method
    steps: int = 0
    aborted: int = 0
    closed: bool = False
    model: Any = field(
        default_factory=lambda: SimpleNamespace(config=SimpleNamespace(vocab_size=VOCAB), path=DEMO_MODEL)
    )

    def load_adapter(self, name: str, adapter: Any, matrices: Any) -> None:
        self.adapters[name] = adapter

    def unload_adapter(self, name: str) -> None:
        del self.adapters[name]

    @property
    def slots(self) -> SimpleNamespace:
        return SimpleNamespace(names=list(self.adapters))

    def add(self, request: Request) -> None:
        self.threads.add(threading.get_ident())
        if not request.prompt:
            raise UserError("The prompt has no tokens: give a text that is not empty.")
        if max(*request.prompt, *request.sampling.logit_bias, 0) >= VOCAB:
            raise UserError("A token is outside the model's vocabulary of 4,099: use the model's own tokenizer.")
        if request.adapter is not None and request.adapter not in self.adapters:
            raise UserError(f"There is no adapter {request.adapter}: load it.")
        self.waiting.append(request)

    def abort(self, request: Request) -> None:
        for requests in (self.running, self.waiting):
            if request in requests:
                requests.remove(request)
                request.finish_reason = "abort"
                self.aborted += 1

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)

    def step(self) -> list[StepOutput]:
        self.threads.add(threading.get_ident())
        self.steps += 1
        time.sleep(self.seconds)
        if self.failure:
            failure, self.failure = self.failure, None
            raise failure
        while self.waiting and len(self.running) < self.sequences:
            self.running.append(self.waiting.pop(0))
        outputs = [self._next(request) for request in self.running]
        self.running = [request for request in self.running if request.finish_reason is None]
        return outputs

    def _next(self, request: Request) -> StepOutput:
        first = not request.token_ids
        script = self.script(request)
        logits = self.logits([*request.prompt, *request.token_ids], request.adapter)
        distribution = logits
        if script is not None:
            at = len(request.token_ids)
            logits = np.full(VOCAB, -np.inf, np.float32)
            logits[script[at] if at < len(script) else max(request.stop_ids)] = 0
        if request.grammar:
            words = np.zeros((VOCAB + 31) // 32, np.uint32)
            request.grammar.fill_mask(words)
            allowed = np.unpackbits(words.view(np.uint8), bitorder="little")[:VOCAB].astype(bool)
            logits = np.where(allowed, logits, -np.inf).astype(np.float32)
            assert allowed.any()
        token = self._draw(logits, request)
        prompt_logprobs = None
        if request.prompt_logprobs and first:
            prompt_logprobs = [
                self._logprobs(self.logits(request.prompt[:n], request.adapter), request.prompt[n], request.logprobs)
                for n in range(1, len(request.prompt))
            ]
        if token in request.stop_ids:
            request.finish_reason = "stop"
            logprobs = None if request.logprobs is None else self._logprobs(distribution, token, request.logprobs)
            return StepOutput(request, None, logprobs, prompt_logprobs, token)
        request.token_ids.append(token)
        if request.grammar:
            request.grammar.accept(token)
        if len(request.token_ids) == request.max_new_tokens:
            request.finish_reason = "length"
        elif request.length >= self.max_model_len:
            request.finish_reason = "capacity"
        logprobs = None if request.logprobs is None else self._logprobs(distribution, token, request.logprobs)
        return StepOutput(request, token, logprobs, prompt_logprobs)

    @staticmethod
    def _draw(logits: np.ndarray, request: Request) -> int:
        for token, bias in request.sampling.logit_bias.items():
            logits[token] += bias
        if request.sampling.temperature == 0:
            return int(logits.argmax())
        weights = np.exp((logits.astype(np.float64) - logits.max()) / request.sampling.temperature)
        place = uniform(request.sampling.seed, request.length) * weights.sum()
        return int(np.searchsorted(np.cumsum(weights), place, side="right"))

    @staticmethod
    def logits(tokens: list[int], adapter: str | None) -> np.ndarray:
        seed = [*tokens[-2:], 0 if adapter is None else sum(adapter.encode())]
        logits = np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32) * 3
        logits[4096:] = -np.inf
        return logits

    @staticmethod
    def _logprobs(logits: np.ndarray, token: int, count: int | None) -> TokenLogprobs:
        values = logits - logits.max()
        values = values - np.log(np.exp(values).sum())
        best = np.argsort(-values, kind="stable")[: count or 0]
        return TokenLogprobs(token, float(values[token]), [(int(t), float(values[t])) for t in best])

    def stats(self) -> EngineStats:
        return EngineStats(len(self.running), len(self.waiting), 0.0, 0, 0, 0)

    def close(self) -> None:
        self.closed = True


@dataclass
class Serving:
    """A running server. made: the engines, the newest last."""

    url: str
    engine: EngineThread
    engines: list[FakeEngine]
    service: Service

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="key", max_retries=0, timeout=30)

    @property
    def fake(self) -> FakeEngine:
        return self.engines[-1]


@contextmanager
def serving(
    make: Callable[[], FakeEngine] = FakeEngine,
    *,
    template: str | None = None,
    adapters: tuple[str, ...] = ("tuned", "other"),
    limits: Limits = LIMITS,
    access: Access = OPEN,
    allow_runtime_lora: bool = False,
) -> Iterator[Serving]:
    """A server on a free port of this machine."""
    engines: list[FakeEngine] = []

    def engine(directories: Mapping[str, Path]) -> Any:
        engines.append(make())
        engines[-1].adapters |= dict.fromkeys(directories)
        return engines[-1]

    directories = {name: Path(name) for name in adapters}
    first = engine(directories)
    thread = EngineThread(first, engine, directories, NAME, first.sequences + limits.queue)
    first.model.tokenizer, decoder = demo_tokenizer(template), demo_tokenizer(template)
    service = Service(thread, first.model, decoder, first.max_model_len, NAME, limits)
    app = make_app(service, access, allow_runtime_lora)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        server = HttpServer(app)
        runner = threading.Thread(target=lambda: asyncio.run(server.serve([sock])))
        runner.start()
        try:
            yield Serving(f"http://127.0.0.1:{sock.getsockname()[1]}", thread, engines, service)
        finally:
            server.should_exit = True
            runner.join()
            thread.close()


def save_adapter(directory: Path, rank: int = 4, seed: int = 0, scale: float = 0.05, **config: Any) -> Path:
    """A random adapter of the demo model."""
    rng, tensors = np.random.default_rng(seed), {}
    for module, (rows, columns) in read_model(DEMO_MODEL).config.lora_modules.items():
        for factor, shape in (("A", (rank, columns)), ("B", (rows, rank))):
            tensors[tensor_name(module, factor)] = rng.normal(0, scale, shape).astype(np.float32)
        if config.get("use_dora"):
            tensors[tensor_name(module, "M")] = np.full(rows, 0.3, np.float32)
    write_adapter(directory, tensors, AdapterConfig(r=rank, lora_alpha=8, base_model_name_or_path="demo", **config))
    return directory
