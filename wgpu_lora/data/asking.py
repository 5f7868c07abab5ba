"""Work that needs a tokenizer now and then, done side by side: so a tokenizer in a child is asked for much at once."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from wgpu_lora.data.tokenizer import Tokenizer
from wgpu_lora.errors import UserError

T = TypeVar("T")
MAX_ASKED = 1 << 20  # characters at once, but for one text that is longer


@dataclass(frozen=True)
class Wanted:
    """What a step of work asks for: the ids of texts, or their ids and offsets."""

    texts: list[str]
    offsets: bool = False


# Work that yields what it wants, and is sent an entry for each text.
Steps = Generator[Wanted, list[Any], T]


def together(works: Sequence[Steps[T]], tokenizer: Tokenizer | None) -> list[T | UserError]:
    """Does all of it, and says what became of each."""
    done: dict[int, T | UserError] = {}
    answers: dict[int, list[Any] | None] = dict.fromkeys(range(len(works)))
    while answers:
        wanted: dict[int, Wanted] = {}
        for i, answer in answers.items():
            try:
                wanted[i] = next(works[i]) if answer is None else works[i].send(answer)
            except StopIteration as end:
                done[i] = end.value
            except UserError as error:
                done[i] = error
        answers = {}
        for i, found in _answered(wanted, tokenizer).items():
            if isinstance(found, UserError):
                done[i] = found
            else:
                answers[i] = found
    return [done[i] for i in range(len(works))]


def _answered(wanted: dict[int, Wanted], tokenizer: Tokenizer | None) -> dict[int, list[Any] | UserError]:
    found: dict[int, list[Any] | UserError] = {}
    for group in _groups(wanted):
        try:
            found |= _asked(group, tokenizer)
        except UserError:  # whose fault it is shows where each asks for itself
            for i, request in group.items():
                try:
                    found |= _asked({i: request}, tokenizer)
                except UserError as error:
                    found[i] = error
    return found


def _groups(wanted: dict[int, Wanted]) -> list[dict[int, Wanted]]:
    groups: list[dict[int, Wanted]] = []
    for offsets in (False, True):
        room = -1
        for i, request in wanted.items():
            if request.offsets is not offsets:
                continue
            size = sum(map(len, request.texts))
            if size > room:
                groups.append({})
                room = MAX_ASKED
            groups[-1][i] = request
            room -= size
    return groups


def _asked(group: dict[int, Wanted], tokenizer: Tokenizer | None) -> dict[int, list[Any]]:
    assert tokenizer is not None  # work without one asks for nothing
    texts = [text for request in group.values() for text in request.texts]
    offsets = next(iter(group.values())).offsets
    answers: list[Any] = tokenizer.encode_with_offsets(texts) if offsets else tokenizer.encode_all(texts)
    rest = iter(answers)
    return {i: [next(rest) for _ in request.texts] for i, request in group.items()}
