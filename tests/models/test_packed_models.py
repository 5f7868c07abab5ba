"""Models packed to NF4 as bitsandbytes has them: read as they are, written the same way, damage said."""

from __future__ import annotations

import json
from collections.abc import Callable
from ctypes import c_longlong
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.gguf_models import make_adapter
from support.models import ARCHITECTURES, FIXTURES, full_logits, golden, golden_rows, load, relative_error

from wgpu_lora.cli.app import main
from wgpu_lora.errors import UserError
from wgpu_lora.formats.safetensors_checkpoint import INDEX, SINGLE
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.batch_inputs import Segment
from wgpu_lora.models.export.adapter_merge import MergedModel, merge_adapter, scaled_factors
from wgpu_lora.models.export.quantized_model import write_packed
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.weights.nf4.nf4 import BitsAndBytesNF4
from wgpu_lora.weights.nf4.nf4_reference import double_dequantize, from_words, pack_bnb, to_words

STATE = BitsAndBytesNF4.marker


def packed_model(device: Device, architecture: str, output: Path, max_shard_bytes: int = 10**9) -> Path:
    write_packed(load(architecture, device, "nf4"), output, max_shard_bytes=max_shard_bytes)
    return output


def logits(device: Device, architecture: str, directory: Path | None = None) -> list[np.ndarray]:
    model = open_model(str(directory or FIXTURES / "models" / architecture), device)
    model.load_weights()
    return full_logits(model, [Segment(ids) for ids in golden_rows(golden(architecture), "input_ids")])


