"""What is learnt: an example becomes token ids and, beside them, labels.

Labels are unshifted as Hugging Face has them: the label of a position is its own token, or -100 if it is not learnt.
A turn that is learnt goes from behind its header to its end token, which is learnt too; the newline after that is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from wgpu_lora.data import template
from wgpu_lora.data.asking import MAX_ASKED, Steps, Wanted, together
from wgpu_lora.data.formats import Alpaca, Completion, Conversation, Example, Text, Tokens
from wgpu_lora.data.template import Span
from wgpu_lora.data.tokenizer import Tokenizer
from wgpu_lora.errors import UserError

UNTRAINED = -100
# Characters of a conversation that is rendered up to each of its turns; and where each of these becomes a row.
MAX_RENDERED, MAX_IN_ROWS = 1 << 27, 1 << 25
Pair = tuple[list[int], list[int]]

_ALPACA = (
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:"
)
_ALPACA_WITH_INPUT = (
    "Below is an instruction that describes a task, paired with an input that provides further context. "
    "Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:"
)


def tokenize_example(
    example: Example,
    tokenizer: Tokenizer | None,
    *,
    completion_only_loss: bool = True,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> list[Pair]:
    """Turns one example into rows of (input_ids, labels), each pair of equal length.

    It is one row but for conversations whose template renders a turn differently once others follow it
    (Qwen3 drops the thinking of earlier turns): these give one row for each turn that is learnt,
    cut after that turn, so that each is learnt behind just what the model will see before it.

    Args:
        completion_only_loss: learn answers only; else everything. It says nothing about `Text` and `Tokens`.
        chat_template_kwargs: further names for the chat template; a row's own ones win.

    Raises:
        UserError: there is no tokenizer for a row that needs one, or the chat template fails on it.
    """
    [found] = tokenize_examples([example], tokenizer, completion_only_loss, chat_template_kwargs)
    if isinstance(found, UserError):
        raise found
    return found


def tokenize_examples(
    examples: Sequence[Example],
    tokenizer: Tokenizer | None,
    completion_only_loss: bool = True,
    chat_template_kwargs: dict[str, Any] | None = None,
) -> list[list[Pair] | UserError]:
    """As `tokenize_example`, of several examples at once: what became of each."""
    steps = [_rows(example, tokenizer, completion_only_loss, chat_template_kwargs or {}) for example in examples]
    return together(steps, tokenizer)


def _rows(
    example: Example, tokenizer: Tokenizer | None, completion_only_loss: bool, template_kwargs: dict[str, Any]
) -> Steps[list[Pair]]:
    if isinstance(example, Tokens):
        return [(list(example.input_ids), list(example.labels))]
    if tokenizer is None:
        raise UserError(
            "the row is text but the model has no tokenizer.json; add one, or tokenise the data into 'input_ids'."
        )
    if isinstance(example, Alpaca):
        example = _alpaca(example, tokenizer)
    if isinstance(example, Text):
        [plain] = yield Wanted([example.text])
        ids = _ended(tokenizer.opening + plain, tokenizer)
        return [(ids, list(ids))]
    if isinstance(example, Completion):
        prompt, answer = yield from _split(example.prompt, example.completion)
        prompt = tokenizer.opening + prompt
        ids = _ended(prompt + answer, tokenizer)
        return [(ids, _behind(ids, len(prompt) if completion_only_loss else 0))]
    kwargs = {**template_kwargs, **example.template_kwargs}
    if reserved := kwargs.keys() & template.GIVEN:
        raise UserError(
            f"chat_template_kwargs may not set {', '.join(sorted(reserved))}; they come from the row itself."
        )
    return (yield from _Chat(example, tokenizer, kwargs).rows(completion_only_loss))


def _alpaca(example: Alpaca, tokenizer: Tokenizer) -> Conversation | Completion:
    if not tokenizer.has_chat_template:
        prompt = _ALPACA_WITH_INPUT if example.input else _ALPACA
        prompt = prompt.format(instruction=example.instruction, input=example.input)
        return Completion(f"{example.system}\n\n{prompt}" if example.system else prompt, example.output)
    messages = [*example.asked, {"role": "assistant", "content": example.output}]
    return Conversation(messages, frozenset({len(messages) - 1}))


class _Chat:
    """One conversation on its way through the chat template."""

    def __init__(self, example: Conversation, tokenizer: Tokenizer, kwargs: dict[str, Any]) -> None:
        self.messages, self.trained, self.tools = example.messages, sorted(example.trained), example.tools
        self.tokenizer, self.kwargs = tokenizer, kwargs

    def rows(self, completion_only_loss: bool) -> Steps[list[Pair]]:
        text, marks = self.tokenizer.render_with_spans(self.messages, self.tools, variables=self.kwargs)
        if not completion_only_loss:
            [ids] = yield Wanted([text])
            return [(ids, list(ids))]
        [(ids, offsets)] = yield Wanted([text], offsets=True)
        spans = self._marked(marks)
        if not spans:
            self._check_size(text, MAX_RENDERED)
            spans = yield from self._by_prefix(text, ids, offsets)
        if spans is not None:
            return [(ids, _inside(ids, offsets, spans))]
        self._check_size(text, MAX_IN_ROWS)
        pairs = []
        for turn in self.trained:
            pairs.append((yield from self._cut_after(turn)))
        return pairs

    def _check_size(self, text: str, most: int) -> None:
        if len(text) * len(self.trained) > most:
            raise UserError(
                f"{len(self.trained):,} turns to learn in {len(text):,} characters are too many to look for each; "
                "split the conversation."
            )

    def _marked(self, marks: list[Span]) -> list[Span] | None:
        """The template's own marks, where it is clear which of them are to be learnt."""
        turns = [i for i, message in enumerate(self.messages) if message["role"] == "assistant"]
        if turns == self.trained:
            return marks
        if len(marks) == len(turns):
            return [mark for mark, turn in zip(marks, turns, strict=True) if turn in self.trained]
        return None

    def _by_prefix(self, text: str, ids: list[int], offsets: list[Span]) -> Steps[list[Span] | None]:
        """Where the turns lie if the text up to each turn is the same with and without what follows, else None."""
        spans = []
        stops = {stop for _, stop in offsets}
        for turn in self.trained:
            before = self._before(turn)
            if before is None:
                return None
            after = self._render(turn + 1)
            start, end = len(before), _without_trailing_space(after, self.tokenizer)
            if not (text.startswith(after) and after.startswith(before)) or end not in stops:
                return None
            spans.append((start, end))
        each = max(1, MAX_ASKED // max(1, len(text)))
        for i in range(0, len(spans), each):
            headers = yield Wanted([text[:start] for start, _ in spans[i : i + each]])
            if any(header != ids[: len(header)] for header in headers):
                return None
        return spans

    def _cut_after(self, turn: int) -> Steps[Pair]:
        """The conversation up to a turn, and only that turn learnt."""
        text = self._render(turn + 1)
        before = self._before(turn)
        if before is None or not text.startswith(before):
            before = self._common_header(turn)
        if before is None or not text.startswith(before):
            raise UserError(
                f"it cannot be told where message {turn} begins in what the chat template makes of it; "
                "use a template with {% generation %} marks, or train on everything with completion_only_loss off."
            )
        end = _without_trailing_space(text, self.tokenizer)
        prompt, answer = yield from _split(before, text[len(before) : end])
        [rest] = yield Wanted([text[end:]])
        ids = prompt + answer + rest
        return ids, _behind(prompt + answer, len(prompt)) + [UNTRAINED] * len(rest)

    def _before(self, turn: int) -> str | None:
        """What the model sees when it is to write the turn; None if the template does not take half a conversation."""
        try:
            return self.tokenizer.render(self.messages[:turn], self.tools, True, variables=self.kwargs)
        except UserError:
            return None

    def _common_header(self, turn: int) -> str | None:
        """All text before a turn's words: what two renderings with different words have in common."""
        turns = [[*self.messages[:turn], {"role": "assistant", "content": words}] for words in ("A", "B")]
        try:
            one, other = (self.tokenizer.render(messages, self.tools, variables=self.kwargs) for messages in turns)
        except UserError:
            return None
        return one[: next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), len(one))]

    def _render(self, count: int) -> str:
        return self.tokenizer.render(self.messages[:count], self.tools, variables=self.kwargs)


