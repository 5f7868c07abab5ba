"""Layers with DoRA, with plain LoRA and with frozen offsets of their weight, in one batch, against the formulas."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import MODELS, path_of
from support.gguf_models import small

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import Arena, Program, allocate, release
from wgpu_lora.gpu.reference_values import nmse
from wgpu_lora.gpu.tensor import persistent
from wgpu_lora.models import model_files
from wgpu_lora.models.adapter_modules import resolve_target_modules, shortest
from wgpu_lora.models.adapter_set import AdapterSet, Norms, SlotSpec
from wgpu_lora.models.architectures import load_config
from wgpu_lora.models.batch_inputs import StepInputs, Tables
from wgpu_lora.models.blocks.transformer_block import Transformer
from wgpu_lora.models.decoder import Decoder
from wgpu_lora.models.layer_context import LayerContext
from wgpu_lora.models.model_files import read_model
from wgpu_lora.models.published_shapes import shape_config
from wgpu_lora.ops.elementwise import add_forward, dropout_apply
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.weights.base import write

TOKENS, RANK, KEPT = 24, 16, 0.7
SLOTS = ((2, 9), (9, 20))  # of DoRA and of LoRA; rows before and behind belong to no slot
MODULES = ("q_proj", "k_proj", "v_proj")
Values = dict[str, np.ndarray]
CLOSE = 1e-9


def config_of() -> Transformer:
    config = shape_config("tiny-qwen3", 1)
    assert isinstance(config, Transformer)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 72, "num_attention_heads": 4}
    return replace(config, **sizes, num_key_value_heads=2, head_dim=16, attention_bias=True)


def expected(values: Values, draws: np.ndarray | None, numbers: dict[str, int], offset: bool) -> Callable[..., Values]:
    """q, k and v by PEFT's formulas in float64, with norms of these values that do not follow others'."""

    def weight(module: str, slot: int) -> np.ndarray:
        own = values[f"{module}.W"].astype(np.float64)
        return own + 0.5 * values[f"{module}.B0.0"] @ values[f"{module}.A0.0"] if offset and slot == 0 else own

    def delta(at: Values, module: str, slot: int) -> np.ndarray:
        return (0.5 + slot) * at[f"{module}.B.{slot}"].astype(np.float64) @ at[f"{module}.A.{slot}"]

    norms = {m: np.linalg.norm(weight(m, 0) + delta(values, m, 0), axis=1) for m in MODULES}

    def forward(at: Values) -> Values:
        outputs = {}
        for module in MODULES:
            x, y = at["x"].astype(np.float64), at["x"] @ weight(module, 1).T + values[f"{module}.bias"]
            for slot, (start, stop) in enumerate(SLOTS):
                rows, own = x[start:stop], weight(module, slot)
                dropped = rows
                if draws is not None:
                    shape = {"rows": TOKENS, "cols": 64, "module": numbers[module]}
                    dropped = dropout_apply(x, draws, np.zeros(x.shape), **shape)[start:stop]
                gain = at[f"{module}.M.0"] / norms[module] if slot == 0 and not offset else np.ones(len(own))
                low = gain * (dropped @ delta(at, module, slot).T)
                y[start:stop] = rows @ own.T + (gain - 1) * (dropped @ own.T) + low + values[f"{module}.bias"]
            outputs[module] = y
        return outputs

    return forward


@pytest.mark.parametrize(
    ("dropout", "together", "offset"),
    [(False, True, False), (True, True, False), (False, True, True), (True, False, True)],
)
def test_outputs_and_gradients(device: Device, dropout: bool, together: bool, offset: bool) -> None:
    """With DoRA in the first slot or, instead, a frozen offset."""
    rng, config = np.random.default_rng(0), config_of()
    decoder = Decoder.declare(config, "f32", "bf16", device.max_binding)
    path = {module: f"{config.path(0)}.self_attn.{module}" for module in MODULES}
    scaled = SlotSpec(RANK, dict.fromkeys(path.values(), 0.5), offset=SlotSpec(3, dict.fromkeys(path.values(), 0.5)))
    first = scaled if offset else SlotSpec(RANK, scaled.scaling, dora=True)
    adapters = AdapterSet.declare(config, [first, SlotSpec(4, dict.fromkeys(path.values(), 1.5))], device.max_binding)
    tables = Tables.declare(config.tables(), TOKENS)
    inputs = StepInputs.declare(config.row_inputs(), TOKENS, len(SLOTS), tables, dropout)
    program = Program(device)
    rec = Recorder(program, training=True)
    x, dx = (persistent((TOKENS, 64), "f32", "workspace", name) for name in ("x", "dx"))
    rec.node(lambda: None, inputs=[], outputs=[x], trains=True)
    block = LayerContext(rec, decoder.layers[0], inputs, adapters.bind(inputs), None)
    names = [f"self_attn.{module}" for module in MODULES]
    outs = block.linears(x, names) if together else [block.linear(x, name) for name in names]
    out = {module: persistent(y.shape, "f32", "workspace", module) for module, y in zip(MODULES, outs, strict=True)}
    dys = {module: persistent(y.shape, "f32", "workspace", f"d{module}") for module, y in out.items()}
    for y, (module, into) in zip(outs, out.items(), strict=True):
        program.dispatch(add_forward, y, y, into, size=y.size)
        if not together:
            rec.give_gradient(y, dys[module])
    if together:
        dy = rec.temps(*(y.shape for y in outs))
        for part, module in zip(dy, MODULES, strict=True):
            program.dispatch(add_forward, dys[module], dys[module], part, size=part.size)
        rec.give_gradient(replace(outs[0], shape=(outs[0].storage.nbytes // 4,)), replace(dy[0], byte_offset=0))
    rec.backward()
    program.dispatch(add_forward, rec.gradient(x), rec.gradient(x), dx, size=x.size)
    model: Any = SimpleNamespace(device=device, decoder=decoder)
    norms = Norms(model, adapters)
    storages = program.persistent_storages() | decoder.storages() | {page.storage for page in adapters.grads}
    storages |= norms.program.persistent_storages() | adapters.storages() | inputs.storages()
    allocate(device, storages)
    values: Values = {"x": rng.standard_normal((TOKENS, 64), np.float32)}
    for module in MODULES:
        linear = decoder.layers[0].linears[f"self_attn.{module}"]
        assert linear.bias is not None
        for tensor, content in linear.weight.synthetic(rng):
            write(device, tensor, 10 * content)
        values[f"{module}.W"] = linear.weight.values(device)
        values[f"{module}.bias"] = rng.standard_normal(linear.bias.shape, np.float32)
        write(device, linear.bias, values[f"{module}.bias"])
        size = linear.weight.out_features
        shapes = {"A.0": (RANK, 64), "B.0": (size, RANK), "A.1": (4, 64), "B.1": (size, 4), "M.0": (size,)}
        shapes |= {"A0.0": (3, 64), "B0.0": (size, 3)}
        values |= {f"{module}.{n}": 0.1 * rng.standard_normal(shape, np.float32) for n, shape in shapes.items()}
        values[f"{module}.M.0"] += 1
    adapters.upload_constants(device)
    for slot in range(2):
        parts = "AB" if slot or offset else "ABM"
        own = {path[m]: tuple(values[f"{m}.{key}.{slot}"] for key in parts) for m in MODULES}
        adapters.write(device, slot, own)
    if adapters.offset:
        adapters.offset.write(device, 0, {path[m]: (values[f"{m}.A0.0"], values[f"{m}.B0.0"]) for m in MODULES})
    draws = rng.integers(0, 2**32, (TOKENS, 4), np.uint32) if dropout else None
    if draws is not None and inputs.draws:
        draws[:, 2], draws[:, 3] = (1 - KEPT) * 2**32, np.float32(1 / KEPT).view(np.uint32)
        draws[:2], draws[20:] = (0, 0, 0, np.float32(1).view(np.uint32)), (0, 0, 0, np.float32(1).view(np.uint32))
        write(device, inputs.draws, draws)
    write(device, inputs.slot_ranges, np.array(SLOTS, np.uint32))
    output_gradients = {module: rng.standard_normal(out[module].shape, np.float32) for module in MODULES}
    for module in MODULES:
        write(device, dys[module], output_gradients[module] / (2 if together else 1))
    write(device, x, values["x"])
    arena = Arena(device, Arena.sizes_for([program.plan(), norms.program.plan()]))
    if adapters.gains:
        norms.measure()
        norms.program.build(arena)
        norms.program.run()
    program.build(arena)
    program.run()
    forward = expected(values, draws, {module: adapters.numbers[path[module]] for module in MODULES}, offset)
    for module, want in forward(values).items():
        output = device.read(out[module].storage.buffer).view(np.float32).reshape(want.shape) / 2
        assert nmse(output, want) < CLOSE, module
    gradients = {"x": device.read(dx.storage.buffer).view(np.float32).reshape(TOKENS, 64) / 2}
    for slot in range(2):
        for module, pair in adapters.read(device, slot, adapters.grads).items():
            name = module.rpartition(".")[2]
            gradients |= {f"{name}.{key}.{slot}": m for key, m in zip("ABM", pair, strict=False)}
    assert ("q_proj.M.0" in gradients) != offset
    for name, gradient in gradients.items():  # the loss is linear in each alone but B, and B's is exact to h^2
        way, h = rng.standard_normal(gradient.shape), 1e-5
        ahead, behind = (forward({**values, name: values[name] + sign * h * way}) for sign in (1, -1))
        slope = sum(((ahead[m] - behind[m]) * output_gradients[m]).sum() for m in MODULES) / (2 * h)
        scale = np.linalg.norm(gradient) * np.linalg.norm(way)
        assert abs((gradient * way).sum() - slope) < 1e-5 * scale, name
    arena.free()
    release(device, storages)


# -- tied embeddings ---------------------------------------------------------------------------------------------------


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def beside(directory: Path, head: np.ndarray) -> Path:
    model = small(directory, "qwen2", tie_word_embeddings=True)
    weights = load_file(model / "model.safetensors")
    save_file(weights | {HEAD: head}, model / "model.safetensors", metadata={"format": "pt"})
    return model


def embedding(directory: Path) -> np.ndarray:
    return load_file(small(directory, "qwen2", tie_word_embeddings=True) / "model.safetensors")[EMBEDDING]


def test_a_copy_is_passed_over(tmp_path: Path) -> None:
    values = embedding(tmp_path / "plain")
    assert HEAD not in read_model(beside(tmp_path / "copy", values)).config.parameters
    assert HEAD not in read_model(beside(tmp_path / "wider", values.astype(np.float32))).config.parameters


@pytest.mark.parametrize("row", [0, 63, 64, 4095, None])
def test_another_head_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: int | None) -> None:
    """transformers would use it. Compared by pieces of 64 rows. None: of another shape."""
    monkeypatch.setattr(model_files, "_AT_A_TIME", 64 * 64)
    values = embedding(tmp_path / "plain")
    if row is not None:
        values[row, 5] += 1
    model = beside(tmp_path / "other", values[:-1] if row is None else values)
    with pytest.raises(UserError, match=f"{HEAD} in .* differs from {EMBEDDING}, although config.json ties them"):
        read_model(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))  # as the message says
    if row is not None:
        assert HEAD in read_model(model).config.parameters


# -- target modules ----------------------------------------------------------------------------------------------------


CONFIG = load_config(MODELS / "qwen3")  # two layers
NAMES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("option", "expected", "names"),
    [
        ("all-linear", [path_of(i, name) for i in (0, 1) for name in NAMES], NAMES),
        (" v_proj , q_proj,", [path_of(i, n) for i in (0, 1) for n in ("q_proj", "v_proj")], ("q_proj", "v_proj")),
        ("self_attn.q_proj", [path_of(0, "q_proj"), path_of(1, "q_proj")], ("q_proj",)),
        ("layers.1.mlp.up_proj,k_proj", [path_of(0, "k_proj"), *(path_of(1, n) for n in ("k_proj", "up_proj"))],
         ("k_proj", "1.mlp.up_proj")),
        (r".*\.[01]\.self_attn\.(q|o)_proj", [path_of(i, n) for i in (0, 1) for n in ("q_proj", "o_proj")],
         ("q_proj", "o_proj")),
        ("mlp", [path_of(i, name) for i in (0, 1) for name in NAMES[4:]], NAMES[4:]),
        ("attention,up_proj", [path_of(i, name) for i in (0, 1) for name in (*NAMES[:4], "up_proj")],
         (*NAMES[:4], "up_proj")),
        (r".*layers\.(?!0\.).*down_proj", [path_of(1, "down_proj")], ("1.mlp.down_proj",)),
    ],
)  # fmt: skip
def test_what_is_meant(option: str, expected: list[str], names: tuple[str, ...]) -> None:
    modules = resolve_target_modules(option, CONFIG)
    assert modules == expected
    assert shortest(modules, CONFIG) == names
    assert resolve_target_modules(",".join(names), CONFIG) == expected


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("q_proj,zork", r"has no 'zork': choose among q_proj, .*, down_proj, mlp, attention, or 'all-linear'\.$"),
        ("proj", "has no 'proj'"),  # not the end of a name
        ("lm_head", "has no 'lm_head'"),
        (r"q_proj|v_proj.*", r"matches none of the model's modules: .* such as model\.layers\.0\.self_attn\.q_proj"),
        (
            "(q_proj",
            r"cannot be used: '\(q_proj' is not a regular expression \(missing \), unterminated subpattern\)\.$",
        ),
    ],
)
def test_what_the_model_does_not_have_is_refused(option: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        resolve_target_modules(option, CONFIG)


def test_matrices_that_are_kept_are_named_too() -> None:
    """PEFT would leave out modules that adapter_config.json does not name, without an error."""
    config = load_config(MODELS / "qwen3_5_text")
    names = shortest(list(config.lora_modules), config)
    assert {"in_proj_a", "in_proj_b"} <= set(names)
    assert resolve_target_modules(",".join(names), config) == list(config.lora_modules)
    assert shortest([path_of(0, "in_proj_a")], config) == ("in_proj_a",)
