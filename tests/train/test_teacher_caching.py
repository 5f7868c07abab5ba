"""Caches that replace the live teacher of a run: the same losses, exactly planned, continued where they were."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.models import save_golden_adapter
from support.training import golden_arguments, model_dir, random_rows

from wgpu_lora.distill.teacher_cache import TeacherCache
from wgpu_lora.errors import UserError
from wgpu_lora.events import Evaluating, Events
from wgpu_lora.gpu.device import Device
from wgpu_lora.train.finetune import prepare_job
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.run.teacher_setup import cache_plans, caches_digest, write_caches
from wgpu_lora.train.run.training_log import LOG, read_log
from wgpu_lora.worker.job_kinds import KINDS
from wgpu_lora.worker.job_process import EventWriter
from wgpu_lora.worker.kinds import model_jobs as kind

VOCAB = 301
LIVE = ("teacher", "teacher_adapter", "teacher_base_dtype", "teacher_top_k")


class Rows(Events):
    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def evaluating(self, evaluating: Evaluating) -> None:
        self.seen.append((evaluating.rows, evaluating.total))


def options(tmp_path: Path, **changes: Any) -> TrainingArguments:
    """A run with a live teacher, which is the student with an adapter."""
    given = {
        "objective": "kd",
        "data": str(random_rows(tmp_path / "rows.jsonl", 6, VOCAB)),
        "teacher": str(model_dir("qwen2")),
        "teacher_adapter": str(save_golden_adapter("qwen2", tmp_path / "teacher", scale=4.0)),
        "teacher_base_dtype": "f32",
        "teacher_top_k": 16,
        "max_steps": 3,
        "eval_steps": 1,
        "logging_steps": 1,
        "base_dtype": "nf4",
    }
    return golden_arguments(tmp_path, "qwen2", **{**given, **changes})


def made(args: TrainingArguments, output: Path, events: Events | None = None) -> TrainingArguments:
    """The options of a run with caches instead of the teacher."""
    job = prepare_job(args, planning=True)
    places = write_caches(job.run, job.session.model, output, events or Rows())
    bare = dict.fromkeys(LIVE[:3]) | {"teacher_top_k": TrainingArguments.teacher_top_k}
    return replace(args, **bare, **places, output=str(output / "run"))


@pytest.mark.parametrize("heldout", ["validation_split", "eval_data"])
@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_losses_are_those_of_the_live_teacher(tmp_path: Path, heldout: str, temperature: float) -> None:
    held = 2 if heldout == "validation_split" else str(random_rows(tmp_path / "held.jsonl", 3, VOCAB))
    args = options(tmp_path, temperature=temperature, **{heldout: held})
    cached = made(args, tmp_path / "caches")
    assert bool(cached.eval_teacher_cache) == (heldout == "eval_data")
    logs = []
    for one in (replace(args, output=str(tmp_path / "live")), cached):
        prepare_job(one).train()
        logs.append([{k: v for k, v in line.items() if "loss" in k} for line in read_log(Path(one.directory) / LOG)])
    live, ours = logs
    assert any("eval_kd_loss" in line for line in live)
    assert max(line.get("kd_loss", 0.0) for line in live) > 0.01
    for one, other in zip(live, ours, strict=True):
        assert other == pytest.approx(one, rel=1e-4)


def test_caches_are_continued_and_count_their_rows_together(tmp_path: Path) -> None:
    heard, again = Rows(), Rows()
    args = options(tmp_path, eval_data=str(random_rows(tmp_path / "held.jsonl", 3, VOCAB)))
    first = made(args, tmp_path / "caches", heard)
    total = sum(TeacherCache.open(getattr(first, name) or "").rows for name in ("teacher_cache", "eval_teacher_cache"))
    assert (heard.seen[0], heard.seen[-1]) == ((0, total), (total, total))
    assert [rows for rows, _ in heard.seen] == sorted(rows for rows, _ in heard.seen)
    digest = TeacherCache.open(first.teacher_cache or "").digest()
    assert made(args, tmp_path / "caches", again) == first
    assert again.seen == []
    assert TeacherCache.open(first.teacher_cache or "").digest() == digest
    cached = prepare_job(first, planning=True)
    with pytest.raises(UserError, match="has no teacher that could be cached"):
        cache_plans(cached.run, cached.session.model)


def test_runs_that_the_same_caches_serve(tmp_path: Path) -> None:
    def digest(**changes: Any) -> str:
        job = prepare_job(options(tmp_path, validation_split=2, **changes), planning=True)
        return caches_digest(job.run, cache_plans(job.run, job.session.model))

    one = digest()
    assert digest(seed=7, learning_rate=1e-3) == one  # another split of the same rows
    others = [digest(teacher_top_k=8), digest(teacher_adapter=None), digest(temperature=2.0), digest(max_length=12)]
    assert len({one, *others}) == 5
    assert digest(temperature=2.0, seed=7) != digest(temperature=2.0)  # which tokens are drawn


def test_the_plan_with_caches_is_that_of_a_run_with_them(
    tmp_path: Path, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kind, "Device", lambda selector=None: device)
    args = options(tmp_path, validation_split=2)
    given = {name: value for name, value in args.as_dict().items() if value != getattr(TrainingArguments(), name)}
    given = {name: value for name, value in given.items() if name not in ("output", "device")}
    tasks = [{"name": "taught", "options": given}, {"name": "again", "options": {**given, "learning_rate": 0.5}}]
    found = KINDS["plan"](EventWriter(io.StringIO()), where="it", tasks=tasks, cached=True)
    cached = prepare_job(made(args, tmp_path / "caches"), planning=True)
    needs = found["taught"]["taught"]["needs"]
    assert needs["needed"] == cached.session.memory().guarded < found["tasks"]["taught"]["needed"]
    assert found["taught"]["again"] == found["taught"]["taught"]
    assert KINDS["plan"](EventWriter(io.StringIO()), where="it", tasks=tasks)["taught"] == {}
