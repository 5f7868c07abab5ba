"""A driver's connection to a cluster: by an address, a cluster file, or Ray on this machine."""

from __future__ import annotations

import os
import re
import shlex
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wgpu_lora.cluster.cluster_file import ClusterFile, check_address, read_cluster_file
from wgpu_lora.cluster.launch import local_ray
from wgpu_lora.cluster.messages import NAMESPACE
from wgpu_lora.errors import UserError
from wgpu_lora.files.installation import pip_line

if TYPE_CHECKING:
    from wgpu_lora.cluster.checkpoint_store import HostStore

PROBE_SECONDS = 5.0
CLIENT_PORT = 10001
CALL_SECONDS = 60.0
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
_LOG = re.compile(r"^\[[0-9: ,-]+ [A-Z] \d+ \d+\] \S+ ")  # how Ray's lines begin


def check_ray() -> None:
    """Called before any module that imports Ray. Raises UserError if it is not installed."""
    if find_spec("ray") is None:
        raise UserError(f"Training on a cluster needs Ray, which is not installed: run {pip_line('cluster')}.")


@dataclass(frozen=True)
class Target:
    """A cluster, as a person names it. local: Ray of this user on this machine (`--local`)."""

    address: str | None = None
    file: ClusterFile | None = None
    local: bool = False

    def words(self) -> str:
        """The options that select it, for commands that a person copies."""
        if self.file:
            return f" -f {shlex.quote(str(self.file.path))}"
        if self.local:
            return " --local"
        return f" --address {shlex.quote(self.address)}" if self.address else ""


def target(address: str | None, path: Path | None, local: bool) -> Target:
    """The cluster that the options name; without any, that of RAY_ADDRESS, else Ray on this machine if it runs.

    Raises:
        UserError: they name none, or several, the file or the address is wrong, or Ray is not installed.
    """
    check_ray()
    options = [name for name, value in (("--address", address), ("-f", path), ("--local", local)) if value]
    if len(options) > 1:
        raise UserError(f"{' and '.join(options)} name different clusters: give one of them.")
    if path:
        file = read_cluster_file(path)
        return Target(file.address, file)
    if address or (not local and os.environ.get("RAY_ADDRESS")):
        name = "--address" if address else "RAY_ADDRESS"
        return Target(check_address(address or os.environ["RAY_ADDRESS"], name))
    if local or local_ray.running_ray():
        return Target(local=True)
    raise UserError(
        "No cluster is named: give --address or -f cluster.toml, or --local for the devices of this machine alone."
    )


class ClusterGone(UserError):
    """The cluster, or an actor of it, does not answer."""


class Cluster:
    """A driver's connection: calls of the controller and of hosts. This process has one connection at a time."""

    def __init__(self, address: str):
        """Join the cluster at an address.

        Raises:
            UserError: it refuses the token, has another version, or does not answer.
        """
        import ray

        try:
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level="FATAL")
        except Exception as error:  # of many kinds
            ray.shutdown()
            raise UserError(explain(str(error), address)) from None

    def controller(self, method: str, *arguments: Any, seconds: float = CALL_SECONDS) -> Any:
        """Call a method of the controller.

        Raises:
            ClusterGone: there is no answer. UserError: the request is refused.
        """
        from wgpu_lora.cluster.controller.run_controller import run_controller

        return _answer(run_controller, method, arguments, seconds)

    def host(self, node: str, method: str, *arguments: Any, seconds: float = CALL_SECONDS) -> Any:
        """Call a method of a node's host, as `controller`."""
        from wgpu_lora.cluster.actors.host_actor import host_actor

        return _answer(lambda: host_actor(node), method, arguments, seconds)

    def store(self, node: str, storage: str | None = None) -> HostStore:
        """The folder of a node's host, or the storage as that host reaches it."""
        from wgpu_lora.cluster.checkpoint_store import HostStore

        storage_arguments = [storage] if storage else []
        return HostStore(lambda method, *arguments: self.host(node, method, *arguments, *storage_arguments))

    def close(self) -> None:
        """End the connection; the cluster and its jobs go on."""
        import ray

        ray.shutdown()


