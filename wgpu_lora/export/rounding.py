"""What quantisation left of a model's matrices, by kind of layer."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from wgpu_lora.models.loaded import LoadedModel
from wgpu_lora.weights.schemes import ATTENTION


@dataclass
class Rounded:
    """Matrices of one kind of layer.

    bits: per weight, as stored, with tables and scales. error: sum((w - quantised w)^2) / sum(w^2).
    """

    kind: str
    schemes: list[str] = field(default_factory=list)
    matrices: int = 0
    weights: int = 0
    stored: int = 0
    squares: float = 0.0
    lost: float = 0.0

    @property
    def bits(self) -> float:
        return 8 * self.stored / self.weights

    @property
    def error(self) -> float:
        return self.lost / self.squares if self.squares else 0.0


def rounded(model: LoadedModel) -> list[Rounded]:
    """The matrices of a model that was quantised while it was loaded, of attention and of the MLP."""
    found: dict[str, Rounded] = {}
    linears = model.config.matrices()
    for name, weight in model.decoder.matrices():
        if name not in linears:
            continue
        kind = "attention" if ATTENTION.search(name) else "mlp"
        one = found.setdefault(kind, Rounded(kind))
        values, packed = weight.values(model.device), weight.packed(model.device)
        source = model.checkpoint.read_f32(name).astype(np.float64)
        one.schemes = sorted({*one.schemes, weight.format})
        one.matrices, one.weights = one.matrices + 1, one.weights + values.size
        one.stored += sum(part.nbytes for part in packed.read()) if packed else 0
        one.squares += float((source**2).sum())
        one.lost += float(((source - values) ** 2).sum())
    return list(found.values())
