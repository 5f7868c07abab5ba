"""Hosts for tests of clusters: processes that see a network, a /tmp, a home and a Vulkan driver of their own.

They are Linux namespaces, all inside one process namespace that dies with the test's process: nothing is left behind,
also after SIGKILL. The hosts reach each other and nobody else; what a test does on the cluster, it runs on one of them.
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
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

import pytest

from support.cluster.namespaces import (
    HOST,
    SWITCH,
    children,
    descendant,
    dies_with_us,
    namespaces_allowed,
    nsenter,
    settled,
    unshare,
)
from wgpu_lora.cluster.launch import node_processes as processes

__all__ = ["Host", "Hosts", "drivers_here", "environment", "namespaces_allowed", "until"]

ROOT = Path(__file__).resolve().parents[3]
PORT = 6379  # of the head
LAVAPIPE = next(iter(sorted(Path("/usr/share/vulkan/icd.d").glob("lvp_icd*.json"))), None)
SWIFTSHADER = ROOT / ".drivers" / "swiftshader.json"
WAIT = 900.0  # seconds until a wait is taken for a hang: commands may take minutes on a busy machine
QUICK = {  # a lost node is noticed after about 6 s instead of 30 s
    "RAY_health_check_initial_delay_ms": "2000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "4",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
}
QUIET = {**processes.SETTINGS, "RAY_COLOR_PREFIX": "0"}
# Measured speeds and compiled shaders stay from test to test: else these would take most of the time.
KEPT = Path.home() / ".cache" / "wgpu-lora-tests"


def until(true: Callable[[], Any], seconds: float = WAIT, every: float = 0.2) -> Any:
    """The first value that is true.

    Raises:
        TimeoutError: none was, for so long.
    """
    end = time.monotonic() + seconds
    while not (value := true()):
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds} s: {getattr(true, '__name__', true)}")
        time.sleep(every)
    return value


class Host:
    """One of `Hosts`. name: `host1`, ...; address: IPv4; env: what its commands find in their environment."""

    def __init__(self, hosts: Hosts, index: int, driver: Path | None) -> None:
        self.hosts, self.index = hosts, index
        self.name, self.address = f"host{index + 1}", f"10.77.0.{index + 1}"
        self.env = environment(hosts.token, driver, Path("/tmp"))
        entered = nsenter(hosts.switch) if hosts.switch else []
        places = [hosts.shared, hosts.names, ROOT, sys.prefix]
        shell = [*entered, *unshare(), "sh", "-c", HOST, "host", self.name, *map(str, places)]
        self._outer = subprocess.Popen(shell, preexec_fn=dies_with_us)
        # Outermost first: nsenter, its child unshare, and the host's first process.
        self._pid = until(lambda: settled(descendant(self._outer.pid, 2)))
        hosts.on_switch("ip", "link", "add", f"port{index}", "type", "veth", "peer", "name", "eth0", "netns",
                        str(hosts.pid_in_switch(self._pid)))  # fmt: skip
        hosts.on_switch("ip", "link", "set", f"port{index}", "master", "switch", "up")
        for words in (
            "link set eth0 up",
            f"address add {self.address}/24 dev eth0",
            "route add default via 10.77.0.254",
        ):
            self.run(["ip", *words.split()])

    def start(self, argv: Sequence[str | Path], **options: Any) -> subprocess.Popen[Any]:
        """Starts a command on this host; `signal` sends it signals. options: of Popen; `env` adds to `self.env`."""
        env = {**self.env, **options.pop("env", {})}
        where = [f"--wdns={options.pop('cwd', ROOT)}"]
        return subprocess.Popen([*nsenter(self._pid), *where, *map(str, argv)], env=env, **options)

    def run(self, argv: Sequence[str | Path], timeout: float = WAIT, check: bool = True, **options: Any) -> Any:
        """Runs a command on this host to its end, which is a CompletedProcess with text output.

        Raises:
            AssertionError: it failed, unless check is False.
        """
        process = self.start(argv, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                             **options)  # fmt: skip
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.signal(process, signal.SIGKILL)
            out, err = process.communicate()
            raise AssertionError(f"{self.name}: {list(map(str, argv))}: not within {timeout} s:\n{out}{err}") from None
        if check and process.returncode:
            raise AssertionError(f"{self.name}: {list(map(str, argv))}: exit code {process.returncode}\n{out}{err}")
        return subprocess.CompletedProcess(argv, process.returncode, out, err)

    def python(self, *argv: str | Path, **options: Any) -> Any:
        """`run` of this interpreter, such as `python("-m", "wgpu_lora", "info")`."""
        return self.run([sys.executable, *argv], **options)

    def signal(self, process: subprocess.Popen[Any], number: int) -> None:
        """Sends a signal to a command that `start` started; nsenter itself would not pass it on."""
        for pid in children(process.pid):
            os.kill(pid, number)

    def processes(self) -> dict[int, str]:
        """Command lines by process id, as seen from outside, without the host's first process."""
        inside = os.readlink(f"/proc/{self._pid}/ns/pid")
        lines = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if int(path.name) != self._pid and os.readlink(path / "ns/pid") == inside:
                    lines[int(path.name)] = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
            except OSError:  # it has ended
                continue
        return {pid: line for pid, line in lines.items() if line}

    # -- Ray ----------------------------------------------------------------------------------------------------------

    def start_node(self) -> None:
        """Starts a Ray node: the first host's is the head. It returns when the node has started."""
        head = ["--head", "--port", str(PORT), "--include-dashboard=false", "--no-monitor"]
        joins = ["--address", self.hosts.address]
        self.python("-m", "ray.scripts.scripts", "start", *(joins if self.index else head), "--node-ip-address",
                    self.address, "--num-cpus", "1", "--object-store-memory", "100000000", "--temp-dir", "/tmp/ray",
                    "--resources", json.dumps(self.hosts.resources(self)), "--disable-usage-stats",
                    "--include-log-monitor=false")  # fmt: skip

    def kill_node(self) -> None:
        """SIGKILL for every process of this host, as if its power went off. Its files stay."""
        self.run(["sh", "-c", "kill -KILL -1"], check=False)
        until(lambda: not self.processes(), every=0.05)

    def restart_node(self) -> None:
        """Kills what is left of the node and starts it as it was started before; it is a new node to Ray."""
        self.kill_node()
        self.start_node()

    def partition(self) -> None:
        """Cuts this host off from all others; its own processes still reach each other."""
        self.hosts.on_switch("ip", "link", "set", f"port{self.index}", "down")

    def heal(self) -> None:
        self.hosts.on_switch("ip", "link", "set", f"port{self.index}", "up")

    @property
    def tmp(self) -> Path:
        """This host's /tmp, as the test sees it: for files that only this host has."""
        return Path(f"/proc/{self._pid}/root/tmp")


