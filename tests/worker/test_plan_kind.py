"""The job `plan`: what runs need, without running them."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from support.cli import QWEN2, SMALL, write_rows

from wgpu_lora.cluster.messages import RunRequirements, from_plain
from wgpu_lora.cluster.worker.job_file import KINDS
from wgpu_lora.cluster.worker.job_process import EventWriter
from wgpu_lora.cluster.worker.kinds import model_jobs as kind
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.models import loaded_model
from wgpu_lora.train.adapter_tasks import task_of
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.prepare_job import prepare_job, prepare_multi_adapter_job
from wgpu_lora.train.prepare_session import prepare_session


@pytest.fixture
def options(tmp_path: Path) -> dict[str, Any]:
    rows = str(write_rows(tmp_path / "rows.jsonl"))
    return {**SMALL, "model": QWEN2, "data": rows, "eval_data": rows}


def planned(
    options: dict[str, dict[str, Any]], joined: list[list[str]] | None = None, shared: bool = False
) -> dict[str, Any]:
    tasks = [{"name": name, "options": own} for name, own in options.items()]
    result = KINDS["plan"](EventWriter(io.StringIO()), where="it", tasks=tasks, joined=joined, shared=shared)
    assert set(result["tasks"]) == set(options)
    return {
        "tasks": {name: from_plain(RunRequirements, requirements) for name, requirements in result["tasks"].items()},
        "joined": [from_plain(RunRequirements, requirements) for requirements in result["joined"]],
    }


@pytest.fixture(autouse=True)
def one_device(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind, "Device", lambda selector=None: device)


def test_the_bytes_are_those_of_the_plan_and_nothing_is_allocated(options: dict[str, Any], device: Device) -> None:
    before = device.allocated
    result = planned({"a": options, "b": {**options, "lora_r": 8}}, joined=[["a", "b"]])
    assert device.allocated == before
    (a, b), (together,) = result["tasks"].values(), result["joined"]
    memory = prepare_job(TrainingArguments(**options), planning=True).session.memory()
    assert (a.needed, a.base_bytes) == (memory.peak_device_bytes, memory.groups["base"])
    assert b.needed > a.needed
    assert (a.steps, a.heldout, a.refused) == (2, True, None)
    own = {name: options[name] for name in ("data", "lora_r")}
    shared = TrainingArguments(**{name: value for name, value in options.items() if name not in own})
    tasks = [task_of({"name": n, "checkpoint": n, **own, "lora_r": rank}, "x") for n, rank in (("a", 4), ("b", 8))]
    assert together.needed == prepare_multi_adapter_job(shared, tasks, planning=True).session.memory().peak_device_bytes
    assert together.work == a.work + b.work


def test_tasks_that_may_be_joined_have_the_same_base(options: dict[str, Any]) -> None:
    other = {
        "rank": {"lora_r": 2},
        "rate": {"learning_rate": 1e-3},
        "seed": {"seed": 7},
        "rows": {"per_device_train_batch_size": 1},
        "time": {"target_seconds": 9.0},
        "again": {"target_seconds": 9.0},
        "saved": {"save_steps": 3},
    }
    tasks = {"own": options, **{name: {**options, **changes} for name, changes in other.items()}}
    result = planned(tasks, joined=[["own", "rank"], ["own", "seed"]])
    base = {name: plan.base for name, plan in result["tasks"].items()}
    assert {name for name in base if base[name] == base["own"]} == {"own", "rank", "rate", "saved"}
    assert len(set(base.values())) == 5
    assert len({key.partition("-")[0] for key in base.values()}) == 1
    assert (result["tasks"]["time"].steps, result["tasks"]["time"].work) == (0, 0)
    assert result["joined"][0].refused is None
    assert "'seed' cannot be in a pipeline with 'own'" in (result["joined"][1].refused or "")


def test_what_is_refused_stops_no_other_and_a_model_is_opened_once(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, nothing = Mock(side_effect=loaded_model.open_model), str(tmp_path / "nothing.jsonl")
    monkeypatch.setattr(kind, "open_model", opened)
    wrong = {
        "data": {"data": nothing},
        "heldout": {"eval_data": nothing},
        "adapter": {"init_adapter": nothing},
        "rank": {"lora_r": -1},
        "model": {"model": nothing},
        "name": {"lora_rr": 3},
    }
    plans = planned({**{name: {**options, **changes} for name, changes in wrong.items()}, "good": options})["tasks"]
    assert [call.args[0] for call in opened.call_args_list].count(QWEN2) == 1
    assert plans.pop("good").refused is None
    for name, plan in plans.items():
        assert re.fullmatch(r".*[.?]", plan.refused or ""), name  # a sentence on a line
        assert (plan.needed, plan.base) == (0, "")
    assert nothing in (plans["heldout"].refused or "")


def test_a_shared_task_needs_programs_for_parts_of_its_batches(options: dict[str, Any]) -> None:
    alone = planned({"a": options})["tasks"]["a"]
    shared = planned({"a": options, "b": {**options, "train": "quant-scales"}}, shared=True)["tasks"]
    job = prepare_job(TrainingArguments(**options), planning=True)
    session = prepare_session(job.session.model, [job.run], batch_tokens=job.run.stream.buckets()[-1])
    assert shared["a"].needed == session.memory().peak_device_bytes
    assert (shared["a"].base, shared["a"].work) == (alone.base, alone.work)
    assert shared["b"].refused


@pytest.mark.parametrize(
    ("tasks", "message"),
    [
        ([{"name": "a"}], r"it: a task must have a 'name' and 'options' \('options' is missing\)\."),
        ([{"name": "a", "options": {}}] * 2, r"it: two tasks have the same name: give each its own\."),
        ([{"name": "a", "options": {}}], r"it: 'joined' names 'z', which is not a task\."),
    ],
)
def test_a_plan_of_nothing_sensible(tasks: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(UserError, match=message):
        KINDS["plan"](EventWriter(io.StringIO()), where="it", tasks=tasks, joined=[["z"]])
