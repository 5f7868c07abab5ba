"""Trainings that many tests read, made once for all processes of a test session."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from filelock import FileLock

from support.training.training import model_dir, random_rows
from wgpu_lora import api
from wgpu_lora.api.multi_adapter import MultiAdapterPipeline
from wgpu_lora.formats.peft_adapter import read_adapter
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.train.run.training_log import LOG, read_log

WEIGHTS = "adapter_model.safetensors"


def built_once(factory: pytest.TempPathFactory, name: str, build: Callable[[Path], None]) -> Path:
    """The directory that `build` fills, in one process of the session; the others wait for it. It is only read."""
    root = factory.getbasetemp()
    root = root.parent if "PYTEST_XDIST_WORKER" in os.environ else root
    place, marker = root / name, root / f"{name}.done"
    with FileLock(root / f"{name}.lock"):
        if not marker.exists():
            shutil.rmtree(place, ignore_errors=True)  # of a process that failed
            place.mkdir()
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("WGPU_LORA_DATA_DIR", str(place / "data"))  # the run log
                build(place)
            marker.touch()
    return place


def run_options(place: Path, name: str = "run", **changes: Any) -> dict[str, Any]:
    """Options of `finished_run` for rows in `place`: three steps per epoch, dropout, accumulation, held-out rows."""
    for file, count in (("rows", 12), ("heldout", 3)):
        if not (place / f"{file}.jsonl").exists():
            random_rows(place / f"{file}.jsonl", count, 301, count)
    return {
        "model": str(model_dir("qwen2")), "data": str(place / "rows.jsonl"), "output": str(place / name),
        "eval_data": str(place / "heldout.jsonl"), "eval_steps": 2, "save_steps": 2, "save_total_limit": 9,
        "lora_r": 4, "lora_dropout": 0.1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2,
        "max_length": 16, "packing": False, "max_steps": 7, "logging_steps": 1, "learning_rate": 1e-3, **changes,
    }  # fmt: skip


def train_run(model: LoadedModel, place: Path) -> None:
    """Train `finished_run`: seven steps with checkpoints of steps 2, 4, 6 and 7, and best/."""
    options = run_options(place)
    del options["model"]
    api.finetune(model, **options)


def killed_run(finished: Path, place: Path, step: int = 4) -> Path:
    """A copy of `finished_run` in `place`/run as if it was killed some time after the checkpoint of `step`."""
    run = Path(shutil.copytree(finished / "run", place / "run"))
    shutil.rmtree(run / "best")
    for path in (run / "checkpoints").iterdir():
        if int(path.name.removeprefix("step-")) > step:
            shutil.rmtree(path)
    for path in run.iterdir():
        if path.is_file() and path.name not in (LOG, ".run.json"):
            path.unlink()
    return run


def result(run: Path) -> tuple[bytes, list[dict[str, Any]]]:
    """The adapter and the log of a run, without times and the status of the hardware."""
    log = [
        {k: v for k, v in line.items() if "second" not in k and not k.startswith("gpu_")}
        for line in read_log(run / LOG)
    ]
    return (run / WEIGHTS).read_bytes(), log


def assert_close_adapters(first: Path, other: Path, atol: float) -> None:
    """The matrices of two adapters differ by at most `atol`."""
    (_, ours), (_, theirs) = read_adapter(first), read_adapter(other)
    assert ours.keys() == theirs.keys()
    for module, pair in ours.items():
        for got, expected in zip(pair, theirs[module], strict=True):
            np.testing.assert_allclose(got, expected, rtol=0, atol=atol, err_msg=module)


def assert_resumes_exactly(job: Callable[..., Any], place: Path, **options: Any) -> None:
    """Two steps and two more, in `place`/b, give the adapter of four steps in `place`/a. job: prepares runs of four."""
    whole = job(place / "a", **options).train()
    job(place / "b", **options, max_steps=2).train()
    assert job(place / "b", **options, resume=True).train().adapter_sha256 == whole.adapter_sha256


def multi_adapter_options(**changes: Any) -> dict[str, Any]:
    """Options that the adapters of `multi_adapter_tasks` share."""
    return {
        "lora_r": 4, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_length": 16,
        "packing": False, "learning_rate": 1e-3, "num_train_epochs": 2.0, "logging_steps": 1, "save_steps": 3,
        # The first updates of Adam are all of one size, and rounding may turn the smallest round.
        "warmup_ratio": 0.5, **changes,
    }  # fmt: skip


def multi_adapter_tasks(place: Path, name: str) -> list[dict[str, Any]]:
    """Three adapters that differ in rank, targets, dropout, weight and length of the run, in `place`/`name`."""
    own: dict[str, dict[str, Any]] = {
        "a": {"dropout": 0.1},
        "b": {"rank": 2, "target_modules": "q_proj,v_proj", "weight": 2},
        "c": {"alpha": 4, "max_steps": 3, "learning_rate": 3e-3},
    }
    for seed, adapter in enumerate(own):
        if not (place / f"{adapter}.jsonl").exists():
            random_rows(place / f"{adapter}.jsonl", 8 + 2 * seed, 301, seed)
            random_rows(place / f"{adapter}-heldout.jsonl", 3, 301, seed + 7)
    return [
        {
            "data": str(place / f"{adapter}.jsonl"),
            "eval_data": str(place / f"{adapter}-heldout.jsonl"),
            "checkpoint": str(place / name / adapter),
            **changes,
        }
        for adapter, changes in own.items()
    ]


def train_multi_adapter(model: LoadedModel, place: Path) -> None:
    """Train `finished_multi_adapter_run`: at most four steps of each adapter; its record is in `place`/run/pipeline."""
    how = multi_adapter_options(max_steps=4, save_steps=1, output=str(place / "run" / "pipeline"))
    MultiAdapterPipeline(multi_adapter_tasks(place, "run"), model, **how).train()


def edit_json(path: Path, **changes: Any) -> None:
    """Change values of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def files_of(directory: Path, without: Iterable[str] = (".lock",)) -> dict[str, bytes]:
    """The files below a directory by their relative paths."""
    paths = (path for path in directory.rglob("*") if path.is_file() and path.name not in without)
    return {path.relative_to(directory).as_posix(): path.read_bytes() for path in paths}
