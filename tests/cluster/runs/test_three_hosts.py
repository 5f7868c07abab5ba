"""Runs on three hosts, two with the same driver and one with another: they end as each adapter does alone."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.cli import flags, write_rows
from support.cluster.cluster_runs import cluster, rows_of, status
from support.cluster.hosts import Host, Hosts, drivers_here, until

from wgpu_lora.cli.proof.checks import DEVICE_TOLERANCE
from wgpu_lora.train.run.training_log import LOG, read_log

COUNT = 8
ADAPTER = "adapter_model.safetensors"
OPTIONS = {
    "model": "demo",
    "max_length": 16,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 1,
    "lora_r": 4,
    "logging_steps": 1,
    "max_steps": 4,
}
ALONE = """
import json, sys
from wgpu_lora.train.prepare_job import prepare_job
from wgpu_lora.train.options.training_arguments import TrainingArguments
for options in json.loads(sys.argv[1]):
    prepare_job(TrainingArguments(**options)).train()
"""
MEASURE = "from wgpu_lora.cluster.device_resources import measure_speed; print(measure_speed(0).tokens_per_second)"
# Instead of a measurement, which takes minutes on a slow driver and depends on what else runs.
RECORD = """
import sys
from wgpu_lora.cluster.device_resources import Speed, devices_here, save_speed
save_speed(devices_here()[0], Speed(float(sys.argv[1]), joined_speedup=1.0))
"""
# A program of somebody at the machine, which has all of a device's memory.
HOLD = """
import time
from wgpu_lora.gpu.device_list import list_devices
from wgpu_lora.gpu.memory_leases import Ledger, budget_bytes, device_key
from wgpu_lora.gpu.memory_leases.lease_queue import take
listed = list_devices()
budget = budget_bytes(listed[0]).bytes
with take(Ledger(device_key(listed[0], listed)), budget, budget, "somebody's own"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Three hosts whose devices are known, the last with another driver."""
    fast, *slower = drivers_here()
    drivers = [fast, fast, *slower][:3]
    with Hosts(3, shared=tmp_path_factory.mktemp("shared"), drivers=drivers) as machines:
        speed = float(machines[0].python("-c", MEASURE).stdout)
        machines[2].python("-c", RECORD, str(speed / 10))
        machines.start_nodes()
        until(lambda: len(status(machines)["devices"]) == 3)
        yield machines


def alone(host: Host, runs: list[dict[str, Any]]) -> None:
    """Train runs one after another in a process of a host."""
    host.python("-c", ALONE, json.dumps(runs))


def device_of(directory: Path) -> str:
    """The name of the device on which a run was ended."""
    name: str = json.loads((directory / "run.json").read_text())["environment"]["device"]["name"]
    return name


def facts_at(hosts: Hosts, address: str) -> Any:
    """What a host said of its device at the last survey."""
    return next(device["facts"] for device in status(hosts)["devices"] if device["facts"]["address"] == address)


@contextmanager
def full_device(hosts: Hosts, host: Host) -> Iterator[None]:
    """Somebody else fills the device of a host meanwhile."""
    program = host.start([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    try:
        assert program.stdout
        assert program.stdout.readline() == "held\n"
        until(lambda: facts_at(hosts, host.address)["free"] == 0)
        yield
    finally:
        host.signal(program, signal.SIGKILL)
        program.wait()


def kill(hosts: Hosts, title: str) -> None:
    """Kill all processes of an actor."""
    for host in hosts:
        for pid, line in host.processes().items():
            if line.startswith(title):
                os.kill(pid, signal.SIGKILL)


def tasks_of(hosts: Hosts, run: str) -> list[dict[str, Any]]:
    return [task for task in status(hosts)["tasks"] if task["run"] == run]


def test_eight_adapters_end_as_each_alone(hosts: Hosts) -> None:
    tmp_path = hosts.shared
    data = [rows_of(tmp_path, number) for number in range(COUNT)]
    together, apart = ([tmp_path / kind / f"a{number}" for number in range(COUNT)] for kind in ("together", "apart"))
    named = [word for rows, output in zip(data, together, strict=True) for word in ("--adapters", f"{rows}:{output}")]
    cluster(hosts, "run", "--name", "eight", "--join", "never", *named, *flags(**OPTIONS))
    alone(hosts[0], [{**OPTIONS, "data": str(d), "output": str(o)} for d, o in zip(data, apart, strict=True)])
    tasks = tasks_of(hosts, "eight")
    assert [task["state"] for task in tasks] == ["finished"] * COUNT
    assert_placed_by_speed(status(hosts)["devices"], tasks)
    same_driver = [device_of(ours) == device_of(theirs) for ours, theirs in zip(together, apart, strict=True)]
    assert any(same_driver)
    for ours, theirs, same in zip(together, apart, same_driver, strict=True):
        actual, expected = read_log(ours / LOG), read_log(theirs / LOG)
        assert [entry["step"] for entry in actual] == [entry["step"] for entry in expected] == [1, 2, 3, 4]
        assert [entry["loss"] for entry in actual] == pytest.approx(
            [entry["loss"] for entry in expected], rel=DEVICE_TOLERANCE
        )
        if same:
            assert (ours / ADAPTER).read_bytes() == (theirs / ADAPTER).read_bytes()


def assert_placed_by_speed(devices: list[dict[str, Any]], tasks: list[dict[str, Any]]) -> None:
    """Each device has a speed, and one that is much faster was given more."""
    speeds = {f"{device['facts']['address']}/{device['facts']['key']}": device["facts"]["speed"] for device in devices}
    counts = Counter(task["device"] for task in tasks)
    assert all(speed > 0 for speed in speeds.values())
    slow, *_, fast = sorted(speeds, key=speeds.__getitem__)
    assert counts[fast] > counts[slow], (speeds, counts)


def test_what_no_device_can_run_is_refused(hosts: Hosts) -> None:
    before, output = status(hosts)["runs"], hosts.shared / "large"
    rows = write_rows(hosts.shared / "long.jsonl", [{"input_ids": [1] * 1024}] * 512)
    large = {**OPTIONS, "per_device_train_batch_size": 512, "max_length": 1024}
    refused = cluster(hosts, "run", "--adapters", f"{rows}:{output}", *flags(**large), check=False)
    assert refused.returncode == 2
    limits = r"needs [0-9,]+ bytes, but one binding of this device holds at most|would need a grid of .*, more than"
    assert re.search(limits, refused.stderr)  # of the device that is asked first
    assert not output.exists()
    assert status(hosts)["runs"] == before


# -- data parallel -----------------------------------------------------------------------------------------------------


def logs(hosts: Hosts, run: str) -> list[Path]:
    """The log of a run on the host that trains it."""
    return [log for host in hosts for log in (host.tmp / "cluster").glob(f"**/{run}/**/adapters/*/log.jsonl")]


def devices_per_step(log: Path) -> list[int]:
    """How many devices took part in each step so far."""
    return [sum(name.startswith("share/") for name in line) for line in read_log(log)]


def test_a_full_device_gets_nothing_and_unlike_devices_train_as_one(hosts: Hosts) -> None:
    """One of three devices is full. A replica joins while its leader trains, and is killed. Each step has the loss and
    the gradient's norm that it has alone."""
    rows = write_rows(hosts.shared / "parallel.jsonl")
    options = {**OPTIONS, "per_device_train_batch_size": 4, "learning_rate": 1e-4, "lr_scheduler_type": "constant"}
    options |= {"warmup_ratio": 0.0}
    with full_device(hosts, hosts[1]):
        assert "somebody's own" in facts_at(hosts, hosts[1].address)["leases"][0]
        adapter = f"{rows}:{hosts.shared / 'parallel'}"
        endless = flags(**{**options, "max_steps": 100_000})
        cluster(hosts, "run", "--name", "two", "--data-parallel", "2", "--detach", "--adapters", adapter, *endless)
        (log,) = until(lambda: logs(hosts, "two"))
        until(lambda: devices_per_step(log).count(2) >= 4)
        kill(hosts, "ray::ReplicaActor")
        single = until(lambda: (counts := devices_per_step(log))[-1] == 1 and len(counts))
        until(lambda: devices_per_step(log)[single:].count(2) >= 4)
        entries = read_log(log)
        assert not any(line.startswith("ray::TrainingActor") for line in hosts[1].processes().values())
        cluster(hosts, "cancel", "two")
    run = {**options, "data": str(rows), "output": str(hosts.shared / "single"), "max_steps": entries[-1]["step"]}
    alone(hosts[0], [run])
    expected = read_log(hosts.shared / "single" / LOG)
    for value in ("step", "loss", "grad_norm", "tokens"):
        assert [line[value] for line in entries] == pytest.approx([line[value] for line in expected], rel=2e-3), value


# -- teacher caches ----------------------------------------------------------------------------------------------------

STUDENT = {**OPTIONS, "objective": "kd", "hard_full_weight": 0.5}
STUDENT = {name: value for name, value in STUDENT.items() if name != "max_length"}  # of the caches
TEACHER = {"teacher": "demo", "teacher_base_dtype": "f32", "teacher_top_k": 8, "max_length": 16}
CACHE = """
import json, sys
from wgpu_lora.api import load, teacher_cache
for directory, data in json.loads(sys.argv[1]).items():
    teacher = load("demo", base_dtype="f32")
    teacher_cache(teacher, data, directory, top_k=8, random=0, length=16, logits_dtype="f32", progress_bar=False)
"""


def test_a_cache_is_made_beside_training_and_gives_the_adapter_of_a_plain_run_with_it(hosts: Hosts) -> None:
    """The evaluation device makes the cache of a teacher that two adapters share, though it is killed meanwhile."""
    place = hosts.shared
    rows, heldout = rows_of(place, 0), rows_of(place, 1)
    outputs = [place / "taught" / name for name in "ab"]
    named = [word for output in outputs for word in ("--adapters", f"{rows}:{output}")]
    device = next(entry["id"] for entry in status(hosts)["devices"] if entry["facts"]["address"] == hosts[1].address)
    where = ["--join", "never", "--eval-device", device, "--name", "taught", "--detach"]
    cluster(hosts, "run", *where, *named, *flags(**STUDENT, **TEACHER, eval_data=heldout))
    title = "ray::EvaluationActor"
    until(lambda: any(line.startswith(title) for line in hosts[1].processes().values()))
    kill(hosts, title)
    cluster(hosts, "attach", "taught")
    events = [line["text"] for line in status(hosts)["events"]]
    tasks = tasks_of(hosts, "taught")
    caches = {name: str(place / name) for name in ("teacher_cache", "eval_teacher_cache")}
    plain = {**STUDENT, "data": str(rows), "eval_data": str(heldout), "eval_steps": 1 << 30}
    data = {caches["teacher_cache"]: str(rows), caches["eval_teacher_cache"]: str(heldout)}
    hosts[0].python("-c", CACHE, json.dumps(data))
    alone(hosts[0], [{**plain, **caches, "output": str(place / "cached")}])
    alone(hosts[0], [{**plain, **TEACHER, "output": str(place / "live")}])
    assert [task["state"] for task in tasks] == ["finished", "finished"]
    assert any("a teacher cache is tried again" in text for text in events)
    assert sum("a teacher cache of 16 rows is complete" in text for text in events) == 1
    assert not any(task["device"].startswith(hosts[1].address) for task in tasks)  # they got the cache from it
    live, cached = (read_log(place / name / LOG) for name in ("live", "cached"))
    for output in outputs:
        used = json.loads((output / "run.json").read_text())["options"]
        assert used["teacher"] is None
        assert Path(used["eval_teacher_cache"]).name == "eval_teacher_cache"
        steps = [[entry["loss"] for entry in log if entry["step"]] for log in (read_log(output / LOG), cached, live)]
        assert len(steps[0]) == STUDENT["max_steps"]  # step 0: plain runs only
        assert steps[1] == pytest.approx(steps[2], rel=1e-4)
        if device_of(output) == device_of(place / "cached"):
            assert steps[0] == steps[1]
            assert (output / ADAPTER).read_bytes() == (place / "cached" / ADAPTER).read_bytes()
    assert any(device_of(output) == device_of(place / "cached") for output in outputs)
