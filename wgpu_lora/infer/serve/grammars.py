"""Answers that follow a JSON schema, a regex or a grammar, by llguidance: which tokens may come next.

Text that a client sends is compiled within limits, so that a hostile one ends in an error: at most `MAX_TEXT`
characters, and llguidance's own limits, of which `GRAMMAR_LIMITS` lowers those that cost memory. Compiling ends within
its fuel (about 20 ms, and some time for each KB of text), and a step's mask within its own (about 15 ms).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer

from wgpu_lora.errors import UserError
from wgpu_lora.formats.tokenizer.tokenizer import Tokenizer
from wgpu_lora.infer.request import Grammar
from wgpu_lora.infer.serve.json_schemas import GRAMMAR_LIMITS, JSON, grammar_from, grammar_schema
from wgpu_lora.infer.serve.schema import GenerationRequest, StructuredOutputs, Tool
from wgpu_lora.infer.tool_calls import CALL, CALLS, END_CALL, HERMES, MISTRAL, ToolFormat

MAX_TEXT = 1 << 17


@dataclass(frozen=True)
class AnswerForm:
    """What an answer must follow.

    Attributes:
        source: llguidance's form of it; None for any text.
        schemas: JSON schemas by the name of the tool whose arguments they are of, None for the answer itself.
        not_enforced: keywords of these that the grammar leaves out.
        closed: the schema of the answer itself as the grammar has it, if it has one.
    """

    source: str | None = None
    schemas: Mapping[str | None, Any] = field(default_factory=dict)
    not_enforced: frozenset[str] = frozenset()
    closed: Any = None


class TokenGrammar:
    """A `Grammar` of an engine's request. Once it exceeds a limit, it allows stop tokens alone, and has an `error`."""

    def __init__(self, matcher: LLMatcher, stop_ids: Collection[int]) -> None:
        self._matcher, self._stop_ids = matcher, stop_ids
        self.error = ""

    def copy(self) -> TokenGrammar:
        """One at the same place, for another request."""
        return TokenGrammar(self._matcher.deep_copy(), self._stop_ids)

    def fill_mask(self, words: np.ndarray) -> None:
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if not self.error and self._matcher.is_error():
            self.error = self._matcher.get_error()
        if self.error:
            words[:] = 0
            for token in self._stop_ids:
                words[token // 32] |= np.asarray(1 << token % 32, np.uint32).astype(words.dtype)

    def accept(self, token: int) -> None:
        if not self._matcher.consume_token(token) and not self.error:
            self.error = self._matcher.get_error()


class TokenLimits:
    """A `Grammar` of tokens that a request allows or not.

    Args:
        allowed: the only tokens of the answer; None for all.
        min_tokens: before which no token of `stop_ids` comes, unless a grammar allows nothing else.
        size: of the vocabulary.
    """

    def __init__(
        self,
        grammar: TokenGrammar | None,
        allowed: Collection[int] | None,
        min_tokens: int,
        stop_ids: Collection[int],
        size: int,
    ) -> None:
        self._grammar, self._min_tokens, self._tokens = grammar, min_tokens, 0
        self._allowed = None if allowed is None else self._words(allowed, size)
        self._going_on = ~self._words(stop_ids, size)

    @staticmethod
    def _words(tokens: Collection[int], size: int) -> np.ndarray:
        bits = np.zeros(-(-size // 32) * 32, bool)
        bits[list(tokens)] = True
        return np.packbits(bits, bitorder="little").view(np.uint32)

    @property
    def error(self) -> str:
        return self._grammar.error if self._grammar else ""

    def fill_mask(self, words: np.ndarray) -> None:
        if self._grammar:
            self._grammar.fill_mask(words)
        else:
            words[:] = 0xFFFFFFFF if self._allowed is None else self._allowed
        if self._tokens < self._min_tokens and (words & self._going_on).any():
            words &= self._going_on

    def accept(self, token: int) -> None:
        self._tokens += 1
        if self._grammar:
            self._grammar.accept(token)


class Vocabulary:
    """The bytes of a model's tokens, and grammars over them. size: the width of the model's logits."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        self._tokenizer, self.size = tokenizer, size

    @cached_property
    def _tokens(self) -> LLTokenizer:
        document = self._tokenizer.files()["tokenizer.json"]
        try:
            return LLTokenizer(document, n_vocab=self.size, eos_token=sorted(self._tokenizer.stop_ids))
        except Exception as error:
            raise UserError(f"The bytes of this tokenizer's tokens are not known ({error!s:.200}).") from None

    def bytes_of(self, token: int) -> bytes:
        """Of a token's text; empty for ids without a token."""
        return self._tokens.decode_bytes([token])

    def compile(self, source: str) -> TokenGrammar:
        """A grammar from llguidance's form. Raises UserError if it is wrong, or exceeds a limit."""
        if not self._tokenizer.stop_ids:
            raise UserError("The model has no token that ends an answer, so it cannot follow a grammar.")
        matcher = LLMatcher(self._tokens, source, log_level=0, limits=GRAMMAR_LIMITS)
        if matcher.is_error():
            raise UserError(f"The schema, regex or grammar cannot be used: {matcher.get_error()!s:.300}")
        return TokenGrammar(matcher, self._tokenizer.stop_ids)

    def restricted(
        self, body: GenerationRequest, grammar: TokenGrammar | None, stop_ids: Collection[int]
    ) -> Grammar | None:
        """A grammar of one answer, with the tokens that its request allows. Raises UserError."""
        copy, allowed, min_tokens = grammar and grammar.copy(), body.allowed_token_ids, body.min_tokens or 0
        if allowed is None and not min_tokens:
            return copy
        if allowed is not None and copy:
            raise UserError("'allowed_token_ids' cannot be used with a grammar: leave out one of them.")
        if allowed is not None and max(allowed) >= self.size:
            raise UserError(f"'allowed_token_ids' has a token outside the model's vocabulary of {self.size:,}.")
        return TokenLimits(copy, allowed, min_tokens, [token for token in stop_ids if token < self.size], self.size)


def checked_schema(schema: Any, strict: bool | None = None) -> tuple[Any, set[str]]:
    """See `grammar_schema`, also of a schema's text. Raises UserError."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return grammar_schema(json.loads(_check_length(text)), strict)
    except (ValueError, RecursionError, TypeError, AttributeError) as error:
        raise UserError(f"The JSON schema cannot be used: {error!s:.300}.") from None


def answer_form(body: GenerationRequest) -> AnswerForm:
    """What a request's answer must follow.

    Raises:
        UserError: it is several, or one that is too long.
    """
    form, outputs = body.response_format, body.structured_outputs or StructuredOutputs.model_validate({})
    schemas: list[tuple[Any, bool | None]] = [(body.guided_json, None), (outputs.json_, None)]
    if form and form.json_schema:
        schemas.append((form.json_schema.schema_, form.json_schema.strict))
    if form and form.type == "json_object":
        schemas.append(({"type": "object"} if form.schema_ is None else form.schema_, None))
    if outputs.json_object:
        schemas.append(({"type": "object"}, None))
    candidates: list[tuple[Any, Callable[[Any], str]]] = [
        *((regex, LLMatcher.grammar_from_regex) for regex in (body.guided_regex, outputs.regex)),
        *((choices, choice_grammar) for choices in (body.guided_choice, outputs.choice)),
        *((grammar, LLMatcher.grammar_from_lark) for grammar in (body.guided_grammar, outputs.grammar)),
    ]
    schemas = [(schema, strict) for schema, strict in schemas if schema is not None]
    sources = [_check_length(make(value)) for value, make in candidates if value is not None]
    if len(sources) + len(schemas) > 1:
        raise UserError("An answer can follow one schema, regex or grammar: leave out the others.")
    for schema, strict in schemas:
        closed, left_out = checked_schema(schema, strict)
        original = json.loads(schema) if isinstance(schema, str) else schema
        return AnswerForm(grammar_from(closed), {None: original}, frozenset(left_out), closed)
    return AnswerForm(sources[0] if sources else None)


def choice_grammar(choices: Sequence[str]) -> str:
    """llguidance's form of one of these texts. Raises UserError if there is none."""
    if not choices:
        raise UserError("There is no text to choose from: give at least one.")
    texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in choices)
    return LLMatcher.grammar_from_lark(f"start: {texts}")


def _check_length(text: str) -> str:
    if len(text) > MAX_TEXT:
        raise UserError(f"A schema, regex or grammar has {len(text):,} characters, but at most {MAX_TEXT:,} are read.")
    return text


def call_form(
    form: ToolFormat, tools: Sequence[Tool], parallel: bool, tokenizer: Tokenizer, answer: AnswerForm = AnswerForm()
) -> AnswerForm:
    """A grammar, in Lark's notation, of one call of these tools, or of several, or of an answer with a schema.

    Raises:
        UserError: a schema cannot be used.
    """
    lines, schemas, left_out = [], {**answer.schemas}, {*answer.not_enforced}
    for number, tool in enumerate(tools):
        function = tool.function
        schemas[function.name] = {"type": "object", "properties": {}, **(function.parameters or {})}
        closed, keywords = checked_schema(schemas[function.name], function.strict)
        left_out |= keywords
        # JSON throughout, since a lexeme of its beginning would hide that of an answer.
        ids = dict.fromkeys(("$id", "id"), f"tool:{number}")  # of what "#" refers to, by old drafts and new ones
        values = {"name": {"const": function.name}, form.arguments: {**closed, **ids}}
        call = {"type": "object", "properties": values, "required": [*values], "additionalProperties": False}
        lines.append(f"call_{number}: %json {json.dumps({**call, 'x-guidance': JSON})}")
    any_call = " | ".join(f"call_{number}" for number in range(len(tools)))

    def marker(text: str) -> str:
        token = tokenizer.token_id(text)
        return f"<[{token}]>" if token in tokenizer.special_ids else json.dumps(text)

    if form is HERMES:
        lines += [f'one: {marker(CALL)} "\\n" any "\\n" {marker(END_CALL)}']
        start = 'one ("\\n" one)*' if parallel else "one"
    elif form is MISTRAL:
        start = f'{marker(CALLS)} "[" any {"(" + json.dumps(", ") + " any)*" if parallel else ""} "]"'
    else:
        start = "any"
    if answer.closed is not None:
        start = f"({start}) | answer"
        lines += [f"answer: %json {json.dumps({**answer.closed, 'x-guidance': JSON})}"]
    source = "\n".join([f"start: {start}", f"any: {any_call}", *lines])
    return AnswerForm(source, schemas, frozenset(left_out))
