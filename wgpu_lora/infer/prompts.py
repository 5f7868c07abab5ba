"""Conversion of a text, a conversation or a row to the token ids of a prompt, worded as in training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from wgpu_lora.data import Tokenizer
from wgpu_lora.data.example_formats import parse_example
from wgpu_lora.errors import UserError
from wgpu_lora.files.json_files import read_json
from wgpu_lora.formats.tokenizer.examples import ALPACA, CHAT, PROMPT_FORMATS, TEXT, Alpaca, Completion, Conversation
from wgpu_lora.formats.tokenizer.label_mask import ALPACA_START, alpaca_example, alpaca_prompt

Messages = Sequence[Mapping[str, Any]]
# A text, the messages of a conversation, an instruction, or a row of prompt and completion, which is continued as text.
Prompt = str | Messages | Alpaca | Completion


def chat_prompt(
    tokenizer: Tokenizer,
    prompt: Prompt,
    system: str | None = None,
    prompt_format: str | None = None,
    **template_kwargs: Any,
) -> list[int]:
    """Token ids of a prompt, worded as rows of its form are in training.

    Args:
        prompt: a text, or messages such as {"role": "user", "content": "Hello"}, or a row.
        prompt_format: of texts: the chat template ("chat"), Alpaca's wording ("alpaca") or the text as it is ("text");
            by default, the chat template if there is one, else the text as it is.
        template_kwargs: passed to the chat template (`enable_thinking=False`).

    Raises:
        UserError: the prompt has another type, or there is a system prompt or messages and no chat template, or the
            template rejects them.
    """
    if system is not None:
        check_text("system prompt", system)
    if prompt_format == ALPACA and isinstance(prompt, str):
        check_text("prompt", prompt)
        whole = prompt if prompt.startswith(ALPACA_START) else alpaca_prompt(Alpaca(prompt, "", "", system or ""))
        return tokenizer.opened(tokenizer.encode(whole))
    if isinstance(prompt, Alpaca):
        example = alpaca_example(replace(prompt, system=system or prompt.system), tokenizer)
        if isinstance(example, Completion):
            return tokenizer.opened(tokenizer.encode(example.prompt))
    messages = check_prompt(prompt)
    plain = prompt_format == TEXT and isinstance(prompt, str)
    if plain or isinstance(prompt, Completion) or not (tokenizer.has_chat_template or prompt_format == CHAT):
        if system is not None:
            why = "prompt has plain text" if tokenizer.has_chat_template else "model has no chat template"
            raise UserError(f"The {why}, so it cannot use a system prompt: leave it out.")
        if not isinstance(prompt, str | Completion):
            raise UserError("The model has no chat template, so it cannot use messages: give a text.")
        return tokenizer.opened(tokenizer.encode(prompt if isinstance(prompt, str) else prompt.prompt))
    if system is not None:
        if messages[0]["role"] == "system":
            raise UserError("The messages already begin with a system message: leave out one of the two.")
        messages = [{"role": "system", "content": system}, *messages]
    return tokenizer.encode(tokenizer.render(messages, None, True, template_kwargs))


def check_prompt(prompt: Prompt) -> list[dict[str, Any]]:
    """A prompt as messages. Raises UserError if it is neither a text nor messages that end with the user's."""
    if isinstance(prompt, Alpaca):
        return prompt.prompt_messages
    prompt = prompt.prompt if isinstance(prompt, Completion) else prompt
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


WORDINGS = {
    ALPACA: "prompts are put into Alpaca's wording, as in the adapter's training (--prompt-format alpaca)",
    TEXT: "prompts are continued as plain text, as in the adapter's training (--prompt-format text)",
}


def prompt_notes(
    tokenizer: Tokenizer, prompts: Sequence[Prompt], prompt_format: str | None, adapters: Iterable[str | Path]
) -> list[str]:
    """Notes on how prompts are formatted, which the user cannot see. prompt_format: the one that the user chose."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    trained = None if prompt_format or not texts else trained_prompt_format(adapters)
    notes = [WORDINGS[trained]] if trained in WORDINGS else []
    opening = tokenizer.prefix_ids
    if opening and any(tokenizer.encode(text)[:1] == opening[:1] for text in texts):
        notes.append("a prompt begins with the beginning-of-text token itself, so that no second one is added")
    return notes


def trained_prompt_format(adapters: Iterable[str | Path]) -> str | None:
    """The format of the rows that adapters were trained on, as far as their run.json or metadata.json says so.

    None if it is not known, if the rows had several formats, or if the adapters differ. These files are untrusted:
    an invalid value is ignored.
    """
    formats = {_recorded_format(Path(adapter)) for adapter in adapters}
    return formats.pop() if len(formats) == 1 else None


def _recorded_format(adapter: Path) -> str | None:
    for name in ("run.json", "metadata.json"):
        try:
            data = read_json(adapter / name).get("data")
        except UserError:
            continue
        value = data.get("prompt_format") if isinstance(data, dict) else None
        if value in PROMPT_FORMATS:
            return str(value)
    return None
