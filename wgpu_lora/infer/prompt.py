"""Conversion of a text or a conversation to the token ids of a prompt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from wgpu_lora.data import Tokenizer
from wgpu_lora.data.examples import Conversation
from wgpu_lora.data.formats import parse_example
from wgpu_lora.errors import UserError

Messages = Sequence[Mapping[str, Any]]
Prompt = str | Messages  # a text, or the messages of a conversation


def chat_prompt(tokenizer: Tokenizer, prompt: Prompt, system: str | None = None, **template_kwargs: Any) -> list[int]:
    """Token ids of a prompt, using the chat template if there is one, else the plain text as in training.

    Args:
        prompt: a text, or messages such as {"role": "user", "content": "Hello"}.
        template_kwargs: passed to the chat template (`enable_thinking=False`).

    Raises:
        UserError: the prompt has another type, or there is a system prompt or messages and no chat template, or the
            template rejects them.
    """
    if system is not None:
        check_text("system prompt", system)
    messages = check_prompt(prompt)
    if not tokenizer.has_chat_template:
        if system is not None:
            raise UserError("The model has no chat template, so it cannot use a system prompt: leave it out.")
        if not isinstance(prompt, str):
            raise UserError("The model has no chat template, so it cannot use messages: give a text.")
        return tokenizer.opening + tokenizer.encode(prompt)
    if system is not None:
        if messages[0]["role"] == "system":
            raise UserError("The messages already begin with a system message: leave out one of the two.")
        messages = [{"role": "system", "content": system}, *messages]
    return tokenizer.encode(tokenizer.render(messages, None, True, template_kwargs))


def check_prompt(prompt: Prompt) -> list[dict[str, Any]]:
    """A prompt as messages. Raises UserError if it is neither a text nor messages that end with the user's."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        check_text("prompt", prompt)
        return [{"role": "user", "content": prompt}]
    if not prompt:
        raise UserError("The prompt has no messages: give at least one.")
    try:
        example = parse_example({"messages": [{**message} for message in prompt]})  # type: ignore[dict-item]
    except TypeError:
        raise UserError(f"The prompt must be text or a list of messages, not {prompt!r:.100}.") from None
    assert isinstance(example, Conversation)
    if example.messages[-1]["role"] == "assistant":
        raise UserError("The last message is the assistant's, so there is nothing to answer: end with the user's.")
    for message in example.messages:
        if isinstance(message.get("content"), str):
            check_text("prompt", message["content"])
    return example.messages


def check_text(name: str, value: Any) -> None:
    """Raise UserError unless `value` is text that can be tokenised."""
    if not isinstance(value, str):
        raise UserError(f"The {name} must be text, not {value!r:.100}.")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # undecodable bytes from a terminal or a pipe
        raise UserError(f"The {name} is not valid UTF-8: convert it to UTF-8.") from None
