"""`cluster up` and `cluster down`: `ray start` on the hosts of a cluster, by SSH, and the end of what it started.

Ray's own `ray up` accepts any host key, copies the person's SSH key to the head to start the workers from there, and
can use only one user and one Python; its `ray down` ends every Ray of that user.
"""

from __future__ import annotations

import json
import secrets
import shlex
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from wgpu_lora.cluster.cluster_file import ClusterFile, HostSpec
from wgpu_lora.cluster.launch.ssh import folder_on, last_line, run
from wgpu_lora.cluster.messages import Versions
from wgpu_lora.errors import UserError
from wgpu_lora.files.typed_json import typed
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


# -- what `up` checks before it changes anything, on all hosts at once -------------------------------------------------

CHECK_SECONDS = 90.0  # a first start of Python there, and a digest of the package
AT_ONCE = 16
OTHER_VERSION = "has another version of wgpu-lora: install the one that is here"
_MEANINGS = {  # of what Python prints
    "nknown option: -P": "is older than Python 3.11: give another one",
    "SyntaxError": "is older than Python 3.11: give another one",
    "No module named 'wgpu_lora'": "has no wgpu-lora: install it there, in the version that is here",
    "No module named": OTHER_VERSION,
}
T = TypeVar("T")


@dataclass(frozen=True)
class NodeCheck:
    """What a host answers to `check`. running: the id of the start of this cluster's node that runs there, if any."""

    versions: Versions
    addresses: list[str]
    running: str | None
    token: str | None


def on_all(hosts: Sequence[HostSpec], work: Callable[[HostSpec], T], predicate: str) -> list[T]:
    """The results of `work` for all hosts, several at a time.

    Raises:
        UserError: `work` raised one for some hosts. All of these errors are listed, one per line.
    """

    def attempt(host: HostSpec) -> T | UserError:
        try:
            return work(host)
        except UserError as error:
            return error

    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = list(pool.map(attempt, hosts))
    errors = [str(result) for result in results if isinstance(result, UserError)]
    if len(errors) == 1:
        raise UserError(errors[0])
    if errors:
        raise UserError(f"{count_noun(len(errors), 'host')} {predicate}:", errors)
    return [result for result in results if not isinstance(result, UserError)]


def check_addresses(spec: ClusterFile) -> None:
    """Check the addresses of all hosts.

    Raises:
        UserError: one cannot be used, or two hosts are the same.
    """
    host_names: dict[str, str] = {}
    for host in spec.host or [spec.head]:
        for name in {host.host.casefold(), spec.address_of(host)}:
            if name in host_names:
                raise UserError(f"{host_names[name]} and {host.host} are the same host, {name}: leave one of them out.")
            host_names[name] = host.host


def check_host(spec: ClusterFile, host: HostSpec) -> NodeCheck:
    """Check that a host can be used.

    Raises:
        UserError: it cannot.
    """
    from wgpu_lora.cluster.node_versions import difference, own_versions

    try:
        node: NodeCheck = typed(NodeCheck, ask(spec, host, "check", CHECK_SECONDS))
    except ValueError:
        raise UserError(f"{host.host} {OTHER_VERSION}.") from None
    if (mismatch := difference(own_versions(), node.versions)) is not None:
        raise UserError(f"{host.host}: {mismatch}: install the same versions there as here.")
    if (address := spec.address_of(host)) not in node.addresses:
        has = ", ".join(ip for ip in node.addresses if ":" not in ip and not ip.startswith("127.")) or "none"
        raise UserError(f"{host.host} has no interface with the address {address} (it has {has}): give its 'address'.")
    return node


def ask(spec: ClusterFile, host: HostSpec, command: str, seconds: float, **values: Any) -> dict[str, Any]:
    """What a command of `node_commands` answers on a host.

    Raises:
        UserError: the host or its Python cannot be used, or it refused.
    """
    values |= {"cluster": spec.name, "host": host.host, "folder": folder_on(spec, host)}
    line = f"{host.python} -P -m wgpu_lora.cluster.launch.node_commands {command}"
    process = run(host, line, json.dumps(values), seconds)
    answer = last_object(process.stdout)
    if answer is not None:
        if "refused" in answer:
            raise UserError(str(answer["refused"]))
        return answer
    where = f'{host.host}: python = "{host.python}"'
    if process.returncode in (126, 127):
        raise UserError(
            f"{where} cannot be run there: give the path of the Python in whose environment wgpu-lora is installed."
        )
    for text, meaning in _MEANINGS.items():
        if text in process.stderr:
            raise UserError(f"{where} {meaning}.")
    raise UserError(f"{where} fails there ({last_line(process.stderr)}): try it by hand.")


def last_object(output: str) -> dict[str, Any] | None:
    """The JSON object in the last line that has one: login scripts and drivers may print others."""
    for line in reversed(output.splitlines()):
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            return value
    return None
