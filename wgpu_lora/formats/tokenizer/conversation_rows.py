"""Tokenise one conversation with its chat template, and find the tokens of its trained turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.formats.tokenizer.chat_template import Span, TemplateError, UnusableError
from wgpu_lora.formats.tokenizer.examples import Conversation
from wgpu_lora.formats.tokenizer.reasoning import MARKER
from wgpu_lora.formats.tokenizer.template_trace import (
    CALLS,
    CONTENT,
    Part,
    has_null,
    lost_parts,
    lost_text,
    prints_python,
)
from wgpu_lora.formats.tokenizer.tokenizer import Tokenizer

UNTRAINED = -100
# Limits of (characters of a conversation) * (trained turns) for rendering it up to each turn, and for one row per turn.
MAX_RENDERED, MAX_IN_ROWS = 1 << 27, 1 << 25
Pair = tuple[list[int], list[int]]


@dataclass
class TokenizedExample:
    """The rows of an example, and what its text lacks.

    pairs: (input_ids, labels) of each row. unrendered: what the chat template leaves out, such as `'tools'`.
    untrained_turns: answers that are not trained on since the template leaves out their text or their tool calls.
    remarks: how the text was changed, such as by leaving out a second beginning-of-text token.
    """

    pairs: list[Pair] = field(default_factory=list)
    unrendered: set[str] = field(default_factory=set)
    untrained_turns: int = 0
    remarks: set[str] = field(default_factory=set)


class ConversationRows:
    """Tokenises one conversation with the chat template."""

    def __init__(self, example: Conversation, tokenizer: Tokenizer, kwargs: dict[str, Any]) -> None:
        self.messages, self.trained_turns, self.tools = example.messages, sorted(example.trained), example.tools
        self.tokenizer, self.kwargs, self.result = tokenizer, kwargs, TokenizedExample()
        self.text, self.marks = tokenizer.render_with_spans(self.messages, self.tools, variables=kwargs)
        self._before, self._after = lru_cache(4)(self._text_before), lru_cache(4)(self._text_after)

    def rows(self, completion_only_loss: bool) -> TokenizedExample:
        self._leave_out_lost_answers(completion_only_loss)
        text = self.text
        last = len(self.messages) - 1
        answered = self.messages[last]["role"] == "assistant" and (
            last in self.trained_turns or not completion_only_loss
        )
        if not completion_only_loss:
            ids = self.tokenizer.encode(text)
            self.result.pairs = [self._with_end(ids, list(ids), text) if answered else (ids, list(ids))]
            return self.result
        ids, offsets = self.tokenizer.encode_with_offsets(text)
        spans = self._marked(self.marks)
        if not spans:
            self._check_size(text, MAX_RENDERED)
            spans = self._spans_by_prefix(text, ids, offsets)
        elif self._are_shortened(spans):
            spans = None
        if spans is not None:
            self._check_answers([text[start:end] for start, end in spans])
            if len(spans) == len(self.trained_turns):
                spans = [span for span in spans if self._is_answer(text[span[0] : span[1]])]
            labels = _inside(ids, offsets, spans)
            self.result.pairs = [self._with_end(ids, labels, text) if answered else (ids, labels)]
            return self.result
        self._check_size(text, MAX_IN_ROWS)
        for turn in self.trained_turns:
            if pair := self._row_up_to_turn(turn):
                self.result.pairs.append(pair)
        return self.result

    def _leave_out_lost_answers(self, completion_only_loss: bool) -> None:
        """Note what the template does not render, and do not train on answers of which it leaves something out.

        Raises:
            UserError: one of them is the row's last answer.
            UnusableError: the template renders no message.
        """
        omissions, shortened = lost_parts(self.messages, self.tools, self.trained_turns, self.text, self._render)
        if has_null(self.messages):
            self.result.remarks.add(
                "tool calls have null arguments, which tables add where others of their calls have one"
            )
        if prints_python(self.messages, self.tools, self._render):
            self.result.remarks.add("the chat template writes some arguments of tool calls as Python does, not as JSON")
        contents = {i for i, message in enumerate(self.messages) if (message["content"] or "").strip()}
        contents = {i for i in contents if self.messages[i]["role"] in ("user", "assistant")}
        if len(contents) > 1 and contents <= {part.position for part in omissions if part.field == CONTENT}:
            raise UnusableError(
                f"The chat template{self.tokenizer.template_origin} renders none of a conversation's messages; use the "
                "template that the model was published with."
            )
        self.result.unrendered |= {
            *map(self._part_name, omissions),
            *(f"a part of {self._part_name(part)}" for part in shortened),
        }
        silent = {
            i: field for i, field, _ in sorted(omissions) if i in self.trained_turns and field in (CONTENT, CALLS)
        }
        if silent and (self.trained_turns[-1] in silent or not completion_only_loss):
            turn = self.trained_turns[-1] if self.trained_turns[-1] in silent else max(silent)
            raise UserError(
                f"the chat template does not render '{silent[turn]}' of message {turn}, an answer to train on; use a "
                "model whose template does, or leave the row out."
            )
        self.trained_turns = [turn for turn in self.trained_turns if turn not in silent]
        self.result.untrained_turns = len(silent)

    def _part_name(self, part: Part) -> str:
        """The name of a part for messages."""
        return (
            f"content of the role '{self.messages[part.position]['role']}'"
            if part.field == CONTENT
            else f"'{part.field}'"
        )

    def _are_shortened(self, spans: Sequence[Span]) -> bool:
        """Whether an answer, such as its reasoning, is only whole where the conversation ends with it."""
        if len(spans) != len(self.trained_turns):
            return False
        for turn, (start, end) in zip(self.trained_turns, spans, strict=True):
            if lost_text(self.messages[turn], self.text[start:end]) and turn < len(self.messages) - 1:
                return not lost_text(self.messages[turn], self._after(turn))
        return False

    def _check_answers(self, texts: Sequence[str], turns: Sequence[int] | None = None) -> None:
        """Note trained turns whose own text is not whole in the text that is trained on."""
        turns = self.trained_turns if turns is None else turns
        if len(texts) != len(turns):  # marks that are no turns
            texts = ["".join(texts)] * len(turns)
        for turn, text in zip(turns, texts, strict=True):
            if field := lost_text(self.messages[turn], text):
                name = self._part_name(Part(turn, field))
                self.result.unrendered.add(f"a part of {name}" if field == CONTENT else name)

    def _is_answer(self, text: str) -> bool:
        """Whether trained text is more than end tokens and marks of reasoning; else it is counted, or refused."""
        for token in self.tokenizer.special_texts:
            text = text.replace(token, "")
        all_have_text = all((self.messages[turn]["content"] or "").strip() for turn in self.trained_turns)
        if not all_have_text or MARKER.sub("", text).strip():
            return True
        if len(self.trained_turns) == 1:
            raise UserError("the chat template renders the answer as an empty one; use a template that keeps its text.")
        self.result.untrained_turns += 1
        self.result.unrendered.add("answers")
        return False

    def _with_end(self, ids: list[int], labels: list[int], text: str) -> Pair:
        """A row that ends with an answer, with eos behind that if the template has no end token there."""
        tokenizer = self.tokenizer
        end = len(ids) - next((i for i, label in enumerate(labels[::-1]) if label != UNTRAINED), 0)
        if text.rstrip().endswith(tokenizer.end_texts):
            if end < len(ids) and ids[end - 1] not in tokenizer.special_ids | tokenizer.stop_ids:
                self.result.remarks.add(
                    "the chat template's {% generation %} marks leave out the token that ends an answer"
                )
            return ids, labels
        if (eos := tokenizer.eos_id) is None:
            self.result.remarks.add("neither the chat template nor the tokenizer has a token that ends an answer")
            return ids, labels
        self.result.remarks.add("the chat template ends answers without an end token; eos is added behind the last one")
        return [*ids[:end], eos], [*labels[:end], eos]

    def _check_size(self, text: str, max_characters: int) -> None:
        if len(text) * len(self.trained_turns) > max_characters:
            raise UserError(
                f"{len(text):,} characters with {len(self.trained_turns):,} trained turns are too long for a "
                "conversation; split it."
            )

    def _marked(self, marks: list[Span]) -> list[Span] | None:
        """The spans of trained turns from the template's generation marks; None if they cannot be matched to turns."""
        turns = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        if turns == self.trained_turns:
            return marks
        if len(marks) == len(turns):
            return [mark for mark, turn in zip(marks, turns, strict=True) if turn in self.trained_turns]
        return None

    def _spans_by_prefix(self, text: str, ids: list[int], offsets: list[Span]) -> list[Span] | None:
        """The spans of trained turns, if the text up to each turn does not depend on later turns, else None."""
        spans = []
        stops = {stop for _, stop in offsets}
        for turn in self.trained_turns:
            before = self._before(turn)
            if before is None:
                return None
            after = self._after(turn)
            start, end = len(before), _without_trailing_space(after, self.tokenizer)
            if not (text.startswith(after) and after.startswith(before)) or end not in stops:
                return None
            spans.append((start, end))
        headers = (self.tokenizer.encode(text[:start]) for start, _ in spans)
        return None if any(header != ids[: len(header)] for header in headers) else spans

    def _row_up_to_turn(self, turn: int) -> Pair | None:
        """The conversation up to a turn, with labels for that turn only; None if the template makes it empty."""
        text = self._after(turn)
        before = self._before(turn)
        if before is None or not text.startswith(before):
            before = self._common_header(turn)
        if before is None or not text.startswith(before):
            raise UserError(
                f"the start of message {turn} cannot be found in the output of the chat template; use a template with "
                "{% generation %} marks, or train on everything with completion_only_loss off."
            )
        end = _without_trailing_space(text, self.tokenizer)
        self._check_answers([text[len(before) : end]], [turn])
        if not self._is_answer(text[len(before) : end]):
            return None
        prompt, answer = split_prompt(before, text[len(before) : end], self.tokenizer)
        tail = self.tokenizer.encode(text[end:])
        ids = prompt + answer + tail
        labels = behind(prompt + answer, len(prompt)) + [UNTRAINED] * len(tail)
        return self._with_end(ids, labels, text)

    def _text_before(self, turn: int) -> str | None:
        """The prompt for a turn; None if the template refuses an incomplete conversation."""
        try:
            return self.tokenizer.render(self.messages[:turn], self.tools, True, variables=self.kwargs)
        except TemplateError:
            return None

    def _common_header(self, turn: int) -> str | None:
        """The text before a turn's content: the common prefix of two renderings with different contents."""
        turns = [[*self.messages[:turn], {"role": "assistant", "content": words}] for words in ("A", "B")]
        try:
            first, second = (self.tokenizer.render(messages, self.tools, variables=self.kwargs) for messages in turns)
        except TemplateError:
            return None
        return first[
            : next((i for i, pair in enumerate(zip(first, second, strict=False)) if pair[0] != pair[1]), len(first))
        ]

    def _text_after(self, turn: int) -> str:
        """The conversation up to a turn."""
        last = turn == len(self.messages) - 1
        return self.text if last else self._render(self.messages[: turn + 1], self.tools)

    def _render(self, messages: Sequence[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        return self.tokenizer.render(list(messages), tools, variables=self.kwargs)


def split_prompt(prompt: str, answer: str, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Token ids of both texts, with a token boundary between them, as at inference.

    They are tokenised together if that keeps the boundary (some tokenizers would add a space in front of the answer),
    and separately if a token would cross it.
    """
    head, whole = tokenizer.encode_all([prompt, prompt + answer])
    if whole[: len(head)] == head:
        return head, whole[len(head) :]
    return head, tokenizer.encode(answer)


def _without_trailing_space(text: str, tokenizer: Tokenizer) -> int:
    """The length of `text` without white space after an end token; its full length if there is no end token."""
    bare = text.rstrip()
    return len(bare) if bare.endswith(tokenizer.special_texts) else len(text)


def behind(ids: list[int], start: int) -> list[int]:
    return [UNTRAINED] * start + ids[start:]


def _inside(ids: list[int], offsets: Sequence[Span], spans: Sequence[Span]) -> list[int]:
    """Labels for the tokens that overlap one of the spans."""
    labels = [UNTRAINED] * len(ids)
    remaining = iter(sorted(spans))
    start, end = next(remaining, (0, 0))
    for i, (first, last) in enumerate(offsets):
        while first >= end and (span := next(remaining, None)) is not None:
            start, end = span
        if first < end and last > start:
            labels[i] = ids[i]
    return labels
