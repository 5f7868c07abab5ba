"""A data-parallel unit in Ray: helpers come, are killed and come back, and go with the unit and with its device."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from support.cli import flags, write_rows
from support.hosts import Host, Hosts, namespaces_allowed, until
from support.units import order, task
from test_node import Cluster, cluster, gone  # noqa: F401

from wgpu_lora.cluster.cluster_paths import ADAPTERS, Layout, cluster_root
from wgpu_lora.cluster.messages import Order
from wgpu_lora.train.finetune import prepare_job
from wgpu_lora.train.options.training_arguments import from_values
from wgpu_lora.train.run.records import RunRecord
from wgpu_lora.train.run.training_log import LOG, read_log

ENDING = 40.0  # seconds that a helper without a leader may take, while others use this machine


def helped(cluster: Cluster, name: str, path: Path, **options: Any) -> Order:  # noqa: F811
    """An order whose helper is another process on the same device."""
    given = order(task(name, path, logging_steps=1, per_device_train_batch_size=4, **options))
    return replace(given, helpers=[f"{cluster.facts['address']}/{cluster.facts['key']}"])


def helpers() -> list[psutil.Process]:
    """The processes of helpers in this Ray."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.cmdline()[-1].endswith("gradients.job.json"):
                found.append(process)
        except (psutil.Error, IndexError):
            continue
    return found


def shares(directory: Path) -> list[int]:
    """How many devices took part in each step so far."""
    path = directory / LOG
    lines = read_log(path) if path.exists() else []
    return [sum(name.startswith("share/") for name in line) for line in lines]


def test_two_devices_end_as_one(cluster: Cluster, tmp_path: Path) -> None:  # noqa: F811
    """The helper joins when it is there, and the adapter is asked to end after some steps of both."""
    given = helped(cluster, "two", tmp_path, max_steps=100_000, learning_rate=1e-5, lr_scheduler_type="constant")
    directory = Layout(cluster_root()).epoch(given.unit, given.epoch) / ADAPTERS / "two"
    cluster.start(given)
    until(lambda: shares(directory).count(2) >= 6, 240)
    try:
        ray.get(cluster.fake.set.remote(end=["two"]))
        last = cluster.until(lambda report: report.unit == given.unit and report.ended)
    finally:
        ray.get(cluster.fake.set.remote())
    assert last.ended == "done", last
    assert gone(helpers(), ENDING)
    copy, target = cluster.held(given.unit), tmp_path / "published"
    ray.get(cluster.host.publish.remote(given.unit, copy.digest, "two", str(target)), timeout=60)
    record = RunRecord.read(target)
    options = {**given.tasks[0].options, "output": str(tmp_path / "alone"), "max_steps": record.steps}
    alone = prepare_job(from_values(options, "the test")).train()
    assert (record.stop_reason, record.state.tokens) == ("request", alone.state.tokens)
    made, expected = (read_log(place / LOG) for place in (target, tmp_path / "alone"))
    for value in ("step", "loss", "grad_norm", "tokens"):
        assert [line[value] for line in made] == pytest.approx([line[value] for line in expected], rel=1e-3), value


def test_a_killed_helper_comes_back_and_goes_with_its_device(cluster: Cluster, tmp_path: Path) -> None:  # noqa: F811
    given = helped(cluster, "long", tmp_path, max_steps=100_000)
    directory = Layout(cluster_root()).epoch(given.unit, given.epoch) / ADAPTERS / "long"
    cluster.start(given)
    begun = cluster.until(lambda report: report.unit == given.unit and (report.ended or report.progress["long"].step))
    assert not begun.ended, begun
    until(lambda: 2 in shares(directory), 120)
    (process,) = helpers()
    process.kill()
    report = cluster.until(lambda report: report.unit == given.unit and bool(report.said))
    assert "A helper of a data-parallel adapter ended" in report.said
    alone = until(lambda: (found := shares(directory))[-1] == 1 and len(found), 120)
    until(lambda: 2 in shares(directory)[alone:], 120)
    os.kill(ray.get(cluster.device.pid.remote(), timeout=30), signal.SIGKILL)
    assert gone(helpers(), ENDING)


# -- on hosts ----------------------------------------------------------------------------------------------------------

OPTIONS = {
    "model": "demo",
    "max_length": 16,
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "lora_r": 4,
    "logging_steps": 1,
    "learning_rate": 1e-4,
    "lr_scheduler_type": "constant",
    "warmup_ratio": 0.0,
}
ALONE = """
import json, sys
from wgpu_lora.train.finetune import prepare_job
from wgpu_lora.train.options.training_arguments import TrainingArguments
prepare_job(TrainingArguments(**json.loads(sys.argv[1]))).train()
"""


def command(hosts: Hosts, name: str, *words: Any) -> Any:
    argv = ["-m", "wgpu_lora", "cluster", name, *map(str, words), "--address", hosts.address]
    return hosts[0].python(*argv, timeout=400)


def leader(hosts: Hosts) -> tuple[Host, Path] | None:
    """The host that trains the adapter, and its log there."""
    found = [(host, log) for host in hosts for log in (host.tmp / "cluster").glob("**/adapters/*/log.jsonl")]
    return found[0] if found else None


@pytest.mark.skipif(not namespaces_allowed(), reason="namespaces cannot be made here")
def test_unlike_devices_of_two_hosts_train_as_one(tmp_path: Path) -> None:
    """The helper joins while its leader trains. Each step has the loss and the gradient's norm that it has alone."""
    rows = write_rows(tmp_path / "rows.jsonl")
    with Hosts(2, shared=tmp_path) as hosts:
        hosts.start_nodes()
        adapter = f"{rows}:{tmp_path / 'out'}"
        words = ["--data-parallel", "2", "--name", "two", "--detach", *flags(**OPTIONS, max_steps=100_000)]
        command(hosts, "run", "--adapters", adapter, *words)
        host, log = until(lambda: leader(hosts), 300)  # also where devices are measured first
        until(lambda: shares(log.parent).count(2) >= 8, 240)
        made = read_log(log)[: len(shares(log.parent))]
        command(hosts, "cancel", "two")
        steps = max(line["step"] for line in made)
        alone = {**OPTIONS, "data": str(rows), "output": str(tmp_path / "alone"), "max_steps": steps}
        host.python("-c", ALONE, json.dumps(alone), timeout=400)
    expected = read_log(tmp_path / "alone" / LOG)[: len(made)]
    for value in ("step", "loss", "grad_norm", "tokens"):
        assert [line[value] for line in made] == pytest.approx([line[value] for line in expected], rel=2e-3), value
