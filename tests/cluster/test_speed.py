"""The speed of a device: measured in a process of its own, and kept on disk."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import pytest
from support.bench import mini

from wgpu_lora.bench.bricks import WORKLOADS
from wgpu_lora.cluster import device_resources
from wgpu_lora.cluster.device_resources import Speed, cached, measure_speed
from wgpu_lora.cluster.worker.job_file import KINDS
from wgpu_lora.cluster.worker.job_process import EventWriter
from wgpu_lora.cluster.worker.kinds import bench_jobs as kind
from wgpu_lora.cluster.worker.worker import WorkerFailed
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.device_list import DeviceInfo
from wgpu_lora.gpu.memory_leases import Ledger, LedgerEntry, device_key
from wgpu_lora.processes.process_identity import process_start

INFO = DeviceInfo(3, "Some GPU", "driver 1", 0x1002, "Vulkan", "discrete", (), {}, 0x744C)


class FakeWorker:
    """A worker that gives these results, one each time."""

    results: list[Any]
    requests: list[Any]

    def __init__(self, job: str, options: Any, timeout: float):
        self.requests.append((job, options))

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    def result(self) -> Any:
        answer = self.results.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> type[FakeWorker]:
    monkeypatch.setenv("WGPU_LORA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(device_resources, "Worker", FakeWorker)
    FakeWorker.results, FakeWorker.requests = [], []
    return FakeWorker


def result(tokens: float = 100.0, beside: tuple[str, ...] = ()) -> dict[str, Any]:
    return {"tokens_per_second": tokens, "joined_speedup": 1.25, "beside": list(beside)}


def test_a_speed_is_measured_once_for_a_device_driver_and_shaders(
    worker: type[FakeWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    worker.results = [result(), result(200.0), result(300.0)]
    assert cached(INFO) is None
    assert measure_speed(INFO) == measure_speed(INFO) == cached(INFO) == Speed(100.0, 1.25)
    assert worker.requests == [("speed", {"device": 3})]
    assert cached(replace(INFO, index=9)) == Speed(100.0, 1.25)  # the index may change
    for other in ({"driver": "driver 2"}, {"name": "Other"}, {"backend": "D3D12"}, {"device_id": 1}):
        assert cached(replace(INFO, **other)) is None
    assert measure_speed(INFO, refresh=True).tokens_per_second == 200.0
    assert cached(INFO) == Speed(200.0, 1.25)
    versions = device_resources.own_versions()
    monkeypatch.setattr(device_resources, "own_versions", lambda: replace(versions, shaders="other"))
    assert cached(INFO) is None
    assert measure_speed(INFO).tokens_per_second == 300.0


def test_a_speed_beside_others_is_marked_and_not_kept(worker: type[FakeWorker]) -> None:
    worker.results = [result(50.0, ("pid 7 (finetune out)",)), result()]
    assert measure_speed(INFO).beside == ["pid 7 (finetune out)"]
    assert cached(INFO) is None
    assert measure_speed(INFO) == cached(INFO) == Speed(100.0, 1.25)


@pytest.mark.parametrize("damage", ["", "[]", '{"schema": 1}', "[" * 5000, "speed", "tokens", "other"])
def test_a_damaged_file_is_measured_again(worker: type[FakeWorker], tmp_path: Path, damage: str) -> None:
    worker.results = [result(), result(200.0)]
    measure_speed(INFO)
    (file,) = (tmp_path / "speed").glob("*.json")
    content = json.loads(file.read_text())
    changed = {
        "speed": {**content, "speed": 3},
        "tokens": {**content, "speed": {**content["speed"], "tokens_per_second": 0}},
        "other": {**content, "of": {**content["of"], "driver": "other"}},  # as if digests collided
    }
    file.write_text(json.dumps(changed[damage]) if damage in changed else damage)
    assert cached(INFO) is None
    assert measure_speed(INFO) == cached(INFO) == Speed(200.0, 1.25)


@pytest.mark.parametrize("wrong", [WorkerFailed("speed ended with exit code -11: it said nothing", -11), {"zork": 1}])
def test_a_driver_that_crashes_costs_nothing(worker: type[FakeWorker], wrong: Any) -> None:
    worker.results = [wrong]
    with pytest.raises(UserError, match=r"^The speed of Some GPU cannot be measured: "):
        measure_speed(INFO)
    assert cached(INFO) is None


def test_the_job_measures_a_device_and_says_who_was_there(
    device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(kind, "Device", lambda selector: device)
    monkeypatch.setattr(kind, "Context", type("Small", (), {"of": lambda *_, tokens: mini(device)}))
    monkeypatch.setenv("WGPU_LORA_SHARE_DIR", str(tmp_path / "share"))
    bytes_before = device.allocated
    speed = KINDS["speed"](EventWriter(io.StringIO()), seconds=0.01)
    assert speed["tokens_per_second"] > 0
    assert 0.05 < speed["joined_speedup"] < 20
    assert (speed["beside"], device.allocated) == ([], bytes_before)
    with Ledger(device_key(device.info)).changing() as entries:
        mine = LedgerEntry.of_this_process(5, "finetune out", holds=True)
        entries.append(replace(mine, pid=1, started=process_start(1) or 0))
    assert KINDS["speed"](EventWriter(io.StringIO()), seconds=0.01)["beside"] == ["pid 1 (finetune out)"]


def test_the_brick_is_right_and_counts_what_each_step_takes(device: Device) -> None:
    context = mini(device)
    (workload,) = WORKLOADS["device_speed"](context)
    alone, third, together = (workload.steps[name].tokens for name in ("alone", "third", "together"))
    assert alone == together == 3 * third == workload.keys["step_tokens"]
    workload.open()
    try:
        checked = workload.check(np.random.default_rng(1))
        assert checked.nmse < 1e-8
        workload.turns = [{"alone": 2.0, "third": 3.0, "together": 1.5}, {"alone": 4.0, "third": 2.0, "together": 2.0}]
        assert workload.figures(1) == {"tokens_per_second": alone / 4, "joined_speedup": 1.0}
        assert workload.figures(2) == {"tokens_per_second": alone / 3, "joined_speedup": 1.5}
    finally:
        workload.close()
        context.close()
