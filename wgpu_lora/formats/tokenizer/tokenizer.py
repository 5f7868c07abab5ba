"""A checkpoint's tokenizer, with its special tokens and chat template."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import tokenizers

from wgpu_lora.errors import UserError
from wgpu_lora.files.assets import DEMO_MODEL
from wgpu_lora.files.atomic import file_digest
from wgpu_lora.formats.tokenizer.chat_template import DATE, LimitError, Message, Span, now
from wgpu_lora.formats.tokenizer.examples import Conversation, Example, example_json
from wgpu_lora.formats.tokenizer.local_tokenizer import LocalTokenizer
from wgpu_lora.formats.tokenizer.tokenizer_json import TokenizerError
from wgpu_lora.formats.tokenizer.tokenizer_process import TokenizerProcess
from wgpu_lora.formats.tokenizer.tokenizer_settings import read_added_tokens, read_settings
from wgpu_lora.processes.child_process import ChildEnded

MAX_BYTES = 64 << 20  # of a tokenizer.json; the largest vocabularies take half of it
MAX_TEXT = 2 << 20  # bytes of a text, about half a million tokens, which take less than a gigabyte
TEMPLATE = "chat_template.jinja"


class Tokenizer:
    """A `tokenizer.json` with the settings of the files beside it.

    Args:
        backend: the tokenizer, in a child process if it or a chat template is untrusted. Truncation and padding of a
            `tokenizers.Tokenizer` are switched off.
        special_tokens: `{"eos_token": "</s>", ...}`, as variables for the chat template.
        chat_templates: jinja2 source by name: "default", and optionally "tool_use" for conversations with tools.
        eos_ids: additional ids that end a generation (`generation_config.json`).
        digest: SHA-256 of the `tokenizer.json` that it was read from.
        template_origin: where the default chat template comes from, for messages, such as ` in DIRECTORY`.
    """

    def __init__(
        self,
        backend: LocalTokenizer | TokenizerProcess | tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str] | None = None,
        chat_templates: dict[str, str] | None = None,
        eos_ids: list[int] | None = None,
        digest: str | None = None,
        template_origin: str = "",
    ) -> None:
        self._backend = LocalTokenizer(backend) if isinstance(backend, tokenizers.Tokenizer) else backend
        self.is_local = isinstance(self._backend, LocalTokenizer)
        self.notes, self.digest, self.template_origin = self._backend.info.notes, digest, template_origin
        self._special_tokens = dict(special_tokens or {})
        self._chat_templates = dict(chat_templates or {})
        self._eos_ids = list(eos_ids or [])

    @classmethod
    def load(cls, directory: Path) -> Tokenizer | None:
        """Load the tokenizer of a checkpoint folder; None if there is no `tokenizer.json`.

        Raises:
            UserError: a file cannot be read or is invalid.
        """
        path = Path(directory) / "tokenizer.json"
        if not path.exists():
            return None
        settings, added_tokens = read_settings(path.parent), read_added_tokens(path.parent)
        try:
            if not path.is_file() or path.stat().st_size > MAX_BYTES:
                raise TokenizerError(f"it is not a regular file of at most {MAX_BYTES:,} bytes")
            document = path.read_text(encoding="utf-8")
            backend = LocalTokenizer.open if _is_demo(document, settings["chat_templates"]) else TokenizerProcess
            return cls(backend(document, added_tokens), **settings, digest=file_digest(path))
        except (OSError, ValueError, TokenizerError) as error:
            raise UserError(f"{path} is not a supported tokenizer ({error}); download it again.") from error

    def for_adapter(self, directory: Path) -> Tokenizer:
        """The tokenizer that an adapter was trained with: itself, if the files beside the adapter say the same as it.

        Otherwise it has the adapter's tokenizer.json, chat templates and special tokens, as far as they are there; the
        further end tokens stay those of the model.

        Raises:
            UserError: a file cannot be read or is invalid.
        """
        path = Path(directory) / "tokenizer.json"
        settings = read_settings(path.parent)
        templates = settings["chat_templates"] or self._chat_templates
        special_tokens = {**self._special_tokens, **settings["special_tokens"]}
        other = None
        if path.is_file() and file_digest(path) != self.digest:
            other = Tokenizer.load(path.parent)
            assert other is not None
            if other.files()["tokenizer.json"] == self.files()["tokenizer.json"]:
                other = None
        if other is None and (templates, special_tokens) == (self._chat_templates, self._special_tokens):
            return self
        return Tokenizer(
            other._backend if other else self._backend,
            special_tokens=special_tokens,
            chat_templates=templates,
            eos_ids=self._eos_ids,
            digest=other.digest if other else self.digest,
            template_origin=settings["template_origin"] if settings["chat_templates"] else self.template_origin,
        )

    def files(self) -> dict[str, str]:
        """Contents of the files that `load` reads, by name."""
        settings = {**self._special_tokens, "tokenizer_class": "PreTrainedTokenizerFast"}
        result = {
            "tokenizer.json": self._call("The tokenizer cannot be saved", "to_json"),
            "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
        }
        if self._eos_ids:
            result["generation_config.json"] = json.dumps({"eos_token_id": self._eos_ids}) + "\n"
        for name, source in self._chat_templates.items():
            result[TEMPLATE if name == "default" else f"additional_chat_templates/{name}.jinja"] = source
        return result

    def _call(self, problem: str, method: str, *arguments: Any, **options: Any) -> Any:
        """The value of a method of `LocalTokenizer`, whose error is raised as a sentence that begins with `problem`."""
        try:
            return self._backend.call(method, *arguments, **options)
        except TokenizerError as error:
            raise UserError(f"{problem} ({error}): use the model's own files.") from error
        except ChildEnded as error:
            raise LimitError(f"{problem}: {error}; use the model's own files.") from error

    def encode(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """Token ids of `text`; with `add_special_tokens`, including those that the tokenizer adds, such as bos.

        `tokenizer.json` determines which are added, as in transformers 5; `add_bos_token` in `tokenizer_config.json`,
        which sometimes contradicts it, is ignored.
        """
        return self.encode_all([text], add_special_tokens)[0]

    def encode_all(self, texts: list[str], add_special_tokens: bool = False) -> list[list[int]]:
        """Token ids of several texts; see `encode`."""
        for text in texts:
            _check_length(text)
        return self._call(_failed_on("".join(texts)), "encode", texts, add_special_tokens)

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[Span]]:
        """Token ids of a text, and the characters `[start, end)` of each id."""
        _check_length(text)
        ids, offsets = self._call(_failed_on(text), "encode_with_offsets", text)
        return ids, list(zip(offsets[::2], offsets[1::2], strict=True))

    def tokenize(self, examples: Sequence[Example], *options: Any) -> Iterator[dict[str, Any]]:
        """Have the child process turn examples into ids and labels, with the options of `label_mask.tokenize`.

        Raises:
            LimitError: a limit was exceeded, at the example whose answer is asked for next.
        """
        texts = [example_json(example) for example in examples]
        factor = 1 + max(len(example.trained) if isinstance(example, Conversation) else 0 for example in examples)
        request = partial(self._call, "The tokenizer or the chat template failed", "tokenize", self._settings)
        try:
            yield from request(texts, *options, factor=factor)
        except LimitError:  # find the example, since others may be fine
            for text in texts:
                yield from request([text], *options, factor=factor)

    @cached_property
    def _settings(self) -> str:
        """JSON of the arguments from which the child process makes this tokenizer."""
        names = ("special_tokens", "chat_templates", "eos_ids")
        return json.dumps(
            {name: getattr(self, f"_{name}") for name in names} | {"template_origin": self.template_origin}
        )

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        problem = "The tokenizer cannot decode the generated tokens"
        return self._call(problem, "decode", [int(id) for id in ids], skip_special_tokens)

    def token_id(self, token: str) -> int | None:
        return self._call(_failed_on(token), "token_to_id", token)

    def _special_id(self, name: str) -> int | None:
        token = self._special_tokens.get(name)
        return None if token is None else self.token_id(token)

    @cached_property
    def eos_id(self) -> int | None:
        """The id of eos_token; the first of generation_config if the tokenizer has none."""
        token_id = self._special_id("eos_token")
        return token_id if token_id is not None else next(iter(self._eos_ids), None)

    @property
    def eos_text(self) -> str | None:
        """The text of eos; None if the settings do not name it."""
        return self._special_tokens.get("eos_token")

    @cached_property
    def prefix_ids(self) -> list[int]:
        """Ids of the special tokens that the tokenizer adds before every text: bos, or none."""
        bare, whole = self.encode("a"), self.encode("a", add_special_tokens=True)
        starts = [i for i in range(len(whole)) if whole[i : i + len(bare)] == bare]
        return whole[: starts[0]] if starts else []

    def opened(self, ids: list[int]) -> list[int]:
        """Ids of a text behind `prefix_ids`, unless the text begins with it itself: models expect a single bos."""
        opening = self.prefix_ids
        return ids if opening and ids[:1] == opening[:1] else opening + ids

    @cached_property
    def bos_id(self) -> int | None:
        return self._special_id("bos_token")

    @cached_property
    def pad_id(self) -> int | None:
        return self._special_id("pad_token")

    @cached_property
    def unk_id(self) -> int | None:
        return self._special_id("unk_token")

    @property
    def vocab_size(self) -> int:
        """Largest token id plus one. A model's embedding may have more rows."""
        return self._backend.info.vocab_size

    @cached_property
    def special_texts(self) -> tuple[str, ...]:
        """Texts of all special tokens."""
        return tuple(token.content for token in self._backend.info.added if token.special and token.content)

    @cached_property
    def end_texts(self) -> tuple[str, ...]:
        """Texts of the tokens that may end an answer: all special tokens and those of `eos_ids`."""
        ends = {*self._eos_ids, self.eos_id}
        return tuple(token.content for token in self._backend.info.added if token.special or token.id in ends)

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids of all special tokens."""
        return frozenset(token.id for token in self._backend.info.added if token.special)

    @cached_property
    def stop_ids(self) -> set[int]:
        """Ids that end a generation: all eos ids, and the end token of an assistant's turn."""
        return {id for id in (*self._eos_ids, self.eos_id, self._turn_end_id()) if id is not None}

    def _turn_end_id(self) -> int | None:
        """The special token that the chat template adds after an assistant's message, such as <|im_end|>."""
        answer = "zanzibar"
        if not self.has_chat_template:
            return None
        try:
            text = self.render([{"role": "user", "content": "a"}, {"role": "assistant", "content": answer}])
        except UserError:
            return None  # errors of the template are reported when it is used
        after = text.rpartition(answer)[2].lstrip()
        result = [token for token in self.special_texts if after.startswith(token)]
        return self.token_id(max(result, key=len)) if result else None

    @property
    def has_chat_template(self) -> bool:
        return bool(self._chat_templates)

    @property
    def prints_date(self) -> bool:
        """Whether a chat template prints the current date or time."""
        return any("strftime_now" in source for source in self._chat_templates.values())

    @property
    def chat_templates(self) -> dict[str, str]:
        """Sources of the chat templates, by name."""
        return dict(self._chat_templates)

    def render(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render a conversation with the chat template and additional `variables` (`{"enable_thinking": False}`).

        Raises:
            UserError: there is no chat template, or it fails on this conversation.
        """
        return self.render_with_spans(messages, tools, add_generation_prompt, variables)[0]

    def render_with_spans(
        self,
        messages: list[Message],
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[Span]]:
        """Like `render`, with the character spans that the template marks with `{% generation %}`."""
        templates = self._chat_templates
        source = templates.get("tool_use") if tools else None
        source = source if source is not None else templates.get("default")
        if source is None:
            raise UserError(
                f"The tokenizer has no default chat template, only {', '.join(sorted(templates))}: name one 'default'."
                if templates
                else "The tokenizer has no chat template, so conversations cannot be rendered; "
                "use rows of text or of prompt and completion, or the tokenizer of a chat model."
            )
        template_variables = {DATE: now(), **(variables or {})}
        fixed = self._special_tokens, self.template_origin
        problem = f"The chat template{self.template_origin} cannot render a conversation"
        text, spans = self._call(
            problem, "render", source, messages, tools, add_generation_prompt, template_variables, *fixed
        )
        return text, [(start, end) for start, end in spans]


class StreamDecoder:
    """Decodes token ids one by one, and only returns complete characters.

    A character may consist of several tokens, and decoders treat the first token of a text differently. So the previous
    piece is decoded again as context, and text that ends with an incomplete character is held back.

    Args:
        prompt: what the tokens continue, whose last ones are the first context.
    """

    _MOST_TOKENS_OF_A_CHARACTER = 8  # UTF-8 needs at most four; more than this are invalid bytes

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool = True, prompt: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._context = [*prompt[-self._MOST_TOKENS_OF_A_CHARACTER :]]
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        """Add a token and return the text that is now complete (often empty)."""
        if self._skip_special_tokens and token_id in self._tokenizer.special_ids:
            return ""
        self._pending.append(token_id)
        text = self._text()
        if text.endswith("\ufffd") and len(self._pending) < self._MOST_TOKENS_OF_A_CHARACTER:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        """Return the text that was held back, with U+FFFD for incomplete characters."""
        return self._emit(self._text())

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens)

    def _text(self) -> str:
        return self._decode(self._context + self._pending)[len(self._decode(self._context)) :]

    def _emit(self, text: str) -> str:
        if text:  # tokens without text stay pending, since they are no context
            self._context, self._pending = self._pending, []
        return text


def _is_demo(document: str, chat_templates: dict[str, str]) -> bool:
    """Whether tokenizer and chat templates are the demo's, which are trusted."""
    demo, template = ((DEMO_MODEL / name).read_text(encoding="utf-8") for name in ("tokenizer.json", TEMPLATE))
    return document == demo and {*chat_templates.values()} <= {template}


def _check_length(text: str) -> None:
    if len(text) > MAX_TEXT or (not text.isascii() and len(text.encode(errors="replace")) > MAX_TEXT):
        raise UserError(
            f"a text of {len(text):,} characters is more than {MAX_TEXT >> 20} MiB: split it into shorter ones."
        )


def _failed_on(text: str) -> str:
    return f"The tokenizer failed on {text!r:.60}"