class Hosts:
    """Hosts on one network: `with Hosts(3, shared=tmp_path) as hosts: hosts[0].start_node()`.

    Attributes:
        shared: a directory that all hosts and the test have at the same path.
        token: of Ray's authentication, which all hosts' commands have in their environment.
        address: of Ray's head, `host:port`.

    Args:
        count: of hosts. drivers: the hosts' Vulkan drivers (paths of ICD files) in turn; by default lavapipe and
            SwiftShader, as far as they are installed.
        shared: by default a temporary directory.
    """

    def __init__(self, count: int, shared: Path | None = None, drivers: Sequence[Path | None] | None = None) -> None:
        self.shared = Path(shared or tempfile.mkdtemp(prefix="wgpu-lora-hosts-")).resolve()
        self._temporary = shared is None
        self.drivers = drivers or drivers_here()
        self.count, self.token = count, secrets.token_hex(32)
        self.address = f"10.77.0.1:{PORT}"
        self.names = self.shared / ".hosts"
        self.switch: int | None = None
        self.observer: subprocess.Popen[Any] | None = None  # of `cluster_runs.status`
        self._outer: subprocess.Popen[Any] | None = None
        self._hosts: list[Host] = []
        self._resources: dict[str, dict[str, float]] = {}

    def __enter__(self) -> Hosts:
        """Skips the test where namespaces cannot be made."""
        if not namespaces_allowed():
            pytest.skip("namespaces cannot be made here")
        lines = [f"10.77.0.{i + 1} host{i + 1}" for i in range(self.count)]
        self.names.write_text("\n".join(["127.0.0.1 localhost", *lines, ""]))
        try:
            self._outer = subprocess.Popen([*unshare(), "sh", "-c", SWITCH], preexec_fn=dies_with_us)
            outer = self._outer.pid
            self.switch = until(lambda: settled(descendant(outer, 1)))
            for index in range(self.count):
                self._hosts.append(Host(self, index, self.drivers[index % len(self.drivers)]))
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._outer:
            self._outer.kill()  # takes the switch's process namespace along, and so everything in it
            self._outer.wait()
            until(lambda: not self.switch or not Path(f"/proc/{self.switch}").exists(), every=0.05)
        self.names.unlink(missing_ok=True)
        if self._temporary:
            shutil.rmtree(self.shared, ignore_errors=True)

    def __getitem__(self, index: int) -> Host:
        return self._hosts[index]

    def __len__(self) -> int:
        return len(self._hosts)

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def start_nodes(self) -> None:
        """Starts Ray on all hosts, the head first; what still runs of it is killed before."""
        for host in self:
            host.kill_node()
        head, *workers = self
        head.start_node()
        with ThreadPoolExecutor() as pool:
            list(pool.map(Host.start_node, workers))

    def resources(self, host: Host) -> dict[str, float]:
        """What `wgpu-lora cluster resources` prints on a host, asked once for hosts with the same driver."""
        driver = host.env.get("VK_DRIVER_FILES", "")
        if driver not in self._resources:
            self._resources[driver] = json.loads(host.python("-m", "wgpu_lora", "cluster", "resources").stdout)
        return self._resources[driver]

    def on_switch(self, *argv: str) -> None:
        assert self.switch is not None
        subprocess.run([*nsenter(self.switch), *argv], check=True)

    def pid_in_switch(self, pid: int) -> int:
        """The number that a host's first process has in the namespace of the switch."""
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-2])
        raise AssertionError(f"/proc/{pid}/status names no NSpid")


