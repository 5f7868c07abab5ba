"""OpenAI's Responses: a request as a chat, and what a chat adds to its answer as items and events."""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from secrets import token_hex
from typing import Any

from pydantic import ValidationError

from wgpu_lora.infer.serve.errors import RequestError
from wgpu_lora.infer.serve.schema import ChatRequest, Json, ResponsesRequest, SamplingRequest

MAX_STORED = 64 << 20  # characters of all stored items
LIKE_CHAT = (*SamplingRequest.model_fields, "chat_template_kwargs", "parallel_tool_calls", "top_logprobs")
LOGPROBS = "message.output_text.logprobs"  # of `include`
# Fields of a request that its response repeats, with their defaults.
REPEATED: Json = {
    "instructions": None, "max_output_tokens": None, "parallel_tool_calls": True, "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None}, "store": True, "temperature": 1.0, "tool_choice": "auto",
    "text": {"format": {"type": "text"}}, "tools": [], "top_p": 1.0, "truncation": "disabled", "metadata": {},
}  # fmt: skip


class ResponseStore:
    """The items of the newest responses, which later requests may refer to, within `MAX_STORED` characters."""

    def __init__(self) -> None:
        self._items: OrderedDict[str, tuple[int, list[Json]]] = OrderedDict()
        self._size = 0

    def add(self, response: Json, conversation: Sequence[Json]) -> None:
        """Store a response with the items of its conversation before it."""
        output = response["output"]
        for name, items in [(item["id"], [item]) for item in output] + [(response["id"], [*conversation, *output])]:
            size = len(json.dumps(items))
            self._items[name], self._size = (size, items), self._size + size
        while self._size > MAX_STORED:
            self._size -= self._items.popitem(last=False)[1][0]

    def find(self, name: str, param: str) -> list[Json]:
        """The items of a response, or an item. Raises RequestError."""
        if name not in self._items:
            sentence = f"There is no '{name:.100}' here, or no longer: send the whole conversation, with 'store' false."
            raise RequestError(sentence, 400, param, "previous_response_not_found")
        return self._items[name][1]