def _split(prompt: str, answer: str) -> Steps[tuple[list[int], list[int]]]:
    """Token ids of both texts, with the boundary that the model meets when it is given the prompt alone.

    Where tokenising both together keeps that boundary, it is the truer text (tokenizers that put a space
    in front would put one into the middle); where a token would straddle it, they are tokenised apart.
    """
    head, whole = yield Wanted([prompt, prompt + answer])
    if whole[: len(head)] == head:
        return head, whole[len(head) :]
    [tail] = yield Wanted([answer])
    return head, tail


def _ended(ids: list[int], tokenizer: Tokenizer) -> list[int]:
    eos = tokenizer.eos_id
    return ids if eos is None or ids[-1:] == [eos] else [*ids, eos]


def _without_trailing_space(text: str, tokenizer: Tokenizer) -> int:
    """Where `text` ends if white space behind an end token is not counted; without an end token it is the ending."""
    bare = text.rstrip()
    return len(bare) if bare.endswith(tokenizer.special_texts) else len(text)


def _behind(ids: list[int], start: int) -> list[int]:
    return [UNTRAINED] * start + ids[start:]


def _inside(ids: list[int], offsets: Sequence[Span], spans: Sequence[Span]) -> list[int]:
    """Labels for the tokens that have a character in one of the spans."""
    labels = [UNTRAINED] * len(ids)
    remaining = iter(sorted(spans))
    start, end = next(remaining, (0, 0))
    for i, (first, last) in enumerate(offsets):
        while first >= end and (span := next(remaining, None)) is not None:
            start, end = span
        if first < end and last > start:
            labels[i] = ids[i]
    return labels
