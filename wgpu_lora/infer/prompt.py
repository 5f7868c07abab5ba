"""A person's words as the token ids that ask for an answer."""

from __future__ import annotations

from typing import Any

from wgpu_lora.data import Tokenizer
from wgpu_lora.errors import UserError


def chat_prompt(tokenizer: Tokenizer, prompt: str, system: str | None = None, **template_kwargs: Any) -> list[int]:
    """Token ids that ask for an answer: through the chat template if there is one, else the text as training has it.

    Args:
        template_kwargs: reach the chat template (`enable_thinking=False`).

    Raises:
        UserError: what is given is not text, or a system prompt has no chat template or one that refuses it.
    """
    check_text("prompt", prompt)
    if system is not None:
        check_text("system prompt", system)
    if not tokenizer.has_chat_template:
        if system is not None:
            raise UserError("The model has no chat template, so it cannot be given a system prompt: leave it out.")
        return tokenizer.opening + tokenizer.encode(prompt)
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": prompt})
    return tokenizer.encode(tokenizer.render(messages, None, True, template_kwargs))


def check_text(name: str, value: Any) -> None:
    """Raises UserError unless `value` is text that a tokenizer takes."""
    if not isinstance(value, str):
        raise UserError(f"The {name} must be text, not {value!r:.100}.")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:  # bytes of a terminal or a pipe that were no characters
        raise UserError(f"The {name} is not valid UTF-8: write its characters out, or save it as UTF-8.") from None
