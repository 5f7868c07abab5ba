"""Safetensors shards are read a few rows at a time, and damaged ones are refused; hub ids are told apart from paths."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import MagicMock

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from support import FIXTURES, MODELS, ROOT
from support.rows.hostile import memory_below

from wgpu_lora.cli.app import main
from wgpu_lora.errors import UserError
from wgpu_lora.formats.hub import resolve_model
from wgpu_lora.formats.safetensors_checkpoint import Checkpoint
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.dispatch import Dispatch
from wgpu_lora.gpu.program import Arena, Program
from wgpu_lora.gpu.tuning_cache import NO_CHOICES, Choices, choice_key
from wgpu_lora.models.architectures import load_config

SINGLE = "model.safetensors"


@pytest.mark.parametrize(
    ("architecture", "dtype", "shards"),
    [("qwen2", "BF16", 1), ("qwen3", "F16", 1), ("llama", "F32", 3), ("mistral", "F32", 1)],
)
def test_every_tensor_equals_safetensors_own_reader(architecture, dtype, shards):
    checkpoint = Checkpoint(MODELS / architecture)
    checkpoint.check_against(load_config(MODELS / architecture).parameter_shapes())
    assert len(checkpoint.shards) == shards
    names = set()
    for shard in checkpoint.shards:
        with safe_open(shard, framework="np") as theirs:
            for name in theirs.keys():  # noqa: SIM118
                expected = theirs.get_tensor(name)
                names.add(name)
                assert checkpoint.dtype(name) == dtype
                assert checkpoint.shape(name) == expected.shape
                np.testing.assert_array_equal(checkpoint.read_f32(name), expected.astype(np.float32))
                rows = checkpoint.read_raw(name, 3, 7)
                assert rows.tobytes() == expected[3:7].tobytes()
                assert rows.dtype == (np.uint32 if dtype == "F32" else np.uint16)
    assert names == set(checkpoint.names())


def test_reading_rows_takes_no_more_memory_than_the_rows(tmp_path):
    save_file({"big": np.zeros((4096, 1024), np.float32)}, tmp_path / SINGLE)
    with memory_below(1_000_000):
        assert Checkpoint(tmp_path).read_raw("big", 100, 104).shape == (4, 1024)


def test_special_floats_survive(tmp_path):
    values = np.array([np.inf, -0.0, 1e-40, 65504, 1 / 3], np.float32)
    stored = {"b": values.astype(ml_dtypes.bfloat16), "h": values.astype(np.float16), "f": values}
    save_file(stored, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    for name, array in stored.items():
        assert checkpoint.read_f32(name).tobytes() == array.astype(np.float32).tobytes()


def test_rows_out_of_range():
    with pytest.raises(ValueError, match=r"rows 0:53 of model.norm.weight, which has 52"):
        Checkpoint(MODELS / "qwen2").read_raw("model.norm.weight", 0, 53)


def test_digest_notices_changes(tmp_path):
    for name in ("a", "b"):
        shutil.copytree(MODELS / "llama", tmp_path / name)
    first = Checkpoint(tmp_path / "a").digest()
    assert first == Checkpoint(tmp_path / "b").digest()
    shard = sorted((tmp_path / "b").glob("*.safetensors"))[-1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert first != Checkpoint(tmp_path / "b").digest()


MISTRAL = load_config(MODELS / "mistral")


@pytest.mark.parametrize(
    ("model", "config", "words"),
    [
        ("mistral", replace(MISTRAL, head_dim=24), r"layers.0.self_attn.q_proj.weight.*\[48, 52\].*\[96, 52\]"),
        (
            "mistral",
            replace(MISTRAL, num_hidden_layers=3, sliding_windows=(6, 6, 6)),
            r"model.layers.2.input_layernorm.weight is missing",
        ),
        (
            "llama",
            replace(load_config(MODELS / "llama"), attention_output_bias=False),
            r"o_proj.bias, which config.json does not account for",
        ),
    ],
)
def test_check_against_names_the_tensor(model, config, words):
    with pytest.raises(UserError, match=words):
        Checkpoint(MODELS / model).check_against(config.parameter_shapes())


def test_weights_of_a_type_that_is_not_read(tmp_path):
    save_file({"model.embed_tokens.weight": np.zeros((211, 52), np.int8)}, tmp_path / SINGLE)
    with pytest.raises(UserError, match=r"embed_tokens.weight .*dtype I8: .* BF16, F16, F32"):
        Checkpoint(tmp_path).check_against(MISTRAL.parameter_shapes())


def test_a_shard_that_shrinks_after_opening(tmp_path):
    shutil.copy(MODELS / "qwen2" / SINGLE, tmp_path / SINGLE)
    checkpoint = Checkpoint(tmp_path)
    with (tmp_path / SINGLE).open("r+b") as file:
        file.truncate(9000)
    with pytest.raises(UserError, match=r"ended while model.norm.weight was read"):
        checkpoint.read_raw("model.norm.weight")


def test_missing_things(tmp_path):
    with pytest.raises(UserError, match="is not a directory"):
        Checkpoint(tmp_path / "no")
    with pytest.raises(UserError, match=r"neither model.safetensors nor model.safetensors.index.json"):
        Checkpoint(tmp_path)
    with pytest.raises(UserError, match=r"nothing is missing from the shards"):
        Checkpoint(MODELS / "qwen2").shape("nothing")


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        (None, "has no weight_map"),
        ({"a": "../model.safetensors"}, "not a plain file name"),
        ({"a": "/etc/passwd"}, "not a plain file name"),
        *(({"a": name}, "not a plain file name") for name in ("..", "a\\b", "", "c:x", "a\0b", "x" * 5000, 3, None)),
        ({"a": "gone.safetensors"}, "gone.safetensors, which is missing"),
        ({"b": "one.safetensors"}, "places b in one.safetensors, which does not hold it"),
    ],
)
def test_indexes(tmp_path, weight_map, message):
    save_file({"a": np.zeros(3, np.float32)}, tmp_path / "one.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UserError, match=message):
        Checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        *((name, r"the model directory .* does not exist") for name in ("./no", "/no/such", "~no/x", "a/b/c", "C:\\x")),
        ("gone.gguf", r"the model file gone.gguf does not exist"),
        ("./f", "is a file"),
        ("not an id", "neither a directory nor a Hugging Face id"),
    ],
)
def test_models_that_are_not_there(tmp_path, monkeypatch, model, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "f").touch()
    with pytest.raises(UserError, match=words):
        resolve_model(model)


def test_models_that_are_there(tmp_path):
    (tmp_path / "m.GGUF").touch()
    for place in (Path(".."), tmp_path, tmp_path / "m.GGUF"):
        assert resolve_model(str(place)) == place


def test_hub_errors(monkeypatch, tmp_path):
    import huggingface_hub
    from huggingface_hub import constants, errors

    response = MagicMock(headers={})
    cases = [
        (errors.GatedRepoError("x", response=response), "is gated .* accept its terms"),
        (errors.RepositoryNotFoundError("x", response=response), "nor a model on Hugging Face"),
        (errors.LocalEntryNotFoundError("x"), "cannot be reached"),
        (OSError("disk full"), r"could not be downloaded \(disk full\)"),
    ]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    for error, message in cases:

        def fail(*args, error=error, **kwargs):
            raise error

        monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
        with pytest.raises(UserError, match=message):
            resolve_model("someone/something")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **kwargs: tmp_path)
    with pytest.raises(UserError, match="has no safetensors: if it has GGUF files"):
        resolve_model("someone/something-gguf")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *a, **k: (_ for _ in ()).throw(cases[2][0]))
    with pytest.raises(UserError, match="HF_HUB_OFFLINE is set"):
        resolve_model("someone/something")


# -- runs of the commit before -----------------------------------------------------------------------------------------


RUNS = FIXTURES / "runs"  # of version 0.1.0 before records had a schema, on lavapipe with subgroups of 8
BUILD = Program.build
WEIGHTS = "adapter_model.safetensors"


@pytest.mark.parametrize(
    ("name", "members"), [("single", ["."]), ("tuned", ["."]), ("pipeline/second", ["../first", "."])]
)
def test_a_checkpoint_of_the_version_before_resumes(
    name: str, members: list[str], tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    shutil.copytree(RUNS, tmp_path / "runs")
    directory, same_device = tmp_path / "runs" / name, is_theirs(device)
    built: list[tuple[Program, Choices]] = []

    def build(program: Program, arena: Arena, choices: Choices = NO_CHOICES) -> None:
        BUILD(program, arena, choices)
        built.append((program, choices))

    monkeypatch.setattr(Program, "build", build)
    assert main(["finetune", "--output", str(directory), "--resume"]) == 0
    for member in members:
        place = (directory / member).resolve()
        ours, expected = place / WEIGHTS, RUNS / "expected" / place.name / WEIGHTS
        for key, value in load_file(expected).items():
            np.testing.assert_allclose(load_file(ours)[key], value, rtol=0, atol=1e-5)
    if same_device and name == "tuned":
        check_chosen(device, built)


def is_theirs(device: Device) -> bool:
    return device.info.name.startswith("llvmpipe") and device.capabilities.subgroup_size == 8


def check_chosen(device: Device, built: list[tuple[Program, Choices]]) -> None:
    """Tuned calls that there still are use the tilings of their checkpoint, which are not always the default."""
    steps = [(step, choices) for program, choices in built for step in program.dispatches if step.kernel.tuning]
    pairs = [(step, choices[key]) for step, choices in steps if (key := of(step)) in choices]
    assert pairs
    assert all(step.tiling == tiling for step, tiling in pairs)
    assert any(step.tiling != step.kernel.tilings(device.capabilities, step.constants)[0] for step, _ in pairs)


def of(step: Dispatch) -> str:
    return choice_key(step.kernel, step.present, step.constants)
