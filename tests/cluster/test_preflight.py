"""What is refused before anything runs: one sentence for each reason, all of them at once."""

from __future__ import annotations

import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from support.cluster.fake_cluster import VERSIONS, FakeCluster, device_facts, node_facts

from wgpu_lora.cli.cluster import run_driver
from wgpu_lora.cluster.cluster_connection import Target
from wgpu_lora.cluster.cluster_file import RunOptions, SweepOptions, read_cluster_file
from wgpu_lora.cluster.messages import RunRequest, Task, from_plain
from wgpu_lora.cluster.preflight import MOST_REASONS, missing_hosts, request_of, surveyed
from wgpu_lora.errors import UserError
from wgpu_lora.train.memory import RunRequirements

ALPHA = node_facts("alpha", device_facts("10.0.0.5", 0, "NVIDIA A"), device_facts("10.0.0.5", 1, "NVIDIA B"))
BETA = node_facts("beta", device_facts("10.0.0.4", 0, "AMD", plan_class="q", budget=2 << 30))


def task(name: str = "a", **options: Any) -> Task:
    return Task(name, {"data": "demo", **options}, f"/out/{name}")


def requested(cluster: FakeCluster, *tasks: Task, sweep: SweepOptions | None = None, **run: Any) -> RunRequest:
    request = request_of(cluster, cluster.nodes, tasks or [task()], RunOptions(**run), sweep)
    assert from_plain(RunRequest, asdict(request)) == request
    return request


def test_a_request_has_the_plans_of_every_class() -> None:
    cluster = FakeCluster([ALPHA, BETA])
    request = requested(cluster, task("a"), task("b"), name="mine", mirror_steps=7)
    assert (request.name, request.mirror_steps, request.data_parallel) == ("mine", 7, 1)
    assert {name: set(plans) for name, plans in request.plans.items()} == {"a": {"p", "q"}, "b": {"p", "q"}}
    planned = [call for call in cluster.calls if call[1] == "plan"]
    assert [call[0] for call in planned] == ["id-alpha", "id-beta"]  # once for each class
    assert "@" in request.by
    assert requested(cluster).name.startswith("run-")


def test_another_version_on_a_node() -> None:
    other = replace(BETA, versions=replace(VERSIONS, shaders="6" * 64))
    with pytest.raises(UserError, match=r"beta \(10.0.0.4\) differs from this machine: .*shaders.*; install the same"):
        surveyed(FakeCluster([ALPHA, other]), VERSIONS)
    assert [node.host for node in surveyed(FakeCluster([ALPHA, BETA]), VERSIONS)] == ["alpha", "beta"]


def test_code_that_changed_under_a_running_local_ray() -> None:
    old = replace(ALPHA, versions=replace(VERSIONS, code="6" * 64))
    with pytest.raises(
        UserError, match=r"its wgpu-lora .* has other code .*: end it with 'wgpu-lora cluster down --local'"
    ):
        surveyed(FakeCluster([old]), VERSIONS, local=True)


def test_a_host_that_has_died_since_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hosts = (("alpha.lab", ALPHA.address), ("gone.lab", "10.0.0.9"), ("beta.lab", "10.9.9.9"))
    tables = "".join(f'[[host]]\nhost = "{host}"\naddress = "{address}"\n' for host, address in hosts)
    (tmp_path / "lab.toml").write_text('name = "lab"\n' + tables)
    file = read_cluster_file(tmp_path / "lab.toml")
    assert missing_hosts([ALPHA, BETA], file) == ["gone.lab (10.0.0.9)"]  # beta is reached by another address here
    monkeypatch.setattr(run_driver, "own_versions", lambda: VERSIONS)
    run_driver._request(FakeCluster([ALPHA, BETA]), Target(None, file), [task()], RunOptions(), None)
    assert re.search(r"missing +gone.lab \(10.0.0.9\): .*cluster up -f \S*lab.toml' starts it", capsys.readouterr().out)


def test_a_cluster_without_devices() -> None:
    with pytest.raises(UserError, match=r"has no WebGPU device \(alpha and gamma\)"):
        surveyed(FakeCluster([node_facts("alpha"), node_facts("gamma")]), VERSIONS)
    with pytest.raises(UserError, match="no node that answers"):
        surveyed(FakeCluster([]), VERSIONS)


