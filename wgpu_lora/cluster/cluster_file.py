"""cluster.toml: the machines of a cluster, and how a run uses it."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from wgpu_lora.errors import UserError
from wgpu_lora.json_files import read_toml
from wgpu_lora.names.aliases import nearest
from wgpu_lora.names.spelling import IN_FILE, flag, naming, setting
from wgpu_lora.text import join_words
from wgpu_lora.train.option_types import NOT_NEGATIVE, Range, check, option
from wgpu_lora.typed_json import read_as

LONGEST = 64
_NAME = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{LONGEST - 1}}}")


def is_safe(text: str) -> bool:
    """Whether a text can be a name: it is a plain part of a path on every system, and never an option."""
    return bool(_NAME.fullmatch(text))


def checked_name(text: str, what: str) -> str:
    """The text, if it can be a name; `what` begins the error, such as `The run's name`.

    Raises:
        UserError: it cannot.
    """
    if not is_safe(text):
        raise UserError(
            f"{what} is {text!a:.80}, but must be up to {LONGEST} letters, digits, '.', '_' and '-', of which the "
            "first is a letter or a digit."
        )
    return text


def safe_name(text: str) -> str:
    """A name as near to a text as possible."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", text).lstrip("._-")[:LONGEST].rstrip("._-") or "adapter"


def told_apart(names: Sequence[str], fixed: Collection[str] = ()) -> list[str]:
    """The names, numbered where they are alike but for their case, or like a fixed one.

    Some file systems do not tell names apart by their case.
    """
    found: list[str] = []
    seen = {name.casefold() for name in fixed}
    taken = seen | {name.casefold() for name in names}
    for name in names:
        one, number = name, 1
        while one.casefold() in seen or (number > 1 and one.casefold() in taken):
            number += 1
            one = f"{name[: LONGEST - 1 - len(str(number))]}-{number}"
        seen.add(one.casefold())
        found.append(one)
    return found


T = TypeVar("T")


def check_keys(values: Mapping[str, Any], known: Collection[str], where: str) -> None:
    """Raise UserError for a key that is not known, with the nearest one; `where` begins the message."""
    for key in values:
        if key not in known:
            with naming(IN_FILE):
                meant = nearest(key.replace("-", "_"), known)
            text = f"did you mean {meant}?" if meant else f"choose among {join_words([*known])}."
            raise UserError(f"{where} has an unknown key {key!a:.60}: {text}")


def table_of(kind: type[T], values: Any, where: str) -> T:
    """A table as a dataclass, which checks its own values; `where` begins error messages.

    Raises:
        UserError: a key is unknown or missing, or a value has another type or is not allowed.
    """
    with in_file(where):
        return read_as(kind, values, where)


@contextmanager
def in_file(where: str) -> Iterator[None]:
    """Errors of the block begin with `where`, and spell options as a file has them."""
    try:
        with naming(IN_FILE):
            yield
    except UserError as error:
        text = str(error)
        raise UserError(text if text.startswith(where) else f"{where}: {text}") from None


_HOST = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,251}[A-Za-z0-9])?")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9._-]{0,31}")
_PROGRAM = re.compile(r"~?[A-Za-z0-9_./+-]{1,255}")
_LABEL = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._/-]{0,61}[A-Za-z0-9])?")
MOST_LABELS = 32


@dataclass(frozen=True)
class HostSpec:
    """A host that Ray's launcher reaches by SSH. The first of a cluster is its head.

    Attributes:
        host: its name or address for SSH.
        address: of its private interface, by which the others reach it; by default what `host` resolves to.
        user, ssh_key: for SSH; by default what ~/.ssh/config says.
        python: the interpreter in whose environment wgpu-lora is installed there.
        labels: of its node in Ray.
        data: where it has what the others have at `[data] root`.
    """

    host: str
    address: str | None = None
    user: str | None = None
    ssh_key: str | None = None
    python: str = "python3"
    labels: dict[str, str] = field(default_factory=dict)
    data: str | None = None

    def __post_init__(self) -> None:
        if not (_HOST.fullmatch(self.host) or _is_address(self.host)):
            raise UserError(f"'host' must be the name or address of a host, not {self.host!a:.80}.")
        if self.address is not None and not _is_address(self.address):
            raise UserError(
                f"'address' must be the IP address of an interface of {self.host}, such as 10.0.0.2, not "
                f"{self.address!a:.80}."
            )
        check_user(self.user)
        check_key(self.ssh_key)
        check_python(self.python)
        if len(self.labels) > MOST_LABELS:
            raise UserError(f"'labels' has {len(self.labels):,} entries: use at most {MOST_LABELS}.")
        for key, value in self.labels.items():
            if not (_LABEL.fullmatch(key) and _LABEL.fullmatch(value)) or key.startswith("ray.io/"):
                raise UserError(
                    f"'labels' has {key!a:.70} = {value!a:.70}, but both must be up to 63 letters, digits, '.', '_', "
                    "'/' and '-', and names that begin with ray.io/ are Ray's."
                )
        if self.data is not None:
            check_folder("data", self.data)

    @property
    def key(self) -> Path | None:
        """The file of the SSH key."""
        return Path(self.ssh_key).expanduser().absolute() if self.ssh_key else None


