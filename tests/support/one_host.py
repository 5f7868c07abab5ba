"""Nodes of `ray.cluster_utils.Cluster` on this machine, with the methods of `hosts.py` as far as they go.

Where namespaces are not allowed, tests of clusters run on them: nodes differ in their environment, directories and
devices, but share the network and /tmp, so that a partition cannot be made.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import pytest

from support.hosts import ROOT, drivers_here, environment


class NodeHost:
    """One of `OneHost`; see `hosts.Host`."""

    def __init__(self, hosts: OneHost, index: int, driver: Path | None) -> None:
        self.hosts, self.index, self.name = hosts, index, f"host{index + 1}"
        self.address = f"127.0.0.{index + 2}"  # devices and copies are named by it
        self.tmp = hosts.folder / self.name
        (self.tmp / "home").mkdir(parents=True)
        self.env = environment(hosts.token, driver, self.tmp)
        self._started: tuple[dict[str, float] | None, dict[str, str]] = (None, {})

    def start(self, argv: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
        env = {**self.env, **options.pop("env", {})}
        return subprocess.Popen([*map(str, argv)], env=env, cwd=options.pop("cwd", ROOT), **options)

    def run(self, argv: Sequence[str | Path], timeout: float = 120, check: bool = True, **options: Any) -> Any:
        with self.start(argv, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                        **options) as process:  # fmt: skip
            try:
                out, err = process.communicate(timeout=timeout)
            except BaseException:
                process.kill()
                raise
        assert not check or not process.returncode, f"{self.name}: {argv}: {process.returncode}\n{out}{err}"
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def python(self, *argv: str | Path, **options: Any) -> Any:
        return self.run([sys.executable, *argv], **options)

    def signal(self, process: subprocess.Popen[Any], number: int) -> None:
        process.send_signal(number)

    def processes(self) -> dict[int, str]:
        """Command lines by process id, of what has this host's environment."""
        found = {}
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get("TMPDIR") == str(self.tmp):
                    found[process.pid] = " ".join(process.cmdline())
        return found

    def start_node(self, resources: Mapping[str, float] | None = None, env: Mapping[str, str] | None = None) -> None:
        if resources is None:
            resources = json.loads(self.python("-m", "wgpu_lora", "cluster", "resources", env=env or {}).stdout)
        self._started = dict(resources), dict(env or {})
        env = {**self.env, **self._started[1]}
        self.hosts.ask({"add": self.index, "at": self.address, "resources": self._started[0], "env": env})

    def kill_node(self) -> None:
        self.hosts.ask({"remove": self.index})

    def restart_node(self) -> None:
        self.kill_node()
        self.start_node(*self._started)

    def partition(self) -> None:
        pytest.skip("the network of one host cannot be partitioned")

    def heal(self) -> None: ...


class OneHost:
    """Nodes on this machine; see `hosts.Hosts`. address: of the head, once it has started; client: there is none."""

    client: str | None = None

    def __init__(self, count: int, shared: Path | None = None, drivers: Sequence[Path | None] | None = None) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="one-host-"))
        self.shared = Path(shared) if shared else self.folder / "shared"
        self.shared.mkdir(exist_ok=True)
        self.token, self.address = secrets.token_hex(32), ""
        drivers = drivers or drivers_here()
        self._hosts = [NodeHost(self, index, drivers[index % len(drivers)]) for index in range(count)]
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> OneHost:
        env = {**self._hosts[0].env, "PYTHONPATH": os.pathsep.join([str(ROOT / "tests"), str(ROOT)]),
               "RAY_TMPDIR": str(self.folder / "ray")}  # fmt: skip
        (self.folder / "ray").mkdir()
        argv = [sys.executable, "-m", "support.one_host"]
        self._process = subprocess.Popen(argv, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                         start_new_session=True)  # fmt: skip
        return self

    def ask(self, what: dict[str, Any]) -> None:
        assert self._process
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:  # Ray prints lines of its own
            if line.startswith('{"address"'):
                self.address = json.loads(line)["address"]
                return
        raise AssertionError("the cluster has ended")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._process:
            assert self._process.stdin
            self._process.stdin.close()  # the nodes end with the process
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(self._process.pid, signal.SIGKILL)
                self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __getitem__(self, index: int) -> NodeHost:
        return self._hosts[index]

    def __len__(self) -> int:
        return len(self._hosts)

    def __iter__(self) -> Iterator[NodeHost]:
        return iter(self._hosts)

    def start_nodes(self, resources: Mapping[str, float] | None = None) -> None:
        for host in self:
            host.start_node(resources)


def main() -> None:
    """Adds and removes nodes as lines of JSON on standard input ask, until it ends."""
    from ray.cluster_utils import Cluster

    cluster, nodes = Cluster(), {}
    try:
        for line in sys.stdin:
            asked = json.loads(line)
            if "add" in asked:
                of_head = {} if nodes else {"include_dashboard": False}
                nodes[asked["add"]] = cluster.add_node(resources=asked["resources"], env_vars=asked["env"],
                                                       object_store_memory=100_000_000, node_ip_address=asked["at"],
                                                       **of_head)  # fmt: skip
            elif (node := nodes.pop(asked["remove"], None)) is not None:
                cluster.remove_node(node, allow_graceful=False)
            print(json.dumps({"address": cluster.address}), flush=True)
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
