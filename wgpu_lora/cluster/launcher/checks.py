"""What `cluster up` checks before it changes anything, on this machine and on all hosts at once."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from wgpu_lora.cluster.cluster_file import ClusterFile, HostSpec
from wgpu_lora.cluster.launcher.config import address_of
from wgpu_lora.cluster.launcher.files import on_host
from wgpu_lora.cluster.launcher.ssh import last_line, node_command, run
from wgpu_lora.cluster.messages import Versions, from_plain
from wgpu_lora.errors import UserError
from wgpu_lora.text import count_noun

CHECK_SECONDS = 90.0  # a first start of Python there, and a digest of the package
AT_ONCE = 16
MOST_SHOWN = 12


@dataclass(frozen=True)
class Checked:
    """A host that can be used. running: the id of the start of this cluster's node that runs there, if one does."""

    host: HostSpec
    running: str | None


def check_here(spec: ClusterFile) -> None:
    """Programs and keys on this machine, and addresses.

    Raises:
        UserError: something is missing or wrong.
    """
    for program, package in (("ssh", "OpenSSH's client"), ("rsync", "rsync")):
        if shutil.which(program) is None:
            raise UserError(f"{program} is not installed here: install {package}, which Ray's launcher needs.")
    for host in spec.hosts or [spec.head]:
        if ":" in host.host:
            raise UserError(f"{host.host} is an IPv6 address, which rsync cannot use here: name it in ~/.ssh/config.")
        _check_key(host)
    seen: dict[str, str] = {}
    for host in spec.hosts:
        address = address_of(spec, host)
        if address in seen:
            raise UserError(f"{seen[address]} and {host.host} both have the address {address}: leave one of them out.")
        seen[address] = host.host


def _check_key(host: HostSpec) -> None:
    if host.key is None:
        return
    if not host.key.is_file():
        raise UserError(f"The SSH key {host.key} of {host.host} does not exist: correct 'ssh_key'.")
    if '"' in str(host.key):
        raise UserError(f"The SSH key {host.key} of {host.host} has a quote in its path: rename it.")
    if os.name == "posix" and host.key.stat().st_mode & 0o077:
        raise UserError(f"Others may read the SSH key {host.key} of {host.host}: run 'chmod 600' on it.")
    if not os.access(host.key, os.R_OK):
        raise UserError(f"The SSH key {host.key} of {host.host} cannot be read: correct its owner.")


def check_hosts(spec: ClusterFile) -> list[Checked]:
    """All hosts, as they are now.

    Raises:
        UserError: some cannot be used; a line for each.
    """
    return for_all(spec.hosts, lambda host: _check(spec, host), "cannot be used")


def for_all(hosts: Sequence[HostSpec], work: Any, failed: str) -> list[Any]:
    """What `work` gives for each host, several at once.

    Raises:
        UserError: it raised one for some of them; all that they say, a line each.
    """
    found, refused = [], []

    def tried(host: HostSpec) -> tuple[Any, str | None]:
        try:
            return work(host), None
        except UserError as error:
            return None, str(error)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for value, problem in pool.map(tried, hosts):
            if problem is None:
                found.append(value)
            else:
                refused.append(problem)
    if len(refused) == 1:
        raise UserError(refused[0])
    if refused:
        more = [f"... and {len(refused) - MOST_SHOWN:,} more"] if len(refused) > MOST_SHOWN else []
        raise UserError(f"{count_noun(len(refused), 'host')} {failed}:", [*refused[:MOST_SHOWN], *more])
    return found


def _check(spec: ClusterFile, host: HostSpec) -> Checked:
    from wgpu_lora.cluster.node_versions import difference, own_versions

    said = ask(host, on_host(spec.name, host), "check", CHECK_SECONDS)
    try:
        versions = from_plain(Versions, said.get("versions"))
        addresses, running = list(map(str, said["addresses"])), said["running"]
    except (KeyError, TypeError, ValueError):
        raise UserError(_other_version(host)) from None
    if (other := difference(own_versions(), versions)) is not None:
        raise UserError(f"{host.host}: {other}: install the same versions there as here.")
    if not said.get("rsync"):
        raise UserError(f"{host.host} has no rsync: install it there, Ray's launcher copies files with it.")
    if (address := address_of(spec, host)) not in addresses:
        has = ", ".join(one for one in addresses if ":" not in one and not one.startswith("127.")) or "none"
        raise UserError(f"{host.host} has no interface with the address {address} (it has {has}): give its 'address'.")
    return Checked(host, running if isinstance(running, str) else None)


def ask(host: HostSpec, folder: str, command: str, timeout: float) -> dict[str, Any]:
    """What `launcher.node` answers on a host about the cluster whose folder there is given.

    Raises:
        UserError: the host or its Python cannot be used, or it refused.
    """
    found = run(host, node_command(host, command, folder), timeout, check=False)
    answer = answered(found.stdout)
    if answer is None:
        raise UserError(_no_python(host, found.returncode, found.stderr))
    if "refused" in answer:
        raise UserError(str(answer["refused"]))
    return answer


def answered(output: str) -> dict[str, Any] | None:
    """The JSON object in the last line that has one: login scripts and Ray may print others."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                continue
            if isinstance(found, dict):
                return found
    return None


def _no_python(host: HostSpec, code: int, said: str) -> str:
    where = f'{host.host}: python = "{host.python}"'
    if code in (126, 127):
        return f"{where} cannot be run there: give the path of the Python in whose environment wgpu-lora is installed."
    if "nknown option: -P" in said or "SyntaxError" in said:
        return f"{where} is older than Python 3.11: give another one."
    if "No module named 'ray" in said or "No module named ray" in said:
        return f"{where} has no Ray: install 'wgpu-lora[cluster]' there."
    if "No module named" in said and "'wgpu_lora'" in said:
        return f"{where} has no wgpu-lora: install it there, in the version that is here."
    if "No module named" in said and "wgpu_lora." in said:
        return _other_version(host)
    return f"{where} fails there ({last_line(said)}): try it by hand."


def _other_version(host: HostSpec) -> str:
    return f"{host.host} has another version of wgpu-lora: install the one that is here."
