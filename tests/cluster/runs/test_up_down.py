"""`cluster up` and `down` over SSH, on hosts that are namespaces."""

from __future__ import annotations

import json
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cli import QWEN2, ROWS, SMALL, flags, write_rows
from support.cluster.hosts import Host, Hosts, until
from support.cluster.sshd import make_client, ssh_installed, start_sshd

pytestmark = [
    pytest.mark.skipif(not ssh_installed(), reason="scripts/install_cluster.sh has not been run"),
]
NAME = f"lab-{secrets.token_hex(4)}"  # the hosts' processes are seen from outside
STATUS = """
import json, ray, sys
ray.init(address=sys.argv[1], namespace="test", logging_level="ERROR", log_to_driver=False)
alive = [node for node in ray.nodes() if node["Alive"]]
print(json.dumps([[node["NodeManagerAddress"], node["Labels"].get("rack"), node["Resources"]] for node in alive]))
"""
THROUGH_TUNNEL = """
import os, subprocess, sys
from pathlib import Path
from wgpu_lora.cluster.cluster_file import read_cluster_file
from wgpu_lora.cluster.launch.ssh import tunnel
with tunnel(read_cluster_file(Path(sys.argv[1]))) as (address, token):
    env = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    subprocess.run([sys.executable, "-c", sys.argv[2], address], env=env, check=True)
"""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    """The person's machine, and two hosts with SSH servers."""
    with Hosts(3, shared=tmp_path) as machines:
        for server in machines[1], machines[2]:
            start_sshd(machines, server)
        yield machines


def wgpu_lora(host: Host, *words: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    without = {"RAY_AUTH_MODE": "", "RAY_AUTH_TOKEN": ""}
    return host.python("-m", "wgpu_lora", "cluster", *words, env=without, **options)


def running(host: Host, title: str) -> list[str]:
    """Processes of a host whose command lines begin with a title."""
    return [line for line in host.processes().values() if line.startswith(title)]


def test_up_status_down(hosts: Hosts, tmp_path: Path) -> None:
    here, head, worker = hosts
    before = [set(host.processes().values()) for host in (head, worker)]
    file = tmp_path / "cluster.toml"
    top = f'name = "{NAME}"\npython = "{sys.executable}"\nuser = "root"\nssh_key = "{make_client(hosts, here)}"\n'
    table = '[[host]]\nhost = "{}"\nlabels = {{ rack = "{}" }}\n'
    file.write_text(top + table.format(head.name, "one") + table.format(worker.name, "two"))

    output = wgpu_lora(here, "up", "-f", file).stdout
    assert "$ ray start --head" in output
    assert "on all interfaces: 6379 gcs_server" in output
    assert "is up: 2 hosts" in output
    assert "Warning" not in output  # 10.77.0.0/24 is not the Internet's
    again = wgpu_lora(here, "up", "-f", file).stdout
    assert again.count("runs already") == 2
    assert "$ ray start" not in again

    nodes = json.loads(here.python("-c", THROUGH_TUNNEL, file, STATUS).stdout.splitlines()[-1])
    assert {(address, rack) for address, rack, _ in nodes} == {(head.address, "one"), (worker.address, "two")}
    assert all(any(name.startswith("webgpu:") for name in resources) for _, _, resources in nodes)
    key = (tmp_path / "a key's folder" / "client").read_text()
    for host in (head, worker):
        files = [path for path in (host.tmp / "home").rglob("*") if path.is_file()]
        assert not [path for path in files if key in path.read_text(errors="replace")], "the key stays here"
        token = next(path for path in files if path.name == "token")
        assert token.stat().st_mode & 0o077 == 0
    assert not [line for host in (head, worker) for line in host.processes().values() if token.read_text() in line]

    write_rows(tmp_path / "rows.jsonl", ROWS)
    options = {**SMALL, "model": QWEN2, "data": tmp_path / "rows.jsonl", "output": tmp_path / "out", "max_steps": 10**6}
    run = here.start([sys.executable, "-m", "wgpu_lora", "cluster", "run", "-f", file, *flags(**options)])
    until(lambda: running(head, "ray::RunController"))
    assert running(here, "ssh ")
    here.signal(run, signal.SIGKILL)
    until(lambda: not running(here, "ssh "), 60)  # the tunnel ends with its process
    assert running(head, "ray::RunController")  # until the cluster is down

    worker.run(["pkill", "-KILL", "raylet"])  # in its own process namespace
    assert "started" in wgpu_lora(here, "up", "-f", file).stdout
    stranger = head.start(["sleep", "1000"], env={"RAY_ADDRESS": "x"})
    wgpu_lora(here, "down", "-f", file)
    assert stranger.poll() is None

    def new_processes() -> list[set[str]]:
        return [
            set(host.processes().values()) - commands_before
            for host, commands_before in zip((head, worker), before, strict=True)
        ]

    until(lambda: not any("sshd" in line for some in new_processes() for line in some), 60)  # ended connections
    assert new_processes() == [{"sleep 1000"}, set()]
    assert not list((head.tmp / "home").rglob("token")) + list((here.tmp / "home").rglob("token"))


def test_hosts_that_cannot_be_used_are_named_before_anything_runs(hosts: Hosts, tmp_path: Path) -> None:
    here, head, worker = hosts
    key, open_key = make_client(hosts, here), tmp_path / "open key"
    open_key.write_text(key.read_text())
    open_key.chmod(0o644)
    file = tmp_path / "cluster.toml"
    file.write_text(
        f'name = "{NAME}"\nuser = "root"\nssh_key = "{key}"\n'
        f'[[host]]\nhost = "{head.name}"\npython = "/no/such/python"\n'
        f'[[host]]\nhost = "{worker.name}"\naddress = "10.77.0.8"\nssh_key = "{open_key}"\n'
        f'[[host]]\nhost = "{worker.address}"\naddress = "10.77.0.9"\n'  # its key is known by the name only
        f'[[host]]\nhost = "{here.name}"\n'
    )
    refused = wgpu_lora(here, "up", "-f", file, check=False)
    assert refused.returncode == 2
    lines = refused.stderr.splitlines()
    messages = ("4 hosts cannot", "/no/such/python", "chmod 600", "key that is not known", "Connection refused")
    for line, words in zip(lines, messages, strict=True):
        assert words in line
    assert not [line for line in head.processes().values() if "ray" in line]
