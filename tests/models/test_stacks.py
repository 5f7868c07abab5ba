"""Modules that read the same x as one product: the same outputs and gradients as one after another."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import MODELS

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.device_errors import BindingTooLarge
from wgpu_lora.gpu.program import Arena, Program, allocate, release
from wgpu_lora.gpu.reference_values import nmse
from wgpu_lora.gpu.tensor import persistent
from wgpu_lora.models.adapter_set import AdapterSet, SlotSpec
from wgpu_lora.models.architectures import parse_config
from wgpu_lora.models.batch_inputs import StepInputs, Tables
from wgpu_lora.models.blocks.delta_net import Runs
from wgpu_lora.models.blocks.transformer_block import Transformer
from wgpu_lora.models.decoder import Decoder
from wgpu_lora.models.layer_context import LayerContext
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.models.published_shapes import shape_config
from wgpu_lora.models.row_inputs import NOWHERE, Rows
from wgpu_lora.ops.elementwise import add_forward
from wgpu_lora.ops.matmul import matmul_tuning
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.weights.base import Shared, write
from wgpu_lora.weights.base_formats import declare
from wgpu_lora.weights.nf4.nf4 import NF4Weight

TOKENS, RANK = 24, 16
SLOTS = ((2, 9), (9, 20))  # rows before and behind belong to no slot
QV = ("self_attn.q_proj", "self_attn.v_proj")


def small(stacked: bool, monkeypatch: pytest.MonkeyPatch) -> Transformer:
    """A has whole blocks of the optimizer, q, k and v have biases."""
    config = shape_config("tiny-qwen3", 1)
    assert isinstance(config, Transformer)
    if not stacked:
        monkeypatch.setattr(Transformer, "stacks", lambda self, index: ())
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 72, "num_attention_heads": 4}
    return replace(config, **sizes, num_key_value_heads=2, head_dim=16, attention_bias=True)


class Result:
    """y and dx of a layer's block, gradients by matrix, and the dispatches of linear layers."""

    def __init__(self, device: Device, config: Transformer, targets: Sequence[Sequence[str]], **dtypes: str):
        rng = np.random.default_rng(0)
        decoder = Decoder.declare(config, dtypes["base"], "bf16", device.max_binding)
        paths = [[path for path in config.lora_modules if path.endswith(tuple(names))] for names in targets]
        specs = [SlotSpec(RANK, {path: 0.5 + slot + i for i, path in enumerate(p)}) for slot, p in enumerate(paths)]
        self.adapters = adapters = AdapterSet.declare(config, specs, device.max_binding)
        inputs = StepInputs.declare(config.row_inputs(), TOKENS, len(SLOTS), Tables.declare(config.tables(), TOKENS))
        program = Program(device)
        rec = Recorder(program, training=True, compute_dtype=dtypes["compute"])
        x, dy, dx, y = (persistent((TOKENS, config.hidden_size), "f32", "workspace", name) for name in "abcd")
        rec.node(lambda: None, inputs=[], outputs=[x], trains=True)
        out = config.block(LayerContext(rec, decoder.layers[0], inputs, adapters.bind(inputs), None), 0, x)
        rec.give_gradient(out, dy)
        rec.backward()
        for source, into in ((out, y), (rec.gradient(x), dx)):
            program.dispatch(add_forward, source, source, into, size=source.size)
        storages = program.persistent_storages() | decoder.storages() | {page.storage for page in adapters.grads}
        allocate(device, storages | adapters.storages())
        row = np.arange(TOKENS)
        rows = Rows.causal(row, 0 * row, row, 0 * row, 0 * row + TOKENS)
        inputs_of = [(inputs.positions, row), (inputs.slot_ranges, np.array(SLOTS))]
        inputs_of += [(tensor, item.values(rows)) for item, tensor in inputs.rows.items()]
        for tensor, values in inputs_of:
            write(device, tensor, values.astype(np.uint32))
        for table, tensor in inputs.tables.items():
            write(device, tensor, table.values(TOKENS))
        for _, tensor in decoder.vectors():
            write(device, tensor, 1 + 0.1 * rng.standard_normal(tensor.shape, np.float32))
        for layer in decoder.layers[0].linears.values():
            for tensor, values in layer.weight.synthetic(rng):
                write(device, tensor, values)
        for tensor in (x, dy):
            write(device, tensor, rng.standard_normal(tensor.shape, np.float32))
        adapters.upload_constants(device)
        for slot, modules in enumerate(paths):
            shapes = {path: config.lora_modules[path] for path in modules}
            pairs = {m: (rng.normal(size=(RANK, i)), rng.normal(size=(o, RANK))) for m, (o, i) in shapes.items()}
            adapters.write(device, slot, {m: (0.1 * a, 0.1 * b) for m, (a, b) in pairs.items()})
        arena = Arena(device, program.plan().sizes)
        program.build(arena)
        program.run()
        self.outputs = {name: device.read(t.storage.buffer).view(np.float32) for name, t in (("y", y), ("dx", dx))}
        for slot in range(len(SLOTS)):
            for module, pair in adapters.read(device, slot, adapters.grads).items():
                self.outputs |= {f"{slot} {module}.{part}": m for part, m in zip("AB", pair, strict=True)}
        self.names = [step.kernel.name for step in program.dispatches]
        self.stacked = [step.constants.get("stacked", False) for step in program.dispatches]
        arena.free()
        release(device, storages | adapters.storages())


