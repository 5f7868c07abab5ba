"""What cannot be exported is refused in a sentence, and whatever fails leaves nothing; nor is a model held whole."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.events import hearing
from support.gguf_models import DEMO, make_adapter, small

from wgpu_lora.errors import UserError
from wgpu_lora.export.gguf_export import export_adapter, export_model
from wgpu_lora.formats.safetensors_checkpoint import Checkpoint
from wgpu_lora.formats.safetensors_writer import TensorSpec, write_shards
from wgpu_lora.models.architectures import load_config


def change(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads(path.read_text())
    edit(value)
    path.write_text(json.dumps(value))


LLAMA3 = {"rope_type": "llama3", "factor": 2.0, "original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}


@pytest.mark.parametrize(
    ("architecture", "stated", "message"),
    [
        ("qwen3", {"attention_bias": True}, "a bias of o_proj, which llama.cpp's qwen3"),
        ("qwen2", {"head_dim": 32}, "widths sum to 128 beside a hidden size of 64"),
        ("qwen2", {"rope_parameters": LLAMA3}, "the rope type llama3"),
        ("llama", {"rope_parameters": {**YARN, "truncate": False}}, "yarn without truncate"),
    ],
)
def test_what_llama_cpp_cannot_compute(tmp_path: Path, architecture: str, stated: dict, message: str) -> None:
    model = small(tmp_path / "model", architecture, **stated)
    for export in (
        lambda: export_model(model, tmp_path / "out.gguf"),
        lambda: export_adapter(model, make_adapter(tmp_path / "adapter", model), tmp_path / "out.gguf"),
    ):
        with pytest.raises(UserError, match=message):
            export()
    assert not (tmp_path / "out.gguf").exists()


def test_refusals_leave_nothing(tmp_path: Path) -> None:
    model, output = small(tmp_path / "model", "qwen2"), tmp_path / "out.gguf"
    adapter = make_adapter(tmp_path / "adapter", model)
    huge = make_adapter(tmp_path / "huge", model, lora_alpha=1e9)
    other = small(tmp_path / "other", "llama", hidden_size=128)
    long = small(tmp_path / "long", "qwen2")
    change(long / "tokenizer.json", lambda tokenizer: tokenizer["model"]["vocab"].update({"zz": 9999}))
    bare = small(tmp_path / "bare", "qwen2")
    (bare / "tokenizer.json").unlink()
    before = sorted(path.name for path in tmp_path.iterdir())
    for arguments, message in (
        ((model, output, "q3_k"), "quantize=.q3_k. is not known"),
        ((model, tmp_path / "no" / "out.gguf"), "does not exist: create it first"),
        ((model, tmp_path), "is not a file"),
        ((model, model / "config.json"), "exists already"),
        ((bare, output), "has no tokenizer.json"),
        ((other, output, "f16", adapter), "does not fit"),
        ((model, output, "q8_0", huge), "beyond 65,504"),
        ((long, output), "token ids up to 9,999"),
    ):
        with pytest.raises(UserError, match=message):
            export_model(*arguments)
    with pytest.raises(UserError, match="does not fit"):
        export_adapter(other, adapter, output)
    with pytest.raises(UserError, match="exists already"):
        export_adapter(model, adapter, model / "config.json")
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_weights_that_are_no_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Checkpoint.read_f32
    monkeypatch.setattr(Checkpoint, "read_f32", lambda self, *args: original(self, *args) * np.float32(np.nan))
    with pytest.raises(UserError, match="not finite"):
        export_model(small(tmp_path / "model", "qwen2"), tmp_path / "out.gguf")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("failure", [KeyboardInterrupt, OSError])
def test_an_interruption_leaves_nothing(tmp_path: Path, failure: type[BaseException]) -> None:
    seen: list[str] = []

    def written(tensor: str, done: int, total: int) -> None:
        seen.append(tensor)
        if len(seen) == 5:
            raise failure

    with pytest.raises(failure):
        export_model(DEMO, tmp_path / "out.gguf", "q8_0", events=hearing(written=written))
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        with pytest.raises(UserError, match=r"out.* cannot be written \(File too large\): free space"):
            export_model(DEMO, tmp_path / "out.gguf", "q4_0")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert not list(tmp_path.iterdir())


CHILD = """
import resource, sys
from pathlib import Path
from wgpu_lora.export import adapter_merge
from wgpu_lora.export.gguf_export import export_model
adapter_merge.PIECE = 1 << 20
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
export_model(Path(sys.argv[1]), Path(sys.argv[2]), "q4_k_m")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_model_is_never_whole_in_memory(tmp_path: Path) -> None:
    model, output = small(tmp_path / "model", "qwen2"), tmp_path / "out.gguf"
    wide = {"hidden_size": 512, "vocab_size": 80_000, "tie_word_embeddings": True, "intermediate_size": 512}
    change(model / "config.json", lambda config: config.update(wide))
    shapes = load_config(model).parameter_shapes()
    tile = np.random.default_rng(0).normal(0, 0.02, 1 << 16).astype(np.float16)
    specs = {name: TensorSpec("F16", shape) for name, shape in shapes.items()}
    write_shards(model, specs, lambda name: [np.resize(tile, shapes[name])])
    size = (model / "model.safetensors").stat().st_size
    command = [sys.executable, "-c", CHILD, str(model), str(output)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    grown = int(run.stdout) * 1024
    print(size, grown)
    assert grown < 0.7 * size