def check_user(user: str | None) -> None:
    """Raise UserError unless a text is the name of a user."""
    if user is not None and not _USER.fullmatch(user):
        raise UserError(f"'user' must be the name of a user on the host, not {user!a:.80}.")


def check_key(path: str | None) -> None:
    """Raise UserError unless a text can be the path of a key; whether it exists is for who uses it."""
    if path is not None and (not path.strip() or not path.isprintable() or path.startswith("-") or len(path) > 1024):
        raise UserError(f"'ssh_key' must be the path of a private key on this machine, not {path!a:.80}.")


def check_python(path: str) -> None:
    """Raise UserError unless a text is a program's name or path without anything that a shell would read."""
    if not _PROGRAM.fullmatch(path) or path.startswith("-"):
        raise UserError(
            f"'python' must be the path of an interpreter on the host, without spaces, such as "
            f"~/venv/bin/python, not {path!a:.80}."
        )


def check_folder(name: str, path: str) -> None:
    """Raise UserError unless an option is the absolute path of a folder on the machines of a cluster."""
    plain = path.isprintable() and len(path.encode()) <= 1024
    if not plain or not path.startswith("/") or ".." in path.split("/"):
        raise UserError(f"'{name}' must be the absolute path of a folder, such as /mnt/lab, not {path!a:.80}.")


def _is_address(text: str) -> bool:
    """Whether a text is an IP address that a machine can have."""
    try:
        found = ipaddress.ip_address(text)
    except ValueError:
        return False
    return "%" not in text and not (found.is_unspecified or found.is_multicast)


def check_apart(hosts: tuple[HostSpec, ...]) -> None:
    """Raise UserError if two entries are the same host."""
    seen: dict[str, int] = {}
    for number, one in enumerate(hosts, 1):
        for name in {one.host.casefold(), *([one.address] if one.address else [])}:
            if name in seen:
                raise UserError(f"hosts {seen[name]} and {number} are both {name}: leave one of them out.")
            seen[name] = number


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
        "Device that measures held-out losses and makes caches of teachers while others train: its key or part of its "
        "name, as 'cluster status' shows it.",
    )
    send_data: bool = option(
        False, CLUSTER, "Send data that only this machine has to the others, instead of refusing them."
    )

    def __post_init__(self) -> None:
        for item in fields(self):
            check(item.name, getattr(self, item.name), item.metadata)
        if self.name is not None and not is_safe(self.name):
            raise UserError(
                f"{flag('name')} must be up to 64 letters, digits, '.', '_' and '-', the first of them a letter or a "
                f"digit, not {self.name!a:.80}."
            )
        if self.shared is not None:
            plain = self.shared.isprintable() and len(self.shared.encode()) <= 1024
            if not plain or not self.shared.startswith("/") or ".." in self.shared.split("/"):
                raise UserError(
                    f"{flag('shared')} must be the absolute path of a folder that all machines have, such as "
                    f"/mnt/lab/results, not {self.shared!a:.80}."
                )
        if self.storage is not None and not (
            self.storage.isprintable() and re.match(r"/|[a-z][a-z0-9+]*://", self.storage)
        ):
            raise UserError(
                f"{flag('storage')} must be the absolute path of a folder that all machines have, or a URL such as "
                f"s3://bucket/runs, not {self.storage!a:.80}."
            )
        if self.eval_device is not None and not (self.eval_device.strip() and self.eval_device.isprintable()):
            raise UserError(f"{flag('eval_device')} must be a device's key or part of its name.")
        if self.data_parallel > 1 and self.join == "always":
            raise UserError(
                f"{setting('join', 'always')} and {setting('data_parallel', self.data_parallel)} cannot be combined: "
                "an adapter is trained with others on one device, or alone on several."
            )


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
        """The host that Ray's head and our controller run on.

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
    for name, checks in (("user", check_user), ("ssh_key", check_key), ("python", check_python)):
        given = of_all.get(name)
        if name in of_all and not isinstance(given, str):
            raise UserError(f"{where}: '{name}' must be text, not {given!a:.60}.")
        if isinstance(given, str):
            with in_file(where):
                checks(given)
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


# -- sweeps ------------------------------------------------------------------------------------------------------------

SWEEP = "Sweep"  # heading of its options in help
METRICS, SCHEDULERS = ("eval_loss", "loss"), ("none", "asha", "pbt")
MAX_TRIALS = 10_000


@dataclass(frozen=True)
class SweepOptions:
    """The options of `cluster sweep`, declared as those of training are.

    grace_period, perturbation_interval: None for a tenth of the shortest task's steps.
    """

    max_trials: int | None = option(
        None, SWEEP, "Draw so many of the combinations, by --seed. Default: all.", within=Range(1, at_most=MAX_TRIALS)
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