@pytest.mark.parametrize(
    ("targets", "base", "compute", "close"),
    [((("proj",), ("proj",)), "nf4", "f32", 1e-11), ((QV, ("v_proj", "up_proj")), "f16", "f16", 1e-6)],
    ids=["all", "some"],
)
def test_stacks(
    device: Device,
    monkeypatch: pytest.MonkeyPatch,
    targets: Sequence[Sequence[str]],
    base: str,
    compute: str,
    close: float,
) -> None:
    """Also modules that only one slot targets, or none, and gradients with scales of their own."""
    monkeypatch.setattr(matmul_tuning, "large", lambda c, lanes: (8, 2))  # compiles quickly
    together = Result(device, small(True, monkeypatch), targets, base=base, compute=compute)
    alone = Result(device, small(False, monkeypatch), targets, base=base, compute=compute)
    assert any(together.stacked)
    assert not any(alone.stacked)
    assert len(together.names) < len(alone.names)
    assert together.outputs.keys() == alone.outputs.keys()
    for name, want in alone.outputs.items():
        assert (want != 0).any(), name
        assert nmse(together.outputs[name], want) < close, name


def test_a_stack_of_adapters_that_exceeds_a_binding_is_modules_apart() -> None:
    config, binding = shape_config("tiny-qwen3", 1), 512 << 10  # B of gate and up takes 384 KiB each
    gate, up = (f"{config.path(0)}.mlp.{name}_proj" for name in ("gate", "up"))
    spec = SlotSpec(64, dict.fromkeys(config.lora_modules, 1.0))
    assert (gate, up) in AdapterSet.declare(config, [spec], 1 << 27).scales
    adapters = AdapterSet.declare(config, [spec], binding)
    assert {(gate,), (up,)} <= adapters.scales.keys()
    assert {len(modules) for modules in adapters.scales} == {1, 3}  # q, k and v fit
    assert max(page.nbytes for page in adapters.params) <= binding
    with pytest.raises(BindingTooLarge, match=r"gate_proj\.lora_B' needs 786,432 bytes.*fewer adapters"):
        AdapterSet.declare(config, [spec, spec], binding)


def test_formats_may_be_mixed_within_a_layer() -> None:
    """The scales of NF4 matrices are together, whichever format the layer's first matrix has."""
    shared = Shared(1 << 27)
    dense, left, right = (declare(kind, (64, 64), kind, shared, None) for kind in ("f16", "nf4", "nf4"))
    first, gate, up = NF4Weight.of_layer([dense, *left.stacked([right], shared.max_binding)])
    assert first is dense
    assert gate.product([up]) is not None
    left_stack, two = left.stacked([right], shared.max_binding)
    assert left_stack.product([two]) is None  # their scales are not
    assert dense.product([gate]) is None


