"""Muon (Jordan et al. 2024): the momentum of each factor, orthogonalised by five Newton-Schulz iterations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.train.declared import Range
from wgpu_lora.train.optimizers.base import Page, State
from wgpu_lora.train.optimizers.matrix_state import WithMatrices
from wgpu_lora.train.optimizers.muon_kernels import (
    Hyper,
    muon,
    muon_check,
    muon_direction,
    muon_gram,
    muon_momentum,
    muon_normalise,
    muon_product,
)
from wgpu_lora.train.own_options import own_option

# Jordan's coefficients (https://kellerjordan.github.io/posts/muon) and number of iterations, as in torch.optim.Muon.
A, B, C, ITERATIONS = 3.4445, -4.7750, 2.0315, 5
ADJUST = ("match_rms_adamw", "original")


@dataclass(frozen=True)
class Muon:
    """Muon, with the names of torch.optim.Muon.

    By default a step has the size of AdamW's (Liu et al. 2025, arXiv:2502.16982), so that learning rates carry over.
    """

    state: ClassVar[tuple[State, ...]] = (State("momentum"),)
    kept: ClassVar[Any] = WithMatrices
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
        matrices, rank = firsts.size, page.kept.rank
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
        program.dispatch(muon, *values, blocks=page.blocks, rank=page.kept.rank)
        owners = page.block_owners, page.hyper, page.report
        program.dispatch(muon_momentum, page.grads, momentum, *owners, size=page.size)
