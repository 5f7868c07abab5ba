"""`cluster up` and `cluster down`: Ray's launcher for each host, and what is checked before and after."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

from wgpu_lora.cluster.cluster_file import ClusterFile, HostSpec
from wgpu_lora.cluster.launcher.checks import Checked, answered, ask, check_here, check_hosts, for_all
from wgpu_lora.cluster.launcher.config import address_of, ports_of, write_host
from wgpu_lora.cluster.launcher.files import folder_of, forget, on_host
from wgpu_lora.cluster.launcher.ssh import last_line, shown
from wgpu_lora.cluster.launcher.token import new_token, token_of
from wgpu_lora.errors import UserError, reason
from wgpu_lora.text import count_noun, join_words

UP_SECONDS, DOWN_SECONDS, PORTS_SECONDS = 400.0, 180.0, 60.0
RAY = [sys.executable, "-P", "-m", "ray.scripts.scripts"]


class Say(Protocol):
    """How a line is shown: a label and a text; `whole`: it is a command, which is not wrapped."""

    def __call__(self, label: str, text: str, whole: bool = False) -> None: ...


def up(spec: ClusterFile, say: Say) -> None:
    """Start Ray on all hosts of a cluster where it does not run yet, the head first.

    Raises:
        UserError: a host cannot be used, in which case nothing is started; or Ray does not start on it.
    """
    check_here(spec)
    checked = check_hosts(spec)
    head = checked[0]
    token = token_of(spec) if head.running else new_token()
    start = head.running or secrets.token_hex(8)
    strangers = [one.host.host for one in checked if one.running not in (None, start)]
    if strangers:  # their head has gone, and they would never find the new one
        raise UserError(
            f"{join_words(strangers)} still {'runs' if len(strangers) == 1 else 'run'} what an earlier start of "
            f"{spec.name} left: run 'wgpu-lora cluster down -f {spec.path}' first."
        )
    missing = [one.host for one in checked if not one.running]
    for one in checked:
        if one.running:
            say(one.host.host, "runs already")
    folder = folder_of(spec.name)
    try:
        configs = {host.host: write_host(spec, host, folder, start, token) for host in missing}
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({reason(error)}): make room there.") from None
    if missing and missing[0] == spec.head:
        _up(configs, missing.pop(0), say)
    for_all(missing, lambda host: _up(configs, host, say), "did not start")
    _report(spec, checked, say)


def _up(configs: dict[str, Path], host: HostSpec, say: Say) -> None:
    argv = [*RAY, "up", "--yes", "--no-config-cache", "--use-normal-shells", "--log-style=record",
            str(configs[host.host])]  # fmt: skip
    _ray(argv, host, UP_SECONDS, say)
    say(host.host, "started")


def down(spec: ClusterFile, say: Say) -> None:
    """End all processes of a cluster on all hosts, and what they run.

    Raises:
        UserError: a host cannot be reached, or some process cannot be ended; the other hosts are down.
    """
    check_here(spec)
    folder = folder_of(spec.name)
    for_all(spec.hosts, lambda host: _down(spec, host, folder, say), "may still run something")
    forget(spec.name)


def _down(spec: ClusterFile, host: HostSpec, folder: Path, say: Say) -> None:
    state = folder / f"{host.host}.state"
    config = write_host(spec, host, folder, "", "")  # also where `up` was run elsewhere
    if not state.exists():
        state.write_text('{"ray-node-type": "head"}', encoding="utf-8")
    _ray([*RAY, "down", "--yes", "--log-style=record", str(config)], host, DOWN_SECONDS, say)
    if state.exists():
        raise UserError(f"{host.host}: Ray's launcher has not ended it: see {_log(folder, host)}.")
    say(host.host, "down")


def _ray(argv: list[str], host: HostSpec, seconds: float, say: Say) -> None:
    """Runs a command of Ray's launcher, with its output in a file."""
    say(host.host, f"$ ray {shown(argv[4:])}", whole=True)
    folder = Path(argv[-1]).parent
    environment = os.environ | {
        "RAY_UP_enable_autoscaler_v2": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "AUTOSCALER_NODE_START_WAIT_S": "60",  # SSH was tried before
        "TMPDIR": str(folder),  # Ray reads a cache of configurations from it, by names that others could guess
    }
    log = _log(folder, host)
    with log.open("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT,
                                   env=environment, start_new_session=True)  # fmt: skip
        try:
            code: int | None = process.wait(seconds)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if process.poll() is None:  # with the ssh and rsync that it runs
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        said = output.read()
    answer = answered(said) or {}
    if code is None:
        raise UserError(f"{host.host}: Ray's launcher has not finished within {seconds:.0f} s: see {log}.")
    if code:
        raise UserError(
            str(answer.get("refused") or f"{host.host}: Ray's launcher failed ({last_line(said)}): see {log}.")
        )


def _log(folder: Path, host: HostSpec) -> Path:
    return folder / f"{host.host}.log"


def _report(spec: ClusterFile, checked: list[Checked], say: Say) -> None:
    """What listens where, and what the Internet may reach."""
    hosts = [one.host for one in checked]
    for host, found in zip(hosts, for_all(hosts, lambda host: _ports_of(spec, host), "do not answer"),
                           strict=True):  # fmt: skip
        say(host.host, f"listens {_ports(found['listening'])}")
        everywhere = sorted({one["port"] for one in found["listening"] if one["address"] == "*"})
        if found["public"] and everywhere:
            say(
                "Warning",
                f"{host.host} has the public address {join_words(found['public'])}, and Ray listens on all "
                "interfaces, on "
                f"ports {join_words(everywhere)}: close them with a firewall, as docs/cluster-hosts.md shows.",
            )
    head = f"{spec.head.host}, {address_of(spec, spec.head)}:{ports_of(spec)['gcs']}"
    say(spec.name, f"is up: {count_noun(len(hosts), 'host')}; head {head}")


def _ports_of(spec: ClusterFile, host: HostSpec) -> dict[str, Any]:
    return ask(host, on_host(spec.name, host), "ports", PORTS_SECONDS)


def _ports(listening: list[dict[str, Any]]) -> str:
    by_address: dict[str, list[str]] = {}
    for one in listening:
        by_address.setdefault(str(one["address"]), []).append(f"{one['port']} {one['process']}")
    names = {"*": "on all interfaces"}
    return "; ".join(f"{names.get(address, f'on {address}')}: {', '.join(found)}" for address, found in
                     sorted(by_address.items())) or "on no port"  # fmt: skip
