"""Which cluster a person means, and what is wrong with it in a sentence."""

from __future__ import annotations

import os
import re
import socket
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest
import ray
from support.cluster.fake_cluster import FakeCluster, device_facts, snapshot, task_view

from wgpu_lora.cluster import cluster_connection
from wgpu_lora.cluster.actors import host_actor
from wgpu_lora.cluster.cluster_connection import (
    Cluster,
    ClusterGone,
    Target,
    connected,
    explain,
    target,
)
from wgpu_lora.cluster.controller import run_controller
from wgpu_lora.cluster.launch import local_ray, node_processes
from wgpu_lora.cluster.launch.local_ray import LocalRay
from wgpu_lora.cluster.run_status import chosen_device, chosen_run
from wgpu_lora.errors import UserError


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No Ray of the user, and no address in the environment."""
    monkeypatch.setenv(local_ray.DIRECTORY, str(tmp_path / "state"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return tmp_path / "state"


def test_a_cluster_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="--address and --local name different clusters"):
        target("auto", None, True)
    with pytest.raises(UserError, match="No cluster is named"):
        target(None, None, False)
    with pytest.raises(UserError, match="--address must be auto, HOST:PORT"):
        target("http://x", None, False)
    monkeypatch.setenv("RAY_ADDRESS", "ray://head:10001")
    assert target(None, None, False).address == "ray://head:10001"
    assert target(None, None, True).local


def test_words_that_name_it_again(tmp_path: Path) -> None:
    file = tmp_path / "my cluster.toml"
    file.write_text('name = "lab"\naddress = "auto"\n')
    assert target(None, file, False).words() == f" -f '{file}'"
    assert Target(local=True).words() == " --local"
    assert Target("ray://a:1").words() == " --address ray://a:1"


def test_nothing_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        why = rf"Nothing can be reached at ray://{address} \(connection refused\)"
        with pytest.raises(UserError, match=why), connected(Target(f"ray://{address}")):
            pass


def test_no_local_ray() -> None:
    with pytest.raises(UserError, match="Ray does not run on this machine"), connected(Target(local=True)):
        pass


def test_a_cluster_file_without_a_place(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('name = "lab"\n')
    with pytest.raises(UserError, match="has neither an 'address' nor a"), connected(target(None, file, False)):
        pass


@pytest.mark.parametrize(
    ("message", "why"),
    [
        ("[2026-11-23 07:17:37,223 W 1 1] gcs_client.cc:210: RpcError: InvalidAuthToken: missing", "refuses the token"),
        ("RuntimeError: Version mismatch: The cluster was started with: Ray: 2.50.0", r"another version .*Ray: 2\.50"),
        ("ConnectionError: Could not find any running Ray instance.", "No Ray runs on this machine"),
        ("ConnectionError: ray client connection timeout", "not as a Ray client server"),
        ("Can't find a `node_ip_address.json` file", "no node of the cluster at h:1: give ray://h:10001"),
        ("one\n[2026-11-23 07:17:37,223 W 1 1] x.cc:1: it broke.", r"cannot be joined \(it broke\): check"),
    ],
    ids=["token", "version", "none", "client", "no-node", "other"],
)
def test_what_ray_says_is_a_sentence(message: str, why: str) -> None:
    text = explain(message, "h:1")
    assert re.search(why, text)
    assert text.endswith(".")
    assert "\n" not in text


# -- calls of actors ---------------------------------------------------------------------------------------------------


class RemoteError(ray.exceptions.RayTaskError):
    """As Ray raises what an actor's method has raised."""

    def __init__(self, cause: Exception):
        self.cause, self.traceback_str = cause, repr(cause)


@pytest.mark.parametrize(
    ("raised", "error", "message"),
    [
        (RemoteError(UserError("No run 'x' is known: look.")), UserError, "No run 'x' is known"),
        (RemoteError(ConnectionError("the host is away")), ConnectionError, "the host is away"),
        (RemoteError(KeyError("fault")), RemoteError, "fault"),
        (ray.exceptions.GetTimeoutError("late"), ClusterGone, r"does not answer \(late\): see whether"),
        (ray.exceptions.ActorDiedError(), ClusterGone, "does not answer"),
        (RuntimeError("one\n[2026-11-23 07:17:37,223 W 1 1] x.cc:1: closed."), ClusterGone, r"\(closed\)"),
    ],
)
def test_what_a_call_raises(monkeypatch: pytest.MonkeyPatch, raised: Exception, error: type, message: str) -> None:
    def get(reference: object, timeout: float) -> None:
        assert timeout == 3
        raise raised

    monkeypatch.setattr(ray, "get", get)
    monkeypatch.setattr(run_controller, "run_controller", lambda: Mock())
    monkeypatch.setattr(host_actor, "host_actor", lambda node: Mock())
    cluster = Cluster.__new__(Cluster)
    for call in (partial(cluster.controller, "results", "x"), partial(cluster.host, "node", "pid")):
        with pytest.raises(error, match=message) as caught:
            call(seconds=3)
        assert type(caught.value) is error


