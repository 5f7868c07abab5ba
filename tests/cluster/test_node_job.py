"""Orders as jobs of workers, and what their events and ends say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.units import order, write_checkpoint

from wgpu_lora.cluster.facts import Task
from wgpu_lora.cluster.node.ending import ending_of
from wgpu_lora.cluster.node.job import NEVER, job_of
from wgpu_lora.cluster.node.lease import Lease, boot_time
from wgpu_lora.cluster.node.progress import WINDOW, Standing
from wgpu_lora.errors import UserError

PLACE = Path("/place")


def task(name: str, **options: Any) -> Task:
    return Task(name, {"data": f"/{name}.jsonl", "lora_r": 4, "optim": "adamw", **options}, f"/out/{name}")


def test_a_task_is_a_run_and_several_are_a_pipeline() -> None:
    job = job_of(order(task("one", seed=None), every=5), PLACE, 2, resume=False)
    assert job.kind == "finetune"
    assert job.options == {
        "data": "/one.jsonl", "lora_r": 4, "optim": "adamw", "save_steps": 5, "device": 2, "requests": True,
        "output": "/place/adapters/one",
    }  # fmt: skip
    job = job_of(order(task("one"), task("two", lora_r=8, learning_rate=1e-3), every=5), PLACE, 0, resume=True)
    assert job.kind == "pipeline"
    assert job.options == {
        "adapters": [
            {"data": "/one.jsonl", "lora_r": 4, "name": "one", "checkpoint": "/place/adapters/one"},
            {"data": "/two.jsonl", "lora_r": 8, "learning_rate": 1e-3, "name": "two",
             "checkpoint": "/place/adapters/two"},
        ],
        "optim": "adamw", "save_steps": 5, "device": 0, "requests": True, "resume": True, "output": "/place/pipeline",
    }  # fmt: skip


def test_what_is_not_a_tasks_to_say() -> None:
    said = task("one", output="/etc", device=7, resume=True, requests=False, save_steps=3)
    options = job_of(order(said, every=5), PLACE, 2, resume=False).options
    assert (options["output"], options["device"], options["requests"]) == ("/place/adapters/one", 2, True)
    assert "resume" not in options
    assert options["save_steps"] == 3
    elsewhere = replace(order(task("one", save_steps=0), every=5), heldout_elsewhere=True)
    options = job_of(elsewhere, PLACE, 2, resume=False).options
    assert (options["eval_steps"], options["eval_on_start"], options["save_steps"]) == (NEVER, False, 5)


@pytest.mark.parametrize("names", [["../one"], ["one", "ONE"], ["one/two"], [".one"]])
def test_names_that_cannot_be_directories(names: list[str]) -> None:
    given = replace(order(task("one")), tasks=[task(name) for name in names])
    with pytest.raises(UserError):
        job_of(given, PLACE, 0, resume=False)


def step(number: int, at: float, adapter: str | None = None) -> dict[str, Any]:
    return {
        "event": "step", "time": at, "adapter": adapter, "step": number, "total_steps": 100, "loss": 1 / number,
        "seconds": 0.5, "step_processed_tokens": 10, "eval_loss": None,
    }  # fmt: skip


def test_events_as_progress() -> None:
    standing = Standing(["one"])
    doing = [standing.progress["one"].doing]
    for event in (
        {"event": "begin", "job": "finetune", "pid": 1},
        {"event": "waiting", "place": 2, "holders": [], "seconds": 0.0},
        {"event": "tuning", "over": False},
        {"event": "loading", "model": "m", "tensor": "t", "done": 1, "total": 4},
        {"event": "evaluating", "rows": 0, "total": 8, "loss": None, "step": 0, "adapter": None},
    ):
        standing.hear(event)
        doing.append(standing.progress["one"].doing)
    assert doing == [
        "waiting", "starting", "waiting for memory, place 2", "tuning kernels", "loading the model, 25%",
        "measuring the held-out loss",
    ]  # fmt: skip
    for loss, number in ((3.0, 0), (2.0, 1), (2.5, 2)):
        standing.hear({"event": "evaluating", "loss": loss, "step": number, "adapter": None})
    assert (standing.progress["one"].eval_loss, standing.progress["one"].best_eval_loss) == (2.5, 2.0)
    for number in range(1, 2 * WINDOW):
        standing.hear(step(number, 2.0 * number))
    now = standing.progress["one"]
    assert (now.step, now.total_steps, now.doing) == (2 * WINDOW - 1, 100, "")
    assert now.tokens_per_second == pytest.approx(20)
    assert now.seconds_left == pytest.approx(2.0 * (100 - now.step))
    standing.hear({"event": "saved", "directory": "/x/checkpoints/step-30", "step": 30, "adapter": None})
    standing.hear({"event": "saved", "directory": "/x/best", "step": 35, "adapter": None})
    assert standing.saved == {"one": 30}
    standing.hear({"event": "unheard of"})
    standing.hear({"event": "retired", "reason": "diverged", "adapter": None})
    assert standing.outcomes == {"one": "failed"}


def test_events_of_a_pipeline_are_of_its_tasks() -> None:
    standing = Standing(["one", "two"])
    standing.hear(step(3, 1.0, "two"))
    standing.hear({"event": "retired", "reason": "request", "adapter": "two"})
    standing.hear({"event": "retired", "reason": "interrupt", "adapter": "one"})  # it can be resumed
    standing.doing("starting")
    assert standing.outcomes == {"two": "stopped"}
    assert (standing.progress["one"].doing, standing.progress["two"].doing) == ("starting", "")


def test_a_resumed_task_begins_where_its_checkpoint_is(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "adapters" / "one" / "checkpoints" / "step-4", 4)
    standing = Standing(["one", "two"])
    standing.resume(tmp_path)
    assert (standing.progress["one"].step, standing.progress["one"].total_steps) == (4, 9)
    assert standing.saved == {"one": 4}


@pytest.mark.parametrize(
    ("code", "error", "cancelled", "ended"),
    [
        (0, None, False, "done"), (1, None, False, "done"), (143, None, True, "stopped"), (-15, None, True, "stopped"),
        (143, None, False, "killed"), (130, None, False, "killed"), (-9, None, False, "killed"),
        (-11, None, False, "failed"), (2, "UserError", False, "refused"), (2, "NotFiniteError", False, "refused"),
        (2, "NoRoomError", False, "no room"), (2, "OutOfDeviceMemory", False, "no room"),
        (2, "DeviceLost", False, "failed"), (1, "AssertionError", False, "failed"),
        (130, "KeyboardInterrupt", True, "stopped"), (130, "KeyboardInterrupt", False, "killed"),
        (2, "UserError", True, "refused"),
    ],
)  # fmt: skip
def test_ends(code: int, error: str | None, cancelled: bool, ended: str) -> None:
    standing = Standing(["one"])
    if error:
        standing.hear({"event": "error", "kind": error, "message": "Why."})
    elif code >= 0:
        standing.hear({"event": "result", "code": code, "said": "all epochs are done", "result": {}})
    assert ending_of(code, standing, "last words", cancelled=cancelled).ended == ended


def test_a_process_that_ends_without_a_word() -> None:
    found = ending_of(3, Standing(["one"]), "its last words", cancelled=False)
    assert (found.ended, found.said) == ("failed", "It ended with exit code 3: its last words")


def test_a_lease_counts_from_what_was_sent() -> None:
    now = 100.0
    lease = Lease(30, lambda: now)
    assert not lease.begun
    assert not lease.holds()
    lease.renew(95)
    lease.renew(90)  # an answer that came late
    now = 124.9
    assert lease.holds()
    now = 125.0
    assert not lease.holds()
    assert boot_time() <= boot_time()