def test_data_that_only_this_machine_has(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("{}\n")
    cluster = FakeCluster([ALPHA, BETA], lacking={"beta": {str(data)}})
    with pytest.raises(UserError, match=r"rows.jsonl of a is on this machine, but beta cannot read it: .*--send-data"):
        requested(cluster, task(data=str(data)))
    assert not [call for call in cluster.calls if call[1] == "plan"]


def test_data_is_sent_if_asked_for(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("{}\n")
    cluster = FakeCluster([ALPHA, BETA], lacking={"beta": {str(data)}})
    request = requested(cluster, task(data=str(data)), send_data=True)
    assert request.tasks[0].options["data"].startswith("sent:")
    assert sorted(host for host, _ in cluster.sent) == ["alpha", "beta"]  # a task may move to any of them
    assert set(cluster.sent.values()) == {b"{}\n"}
    (parcel,) = request.parcels
    assert cluster.placed == [("alpha", parcel), ("beta", parcel)]


TOO_LONG = RunRequirements(refused="--max-length 4096 is more than the model's 512 positions: lower it.")
LARGE = RunRequirements(needed=8 << 30, work=1, steps=1)
MODEL = str(Path(__file__).parent)


@pytest.mark.parametrize(
    ("lacking", "plans", "tasks", "run", "message"),
    [
        (
            ("/no",),
            {},
            (task("a", data="/no"), task("b", data="/no")),
            {},
            "/no of a and 1 other cannot be used on alpha",
        ),
        ((MODEL,), {}, (task(model=MODEL),), {"send_data": True}, "of a is on this machine, but alpha and beta cannot"),
        (("/out/a",), {}, (task(),), {"shared": "/mnt"}, "The output directory /out/a is in use"),
        (("/mnt",), {}, (task(),), {"shared": "/mnt"}, "The shared folder /mnt is missing on alpha and beta: mount it"),
        ((), {"b": LARGE}, (task(), task("b")), {}, "'b' needs 8.* memory, but the nearest device, AMD on beta, has 2"),
        ((), {"a": TOO_LONG}, (task(),), {}, "a: --max-length 4096 is more than"),
        ((), {}, (task(),), {"data_parallel": 4}, "needs 4 devices"),
    ],
    ids=["data", "model", "output", "shared", "room", "refused", "devices"],
)
def test_what_is_refused(
    lacking: tuple[str, ...], plans: dict[str, RunRequirements], tasks: tuple[Task, ...], run: Any, message: str
) -> None:
    cluster = FakeCluster([ALPHA, BETA], plans=plans, lacking={"alpha": set(lacking), "beta": set(lacking)})
    with pytest.raises(UserError, match=message):
        requested(cluster, *tasks, **run)


def test_all_reasons_are_said_and_not_too_many() -> None:
    names = [f"t{number}" for number in range(50)]
    plans = {name: RunRequirements(refused=f"{name} has a fault: mend it.") for name in names}
    with pytest.raises(UserError) as refused:
        requested(FakeCluster([ALPHA], plans=plans), *map(task, names))
    assert refused.value.lines[0] == "The run is refused for 50 reasons: mend them all."
    assert len(refused.value.lines) == 1 + MOST_REASONS + 1
    assert refused.value.lines[-1] == "and 30 more"


def test_the_device_for_evaluations() -> None:
    cluster = FakeCluster([ALPHA, BETA])
    amd = BETA.devices[0]
    for name in ("amd", amd.key, amd.id):
        assert requested(cluster, eval_device=name).eval_device == amd.id
    with pytest.raises(UserError, match=r"--eval-device nvidia names 2 devices of the cluster: .*alpha:0 \(NVIDIA A\)"):
        requested(cluster, eval_device="nvidia")
    with pytest.raises(UserError, match="--eval-device Intel names no device of the cluster"):
        requested(cluster, eval_device="Intel")
    with pytest.raises(UserError, match="needs a second device"):
        requested(FakeCluster([BETA]), eval_device="amd")


def test_the_device_for_evaluations_trains_nothing() -> None:
    cluster = FakeCluster([ALPHA, BETA], plans={"a": RunRequirements(needed=3 << 29, work=1, steps=1)})
    assert requested(cluster).eval_device is None  # it fits on beta
    with pytest.raises(UserError, match="'a' needs"):
        requested(cluster, eval_device="amd")


def test_a_sweep_without_held_out_rows() -> None:
    with pytest.raises(UserError, match="needs held-out rows"):
        requested(FakeCluster([ALPHA]), sweep=SweepOptions())
    request = requested(FakeCluster([ALPHA]), sweep=SweepOptions(metric="loss"))
    assert request.sweep
    assert request.sweep.metric == "loss"
