"""`cluster up` and `cluster down`: `ray start` on the hosts of a cluster, by SSH, and the end of what it started.

Ray's own `ray up` accepts any host key, copies the person's SSH key to the head to start the workers from there, and
can use only one user and one Python; its `ray down` ends every Ray of that user.
"""

from __future__ import annotations

import secrets
import shlex
from typing import Any, Protocol

from wgpu_lora.cluster.cluster_file import ClusterFile, HostSpec
from wgpu_lora.cluster.launch.host_checks import ask, check_addresses, check_host, on_all
from wgpu_lora.errors import UserError
from wgpu_lora.names.text import count_noun, join_words

UP_SECONDS, DOWN_SECONDS, PORTS_SECONDS = 400.0, 180.0, 60.0


class PrintLine(Protocol):
    """How a line is shown: a label and a text; `whole`: it is a command, which is not wrapped."""

    def __call__(self, label: str, text: str, whole: bool = False) -> None: ...


def up(spec: ClusterFile, line: PrintLine) -> None:
    """Start Ray on all hosts of a cluster where it does not run yet, the head first.

    Raises:
        UserError: a host cannot be used, in which case nothing is started; or Ray does not start on it.
    """
    check_addresses(spec)
    nodes = on_all(spec.host, lambda host: check_host(spec, host), "cannot be used")
    token, start = nodes[0].token or secrets.token_hex(32), nodes[0].running or secrets.token_hex(8)
    stale_hosts = [host.host for host, node in zip(spec.host, nodes, strict=True) if node.running not in (None, start)]
    if stale_hosts:  # their head has gone, and they would never find the new one
        raise UserError(
            f"{join_words(stale_hosts)} still {'runs' if len(stale_hosts) == 1 else 'run'} what an earlier start of "
            f"{spec.name} left: run 'wgpu-lora cluster down -f {spec.path}' first."
        )
    missing = [host for host, node in zip(spec.host, nodes, strict=True) if node.running is None]
    for host in spec.host:
        if host not in missing:
            line(host.host, "runs already")

    def start_node(host: HostSpec) -> None:
        options = start_options(spec, host)
        line(host.host, f"$ {shlex.join(['ray', 'start', *options])}", whole=True)
        head = None if host == spec.head else [spec.address_of(spec.head), spec.port]
        ask(spec, host, "start", UP_SECONDS, id=start, token=token, options=options, head=head,
            paths=spec.node_paths(host))  # fmt: skip
        line(host.host, "started")

    if spec.head in missing:
        start_node(missing.pop(0))
    on_all(missing, start_node, "did not start")
    _report(spec, line)


def start_options(spec: ClusterFile, host: HostSpec) -> list[str]:
    """The options of `ray start` on a host, which adds its devices."""
    ports = {f"--{name}-port": port for name, port in spec.ports.items() if name != "gcs"}
    dashboard, client = ports.pop("--dashboard-port"), ports.pop("--ray-client-server-port")
    if host == spec.head:
        options = ["--head", f"--port={spec.port}", f"--ray-client-server-port={client}", "--dashboard-host=127.0.0.1",
                   f"--dashboard-port={dashboard}"]  # fmt: skip
    else:
        options = [f"--address={spec.address_of(spec.head)}:{spec.port}"]
    options += [f"--node-ip-address={spec.address_of(host)}", *(f"{name}={port}" for name, port in ports.items())]
    labels = ",".join(f"{name}={value}" for name, value in host.labels.items())
    return [*options, *([f"--labels={labels}"] if labels else []), "--disable-usage-stats", "--log-style=record"]


def _report(spec: ClusterFile, line: PrintLine) -> None:
    """What listens where, and what the Internet may reach."""
    answers = on_all(spec.host, lambda host: ask(spec, host, "ports", PORTS_SECONDS), "do not answer")
    for host, answer in zip(spec.host, answers, strict=True):
        line(host.host, f"listens {_ports(answer['listening'])}")
        open_ports = sorted({listener["port"] for listener in answer["listening"] if listener["address"] == "*"})
        if answer["public"] and open_ports:
            line(
                "Warning",
                f"{host.host} has the public address {join_words(answer['public'])}, and Ray listens on all "
                f"interfaces, on ports {join_words(open_ports)}: close them with a firewall, as docs/cluster-hosts.md "
                "shows.",
            )
    head = f"{spec.head.host}, {spec.address_of(spec.head)}:{spec.port}"
    line(spec.name, f"is up: {count_noun(len(spec.host), 'host')}; head {head}")


def _ports(listening: list[dict[str, Any]]) -> str:
    by_address: dict[str, list[str]] = {}
    for listener in listening:
        where = "on all interfaces" if listener["address"] == "*" else f"on {listener['address']}"
        by_address.setdefault(where, []).append(f"{listener['port']} {listener['process']}")
    return "; ".join(f"{where}: {', '.join(ports)}" for where, ports in sorted(by_address.items())) or "on no port"


def down(spec: ClusterFile, line: PrintLine) -> None:
    """End all processes of a cluster on all hosts, and what they run.

    Raises:
        UserError: a host cannot be reached, or some process cannot be ended; the other hosts are down.
    """

    def stop_node(host: HostSpec) -> None:
        ask(spec, host, "stop", DOWN_SECONDS)
        line(host.host, "down")

    on_all(spec.host or [spec.head], stop_node, "may still run something")
