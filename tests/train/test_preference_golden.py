"""20 steps of every preference loss, compared with TRL's trainers (tests/fixtures/README.md)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import short_of
from support.models import FIXTURES, save_golden_adapter
from support.sources import written
from support.training import golden_arguments

from wgpu_lora.formats.peft_adapter import read_adapter
from wgpu_lora.gpu.device import Device
from wgpu_lora.train.adapter_tasks import AdapterTask
from wgpu_lora.train.finetune import prepare_job
from wgpu_lora.train.pipeline import prepare_pipeline
from wgpu_lora.train.run.training_log import LOG, read_log

TARGETS, STEPS, PAIRS = "q_proj,down_proj", 20, 8
CASES: dict[str, dict[str, Any]] = json.loads((FIXTURES / "golden" / "preferences.json").read_text())


@cache
def golden() -> dict[str, np.ndarray]:
    return load_file(FIXTURES / "golden" / "preferences.safetensors")


def rows(objective: str) -> list[dict[str, Any]]:
    """The pairs; for KTO, the chosen answer of every other one, and the rejected one of the others."""
    names = ("prompt_ids", "chosen_ids", "rejected_ids")
    pairs = [{name: golden()[f"{name}.{i}"].tolist() for name in names} for i in range(PAIRS)]
    if objective != "kto":
        return pairs
    return [
        {"prompt_ids": pair["prompt_ids"], "completion_ids": pair[names[1 + i % 2]], "label": not i % 2}
        for i, pair in enumerate(pairs)
    ]


def options(tmp_path: Path, name: str) -> dict[str, Any]:
    """A case's options, with the files that it reads."""
    case = dict(CASES[name])
    data = tmp_path / f"{case['objective']}.jsonl"
    if not data.exists():
        written(data, rows(case["objective"]))
    initial, frozen = tmp_path / "start", tmp_path / "frozen"
    if not initial.exists():
        chosen = {"target_modules": tuple(TARGETS.split(","))}
        save_golden_adapter("qwen2", initial, modules=chosen["target_modules"], **chosen)
        save_golden_adapter("qwen2", frozen, modules=chosen["target_modules"], scale=2.0, **chosen)
    if "reference_adapter" in case:
        case["reference_adapter"] = str(frozen)
    return {"init_adapter": str(initial), "data": str(data), **case}


def shared(tmp_path: Path, **changes: Any) -> Any:
    options = {
        "base_dtype": "f32",
        "beta": 0.3,
        "lr_scheduler_type": "constant",
        "adam_epsilon": 1e-5,
        "max_steps": STEPS,
        "per_device_train_batch_size": 4,
        "max_length": 16,
    }
    return golden_arguments(tmp_path, "qwen2", **(options | changes))


def check(name: str, directory: Path, steps: int) -> None:
    """Losses, metrics and, after all steps, the adapter are within 1e-3 of TRL's."""
    log = read_log(directory / LOG)
    values = {key.removeprefix(f"{name}."): value for key, value in golden().items() if key.startswith(f"{name}.")}
    curves = {key: value for key, value in values.items() if not key.startswith("final.")}
    assert len(curves) >= 6
    for key, curve in curves.items():
        found, scale = [line[key] for line in log], float(np.abs(curve).mean())
        assert found == pytest.approx(curve[:steps].tolist(), rel=1e-3, abs=1e-3 * scale), f"{name}: {key}"
    if steps < STEPS:
        return
    first, (_, matrices) = load_file(FIXTURES / "golden" / "qwen2.safetensors"), read_adapter(directory)
    for module, pair in matrices.items():
        for which, matrix in zip("AB", pair, strict=True):
            short = f"{short_of(module)}.{which}"
            final = values[f"final.{short}"]
            error = np.linalg.norm(matrix - final) / np.linalg.norm(final - first[f"adapter.{short}"])
            assert error < 1e-3, f"{name}: {short}: {error}"


def test_all_losses_match_trl(device: Device, tmp_path: Path) -> None:
    """Each is an adapter of one pipeline, whose batches they share."""
    tasks = []
    for name in CASES:
        own = options(tmp_path, name)
        tasks.append(AdapterTask(own.pop("data"), str(tmp_path / f"run-{name}"), name, options=own))
    prepare_pipeline(shared(tmp_path, data=None, init_adapter=None), tasks, batch_tokens=1024).train()
    for name in CASES:
        check(name, tmp_path / f"run-{name}", STEPS)


@pytest.mark.parametrize("name", ["dpo-ld", "dpo-frozen", "kto"])
def test_a_precomputed_reference_is_the_same(device: Device, tmp_path: Path, name: str) -> None:
    """Alone, with activations computed again and inputs of blocks in the host's memory, in batches of one or two
    samples."""
    changes = {
        "gradient_checkpointing": True,
        "offload_activations": True,
        "precompute_ref_log_probs": True,
        "max_steps": 3,
    }
    batch = 1 if name == "kto" else 2
    sizes = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": 4 // batch}
    prepare_job(shared(tmp_path, **options(tmp_path, name), **changes | sizes)).train()
    check(name, tmp_path / "run", 3)
