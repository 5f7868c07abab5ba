"""The evaluation device makes the cache of a teacher that two adapters share, though it is killed meanwhile."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from support.cli import flags
from support.cluster_runs import cluster, rows_of, status
from support.hosts import Hosts, drivers_here, namespaces_allowed, until

from wgpu_lora.train.run.training_log import LOG, read_log

pytestmark = pytest.mark.skipif(not namespaces_allowed(), reason="namespaces cannot be made here")

ADAPTER = "adapter_model.safetensors"
STUDENT = {
    "model": "demo",
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "lora_r": 4,
    "logging_steps": 1,
    "max_steps": 4,
    "objective": "kd",
    "hard_full_weight": 0.5,
}
TEACHER = {"teacher": "demo", "teacher_base_dtype": "f32", "teacher_top_k": 8, "max_length": 16}
ALONE = """
import json, sys
from wgpu_lora.api import load, teacher_cache
from wgpu_lora.train.finetune import prepare_job
from wgpu_lora.train.options.training_arguments import TrainingArguments
place, caches, runs = sys.argv[1], *map(json.loads, sys.argv[2:])
for name, data in caches.items():
    teacher = load("demo", base_dtype="f32")
    how = {"top_k": 8, "random": 0, "length": 16, "logits_dtype": "f32", "progress_bar": False}
    teacher_cache(teacher, data, f"{place}/{name}", **how)
for options in runs:
    prepare_job(TrainingArguments(**options)).train()
"""


def caching(hosts: Hosts) -> list[int]:
    """The actor that makes a teacher cache on the second host, from its start."""
    return [pid for pid, line in hosts[1].processes().items() if line.startswith("ray::EvaluationActor")]


def test_a_cache_is_made_beside_training_and_gives_the_adapter_of_a_plain_run_with_it(tmp_path: Path) -> None:
    rows, heldout = rows_of(tmp_path, 0), rows_of(tmp_path, 1)
    outputs = [tmp_path / "together" / name for name in "ab"]
    named = [word for output in outputs for word in ("--adapters", f"{rows}:{output}")]
    with Hosts(2, shared=tmp_path, drivers=drivers_here()[:1]) as hosts:
        hosts.start_nodes()
        until(lambda: len(status(hosts)["devices"]) == 2, 300)
        found = {one["facts"]["address"]: one["facts"]["key"] for one in status(hosts)["devices"]}
        eval_device = f"{hosts[1].address}/{found[hosts[1].address]}"
        where = ["--join", "never", "--eval-device", eval_device, "--name", "taught", "--detach"]
        cluster(hosts, "run", *where, *named, *flags(**STUDENT, **TEACHER, eval_data=heldout))
        until(lambda: caching(hosts), 300)
        for pid in caching(hosts):
            os.kill(pid, signal.SIGKILL)
        cluster(hosts, "attach", "taught")
        seen = status(hosts)
        caches = {name: str(tmp_path / name) for name in ("teacher_cache", "eval_teacher_cache")}
        plain = {**STUDENT, "data": str(rows), "eval_data": str(heldout), "eval_steps": 1 << 30}
        runs = [
            {**plain, **caches, "output": str(tmp_path / "cached")},
            {**plain, **TEACHER, "output": str(tmp_path / "live")},
        ]
        data = {"teacher_cache": str(rows), "eval_teacher_cache": str(heldout)}
        hosts[0].python("-c", ALONE, str(tmp_path), json.dumps(data), json.dumps(runs), timeout=400)
    assert [task["state"] for task in seen["tasks"]] == ["finished", "finished"]
    events = [line["text"] for line in seen["events"]]
    assert any("a teacher cache is tried again" in text for text in events)
    assert sum("a teacher cache of 16 rows is complete" in text for text in events) == 1
    assert all(task["device"].startswith(hosts[0].address) for task in seen["tasks"])  # it got the cache from the other
    live, cached = (read_log(tmp_path / name / LOG) for name in ("live", "cached"))
    for output in outputs:
        options = json.loads((output / "run.json").read_text())["options"]
        assert options["teacher"] is None
        assert Path(options["eval_teacher_cache"]).name == "eval_teacher_cache"
        assert (output / ADAPTER).read_bytes() == (tmp_path / "cached" / ADAPTER).read_bytes()
        logs = (read_log(output / LOG), cached, live)
        losses = [[entry["loss"] for entry in log if entry["step"]] for log in logs]  # step 0: plain runs only
        assert len(losses[0]) == STUDENT["max_steps"]
        assert losses[0] == losses[1] == pytest.approx(losses[2], rel=1e-4)
