"""Low-bit formats: layouts, what is stored, models that are loaded, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.models import FIXTURES, full_logits, golden, golden_rows, relative_error
from support.training.training import golden_arguments

from wgpu_lora.errors import NotFiniteError, UserError
from wgpu_lora.formats.safetensors_checkpoint import SINGLE, PackedCheckpoint
from wgpu_lora.formats.safetensors_header import read_header
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import allocate, release
from wgpu_lora.models.batch_inputs import Segment
from wgpu_lora.models.export.model_directory import DecodedCheckpoint
from wgpu_lora.models.export.quantized_model import write_packed
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.train.prepare_job import prepare_job
from wgpu_lora.train.run.training_log import LOG, read_log
from wgpu_lora.weights.base import Loading, Shared
from wgpu_lora.weights.base_formats import BASE_FORMATS, base_format
from wgpu_lora.weights.lowbit import lowbit_packing
from wgpu_lora.weights.lowbit.kmeans_kernels import fit, fit_int8, lut_lloyd
from wgpu_lora.weights.lowbit.lowbit import LowBitWeight, quantised
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
    ("damage", "message"),
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
def test_damage_is_said(device: Device, stored: Path, tmp_path: Path, damage: Callable[..., Any], message: str) -> None:
    tensors, config = load_file(stored / SINGLE), json.loads((stored / "config.json").read_text())
    damage(tensors, config["quantization_config"])
    save_file(tensors, tmp_path / SINGLE, {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=message):
        open_model(str(tmp_path), device)


@pytest.fixture(scope="module")
def stored(device: Device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("lowbit") / "stored"
    write_packed(open_model(MODEL, device, "lut2-g16"), directory)
    return directory


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


# -- packing on the device ---------------------------------------------------------------------------------------------


@dataclass
class Source:
    """A matrix as the part of a checkpoint that is loaded."""

    w: np.ndarray

    def dtype(self, name: str) -> str:
        return "F32"

    def read_raw(self, name: str, row_start: int = 0, row_stop: int | None = None) -> np.ndarray:
        return self.w[row_start:row_stop]

    read_f32 = read_raw

    def packed(self, name: str) -> None:
        return None


def fitted(device: Device, w: np.ndarray, scheme: str, importance: np.ndarray | None = None) -> tuple[Any, ...]:
    """(codes, table, scales) of w as the device fits them."""
    out, size_in = w.shape
    weight = base_format(scheme).declare((out, size_in), "w", Shared(device.max_binding))
    assert isinstance(weight, LowBitWeight)
    before = device.allocated
    allocate(device, set(weight.storages()))
    try:
        with Loading(device, [weight], {} if importance is None else {"w": importance}) as loading:
            weight.load(loading, Source(w), "w")
        packed, *constants = weight._read(device)
        return unpack(packed, size_in, weight.scheme.bits), *constants
    finally:
        release(device, weight.storages())
        assert device.allocated == before


def error(w: np.ndarray, codes: tuple[Any, ...], bits: int, importance: Any = 1.0) -> float:
    return float((importance * (decode(*codes, bits) - w) ** 2).sum())


def heavy(rng: np.random.Generator, out: int, size_in: int) -> np.ndarray:
    """Values with outliers in a few inputs, as the weights of models have them."""
    w = 0.02 * rng.standard_normal((out, size_in), np.float32)
    w[:, :: size_in // 3] *= 12
    return w


@pytest.mark.parametrize(
    ("scheme", "bits"), [("lut2-row", 2), ("lut2-g16", 2), pytest.param("lut4-g32", 4, marks=pytest.mark.slow)]
)
def test_a_fit_is_at_least_as_good_as_the_reference(
    device: Device, rng: np.random.Generator, scheme: str, bits: int
) -> None:
    w, importance = heavy(rng, 40, 256), np.exp(rng.standard_normal(256)).astype(np.float32)
    codes = fitted(device, w, scheme, importance)
    of = base_format(scheme).scheme  # type: ignore[attr-defined]
    reference = fit(w, bits, of.group, importance)
    assert error(w, codes, bits, importance) < 1.01 * error(w, reference, bits, importance)
    assert error(w, codes, bits, importance) < error(w, fitted(device, w, scheme), bits, importance)


def test_codes_are_the_nearest_to_the_rounded_table_and_scales(device: Device, rng: np.random.Generator) -> None:
    w = heavy(rng, 24, 128)
    codes, table, scales = fitted(device, w, "lut2-g16")
    x = w / np.repeat(scales.T.astype(np.float64), 16, axis=1)
    nearest = np.abs(x[:, :, None] - table[:, None].astype(np.float64)).argmin(axis=2)
    assert (codes == nearest).mean() > 0.9995  # some are as near to f32
    assert (np.diff(table.astype(np.float64), axis=1) >= 0).all()


@pytest.mark.parametrize("scheme", ["int8", "int8-row"])
def test_eight_bits_are_the_reference(device: Device, rng: np.random.Generator, scheme: str) -> None:
    w = heavy(rng, 24, 96)
    codes, _, scales = fitted(device, w, scheme)
    expected, _, want = quantised(w, base_format(scheme).scheme)  # type: ignore[attr-defined]
    np.testing.assert_allclose(scales.astype(np.float64), want.astype(np.float64), rtol=2**-10)
    assert np.abs(codes.astype(int) - expected).max() <= 1


def test_pieces_and_rows_do_not_depend_on_each_other(
    device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = heavy(rng, 21, 64)
    whole = fitted(device, w, "lut2-g16")
    monkeypatch.setattr(lowbit_packing, "PIECE_BYTES", 4 * 64 * 8)
    for got, want in zip(fitted(device, w, "lut2-g16"), whole, strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("scheme", ["lut2-row", "lut2-g16", "int8"])
def test_groups_of_zeros_stay_zeros(device: Device, rng: np.random.Generator, scheme: str) -> None:
    w = heavy(rng, 8, 64)
    w[3], w[5, :32], w[6] = 0, 0, 0.25
    weights = decode(*fitted(device, w, scheme), base_format(scheme).scheme.bits)  # type: ignore[attr-defined]
    assert np.abs(weights[3]).max() < 1e-6
    np.testing.assert_allclose(weights[6], 0.25, rtol=2e-3)
    if not scheme.endswith("row"):
        assert np.abs(weights[5, :32]).max() < 1e-6


def test_values_that_f16_cannot_hold_are_refused(device: Device) -> None:
    with pytest.raises(UserError, match=r"^w has values that f16 cannot hold: quantise this model to nf4 instead\.$"):
        fitted(device, np.full((4, 32), 1e6, np.float32), "lut2-row")


def test_values_that_are_not_finite_are_left_to_the_audit(device: Device, rng: np.random.Generator) -> None:
    w = heavy(rng, 4, 32)
    w[1, 3], w[2, 5] = np.nan, np.inf
    codes, *_ = fitted(device, w, "lut2-row")
    assert codes.shape == w.shape


def test_references_leave_out_what_rounding_decides() -> None:
    """Values on the threshold between two centres, of one row or of all."""
    c: dict[str, Any] = {"rows": 2, "size_in": 4, "group": 0, "bits": 2}
    table = np.array([[-2.0, -1, 1, 2], [-2, -1, 1, 2]])
    w = np.array([[-2.0, -1, 1, 2], [-2, 0, 1, 2]])
    values = lut_lloyd(w, table, iterations=1, **c)
    np.testing.assert_array_equal(np.isnan(values), [[False] * 4, [True] * 4])
    assert lut_lloyd(np.zeros((2, 4)), table, iterations=1, **c) is None