def test_a_store_of_a_host_or_of_the_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, calls = Cluster.__new__(Cluster), []
    monkeypatch.setattr(cluster, "host", lambda *arguments: calls.append(arguments) or [])
    cluster.store("node").listed("r/a")
    cluster.store("node", "s3://bucket")._call("piece", "r/a", "d", 0)
    assert calls == [("node", "listed", "r/a"), ("node", "piece", "r/a", "d", 0, "s3://bucket")]


def test_a_connection_that_ray_refuses_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def init(**options: object) -> None:
        raise ConnectionError("ray client connection timeout")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(UserError, match="h:1 answers, but not as a Ray client server"):
        Cluster("h:1")


# -- what a killed Ray left --------------------------------------------------------------------------------------------


def test_the_own_ray_has_its_own_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of another cluster")
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    local = LocalRay(tmp_path / "wgl-x")
    (local.directory / "ray").mkdir(parents=True)
    (local.directory / "ray/ray_current_cluster").write_text("127.0.0.1:1\n")
    assert "RAY_AUTH_TOKEN" not in node_processes.environment(local.environment)  # which goes before the path
    joined = Mock(side_effect=lambda address: Mock(environment=dict(os.environ)))
    monkeypatch.setattr(local_ray, "running_ray", lambda: local)
    monkeypatch.setattr(cluster_connection, "_probe", lambda address: None)
    monkeypatch.setattr(cluster_connection, "Cluster", joined)
    with connected(Target(local=True)) as cluster:
        assert "RAY_AUTH_TOKEN" not in cluster.environment
        assert cluster.environment["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / "wgl-x/token")
    joined.assert_called_once_with("127.0.0.1:1")
    cluster.close.assert_called_once_with()
    assert os.environ["RAY_AUTH_TOKEN"] == "of another cluster"
    assert "RAY_AUTH_TOKEN_PATH" not in os.environ


@pytest.mark.parametrize("name", ["home", "wgl-x"])
def test_other_directories_are_left_alone(alone: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()  # without a token: not ours, whatever the record says
    for text in (tmp_path / name, "", "\0", "." * 9999):
        alone.mkdir(exist_ok=True)
        (alone / local_ray.RECORD).write_text(f"{text}")
        assert local_ray.running_ray() is None
        assert local_ray.end_local() is None
        assert not (alone / local_ray.RECORD).exists()
    assert (tmp_path / name).is_dir()


# -- runs and devices by name ------------------------------------------------------------------------------------------


def test_the_run_that_is_meant() -> None:
    ended = snapshot(task_view("a", "finished", fetched=True), over=True)
    going = snapshot(task_view("a"))
    assert chosen_run(FakeCluster(snapshots=[going]), None).name == "r"
    assert chosen_run(FakeCluster(snapshots=[ended]), "r").name == "r"
    with pytest.raises(UserError, match="No run goes on"):
        chosen_run(FakeCluster(snapshots=[ended]), None)
    with pytest.raises(UserError, match="knows no run 's': its runs are r"):
        chosen_run(FakeCluster(snapshots=[going]), "s")


def test_the_device_that_is_meant() -> None:
    facts = [device_facts("10.0.0.4"), device_facts("10.0.0.4", 1)]
    devices = [("beta:0", facts[0]), ("beta:1", facts[1])]
    assert chosen_device(devices, "beta:1") is facts[1]
    assert chosen_device(devices, facts[0].id) is facts[0]
    with pytest.raises(UserError, match=r"^beta:7 names no device of the cluster: .* beta:0 \(llvmpipe\) and beta:1"):
        chosen_device(devices, "beta:7")
    with pytest.raises(UserError, match=r"^--eval-device pipe names 2 devices"):
        chosen_device(devices, "pipe", "--eval-device")
