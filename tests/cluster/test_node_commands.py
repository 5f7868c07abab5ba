"""What the launcher runs on a host: processes that are found and ended, and refusals."""

from __future__ import annotations

import io
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
from support.cluster.hosts import until

from wgpu_lora.cluster.launch import node_commands, node_processes

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


def unique() -> str:
    """The name of a cluster that no other test has: processes of that name are ended."""
    return f"test-{secrets.token_hex(8)}"


def started(code: str, name: str) -> subprocess.Popen[str]:
    env = {**os.environ, node_processes.MARK: f"{name}/0123"}
    return subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE, text=True)


def test_all_processes_of_a_cluster_are_ended_and_no_others() -> None:
    name = unique()
    ours, other = started(STUBBORN, name), started(STUBBORN, f"{name}-2")
    children = [psutil.Process(int(process.stdout.readline())) for process in (ours, other)]  # type: ignore[union-attr]
    try:
        assert {process.pid for process in node_processes.of_cluster(name).values()} == {ours.pid, children[0].pid}
        assert node_processes.end(name) == []
        assert ours.wait(5) == -signal.SIGKILL
        until(lambda: not node_processes._alive(children[0]), 5)
        assert other.poll() is None
        assert node_processes._alive(children[1])
    finally:
        for child in (ours, other, *children):
            child.kill()


def test_ports_that_processes_listen_on() -> None:
    name = unique()
    process = started(LISTENING, name)
    assert process.stdout is not None
    wild, own = map(int, process.stdout.readline().split())
    try:
        addresses = {listener["port"]: listener["address"] for listener in node_processes.listening(name)}
        assert addresses == {wild: "*", own: "127.0.0.1"}
    finally:
        process.kill()
    assert node_processes.public(["10.0.0.1", "127.0.0.1", "::1", "fe80::1", "192.0.2.1", "8.8.8.8", "2600::1"]) == [
        "8.8.8.8", "2600::1"
    ]  # fmt: skip


def test_refusals_of_a_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, top = tmp_path / "node", tmp_path / f"wgpu-lora-{os.getuid()}"
    monkeypatch.setattr(node_commands.tempfile, "gettempdir", lambda: str(tmp_path))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    values = {"cluster": unique(), "host": "two", "folder": str(folder), "head": ["127.0.0.1", port]}

    def answer(command: str, code: int, **more: object) -> dict[str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps({**values, **more})))
        assert node_commands.main(command) == code
        reply: dict[str, str] = json.loads(capsys.readouterr().out)
        return reply

    assert f"cannot reach the head at 127.0.0.1:{port}" in answer("start", 1)["refused"]
    top.mkdir(mode=0o777)
    top.chmod(0o777)
    assert "is not for this user alone" in answer("start", 1, head=None)["refused"]  # others could reach it
    top.rmdir()
    folder.mkdir()
    answer("stop", 0)
    assert not folder.exists()
    assert [path.stat().st_mode & 0o777 for path in (top,)] == [0o700]
    assert not list(top.iterdir())
