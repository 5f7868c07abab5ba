"""Records a forward pass into a program, and its backward pass by walking the ops in reverse."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.kernel import Kernel
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import ALIGNMENT, Storage, Tensor, align

ALIGNMENT_ROWS = ALIGNMENT // 4  # row blocks of a multiple of this many f32 rows start at aligned offsets


class SharedTensors:
    """Tensors that are computed once, by `program`, and shared by recorders, instead of computed before each use."""

    def __init__(self, device: Device):
        self.program = Program(device, "kept")
        self.tensors: dict[Storage, Sequence[Tensor]] = {}  # by their source


class Recorder:
    """The tape. An op dispatches its forward kernels, then calls `node` with a function that records its backward pass.

    Gradients are tracked by storage, so that reshaped tensors and row blocks share the gradient of the whole tensor.

    Args:
        program: receives the dispatches.
        training: False records no backward pass.
        recompute: record `checkpoint`ed blocks again inside the backward pass instead of keeping their activations.
        compute_dtype: dtype that the inputs of frozen matmuls are rounded to (see `ops.half_precision`); with matrix
            units, f16 for bf16.
        shared_tensors: where a base format keeps decoded constants; by default they are decoded before each product.
            For NF4, keeping them takes an eighth more memory.
    """

    def __init__(
        self,
        program: Program,
        training: bool = False,
        recompute: bool = False,
        compute_dtype: str = "f32",
        shared_tensors: SharedTensors | None = None,
    ):
        self.program = program
        self.shared_tensors = shared_tensors
        self.compute_dtype = program.device.capabilities.operand_dtype(compute_dtype)
        self.halves: dict[tuple[Storage, int, int], tuple[Tensor, Tensor | None]] = {}
        self.training = training
        self.recompute = recompute
        self._nodes: list[Callable[[], None]] = []
        self._gradients: dict[Storage, Tensor] = {}
        self._gradient_blocks: dict[Storage, set[int]] = {}  # byte offsets of the row blocks whose gradient is written
        self._tracked: set[Storage] = set()
        self._latest: tuple[Storage, Program, Sequence[Tensor]] | None = None
        self._cheap: dict[Storage, Callable[[], Tensor]] = {}
        self.saved_tensors: dict[Storage, list[Tensor]] = {}  # by `save_for_backward`

    def temp(self, shape: tuple[int, ...], dtype: str = "f32", name: str = "temp") -> Tensor:
        return self.program.temp(shape, dtype, name)

    def temps(self, *shapes: tuple[int, ...], name: str = "temp") -> list[Tensor]:
        """f32 tensors in one storage, each at an aligned offset. They share one gradient, too."""
        firsts = [0]
        for shape in shapes:
            firsts.append(firsts[-1] + align(4 * math.prod(shape)))
        whole = self.temp((firsts[-1] // 4,), name=name)
        return [Tensor(shape, "f32", whole.storage, first, name) for shape, first in zip(shapes, firsts, strict=False)]

    def dispatch(self, kernel: Kernel, *args: Tensor | None, **constants: Any) -> None:
        self.program.dispatch(kernel, *args, **constants)

    def row_blocks(self, rows: int, cols: int) -> Iterator[tuple[int, int]]:
        """Yields blocks [start, stop) of f32 rows that fit one binding and start at aligned offsets."""
        step = self.program.device.max_binding // (4 * cols) // ALIGNMENT_ROWS * ALIGNMENT_ROWS
        step = rows if step >= rows else max(step, ALIGNMENT_ROWS)
        for start in range(0, rows, step):
            yield start, min(start + step, rows)

    # -- the tape --------------------------------------------------------------------------------------------------

    def node(
        self, backward: Callable[[], None], inputs: list[Tensor], outputs: list[Tensor], trains: bool = False
    ) -> None:
        """Puts an op on the tape if it needs a backward pass: it has trained parameters or a tracked input."""
        if self.training and (trains or any(self.tracks(t) for t in inputs)):
            self._tracked.update(t.storage for t in outputs)
            self._nodes.append(backward)

    def tracks(self, tensor: Tensor) -> bool:
        """Whether the tensor needs a gradient."""
        return tensor.storage in self._tracked

    def latest(self, source: Storage, compute: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        """What `compute` records, once until another source is asked for, as the products of a layer do in turn."""
        if self._latest is None or self._latest[:2] != (source, self.program):
            self._latest = source, self.program, compute()
        return self._latest[2]

    def save_for_backward(self, *tensors: Tensor) -> None:
        """Declares all tensors of a storage that the backward pass only reads, and that may be rounded for it.

        They may then be stored in another way in between (see `ops.activation_storage`).
        """
        for tensor in tensors:
            of = self.saved_tensors.setdefault(tensor.storage, [])
            if all(tensor.byte_offset != previous.byte_offset for previous in of):
                of.append(tensor)

    def cheap(self, y: Tensor, record: Callable[[Tensor], None]) -> None:
        """Declares that computing y again, with `rematerialize`, costs less than keeping it until the backward pass.

        record: dispatches the kernel that computes y into the given tensor, from inputs that are kept.
        """

        def compute() -> Tensor:
            result = replace(y, storage=Storage(y.storage.nbytes, "activations", y.name, temporary=True))
            record(result)
            return result

        self._cheap[y.storage] = cache(compute)

    def rematerialize(self, x: Tensor) -> Tensor:
        """x in a backward pass: computed again, once for all that read it, if it is `cheap`."""
        compute = self._cheap.get(x.storage)
        return replace(x, storage=compute().storage) if compute else x

    def gradient(self, tensor: Tensor) -> Tensor:
        whole = self._gradients[tensor.storage]
        return replace(tensor, storage=whole.storage, byte_offset=whole.byte_offset + tensor.byte_offset)

    def new_gradient(self, tensor: Tensor) -> Tensor:
        """A gradient that only this op writes."""
        assert tensor.storage not in self._gradients, f"{tensor.name} has a gradient already"
        gradient = self.temp(tensor.shape, name=f"d{tensor.name}")
        self._gradients[tensor.storage] = gradient
        return gradient

    def give_gradient(self, tensor: Tensor, gradient: Tensor) -> None:
        """Starts the backward pass from `tensor` with a known gradient."""
        assert tensor.storage not in self._gradients, f"{tensor.name} has a gradient already"
        self._gradients[tensor.storage] = gradient

    def gradient_target(self, tensor: Tensor) -> tuple[Tensor, bool]:
        """Returns (where to write a tensor's gradient, whether to accumulate)."""
        if not self.tracks(tensor):
            return self.temp(tensor.shape, name=f"unused d{tensor.name}"), False
        if tensor.nbytes < tensor.storage.nbytes:
            return self._block_target(tensor)
        if tensor.storage in self._gradients:
            return self.gradient(tensor), True
        return self.new_gradient(tensor), False

    def _block_target(self, rows: Tensor) -> tuple[Tensor, bool]:
        """`gradient_target` of a row block. The first block creates the whole gradient."""
        if rows.storage not in self._gradients:
            self._gradients[rows.storage] = self.temp((rows.storage.nbytes // 4,), name=f"d{rows.name}")
            self._gradient_blocks[rows.storage] = set()
        offsets = self._gradient_blocks.get(rows.storage)
        accumulate = offsets is None or rows.byte_offset in offsets
        if offsets is not None:
            offsets.add(rows.byte_offset)
        return self.gradient(rows), accumulate

    def share_gradient(self, source: Tensor, targets: list[Tensor]) -> None:
        for target in targets:
            assert target.storage not in self._gradients, f"{target.name} has a gradient already"
            self._gradients[target.storage] = self.gradient(source)

    def backward(self) -> None:
        """Records the backward pass of the tape, from the gradient passed to `give_gradient`."""
        while self._nodes:
            self._nodes.pop()()

    def checkpoint(self, block: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """Records block(x); with `recompute`, once more in the backward pass (Chen et al. 2016)."""
        if not (self.training and self.recompute):
            return block(x)
        with self._fresh_tape():
            y = block(x)

        def backward() -> None:
            with self._fresh_tape():
                result = block(x)
                self.share_gradient(y, [result])
                self.backward()

        if self.tracks(y):
            self._nodes.append(backward)
        return y

    @contextmanager
    def _fresh_tape(self) -> Iterator[None]:
        nodes, self._nodes = self._nodes, []
        try:
            yield
        finally:
            self._nodes = nodes
