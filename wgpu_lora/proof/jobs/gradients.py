"""The recorded gradients of a trained run's program beside central differences of its loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from wgpu_lora.formats.peft import Matrices
from wgpu_lora.proof.jobs.trained import Trained, reopened
from wgpu_lora.worker.child import Port

# A direction's length over its matrix's. Each is compared with its half and its quarter: where the loss bends too much
# between them, the next is taken. Which one that is hangs on the measured losses alone, never on the gradient.
LENGTHS = tuple(0.1 / 2**i for i in range(8))
BENT = 0.05  # by how much two may differ; their extrapolation is then good to some thousandths
ROUNDING = 2e-6  # of the loss: what f32 may leave of a difference; 4e-7 was measured
UNTRAINED = 0.01  # what stands for the size of a value where a matrix is all zeros


def run(port: Port, *, directory: str, device: int) -> dict[str, Any]:
    """For a random direction v of each matrix W: L(W + v) - L(W - v), measured and extrapolated to what is linear in v,
    and as the gradient has it. `measured` is None where the loss bends at every length. L is the loss at W.
    """
    with reopened(Path(directory), device) as trained:
        losses = Losses.of(trained)
        centre = losses.at(trained.adapter)
        adapters = trained.session.adapters
        gradients = adapters.read(trained.session.device, 0, adapters.grads)  # of this one run: they add up
        rng = np.random.default_rng(trained.run.args.seed)
        rows = [
            {
                "matrix": f"{module}.{which}",
                **difference(losses, module, which, gradient, rng, centre),
            }
            for module in chosen(list(adapters.modules(0)))
            for which, gradient in zip("AB", gradients[module], strict=True)
        ]
        return {"loss": centre, "rounding": ROUNDING, "directions": rows}


@dataclass(frozen=True)
class Losses:
    """The loss that the gradient is of: the first step's first batch, each token with its weight."""

    trained: Trained
    run: Callable[[], float]

    @classmethod
    def of(cls, trained: Trained) -> Losses:
        session, groups = trained.session, trained.first_step()[0][0]
        batch = session.batch_for(groups)
        batch.upload(groups)

        def run() -> float:
            session.begin()
            batch.program.run()
            return session.totals.read_loss(session.device, 0) * groups[0].weight

        return cls(trained, run)

    def at(self, matrices: Matrices) -> float:
        """With these matrices in their places; the others stay as they were."""
        session = self.trained.session
        session.adapters.write(session.device, 0, matrices)
        return self.run()


def chosen(modules: Sequence[str]) -> list[str]:
    """One module of each name, from first layer to last."""
    by_name: dict[str, list[str]] = {}
    for module in modules:
        by_name.setdefault(module.rpartition(".")[2], []).append(module)
    shares = np.linspace(0, 1, len(by_name))
    return [of[round(share * (len(of) - 1))] for share, of in zip(shares, by_name.values(), strict=True)]


def difference(
    losses: Losses, module: str, which: str, gradient: np.ndarray, rng: np.random.Generator, centre: float
) -> dict[str, Any]:
    """Moves one matrix along a random direction, both ways, and puts it back."""
    pair = dict(zip("AB", losses.trained.adapter[module], strict=True))
    matrix = pair[which].astype(np.float64)
    direction = rng.standard_normal(matrix.shape)
    direction *= (np.linalg.norm(matrix) or UNTRAINED * np.sqrt(matrix.size)) / np.linalg.norm(direction)

    def measure(length: float) -> float:
        found = []
        for sign in (1, -1):
            moved = {**pair, which: (matrix + sign * length * direction).astype(np.float32)}
            found.append(losses.at({module: (moved["A"], moved["B"])}))
        return found[0] - found[1]

    slope = 2 * float((gradient.astype(np.float64) * direction).sum())
    at: list[float] = []
    result: dict[str, Any] = {"length": None, "measured": None, "gradient": slope}
    for length in LENGTHS:
        at.append(measure(length))
        if len(at) >= 3 and straight(at[-3], at[-2], centre) and straight(at[-2], at[-1], centre):
            # Richardson: the cubic term is eight times as large in the whole as in the half.
            extrapolated = (8 * at[-2] - at[-3]) / 3
            result = {"length": 4 * length, "measured": extrapolated, "gradient": slope * 4 * length}
            break
    losses.trained.session.adapters.write(losses.trained.session.device, 0, {module: losses.trained.adapter[module]})
    return result


def straight(whole: float, half: float, centre: float) -> bool:
    """Whether the loss moves half as much over half the length, nearly, or as nearly as f32 can tell."""
    return abs(2 * half - whole) <= BENT * abs(whole) + 2 * ROUNDING * abs(centre)
