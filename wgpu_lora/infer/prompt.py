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
        UserError: a system prompt without a chat template, or one that the template refuses.
    """
    if not tokenizer.has_chat_template:
        if system is not None:
            raise UserError("The model has no chat template, so it cannot be given a system prompt: leave it out.")
        return tokenizer.opening + tokenizer.encode(prompt)
    messages = [{"role": "system", "content": system}] if system is not None else []
    messages.append({"role": "user", "content": prompt})
    return tokenizer.encode(tokenizer.render(messages, add_generation_prompt=True, **template_kwargs))
