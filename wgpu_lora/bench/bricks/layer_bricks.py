"""Bricks of a decoder layer: dispatches of its linear layers, adapters, attention, delta rule and elementwise ops."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from wgpu_lora.bench.brick import Context, Workload
from wgpu_lora.bench.contract import load_contract, numbers_of
from wgpu_lora.bench.recorded_brick import ProgramWorkload
from wgpu_lora.bench.training_step import adapter_set, fill_adapters
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.kernel import Kernel
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.models.architectures.qwen3_5 import Qwen35Text
from wgpu_lora.models.batch_inputs import StepInputs, Tables
from wgpu_lora.models.blocks.attention_block import KeyRanges
from wgpu_lora.models.blocks.transformer_block import Transformer
from wgpu_lora.models.decoder import Decoder
from wgpu_lora.models.layer_context import Adapters, LayerContext
from wgpu_lora.models.model_config import ModelConfig
from wgpu_lora.models.published_shapes import cut
from wgpu_lora.models.row_inputs import Rows
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.weights.base import write
from wgpu_lora.weights.nf4.nf4 import NF4

# Of each brick: the pass that is timed (None: both), and the ops. Those with adapters are compared with the same ops
# without, because the products of adapters are part of the frozen ones.
BRICKS: dict[str, tuple[str | None, tuple[str, ...]]] = {
    "nf4_matmul": ("forward", ("base",)),
    "nf4_matmul_backward": ("backward", ("base",)),
    "lora_forward": ("forward", ("base", "lora")),
    "lora_backward": ("backward", ("base", "lora")),
    "attention": ("forward", ("attention",)),
    "attention_backward": ("backward", ("attention",)),
    "rmsnorm": (None, ("rmsnorm",)),
    "rope": (None, ("rope",)),
    "swiglu": (None, ("swiglu",)),
    "delta_rule": ("forward", ("delta",)),
    "delta_rule_backward": ("backward", ("delta",)),
}
OF_DELTA_NETS = ("delta_rule", "delta_rule_backward")  # the others are of a layer with attention
OPS = {name: name for name in ("lora", "attention", "delta", "rmsnorm", "rope", "swiglu", "add", "fill", "dropout")}
OPS |= {"geglu": "swiglu", "take": "columns", "put": "columns", "gate": "attention gate"}
OPS |= dict.fromkeys(("causal", "l2norm", "gated"), "delta net")  # around the rule


def op_of(kernel: Kernel) -> str:
    """The op of a kernel; `base` for products with frozen matrices and the preparation of their operands."""
    return OPS.get(kernel.name.partition("_")[0], "base")


def has_brick(config: ModelConfig, name: str) -> bool:
    """Whether a model has what a brick measures, as far as that depends on gated delta nets."""
    return name not in OF_DELTA_NETS or isinstance(config, Qwen35Text)


def one_layer(config: Transformer, name: str) -> Transformer:
    """The config cut to the first layer, or to a layer of the kind that a brick measures if it has two."""
    layer_config = cut(config, 1)
    assert isinstance(layer_config, Transformer)
    return (
        replace(layer_config, linear_layers=(name in OF_DELTA_NETS,))
        if isinstance(layer_config, Qwen35Text)
        else layer_config
    )


def of_layer(name: str, context: Context) -> Workload:
    """A brick that times some of the dispatches of a layer of the model, as its architecture records it.

    It is recorded over one row of all tokens, forward and backward, with adapters on all linear layers, unless the
    brick's contract has no rank. Options that the contract does not have do not affect it.
    """
    if not isinstance(context.config, Transformer):
        raise UserError(f"{context.name} has no layers of attention and a gated MLP: choose another shape or model.")
    if not has_brick(context.config, name):
        raise UserError(f"{context.name} has no gated delta nets: choose another shape, such as qwen3.5-0.8b.")
    (program_name, ops), options = BRICKS[name], load_contract(name).options
    base_dtype = context.base_dtype if "base_dtype" in options else NF4.name
    compute_dtype = context.compute_dtype if "compute_dtype" in options else "f32"
    tokens, rank = context.tokens, context.rank if "rank" in options else None
    config, device = one_layer(context.config, name), context.device
    decoder = Decoder.declare(config, base_dtype, "bf16", device.max_binding)
    adapters = adapter_set(config, device, rank) if rank else None
    inputs = StepInputs.declare(config.row_inputs(), tokens, 1, Tables.declare(config.tables(), tokens))
    workload = ProgramWorkload(context, compute_dtype)
    workload.keys = numbers_of(config)
    x = workload.tracked((tokens, config.hidden_size))

    def record(rec: Recorder, bound: Adapters) -> Tensor:
        return config.block(LayerContext(rec, decoder.layers[0], inputs, bound, None), 0, x)

    workload.record_backward(record(workload.rec, adapters.bind(inputs) if adapters else {}))
    baseline = workload.record_again(lambda rec: record(rec, {}), x) if adapters else []

    row = np.arange(tokens)
    rows = Rows.causal(row, 0 * row, row, 0 * row, 0 * row + tokens)
    workload.adopt(inputs.positions, row)
    workload.adopt(inputs.slot_ranges, np.array([[0, tokens]]))
    for item, tensor in inputs.rows.items():
        workload.adopt(tensor, item.values(rows))
        if isinstance(item, KeyRanges):
            workload.keys["pairs"] = float((item.values(rows)[:, 1] - item.values(rows)[:, 0]).sum())
    for table, tensor in inputs.tables.items():
        workload.adopt(tensor, table.values(tokens))
    for _, tensor in decoder.vectors():
        workload.adopt(tensor)

    def fill(rng: np.random.Generator) -> None:
        for linear in decoder.layers[0].linears.values():
            for tensor, values in linear.weight.synthetic(rng):
                write(device, tensor, values)
        if adapters:
            fill_adapters(device, adapters, rng)
            adapters.upload_constants(device)

    workload.fillers.append(fill)
    passes, base_passes = (
        [program for program in programs if program_name in (None, program.name)]
        for programs in ((workload.forward, workload.backward), baseline)
    )
    workload.time(passes, lambda kernel: op_of(kernel) in ops, base_passes)
    return workload
