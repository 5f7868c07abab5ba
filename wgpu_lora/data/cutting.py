"""How answers and their prompts are cut to a maximum length, as in TRL."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from wgpu_lora.data.conversation_rows import UNTRAINED

KEEP_START, KEEP_END = "keep_start", "keep_end"


@dataclass(frozen=True)
class Cut:
    """Limits of a row whose first trained token begins its answer, which is all that follows, as in TRL: also what a
    chat template adds behind the end of a turn.

    prompt: a longer prompt loses its beginning. answer: a longer answer loses its end. mode: which part a row that is
    then still too long keeps, its beginning (KEEP_START) or its end (KEEP_END).
    """

    prompt: int | None = None
    answer: int | None = None
    mode: str = KEEP_START

    def __call__(self, ids: list[int], labels: list[int], length: int) -> tuple[list[int], list[int]]:
        """A row of at most `length` tokens."""
        asked = prompt_tokens(labels)
        labels = labels[:asked] + ids[asked:]
        first = max(0, asked - self.prompt) if self.prompt else 0
        stop = min(len(ids), asked + self.answer) if self.answer else len(ids)
        if stop - first > length:
            first, stop = (first, first + length) if self.mode == KEEP_START else (stop - length, stop)
        return ids[first:stop], labels[first:stop]


def prompt_tokens(labels: Iterable[int]) -> int:
    """The number of tokens before the first trained one."""
    count = 0
    for label in labels:
        if label != UNTRAINED:
            break
        count += 1
    return count


def unusable(pairs: list[tuple[list[int], list[int]]], cut: list[tuple[list[int], list[int]]]) -> str | None:
    """What is wrong with a sample's rows after they have been cut; None if they can be trained on."""
    for labels in (row[1] for row in cut):
        if all(label == UNTRAINED for label in labels[1:]):
            return "the prompt fills the whole length, so that nothing of the answer is left"
    if len(cut) > 1 and all(row == cut[0] for row in cut[1:]):
        shortened = any(len(row[0]) > len(short[0]) for row, short in zip(pairs, cut, strict=True))
        where = "where the length cuts them" if shortened else "as tokens"
        return f"the chosen and the rejected answer are equal {where}"
    return None
