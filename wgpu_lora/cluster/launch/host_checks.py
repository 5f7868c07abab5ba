"""What `cluster up` checks before it changes anything, on all hosts at once."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from wgpu_lora.cluster.cluster_file import ClusterFile, HostSpec
from wgpu_lora.cluster.launch.ssh import folder_on, last_line, run
from wgpu_lora.cluster.messages import Versions
from wgpu_lora.errors import UserError
from wgpu_lora.files.typed_json import typed
from wgpu_lora.names.text import count_noun

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
