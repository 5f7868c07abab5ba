"""How many greedy answers to tokenized rows equal the rows' own."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wgpu_lora.data import Row
from wgpu_lora.errors import UserError
from wgpu_lora.events import SILENT, Events
from wgpu_lora.formats.tokenizer.tokenizer import Tokenizer
from wgpu_lora.infer.answers import MOST, open_generator, tokenizer_of
from wgpu_lora.infer.generator import Generation
from wgpu_lora.infer.named_adapters import adapters_on_device
from wgpu_lora.infer.request import GREEDY
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.names.spelling import flag

MARGIN = 16  # tokens that an answer may be longer than its reference before it is cut off


@dataclass(frozen=True)
class Match:
    """What of a text is compared: all of it without surrounding spaces, what a regular expression finds in it (its
    first group, if that takes part), or a field of the JSON object that it is, by names joined by dots.

    Raises:
        UserError: both are given, or the expression is invalid.
    """

    pattern: str | None = None
    field: str | None = None

    def __post_init__(self) -> None:
        if self.pattern is not None and self.field is not None:
            raise UserError(f"{flag('match_pattern')} and {flag('match_field')} exclude each other: give one of them.")
        try:
            re.compile(self.pattern or "")
        except re.error as error:
            raise UserError(
                f"{flag('match_pattern')} {self.pattern!r:.80} is no regular expression: {error}."
            ) from None

    def part(self, text: str) -> Any:
        """Of a text; None if it has no such part. A field's value is in a tuple, since it may be null."""
        if self.pattern is not None:
            match = re.search(self.pattern, text, re.DOTALL)
            return match and next((group for group in match.groups()[:1] if group is not None), match[0])
        if self.field is None:
            return text.strip()
        try:
            value = json.loads(text)
            for name in self.field.split("."):
                value = value[name]
        except (ValueError, KeyError, TypeError, RecursionError):
            return None
        return (value,)


@dataclass(frozen=True)
class Comparison:
    """A greedy answer beside the row's own. prompt, reference, answer: without special tokens."""

    prompt: str
    reference: str
    answer: str
    matches: bool


def split_row(row: Row) -> tuple[list[int], list[int]] | None:
    """A row's (prompt, last answer), which is its last run of trained tokens; None if nothing precedes or follows."""
    trained = [label >= 0 for label in row.labels]
    if True not in trained:
        return None
    end = len(trained) - trained[::-1].index(True)
    begin = next((i + 1 for i in range(end - 1, -1, -1) if not trained[i]), 0)
    return (list(row.input_ids[:begin]), list(row.input_ids[begin:end])) if begin else None


def compared(
    model: LoadedModel,
    rows: Sequence[Row],
    adapter: str | Path | None = None,
    match: Match = Match(),
    events: Events = SILENT,
) -> list[Comparison]:
    """Greedy answers to the rows that have a prompt, with an adapter or the base model alone, in the rows' order.

    An answer ends MARGIN tokens after its reference would: it differs then, unless only a part is compared.

    Args:
        events: receives `loading` and `answering`.

    Raises:
        UserError: no row has a prompt and an answer, a reference has no such part as is compared, or the device has
            no room.
    """
    tokenizer = tokenizer_of(model, adapter)
    longest = model.config.max_position_embeddings
    parts = [part for row in rows if (part := split_row(row))]
    if not parts:
        raise UserError("No row has a prompt with an answer, so nothing can be compared: give rows that have both.")
    references = [_text(tokenizer, answer) for _, answer in parts]
    if unfit := [text for text in references if match.part(text) is None]:
        option = flag("match_field") if match.field is not None else flag("match_pattern")
        raise UserError(f"{option} finds nothing in the answer {unfit[0]!r:.80}: correct it, or the rows.")
    order = sorted(range(len(parts)), key=lambda i: len(parts[i][1]))  # those of a batch end at about the same time
    answers = dict[int, str]()
    room = min(longest, max(len(prompt) + len(answer) for prompt, answer in parts) + MARGIN)
    slot, directories = (None, []) if adapter is None else (0, [adapter])
    with (
        adapters_on_device(model, directories) as adapters,
        open_generator(model, adapters, room, len(parts), events=events) as generator,
    ):
        for start in range(0, len(order), MOST):
            batch = order[start : start + MOST]
            prompts, most = [parts[i][0] for i in batch], max(len(parts[i][1]) for i in batch) + MARGIN
            results = [Generation(len(prompt)) for prompt in prompts]
            stops = [tokenizer.stop_ids] * len(batch)
            for _ in generator.tokens(prompts, [slot] * len(batch), results, GREEDY, most, stops):
                events.answering(start, len(parts), sum(len(result.token_ids) for result in results))
            for i, result in zip(batch, results, strict=True):
                answers[i] = _text(tokenizer, result.token_ids[: len(parts[i][1]) + MARGIN])
    return [
        Comparison(_text(tokenizer, prompt), reference, answers[i], match.part(answers[i]) == match.part(reference))
        for i, ((prompt, _), reference) in enumerate(zip(parts, references, strict=True))
    ]


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    return tokenizer.decode(ids).strip()
