"""Bricks of a decoder layer: dispatches of its linear layers, adapters, attention and elementwise ops."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from wgpu_lora.bench.contract import load_contract
from wgpu_lora.bench.recording import ProgramWorkload
from wgpu_lora.bench.step import adapter_set, fill_adapters
from wgpu_lora.bench.workload import Context, Workload
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.kernel import Kernel
from wgpu_lora.models.block import Block
from wgpu_lora.models.blocks.attention import KeyRanges
from wgpu_lora.models.blocks.transformer import Transformer
from wgpu_lora.models.decoder import Decoder
from wgpu_lora.models.inputs import StepInputs, Tables
from wgpu_lora.models.rows import Rows
from wgpu_lora.models.shapes import cut
from wgpu_lora.ops.matmul_tuning import LoraTuning
from wgpu_lora.weights.nf4 import NF4

Chosen = Callable[[Kernel], bool]


def of_adapters(kernel: Kernel) -> bool:
    return isinstance(kernel.tuning, LoraTuning)


def of_ops(*files: str) -> Chosen:
    """Kernels declared in these files of `ops`."""
    return lambda kernel: kernel.reference.__module__.rpartition(".")[2] in files


def of_swiglu(kernel: Kernel) -> bool:
    return kernel.name.startswith("swiglu")


def of_base(kernel: Kernel) -> bool:
    """Products with frozen matrices, and the preparation of their operands."""
    return not (of_adapters(kernel) or of_ops("attention", "norm", "rope", "elementwise")(kernel))


# Of each brick: the pass that is timed (None: both), its kernels, and those that they are compared with.
BRICKS: dict[str, tuple[str | None, Chosen, Chosen | None]] = {
    "nf4_matmul": ("forward", of_base, None),
    "nf4_matmul_backward": ("backward", of_base, None),
    "lora_forward": ("forward", of_adapters, of_base),
    "lora_backward": ("backward", of_adapters, of_base),
    "attention": ("forward", of_ops("attention"), None),
    "attention_backward": ("backward", of_ops("attention"), None),
    "rmsnorm": (None, of_ops("norm"), None),
    "rope": (None, of_ops("rope"), None),
    "swiglu": (None, of_swiglu, None),
}


def of_layer(name: str, context: Context) -> Workload:
    """A brick that times some of the dispatches of the model's first layer, as its architecture records it.

    It is recorded over one row of all tokens, forward and backward, with adapters on all linear layers, unless the
    brick's contract has no rank. Options that the contract does not have do not affect it.
    """
    if not isinstance(context.config, Transformer):
        raise UserError(f"{context.name} has no layers of attention and a gated MLP: choose another shape or model.")
    (which, chosen, beside), options = BRICKS[name], load_contract(name).options
    base_dtype = context.base_dtype if "base_dtype" in options else NF4.name
    compute_dtype = context.compute_dtype if "compute_dtype" in options else "f32"
    tokens, rank = context.tokens, context.rank if "rank" in options else None
    config, device = cut(context.config, 1), context.device
    decoder = Decoder.declare(config, base_dtype, "bf16", device.max_binding)
    adapters = adapter_set(config, device, rank) if rank else None
    inputs = StepInputs.declare(config.row_inputs(), tokens, 1, Tables.declare(config.tables(), tokens))
    workload = ProgramWorkload(context, compute_dtype)
    x = workload.tracked((tokens, config.hidden_size))
    layer = Block(workload.rec, decoder.layers[0], inputs, adapters.bind(inputs) if adapters else {}, None)
    workload.record_backward(config.block(layer, 0, x))

    row = np.arange(tokens)
    rows = Rows(row, 0 * row, row, 0 * row, 0 * row + tokens)
    workload.adopt(inputs.positions, row)
    workload.adopt(inputs.slot_ranges, np.array([[0, tokens]]))
    for item, tensor in inputs.rows.items():
        workload.adopt(tensor, item.values(rows))
        if isinstance(item, KeyRanges):
            workload.keys = {"pairs": float((item.values(rows)[:, 1] - item.values(rows)[:, 0]).sum())}
    for table, tensor in inputs.tables.items():
        workload.adopt(tensor, table.values(tokens))
    for _, tensor in decoder.vectors():
        workload.adopt(tensor)

    def fill(rng: np.random.Generator) -> None:
        for linear in decoder.layers[0].linears.values():
            for tensor, values in linear.weight.synthetic(rng):
                device.write(tensor.storage.buffer, values)
        if adapters:
            fill_adapters(device, adapters, rng)
            adapters.upload_scales(device)

    workload.fillers.append(fill)
    workload.time([p for p in (workload.forward, workload.backward) if which in (None, p.name)], chosen, beside)
    return workload
