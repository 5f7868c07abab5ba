"""Both ends of the launcher: Ray's provider and the tunnel here, processes on a host."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from support.fake_ssh import FakeSsh, cluster_file
from support.hosts import until

from wgpu_lora.cluster.launcher import node, processes
from wgpu_lora.cluster.launcher.tunnel import tunnel
from wgpu_lora.errors import UserError

ONE = 'host = "one"\naddress = "10.9.0.1"\nuser = "me"'
# A worker with a child that has an environment of its own; both would rather not end.
STUBBORN = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import signal; signal.signal(15, signal.SIG_IGN); signal.pause()"
child = subprocess.Popen([sys.executable, "-c", code], env={})
print(child.pid, flush=True)
signal.pause()
"""
LISTENING = """
import signal, socket
wild, own = socket.create_server(("0.0.0.0", 0)), socket.create_server(("127.0.0.1", 0))
print(wild.getsockname()[1], own.getsockname()[1], flush=True)
signal.pause()
"""


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSsh:
    return FakeSsh(tmp_path, monkeypatch)


# -- processes on a host -----------------------------------------------------------------------------------------------


def unique() -> str:
    """The name of a cluster that no other test has: processes of that name are ended."""
    return f"test-{secrets.token_hex(8)}"


def started(code: str, name: str) -> subprocess.Popen[str]:
    env = {**os.environ, processes.MARK: f"{name}/0123"}
    return subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)


def test_all_processes_of_a_cluster_are_ended_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "GRACE", 5.0)
    name = unique()
    ours, other = started(STUBBORN, name), started(STUBBORN, f"{name}-2")
    children = [psutil.Process(int(process.stdout.readline())) for process in (ours, other)]  # type: ignore[union-attr]
    try:
        assert {process.pid for process in processes.of_cluster(name).values()} == {ours.pid, children[0].pid}
        assert processes.end(name) == []
        assert ours.wait(5) == -signal.SIGKILL
        until(lambda: not processes._alive(children[0]), 5)
        assert other.poll() is None
        assert processes._alive(children[1])
    finally:
        for one in (ours, other, *children):
            one.kill()


def test_ports_that_processes_listen_on() -> None:
    name = unique()
    process = started(LISTENING, name)
    assert process.stdout is not None
    wild, own = map(int, process.stdout.readline().split())
    try:
        found = {one["port"]: one["address"] for one in processes.listening(name)}
        assert found == {wild: "*", own: "127.0.0.1"}
    finally:
        process.kill()
    assert processes.public(["10.0.0.1", "127.0.0.1", "::1", "fe80::1", "192.0.2.1", "8.8.8.8", "2600::1"]) == [
        "8.8.8.8", "2600::1"
    ]  # fmt: skip


def test_a_node_that_does_not_reach_the_head_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    folder = tmp_path / unique() / "two"
    folder.mkdir(parents=True)
    values = {"cluster": folder.parent.name, "id": "ab" * 8, "head": False, "host": "two", "head_address": "127.0.0.1",
              "ports": {"gcs": port}}  # fmt: skip
    (folder / "node.json").write_text(json.dumps(values))
    assert node.main(["start", str(folder)]) == 1
    assert f"cannot reach the head at 127.0.0.1:{port}" in json.loads(capsys.readouterr().out)["refused"]
    assert node.main(["stop", str(folder)]) == 0
    assert not folder.exists()


def test_temporary_files_are_not_put_where_others_could_reach_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.tempfile, "gettempdir", lambda: str(tmp_path))
    assert node._temporary("ab" * 8).stat().st_mode & 0o077 == 0
    next(tmp_path.glob("wgpu-lora-*")).chmod(0o777)
    with pytest.raises(UserError, match="not for this user alone"):
        node._temporary("ab" * 8)


# -- the tunnel --------------------------------------------------------------------------------------------------------

FORWARDS = f"""#!{sys.executable}
import os, socket, sys
from pathlib import Path
port = int(sys.argv[sys.argv.index("-L") + 1].split(":")[1])
Path(os.environ["FAKE_SSH"], "pid").write_text(str(os.getpid()))
server = socket.create_server(("127.0.0.1", port))
sys.stdin.read()
"""


