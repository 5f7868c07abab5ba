"""Low-bit formats: layouts, what is stored, models that are loaded, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.models import FIXTURES, full_logits, golden, golden_rows, relative_error
from support.training import golden_arguments

from wgpu_lora.errors import NotFiniteError, UserError
from wgpu_lora.export.decoded import DecodedCheckpoint
from wgpu_lora.export.quantized_model import write_packed
from wgpu_lora.formats.packed_checkpoint import PackedCheckpoint
from wgpu_lora.formats.safetensors_checkpoint import SINGLE
from wgpu_lora.formats.safetensors_header import read_header
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.batch_inputs import Segment
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.train.finetune import prepare_job
from wgpu_lora.train.run.training_log import LOG, read_log
from wgpu_lora.weights.base_formats import BASE_FORMATS, base_format
from wgpu_lora.weights.lowbit.kmeans_reference import fit, fit_int8
from wgpu_lora.weights.lowbit.lowbit_layout import (
    decode,
    from_words,
    pack,
    row_bytes,
    to_words,
    unpack,
    word_rows,
)

MODEL = str(FIXTURES / "models" / "qwen3")
UP, Q = "model.layers.0.mlp.up_proj.weight", "model.layers.0.self_attn.q_proj.weight"


def logits(model: LoadedModel) -> list[np.ndarray]:
    model.load_weights()
    return full_logits(model, [Segment(ids) for ids in golden_rows(golden("qwen3"), "input_ids")])


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("size_in", [1, 13, 32, 77])
def test_layouts_turn_into_each_other(rng: np.random.Generator, bits: int, size_in: int) -> None:
    codes = rng.integers(0, 2**bits, (5, size_in), np.uint8)
    packed = pack(codes, bits)
    words = to_words(packed, size_in, bits)
    assert packed.shape == (5, row_bytes(size_in, bits))
    assert words.shape == (word_rows(size_in, bits), 5)
    for (row, i), code in np.ndenumerate(codes):
        if bits == 3:
            high = words[-(-size_in // 16) + i // 32, row] >> (i % 32) & 1
            assert (words[i // 16, row] >> (2 * (i % 16)) & 3) | high << 2 == code
        else:
            assert words[i * bits // 32, row] >> (i * bits % 32) & (2**bits - 1) == code
    np.testing.assert_array_equal(unpack(packed, size_in, bits).view(np.uint8), codes)
    words[-1] |= 0 if size_in * bits % 32 == 0 or bits == 3 else np.uint32(1 << 31)  # padding is not kept
    np.testing.assert_array_equal(from_words(words, size_in, bits), packed)


@pytest.mark.parametrize(("bits", "distortion"), [(2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_a_fit_to_normal_values_is_as_good_as_the_optimal_quantiser(
    rng: np.random.Generator, bits: int, distortion: float
) -> None:
    """Max 1960, table I: the mean squared error of the best 2^bits values for N(0, 1)."""
    w = rng.standard_normal((4, 8192))
    error = ((decode(*fit(w, bits, 0), bits) - w) ** 2).mean() / (w**2).mean()
    assert 0.9 * distortion < error < 1.03 * distortion


def test_weights_of_inputs_decide_what_a_table_is_near_to(rng: np.random.Generator) -> None:
    w, importance = rng.standard_normal((8, 64)), np.where(np.arange(64) % 16 == 3, 1000.0, 1.0)

    def error(weights: np.ndarray | None) -> float:
        codes, table, scales = fit(w, 2, 16, weights)
        return float((importance * (decode(codes, table, scales, 2) - w) ** 2).sum())

    assert error(importance) < 0.5 * error(None)


def test_eight_bits_clip_nothing(rng: np.random.Generator) -> None:
    w = rng.standard_normal((7, 64)) * np.exp(rng.standard_normal((7, 1)) * 4)
    w[2] = 0
    codes, scales = fit_int8(w, 32)
    step = np.repeat(scales.T.astype(np.float64), 32, axis=1)
    assert (np.abs(codes * step - w) <= 0.501 * step).all()


@pytest.mark.parametrize("name", ["q2a8-g16"])
def test_a_model_is_quantised_saved_and_loaded_as_it_was(device: Device, tmp_path: Path, name: str) -> None:
    model, saved = open_model(MODEL, device, name), tmp_path / "saved"
    expected = logits(model)
    write_packed(model, saved)
    source = model.checkpoint.read_f32(UP)
    weight = model.decoder.layers[0].linears["mlp.up_proj"].weight
    fitted, reference = weight.values(device), base_format(name).round_trip(source)
    assert ((fitted - source) ** 2).sum() < 1.01 * ((reference - source) ** 2).sum()
    stated = json.loads((saved / "config.json").read_text())["quantization_config"]
    assert (stated["quant_method"], stated["base_dtype"]) == ("wgpu_lora", name)
    again = open_model(str(saved), device)
    assert (again.config.packed, again.decoder.base_dtype) == (name, name)
    formats = {name: weight.format for name, weight in again.decoder.matrices()}
    assert (formats[UP], formats[Q]) == ("lut2-g16", "int8-g16")
    assert {w.format for w in again.decoder.weights()} == {w.format for w in model.decoder.weights()}
    assert sum(s.nbytes for s in again.decoder.storages()) == sum(s.nbytes for s in model.decoder.storages())
    for have, want in zip(logits(again), expected, strict=True):
        np.testing.assert_array_equal(have, want)
    with pytest.raises(UserError, match=f"are stored in {name.upper()}"):
        open_model(str(saved), device, "bf16")


@pytest.mark.parametrize("name", ["lut2-g16", "int8-row", "q3a4", "q2a2-g64", "lut2", "lut3", "lut4", "int8"])
def test_names(name: str) -> None:
    assert name in BASE_FORMATS
    assert base_format(name).name == name


@pytest.mark.parametrize("name", ["lut5", "lut2-g8", "q2", "q2a5", "lut2-row-g16", "LUT2"])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="is not known"):
        base_format(name)


def test_a_group_must_divide_the_inputs(device: Device) -> None:
    with pytest.raises(UserError, match=r"_proj.weight has \d+ inputs, which groups of 64 do not divide: use base"):
        open_model(MODEL, device, "lut2-g64")


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda t, c: t.update({UP: t[UP][:-1]}), "has shape"),
        (lambda t, c: t.update({UP: t[UP].astype(np.float16)}), "types"),
        (lambda t, c: t.update({f"{UP}.table": t[f"{UP}.table"][:, :3]}), "not stored in any scheme"),
        (lambda t, c: t.update({f"{UP}.table": t[f"{UP}.table"][:-1]}), "has shape"),
        (lambda t, c: t.update({f"{UP}.table": t[f"{UP}.table"].astype(np.float32)}), "types U8, F32, F16"),
        (lambda t, c: t.update({f"{UP}.scales": t[f"{UP}.scales"][:-1]}), "states lut2-g16"),
        (lambda t, c: t.pop(f"{UP}.scales"), "stored as lut2-row, but config.json states lut2-g16"),
        (lambda t, c: t.pop(f"{UP}.table"), "stored as int8-g16"),
        (lambda t, c: t.pop(UP), "missing"),
        (lambda t, c: c.update(base_dtype="lut3-g16"), "config.json states lut3-g16"),
        (lambda t, c: c.update(base_dtype="lut9"), "stored as 'wgpu_lora'"),
        (lambda t, c: c.update(base_dtype=[]), "stored as 'wgpu_lora'"),
        (lambda t, c: c.update(base_dtype="q2a4", mlp="lut3"), "states base_dtype 'q2a4', but mlp 'lut3'"),
        (lambda t, c: c.update(mlp="lut4"), "states base_dtype 'lut2-g16', but mlp 'lut4'"),
    ],
)
def test_damage_is_said(device: Device, stored: Path, tmp_path: Path, damage: Callable[..., Any], said: str) -> None:
    tensors, config = load_file(stored / SINGLE), json.loads((stored / "config.json").read_text())
    damage(tensors, config["quantization_config"])
    save_file(tensors, tmp_path / SINGLE, {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=said):
        open_model(str(tmp_path), device)


@pytest.fixture(scope="module")
def stored(device: Device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("lowbit") / "stored"
    write_packed(open_model(MODEL, device, "lut2-g16"), found)
    return found


@pytest.mark.parametrize("name", [UP, f"{UP}.table", f"{UP}.scales", "model.embed_tokens.weight", "model.norm.weight"])
def test_values_that_were_not_written_are_refused(device: Device, stored: Path, tmp_path: Path, name: str) -> None:
    shutil.copytree(stored, tmp_path / "m")
    entry = read_header(tmp_path / "m" / SINGLE)[name]
    data = bytearray((stored / SINGLE).read_bytes())
    data[entry.offset + 1] ^= 1
    (tmp_path / "m" / SINGLE).write_bytes(data)
    with pytest.raises(UserError, match=f"{SINGLE} is damaged, since its values are not those that were written"):
        open_model(str(tmp_path / "m"), device).load_weights()
    with pytest.raises(UserError, match="not those that were written"):
        DecodedCheckpoint(PackedCheckpoint(tmp_path / "m", "lut2-g16"))
    save_file(load_file(tmp_path / "m" / SINGLE), tmp_path / "m" / SINGLE, {"format": "pt"})  # as earlier versions
    open_model(str(tmp_path / "m"), device).load_weights()


def with_tensors(stored: Path, directory: Path, tensors: dict[str, np.ndarray]) -> str:
    save_file(tensors, directory / SINGLE, {"format": "pt"})
    shutil.copyfile(stored / "config.json", directory / "config.json")
    return str(directory)


@pytest.mark.parametrize("part", ["table", "scales"])
def test_constants_are_finite(device: Device, stored: Path, tmp_path: Path, part: str) -> None:
    tensors = load_file(stored / SINGLE)
    tensors[f"{UP}.{part}"][1, 1] = np.inf
    with pytest.raises(NotFiniteError, match=UP):
        open_model(with_tensors(stored, tmp_path, tensors), device).load_weights()


def test_constants_in_f32(device: Device, stored: Path, tmp_path: Path) -> None:
    """As training leaves them: the same model, exactly, if they are the same values."""
    tensors = load_file(stored / SINGLE)
    wide = {n: t.astype(np.float32) if n.endswith((".table", ".scales")) else t for n, t in tensors.items()}
    model = open_model(with_tensors(stored, tmp_path, wide), device)
    for have, want in zip(logits(model), logits(open_model(str(stored), device)), strict=True):
        assert relative_error(have, want) < 1e-6
    packed = model.decoder.layers[0].linears["mlp.up_proj"].weight.packed(device)
    assert packed.parts == ("codes", "table:f32", "scales:f32")


@pytest.mark.slow
def test_training_is_that_of_the_decoded_weights(device: Device, tmp_path: Path) -> None:
    """A run on codes, and one on what they represent in f32: forward, backward, LoRA and stacks."""
    args = golden_arguments(tmp_path, "qwen3", max_steps=2, tune=False)
    model, plain = open_model(MODEL, device, "q2a4-g16"), tmp_path / "plain"
    model.load_weights()
    decoded = {name: weight.values(device) for name, weight in model.decoder.matrices() if "layers" in name}
    model.unload()
    shutil.copytree(MODEL, plain)
    save_file({**load_file(plain / SINGLE), **decoded}, plain / SINGLE, {"format": "pt"})
    losses = []
    for source, base in ((MODEL, "q2a4-g16"), (str(plain), "f32")):
        run = tmp_path / base
        record = prepare_job(replace(args, model=source, base_dtype=base, output=str(run))).train()
        assert record.options.base_dtype == base
        losses.append([line["loss"] for line in read_log(run / LOG)])
    np.testing.assert_allclose(*losses, rtol=1e-5)
