"""How activations are stored between the forward and the backward pass: in 16 bits, in the host's memory, or both.

The program is changed after it has been recorded. A storage that ops declared with `Recorder.save_for_backward` is
packed or copied behind its last use in the forward pass, and restored in a new one before its first use in the backward
pass, which reads the new one. So ops do not know about it, and arenas use the memory in between. Row statistics, such
as log-sum-exps, are not declared: they are small, and their errors would be amplified.

In f16, every block of up to 256 values of a token has a scale (see `ops.half_precision.to_half`), so nothing overflows.
Blocks do not span tokens: padding after the last one has values of any size, such as those of an earlier batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from wgpu_lora.gpu.dispatch import Dispatch
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import Storage, Tensor
from wgpu_lora.ops.elementwise import copy
from wgpu_lora.ops.half_precision import from_half, to_half

BLOCK = 256  # values with a common scale
SHORTEST = 8  # with shorter blocks, f16 and its scales save too little


class Saving(NamedTuple):
    """How activations are stored. dtype: f32, bf16 or f16. offload: in the host's memory."""

    dtype: str = "f32"
    offload: bool = False


IN_F32 = Saving()


def block_of(cols: int) -> int:
    """How many values of a row of `cols` have a common scale: equal parts, each of whole 32-bit words; 1 if there are
    none."""
    return max((size for size in range(2, BLOCK + 1, 2) if cols % size == 0), default=1)


def store(program: Program, activations: Mapping[Storage, Sequence[Tensor]], forward: int, saving: Saving) -> None:
    """Changes a recorded program so that activations are stored as `saving` says.

    Args:
        activations: the tensors of each storage, as `Recorder.saved_tensors`.
        forward: number of dispatches of the forward pass.
    """
    uses: dict[Storage, list[int]] = {storage: [] for storage in activations}
    for index, step in enumerate(program.dispatches):
        for storage in {tensor.storage for tensor in step.tensors}:
            if storage in uses:
                uses[storage].append(index)
    behind: dict[int, list[Dispatch]] = {}
    before: dict[int, list[Dispatch]] = {}
    restored: dict[Storage, Storage] = {}
    for storage, tensors in activations.items():
        early = [index for index in uses[storage] if index < forward]
        late = [index for index in uses[storage] if index >= forward]
        if early and late:  # others are not kept, or belong to a block that is computed again
            pair = _packed(program, storage, tensors, saving)
            if pair:
                new, put, get = pair
                restored[storage] = new
                behind.setdefault(early[-1], []).extend(put)
                before.setdefault(late[0], []).extend(get)
    dispatches: list[Dispatch] = []
    for index, step in enumerate(program.dispatches):
        dispatches += before.get(index, [])
        dispatches.append(_reading(step, restored) if index >= forward else step)
        dispatches += behind.get(index, [])
    program.dispatches = dispatches


def _packed(
    program: Program, storage: Storage, tensors: Sequence[Tensor], saving: Saving
) -> tuple[Storage, list[Dispatch], list[Dispatch]] | None:
    """(a storage for the restored values, dispatches that store them, dispatches that restore them)."""
    new = replace(storage, name=f"{storage.name} restored", buffer=None, offset=0)
    put, get = Program(program.device), Program(program.device)

    def temp(shape: tuple[int, ...], dtype: str, label: str) -> Tensor:
        result = program.temp(shape, dtype, f"{storage.name} {label}")
        result.storage.on_host = saving.offload
        return result

    for tensor in tensors:
        of, back = tensor.reshape(tensor.size), replace(tensor, shape=(tensor.size,), storage=new)
        cols = block_of(tensor.size // tensor.shape[0])
        if saving.dtype != "f32" and cols >= SHORTEST:
            shape: dict[str, Any] = {"cols": cols, "kind": saving.dtype}
            half = temp(of.shape, saving.dtype, f"in {saving.dtype}")
            scale = temp((tensor.size // cols,), "f32", "scales") if saving.dtype == "f16" else None
            put.dispatch(to_half, of, half, scale, rows=tensor.size // cols, **shape)
            get.dispatch(from_half, half, back, scale, size=tensor.size, **shape)
        elif saving.offload:
            host_copy = temp(of.shape, "f32", "offloaded")
            put.dispatch(copy, of, host_copy, size=tensor.size)
            get.dispatch(copy, host_copy, back, size=tensor.size)
        else:
            return None
    return new, put.dispatches, get.dispatches


def _reading(step: Dispatch, restored: Mapping[Storage, Storage]) -> Dispatch:
    """A dispatch of the backward pass that reads restored storages instead."""
    if not any(tensor.storage in restored for tensor in step.tensors):
        return step
    tensors = (replace(t, storage=restored.get(t.storage, t.storage)) for t in step.tensors)
    return replace(step, tensors=tuple(tensors))
