"""K-quants: what dequantisers read is what was packed, in llama.cpp's layout, and as near as its own packing comes."""

from __future__ import annotations

import hashlib

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from wgpu_lora.formats.gguf.kquants import CHUNK, SUPER, quantize_k

KINDS = {4: Q.Q4_K, 5: Q.Q5_K, 6: Q.Q6_K}
# Root mean square errors of ggml_quantize_chunk (llama.cpp of llama-cpp-python 0.3.36) on the same values, as a share
# of theirs; `tests/exchange` measures them anew.
GGML = {(4, "gaussian"): 0.07088, (5, "gaussian"): 0.03593, (6, "gaussian"): 0.01761}
GGML |= {(4, "heavy"): 0.09294, (5, "heavy"): 0.04687, (6, "heavy"): 0.02579}
# SHA-256 of what the rows of `exact_rows` are packed into. No rounding is in them, so they are the same everywhere; of
# Q4_K and Q5_K they are also ggml's own bytes.
GOLDEN = {
    4: "2689b8a8c1fff1f2da772db0277a630f7dd45d74ea718f1e4987679edd6e9329",
    5: "691e5e59a1e834094fb926ed9b1cc9a962c00edd3651f7b6bfdc5d9a7cfff128",
    6: "ac508e990a879c5a8319fa0714390014d6e2e41821fb09c5747f526eeb9522b1",
}


def unpacked(values: np.ndarray, bits: int) -> np.ndarray:
    packed = quantize_k(np.asarray(values, np.float32), bits)
    assert packed.dtype == np.uint8
    return gguf.dequantize(packed, KINDS[bits])


def exact_rows(bits: int) -> np.ndarray:
    """Rows that a type holds exactly: every code, and all kinds of scales and lows. [6, 512]"""
    rng = np.random.Generator(np.random.PCG64(bits))
    size = 16 if bits == 6 else 32
    codes = rng.integers(-32, 32, (12, SUPER // size, size)) if bits == 6 else rng.integers(0, 2**bits, (12, 8, size))
    if bits == 6:
        codes[:, :, 0], codes[:, :, 1] = -32, 31
        scales = rng.integers(-127, 128, (12, 16, 1))
        scales[:, 3] = -128
        return (codes * scales * 2.0**-12).astype(np.float32).reshape(6, 512)
    codes[:, :, 0], codes[:, :, 1] = 0, 2**bits - 1
    scales, lows = rng.integers(1, 64, (12, 8, 1)), rng.integers(0, 64, (12, 8, 1))
    scales[:, 2] = lows[:, 5] = 63
    return (codes * scales * 2.0**-10 - lows * 2.0**-8).astype(np.float32).reshape(6, 512)


def made(kind: str, rows: int = 64) -> np.ndarray:
    rng = np.random.default_rng(3)
    values = rng.normal(0, 1, (rows, 1024)) if kind == "gaussian" else rng.standard_t(3, (rows, 1024))
    return values.astype(np.float32)


@pytest.mark.parametrize("bits", KINDS)
def test_what_can_be_held_exactly_is(bits: int) -> None:
    rows = exact_rows(bits)
    np.testing.assert_array_equal(unpacked(rows, bits), rows)
    assert hashlib.sha256(quantize_k(rows, bits).tobytes()).hexdigest() == GOLDEN[bits]


@pytest.mark.parametrize("kind", ["gaussian", "heavy"])
@pytest.mark.parametrize("bits", KINDS)
def test_the_error_is_that_of_llama_cpp(bits: int, kind: str) -> None:
    values = made(kind)
    error = np.sqrt(np.mean((unpacked(values, bits) - values) ** 2)) / values.std()
    print(bits, kind, error)
    assert error < 1.03 * GGML[bits, kind]


@pytest.mark.parametrize("bits", KINDS)
def test_odd_values(bits: int) -> None:
    zeros = np.zeros((1, SUPER), np.float32)
    np.testing.assert_array_equal(unpacked(zeros, bits), zeros)
    outlier = made("gaussian", 1)[:, :SUPER]
    outlier[0, 7] = 1000.0
    cases = {
        "constant": np.full((1, SUPER), 0.37),
        "negative": np.full((1, SUPER), -0.37),
        "huge": np.linspace(-65504, 65504, SUPER)[None],
        "positive": np.linspace(1.0, 2.0, SUPER)[None],
        "outlier": outlier,
        "half zero": np.where(np.arange(SUPER) < 100, 0.0, 0.5)[None],
    }
    for name, values in cases.items():
        found = unpacked(values, bits)
        assert np.abs(found - values).max() <= 0.05 * np.abs(values).max(), name
    # Too small for 16 bits, and so zero or nearly.
    assert np.abs(unpacked(made("gaussian", 1) * 1e-12, bits)).max() < 1e-6


@pytest.mark.parametrize("bits", KINDS)
def test_super_blocks_know_nothing_of_each_other(bits: int) -> None:
    rows = made("heavy", CHUNK // 4 + 3)
    packed = quantize_k(rows, bits)
    for row in (0, 1, len(rows) - 1):
        np.testing.assert_array_equal(packed[row : row + 1], quantize_k(rows[row : row + 1], bits))
