"""The types of GGUF files: values are those of the gguf package, on the host and on the device."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from support.gguf_files import random_model, write_gguf

from wgpu_lora.errors import UserError
from wgpu_lora.formats.gguf.gguf_checkpoint import GGUFCheckpoint, GGUFTensor
from wgpu_lora.formats.gguf.gguf_header import Header, TensorInfo
from wgpu_lora.formats.gguf.gguf_layout import Layout, Tiled
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.weights.base_formats import GGUF_PATTERN
from wgpu_lora.weights.gguf.gguf_formats import FORMATS, GGUFFormat, random_blocks


def test_the_pattern_is_that_of_the_types() -> None:
    names = [kind.name.lower() for kind in GGMLQuantizationType]
    assert sorted(FORMATS) == sorted(name for name in names if re.fullmatch(GGUF_PATTERN, name))


@pytest.mark.parametrize("item", FORMATS.values(), ids=FORMATS)
def test_values_are_those_of_the_gguf_package(item: GGUFFormat, rng: np.random.Generator) -> None:
    """Any bits but for scales that are not finite: small half floats below 2^-14, negative ones, zeros."""
    for blocks in (1, 3, 4):
        rows = rng.integers(0, 256, (7, blocks * item.block_bytes), np.uint8)
        halves = rows.reshape(-1, item.block_bytes)
        for offset in item.half_offsets:
            halves[:, offset + 1] &= np.resize(np.array([0x80, 0x83, 0xBB, 0x00], np.uint8), len(halves))
        assert item.finite(rows)
        codes, scales = item.to_words(rows)
        values = item.decode(codes, scales, 7, blocks * item.block)
        np.testing.assert_array_equal(values.astype(np.float32), quants.dequantize(rows, item.kind))
        bits = 32 * (codes.size + scales.size) / values.size
        assert item.bits <= bits <= item.bits * (1.05 if blocks > 1 else 1.13)  # half a word is left of an odd number


def quantized_tables(name: str, values: np.ndarray) -> tuple[np.ndarray, GGMLQuantizationType]:
    if values.ndim == 1:
        return values.astype(np.float32), GGMLQuantizationType.F32
    kind = GGMLQuantizationType.Q8_0 if "token_embd" in name or "attn" in name else GGMLQuantizationType.Q5_1
    return quants.quantize(values, kind), kind


def test_a_file_may_mix_types(device: Device, tmp_path: Path) -> None:
    file = write_gguf(random_model(tmp_path / "source"), tmp_path / "model.gguf", quantize=quantized_tables)
    model = open_model(str(file), device)
    model.load_weights()
    formats = {weight.format for _, weight in model.decoder.matrices()}
    assert formats == {"q8_0", "q5_1"}
    for name, weight in model.decoder.matrices():
        np.testing.assert_array_equal(weight.values(device), model.checkpoint.read_f32(name))
    model.unload()


def test_scales_that_are_not_finite_are_refused(device: Device, tmp_path: Path) -> None:
    file = write_gguf(random_model(tmp_path / "source"), tmp_path / "model.gguf", quantize=quantized_tables)
    model = open_model(str(file), device)
    name = "model.layers.0.mlp.up_proj.weight"
    info = model.checkpoint._tensors[name]
    data = bytearray(file.read_bytes())
    data[info.offset + 24 : info.offset + 26] = np.float16(np.inf).tobytes()
    file.write_bytes(data)
    with pytest.raises(UserError, match=f"{name} has scales that are NaN or infinite: download or convert"):
        model.load_weights()


@pytest.mark.parametrize(("head", "block"), [(64, 32), (256, 256), (64, 256)])
def test_columns_move_by_whole_blocks(tmp_path: Path, rng: np.random.Generator, head: int, block: int) -> None:
    """Value heads are dealt out in files. A matrix whose blocks that would divide has no type of its own."""
    item = FORMATS["q8_0" if block == 32 else "q6_k"]
    size_in, kind = 4 * head, item.kind
    rows = random_blocks(item, 3, size_in, rng)
    (tmp_path / "file").write_bytes(rows.tobytes())
    info = TensorInfo(kind, (3, size_in), 0, rows.nbytes)
    layout = Layout(columns=Tiled(2, 4))
    checkpoint = GGUFCheckpoint(
        Header(tmp_path / "file", {}, {"w": info}), {"a.weight": GGUFTensor("w", (3, size_in), layout)}
    )
    assert GGML_QUANT_SIZES[kind][0] == block
    if head % block:
        assert checkpoint.base_format("a.weight") is None
        return
    assert checkpoint.base_format("a.weight") == item.name
    blocks = checkpoint.read_blocks("a.weight", item.name, 1, 3)
    values = item.decode(*item.to_words(blocks), 2, size_in).astype(np.float32)
    np.testing.assert_array_equal(values, checkpoint.read_f32("a.weight", 1, 3))


def test_types_are_for_gguf_files(device: Device, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="base_dtype='q4_k' is not possible: GGUF files keep their types by default"):
        open_model(str(random_model(tmp_path / "source")), device, "q4_k")