# -- delta nets --------------------------------------------------------------------------------------------------------


SOURCE = MODELS / "qwen3_5_text"
LINEAR = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")


def stated(**changes: Any) -> dict[str, Any]:
    return {**json.loads((SOURCE / "config.json").read_text()), **changes}


def test_every_fourth_layer_is_full_attention_unless_stated() -> None:
    assert parse_config(stated()).linear_layers == (True, False)
    unsaid = {**stated(), "num_hidden_layers": 5, "layer_types": None}
    assert parse_config(unsaid).linear_layers == (True, True, True, False, True)
    assert parse_config({**unsaid, "full_attention_interval": 2}).linear_layers == (True, False, True, False, True)
    assert parse_config(unsaid).cut(3).linear_layers == (True, True, True)


def test_all_linear_layers_may_have_adapters() -> None:
    modules = [path.rpartition(".")[2] for path in shape_config("qwen3.5-9b").lora_modules]
    assert {name: modules.count(name) for name in LINEAR} == dict.fromkeys(LINEAR, 24)
    assert modules.count("q_proj") == 8
    assert modules.count("up_proj") == 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"linear_num_key_heads": 4}, "linear_num_value_heads 6 in .* is not a multiple of linear_num_key_heads 4"),
        ({"linear_num_key_heads": 0}, "linear_num_key_heads in .* is 0"),
        ({"linear_key_head_dim": 6}, "linear_key_head_dim 6 in .* is not a multiple of 4"),
        ({"linear_value_head_dim": "12"}, "linear_value_head_dim in .* is '12'"),
        ({"linear_conv_kernel_dim": 9}, "linear_conv_kernel_dim in .* is 9, expected a whole number from 1 to 8"),
        ({"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim in .* is 1, expected 2 to 8"),
        ({"layer_types": ["linear_attention"]}, "layer_types in .* must list 2 layers"),
        (
            {"layer_types": ["linear_attention", "sliding_attention"]},
            "layer_types in .* has 'sliding_attention', which is not supported",
        ),
        ({"layer_types": 3}, "layer_types in .* must list 2 layers"),
        ({"num_attention_heads": 3}, "num_attention_heads 3 in .* is not a multiple of num_key_value_heads 2"),
        ({"hidden_size": None}, "hidden_size is missing from"),
        ({"head_dim": 20}, "partial_rotary_factor|rotary"),  # five values are no pairs
    ],
)
def test_impossible_fields_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_config(stated(**changes))


def test_a_text_model_may_be_stored_under_the_names_of_the_whole(device: Device, tmp_path: Path) -> None:
    tensors = {
        name.replace("model.", "model.language_model.", 1): values
        for name, values in load_file(SOURCE / "model.safetensors").items()
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(stated()))
    model = open_model(str(tmp_path), device, "f32")
    model.load_weights()
    assert not model.notes


def test_small_matrices_stay_as_they_are(device: Device) -> None:
    linears = open_model(str(SOURCE), device).decoder.layers[0].linears
    formats = {module.rpartition(".")[2]: linear.weight.format for module, linear in linears.items()}
    assert {name for name, kind in formats.items() if kind != "nf4"} == {"in_proj_a", "in_proj_b"}


def test_runs() -> None:
    """Two sequences, of which the second goes on from five tokens before the batch."""

    def u32_array(*values: int) -> np.ndarray:
        return np.array(values)

    keys, first = u32_array(0, 1, 2, 25, 26), u32_array(0, 0, 0, 20, 20)
    rows = Rows.causal(u32_array(0, 1, 2, 5, 6), u32_array(0, 0, 0, 3, 3), keys, first, u32_array(0, 0, 0, 0, 0))
    runs = Runs().values(rows)
    assert runs.tolist() == [[0, 3, 0, 0], [1, 2, 0, 0], [2, 1, 0, 0], [0, 2, 3, 1], [1, 1, 3, 1]]
    assert Runs().padding(runs).tolist() == [0, 1, NOWHERE, 0]