def test_the_tunnel_lasts_as_long_as_its_context(fake: FakeSsh, tmp_path: Path) -> None:
    fake.program("ssh", FORWARDS)
    with tunnel(cluster_file(tmp_path, ONE)) as address:
        host, port = address.removeprefix("ray://").split(":")
        socket.create_connection((host, int(port)), 5).close()
        ssh = psutil.Process(int((fake.folder / "pid").read_text()))
    assert not processes._alive(ssh)


def test_the_tunnel_ends_with_a_process_that_is_killed(fake: FakeSsh, tmp_path: Path) -> None:
    fake.program("ssh", FORWARDS)
    code = (
        "import sys, time; from pathlib import Path; from wgpu_lora.cluster.launcher.tunnel import tunnel\n"
        "from wgpu_lora.cluster.cluster_file import read_cluster_file\n"
        "with tunnel(read_cluster_file(Path(sys.argv[1]))) as address: print(address, flush=True); time.sleep(600)"
    )
    spec = cluster_file(tmp_path, ONE)
    process = subprocess.Popen([sys.executable, "-c", code, spec.path], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("ray://127.0.0.1:")
    ssh = psutil.Process(int((fake.folder / "pid").read_text()))
    process.kill()
    process.wait()
    until(lambda: not processes._alive(ssh), 10)


def test_a_head_that_cannot_be_reached(fake: FakeSsh, tmp_path: Path) -> None:
    fake.answers("one", err="ssh: connect to host one port 22: No route to host", code=255)
    with pytest.raises(UserError, match="one cannot be reached"), tunnel(cluster_file(tmp_path, ONE)):
        pass


# -- Ray's side of `ray up` --------------------------------------------------------------------------------------------


def test_what_ray_asks_of_a_host(fake: FakeSsh, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from wgpu_lora.cluster.launcher.provider import OF_RAYS_AUTOSCALER, HostProvider

    (tmp_path / "a key").touch(0o600)
    host = {"host": "one", "user": "me", "ssh_key": str(tmp_path / "a key"), "python": "python3"}
    provider = HostProvider({"host": host, "state": str(tmp_path / "one.state"), "folder": "~/lab/one"}, "lab.one")
    assert provider.non_terminated_nodes({}) == []
    provider.create_node({}, {"kind": "head"}, 1)
    provider.set_node_tags("one", {"status": "new"})
    assert provider.non_terminated_nodes({"kind": "head"}) == provider.nodes_for_teardown({}) == ["one"]
    assert provider.non_terminated_nodes({"kind": "worker"}) == []
    assert provider.node_tags("one") == {"kind": "head", "status": "new"}

    runner = provider.get_command_runner("", "one", {}, "lab.one", subprocess, False)
    fake.answers("one", "up 3 days")
    assert runner.run("uptime", with_output=True, environment_variables={"A": "x'; rm"}) == "up 3 days\n"
    asked = fake.arguments
    assert asked[-1] == """export A='x'"'"'; rm'; uptime"""
    assert asked[asked.index("-l") + 1] == "me"
    assert {"StrictHostKeyChecking=yes", "BatchMode=yes"} <= set(asked)
    assert not any("UserKnownHostsFile" in word for word in asked)
    runner.run("ray stop")  # it would end every Ray of that user
    runner.run_rsync_up("/tmp/x", OF_RAYS_AUTOSCALER)
    assert fake.arguments == asked
    runner.run_rsync_up("/tmp/x/", "~/y/")
    sent = fake.arguments[len(asked) :]
    assert sent[-2:] == ["/tmp/x/", "one:~/y/"]
    assert f'"{tmp_path / "a key"}"' in sent[sent.index("--rsh") + 1]
    fake.answers("one", {"refused": "one: this cannot be ended: x."}, code=1)
    with pytest.raises(subprocess.CalledProcessError):
        runner.run("false")
    with pytest.raises(UserError, match="this cannot be ended: x"):
        provider.terminate_node("one")
    assert '{"refused": "one: this cannot be ended: x."}' in capsys.readouterr().out
    assert provider.is_running("one")
    fake.answers("one", '{"ended": true}')
    provider.terminate_node("one")
    assert provider.is_terminated("one")
    assert fake.arguments[-1].endswith("launcher.node stop ~/lab/one")