def _answer(actor: Callable[[], Any], method: str, arguments: Sequence[Any], seconds: float) -> Any:
    import ray

    from wgpu_lora.cluster.checkpoint_store import DamagedCheckpoint

    try:
        return ray.get(getattr(actor(), method).remote(*arguments), timeout=seconds)
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, UserError | ConnectionError | DamagedCheckpoint):
            raise error.cause from None
        raise
    except (ray.exceptions.RayError, ConnectionError, ValueError, RuntimeError) as error:
        why = _last_line(str(error) or type(error).__name__)
        raise ClusterGone(f"The cluster does not answer ({why}): see whether its head is running.") from None


@contextmanager
def connected(where: Target) -> Iterator[Cluster]:
    """A connection to a cluster, which runs already.

    Raises:
        UserError: it cannot be reached, refuses the token, or has another version of Ray or Python.
    """
    with _endpoint(where) as (address, environment), _environment({**QUIET, **environment}):
        _probe(address)
        cluster = Cluster(address)
        try:
            yield cluster
        finally:
            cluster.close()


@contextmanager
def _environment(changes: Mapping[str, str | None]) -> Iterator[None]:
    """This process's environment, changed: Ray reads its settings and the token from it. None removes a variable."""
    before = {name: os.environ.get(name) for name in changes}
    _set_environment(changes)
    try:
        yield
    finally:
        _set_environment(before)


def _set_environment(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def _endpoint(where: Target) -> Iterator[tuple[str, Mapping[str, str | None]]]:
    """The address of a cluster, and the environment with its token; for one of `cluster up`, through an SSH tunnel."""
    if where.local:
        ray = local_ray.running_ray()
        if ray is None:
            raise UserError("Ray does not run on this machine: start a run with 'wgpu-lora cluster run --local'.")
        yield ray.address, ray.environment
    elif where.file and where.file.host:
        from wgpu_lora.cluster.launch.ssh import tunnel

        with tunnel(where.file) as (address, token):
            yield address, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    elif where.address:
        yield where.address, {}
    else:
        assert where.file
        raise UserError(f"{where.file.path} has neither an 'address' nor a [[host]]: add one.")


# What Ray's messages mean, by words in them.
MEANINGS = (
    (
        ("invalidauthtoken", "unauthenticated", "authentication token"),
        "The cluster at {address} refuses the token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to the file with "
        "that of the cluster.",
    ),
    (
        ("version mismatch", "versions differ", "minor versions"),
        "The cluster at {address} has another version of Ray or Python than this machine ({why}): install the same "
        "here.",
    ),
    (
        ("could not find any running ray instance",),
        "No Ray runs on this machine: give --address HOST:PORT, or --local to start one here.",
    ),
    (
        ("client connection timeout",),
        "{address} answers, but not as a Ray client server: check the port, which is usually {client_port}, and the "
        "token in RAY_AUTH_TOKEN_PATH.",
    ),
    (
        ("node_ip_address", "no node", "this node", "local raylet", "raylet on"),
        "This machine is no node of the cluster at {address}: give ray://{host}:{client_port}, or start Ray here with "
        "'ray start --address={address}'.",
    ),
    (("",), "The cluster at {address} cannot be joined ({why}): check the address and whether Ray runs there."),
)


def explain(message: str, address: str) -> str:
    """Ray's message about a connection that failed, as a sentence."""
    sentence = next(text for words, text in MEANINGS if any(word in message.casefold() for word in words))
    host = address.rpartition(":")[0]
    return sentence.format(address=address, host=host, client_port=CLIENT_PORT, why=_last_line(message))


def _last_line(message: str) -> str:
    """The last line, without what logs begin with."""
    lines = [" ".join(_LOG.sub("", line).split()) for line in message.splitlines() if line.strip()]
    return (lines[-1] if lines else "no reason given")[:200].rstrip(".: ")


def _probe(address: str) -> None:
    """Check that something listens at an address, since Ray retries for a minute. Raises UserError."""
    if address == "auto":
        return
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=PROBE_SECONDS):
            return
    except socket.gaierror:
        raise UserError(f"The host {host} of {address} is not known: check its name.") from None
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else (error.strerror or str(error)).lower()
        raise UserError(
            f"Nothing can be reached at {address} ({why}): check the address, and whether the cluster is up."
        ) from None
