"""cluster.toml: the machines of a cluster, and how a run uses it."""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le

from wgpu_lora.errors import UserError
from wgpu_lora.files.json_files import read_toml
from wgpu_lora.files.typed_json import Check, read_as
from wgpu_lora.names.spelling import IN_FILE, error_source, flag, setting
from wgpu_lora.train.option_types import NOT_NEGATIVE, Range, check, option

LONGEST = 64  # name
A_NAME = f"up to {LONGEST} letters, digits, '.', '_' and '-', of which the first is a letter or a digit"
AN_ADDRESS = "auto, HOST:PORT or ray://HOST:PORT"
A_FOLDER = "the absolute path of a folder, such as /mnt/lab"
A_STORAGE = "the absolute path of a folder that all machines have, or a URL such as s3://bucket/runs"


def is_safe(text: str) -> bool:
    """Whether a text can be a name: it is a plain part of a path on every system, and never an option."""
    return bool(re.fullmatch(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST - 1}}}", text))


def safe_name(text: str) -> str:
    """A name as near to a text as possible."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")[:LONGEST].rstrip("._-") or "adapter"


def distinct_names(names: Sequence[str], reserved: Collection[str] = ()) -> list[str]:
    """The names, numbered where they are alike but for their case, or like a reserved one.

    Some file systems do not tell names apart by their case.
    """
    result: list[str] = []
    keys = {name.casefold() for name in reserved}
    all_keys = keys | {name.casefold() for name in names}
    for name in names:
        new, number = name, 1
        while new.casefold() in (keys if number == 1 else all_keys | keys):
            number += 1
            new = f"{name[: LONGEST - 1 - len(str(number))]}-{number}"
        result.append(new)
        keys.add(new.casefold())
    return result


CLUSTER = "Cluster"  # their heading in help
JOIN = ("auto", "always", "never")


@dataclass(frozen=True)
class RunOptions:
    """How a run uses a cluster. Fields are declared as options of training are."""

    name: str | None = option(None, CLUSTER, "Name of the run, for 'attach' and 'cancel'. Default: made of the time.")
    shared: str | None = option(
        None,
        CLUSTER,
        "Absolute path of a folder that all machines have: results are written there. Default: they are fetched to "
        "this machine.",
    )
    storage: str | None = option(
        None,
        CLUSTER,
        "Folder or URL (fsspec's, such as s3://bucket/runs) that all machines reach: checkpoints are kept there. "
        "Default: the machines keep each other's.",
    )
    mirror_steps: int = option(
        50,
        CLUSTER,
        "Steps between checkpoints that are copied to another machine: at most these are lost with a machine. 0 copies "
        "results only.",
        within=NOT_NEGATIVE,
    )
    join: str = option(
        "auto",
        CLUSTER,
        "Whether adapters of one base are trained together in a pipeline: where that is faster (auto), wherever it is "
        "possible, or never.",
        choices=JOIN,
    )
    data_parallel: int = option(
        1, CLUSTER, "Devices that train each adapter together, on parts of every batch.", within=Range(1, at_most=64)
    )
    jobs_per_device: int = option(1, CLUSTER, "Jobs that a device runs at the same time.", within=Range(1, at_most=16))
    eval_device: str | None = option(
        None,
        CLUSTER,
        "Device that measures held-out losses and makes caches of teachers while others train: its HOST:INDEX, key or "
        "part of its name, as 'cluster status' shows it.",
    )
    send_data: bool = option(
        False, CLUSTER, "Send data that only this machine has to the others, instead of refusing them."
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            check(item.name, getattr(self, item.name), item.metadata)
        for name, fits, expected in (
            ("name", is_safe, A_NAME),
            ("shared", _is_folder, A_FOLDER),
            ("storage", _is_storage, A_STORAGE),
            ("eval_device", _is_text, "a device's HOST:INDEX, key or part of its name"),
        ):
            value = getattr(self, name)
            if value is not None and not fits(value):
                raise UserError(f"{flag(name)} must be {expected}, not {value!a:.80}.")
        if self.data_parallel > 1 and self.join == "always":
            raise UserError(
                f"{setting('join', 'always')} and {setting('data_parallel', self.data_parallel)} cannot be combined: "
                "an adapter is trained with others on one device, or alone on several."
            )


def check_address(address: str, where: str) -> str:
    """The address of a Ray cluster; `where` begins the message.

    Raises:
        UserError: it is not one.
    """
    if not _is_ray_address(address):
        raise UserError(f"{where} must be {AN_ADDRESS}, not {address!a:.80}.")
    return address


# -- hosts -------------------------------------------------------------------------------------------------------------


def _is_ray_address(text: str) -> bool:
    host = r"[A-Za-z0-9][A-Za-z0-9.-]{0,252}|\[[0-9A-Fa-f:.]{2,45}\]"
    match = re.fullmatch(rf"(?:ray://)?(?:{host}):([0-9]{{1,5}})", text)
    return text == "auto" or bool(match and 0 < int(match[1]) < 65536)


def _is_folder(text: str) -> bool:
    plain = text.isprintable() and len(text.encode()) <= 1024
    return plain and text.startswith("/") and ".." not in text.split("/")


def _is_storage(text: str) -> bool:
    return text.isprintable() and bool(re.match(r"/|[a-z][a-z0-9+]*://", text))


def _is_text(text: str) -> bool:
    return bool(text.strip()) and text.isprintable()


def _is_interface(text: str) -> bool:
    try:
        address = ipaddress.IPv4Address(text)
    except ValueError:
        return False
    return not (address.is_unspecified or address.is_multicast)


def _are_labels(labels: Mapping[str, str]) -> bool:
    label = r"(?!ray\.io/)[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?"
    return all(re.fullmatch(label, text) for pair in labels.items() for text in pair)


def _text(pattern: str, expected: str) -> Check:
    return Check(lambda text: bool(re.fullmatch(pattern, text)), expected)


HostName = Annotated[str, _text(r"[A-Za-z0-9]([A-Za-z0-9.:-]{0,251}[A-Za-z0-9])?", "the name or address of a host")]
Address = Annotated[str, Check(_is_interface, "the IPv4 address of an interface of the host, such as 10.0.0.2")]
User = Annotated[str, _text(r"[A-Za-z_][A-Za-z0-9._-]{0,31}", "the name of a user on the host")]
KeyFile = Annotated[str, Check(_is_text, "the path of a private key here")]
Program = Annotated[
    str, _text(r"(?!-)~?[A-Za-z0-9_./+-]{1,255}", "the path of an interpreter on the host, such as ~/venv/bin/python")
]
Labels = Annotated[
    dict[str, str],
    Check(_are_labels, "names and values of up to 63 letters, digits, '.', '_', '/' and '-'; ray.io/ begins Ray's own"),
]
Folder = Annotated[str, Check(_is_folder, A_FOLDER)]


@dataclass(frozen=True)
class HostSpec:
    """A host that is reached by SSH. The first of a cluster is its head.

    Attributes:
        host: its name or address for SSH.
        address: of its private interface, by which the others reach it; by default what `host` resolves to.
        user, ssh_key: for SSH; by default what ~/.ssh/config says.
        python: the interpreter in whose environment wgpu-lora is installed there; a shell reads it as one word.
        labels: of its node in Ray.
        data: where it has what the others have at `[data] root`.
    """

    host: HostName
    address: Address | None = None
    user: User | None = None
    ssh_key: KeyFile | None = None
    python: Program = "python3"
    labels: Labels = field(default_factory=dict)
    data: Folder | None = None


@dataclass(frozen=True)
class DataTable:
    """The table [data]."""

    root: Folder | None = None


OF_ALL_HOSTS = ("user", "ssh_key", "python")
# Of Ray's processes, after the port of the head: the cluster's `port` and those that follow it.
PORTS = ("gcs", "ray-client-server", "node-manager", "object-manager", "runtime-env-agent", "dashboard-agent-grpc",
         "dashboard-agent-listen", "metrics-export", "dashboard")  # fmt: skip


@dataclass(frozen=True)
class ClusterFile:
    """A cluster.toml: the attributes are its keys.

    Attributes:
        name: of the cluster.
        address: of a Ray cluster that runs already: `auto`, HOST:PORT or ray://HOST:PORT.
        port: that its head listens on.
        user, ssh_key, python: of all hosts that have none of their own; `host` has them already.
        host: what `cluster up` starts Ray on, the head first.
        data: the folder that relative paths of data refer to, on the machines of the cluster.
        run: how a run uses the cluster.
        options: of training, for all tasks; adapter, recipe: tables of tasks, checked by `tasks`.
        path: of the file.
    """

    name: Annotated[str, Check(is_safe, A_NAME)]
    address: Annotated[str, Check(_is_ray_address, AN_ADDRESS)] | None = None
    port: Annotated[int, Ge(1024), Le(65536 - len(PORTS))] = 6379
    user: User | None = None
    ssh_key: KeyFile | None = None
    python: Program | None = None
    host: tuple[HostSpec, ...] = ()
    data: DataTable = DataTable()
    run: RunOptions = RunOptions()
    options: dict[str, Any] = field(default_factory=dict)
    adapter: tuple[dict[str, Any], ...] = ()
    recipe: tuple[dict[str, Any], ...] = ()
    path: Path = field(default=Path(), init=False)

    @property
    def where(self) -> str:
        """The beginning of messages about it."""
        return f"The cluster file {self.path}"

    @property
    def head(self) -> HostSpec:
        """The host that Ray's head and our controller run on.

        Raises:
            UserError: the file names no hosts.
        """
        if not self.host:
            raise UserError(f"{self.where} has no [[host]]: add one for each machine, the head first.")
        return self.host[0]

    @property
    def data_root(self) -> str | None:
        """The folder of `data`, without a slash at its end."""
        return self.data.root.rstrip("/") or "/" if self.data.root else None

    @property
    def ports(self) -> dict[str, int]:
        """The ports of Ray's processes by their names."""
        return {name: self.port + number for number, name in enumerate(PORTS)}

    def node_paths(self, host: HostSpec) -> dict[str, str]:
        """The folders that a host has elsewhere than the others."""
        return {self.data_root: host.data} if self.data_root and host.data else {}

    def address_of(self, host: HostSpec) -> str:
        """The IPv4 address by which the other hosts reach a host.

        Raises:
            UserError: there is none, or it is none that others could reach.
        """
        try:
            address = host.address or socket.gethostbyname(host.host)
        except OSError:
            address = "no IPv4 address"
        if not _is_interface(address) or (address.startswith("127.") and len(self.host) > 1):
            raise UserError(
                f"{host.host} resolves to {address}, by which no other host reaches it: give its 'address' in "
                f"{self.path}, that of its interface in the network of the hosts."
            )
        return address