@pytest.mark.parametrize("shape", [(5, 16), (3, 10), (64, 24)])
def test_layouts_turn_into_each_other(rng: np.random.Generator, shape: tuple[int, int]) -> None:
    values = rng.integers(0, 16, shape, np.uint8)
    packed = pack_bnb(values.reshape(-1))
    words = to_words(packed, shape)
    assert words.shape == (-(-shape[1] // 8), shape[0])
    for n, k in np.ndindex(*shape):
        assert (words[k // 8, n] >> (4 * (k % 8))) & 15 == values[n, k]
    np.testing.assert_array_equal(from_words(words, shape), packed)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_packed_model_is_the_same_model(device: Device, tmp_path: Path, architecture: str) -> None:
    """Bit for bit: nothing is quantised again. With f32 constants too, which are the decoded ones here."""
    directory = packed_model(device, architecture, tmp_path / "nested", 30_000)
    assert (directory / INDEX).is_file()
    expected = logits(device, architecture)
    for have, want in zip(logits(device, architecture, directory), expected, strict=True):
        np.testing.assert_array_equal(have, want)
    plain = packed_model(device, architecture, tmp_path / "plain")
    tensors = load_file(plain / SINGLE)
    for name in [name for name in tensors if name.endswith(STATE)]:
        matrix = name.removesuffix(STATE)
        state = json.loads(tensors[name].tobytes())
        nested, _ = tensors.pop(f"{matrix}.nested_absmax"), tensors.pop(f"{matrix}.nested_quant_map")
        absmax = double_dequantize(tensors[f"{matrix}.absmax"], nested, state["nested_offset"])
        tensors[f"{matrix}.absmax"] = absmax.astype(np.float32)
        flat = {key: value for key, value in state.items() if not key.startswith("nested")}
        tensors[name] = np.frombuffer(json.dumps(flat).encode(), np.uint8)
    save_file(tensors, plain / SINGLE, {"format": "pt"})
    for have, want in zip(logits(device, architecture, plain), expected, strict=True):
        assert relative_error(have, want) < 1e-6


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, output, again = FIXTURES / "models" / "qwen2", tmp_path / "packed", tmp_path / "again"
    assert main(["import", str(source), "--output", str(output)]) == 0
    assert "bytes of weights" in capsys.readouterr().out
    for source_path, target, message in ((source, output, "exists already"), (output, again, "quantised on loading")):
        assert main(["import", str(source_path), "--output", str(target)]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(UserError, match="base_dtype='bf16' is not possible"):
        open_model(str(output), base_dtype="bf16")
    assert [path.name for path in tmp_path.iterdir()] == ["packed"]


@pytest.mark.parametrize("base_dtype", ["nf4", "q2a8-g16"])
def test_merging_and_exporting_decode(device: Device, tmp_path: Path, base_dtype: str) -> None:
    """What is merged is what is on the device; the result is an ordinary model."""
    source, packed, merged = FIXTURES / "models" / "qwen3", tmp_path / "packed", tmp_path / "merged"
    model = load("qwen3", device, base_dtype)
    write_packed(model, packed)
    adapter = make_adapter(tmp_path / "adapter", source)
    merge_adapter(packed, adapter, merged, "f32")
    deltas = scaled_factors(adapter, model.config, source)
    plain = open_model(str(merged), device, "f32")
    assert plain.config.packed is None
    for name, weight in model.decoder.matrices():
        if name in deltas:
            a, b = deltas[name]
            np.testing.assert_allclose(plain.checkpoint.read_f32(name), weight.values(device) + b @ a, atol=1e-6)
            alone = np.concatenate(list(MergedModel(packed).pieces(name)))
            np.testing.assert_array_equal(alone, weight.values(device))


Q = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t, s: s.update(blocksize=128), "blocksize 128"),
        (lambda t, s: s.update(quant_type="fp4"), "quant_type 'fp4'"),
        (lambda t, s: s.update(shape=[1, 2]), "packed with shape"),
        (lambda t, s: s.pop("nested_offset"), "no nested_offset"),
        (lambda t, s: t.update({Q: t[Q][:-1]}), "should have"),
        (lambda t, s: t.update({f"{Q}.absmax": t[f"{Q}.absmax"][:-1]}), "should have"),
        (lambda t, s: t.update({f"{Q}.quant_map": t[f"{Q}.quant_map"][::-1].copy()}), "has a codebook"),
        (lambda t, s: t.pop(f"{Q}.absmax"), "missing"),
        (lambda t, s: t.update({"model.layers.0.extra.weight": np.zeros(3, np.float32)}), "does not account for"),
    ],
)
def test_damage_is_said(device: Device, tmp_path: Path, damage: Callable[..., None], message: str) -> None:
    directory = packed_model(device, "qwen2", tmp_path / "packed")
    tensors = load_file(directory / SINGLE)
    state = json.loads(tensors[Q + STATE].tobytes())
    damage(tensors, state)
    tensors[Q + STATE] = np.frombuffer(json.dumps(state).encode(), np.uint8)
    save_file(tensors, directory / SINGLE, {"format": "pt"})
    with pytest.raises(UserError, match=message):
        open_model(str(directory), device)


@pytest.fixture
def plain_bitsandbytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes without what its CPU kernels for AVX-512 do otherwise.

    They repack weights for products in multiples of 32, and decode a matrix as if its rows were whole blocks of 64: as
    a single row it comes out right.
    """
    ops = pytest.importorskip(
        "bitsandbytes.backends.cpu.ops", reason="bitsandbytes is not installed: make test-reference does that"
    )
    library = ops.lib

    class Flat:
        def __getattr__(self, name: str) -> object:
            function = getattr(library, name)
            if not name.startswith("cdequantize_blockwise_cpu_nf4"):
                return function
            return lambda *call: function(*call[:-2], c_longlong(1), c_longlong(call[-2].value * call[-1].value))

    monkeypatch.setattr(ops, "lib", Flat())
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)


@pytest.mark.reference
@pytest.mark.usefixtures("plain_bitsandbytes")
@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_bitsandbytes_own_files_are_read(device: Device, tmp_path: Path, architecture: str, double: bool) -> None:
    torch, transformers = (
        pytest.importorskip("torch", reason="torch is not installed: make test-reference does that"),
        pytest.importorskip("transformers", reason="transformers is not installed: make test-reference does that"),
    )
    how = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double, bnb_4bit_compute_dtype="float32"
    )
    source = FIXTURES / "models" / architecture
    model = transformers.AutoModelForCausalLM.from_pretrained(source, quantization_config=how, dtype=torch.float32)
    model.save_pretrained(tmp_path / "theirs")
    actual = logits(device, architecture, tmp_path / "theirs")
    for ids, have in zip(golden_rows(golden(architecture), "input_ids"), actual, strict=True):
        with torch.no_grad():
            want = model(torch.tensor(ids[None].astype(np.int64))).logits[0].float().numpy()
        assert relative_error(have, want) < 1e-4


@pytest.mark.reference
@pytest.mark.usefixtures("plain_bitsandbytes")
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_transformers_loads_ours(device: Device, tmp_path: Path, architecture: str) -> None:
    torch, transformers = (
        pytest.importorskip("torch", reason="torch is not installed: make test-reference does that"),
        pytest.importorskip("transformers", reason="transformers is not installed: make test-reference does that"),
    )
    directory = packed_model(device, architecture, tmp_path / "ours", 30_000)
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    expected = logits(device, architecture)
    for ids, have in zip(golden_rows(golden(architecture), "input_ids"), expected, strict=True):
        with torch.no_grad():
            want = model(torch.tensor(ids[None].astype(np.int64))).logits[0].float().numpy()
        assert relative_error(have, want) < 2e-2  # transformers computes these in bfloat16
