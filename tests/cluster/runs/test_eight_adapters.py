"""Eight adapters over three hosts with unlike drivers end as each does alone."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.cli import flags, write_rows
from support.cluster_runs import cluster, rows_of, status
from support.hosts import Hosts, drivers_here, hosts_here, until

from wgpu_lora.proof.checks import DEVICE_TOLERANCE
from wgpu_lora.train.run.training_log import LOG, read_log

COUNT = 8
MUCH = 3.0  # times that the one driver is faster than the other, at least, on a busy machine
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
from wgpu_lora.train.finetune import prepare_job
from wgpu_lora.train.options.training_arguments import TrainingArguments
for options in json.loads(sys.argv[1]):
    prepare_job(TrainingArguments(**options)).train()
"""


MEASURE = "from wgpu_lora.cluster.device_resources import measured; print(measured(0))"
# A program of somebody at the machine, which has all of a device's memory.
HOLD = """
import time
from wgpu_lora.gpu.device_list import list_devices
from wgpu_lora.memory_leases import Ledger, budget_bytes, device_key
from wgpu_lora.memory_leases.lease_queue import take
listed = list_devices()
budget = budget_bytes(listed[0]).bytes
with take(Ledger(device_key(listed[0], listed)), budget, budget, "somebody's own"):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    """Three hosts whose devices are known."""
    with hosts_here(3, shared=tmp_path_factory.mktemp("shared")) as made:
        for host in made:  # one after another, and kept
            host.python("-c", MEASURE, timeout=400)
        made.start_nodes()
        until(lambda: len(status(made)["devices"]) == 3, 300)
        yield made


def device_of(directory: Path) -> str:
    """The name of the device on which a run was ended."""
    name: str = json.loads((directory / "run.json").read_text())["environment"]["device"]["name"]
    return name


def facts_at(hosts: Hosts, address: str) -> Any:
    """What a host said of its device at the last survey."""
    return next(one["facts"] for one in status(hosts)["devices"] if one["facts"]["address"] == address)


def test_a_full_device_gets_nothing(hosts: Hosts) -> None:
    """One that somebody else fills is left alone; what no device can run is refused before anything runs."""
    place = hosts.shared / "full"
    named = [word for n in range(3) for word in ("--adapters", f"{rows_of(hosts.shared, n)}:{place / str(n)}")]
    full = hosts[2].start([sys.executable, "-c", HOLD], stdout=subprocess.PIPE, text=True)
    try:
        assert full.stdout.readline() == "held\n"
        at = hosts[2].address
        until(lambda: facts_at(hosts, at)["free"] == 0, 60)
        assert "somebody's own" in facts_at(hosts, at)["leases"][0]
        cluster(hosts, "run", "--join", "never", *named, *flags(**OPTIONS))
    finally:
        hosts[2].signal(full, signal.SIGKILL)
        full.wait()
    seen = status(hosts)
    assert [task["state"] for task in seen["tasks"]] == ["finished"] * 3
    assert not any(task["device"].startswith(at) for task in seen["tasks"])
    rows = write_rows(hosts.shared / "long.jsonl", [{"input_ids": [1] * 1024}] * 512)
    large = {**OPTIONS, "per_device_train_batch_size": 512, "max_length": 1024}
    refused = cluster(hosts, "run", "--adapters", f"{rows}:{place / 'large'}", *flags(**large), check=False)
    assert refused.returncode == 2
    limits = r"needs [0-9,]+ bytes, but one binding of this device holds at most|would need a grid of .*, more than"
    assert re.search(limits, refused.stderr)  # of the device that is asked first
    assert not (place / "large").exists()
    assert len(status(hosts)["runs"]) == len(seen["runs"])


def test_eight_adapters_end_as_each_alone(hosts: Hosts) -> None:
    tmp_path = hosts.shared
    data = [rows_of(tmp_path, number) for number in range(COUNT)]
    together, alone = ([tmp_path / kind / f"a{number}" for number in range(COUNT)] for kind in ("together", "alone"))
    named = [word for rows, output in zip(data, together, strict=True) for word in ("--adapters", f"{rows}:{output}")]
    each = [{**OPTIONS, "data": str(rows), "output": str(output)} for rows, output in zip(data, alone, strict=True)]
    cluster(hosts, "run", "--name", "eight", "--join", "never", *named, *flags(**OPTIONS))
    seen = status(hosts)
    hosts[0].python("-c", ALONE, json.dumps(each), timeout=400)
    tasks = [task for task in seen["tasks"] if task["run"] == "eight"]
    assert [task["state"] for task in tasks] == ["finished"] * COUNT
    assert_placed_by_speed(seen["devices"], tasks)
    same_driver = [device_of(ours) == device_of(theirs) for ours, theirs in zip(together, alone, strict=True)]
    assert any(same_driver)
    for ours, theirs, same in zip(together, alone, same_driver, strict=True):
        made, expected = read_log(ours / LOG), read_log(theirs / LOG)
        assert [entry["step"] for entry in made] == [entry["step"] for entry in expected] == [1, 2, 3, 4]
        assert [entry["loss"] for entry in made] == pytest.approx(
            [entry["loss"] for entry in expected], rel=DEVICE_TOLERANCE
        )
        if same:
            assert (ours / ADAPTER).read_bytes() == (theirs / ADAPTER).read_bytes()


def assert_placed_by_speed(devices: list[dict[str, Any]], tasks: list[dict[str, Any]]) -> None:
    """Each device was measured, and one that is much faster was given more."""
    speeds = {f"{one['facts']['address']}/{one['facts']['key']}": one["facts"]["speed"] for one in devices}
    given = Counter(task["device"] for task in tasks)
    assert all(speed > 0 for speed in speeds.values())
    slow, *_, fast = sorted(speeds, key=speeds.__getitem__)
    if len(drivers_here()) > 1:  # lavapipe is about ten times as fast as SwiftShader
        assert speeds[fast] > MUCH * speeds[slow], speeds
        assert given[fast] > given[slow], (speeds, given)