def read_cluster_file(path: Path) -> ClusterFile:
    """Read and check a cluster.toml; tasks are checked when they are made of it.

    Raises:
        UserError: the file cannot be read, or a key or a value is unknown or not allowed.
    """
    values, where = read_toml(path, "The cluster file"), f"The cluster file {path}"
    shared = {name: values[name] for name in OF_ALL_HOSTS if name in values}
    if isinstance(hosts := values.get("host"), list):
        values["host"] = [{**shared, **host} if isinstance(host, dict) else host for host in hosts]
    with error_source(where, IN_FILE):
        file = read_as(ClusterFile, values, where)
    object.__setattr__(file, "path", path)
    if file.address is not None and file.host:
        raise UserError(
            f"{where} has an 'address' and [[host]] tables: leave out the tables to use a cluster that runs already, "
            "or the address to start one with 'wgpu-lora cluster up'."
        )
    for host in file.host:
        if host.data and not file.data_root:
            raise UserError(f"{where}: 'data' of {host.host} needs the folder of the others: add [data] with a 'root'.")
    return file


# -- sweeps ------------------------------------------------------------------------------------------------------------

SWEEP = "Sweep"  # heading of its options in help
METRICS, SCHEDULERS = ("eval_loss", "loss"), ("none", "asha", "pbt")


@dataclass(frozen=True)
class SweepOptions:
    """The options of `cluster sweep`, declared as those of training are.

    grace_period, perturbation_interval: None for a tenth of the shortest task's steps.
    """

    max_trials: int | None = option(
        None, SWEEP, "Draw so many of the combinations, by --seed. Default: all.", within=Range(1)
    )
    metric: str = option("eval_loss", SWEEP, "What the adapters are compared by; lower is better.", choices=METRICS)
    scheduler: str = option(
        "none", SWEEP, "Of Ray Tune: asha ends poor adapters early, pbt lets them copy better ones.", choices=SCHEDULERS
    )
    grace_period: int | None = option(
        None, SWEEP, "With ASHA, the steps before an adapter may be ended. Default: a tenth.", within=Range(1)
    )
    reduction_factor: float = option(
        4.0, SWEEP, "With ASHA, one of so many goes on at each rung.", within=Range(above=1, at_most=1000)
    )
    perturbation_interval: int | None = option(
        None, SWEEP, "With PBT, the steps after which adapters are compared. Default: a tenth.", within=Range(1)
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            check(item.name, getattr(self, item.name), item.metadata)
