"""Which cluster a person means, and what is wrong with it in a sentence."""

from __future__ import annotations

import json
import shlex
import socket
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.fake_cluster import FakeCluster, device_facts, node_facts, snapshot, task_view
from wgpu_lora.cluster.client import connect, local

from wgpu_lora.cluster.cluster_connection import (
    Bridge,
    ClusterGone,
    NotConnected,
    Target,
    connected,
    endpoint,
    explained,
    target,
)
from wgpu_lora.cluster.launcher import processes
from wgpu_lora.cluster.local_ray import Local
from wgpu_lora.cluster.run_status import chosen_device, chosen_run
from wgpu_lora.errors import UserError
from wgpu_lora.process_identity import boot_id


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No Ray of the user, and no address in the environment."""
    monkeypatch.setenv(local.DIRECTORY, str(tmp_path / "state"))
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
    assert target(None, None, True).here


def test_words_that_name_it_again(tmp_path: Path) -> None:
    file = tmp_path / "my cluster.toml"
    file.write_text('name = "lab"\naddress = "auto"\n')
    assert target(None, file, False).words() == f" -f '{file}'"
    assert Target(here=True).words() == " --local"
    assert Target("ray://a:1").words() == " --address ray://a:1"


def test_nothing_listens() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        why = rf"Nothing can be reached at ray://{address} \(connection refused\)"
        with pytest.raises(UserError, match=why), connected(Target(f"ray://{address}")):
            pass


def test_no_local_ray() -> None:
    with pytest.raises(UserError, match="Ray does not run on this machine"), connected(Target(here=True)):
        pass


def test_a_cluster_file_without_a_place(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text('name = "lab"\n')
    with pytest.raises(UserError, match="has neither an 'address' nor a"), connected(target(None, file, False)):
        pass


@pytest.mark.parametrize(
    ("said", "why"),
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
def test_what_ray_says_is_a_sentence(said: str, why: str) -> None:
    import re

    found = explained(said, "h:1")
    assert re.search(why, found)
    assert found.endswith(".")
    assert "\n" not in found


# -- the process that speaks with Ray ----------------------------------------------------------------------------------


def test_a_child_that_dies_is_a_cluster_that_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with Bridge() as bridge:
        with pytest.raises(NotConnected):
            bridge.connect("auto")
        with pytest.raises(ClusterGone, match="connection to the cluster is lost"):
            bridge.coordinator("snapshot", None)


CHILD = """
import os, sys, time
from wgpu_lora.cluster.client.bridge_child import receive, send
source, sink = os.fdopen(0, "rb"), os.fdopen(1, "wb")
while True:
    header, _ = receive(source)
    time.sleep(header.get("args", [0])[0])
    send(sink, {"value": header["number"], "number": header["number"]})
"""


def test_late_answers_are_not_taken_for_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(CHILD)}\n")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    with Bridge() as bridge:
        assert bridge.coordinator("first", 0) == 1
        get = bridge._answers.get

        def interrupted(timeout: float) -> None:
            raise KeyboardInterrupt

        bridge._answers = SimpleNamespace(get=interrupted, put=bridge._answers.put)  # type: ignore[assignment]
        with pytest.raises(KeyboardInterrupt):
            bridge.coordinator("second", 0)
        bridge._answers.get = get  # type: ignore[method-assign]
        assert bridge.coordinator("third", 0) == 3


def test_a_failed_client_server_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[str] = []

    def fails(self: Bridge, address: str) -> None:
        tried.append(address)
        if len(tried) < 2:
            raise NotConnected("ConnectionAbortedError: Starting Ray client server failed. See ray_client_server.err")

    monkeypatch.setattr(Bridge, "connect", fails)
    monkeypatch.setattr(connect, "_probe", lambda address: None)
    with connected(Target("ray://h:1")):
        assert tried == ["ray://h:1"] * 2


# -- what a killed Ray left --------------------------------------------------------------------------------------------


def recorded(state: Path, place: Path, **more: object) -> Path:
    state.mkdir()
    file = state / "local.json"
    file.write_text(json.dumps({**asdict(Local("127.0.0.1:1", str(place), boot_id())), **more}))
    return file


def test_what_a_killed_ray_left_is_removed(alone: Path, tmp_path: Path) -> None:
    place = tmp_path / "wgl-x"
    place.mkdir()
    (place / "token").write_text("t")
    file = recorded(alone, place)
    assert local.found() is None
    assert not file.exists()
    assert not place.exists()


def test_the_own_ray_has_its_own_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of another cluster")
    ray = Local("127.0.0.1:1", str(tmp_path / "wgl-x"), boot_id())
    found = processes.environment(ray.environment)
    assert "RAY_AUTH_TOKEN" not in found  # which goes before the path
    assert found["RAY_AUTH_TOKEN_PATH"] == str(tmp_path / "wgl-x/token")
    monkeypatch.setattr(connect.local, "found", lambda: ray)
    with endpoint(Target(here=True)) as end, Bridge(end.environment) as bridge:
        said = Path(f"/proc/{bridge._process.pid}/environ")
        assert not said.exists() or b"RAY_AUTH_TOKEN=" not in said.read_bytes()


@pytest.mark.parametrize("name", ["home", "wgl-x"])
def test_other_directories_are_left_alone(alone: Path, tmp_path: Path, name: str) -> None:
    (tmp_path / name).mkdir()  # without a token: not ours, whatever the record says
    recorded(alone, tmp_path / name)
    assert local.found() is None
    assert (tmp_path / name).is_dir()


@pytest.mark.parametrize("text", ["", "{", '{"address": 1}', "[]"])
def test_a_damaged_record_is_dropped(alone: Path, text: str) -> None:
    alone.mkdir()
    (alone / "local.json").write_text(text)
    assert local.found() is None
    assert local.end_local() is None


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
    node = node_facts("beta", device_facts("10.0.0.4"), device_facts("10.0.0.4", 1))
    seen = snapshot(nodes=(node,))
    assert chosen_device(seen, "beta:1").facts.index == 1
    assert chosen_device(seen, node.devices[0].id).facts.index == 0
    with pytest.raises(UserError, match=r"beta:7 names no device of the cluster: .* beta:0 and beta:1"):
        chosen_device(seen, "beta:7")
