"""wgpu-lora teacher-cache."""

import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.cli import QWEN2, commands, write_rows

from wgpu_lora.train.distill.teacher_cache import TeacherCache, position_bytes


@pytest.fixture
def run(device, monkeypatch, capsys, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl")
    return commands(capsys, "teacher-cache", "--data", data, "--output", tmp_path / "cache")


SMALL = ("--model", QWEN2, "--top-k", 4, "--random", 3, "--length", 9, "--batch-tokens", 40)


def test_the_size_is_said_before_it_is_made(run, tmp_path):
    result = run(*SMALL, "--samples", 5)
    assert result.code == 0, result.err
    cache = TeacherCache.open(tmp_path / "cache")
    estimate, summary = result.out.splitlines()
    size = position_bytes(7, cache.vocab_size, "f16")
    assert f"5 rows, {cache.header.positions} positions of {size} bytes" in estimate
    on_disk = sum(path.stat().st_size for path in cache.path.iterdir())
    assert int(estimate.split(": ")[1].split()[0].replace(",", "")) == pytest.approx(on_disk, rel=0.3)
    assert summary.startswith("written   1 shard")
    again = run(*SMALL, "--samples", 5, "--json")
    assert json.loads(again.out)["digest"] == cache.digest()
    other = run(*SMALL, "--samples", 6)
    assert other.code == 2
    assert "was begun with --samples 5, not --samples 6" in other.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--top-k", 0), "--top-k must be a whole number of at least 1"),
        (("--length", 2, "--on-overflow", "drop"), "raise --length"),
        (("--length", 1), "--length must be a whole number of at least 2"),
        (("--top-k", 500), "are more tokens than the teacher's vocabulary of"),
        (("--samples", 9), "--samples 9 is more than the 8 rows"),
        (("--adapter", ""), "--adapter is empty"),
        (("--data", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--logits-dtype", "bf16"), "--logits-dtype must be one of f16, f32"),
    ],
)
def test_what_is_wrong_is_one_sentence(run, tmp_path, options, message):
    refused = run(*SMALL, *options)
    assert refused.code == 2
    assert message in refused.err
    assert refused.err.count("\n") == 1
    assert not (tmp_path / "cache").exists()


def test_a_damaged_teacher_leaves_nothing(run, tmp_path):
    teacher = tmp_path / "teacher"
    shutil.copytree(QWEN2, teacher)
    tensors = load_file(teacher / "model.safetensors")
    tensors["model.norm.weight"][3] = np.nan
    save_file(tensors, teacher / "model.safetensors", metadata={"format": "pt"})
    refused = run("--model", teacher, *SMALL[2:])
    assert refused.code == 2
    assert "model.norm.weight holds values that are NaN or infinite" in refused.err
    assert not (tmp_path / "cache").exists()
