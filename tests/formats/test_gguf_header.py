"""Headers of GGUF files: what they say, as the gguf package reads it, or a sentence on what is wrong."""

from __future__ import annotations

import hashlib
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from gguf.constants import GGMLQuantizationType as Kind
from safetensors.numpy import save_file
from support.gguf_files import DEMO, demo_tokenizer, random_model, tensors_of, write_gguf
from support.sampling import sample

from wgpu_lora.errors import UserError
from wgpu_lora.formats.gguf import gguf_header as header_module
from wgpu_lora.formats.gguf import gguf_header as reader_module
from wgpu_lora.formats.gguf.gguf_header import Array, read_header
from wgpu_lora.formats.gguf.gguf_writer import CHUNK, SUPER, quantize_k
from wgpu_lora.models.model_files import read_model

U8, U32, BOOL, STRING, ARRAY = 0, 4, 7, 8, 9


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def key(name: bytes, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def array(kind: int, count: int, items: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + items


def tensor(name: bytes, shape: tuple[int, ...], kind: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


def file_of(keys: Sequence[bytes], tensors: Sequence[bytes] = (), data: int = 0, version: int = 3) -> bytes:
    start = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(keys)) + b"".join([*keys, *tensors])
    return start + bytes(-len(start) % 32 + data)


def test_a_header_says_what_the_gguf_package_reads(tmp_path: Path) -> None:
    path = write_gguf(DEMO, tmp_path / "demo.gguf", Kind.Q8_0, tokenizer=demo_tokenizer, metadata={"x.flag": True})
    header, reader = read_header(path), gguf.GGUFReader(path)
    assert header.values.keys() == {name for name in reader.fields if not name.startswith("GGUF.")}
    for name, value in header.values.items():
        field = reader.fields[name]
        if isinstance(value, Array):
            contents = header.strings(name, value.count) if value.kind == STRING else header.numbers(name, value.count)
            assert list(contents) == field.contents()
        else:
            assert value == field.contents()
    assert len(header.tensors) == len(reader.tensors)
    for tensor in reader.tensors:
        info = header.tensors[tensor.name]
        assert (info.kind, info.shape) == (tensor.tensor_type, tuple(tensor.shape.tolist())[::-1])
        assert (info.offset, info.nbytes) == (tensor.data_offset, tensor.n_bytes)


@pytest.mark.parametrize("count", [0, 1, 70, 9000])
@pytest.mark.parametrize("longest", [3, 60, 300_000])
def test_strings_of_any_length_cross_windows(tmp_path: Path, count: int, longest: int) -> None:
    if count * longest > 10**8:
        count = 70
    rng = np.random.default_rng(count + longest)
    strings = ["é" * (n // 2) + "x" for n in rng.integers(0, longest, count)]
    data = b"".join(text(string.encode()) for string in strings)
    (tmp_path / "f.gguf").write_bytes(file_of([key(b"a", ARRAY, array(STRING, count, data)), key(b"b", U8, b"\7")]))
    header = read_header(tmp_path / "f.gguf")
    assert list(header.strings("a", count) or ()) == strings
    assert header.values["b"] == 7


T = [tensor(b"t", (32, 2), 8, 0)]  # Q8_0, 68 bytes
DAMAGE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "too short"),
    "magic": (b"GGML" + bytes(60), "is not a GGUF file"),
    "v1": (file_of([], version=1), "version 1, but only 2 and 3"),
    "v4": (file_of([], version=4), "version 4"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "tensors": (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "claims 9,223,372,036,854,775,808 tensors"),
    "keys": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**64 - 1), "more than fit into it"),
    "cut off": (file_of([key(b"a", STRING, text(b"x" * 90))])[:60], "does not fit"),
    "a long string": (file_of([key(b"a", STRING, struct.pack("<Q", 2**64 - 1))]), "does not fit"),
    "a long array": (file_of([key(b"a", ARRAY, array(U32, 2**62, b""))]), "does not fit"),
    "many strings": (file_of([key(b"a", ARRAY, array(STRING, 2**61, b""))]), "does not fit"),
    "a string too many": (file_of([key(b"a", ARRAY, array(STRING, 3, text(b"a") * 2))])[:70], "does not fit|ended"),
    "nested arrays": (file_of([key(b"a", ARRAY, array(ARRAY, 1, array(U8, 1, b"\0")))]), "nests arrays"),
    "items of no type": (file_of([key(b"a", ARRAY, array(13, 1, bytes(8)))]), "unknown type 13"),
    "a value of no type": (file_of([key(b"a", 99, bytes(8))]), "unknown type 99"),
    "a boolean of two": (file_of([key(b"a", BOOL, b"\2")]), "true or false"),
    "a key twice": (file_of([key(b"a", U8, b"\1")] * 2), "the key 'a' twice"),
    "a key of no text": (file_of([key(b"\xff\xfe", U8, b"\1")]), "not UTF-8"),
    "a value of no text": (file_of([key(b"a", STRING, text(b"\xc3"))]), "not UTF-8"),
    "alignment 0": (file_of([key(b"general.alignment", U32, bytes(4))]), "not a power of two"),
    "alignment 24": (file_of([key(b"general.alignment", U32, struct.pack("<I", 24))]), "not a power of two"),
    "alignment in words": (file_of([key(b"general.alignment", STRING, text(b"32"))]), "not a power of two"),
    "a tensor twice": (file_of([], T * 2, 200), "the tensor 't' twice"),
    "overlapping": (file_of([], [*T, tensor(b"u", (8,), 0, 64)], 200), "lets 't' and 'u' overlap"),
    "unaligned": (file_of([], [tensor(b"t", (8,), 0, 8)], 200), "not a multiple of 32"),
    "outside": (file_of([], [tensor(b"t", (8,), 0, 2**64 - 32)], 200), "are missing"),
    "truncated": (file_of([], T, 67), "1 bytes of 't' are missing"),
    "overflowing": (file_of([], [tensor(b"t", (2**63, 2**63, 2**63, 2**63), 0)], 64), "are missing"),
    "five dimensions": (file_of([], [tensor(b"t", (1,) * 5)], 64), "5 dimensions"),
    "no dimensions": (file_of([], [tensor(b"t", ())], 64), "0 dimensions"),
    "nothing": (file_of([], [tensor(b"t", (4, 0))], 64), "cannot have"),
    "half a block": (file_of([], [tensor(b"t", (33, 2), 8)], 200), "which Q8_0 cannot have"),
    "an unknown type": (file_of([], [tensor(b"t", (32,), 4)], 64), "the unknown GGML type 4"),
}


@pytest.mark.parametrize(("data", "message"), DAMAGE.values(), ids=DAMAGE)
def test_damage_is_said(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "f.gguf"
    path.write_bytes(data)
    with pytest.raises(UserError, match=message) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="does not exist"):
        read_header(tmp_path / "gone.gguf")
    with pytest.raises(UserError, match="is not a file"):
        read_header(tmp_path)


def test_arrays_of_another_kind_than_asked(tmp_path: Path) -> None:
    keys = [
        key(b"n", ARRAY, array(U8, 2, b"ab")),
        key(b"s", ARRAY, array(STRING, 1, text(b"\xff"))),
        key(b"u", U8, b"1"),
    ]
    (tmp_path / "f.gguf").write_bytes(file_of(keys))
    header = read_header(tmp_path / "f.gguf")
    assert header.strings("none", 9) is header.numbers("none", 9) is None
    for ask in (
        lambda: header.strings("n", 9),
        lambda: header.strings("s", 0),
        lambda: header.strings("u", 9),
        lambda: header.numbers("s", 1),
        lambda: header.numbers("n", 3),
    ):
        with pytest.raises(UserError, match="is not an array"):
            ask()
    with pytest.raises(UserError, match="not UTF-8"):
        list(header.strings("s", 1) or ())


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Real models are far below these."""
    (tmp_path / "f.gguf").write_bytes(file_of([key(b"a", ARRAY, array(STRING, 5, text(b"abc") * 5))]))
    for name, limit, message in (
        ("MAX_STRINGS", 4, "more than 4 strings"),
        ("MAX_TEXT_BYTES", 0, "of names and texts"),
        ("MAX_KEYS", 0, "more than fit into it"),
        ("MAX_HEADER_BYTES", 40, "is longer than"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(header_module if name == "MAX_KEYS" else reader_module, name, limit)
            with pytest.raises(UserError, match=message):
                read_header(tmp_path / "f.gguf")


CHILD = """
import resource, sys, time
from wgpu_lora.errors import UserError
from wgpu_lora.models.model_files import read_model
before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
try:
    read_model(sys.argv[1])
except UserError:
    print(time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("what", sample(["strings", "long strings", "keys", "tensors"], 1 / 2))
def test_the_largest_hostile_headers_cost_little(tmp_path: Path, what: str) -> None:
    """A second and 64 MiB, in a process of its own."""
    letters = b"".join(struct.pack("<Q2s", 2, b"%02d" % (i % 100)) for i in range(2**20))
    data = {
        "strings": file_of([key(b"a", ARRAY, array(STRING, 2**20, letters))]),
        "long strings": file_of([key(b"a", ARRAY, array(STRING, 100, text(b"x" * 1_000_000) * 100))]),
        "keys": file_of([key(b"%04d" % i + b"k" * 2000, U8, b"\1") for i in range(4096)]),
        "tensors": file_of([], [tensor(b"%060d" % i, (1, 1, 1, 1), 0, 32 * i) for i in range(2**14)], 2**20),
    }[what]
    (tmp_path / "f.gguf").write_bytes(data)
    process = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path / "f.gguf")], capture_output=True, text=True)
    seconds, kib = map(float, process.stdout.split())
    assert seconds < 1.0
    assert kib < 64 << 10


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"leave_out": "blk.0.attn_q.weight"}, "blk.0.attn_q.weight is missing"),
        ({"leave_out": "token_embd.weight"}, "has no token_embd.weight"),
        ({"metadata": {"feed_forward_length": 511}}, r"has shape \[512, 256\] but its metadata require \[511, 256\]"),
        ({"metadata": {"block_count": 2}}, "claims 2 layers but holds 12 tensors"),
        ({"metadata": {"block_count": 2**31 - 1}}, "claims 2,147,483,647 layers"),
        ({"metadata": {"attention.head_count": 0}}, "num_attention_heads"),
        ({"metadata": {"attention.head_count_kv": 3}}, "not a multiple"),
        ({"metadata": {"attention.head_count": "four"}}, "is 'four', expected one number"),
        ({"metadata": {"attention.value_length": 32}}, "value_length"),
        ({"metadata": {"rope.dimension_count": 32}}, "rope.dimension_count"),
        ({"metadata": {"rope.scaling.type": "longrope"}}, "rope scaling 'longrope'"),
        ({"metadata": {"rope.freq_base": float("nan")}}, "expected one number"),
        ({"metadata": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.freq_base": 1.0}}, "yarn cannot"),
        ({"metadata": {"expert_count": 8}}, "mixture of experts"),
        ({"metadata": {"general.type": "adapter"}}, "is a GGUF file of type 'adapter'"),
        ({"metadata": {"general.architecture": "gemma4"}}, "architecture 'gemma4'"),
        ({"metadata": {"split.count": 3}}, "one part of a split model"),
        ({"quantize": lambda name, values: (values.astype(np.int32), Kind.I32)}, "stored as I32"),
        ({"metadata": {"tokenizer.ggml.model": "bert"}}, "The tokenizer 'bert'"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path: Path, changes: dict, message: str) -> None:
    file = write_gguf(random_model(tmp_path / "source"), tmp_path / "model.gguf", **changes)
    with pytest.raises(UserError, match=message) as caught:
        read_model(file)
    assert str(file) in str(caught.value)


def test_unknown_tensors_are_refused(tmp_path: Path) -> None:
    """A bias that nobody adds would change every result."""
    source = random_model(tmp_path / "source")
    save_file(
        tensors_of(source) | {"model.layers.0.self_attn.q_norm.weight": np.zeros(64, np.float32)},
        source / "model.safetensors",
    )
    with pytest.raises(UserError, match=r"holds 'model.layers.0.self_attn.q_norm.weight'"):
        read_model(write_gguf(source, tmp_path / "model.gguf"))


YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
USUAL = 0.1 * float(np.log(4)) + 1


@pytest.mark.parametrize(
    ("metadata", "scaling"),
    [
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),  # llama.cpp's default kind
        (
            {**YARN, "rope.scaling.original_context_length": 16, "rope.scaling.yarn_beta_fast": 30.0},
            {"original_max_position_embeddings": 16, "beta_fast": 30.0, "attention_factor": pytest.approx(USUAL)},
        ),
        ({**YARN, "rope.scaling.attn_factor": 0.5}, {"attention_factor": pytest.approx(USUAL / 2)}),
    ],
)
def test_scaling(tmp_path: Path, metadata: dict[str, Any], scaling: dict[str, Any] | None) -> None:
    file = write_gguf(random_model(tmp_path / "source"), tmp_path / "model.gguf", metadata=metadata)
    actual = read_model(file).config.rope_scaling
    assert (actual is None) == (scaling is None)
    assert {name: getattr(actual, name) for name in scaling or {}} == (scaling or {})


def test_a_window_makes_it_mistral(tmp_path: Path) -> None:
    file = write_gguf(
        random_model(tmp_path / "source"), tmp_path / "model.gguf", metadata={"attention.sliding_window": 16}
    )
    config = read_model(file).config
    assert (config.architecture, config.sliding_windows) == ("mistral", (16,))


# -- K-quants ----------------------------------------------------------------------------------------------------------


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
    """Rows that a type holds exactly: every code, and all kinds of scales and minima. [6, 512]"""
    rng = np.random.Generator(np.random.PCG64(bits))
    size = 16 if bits == 6 else 32
    codes = rng.integers(-32, 32, (12, SUPER // size, size)) if bits == 6 else rng.integers(0, 2**bits, (12, 8, size))
    if bits == 6:
        codes[:, :, 0], codes[:, :, 1] = -32, 31
        scales = rng.integers(-127, 128, (12, 16, 1))
        scales[:, 3] = -128
        return (codes * scales * 2.0**-12).astype(np.float32).reshape(6, 512)
    codes[:, :, 0], codes[:, :, 1] = 0, 2**bits - 1
    scales, minima = rng.integers(1, 64, (12, 8, 1)), rng.integers(0, 64, (12, 8, 1))
    scales[:, 2] = minima[:, 5] = 63
    return (codes * scales * 2.0**-10 - minima * 2.0**-8).astype(np.float32).reshape(6, 512)


def random_weights(kind: str, rows: int = 64) -> np.ndarray:
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
    values = random_weights(kind)
    error = np.sqrt(np.mean((unpacked(values, bits) - values) ** 2)) / values.std()
    print(bits, kind, error)
    assert error < 1.03 * GGML[bits, kind]


@pytest.mark.parametrize("bits", KINDS)
def test_odd_values(bits: int) -> None:
    zeros = np.zeros((1, SUPER), np.float32)
    np.testing.assert_array_equal(unpacked(zeros, bits), zeros)
    outlier = random_weights("gaussian", 1)[:, :SUPER]
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
        actual = unpacked(values, bits)
        assert np.abs(actual - values).max() <= 0.05 * np.abs(values).max(), name
    # Too small for 16 bits, and so zero or nearly.
    assert np.abs(unpacked(random_weights("gaussian", 1) * 1e-12, bits)).max() < 1e-6


@pytest.mark.parametrize("bits", KINDS)
def test_super_blocks_know_nothing_of_each_other(bits: int) -> None:
    rows = random_weights("heavy", CHUNK // 4 + 3)
    packed = quantize_k(rows, bits)
    for row in (0, 1, len(rows) - 1):
        np.testing.assert_array_equal(packed[row : row + 1], quantize_k(rows[row : row + 1], bits))
