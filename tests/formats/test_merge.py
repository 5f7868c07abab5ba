"""A merged model is its base plus the adapter, whatever shards it is written in."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.cli import flags
from support.events import hearing
from support.models import (
    ARCHITECTURES,
    FIXTURES,
    full_logits,
    golden,
    golden_rows,
    load,
    relative_error,
    save_golden_adapter,
)
from support.sampling import sample

import wgpu_lora
from wgpu_lora.cli.app import main
from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import file_digest
from wgpu_lora.formats.safetensors_checkpoint import INDEX, Checkpoint
from wgpu_lora.gpu.device import Device
from wgpu_lora.infer.named_adapters import load_adapters
from wgpu_lora.models.batch_inputs import Segment
from wgpu_lora.models.export.adapter_merge import merge_adapter
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.models.model_files import config_of


def source(architecture: str) -> Path:
    return FIXTURES / "models" / architecture


@pytest.mark.parametrize("architecture", sample([*ARCHITECTURES], 1 / 2))
def test_logits_are_those_of_base_and_adapter(device: Device, tmp_path: Path, architecture: str) -> None:
    adapter = save_golden_adapter(architecture, tmp_path / "adapter", use_rslora=architecture == "llama")
    base = load(architecture, device)
    segments = [Segment(ids) for ids in golden_rows(golden(architecture), "input_ids")]
    expected = full_logits(base, segments, load_adapters(device, base.config, [adapter]))
    plain = full_logits(base, segments)
    for dtype, bound in (("f32", 1e-5), ("bf16", 3e-2), ("f16", 3e-3)):
        output = tmp_path / dtype
        merge_adapter(source(architecture), adapter, output, dtype, max_shard_bytes=20_000 if dtype == "f32" else 10**9)
        assert (output / INDEX).exists() == (dtype == "f32")
        merged = open_model(str(output), device, dtype)
        merged.load_weights()
        actual = full_logits(merged, segments)
        for have, want, before in zip(actual, expected, plain, strict=True):
            assert relative_error(have, want) < bound
            assert relative_error(before, want) > 0.1


def test_a_dora_is_merged_with_its_magnitudes(device: Device, tmp_path: Path) -> None:
    """In pieces of a few rows, whose norms are those of whole rows of the weight."""
    stored, base = load_file(FIXTURES / "golden" / "peft.safetensors"), source("llama")
    merge_adapter(base, FIXTURES / "peft" / "dora-patterns", tmp_path / "merged", "f32")
    merged = open_model(str(tmp_path / "merged"), device, "f32")
    merged.load_weights()
    (actual,) = full_logits(merged, [Segment(stored["dora-patterns.input_ids"][0])])
    assert relative_error(actual, stored["dora-patterns.logits"][0]) < 1e-4


def test_the_card_says_what_was_merged_and_events_what_was_written(tmp_path: Path) -> None:
    adapter = save_golden_adapter("qwen2", tmp_path / "adapter")
    (adapter / "README.md").write_text("---\nbase_model: x\n---\n\n# LoRA adapter\n\n| data SHA-256 | abc |\n")
    tensors: list[tuple[str, int, int]] = []
    events = hearing(written=lambda *event: tensors.append(event))
    merge_adapter(source("qwen2"), adapter, tmp_path / "m", name="Qwen/Qwen2.5-0.5B", events=events)
    shapes = config_of(source("qwen2")).parameter_shapes()
    assert tensors == [(name, number, len(shapes)) for number, name in enumerate(shapes, 1)]
    card = (tmp_path / "m" / "README.md").read_text()
    assert card.startswith("---\nbase_model: Qwen/Qwen2.5-0.5B\n")
    assert "base_model: x" not in card
    for fact in ("| weights | bf16 |", "| data SHA-256 | abc |", file_digest(adapter / "adapter_model.safetensors")):
        assert fact in card


@pytest.mark.parametrize("link", [True, False])
def test_the_card_has_nothing_from_elsewhere(tmp_path: Path, link: bool) -> None:
    adapter, secret = save_golden_adapter("qwen2", tmp_path / "adapter"), tmp_path / "secret"
    secret.write_text("the key" if link else "# form\n[More Information Needed]\n")
    (adapter / "README.md").symlink_to(secret) if link else shutil.copyfile(secret, adapter / "README.md")
    merge_adapter(source("qwen2"), adapter, tmp_path / "m")
    card = (tmp_path / "m" / "README.md").read_text()
    assert not any(text in card for text in ("the key", "More Information"))


def test_companions_come_along(tmp_path: Path) -> None:
    adapter = save_golden_adapter("qwen2", tmp_path / "adapter")
    assert main(["merge", *flags(adapter=adapter, model=source("qwen2"), output=tmp_path / "m")]) == 0
    before, config = (json.loads((of / "config.json").read_text()) for of in (source("qwen2"), tmp_path / "m"))
    assert config == before | {"dtype" if "dtype" in before else "torch_dtype": "bfloat16"}
    merged, base = Checkpoint(tmp_path / "m"), Checkpoint(source("qwen2"))
    assert {merged.dtype(name) for name in merged.names()} == {"BF16"}
    norm = "model.norm.weight"
    np.testing.assert_array_equal(merged.read_f32(norm), base.read_f32(norm))


@pytest.mark.parametrize(
    ("record", "base_dtype"),
    [
        ("run.json", "nf4"), ("metadata.json", "nf4"), ("run.json", "bf16"), ("run.json", "none"),
        ("run.json", ["nf4"]), (None, None),
    ],
)  # fmt: skip
def test_what_rounding_costs_is_said(
    device: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str], record: str | None, base_dtype: object
) -> None:
    """Of an adapter that was trained beside rounded weights, by its records: once it is merged, and if that is then
    quantised."""
    adapter = save_golden_adapter("qwen2", tmp_path / "adapter")
    if record:
        (adapter / record).write_text(json.dumps({"options": {"base_dtype": base_dtype}}))
    assert main(["merge", *flags(adapter=adapter, model=source("qwen2"), output=tmp_path / "m")]) == 0
    merging = capsys.readouterr().out
    quantising = ""
    if record != "metadata.json":
        assert main(["quantize", *flags(model=tmp_path / "m", output=tmp_path / "q", scheme="nf4")]) == 0
        quantising = capsys.readouterr().out
    says = "the adapter was trained beside weights in nf4"
    assert (says in merging, says in quantising) == (base_dtype == "nf4", base_dtype == "nf4" and record == "run.json")
    assert json.loads((tmp_path / "m" / "config.json").read_text()).get("adapter_base_dtype") == (
        "nf4" if base_dtype == "nf4" else None
    )


@pytest.mark.parametrize(
    ("model", "scale", "dtype", "message"),
    [
        ("llama", 1.0, "f32", "does not fit"),
        ("qwen2", 1.0, "nf4", "dtype='nf4' is not known"),
        ("qwen2", 1e7, "f16", "beyond f16's range"),
        ("qwen2", float("nan"), "f16", "not finite"),
        ("qwen2", float("nan"), "f32", "not finite"),
    ],
)
def test_refusals_leave_nothing(tmp_path: Path, model: str, scale: float, dtype: str, message: str) -> None:
    adapter = save_golden_adapter("qwen2", tmp_path / "adapter", scale=scale)
    with pytest.raises(UserError, match=message):
        merge_adapter(source(model), adapter, tmp_path / "out", dtype)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_what_exists_stays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter, output = save_golden_adapter("qwen2", tmp_path / "adapter"), tmp_path / "out"
    output.mkdir()
    (output / "mine.txt").write_text("kept")
    assert main(["merge", *flags(adapter=adapter, model=source("qwen2"), output=output)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.rglob("*.txt")) == ["mine.txt"]


@pytest.mark.reference
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_transformers_loads_it(tmp_path: Path, architecture: str) -> None:
    torch, transformers = (
        pytest.importorskip("torch", reason="torch is not installed: make test-reference does that"),
        pytest.importorskip("transformers", reason="transformers is not installed: make test-reference does that"),
    )
    from peft import PeftModel

    adapter = save_golden_adapter(architecture, tmp_path / "adapter")
    merge_adapter(source(architecture), adapter, tmp_path / "merged", "f32", max_shard_bytes=20_000)
    ids = torch.tensor(golden_rows(golden(architecture), "input_ids")[0][None].astype(np.int64))

    def logits(directory: Path) -> np.ndarray:
        model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        if directory != tmp_path / "merged":
            model = PeftModel.from_pretrained(model, adapter)
        with torch.no_grad():
            return model(ids).logits.numpy()

    assert relative_error(logits(tmp_path / "merged"), logits(source(architecture))) < 1e-5


def test_losses_before_and_after(device: Device, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter, data = save_golden_adapter("qwen2", tmp_path / "adapter"), tmp_path / "valid.jsonl"
    rows = [{"input_ids": ids.tolist()} for ids in golden_rows(golden("qwen2"), "input_ids")]
    data.write_text("\n".join(map(json.dumps, rows)))
    words = flags(adapter=adapter, model=source("qwen2"), output=tmp_path / "merged", dtype="f32")
    assert main(["merge", *words, *flags(eval_data=tmp_path / "missing.jsonl")]) == 2
    assert not (tmp_path / "merged").exists()
    assert main(["merge", *words, *flags(eval_data=data)]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("loss")]
    assert [" ".join(line[2:]) for line in lines] == ["beside its base", "merged, in f32", "merged, in nf4"]
    beside, merged, rounded = (float(line[1]) for line in lines)
    own, in_f32 = (
        wgpu_lora.evaluate(wgpu_lora.load(source("qwen2"), device=device, base_dtype=dtype), data, adapter=adapter).loss
        for dtype in ("nf4", "f32")
    )
    assert (beside, merged) == (pytest.approx(own, abs=1e-4), pytest.approx(in_f32, abs=1e-4))
    assert rounded != merged
