"""Commands of a person on a cluster of hosts that are namespaces."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from support.cli import write_rows
from support.cluster.hosts import WAIT, Hosts

# Options of runs whose steps are as short as the demo model allows, so that many kills fall into one run.
SMALL_STEPS: dict[str, Any] = {
    "model": "demo",
    "max_length": 16,
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "lora_r": 4,
    "logging_steps": 1,
}


def rows_of(shared: Path, number: int) -> Path:
    """Rows of token ids that differ from adapter to adapter."""
    rows = [{"input_ids": [(7 * i + 3 * j + 5 * number) % 40 + 1 for j in range(6 + i % 7)]} for i in range(8)]
    return write_rows(shared / f"rows{number}.jsonl", rows)


def cluster(hosts: Hosts, command: str, *words: Any, check: bool = True) -> Any:
    """A command on the head."""
    argv = ["-m", "wgpu_lora", "cluster", command, "--address", hosts.address, *map(str, words)]
    return hosts[0].python(*argv, check=check)


OBSERVER = f"""
import json, sys
from wgpu_lora.cluster.cluster_connection import Target, connected
from wgpu_lora.cluster.run_status import as_json, snapshot_of
with connected(Target(sys.argv[1])) as cluster:
    for line in sys.stdin:
        cluster.controller("nodes", seconds={WAIT})
        print(json.dumps(as_json(snapshot_of(cluster))), flush=True)
"""


def status(hosts: Hosts) -> dict[str, Any]:
    """What `cluster status --json` prints, by one process on the head: a command each time takes seconds to start."""
    observer = hosts.observer
    if observer is None or observer.poll() is not None:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        argv = [sys.executable, "-c", OBSERVER, hosts.address]
        observer = hosts.observer = hosts[0].start(argv, text=True, **pipes)
    assert observer.stdin
    assert observer.stdout
    print(file=observer.stdin, flush=True)
    line = next(line for line in observer.stdout if line.startswith("{"))  # Ray prints lines of its own
    answer: dict[str, Any] = json.loads(line)
    return answer