def as_chat(
    body: ResponsesRequest, raw: Mapping[str, Any], store: ResponseStore
) -> tuple[ChatRequest, Json, list[Json]]:
    """(a chat request, its JSON, the items of its conversation). Raises RequestError."""
    items = [{"role": "user", "content": raw["input"]}] if isinstance(raw["input"], str) else raw["input"]
    items = [
        stored
        for item in items
        for stored in (store.find(item["id"], "input") if item.get("type") == "item_reference" else [item])
    ]
    if body.previous_response_id is not None:
        items = [*store.find(body.previous_response_id, "previous_response_id"), *items]
    chat = {name: raw[name] for name in LIKE_CHAT if raw.get(name) is not None}
    messages = [{"role": "system", "content": body.instructions}] if body.instructions else []
    chat["messages"] = _messages(items, messages)
    if body.tools:
        chat["tools"] = [_nested(tool) for tool in raw["tools"]]
    choice = raw.get("tool_choice")
    if isinstance(choice, dict):
        tools = [_nested(tool) for tool in choice.get("tools", ())]
        allowed = {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
        choice = allowed if tools else _nested(choice)
    chat["tool_choice"] = choice
    text = body.text
    if text and text.format:
        form = {name: value for name, value in raw["text"]["format"].items() if name != "type"}
        more = {"json_schema": form} if text.format.type == "json_schema" else form
        chat["response_format"] = {"type": text.format.type, **more}
    chat["verbosity"] = text.verbosity if text else None
    chat["reasoning_effort"] = body.reasoning.effort if body.reasoning else None
    chat["max_completion_tokens"] = body.max_output_tokens
    chat["logprobs"] = body.top_logprobs is not None or LOGPROBS in (body.include or ())
    try:
        return ChatRequest.model_validate(chat), chat, items
    except ValidationError as error:
        raise RequestError(f"{error.errors()[0]['msg'].removeprefix('Value error, ')}.") from None


def _nested(tool: Json) -> Json:
    """A tool, or the name of one, as chats have it."""
    return {
        "type": tool.get("type", "function"),
        "function": {name: value for name, value in tool.items() if name != "type"},
    }


def _messages(items: Sequence[Json], result: list[Json]) -> list[Json]:
    """Items of a conversation as messages, behind those in `result`. Raises RequestError."""
    reasoning = ""
    for number, item in enumerate(items):
        kind, location = item.get("type") or "message", f"input[{number}]"
        last = result[-1] if result else {}
        if kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            reasoning = "".join(str(part.get("text", "")) for part in parts)
            continue
        if kind == "message":
            role = "system" if item["role"] == "developer" else item["role"]
            message: Json = {"role": role, "content": _text(item["content"], location)}
            if role == "system" == last.get("role"):
                last["content"] += "\n\n" + message["content"]
                continue
        elif kind == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            if last.get("role") == "assistant":
                last["tool_calls"] = [*last.get("tool_calls", []), call]
                continue
            message = {"role": "assistant", "content": None, "tool_calls": [call]}
        elif kind == "function_call_output":
            message = {"role": "tool", "tool_call_id": item["call_id"], "content": _text(item["output"], location)}
        else:
            raise RequestError(f"{location} has the type '{kind!s:.40}', which is not supported here.", param=location)
        if reasoning and message["role"] == "assistant":
            message["reasoning_content"] = reasoning
        reasoning = ""
        result.append(message)
    return result


def _text(content: str | list[Json], location: str) -> str:
    if isinstance(content, str):
        return content
    for part in content:
        if not isinstance(part.get("text", part.get("refusal")), str):
            kind = part.get("type")
            raise RequestError(
                f"{location} has content that is not text, but '{kind!s:.40}': leave it out.", param=location
            )
    return "".join(str(part.get("text", part.get("refusal"))) for part in content)


class ResponseEvents:
    """The events of a response, by which it grows: an item opens with its first piece, and closes with the next item.

    Args:
        body, raw: the request. model: its name.
    """

    def __init__(self, body: ResponsesRequest, raw: Mapping[str, Any], model: str) -> None:
        self._number = -1
        self.error: RequestError | None = None
        self._parts: list[str] = []  # of the text of the open item
        self._logprobs: list[Json] = []
        self._names: tuple[str, ...] = ()
        repeated = {name: default if raw.get(name) is None else raw[name] for name, default in REPEATED.items()}
        self.response: Json = {
            "id": f"resp_{token_hex(16)}", "object": "response", "created_at": int(time.time()), "model": model,
            "status": "in_progress", "error": None, "incomplete_details": None, "output": [], "usage": None, **repeated,
        }  # fmt: skip

    def event(self, kind: str, **fields: Any) -> str:
        self._number += 1
        data = {"type": kind, "sequence_number": self._number, **fields}
        return f"event: {kind}\ndata: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"

    def start(self) -> Iterator[str]:
        for kind in ("created", "in_progress"):
            yield self.event(f"response.{kind}", response=self.response)

    def add(self, choice: Json) -> Iterator[str]:
        """What a choice of a chat adds."""
        delta, logprobs = choice["delta"], (choice["logprobs"] or {}).get("content", [])
        if delta.get("reasoning"):
            yield from self._append("reasoning", delta["reasoning"], [])
        if delta.get("content") or (logprobs and self._is_open("message")):
            yield from self._append("message", delta.get("content") or "", logprobs)
        for call in delta.get("tool_calls", []):
            yield from self._close()
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            item = {"type": "function_call", "id": f"fc_{token_hex(16)}", "call_id": call["id"], "name": name,
                    "arguments": "", "status": "in_progress"}  # fmt: skip
            location = self._open(item)
            yield self.event("response.output_item.added", output_index=location["output_index"], item=item)
            yield self.event("response.function_call_arguments.delta", **location, delta=arguments)
            yield self.event("response.function_call_arguments.done", **location, name=name, arguments=arguments)
            item |= {"arguments": arguments, "status": "completed"}
            yield self.event("response.output_item.done", output_index=location["output_index"], item=item)

    def end(self, reason: str, usage: Json, more: Json) -> Iterator[str]:
        """reason: `length` or another of a chat. usage: of a chat. more: fields of the response."""
        status = "incomplete" if reason == "length" else "completed"
        yield from self._close(status)
        self.response |= {"status": status, **more}
        if status == "incomplete":
            self.response["incomplete_details"] = {"reason": "max_output_tokens"}
        self.response["usage"] = {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"],
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": usage["completion_tokens_details"],
            "total_tokens": usage["total_tokens"],
        }
        yield self.event(f"response.{status}", response=self.response)

    def fail(self, error: RequestError) -> Iterator[str]:
        self.error, fields = error, error.body()["error"]
        yield self.event("error", code=fields["code"] or fields["type"], message=str(error), param=error.param)
        self.response |= {"status": "failed", "error": {"code": "server_error", "message": str(error)}}
        yield self.event("response.failed", response=self.response)

    def _is_open(self, kind: str) -> bool:
        output = self.response["output"]
        return bool(output and output[-1]["type"] == kind and self._names)

    def _open(self, item: Json) -> Json:
        self.response["output"].append(item)
        return {"item_id": item["id"], "output_index": len(self.response["output"]) - 1}

    def _append(self, kind: str, text: str, logprobs: list[Json]) -> Iterator[str]:
        """Add to the open item of a kind, or open one."""
        message = kind == "message"
        if not self._is_open(kind):
            yield from self._close()
            item: Json = {"type": "reasoning", "id": f"rs_{token_hex(16)}", "summary": []}
            if message:
                item = {
                    "type": kind,
                    "id": f"msg_{token_hex(16)}",
                    "role": "assistant",
                    "status": "in_progress",
                    "content": [],
                }
            self._open(item)
            self._names = ("content_part", "output_text", "content_index") if message else (
                "reasoning_summary_part", "reasoning_summary_text", "summary_index"
            )  # fmt: skip
            yield self.event("response.output_item.added", output_index=len(self.response["output"]) - 1, item=item)
            yield self.event(f"response.{self._names[0]}.added", **self._location(), part=self._part("", []))
        self._parts.append(text)
        self._logprobs += logprobs
        more = {"logprobs": logprobs} if message else {}
        yield self.event(f"response.{self._names[1]}.delta", **self._location(), delta=text, **more)

    def _location(self) -> Json:
        output = self.response["output"]
        return {"item_id": output[-1]["id"], "output_index": len(output) - 1, self._names[2]: 0}

    def _part(self, text: str, logprobs: list[Json]) -> Json:
        if self._is_open("message"):
            return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
        return {"type": "summary_text", "text": text}

    def _close(self, status: str = "completed") -> Iterator[str]:
        if not self._names:
            return
        text, item, location = "".join(self._parts), self.response["output"][-1], self._location()
        part = self._part(text, self._logprobs)
        more = {"logprobs": self._logprobs} if item["type"] == "message" else {}
        yield self.event(f"response.{self._names[1]}.done", **location, text=text, **more)
        yield self.event(f"response.{self._names[0]}.done", **location, part=part)
        item |= {"content": [part], "status": status} if item["type"] == "message" else {"summary": [part]}
        yield self.event("response.output_item.done", output_index=location["output_index"], item=item)
        self._parts, self._logprobs, self._names = [], [], ()
