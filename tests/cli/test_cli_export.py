"""wgpu-lora export gguf: what a person reads, right and wrong."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.cli import Run
from support.gguf_models import DEMO, make_adapter, read, small

from wgpu_lora.cli import main


def export(*arguments: str | Path) -> int:
    return main(["export", "gguf", *map(str, arguments)])


def test_a_model_and_its_adapter(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = small(tmp_path / "model", "llama", max_position_embeddings=64)
    adapter = make_adapter(tmp_path / "adapter", model, base_model_name_or_path=str(model))
    merged, alone = tmp_path / "merged.gguf", tmp_path / "lora.gguf"
    assert export("--adapter", adapter, "--quantize", "Q8_0", "--output", merged) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"exported  {model} and {adapter} into {merged}"
    assert second == f"size      {merged.stat().st_size:,} bytes, q8_0, 8.51 bits per weight"
    assert export("--adapter", adapter, "--lora", "--output", alone) == 0
    assert f"{alone.stat().st_size:,} bytes, adapter, f32, 32.00 bits per weight" in capsys.readouterr().out
    facts, tensors = read(merged)
    assert (facts["general.name"], facts["general.finetune"]) == ("model", "adapter")
    assert tensors["blk.1.ffn_down.weight"].tensor_type.name == "Q8_0"
    assert read(alone)[0]["general.type"] == "adapter"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "lora.gguf", "merged.gguf", "model"]


def test_notes_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = small(tmp_path / "model", "mistral", sliding_window=16)
    assert export("--model", model, "--output", tmp_path / "out.gguf") == 0
    printed = capsys.readouterr().out.splitlines()
    assert "f16" in printed[1]
    assert printed[2].startswith("note      llama.cpp ignores this model's sliding window")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lora"], "give it with --adapter DIR"),
        (["--quantize", "q2_k"], "--quantize q2_k is not known: choose one of f16, q8_0"),
        (["--quantize", ""], "--quantize is empty"),
        (["--model", "/nowhere/at/all"], "does not exist"),
        (["--adapter", "/nowhere/at/all"], "is not a directory"),
        (["--adapter", "ADAPTER", "--lora", "--quantize", "f16"], "cannot be combined with --lora"),
        (["--adapter", "ADAPTER", "--model", "demo"], "does not fit"),
        (["--adapter", "ADAPTER", "--model", "demo", "--lora"], "does not fit"),
        (["--model", str(DEMO / "model.safetensors")], "is a file"),
    ],
)
def test_mistakes(tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    adapter = make_adapter(tmp_path / "adapter", small(tmp_path / "model", "qwen2"))
    given = [str(adapter) if argument == "ADAPTER" else argument for argument in arguments]
    assert export(*given, "--output", tmp_path / "out.gguf") == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.startswith("wgpu-lora: ")
    assert len(said.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["adapter", "model"]


def test_help_names_every_type(capsys: pytest.CaptureFixture[str]) -> None:
    from wgpu_lora.export.gguf_export import FILE_TYPES

    assert export("--help") == 0
    said = capsys.readouterr().out
    assert all(kind in said for kind in FILE_TYPES)


@pytest.mark.parametrize("command", ["export gguf", "merge --adapter nowhere", "import"])
def test_an_output_that_exists_is_refused_before_the_model_is_looked_for(
    tmp_path: Path, run: Run, command: str
) -> None:
    output = tmp_path / "out.gguf"
    output.write_text("kept")
    model = ["nobody/nothing"] if command == "import" else ["--model", "nobody/nothing"]
    assert (
        f"{output} exists already: give --output another name, or remove it."
        in run(*command.split(), *model, "--output", str(output)).refusal()
    )
