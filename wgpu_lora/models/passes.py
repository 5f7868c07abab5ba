"""Programs that only pass forward, for batches of several sizes, and which of them a batch takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from wgpu_lora.data.packing import pack
from wgpu_lora.gpu.choices import NO_CHOICES, Choices
from wgpu_lora.gpu.program import Arena, Program
from wgpu_lora.gpu.tensor import Storage


class Pass(Protocol):
    """A recorded forward pass."""

    program: Program

    def storages(self) -> set[Storage]: ...


P = TypeVar("P", bound=Pass)


class Passes(Generic[P]):
    """Forward passes by the number of tokens that they take, ascending. They keep no activations."""

    def __init__(self, passes: dict[int, P]):
        self.passes = passes
        self._built: set[int] = set()
        self._arena: Arena | None = None
        self._choices = NO_CHOICES

    def programs(self) -> list[Program]:
        return [each.program for each in self.passes.values()]

    def storages(self) -> set[Storage]:
        found: set[Storage] = set()
        return found.union(*(each.storages() for each in self.passes.values()))

    def use(self, arena: Arena, choices: Choices = NO_CHOICES) -> None:
        """Where the programs run; each is built before its first use."""
        self._arena, self._choices = arena, choices

    def batches(self, lengths: Sequence[int]) -> Iterator[tuple[Sequence[int], P]]:
        """(the indices of a batch, the smallest pass that takes it), for items of so many tokens; the longest must fit
        the last pass."""
        for together in pack(lengths, range(len(lengths)), max(self.passes)):
            need = sum(lengths[i] for i in together)
            size = min(tokens for tokens in self.passes if tokens >= need)
            if size not in self._built:
                assert self._arena is not None, "use() first"
                self.passes[size].program.build(self._arena, self._choices)
                self._built.add(size)
            yield together, self.passes[size]
