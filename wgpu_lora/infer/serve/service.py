"""What the endpoints of the server do, and the formats of their answers."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from secrets import token_hex
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from wgpu_lora.formats.tokenizer.reasoning import marks_of
from wgpu_lora.formats.tokenizer.tokenizer import Tokenizer
from wgpu_lora.formats.tokenizer.tokenizer_files import OWN_TOKENIZER, adapter_tokenizer
from wgpu_lora.infer.answers import tokenizer_of
from wgpu_lora.infer.request import Request
from wgpu_lora.infer.serve.choices import ChatFormat, ReasoningParser, TextFormat, TokenTexts, choice_deltas, usage
from wgpu_lora.infer.serve.engine_thread import AdapterFiles, EngineThread, Piece, RunningAnswer, StreamedText
from wgpu_lora.infer.serve.errors import RequestError, as_request_error, unknown_model
from wgpu_lora.infer.serve.grammars import AnswerForm, Vocabulary, answer_form, call_form
from wgpu_lora.infer.serve.json_schemas import SchemaChecker
from wgpu_lora.infer.serve.prompts import Limits, check_room, conversation_text, samplers, text_ids
from wgpu_lora.infer.serve.responses import ResponseEvents, ResponseStore, as_chat
from wgpu_lora.infer.serve.schema import (
    AllowedTools,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    Json,
    LoadAdapter,
    LoraScale,
    ResponsesRequest,
    TokenizeRequest,
    ToolName,
    UnloadAdapter,
)
from wgpu_lora.infer.tool_calls import MARKERS, ToolCallParser, ToolFormat, tool_format
from wgpu_lora.models.adapter_modules import read_adapter_for
from wgpu_lora.models.loaded_model import LoadedModel

NOT_ENFORCED = "X-Not-Enforced"  # header: what of a request an answer may not follow


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
        self.template = "\n".join(tokenizer.chat_templates.values())
        self.reasoning_marks = marks_of([self.template])
        self.call_markers, self.reasoning_markers = (
            {token: text for text in texts if (token := tokenizer.token_id(text)) in tokenizer.special_ids}
            for texts in (MARKERS, self.reasoning_marks or ())
        )

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
        settings = [version("wgpu-lora"), name, model.config.vocab_size, max_model_len]
        self.fingerprint = "fp_" + hashlib.sha256(repr(settings).encode()).hexdigest()[:10]
        self._checker, self._stored = SchemaChecker(), ResponseStore()
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
        lora: list[LoraScale] | None = getattr(body, "lora", None)
        if lora is not None and name is not None:
            raise RequestError("'lora' and 'model' both name an adapter: leave out one of them.", param="lora")
        scaled = [adapter for adapter in lora or [] if adapter.scale != 0]
        if len(scaled) > 1:
            raise RequestError("'lora' names several adapters, whose sum is not supported: give one.", param="lora")
        for adapter in scaled:
            if adapter.scale != 1:
                raise RequestError(f"A scale of {adapter.scale:g} is not supported: use 1, or 0 for off.", param="lora")
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
        form: AnswerForm,
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
        if body.ignore_eos and form.source is not None:
            raise RequestError("'ignore_eos' cannot be used with a grammar, which has an end.", param="ignore_eos")
        stop_ids = {*(() if body.ignore_eos else codec.stop_ids), *(body.stop_token_ids or [])}
        draws = iter(samplers(body, len(prompts) * (body.n or 1)))
        grammar = None if form.source is None else await run_in_threadpool(codec.vocabulary.compile, form.source)
        pieces: asyncio.Queue[Piece] = asyncio.Queue()
        result: list[RunningAnswer] = []
        for prompt in prompts:
            new_tokens = min(default, self.max_model_len - len(prompt)) if max_tokens is None else max_tokens
            if (body.min_tokens or 0) > new_tokens:
                sentence = f"'min_tokens' is {body.min_tokens:,}, but there may be {new_tokens:,} tokens: lower it."
                raise RequestError(sentence, param="min_tokens")
            for draw in islice(draws, body.n or 1):
                limited = codec.vocabulary.restricted(body, grammar, stop_ids)
                request = Request(list(prompt), adapter, draw, new_tokens or 1, stop_ids, grammar=limited, **options)
                text = StreamedText(
                    codec.decoder,
                    stop,
                    markers,
                    include_stop=bool(body.include_stop_str_in_output),
                    skip_special_tokens=body.skip_special_tokens is not False,
                    min_tokens=body.min_tokens or 0,
                    prompt=prompt if isinstance(body, CompletionRequest) else (),
                )
                result.append(RunningAnswer(len(result), request, text, pieces, adapter or self.name, new_tokens == 0))
        await self.engine.start(result, self._read)
        return result

    def truncated(self, body: GenerationRequest, prompt: list[int], new_tokens: int) -> list[int]:
        """The last tokens of a prompt, if the request limits their number. new_tokens: room for the answer."""
        most = body.truncate_prompt_tokens
        if most is None:
            return prompt
        return prompt[-(most if most > 0 else max(1, self.max_model_len - max(1, new_tokens))) :]

    def head(self, kind: str, model: str | None) -> Json:
        """Fields that begin an answer."""
        prefix = {"chat.completion": "chatcmpl", "text_completion": "cmpl"}[kind]
        head = {"id": f"{prefix}-{token_hex(12)}", "object": kind, "created": int(time.time())}
        return {**head, "model": model or self.name, "system_fingerprint": self.fingerprint}

    async def respond(self, run: Run, kind: str) -> Response:
        """The response to a request whose answers run: a stream of events, or one object."""
        head, body = self.head(kind, run.body.model), run.body
        if body.stream:
            if kind == "chat.completion":
                head["object"] = "chat.completion.chunk"
            return AnswerStream(self.engine, run, self._events(run, head))
        choices = await self.choices(run)
        for answer, choice in zip(run.answers, choices, strict=True):
            target = head if kind == "chat.completion" else choice  # as in vLLM
            if body.return_token_ids:
                target["prompt_token_ids"] = answer.request.prompt
            if body.prompt_logprobs is not None:
                target["prompt_logprobs"] = run.texts.of_prompt(answer.prompt_logprobs or [], body.prompt_logprobs)
        checks = await self.checks(run, choices)
        return JSONResponse({**head, "choices": choices, "usage": run.usage(), **checks}, headers=run.headers)

    async def choices(self, run: Run) -> list[Json]:
        """The whole choices of answers that run. Raises RequestError."""
        deltas: dict[int, list[Any]] = {answer.index: [] for answer in run.answers}
        try:
            async for choice in choice_deltas(self.engine, run.answers, run.format):
                deltas[choice["index"]].append(choice)
        finally:
            self.engine.stop(run.answers)
        return [run.format.whole(index, parts) for index, parts in deltas.items()]

    async def checks(self, run: Run, choices: Sequence[Json]) -> Json:
        """Whether each choice follows its schemas, as a field of the answer; none if the grammar holds all of them."""
        if not run.form.not_enforced:
            return {}
        rows, schemas = [], run.form.schemas
        for choice in choices:
            message = choice.get("message") or {"content": choice["text"]}
            functions = [call["function"] for call in message.get("tool_calls", [])]
            pairs = [(schemas.get(function["name"], True), function["arguments"]) for function in functions]
            rows.append(pairs or [(schemas.get(None, False), message["content"] or "")])
        checked = zip(choices, await self._checker.check(rows), strict=True)
        return {
            "schema_check": [{"index": c["index"], "valid": valid, "error": error} for c, (valid, error) in checked]
        }

    async def _events(self, run: Run, head: Json) -> AsyncIterator[str]:
        options = run.body.stream_options
        include_usage = options is not None and options.include_usage
        extra: Json = {"usage": None} if include_usage else {}
        deltas: dict[int, list[Json]] = {answer.index: [] for answer in run.answers}
        for answer in run.answers:
            for choice in run.format.start(answer.index):
                yield _event({**head, "choices": [choice], **extra})
        ended = 0
        try:
            async for choice in choice_deltas(self.engine, run.answers, run.format):
                if run.form.not_enforced:
                    deltas[choice["index"]].append(choice)
                ended += choice["finish_reason"] is not None
                if ended == len(run.answers):
                    extra |= await self.checks(run, [run.format.whole(*item) for item in deltas.items() if item[1]])
                yield _event({**head, "choices": [choice], **extra})
            if include_usage:
                yield _event({**head, "choices": [], **extra, "usage": run.usage()})
        except RequestError as error:
            yield _event(error.body())
        yield "data: [DONE]\n\n"

    # -- the smaller endpoints -----------------------------------------------------------------------------------------

    async def tokenize(self, body: TokenizeRequest, raw: Json) -> Response:
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("Give 'prompt' or 'messages', one of the two.")
        tokenizer = self.codec_of(body).tokenizer
        if body.prompt is None:
            text = await self.prepare(conversation_text, tokenizer, body, raw)
            ids = await self.prepare(tokenizer.encode, text)
        else:
            ids = await self.prepare(text_ids, tokenizer, body.prompt, body.add_special_tokens)
        return JSONResponse({"tokens": ids, "count": len(ids), "max_model_len": self.max_model_len})

    async def detokenize(self, body: DetokenizeRequest, raw: Json) -> Response:
        return JSONResponse({"prompt": await self.prepare(self.codec_of(body).tokenizer.decode, body.tokens, False)})

    async def models(self, body: None, raw: Json) -> Response:
        return JSONResponse({"object": "list", "data": self._models()})

    async def model(self, body: None, raw: Json) -> Response:
        for model in self._models():
            if model["id"] == raw["model"]:
                return JSONResponse(model)
        raise unknown_model(raw["model"])

    def _models(self) -> list[Json]:
        base = self.name
        listed = [(base, base, None), *((name, str(path), base) for name, path in self.engine.adapters.items())]
        shared = {
            "object": "model",
            "created": self.start_time,
            "owned_by": "wgpu-lora",
            "max_model_len": self.max_model_len,
        }
        return [{"id": name, "root": root, "parent": parent, **shared} for name, root, parent in listed]

    async def health(self, body: None, raw: Json) -> Response:
        if self.engine.failure:
            raise as_request_error(self.engine.failure, 503)
        return Response()

    async def metrics(self, body: None, raw: Json) -> Response:
        return Response(generate_latest(self.engine.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    # -- the endpoints -------------------------------------------------------------------------------------------------

    async def chat(self, body: ChatRequest, raw: Mapping[str, Any]) -> Response:
        return await self.respond(await self.start_chat(body, raw), "chat.completion")

    async def responses(self, body: ResponsesRequest, raw: Mapping[str, Any]) -> Response:
        chat, chat_raw, items = as_chat(body, raw, self._stored)
        run = await self.start_chat(chat, chat_raw)
        growing = ResponseEvents(body, raw, body.model or self.name)
        events = self._response_events(run, growing, items if body.store is not False else None)
        if body.stream:
            return AnswerStream(self.engine, run, events)
        try:
            async for _ in events:
                pass
        finally:
            self.engine.stop(run.answers)
        if growing.error:
            raise growing.error
        return JSONResponse(growing.response, headers=run.headers)

    async def _response_events(
        self, run: Run, growing: ResponseEvents, conversation: list[Json] | None
    ) -> AsyncIterator[str]:
        """conversation: items before the response, to store with it; None to store nothing."""
        deltas: list[Json] = []
        for event in growing.start():
            yield event
        try:
            async for choice in choice_deltas(self.engine, run.answers, run.format):
                deltas.append(choice)
                for event in growing.add(choice):
                    yield event
            checks = await self.checks(run, [run.format.whole(0, deltas)])
            for event in growing.end(deltas[-1]["finish_reason"], run.usage(), checks):
                yield event
            if conversation is not None:
                self._stored.add(growing.response, conversation)
        except RequestError as error:
            for event in growing.fail(error):
                yield event

    async def start_chat(self, body: ChatRequest, raw: Mapping[str, Any]) -> Run:
        """A chat whose answers run. Raises UserError."""
        codec, count = self.codec_of(body), body.n or 1
        max_tokens = body.max_completion_tokens or body.max_tokens
        chat = await self.prepare(self._prepare_chat, codec, body, raw)
        ids = await self.prepare(codec.tokenizer.encode, chat.text)
        prompt = self.truncated(body, ids, max_tokens or self.max_model_len // 4)
        top = (body.top_logprobs or 0) if body.logprobs else None
        wanted = [value for value in (top, body.prompt_logprobs) if value is not None]
        answers = await self.answers(
            body,
            [prompt],
            chat.form,
            max_tokens,
            self.max_model_len,
            {**codec.reasoning_markers, **(codec.call_markers if chat.calls else {})},
            logprobs=max(wanted, default=None),
            prompt_logprobs=body.prompt_logprobs is not None,
        )
        texts = TokenTexts(codec.vocabulary, body)
        parsers = [ToolCallParser(codec.tool_format, **chat.calls) if chat.calls else None for _ in range(count)]
        marks = codec.reasoning_marks if chat.form.source is None else None
        reasonings = [ReasoningParser(marks, chat.thinks) if marks else None for _ in range(count)]
        format = ChatFormat(texts, parsers, reasonings, top, bool(body.return_token_ids))
        ignored = [
            name
            for name in ("reasoning_effort", "verbosity")
            if getattr(body, name) is not None and name not in codec.template
        ]
        if "names" in chat.calls and any(tool.function.strict for tool in body.tools or ()):
            ignored.append("strict")  # calls that are not forced follow no grammar
        return Run(body, answers, format, texts, chat.form, ignored)

    def _prepare_chat(self, codec: Codec, body: ChatRequest, raw: Mapping[str, Any]) -> _Chat:
        choice, tools, names = body.tool_choice or "auto", body.tools or [], None
        if not tools and choice not in ("auto", "none"):
            raise RequestError("'tool_choice' asks for a tool, but there are no 'tools'.", param="tool_choice")
        if body.top_logprobs and not body.logprobs:
            raise RequestError("'top_logprobs' needs 'logprobs': set it to true.", param="top_logprobs")
        form, calls = answer_form(body), Json()
        if tools:
            tool_format = codec.tool_format  # also if none may be called: the template must print them
            if isinstance(choice, AllowedTools):
                names = [tool.function.name for tool in choice.allowed_tools.tools]
            elif isinstance(choice, ToolName):
                names = [choice.function.name]
            for name in names or ():
                if name not in [tool.function.name for tool in tools]:
                    raise RequestError(f"There is no tool '{name:.64}'.", param="tool_choice")
            mode = choice.allowed_tools.mode if isinstance(choice, AllowedTools) else choice
            if isinstance(choice, AllowedTools):  # those that may not be called are not shown
                pairs = zip(tools, raw["tools"], strict=True)
                raw = {**raw, "tools": [shown for tool, shown in pairs if tool.function.name in (names or ())]}
            callable_tools = [tool for tool in tools if names is None or tool.function.name in names]
            if mode == "auto":
                callable_names = [tool.function.name for tool in callable_tools]
                calls = {"names": callable_names, "single": body.parallel_tool_calls is False}
                if form.closed is not None:  # calls, or an answer with a schema
                    form = call_form(tool_format, callable_tools, not calls["single"], codec.tokenizer, form)
            elif mode != "none":
                if form.source is not None and body.response_format is None:  # which a call alone has no content for
                    raise RequestError("A forced call of a tool cannot follow another grammar: leave out one of them.")
                parallel = mode == "required" and body.parallel_tool_calls is not False
                form = call_form(tool_format, callable_tools, parallel, codec.tokenizer)
                calls = {"forced": True}
        text = conversation_text(codec.tokenizer, body, raw)
        begin, end = codec.reasoning_marks or ("", "")
        thinks = bool(begin) and text.rstrip().endswith(begin)
        if thinks and form.source is not None:  # reasoning does not follow a grammar, so the answer begins behind it
            text, thinks = f"{text.rstrip()}\n\n{end}\n\n", False
        return _Chat(text, form, calls, thinks)

    async def complete(self, body: CompletionRequest, raw: Mapping[str, Any]) -> Response:
        value: Any = body.prompt
        prompts = value if isinstance(value, list) and value and not isinstance(value[0], int) else [value]
        ids, echo, codec, default = [], [], self.codec_of(body), 16
        tokenizer = codec.tokenizer
        for prompt in prompts:
            if isinstance(prompt, str):
                prompt = await self.prepare(text_ids, tokenizer, prompt, body.add_special_tokens)
            ids.append(self.truncated(body, prompt, default if body.max_tokens is None else body.max_tokens))
            check_room(ids[-1], body.max_tokens, self.max_model_len)  # before they are decoded
            text = await self.prepare(tokenizer.decode, ids[-1], False) if body.echo else ""
            echo += [text] * (body.n or 1)
        form = answer_form(body)
        wanted = [value for value in (body.logprobs, body.prompt_logprobs) if value is not None]
        scored = (bool(body.echo) and body.logprobs is not None) or body.prompt_logprobs is not None
        answers = await self.answers(
            body, ids, form, body.max_tokens, default, {}, logprobs=max(wanted, default=None), prompt_logprobs=scored
        )
        texts = TokenTexts(codec.vocabulary, body)
        format = TextFormat(texts, answers, echo, body.logprobs, bool(body.return_token_ids))
        return await self.respond(Run(body, answers, format, texts, form), "text_completion")


@dataclass(frozen=True)
class _Chat:
    """A conversation for the model. calls: arguments of the parser of calls, none if there may be no calls. thinks:
    whether the text ends within the reasoning."""

    text: str
    form: AnswerForm
    calls: Json
    thinks: bool


@dataclass(frozen=True)
class Run:
    """A request whose answers run. ignored: fields that change nothing, such as those that no chat template reads."""

    body: GenerationRequest
    answers: Sequence[RunningAnswer]
    format: ChatFormat | TextFormat
    texts: TokenTexts
    form: AnswerForm
    ignored: Sequence[str] = ()

    @property
    def headers(self) -> dict[str, str]:
        names = [*sorted(self.form.not_enforced), *self.ignored]
        return {NOT_ENFORCED: ", ".join(names)} if names else {}

    def usage(self) -> Json:
        tokens = self.format.reasoning_tokens if isinstance(self.format, ChatFormat) else None
        return usage(self.answers, self.body.n or 1, tokens)


class AnswerStream(StreamingResponse):
    """Server-sent events of answers, which end with the connection."""

    def __init__(self, engine: EngineThread, run: Run, events: AsyncIterator[str]) -> None:
        headers = {"Cache-Control": "no-cache", **run.headers}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._engine, self._answers = engine, run.answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            with suppress(asyncio.CancelledError):  # by uvicorn, once its time to end is over
                await super().__call__(scope, receive, send)
        finally:
            self._engine.stop(self._answers)


def _event(value: Any) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False, separators=(',', ':'))}\n\n"
