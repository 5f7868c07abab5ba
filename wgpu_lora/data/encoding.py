"""Run generators that need token ids together, so that a tokenizer in a child process gets large requests."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from wgpu_lora.data.template import TemplateError
from wgpu_lora.data.tokenizer import Tokenizer
from wgpu_lora.errors import UserError

T = TypeVar("T")
MAX_CHARACTERS = 1 << 20  # characters per request, unless a single text is longer


@dataclass(frozen=True)
class EncodeRequest:
    """A request for the ids of texts, or for their ids and offsets."""

    texts: list[str]
    offsets: bool = False


# A generator that yields requests, and is sent a list with an entry for each text.
Steps = Generator[EncodeRequest, list[Any], T]


def run_together(tasks: Sequence[Steps[T]], tokenizer: Tokenizer | None) -> list[T | UserError]:
    """Run all generators and return the result or the error of each; only TemplateError is raised."""
    done: dict[int, T | UserError] = {}
    answers: dict[int, list[Any] | None] = dict.fromkeys(range(len(tasks)))
    while answers:
        wanted: dict[int, EncodeRequest] = {}
        for i, answer in answers.items():
            try:
                wanted[i] = next(tasks[i]) if answer is None else tasks[i].send(answer)
            except StopIteration as end:
                done[i] = end.value
            except TemplateError:
                raise
            except UserError as error:
                done[i] = error
        answers = {}
        for i, found in _encode_all(wanted, tokenizer).items():
            if isinstance(found, UserError):
                done[i] = found
            else:
                answers[i] = found
    return [done[i] for i in range(len(tasks))]


def _encode_all(wanted: dict[int, EncodeRequest], tokenizer: Tokenizer | None) -> dict[int, list[Any] | UserError]:
    found: dict[int, list[Any] | UserError] = {}
    for group in _groups(wanted):
        try:
            found |= _encode(group, tokenizer)
        except UserError:  # repeat the requests separately to find the one that failed
            for i, request in group.items():
                try:
                    found |= _encode({i: request}, tokenizer)
                except UserError as error:
                    found[i] = error
    return found


def _groups(wanted: dict[int, EncodeRequest]) -> list[dict[int, EncodeRequest]]:
    groups: list[dict[int, EncodeRequest]] = []
    for offsets in (False, True):
        room = -1
        for i, request in wanted.items():
            if request.offsets is not offsets:
                continue
            size = sum(map(len, request.texts))
            if size > room:
                groups.append({})
                room = MAX_CHARACTERS
            groups[-1][i] = request
            room -= size
    return groups


def _encode(group: dict[int, EncodeRequest], tokenizer: Tokenizer | None) -> dict[int, list[Any]]:
    assert tokenizer is not None  # without a tokenizer, nothing is requested
    texts = [text for request in group.values() for text in request.texts]
    offsets = next(iter(group.values())).offsets
    answers: list[Any] = tokenizer.encode_with_offsets(texts) if offsets else tokenizer.encode_all(texts)
    rest = iter(answers)
    return {i: [next(rest) for _ in request.texts] for i, request in group.items()}
