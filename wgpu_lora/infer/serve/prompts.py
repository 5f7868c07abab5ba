"""From the body of a request to requests of the engine."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from wgpu_lora.data.messages import TRAINED, checked_messages, checked_tools
from wgpu_lora.data.unread_columns import is_of_training
from wgpu_lora.errors import UserError
from wgpu_lora.formats.tokenizer.chat_template import DATE, check_date, check_variables
from wgpu_lora.formats.tokenizer.tokenizer import Tokenizer
from wgpu_lora.infer.prompts import chat_prompt, check_text
from wgpu_lora.infer.request import Sampler
from wgpu_lora.infer.serve.errors import RequestError
from wgpu_lora.infer.serve.schema import ChatMessages, GenerationRequest


@dataclass(frozen=True)
class Limits:
    """Of what clients may send. body: bytes, in this many seconds. queue: answers that wait, beside those that run."""

    body: int = 4 << 20
    queue: int = 256
    seconds: float = 30.0


def conversation_text(tokenizer: Tokenizer, body: ChatMessages, raw: Mapping[str, Any]) -> str:
    """A conversation, worded as rows are in training.

    Args:
        raw: the body's JSON, since templates print tools with their keys in the order that they came in.

    Raises:
        UserError: a message is wrong, or the chat template refuses them.
    """
    if not tokenizer.has_chat_template:
        raise RequestError("The model has no chat template, so it cannot use messages: use /v1/completions.")
    messages = checked_messages([_plain(message) for message in raw["messages"]], "messages")
    tools = checked_tools(raw.get("tools"), "tools")
    for message in messages:
        check_text("prompt", message["content"] or "")
    variables = template_variables(body)
    check_variables(variables)
    if DATE in variables:
        check_date(str(variables[DATE]))
    final = messages[-1]["content"] if body.continue_final_message else None
    text = tokenizer.render(messages, tools, body.add_generation_prompt and final is None, variables)
    if final is not None:
        if not final.strip() or final.strip() not in text:
            raise UserError(
                "The last message has no text to continue: add some, or leave out 'continue_final_message'."
            )
        text = text[: text.rindex(final.strip()) + len(final.strip())]
    return text


def _plain(message: Any) -> Any:
    """A message without fields of training; an assistant's that has neither content nor calls is empty."""
    if not isinstance(message, dict):
        return message
    message = {name: value for name, value in message.items() if not (name in TRAINED or is_of_training(name))}
    if message.get("role") == "assistant" and not (message.get("tool_calls") or message.get("function_call")):
        message["content"] = "" if message.get("content") is None else message["content"]
    return message


def template_variables(body: ChatMessages) -> dict[str, Any]:
    """What a request gives the chat template beside the conversation."""
    named = {"reasoning_effort": body.reasoning_effort, "verbosity": body.verbosity}
    variables: dict[str, Any] = {name: value for name, value in named.items() if value is not None}
    if body.reasoning_effort == "none":
        variables["enable_thinking"] = False
    return {**variables, **(body.chat_template_kwargs or {})}


def text_ids(tokenizer: Tokenizer, text: str, special: bool = True) -> list[int]:
    """Token ids of a text to continue; with `special`, behind the tokens that the tokenizer adds before every text."""
    check_text("prompt", text)
    return chat_prompt(tokenizer, text, prompt_format="text") if special else tokenizer.encode(text)


def samplers(body: GenerationRequest, count: int) -> list[Sampler]:
    """Of each of a request's answers: with a seed, of their own seeds from it on; without, of random ones."""
    options: dict[str, Any] = {
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": body.top_p,
        "top_k": max(0, body.top_k or 0),
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "logit_bias": body.logit_bias,
    }
    options = {name: value for name, value in options.items() if value is not None}
    first = secrets.randbits(62) if body.seed is None else body.seed
    return [Sampler(**options, seed=first + number) for number in range(count)]


def check_room(prompt: Sequence[int], new_tokens: int | None, length: int) -> None:
    """Raises RequestError if a prompt with its answer has more than `length` tokens."""
    size = f"{len(prompt):,} tokens" + (f" and an answer of {new_tokens:,}" if new_tokens else "")
    if len(prompt) + (1 if new_tokens is None else new_tokens) > length:
        raise RequestError(
            f"The prompt of {size} is more than this server's {length:,} tokens: shorten it, or ask for less.",
            code="context_length_exceeded",
        )
