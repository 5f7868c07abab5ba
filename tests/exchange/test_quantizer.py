"""Our packing beside llama.cpp's own: the same mix of types, and errors no larger than its."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from llama_cpp_helpers import tensor_types
from support.gguf_models import DEMO, MODELS, make_model

from wgpu_lora.formats.gguf.gguf_writer import pack
from wgpu_lora.models.export.gguf_export import FILE_TYPES, export_model

MIXED: dict[str, dict[str, Any]] = {
    "demo": {},  # rows of 192, which are no whole super-blocks, and of 512
    "untied": {"model_type": "qwen2", "num_hidden_layers": 11, "tie_word_embeddings": False},
    "odd": {"model_type": "llama", "hidden_size": 96, "intermediate_size": 272, "num_hidden_layers": 3},
    "qwen35": {**MODELS["qwen35"], "num_hidden_layers": 9, "intermediate_size": 768},
    "phi": {**MODELS["phi"], "num_hidden_layers": 9},
    "70b": {"model_type": "llama", "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 80},
}


@pytest.mark.parametrize("name", MIXED)
def test_each_tensor_has_the_type_that_llama_cpp_gives_it(tmp_path: Path, name: str) -> None:
    model = make_model(tmp_path / "model", MIXED[name]) if MIXED[name] else DEMO
    source = tmp_path / "f16.gguf"
    export_model(model, source, "f16")
    for kind, file_type in FILE_TYPES.items():
        if name == "70b" and kind != "q4_k_m":  # the one that treats it apart
            continue
        if kind != "f16":
            export_model(model, tmp_path / f"{kind}.gguf", kind)
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype, params.nthread = int(file_type.number), 1
        theirs = tmp_path / "theirs.gguf"
        code = llama_cpp.llama_model_quantize(str(source).encode(), str(theirs).encode(), ctypes.byref(params))
        assert code == 0
        assert tensor_types(tmp_path / f"{kind}.gguf") == tensor_types(theirs), kind


def ggml() -> ctypes.CDLL:
    library = ctypes.CDLL(str(next(Path(llama_cpp.__file__).parent.glob("lib/*ggml-base.*"))))
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    library.ggml_quantize_chunk.argtypes = [
        ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * 3, ctypes.c_void_p,
    ]  # fmt: skip
    return library


def rows_of(kind: str, rng: np.random.Generator, shape: tuple[int, int] = (256, 1024)) -> np.ndarray:
    values = {
        "gaussian": lambda: rng.normal(0, 0.02, shape),
        "heavy": lambda: rng.standard_t(3, shape) * 0.02,
        "rows": lambda: rng.standard_t(2, shape) * np.exp(rng.normal(0, 1, (shape[0], 1))) * 0.02,
        "outliers": lambda: rng.normal(0, 0.02, shape) * np.where(np.arange(shape[1]) % 128 == 3, 20, 1),
    }[kind]()
    return np.ascontiguousarray(values, np.float32)


@pytest.mark.parametrize("kind", ["gaussian", "heavy", "rows", "outliers"])
def test_the_error_is_no_larger_than_that_of_llama_cpp(rng: np.random.Generator, kind: str) -> None:
    library, values = ggml(), rows_of(kind, rng)

    def error(packed: np.ndarray, target: Q) -> float:
        return float(np.sqrt(np.mean((gguf.dequantize(packed, target) - values) ** 2)))

    for target in (Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.Q8_0, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1):
        ours = pack(values, target)
        theirs = np.zeros_like(ours)
        count = library.ggml_quantize_chunk(int(target), values.ctypes.data, theirs.ctypes.data, 0, *values.shape, None)
        assert count == theirs.nbytes
        print(kind, target.name, error(ours, target) / error(theirs, target))
        assert error(ours, target) < 1.03 * error(theirs, target)
