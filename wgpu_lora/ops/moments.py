"""Sums of squares of the inputs of a linear layer, which say how much each input counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from wgpu_lora.gpu.kernel import Dim, Fixed, In, InOut, kernel, one_per
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.ops.linear import FrozenMatrix
from wgpu_lora.ops.recorder import Recorder


@kernel("input_squares.wgsl", grid=lambda c: one_per(c.cols), lib=("linear",))
def input_squares(x: In, count: Fixed, squares: InOut, *, rows: Dim, first: Dim, cols: Dim) -> Any:
    """squares[c] += the sum of x[r, c]^2 over the rows in use.

    x has `rows` rows of a batch, from its row `first` on; the first `count` rows of the batch are in use.
    """
    used = x.reshape(rows, cols)[: max(0, min(rows, int(count.reshape(-1)[0]) - first))]
    return squares + (used**2).sum(axis=0)


@dataclass
class Observed:
    """A frozen matrix whose inputs are summed up as it is multiplied; it is not stacked with others.

    count: u32 [1], the rows of the batch in use. squares: f32 [in], is added to.
    """

    weight: FrozenMatrix
    count: Tensor
    squares: Tensor
    _rows: int = field(default=0, init=False)  # recorded so far: a batch may be multiplied in blocks of rows, in order

    @property
    def out_features(self) -> int:
        return self.weight.out_features

    @property
    def in_features(self) -> int:
        return self.weight.in_features

    def forward(self, rec: Recorder, x: Tensor, y: Tensor, bias: Tensor | None, accumulate: bool) -> None:
        rows = x.size // self.in_features
        shape: dict[str, Any] = {"rows": rows, "first": self._rows, "cols": self.in_features}
        rec.dispatch(input_squares, x, self.count, self.squares, **shape)
        self._rows += rows
        self.weight.forward(rec, x, y, bias, accumulate)

    def backward(self, rec: Recorder, dy: Tensor, dx: Tensor, accumulate: bool) -> None:
        raise NotImplementedError("an observed matrix only passes forward")
