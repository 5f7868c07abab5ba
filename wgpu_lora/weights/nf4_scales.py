"""The block constants of a layer's NF4 matrices, decoded in one dispatch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wgpu_lora.gpu.kernel import Dim, Fixed, InOut, kernel, one_per
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import Tensor, joined, persistent, whole
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.ops.stack import region, split
from wgpu_lora.weights.nf4_codes import NESTED_BLOCK

MATRICES = 7  # that a dispatch decodes at most
COUNTS = ("blocks", *(f"blocks{i}" for i in range(1, MATRICES)))


def _counts(c: Any) -> list[int]:
    return [count for count in (getattr(c, name) for name in COUNTS) if count]


@kernel("nf4_scales.wgsl.j2", grid=lambda c: one_per(sum(region(n, 1) for n in _counts(c))), lib=("linear",))
def nf4_scales(
    absmax_codes: Fixed,
    nested: Fixed,
    dynamic: Fixed,
    scales: InOut,
    *,
    blocks: Dim,
    blocks1: Dim = 0,
    blocks2: Dim = 0,
    blocks3: Dim = 0,
    blocks4: Dim = 0,
    blocks5: Dim = 0,
    blocks6: Dim = 0,
) -> Any:
    """scales[b] = dynamic[absmax_codes[b]] * nested[b / 256] + offset, where the offset is nested's last entry; of
    several tensors, which are regions of the arrays."""
    counts = [count for count in (blocks, blocks1, blocks2, blocks3, blocks4, blocks5, blocks6) if count]
    result = scales.reshape(-1).copy()
    codes, coarse = split(absmax_codes, counts, 1), split(nested, [-(-n // NESTED_BLOCK) + 1 for n in counts])
    for own, wide, into in zip(codes, coarse, split(result, counts), strict=True):
        into[:] = dynamic[own.astype(int)] * np.repeat(wide[:-1], NESTED_BLOCK)[: own.size] + wide[-1]
    return result


@dataclass(frozen=True)
class LayerScales:
    """The constants of up to MATRICES matrices, as in NF4Weight, in successive regions of shared storages."""

    constants: tuple[tuple[Tensor, ...], ...]

    @classmethod
    def together(cls, constants: Sequence[tuple[Tensor, ...]], name: str) -> LayerScales:
        """Declared constants of several matrices in shared storages, but for the table that all models share."""
        if len(constants) == 1:
            return cls(tuple(constants))
        codes = joined([own[0] for own in constants], f"{name}.absmax_codes")
        nested = joined([own[1] for own in constants], f"{name}.nested")
        tables = [own[2] for own in constants]
        return cls(tuple(zip(codes, nested, tables, strict=True)))

    def decoded(self, rec: Recorder) -> Sequence[Tensor]:
        """One f32 per block, by matrix: in scratch, once for products that follow each other, or kept."""
        source, counts = self.constants[0][0].storage, [own[0].size for own in self.constants]
        if rec.kept is None:
            return rec.latest(
                source, lambda: self._decode(rec.program, rec.temps(*((n,) for n in counts), name="scales"))
            )
        if source not in rec.kept.tensors:
            new = joined([persistent((count,), "f32", "workspace", "scales") for count in counts], "scales")
            rec.kept.tensors[source] = self._decode(rec.kept.program, new)
        return rec.kept.tensors[source]

    def _decode(self, program: Program, scales: Sequence[Tensor]) -> Sequence[Tensor]:
        codes, nested = (whole([own[i] for own in self.constants]) for i in (0, 1))
        blocks: dict[str, Any] = {n: own[0].size for n, own in zip(COUNTS, self.constants, strict=False)}
        program.dispatch(nf4_scales, codes, nested, self.constants[0][2], whole(scales), **blocks)
        return scales


@dataclass(frozen=True)
class Scales:
    """The scales of a matrix: decoded with those of its layer, or stored as they are."""

    layer: LayerScales | None
    index: int
    stored: Tensor | None = None

    def of(self, rec: Recorder) -> Tensor:
        """f32 [blocks]."""
        if self.stored:
            return self.stored
        assert self.layer is not None
        return self.layer.decoded(rec)[self.index]
