"""Muon (Jordan et al. 2024): the momentum of each factor, orthogonalised by five Newton-Schulz iterations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.kernel import F32, U32, Flag, In, InOut, Out, ReadOnly, by_subgroup, kernel, linear_grid, row_grid
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.reference_values import select_blocks
from wgpu_lora.gpu.struct import struct_columns
from wgpu_lora.gpu.tensor import Tensor, persistent
from wgpu_lora.models.parameters import ParameterSet
from wgpu_lora.names.spelling import setting
from wgpu_lora.ops.gradient_norm import BLOCK, MAX_PARAMETER, NO_OWNER
from wgpu_lora.train.optimizers.update_rule import Page, PlainState, State, slot_blocks
from wgpu_lora.train.option_types import Range, own_option

EPS = 1e-7  # the least norm of a direction
HOME_WORDS = 8


@dataclass(frozen=True)
class Hyper:
    """rest = 1 - momentum, in float64."""

    learning_rate: F32
    weight_decay: F32
    momentum: F32
    rest: F32
    nesterov: F32
    original: F32


PART = select_blocks("grads momentum block_owners direction", BLOCK)


def moments(grads: Any, momentum: Any, block_owners: Any, hyper: Any, report: Any) -> tuple[Any, Any, Any, Any]:
    """(whether it has an owner, whether it is updated, new momentum, direction) of each value."""
    has_owner, go, h, factor = slot_blocks(Hyper, block_owners, hyper, report, grads.size)
    g = grads * factor
    m = momentum + h.rest * (g - momentum)
    return has_owner, go, m, np.where(h.nesterov != 0, g + h.momentum * (m - g), m)


@kernel(
    "optimizers/muon_direction.wgsl",
    grid=lambda c: linear_grid(c.size // 4),
    lib=("linear", "muon"),
    structs=(Hyper,),
    part=PART,
)
def muon_direction(
    grads: In, momentum: In, block_owners: ReadOnly, hyper: ReadOnly, report: In, direction: Out, *, size: U32
) -> Any:
    """direction = g + momentum (m' - g) with Nesterov's momentum, or m'; 0 for slots that take no step."""
    _, go, _, direction = moments(grads, momentum, block_owners, hyper, report)
    return np.where(go, direction, 0.0)


@kernel(
    "optimizers/muon_momentum.wgsl",
    grid=lambda c: linear_grid(c.size // 4),
    lib=("linear", "muon"),
    structs=(Hyper,),
    part=PART,
)
def muon_momentum(
    grads: InOut, momentum: InOut, block_owners: ReadOnly, hyper: ReadOnly, report: In, *, size: U32
) -> Any:
    """m' = m + (1 - momentum) (g - m); zeroes gradients and skips gated slots."""
    has_owner, go, m, _ = moments(grads, momentum, block_owners, hyper, report)
    return np.where(has_owner, 0.0, grads), np.where(go, m, momentum)


def vectors(values: Any, home: Any, rank: int) -> np.ndarray:
    """The vectors of a matrix, [rank, length]: the rows of A, the columns of B."""
    owner, _, first, _, _, length, *_ = home
    result = values[first : first + rank * length]
    rows: np.ndarray = result.reshape(rank, length) if owner % 2 == 0 else result.reshape(length, rank).T
    return rows


@kernel(
    "optimizers/muon_gram.wgsl.j2",
    grid=row_grid(lambda c: c.matrices * c.rank * c.rank),
    lib=("muon",),
    structs=(Hyper,),
    variants=by_subgroup,
)
def muon_gram(direction: In, homes: ReadOnly, firsts: ReadOnly, gram: Out, *, matrices: U32, rank: U32) -> Any:
    """gram[n] = X X^T of matrix n, [rank, rank]."""
    all_homes, result = homes.reshape(-1, HOME_WORDS).astype(np.int64), np.zeros((matrices, rank, rank))
    for n, first in enumerate(firsts[:matrices]):
        x = vectors(direction, all_homes[first], rank)
        result[n] = x @ x.T
    return result


@kernel("optimizers/muon_normalise.wgsl", grid=lambda c: linear_grid(c.matrices * c.rank * c.rank), lib=("linear",))
def muon_normalise(gram: In, y: Out, norms: Out, *, matrices: U32, rank: U32, eps: F32 = EPS) -> Any:
    """norms = max(sqrt(trace(gram)), eps); y = gram / norms^2."""
    gram = gram.reshape(matrices, rank, rank)
    norms = np.maximum(np.sqrt(np.trace(gram, axis1=1, axis2=2)), eps)
    return gram / norms[:, None, None] ** 2, norms


@kernel("optimizers/muon_product.wgsl", grid=lambda c: linear_grid(c.matrices * c.rank * c.rank), lib=("linear",))
def muon_product(x: In, z: In, y: Out, *, matrices: U32, rank: U32, a: F32 = 0.0, b: F32 = 0.0, c: F32 = 1.0) -> Any:
    """y = a I + b x + c x z, for each matrix [rank, rank]."""
    x, z = (values.reshape(matrices, rank, rank) for values in (x, z))
    return a * np.eye(rank) + b * x + c * (x @ z)


def muon_step(
    params: Any, direction: Any, q: Any, norms: Any, homes: Any, hyper: Any, rank: int
) -> Iterator[tuple[int, slice, np.ndarray]]:
    """(slot, region of the page, new parameters) of each matrix."""
    h, q = struct_columns(Hyper, hyper), q.reshape(-1, rank, rank)
    for home in np.unique(homes.reshape(-1, HOME_WORDS).astype(np.int64), axis=0):
        owner, number, first, _, _, length, slot_rank, _ = home
        if owner == NO_OWNER:
            continue
        is_a, region = owner % 2 == 0, slice(first, first + rank * length)
        o = q[number] @ vectors(direction, home, rank) / norms[number]
        rows, cols = (slot_rank, length) if is_a else (length, slot_rank)
        scale = np.sqrt(max(1, rows / cols)) if h.original[owner] else 0.2 * np.sqrt(max(rows, cols))
        rate = h.learning_rate[owner]
        moved = (o if is_a else o.T).reshape(-1)
        yield owner // 2, region, params[region] * (1 - rate * h.weight_decay[owner]) - rate * scale * moved


@kernel(
    "optimizers/muon.wgsl.j2",
    grid=lambda c: linear_grid(c.blocks * BLOCK),
    lib=("linear", "muon"),
    structs=(Hyper,),
)
def muon(
    params: InOut,
    direction: In,
    q: In,
    norms: In,
    homes: ReadOnly,
    hyper: ReadOnly,
    report: In,
    *,
    blocks: U32,
    rank: U32,
    checking: Flag = False,
) -> Any:
    """p = p (1 - lr wd) - lr scale (q x) / norm, by matrix; skips gated slots."""
    result, fine = params.copy(), report.reshape(-1, 4)[:, 2] != 0
    for slot, region, new in muon_step(params, direction, q, norms, homes, hyper, rank):
        result[region] = new if fine[slot] else params[region]
    return result


@kernel(
    "optimizers/muon.wgsl.j2",
    grid=row_grid(lambda c: c.blocks),
    lib=("muon",),
    structs=(Hyper,),
    variants=by_subgroup,
)
def muon_check(
    params: In,
    direction: In,
    q: In,
    norms: In,
    homes: ReadOnly,
    hyper: ReadOnly,
    report: In,
    diverged: Out,
    *,
    blocks: U32,
    rank: U32,
    limit: F32 = MAX_PARAMETER,
    checking: Flag = True,
) -> Any:
    """diverged[b] = 1 if `muon` would make a parameter of block b larger than limit, or a value non-finite."""
    bad, fine = np.zeros(params.size, bool), report.reshape(-1, 4)[:, 2] != 0
    for slot, region, new in muon_step(params, direction, q, norms, homes, hyper, rank):
        with np.errstate(invalid="ignore"):
            bad[region] = (~(np.abs(new) <= limit) | ~np.isfinite(direction[region])) & fine[slot]
    return bad.reshape(blocks, BLOCK).any(axis=1).astype(np.float64)


class MatrixState(PlainState):
    """Each page has two tables besides its states: homes u32 [blocks, 8], the matrix of each block (`Home` in
    shaders/lib/muon.wgsl), and firsts u32 [matrices], the first block of each.

    rank: of all A and B, as they are padded.

    Raises:
        UserError: the run trains something else than A and B.
    """

    def __init__(self, trained: ParameterSet, states: Sequence[State]):
        super().__init__(trained, states)
        homes = [np.full((owners.size, HOME_WORDS), NO_OWNER, np.uint32) for owners in trained.block_owners]
        firsts: list[list[int]] = [[] for _ in homes]
        for slot in range(trained.slots):
            for name, region in trained.regions(slot).items():
                part = name.rpartition(".")[2]
                if part not in ("A", "B"):
                    muon = setting("optim", "muon")
                    raise UserError(f"{muon} trains the A and B of LoRA only, not {name}: choose another optimizer.")
                is_a, (rows, cols) = part == "A", region.shape
                self.rank, length = (rows, cols) if is_a else (cols, rows)
                strides = (length, 1) if is_a else (1, self.rank)
                slot_rank, first, numbers = region.stored_shape[not is_a], region.first // BLOCK, firsts[region.page]
                row = 2 * slot + (not is_a), len(numbers), region.first, *strides, length, slot_rank, 0
                homes[region.page][first : first + region.blocks] = row
                numbers.append(first)
        self._tables = [(table, np.array(numbers, np.uint32)) for table, numbers in zip(homes, firsts, strict=True)]
        self._tensors: list[tuple[Tensor, ...]] = [
            tuple(
                persistent(values.shape, "u32", "optimizer", f"{name} {page}")
                for name, values in zip(("homes", "firsts"), tables, strict=True)
            )
            for page, tables in enumerate(self._tables)
        ]
        self.pages = [(*page_tensors, *tables) for page_tensors, tables in zip(self.pages, self._tensors, strict=True)]

    def initialise(self, device: Device) -> None:
        for tables, tensors in zip(self._tables, self._tensors, strict=True):
            for values, tensor in zip(tables, tensors, strict=True):
                device.write(tensor.storage.buffer, values)


# Jordan's coefficients (https://kellerjordan.github.io/posts/muon) and number of iterations, as in torch.optim.Muon.
A, B, C, ITERATIONS = 3.4445, -4.7750, 2.0315, 5
ADJUST = ("match_rms_adamw", "original")


@dataclass(frozen=True)
class Muon:
    """Muon, with the names of torch.optim.Muon.

    By default a step has the size of AdamW's (Liu et al. 2025, arXiv:2502.16982), so that learning rates carry over.
    """

    state: ClassVar[tuple[State, ...]] = (State("momentum"),)
    state_class: ClassVar[Any] = MatrixState
    Hyper: ClassVar[type] = Hyper

    weight_decay: float = 0.0
    momentum: float = own_option(0.95, "Decay of the momentum.", within=Range(at_least=0, below=1))
    nesterov: bool = own_option(True, "Nesterov's momentum.")
    adjust_lr_fn: str = own_option(
        "match_rms_adamw",
        "Scale of a step: match_rms_adamw, 0.2 sqrt(max(rows, columns)), or original, sqrt(max(1, rows / columns)).",
        choices=ADJUST,
    )

    def hyper(self, step: int, learning_rate: float) -> Any:
        return Hyper(
            learning_rate=learning_rate,
            weight_decay=self.weight_decay,
            momentum=self.momentum,
            rest=1 - self.momentum,
            nesterov=float(self.nesterov),
            original=float(self.adjust_lr_fn == "original"),
        )

    def record_check(self, program: Program, page: Page, diverged: Tensor) -> None:
        momentum, homes, firsts = page.state
        matrices, rank = firsts.size, page.optimizer_state.rank
        shape: dict[str, Any] = {"matrices": matrices, "rank": rank}
        direction, norms = program.temp((page.size,), name="direction"), program.temp((matrices,), name="norms")

        def square(name: str) -> Tensor:
            return program.temp((matrices, rank, rank), name=name)

        owners = page.block_owners, page.hyper, page.report
        program.dispatch(muon_direction, page.grads, momentum, *owners, direction, size=page.size)
        gram, g = square("gram"), square("normalised gram")
        program.dispatch(muon_gram, direction, homes, firsts, gram, **shape)
        program.dispatch(muon_normalise, gram, g, norms, **shape)
        q: Tensor | None = None
        for iteration in range(ITERATIONS):
            p = square("polynomial")
            program.dispatch(muon_product, g, g, p, a=A, b=B, c=C, **shape)
            if q is None:
                q = p
            else:
                program.dispatch(muon_product, p, q, product := square("product"), **shape)
                q = product
            if iteration + 1 < ITERATIONS:
                once, g_next = square("p g"), square("gram of x'")
                program.dispatch(muon_product, p, g, once, **shape)
                program.dispatch(muon_product, p, once, g_next, **shape)
                g = g_next
        assert q is not None
        page.scratch[:] = [direction, q, norms]
        values = page.params, *page.scratch, homes, page.hyper, page.report
        program.dispatch(muon_check, *values, diverged, blocks=page.blocks, rank=rank)

    def record_update(self, program: Program, page: Page) -> None:
        momentum, homes, _ = page.state
        values = page.params, *page.scratch, homes, page.hyper, page.report
        program.dispatch(muon, *values, blocks=page.blocks, rank=page.optimizer_state.rank)
        owners = page.block_owners, page.hyper, page.report
        program.dispatch(muon_momentum, page.grads, momentum, *owners, size=page.size)