def drivers_here() -> list[Path | None]:
    """Software Vulkan drivers installed here, unlike ones next to each other; [None] is whatever is the default."""
    return [path for path in (LAVAPIPE, SWIFTSHADER) if path is not None and path.exists()] or [None]


def environment(token: str, driver: Path | None, tmp: Path) -> dict[str, str]:
    """Of the commands on a host whose temporary directory is `tmp`."""
    environ = {
        name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "PYTEST", "WGPU_LORA_"))
    }
    python = str(Path(sys.executable).parent)
    variables = {
        "HOME": str(tmp / "home"),
        "TMPDIR": str(tmp),
        "PATH": os.pathsep.join([python, environ.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [environ.get("PYTHONPATH")])]),
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        **{f"WGPU_LORA_{name.upper()}_DIR": str(tmp / name) for name in ("cluster", "share", "data")},
        "WGPU_LORA_CACHE_DIR": str(KEPT / "cache"),
        "WGPU_LORA_NO_RUN_LOG": "1",
        "WGPU_LORA_NO_TUNE": "1",
        "WGPU_LORA_NO_CHECK": "1",
    }
    drivers = {} if driver is None else {"VK_DRIVER_FILES": str(driver)}
    return {**environ, **QUIET, **QUICK, **variables, **drivers}
