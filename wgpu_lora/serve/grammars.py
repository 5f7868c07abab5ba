"""Answers that follow a JSON schema, a regex or a grammar, by llguidance: which tokens may come next.

Text that a client sends is compiled within limits, so that a hostile one ends in an error: at most `MAX_TEXT`
characters, and llguidance's own limits, of which `LIMITS` lowers those that cost memory. Compiling ends within its fuel
(about 20 ms, and some time for each KB of text), and a step's mask within its own (about 15 ms).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from wgpu_lora.errors import UserError
from wgpu_lora.infer.tool_calls import CALL, CALLS, END_CALL, HERMES, MISTRAL, ToolFormat
from wgpu_lora.serve.schema import GenerationRequest, StructuredOutputs, Tool
from wgpu_lora.tokenizer.tokenizer import Tokenizer

MAX_TEXT = 1 << 17
# States take up to 2 KB each; the others are llguidance's defaults, written down since they are promised.
LIMITS = LLParserLimits(
    max_items_in_row=2_000, initial_lexer_fuel=1_000_000, step_lexer_fuel=200_000, step_max_items=50_000,
    max_lexer_states=20_000, max_grammar_size=100_000, verbose_errors=False,
)  # fmt: skip
# One space after ',' and ':', as most text has it: with free whitespace, a model may go on with it forever.
JSON: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


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


class Vocabulary:
    """The bytes of a model's tokens, and grammars over them. vocab_size: the width of the model's logits."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._size = tokenizer, vocab_size

    @cached_property
    def _tokens(self) -> LLTokenizer:
        document = self._tokenizer.files()["tokenizer.json"]
        try:
            return LLTokenizer(document, n_vocab=self._size, eos_token=sorted(self._tokenizer.stop_ids))
        except Exception as error:
            raise UserError(f"The bytes of this tokenizer's tokens are not known ({error!s:.200}).") from None

    def bytes_of(self, token: int) -> bytes:
        """Of a token's text; empty for ids without a token."""
        return self._tokens.decode_bytes([token])

    def compile(self, source: str) -> TokenGrammar:
        """A grammar from llguidance's form. Raises UserError if it is wrong, or exceeds a limit."""
        if not self._tokenizer.stop_ids:
            raise UserError("The model has no token that ends an answer, so it cannot follow a grammar.")
        matcher = LLMatcher(self._tokens, source, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise UserError(f"The schema, regex or grammar cannot be used: {matcher.get_error()!s:.300}")
        return TokenGrammar(matcher, self._tokenizer.stop_ids)


def schema_grammar(schema: Any) -> str:
    """llguidance's form of a JSON schema, or of its text. Raises UserError."""
    try:
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return LLMatcher.grammar_from_json_schema(_check_length(text), overrides=JSON)
    except (ValueError, RecursionError) as error:
        raise UserError(f"The JSON schema cannot be used: {error!s:.300}.") from None


def grammar_source(body: GenerationRequest) -> str | None:
    """llguidance's form of what a request's answer must follow; None for any text.

    Raises:
        UserError: it has several, or one that is too long.
    """
    form, outputs = body.response_format, body.structured_outputs or StructuredOutputs.model_validate({})
    of_form = None
    if form and form.type == "json_schema":
        if not form.json_schema:
            raise UserError("'response_format' of the type json_schema needs 'json_schema': add it.")
        of_form = form.json_schema.schema_
    any_object = (form and form.type == "json_object") or outputs.json_object
    candidates: list[tuple[Any, Callable[[Any], str]]] = [
        *((schema, schema_grammar) for schema in (of_form, body.guided_json, outputs.json_)),
        ({"type": "object"} if any_object else None, schema_grammar),
        *((regex, LLMatcher.grammar_from_regex) for regex in (body.guided_regex, outputs.regex)),
        *((choices, choice_grammar) for choices in (body.guided_choice, outputs.choice)),
        *((grammar, LLMatcher.grammar_from_lark) for grammar in (body.guided_grammar, outputs.grammar)),
    ]
    sources = [_check_length(make(value)) for value, make in candidates if value is not None]
    if len(sources) > 1:
        raise UserError("An answer can follow one schema, regex or grammar: leave out the others.")
    return sources[0] if sources else None


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


def call_grammar(form: ToolFormat, tools: Sequence[Tool], parallel: bool, tokenizer: Tokenizer) -> str:
    """A grammar, in Lark's notation, of one call of these tools, or of several."""
    lines = []
    for number, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.function.name)}, "{form.arguments}": '
        schema = tool.function.parameters or {"type": "object", "properties": {}}
        schema_grammar(schema)  # for its limits
        lines += [f'call_{number}: {json.dumps(head)} arguments_{number} "}}"']
        lines += [f"arguments_{number}: %json {json.dumps({**schema, 'x-guidance': JSON})}"]
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
    return "\n".join([f"start: {start}", f"any: {any_call}", *lines])
