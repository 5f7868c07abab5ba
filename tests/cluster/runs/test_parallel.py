"""A data-parallel adapter on two hosts: a replica comes, is killed and comes back; the result is that of one device."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from support.cli import flags, write_rows
from support.hosts import Host, Hosts, namespaces_allowed, until

from wgpu_lora.train.run.training_log import LOG, read_log


def shares(directory: Path) -> list[int]:
    """How many devices took part in each step so far."""
    path = directory / LOG
    lines = read_log(path) if path.exists() else []
    return [sum(name.startswith("share/") for name in line) for line in lines]


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


def replicas(hosts: Hosts) -> list[int]:
    return [pid for host in hosts for pid, line in host.processes().items() if line.startswith("ray::ReplicaActor")]


@pytest.mark.skipif(not namespaces_allowed(), reason="namespaces cannot be made here")
def test_unlike_devices_of_two_hosts_train_as_one(tmp_path: Path) -> None:
    """The replica joins while its leader trains. Each step has the loss and the gradient's norm that it has alone."""
    rows = write_rows(tmp_path / "rows.jsonl")
    with Hosts(2, shared=tmp_path) as hosts:
        hosts.start_nodes()
        adapter = f"{rows}:{tmp_path / 'out'}"
        words = ["--data-parallel", "2", "--name", "two", "--detach", *flags(**OPTIONS, max_steps=100_000)]
        command(hosts, "run", "--adapters", adapter, *words)
        host, log = until(lambda: leader(hosts), 300)  # also where devices are measured first
        until(lambda: shares(log.parent).count(2) >= 4, 240)
        for pid in replicas(hosts):
            os.kill(pid, signal.SIGKILL)
        alone = until(lambda: (found := shares(log.parent))[-1] == 1 and len(found), 120)
        until(lambda: shares(log.parent)[alone:].count(2) >= 4, 240)
        made = read_log(log)[: len(shares(log.parent))]
        command(hosts, "cancel", "two")
        steps = max(line["step"] for line in made)
        options = {**OPTIONS, "data": str(rows), "output": str(tmp_path / "alone"), "max_steps": steps}
        host.python("-c", ALONE, json.dumps(options), timeout=400)
    expected = read_log(tmp_path / "alone" / LOG)[: len(made)]
    for value in ("step", "loss", "grad_norm", "tokens"):
        assert [line[value] for line in made] == pytest.approx([line[value] for line in expected], rel=2e-3), value
