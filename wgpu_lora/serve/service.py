"""What the endpoints of the server do, and the formats of their answers."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from secrets import token_hex
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from wgpu_lora.infer.answers import tokenizer_of
from wgpu_lora.infer.request import Request, TokenLogprobs
from wgpu_lora.infer.tool_calls import MARKERS, ToolCallParser, ToolFormat, tool_format
from wgpu_lora.models.adapter_modules import read_adapter_for
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.serve.engine_thread import AdapterFiles, EngineThread, Piece, RunningAnswer, StreamedText
from wgpu_lora.serve.errors import RequestError, as_request_error, unknown_model
from wgpu_lora.serve.grammars import Vocabulary, call_grammar, grammar_source
from wgpu_lora.serve.prompts import Limits, check_room, conversation_ids, samplers, text_ids
from wgpu_lora.serve.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    Json,
    LoadAdapter,
    LoraScale,
    TokenizeRequest,
    ToolName,
    UnloadAdapter,
)
from wgpu_lora.tokenizer.tokenizer import Tokenizer
from wgpu_lora.tokenizer.tokenizer_files import OWN_TOKENIZER, adapter_tokenizer

LEAST = -9999.0  # a log-probability of minus infinity, which JSON does not have


class Codec:
    """From text to tokens and back, for the model or for an adapter with its own tokenizer or chat template.

    Args:
        tokenizer: of prompts; `decoder` is the same one in another process, so that a long prompt stops no answer.
        vocab_size: of the model.
    """

    def __init__(self, tokenizer: Tokenizer, decoder: Tokenizer, vocab_size: int) -> None:
        self.tokenizer, self.decoder = tokenizer, decoder
        self.vocabulary = Vocabulary(decoder, vocab_size)
        self.vocabulary.bytes_of(0)  # takes a second the first time
        self.stop_ids = frozenset(tokenizer.stop_ids)
        ids = {tokenizer.token_id(text) or -1: text for text in MARKERS}
        self.markers = {token: text for token, text in ids.items() if token in tokenizer.special_ids}

    @cached_property
    def tool_format(self) -> ToolFormat:
        """Found with the tokenizer, and so in `Service.prepare` first. Raises UserError."""
        return tool_format(self.tokenizer)


class Service:
    """What the endpoints share.

    Args:
        model: with its tokenizer; `decoder` is the same one in another process.
        name: of the base model in the API.
    """

    def __init__(
        self,
        engine: EngineThread,
        model: LoadedModel,
        decoder: Tokenizer,
        max_model_len: int,
        name: str,
        limits: Limits,
    ) -> None:
        self.engine, self.name, self.limits = engine, name, limits
        self.max_model_len, self.start_time = max_model_len, int(time.time())
        self._config = model.config
        self._base = Codec(tokenizer_of(model), decoder, model.config.vocab_size)
        self._codecs: dict[str, Codec] = {}  # of adapters with their own
        for adapter, directory in engine.adapters.items():
            self._add_codec(adapter, directory)
        self._prompts = ThreadPoolExecutor(1, "serve-prompt")  # a tokenizer serves one at a time
        self._changes = asyncio.Lock()  # of who loads or unloads an adapter

    @property
    def notes(self) -> list[str]:
        """Sentences for the user about adapters that have their own tokenizer or chat template."""
        return [OWN_TOKENIZER.format(name) for name in self._codecs]

    def codec_of(self, body: Any) -> Codec:
        """The codec of the adapter that a request names. Raises RequestError."""
        adapter = self.adapter_of(body)
        return self._base if adapter is None else self._codecs.get(adapter, self._base)

    def _add_codec(self, name: str, directory: Path) -> None:
        """Add the codec of an adapter, if it has its own. Raises UserError."""
        pair = [
            adapter_tokenizer(base, self._config.vocab_size, directory)
            for base in (self._base.tokenizer, self._base.decoder)
        ]
        if pair[0] is not self._base.tokenizer:
            self._codecs[name] = Codec(pair[0], pair[1], self._config.vocab_size)

    async def prepare(self, act: Callable[..., Any], *arguments: Any) -> Any:
        """The result of a function that uses the tokenizer, which may take long."""
        return await asyncio.get_running_loop().run_in_executor(self._prompts, partial(act, *arguments))

    def adapter_of(self, body: GenerationRequest | TokenizeRequest | DetokenizeRequest) -> str | None:
        """The adapter that a request names, None for the base. Raises RequestError."""
        name: str | None = None if body.model in (None, self.name) else body.model
        if name is not None and name not in self.engine.adapters:
            raise unknown_model(name)
        lora: list[LoraScale] = getattr(body, "lora", None) or []
        scaled = [adapter for adapter in lora if adapter.scale != 0]
        if len(scaled) > 1:
            raise RequestError("'lora' names several adapters, whose sum is not supported: give one.", param="lora")
        for adapter in scaled:
            if adapter.scale != 1:
                raise RequestError(f"A scale of {adapter.scale:g} is not supported: use 1, or 0 for off.", param="lora")
            if name is not None:
                raise RequestError("'lora' and 'model' both name an adapter: leave out one of them.", param="lora")
            if adapter.id >= len(self.engine.adapters):
                raise RequestError(f"There is no adapter {adapter.id}: /v1/models lists them, from 0.", param="lora")
            return list(self.engine.adapters)[adapter.id]
        return name

    async def load_adapter(self, body: LoadAdapter, raw: Json) -> Response:
        """Goes on if the client leaves, as `unload_adapter` does."""
        return await asyncio.shield(self._load_adapter(body.lora_name, Path(body.lora_path)))

    async def _load_adapter(self, name: str, directory: Path) -> Response:
        async with self._changes:
            if name in self.engine.adapters or name == self.name:
                raise RequestError(f"The name '{name}' is taken: use another, or unload it first.", param="lora_name")
            if not os.path.isdir(directory):
                raise RequestError(f"There is no directory {directory!s:.1000}.", 404, "lora_path")
            read = await self._read(directory)
            await self.prepare(self._add_codec, name, directory)
            self.engine.adapters[name] = directory
            try:
                await self.engine.load(name, read)
            except BaseException:
                self._forget(name)
                raise
        return Response(f"Success: LoRA adapter '{name}' added successfully.", media_type="text/plain")

    async def _read(self, directory: Path) -> AdapterFiles:
        return await run_in_threadpool(read_adapter_for, self._config, directory)

    async def unload_adapter(self, body: UnloadAdapter, raw: Json) -> Response:
        return await asyncio.shield(self._unload_adapter(body.lora_name))

    async def _unload_adapter(self, name: str) -> Response:
        async with self._changes:
            if name not in self.engine.adapters:
                raise RequestError(f"There is no adapter '{name:.100}': /v1/models lists them.", 404, "lora_name")
            self._forget(name)
            await self.engine.call(lambda engine: engine.unload_adapter(name) if name in engine.slots.names else None)
        return Response(f"Success: LoRA adapter '{name}' removed successfully.", media_type="text/plain")

    def _forget(self, name: str) -> None:
        del self.engine.adapters[name]
        self._codecs.pop(name, None)

    async def answers(
        self,
        body: GenerationRequest,
        prompts: Sequence[Sequence[int]],
        source: str | None,
        max_tokens: int | None,
        default: int,
        markers: Mapping[int, str],
        **options: Any,
    ) -> list[RunningAnswer]:
        """The answers to prompts, `n` to each, which run now.

        Args:
            max_tokens: asked for; otherwise, as many of `default` as there is room for.
            options: further fields of `Request`.

        Raises:
            UserError: a prompt or an option is not possible.
        """
        adapter, codec = self.adapter_of(body), self.codec_of(body)
        stop = [body.stop] if isinstance(body.stop, str) else body.stop or []
        for prompt in prompts:
            check_room(prompt, max_tokens, self.max_model_len)
        if body.ignore_eos and source is not None:
            raise RequestError("'ignore_eos' cannot be used with a grammar, which has an end.", param="ignore_eos")
        stop_ids = {*(() if body.ignore_eos else codec.stop_ids), *(body.stop_token_ids or [])}
        draws = iter(samplers(body, len(prompts) * (body.n or 1)))
        grammar = await run_in_threadpool(codec.vocabulary.compile, source) if source is not None else None
        pieces: asyncio.Queue[Piece] = asyncio.Queue()
        result: list[RunningAnswer] = []
        for prompt in prompts:
            new_tokens = max_tokens or min(default, self.max_model_len - len(prompt))
            for draw in islice(draws, body.n or 1):
                request = Request(
                    list(prompt), adapter, draw, new_tokens, stop_ids, grammar=grammar and grammar.copy(), **options
                )
                text = StreamedText(codec.decoder, stop, markers)
                result.append(RunningAnswer(len(result), request, text, pieces, adapter or self.name))
        await self.engine.start(result, self._read)
        return result

    async def respond(
        self, body: GenerationRequest, kind: str, answers: Sequence[RunningAnswer], format: ChatFormat | TextFormat
    ) -> Response:
        """The response to a request whose answers run: a stream of events, or one object."""
        prefix = {"chat.completion": "chatcmpl", "text_completion": "cmpl"}[kind]
        head = {"id": f"{prefix}-{token_hex(12)}", "object": kind, "created": int(time.time())}
        head["model"] = body.model or self.name
        if body.stream:
            if kind == "chat.completion":
                head["object"] = "chat.completion.chunk"
            return AnswerStream(self.engine, answers, _events(body, head, answers, format))
        deltas: dict[int, list[Any]] = {answer.index: [] for answer in answers}
        try:
            async for piece in _pieces(answers):
                deltas[piece.index] += format.deltas(piece)
        finally:
            self.engine.stop(answers)
        choices = [format.whole(index, parts) for index, parts in deltas.items()]
        if body.return_token_ids:
            for choice, answer in zip(choices, answers, strict=True):
                choice["token_ids"] = answer.request.token_ids[: answer.tokens]
        return JSONResponse({**head, "choices": choices, "usage": usage(answers, body.n or 1)})

    # -- the smaller endpoints -----------------------------------------------------------------------------------------

    async def tokenize(self, body: TokenizeRequest, raw: Json) -> Response:
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("Give 'prompt' or 'messages', one of the two.")
        tokenizer = self.codec_of(body).tokenizer
        if body.prompt is None:
            ids = await self.prepare(conversation_ids, tokenizer, body, raw)
        else:
            ids = await self.prepare(text_ids, tokenizer, body.prompt, body.add_special_tokens)
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": self.max_model_len})

    async def detokenize(self, body: DetokenizeRequest, raw: Json) -> Response:
        return JSONResponse({"prompt": await self.prepare(self.codec_of(body).tokenizer.decode, body.tokens, False)})

    async def models(self, body: None, raw: None) -> Response:
        base = self.name
        listed = [(base, base, None), *((name, str(path), base) for name, path in self.engine.adapters.items())]
        shared = {
            "object": "model",
            "created": self.start_time,
            "owned_by": "wgpu-lora",
            "max_model_len": self.max_model_len,
        }
        data = [{"id": name, "root": root, "parent": parent, **shared} for name, root, parent in listed]
        return JSONResponse({"object": "list", "data": data})

    async def health(self, body: None, raw: None) -> Response:
        if self.engine.failure:
            raise as_request_error(self.engine.failure, 503)
        return Response()

    async def metrics(self, body: None, raw: None) -> Response:
        return Response(generate_latest(self.engine.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    # -- the endpoints -------------------------------------------------------------------------------------------------

    async def chat(self, body: ChatRequest, raw: Mapping[str, Any]) -> Response:
        codec = self.codec_of(body)
        prompt, source, parses = await self.prepare(self._prepare_chat, codec, body, raw)
        answers = await self.answers(
            body,
            [prompt],
            source,
            body.max_completion_tokens or body.max_tokens,
            self.max_model_len,
            codec.markers if parses else {},
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        )
        parsers = [ToolCallParser(codec.tool_format) if parses else None for _ in answers]
        return await self.respond(body, "chat.completion", answers, ChatFormat(codec.vocabulary, parsers))

    def _prepare_chat(
        self, codec: Codec, body: ChatRequest, raw: Mapping[str, Any]
    ) -> tuple[list[int], str | None, bool]:
        """(token ids, what the answer must follow, whether it may call tools)"""
        choice, tools = body.tool_choice or "auto", body.tools or []
        if not tools and choice not in ("auto", "none"):
            raise RequestError("'tool_choice' asks for a tool, but there are no 'tools'.", param="tool_choice")
        if body.top_logprobs and not body.logprobs:
            raise RequestError("'top_logprobs' needs 'logprobs': set it to true.", param="top_logprobs")
        source = grammar_source(body)
        if tools:
            form = codec.tool_format  # also if none may be called: the template must print them
            if isinstance(choice, ToolName):
                tools = [tool for tool in tools if tool.function.name == choice.function.name]
                if not tools:
                    raise RequestError(f"There is no tool '{choice.function.name:.64}'.", param="tool_choice")
            if choice not in ("auto", "none"):
                if source is not None:
                    raise RequestError("A forced call of a tool cannot follow another grammar: leave out one of them.")
                parallel = choice == "required" and body.parallel_tool_calls is not False
                source = call_grammar(form, tools, parallel, codec.tokenizer)
        return conversation_ids(codec.tokenizer, body, raw), source, bool(tools) and choice != "none"

    async def complete(self, body: CompletionRequest, raw: Mapping[str, Any]) -> Response:
        value: Any = body.prompt
        prompts = value if isinstance(value, list) and value and not isinstance(value[0], int) else [value]
        ids, texts, codec = [], [], self.codec_of(body)
        for prompt in prompts:
            ids.append(await self.prepare(text_ids, codec.tokenizer, prompt) if isinstance(prompt, str) else prompt)
            check_room(ids[-1], None, self.max_model_len)  # before they are decoded
            if body.echo:
                texts.append(prompt if isinstance(prompt, str) else await self.prepare(codec.tokenizer.decode, prompt))
        answers = await self.answers(
            body,
            ids,
            grammar_source(body),
            body.max_tokens,
            16,
            {},
            logprobs=body.logprobs,
            prompt_logprobs=bool(body.echo) and body.logprobs is not None,
        )
        echo = [texts[answer.index // (body.n or 1)] for answer in answers] if body.echo else [""] * len(answers)
        return await self.respond(body, "text_completion", answers, TextFormat(codec.vocabulary, answers, echo))


class AnswerStream(StreamingResponse):
    """Server-sent events of answers, which end with the connection."""

    def __init__(self, engine: EngineThread, answers: Sequence[RunningAnswer], events: AsyncIterator[str]) -> None:
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})
        self._engine, self._answers = engine, answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(asyncio.CancelledError):  # by uvicorn, once its time to end is over
                await super().__call__(scope, receive, send)
        finally:
            self._engine.stop(self._answers)


async def _pieces(answers: Sequence[RunningAnswer]) -> AsyncIterator[Piece]:
    """The pieces of all answers of a request, until the last has ended. Raises RequestError."""
    remaining = len(answers)
    while remaining:
        piece = await answers[0].pieces.get()
        if piece.error:
            raise piece.error
        yield piece
        remaining -= piece.finish_reason is not None


async def _events(
    body: GenerationRequest, head: dict[str, Any], answers: Sequence[RunningAnswer], format: ChatFormat | TextFormat
) -> AsyncIterator[str]:
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    extra: dict[str, Any] = {"usage": None} if include_usage else {}
    for answer in answers:
        for choice in format.start(answer.index):
            yield _event({**head, "choices": [choice], **extra})
    try:
        async for piece in _pieces(answers):
            for choice in format.deltas(piece):
                yield _event({**head, "choices": [choice], **extra})
        if include_usage:
            yield _event({**head, "choices": [], "usage": usage(answers, body.n or 1)})
    except RequestError as error:
        yield _event(error.body())
    yield "data: [DONE]\n\n"


def _event(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"


def usage(answers: Sequence[RunningAnswer], count: int) -> Json:
    """Of all answers of a request, `count` to each prompt, which counts once."""
    requests = [answer.request for answer in answers[::count]]
    prompt = sum(len(request.prompt) for request in requests)
    completion = sum(answer.tokens for answer in answers)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(request.cached_tokens for request in requests)},
    }


# -- choices -----------------------------------------------------------------------------------------------------------


class ChatFormat:
    """Pieces of answers as choices of a chat. parsers: of calls of tools, one an answer."""

    def __init__(self, vocabulary: Vocabulary, parsers: Sequence[ToolCallParser | None]) -> None:
        self._vocabulary, self._parsers = vocabulary, parsers

    def start(self, index: int) -> list[Json]:
        delta: Json = {"role": "assistant", "content": ""}
        return [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}]

    def deltas(self, piece: Piece) -> list[Json]:
        parser, end, delta = self._parsers[piece.index], piece.finish_reason, Json()
        content = piece.text
        if parser:
            content, calls = parser.push(piece.text, end is not None)
            if calls:
                first = len(parser.calls) - len(calls)
                delta["tool_calls"] = [{"index": number, **call} for number, call in enumerate(calls, first)]
            if parser.calls and end == "stop":
                end = "tool_calls"
        if content:
            delta["content"] = content
        if not (delta or end or piece.logprobs):
            return []
        logprobs = [self._logprob(piece.logprobs)] if piece.logprobs else []
        return [
            {
                "index": piece.index,
                "delta": delta,
                "logprobs": {"content": logprobs} if logprobs else None,
                "finish_reason": end,
            }
        ]

    def whole(self, index: int, deltas: Sequence[Json]) -> Json:
        calls = [call for delta in deltas for call in delta["delta"].get("tool_calls", [])]
        content = "".join(delta["delta"].get("content") or "" for delta in deltas)
        message: Json = {"role": "assistant", "content": content if content or not calls else None}
        if calls:
            message["tool_calls"] = calls
        logprobs = [value for delta in deltas if delta["logprobs"] for value in delta["logprobs"]["content"]]
        return {
            "index": index,
            "message": message,
            "logprobs": {"content": logprobs} if logprobs else None,
            "finish_reason": deltas[-1]["finish_reason"],
        }

    def _logprob(self, value: TokenLogprobs) -> Json:
        top = [self._top(*pair) for pair in value.top]
        return {**self._top(value.token, value.logprob), "top_logprobs": top}

    def _top(self, token: int, logprob: float) -> Json:
        text = self._vocabulary.bytes_of(token)
        return {"token": text.decode("utf-8", "replace"), "logprob": max(logprob, LEAST), "bytes": list(text)}


class TextFormat:
    """Pieces of answers as choices of a completion. echo: the prompt's text, which each answer begins with."""

    def __init__(self, vocabulary: Vocabulary, answers: Sequence[RunningAnswer], echo: Sequence[str]) -> None:
        self._vocabulary, self._answers, self._echo = vocabulary, answers, list(echo)
        self._offsets = [0] * len(answers)

    def start(self, index: int) -> list[Json]:
        return []

    def deltas(self, piece: Piece) -> list[Json]:
        text, self._echo[piece.index] = self._echo[piece.index] + piece.text, ""
        values: list[TokenLogprobs | int] = []  # the first token of a prompt has no probability
        if piece.prompt_logprobs is not None:
            values += [self._answers[piece.index].request.prompt[0], *piece.prompt_logprobs]
        if piece.logprobs:
            values.append(piece.logprobs)
        if not (text or values or piece.finish_reason):
            return []
        logprobs = self._logprobs(piece.index, values) if values else None
        return [{"index": piece.index, "text": text, "logprobs": logprobs, "finish_reason": piece.finish_reason}]

    def whole(self, index: int, deltas: Sequence[Json]) -> Json:
        parts: list[Any] = [delta["logprobs"] for delta in deltas if delta["logprobs"]]
        logprobs: Any = (
            {name: [value for part in parts for value in part[name]] for name in parts[0]} if parts else None
        )
        return {
            "index": index,
            "text": "".join(delta["text"] for delta in deltas),
            "logprobs": logprobs,
            "finish_reason": deltas[-1]["finish_reason"],
        }

    def _logprobs(self, index: int, values: Sequence[TokenLogprobs | int]) -> Json:
        result: Json = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for value in values:
            token, logprob, top = (value, None, None) if isinstance(value, int) else self._logprob_entry(value)
            text = self._text(token)
            for column, item in zip(result.values(), (text, logprob, top, self._offsets[index]), strict=True):
                column.append(item)
            self._offsets[index] += len(text)
        return result

    def _logprob_entry(self, value: TokenLogprobs) -> tuple[int, float, dict[str, float]]:
        top = {self._text(token): max(logprob, LEAST) for token, logprob in value.top}
        return value.token, max(value.logprob, LEAST), top

    def _text(self, token: int) -> str:
        return self._vocabulary.bytes_of(token).decode("utf-8", "replace")
