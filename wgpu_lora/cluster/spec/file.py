"""cluster.toml: the machines of a cluster, and what to train on them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wgpu_lora.cluster.spec.hosts import HostSpec, check_apart, check_folder, check_key, check_python, check_user
from wgpu_lora.cluster.spec.names import checked_name
from wgpu_lora.cluster.spec.reading import check_keys, in_file, table_of
from wgpu_lora.cluster.spec.run_options import RunOptions
from wgpu_lora.errors import UserError
from wgpu_lora.json_files import read_toml

OF_ALL_HOSTS = ("user", "ssh_key", "python")
KEYS = ("name", "address", "port", *OF_ALL_HOSTS, "host", "data", "run", "options", "adapter", "recipe")
_ADDRESS = re.compile(r"(ray://)?([A-Za-z0-9][A-Za-z0-9.-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\]):([0-9]{1,5})")
PORT, LAST_PORT = 6379, 65527  # Ray's other processes get the ports after it
MOST_HOSTS, MOST_TASKS = 1000, 10_000


@dataclass(frozen=True)
class ClusterFile:
    """A cluster.toml.

    Attributes:
        path: of the file. name: of the cluster.
        address: of a Ray cluster that runs already: `auto`, HOST:PORT or ray://HOST:PORT.
        hosts: that `cluster up` starts Ray on, the head first. port: that its head listens on.
        data_root: the folder that relative paths of data refer to, on the machines of the cluster.
        run: how a run uses the cluster.
        options: of training, for all tasks; adapters, recipes: tables of tasks, checked by `tasks`.
    """

    path: Path
    name: str
    address: str | None = None
    hosts: tuple[HostSpec, ...] = ()
    port: int = PORT
    data_root: str | None = None
    run: RunOptions = field(default_factory=RunOptions)
    options: Mapping[str, Any] = field(default_factory=dict)
    adapters: tuple[Mapping[str, Any], ...] = ()
    recipes: tuple[Mapping[str, Any], ...] = ()

    @property
    def where(self) -> str:
        """The beginning of messages about it."""
        return f"The cluster file {self.path}"

    @property
    def head(self) -> HostSpec:
        """The host that Ray's head and our coordinator run on.

        Raises:
            UserError: the file names no hosts.
        """
        if not self.hosts:
            raise UserError(f"{self.where} has no [[host]]: add one for each machine, the head first.")
        return self.hosts[0]

    def node_paths(self, host: HostSpec) -> dict[str, str]:
        """The folders that a host has elsewhere than the others, for `spec.paths`."""
        return {self.data_root: host.data} if self.data_root and host.data else {}


def read_cluster_file(path: Path) -> ClusterFile:
    """Read and check a cluster.toml; tasks are checked when they are made of it.

    Raises:
        UserError: the file cannot be read, or a key or a value is unknown or not allowed.
    """
    values, where = read_toml(path, "The cluster file"), f"The cluster file {path}"
    check_keys(values, KEYS, where)
    name = values.get("name")
    if name is None:
        raise UserError(f"{where} has no 'name': name the cluster, such as name = \"lab\".")
    if not isinstance(name, str):
        raise UserError(f"{where}: 'name' must be text, not {name!a:.60}.")
    checked_name(name, f"{where}: 'name'")
    address, port = values.get("address"), values.get("port", PORT)
    if address is not None:
        check_address(address, f"{where}: 'address'")
    if type(port) is not int or not 1024 <= port <= LAST_PORT:
        raise UserError(f"{where}: 'port' must be a whole number from 1024 to {LAST_PORT}, not {port!a:.40}.")
    root = _data_root(values.get("data", {}), where)
    hosts = _hosts(values, where)
    if address is not None and hosts:
        raise UserError(
            f"{where} has an 'address' and [[host]] tables: leave out the tables to use a cluster that runs already, "
            "or the address to start one with 'wgpu-lora cluster up'."
        )
    for number, host in enumerate(hosts, 1):
        if host.data and not root:
            raise UserError(f"{where}, host {number}: 'data' needs the folder of the others: add [data] with a 'root'.")
    return ClusterFile(
        path, name, address, hosts, port, root, table_of(RunOptions, values.get("run", {}), f"{where}, [run]"),
        _table(values.get("options", {}), f"{where}, [options]"),
        tuple(_tables(values.get("adapter", []), f"{where}, adapter", MOST_TASKS)),
        tuple(_tables(values.get("recipe", []), f"{where}, recipe", MOST_TASKS)),
    )  # fmt: skip


def check_address(address: Any, where: str) -> str:
    """The address of a Ray cluster; `where` begins the message.

    Raises:
        UserError: it is not one.
    """
    found = _ADDRESS.fullmatch(address) if isinstance(address, str) else None
    if address != "auto" and not (found and 0 < int(found[3]) < 65536):
        raise UserError(f"{where} must be auto, HOST:PORT or ray://HOST:PORT, not {address!a:.80}.")
    return str(address)


def _data_root(values: Any, where: str) -> str | None:
    table = _table(values, f"{where}, [data]")
    check_keys(table, ("root",), f"{where}, [data]")
    root = table.get("root")
    if root is not None:
        if not isinstance(root, str):
            raise UserError(f"{where}, [data]: 'root' must be text, not {root!a:.60}.")
        with in_file(f"{where}, [data]"):
            check_folder("root", root)
    return root.rstrip("/") or "/" if root else None


def _hosts(values: Mapping[str, Any], where: str) -> tuple[HostSpec, ...]:
    of_all = {name: values[name] for name in OF_ALL_HOSTS if name in values}
    for name, check in (("user", check_user), ("ssh_key", check_key), ("python", check_python)):
        given = of_all.get(name)
        if name in of_all and not isinstance(given, str):
            raise UserError(f"{where}: '{name}' must be text, not {given!a:.60}.")
        if isinstance(given, str):
            with in_file(where):
                check(given)
    tables = _tables(values.get("host", []), f"{where}, host", MOST_HOSTS)
    hosts = tuple(
        table_of(HostSpec, {**of_all, **table}, f"{where}, host {number}") for number, table in enumerate(tables, 1)
    )
    with in_file(where):
        check_apart(hosts)
    return hosts


def _table(values: Any, where: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise UserError(f"{where} must be a table, not {values!a:.40}.")
    return values


def _tables(values: Any, where: str, most: int) -> list[dict[str, Any]]:
    if not isinstance(values, list):
        kind = where.rsplit(" ", 1)[-1]
        raise UserError(f"{where} must be tables: write [[{kind}]] with two brackets for each.")
    if len(values) > most:
        raise UserError(f"{where}: {len(values):,} tables are more than {most:,}: use fewer.")
    return [_table(value, f"{where} {number}") for number, value in enumerate(values, 1)]
