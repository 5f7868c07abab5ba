"""A checkpoint's tokenizer: text to token ids and back, its special tokens and its chat template."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from wgpu_lora.bounded import read_json
from wgpu_lora.data import template
from wgpu_lora.data.template import Message, Span
from wgpu_lora.errors import UserError

_SUBWORD_PREFIX = re.compile(rb'"continuing_subword_prefix"\s*:\s*+(?!null|"")')
MAX_BYTES = 64 << 20  # the largest vocabularies take half of it
MAX_GROWTH = 16.0
MAX_TEMPLATE = 1 << 20
MAX_ID = 1 << 22  # sixteen times what the largest vocabularies have


class Tokenizer:
    """A `tokenizer.json` with the settings that stand beside it.

    Args:
        backend: the `tokenizers` pipeline; it is taken over (its truncation and padding are switched off).
        special_tokens: `{"eos_token": "</s>", ...}`, every name a chat template may ask for.
        chat_templates: jinja2 source by name; "default" is used, "tool_use" instead of it when tools are given.
        eos_ids: further ids that end a generation (`generation_config.json`).
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str] | None = None,
        chat_templates: dict[str, str] | None = None,
        eos_ids: list[int] | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        # Post-processors add special tokens, but the byte-level one also trims spaces off the offsets,
        # which would put a turn's first space outside of its span. Plain encoding goes without.
        self._plain = tokenizers.Tokenizer.from_str(backend.to_str())
        self._plain.post_processor = None
        self._special_tokens = dict(special_tokens or {})
        self._chat_templates = dict(chat_templates or {})
        self._eos_ids = list(eos_ids or [])

    @classmethod
    def load(cls, directory: Path) -> Tokenizer | None:
        """Reads the tokenizer of a checkpoint folder, or None where there is no `tokenizer.json`.

        Raises:
            UserError: one of its files cannot be read or is not what it should be.
        """
        path = Path(directory) / "tokenizer.json"
        if not path.exists():
            return None
        config = _read_object(path.with_name("tokenizer_config.json"))
        settings: dict[str, Any] = {
            "special_tokens": _special_tokens(config, _read_object(path.with_name("special_tokens_map.json"))),
            "chat_templates": _chat_templates(path.parent, config),
            "eos_ids": _generation_eos(path.with_name("generation_config.json")),
        }
        try:
            return cls(_read_backend(path), **settings)
        except BaseException as error:  # the library raises plain Exception, and where Rust panics not even that
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise UserError(f"{path} is not a tokenizer that can be read ({error}); download it again.") from error

    def files(self) -> dict[str, str]:
        """What `load` reads, by file name."""
        settings = {**self._special_tokens, "tokenizer_class": "PreTrainedTokenizerFast"}
        found = {
            "tokenizer.json": self._backend.to_str(),
            "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
        }
        if self._eos_ids:
            found["generation_config.json"] = json.dumps({"eos_token_id": self._eos_ids}) + "\n"
        for name, source in self._chat_templates.items():
            found["chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja"] = source
        return found

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`; with `add_special_tokens` also those that the tokenizer puts around it (bos, say).

        What it puts there is for `tokenizer.json` to say, as in transformers 5: `add_bos_token` in
        `tokenizer_config.json`, which sometimes contradicts it, is not looked at.
        """
        return self._encoded(text, add_special_tokens).ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[Span]]:
        """Token ids of `text`, and for each the characters `[start, end)` of `text` that it stands for."""
        encoding = self._encoded(text, False)
        return encoding.ids, encoding.offsets

    def _encoded(self, text: str, add_special_tokens: bool) -> tokenizers.Encoding:
        try:
            backend = self._backend if add_special_tokens else self._plain
            return backend.encode(text, add_special_tokens=add_special_tokens)
        except Exception as error:  # the library raises plain Exception
            raise UserError(f"The tokenizer does not take {text!r:.60} ({error}): use the model's own.") from error

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        return self._backend.decode([int(id) for id in ids], skip_special_tokens=skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def _named_id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self.token_id(token)

    @property
    def eos_id(self) -> int | None:
        """The id that ends a text; generation_config's first one where the tokenizer names none."""
        named = self._named_id("eos_token")
        return named if named is not None else next(iter(self._eos_ids), None)

    @cached_property
    def opening(self) -> list[int]:
        """The special tokens that the tokenizer puts in front of every text: its bos, or nothing."""
        bare, whole = self.encode("a"), self.encode("a", add_special_tokens=True)
        starts = [i for i in range(len(whole)) if whole[i : i + len(bare)] == bare]
        return whole[: starts[0]] if starts else []

    @property
    def bos_id(self) -> int | None:
        return self._named_id("bos_token")

    @property
    def pad_id(self) -> int | None:
        return self._named_id("pad_token")

    @cached_property
    def vocab_size(self) -> int:
        """One more than the greatest token id (a model's embedding may be padded beyond it)."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """The texts of all special tokens."""
        added = self._backend.get_added_tokens_decoder().values()
        return tuple(token.content for token in added if token.special and token.content)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of all special tokens."""
        return frozenset(id for id, token in self._backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def stop_ids(self) -> set[int]:
        """Ids after which a generation is over: every eos, and the token that ends an assistant's turn."""
        return {id for id in (*self._eos_ids, self.eos_id, self._turn_end_id()) if id is not None}

    def _turn_end_id(self) -> int | None:
        """The special token that the chat template writes after an assistant's words (such as <|im_end|>)."""
        answer = "zanzibar"
        if not self.has_chat_template:
            return None
        try:
            text = self.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}])
        except UserError:
            return None  # an odd template is reported when somebody renders with it
        after = text.rpartition(answer)[2].lstrip()
        found = [token for token in self.special_texts if after.startswith(token)]
        return self.token_id(max(found, key=len)) if found else None

    @property
    def has_chat_template(self) -> bool:
        return bool(self._chat_templates)

    def render(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> str:
        """The conversation as text, by the chat template; `kwargs` reach the template (`enable_thinking=False`).

        Raises:
            UserError: there is no chat template, or it does not take this conversation.
        """
        return self.render_with_spans(messages, tools, add_generation_prompt, **kwargs)[0]

    def render_with_spans(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        **kwargs: Any,
    ) -> tuple[str, list[Span]]:
        """As `render`, with the character spans that the template marks with `{% generation %}`."""
        templates = self._chat_templates
        source = templates.get("tool_use") if tools else None
        source = source if source is not None else templates.get("default")
        if source is None:
            raise UserError(
                f"The tokenizer has no default chat template, only {', '.join(sorted(templates))}."
                if templates
                else "The tokenizer has no chat template, so conversations cannot be rendered; "
                "use rows of text or of prompt and completion, or the tokenizer of a chat model."
            )
        return template.render(source, messages, tools, add_generation_prompt, **{**self._special_tokens, **kwargs})


class StreamDecoder:
    """Turns token ids into text one by one, and never gives out half a character.

    A character may be spread over several tokens, and decoders treat the first token of a text differently;
    so the last complete piece is decoded again as context, and text that ends in a broken character waits.
    """

    _MOST_TOKENS_OF_A_CHARACTER = 8  # UTF-8 needs four; more than this are broken bytes and not worth waiting for

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Text that is complete now that `token_id` has come (often empty)."""
        if self._skip_special_tokens and token_id in self._tokenizer.special_ids:
            return ""
        self._pending.append(token_id)
        text = self._text()
        if text.endswith("\ufffd") and len(self._pending) < self._MOST_TOKENS_OF_A_CHARACTER:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        """What is still held back; broken characters come as U+FFFD."""
        return self._emit(self._text())

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)

    def _text(self) -> str:
        return self._decode(self._context + self._pending)[len(self._decode(self._context)) :]

    def _emit(self, text: str) -> str:
        if text:  # a token without text stays pending: it is no use as context
            self._context, self._pending = self._pending, []
        return text


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file() or path.stat().st_size > MAX_BYTES:
        raise ValueError(f"it is no regular file of at most {MAX_BYTES:,} bytes")
    if _SUBWORD_PREFIX.search(path.read_bytes()):
        # WordPiece's, not BPE's: a merge without it ends the process inside of the library.
        raise ValueError("its continuing_subword_prefix is not supported")
    backend = tokenizers.Tokenizer.from_file(str(path))
    # The library goes over all ids up to the greatest, whether they are there or not.
    if max(backend.get_vocab(with_added_tokens=True).values(), default=0) > MAX_ID:
        raise ValueError(f"it has a token id beyond {MAX_ID:,}")
    if backend.normalizer and _growth(json.loads(backend.normalizer.__getstate__())) > MAX_GROWTH:
        raise ValueError("its normalizers make a text much longer")
    return backend


def _growth(normalizer: dict[str, Any]) -> float:
    """How many times as long as a text is what the Replace steps may make of it."""
    if normalizer["type"] == "Sequence":
        return math.prod(map(_growth, normalizer["normalizers"]))
    if normalizer["type"] != "Replace":
        return 1.0
    return max(1.0, len(normalizer["content"]) / max(1, len(normalizer["pattern"].get("String", ""))))


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object from a file, empty where there is no such file."""
    return read_json(path) if path.exists() else {}


def _special_tokens(config: dict[str, Any], token_map: dict[str, Any]) -> dict[str, str]:
    # Old checkpoints keep the truth in special_tokens_map.json; those that list `added_tokens_decoder` do not.
    newer_wins = {**token_map, **config} if "added_tokens_decoder" in config else {**config, **token_map}
    tokens = {}
    for name, value in newer_wins.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            tokens[name] = text
    return tokens


def _chat_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    files = {path.stem: path for path in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
    if (directory / "chat_template.jinja").exists():
        files["default"] = directory / "chat_template.jinja"
    try:
        if files:
            return {name: _template(path) for name, path in files.items()}
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"A chat template in {directory} cannot be read ({error}); download it again.") from error
    source = config.get("chat_template")
    if isinstance(source, list):
        try:
            return {str(entry["name"]): str(entry["template"]) for entry in source}
        except (TypeError, KeyError) as error:
            where = directory / "tokenizer_config.json"
            raise UserError(f"{where}: every entry of 'chat_template' needs a 'name' and a 'template'.") from error
    return {"default": source} if isinstance(source, str) else {}


def _template(path: Path) -> str:
    if not path.is_file() or path.stat().st_size > MAX_TEMPLATE:
        raise UserError(f"{path} is no regular file of at most {MAX_TEMPLATE:,} bytes; download it again.")
    return path.read_text(encoding="utf-8")


def _generation_eos(path: Path) -> list[int]:
    value = _read_object(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(id, int) and not isinstance(id, bool) for id in ids):
        raise UserError(f"{path}: 'eos_token_id' is {value!r}, but must be a token id or a list of them.")
    return ids
