"""A driver's connection to a cluster: by an address, a cluster file, or Ray on this machine."""

from __future__ import annotations

import os
import re
import shlex
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wgpu_lora.cluster import local_ray
from wgpu_lora.cluster.cluster_file import check_address
from wgpu_lora.cluster.messages import NAMESPACE
from wgpu_lora.errors import UserError

if TYPE_CHECKING:
    from wgpu_lora.cluster.checkpoint_store import HostStore
    from wgpu_lora.cluster.cluster_file import ClusterFile

AUTO, CLIENT = "auto", "ray://"
PROBE_SECONDS = 5.0
CLIENT_PORT = 10001
CALL_SECONDS = 60.0
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0"}
_LOG = re.compile(r"^\[[0-9: ,-]+ [A-Z] \d+ \d+\] \S+ ")  # how Ray's lines begin


@dataclass(frozen=True)
class Target:
    """A cluster, as a person names it: at most one of the three.

    Attributes:
        here: Ray of this user on this machine (`--local`).
    """

    address: str | None = None
    file: ClusterFile | None = None
    path: Path | None = None
    here: bool = False

    def words(self) -> str:
        """The options that name it again, for commands to be copied."""
        if self.path:
            return f" -f {shlex.quote(str(self.path))}"
        if self.here:
            return " --local"
        return f" --address {shlex.quote(self.address)}" if self.address else ""


@dataclass(frozen=True)
class Endpoint:
    """Where to connect to, and the environment of the program that does, with the token."""

    address: str
    environment: Mapping[str, str | None] = field(default_factory=dict)


def target(address: str | None, path: Path | None, here: bool) -> Target:
    """The cluster that the options name; without any, that of RAY_ADDRESS, else Ray on this machine if it runs.

    Raises:
        UserError: they name none, or several, or the file or the address is wrong.
    """
    from wgpu_lora.cluster.cluster_file import read_cluster_file

    given = [name for name, one in (("--address", address), ("-f", path), ("--local", here)) if one]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} name different clusters: give one of them.")
    if here:
        return Target(here=True)
    if path:
        file = read_cluster_file(path)
        return Target(file.address, file, path)
    if address:
        return Target(check_address(address, "--address"))
    named = os.environ.get("RAY_ADDRESS")
    if named:
        return Target(check_address(named, "RAY_ADDRESS"))
    if local_ray.running_ray():
        return Target(here=True)
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
            raise UserError(explained(str(error), address)) from None

    def controller(self, method: str, *arguments: Any, seconds: float = CALL_SECONDS) -> Any:
        """Call a method of the controller.

        Raises:
            ClusterGone: there is no answer. UserError: the request is refused.
        """
        from wgpu_lora.cluster.run_controller import run_controller

        return _answer(run_controller, method, arguments, seconds)

    def host(self, node: str, method: str, *arguments: Any, seconds: float = CALL_SECONDS) -> Any:
        """Call a method of a node's host, as `controller`."""
        from wgpu_lora.cluster.host_actor import host_actor

        return _answer(lambda: host_actor(node), method, arguments, seconds)

    def store(self, node: str, storage: str | None = None) -> HostStore:
        """The folder of a node's host, or the storage as that host reaches it."""
        from wgpu_lora.cluster.checkpoint_store import HostStore

        more = [storage] if storage else []
        return HostStore(lambda method, *arguments: self.host(node, method, *arguments, *more))

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
def connected(what: Target) -> Iterator[Cluster]:
    """A connection to a cluster, which runs already.

    Raises:
        UserError: it cannot be reached, refuses the token, or has another version of Ray or Python.
    """
    with endpoint(what) as end, _environment({**QUIET, **end.environment}):
        _probe(end.address)
        cluster = Cluster(end.address)
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
def endpoint(what: Target) -> Iterator[Endpoint]:
    """Where a cluster is; for one of `cluster up`, through an SSH tunnel while the block runs. Raises UserError."""
    if what.here:
        running = local_ray.running_ray()
        if running is None:
            raise UserError("Ray does not run on this machine: start a run with 'wgpu-lora cluster run --local'.")
        yield Endpoint(running.address, running.environment)
    elif what.file and what.file.host:
        from wgpu_lora.cluster.ssh import tunnel

        with tunnel(what.file) as (address, token):
            yield Endpoint(address, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token})
    elif what.address:
        yield Endpoint(what.address)
    else:
        raise UserError(f"{what.path} has neither an 'address' nor a [[host]]: add one.")


def explained(said: str, address: str) -> str:
    """What Ray said about a connection that failed, as a sentence."""
    text = said.casefold()
    if "invalidauthtoken" in text or "unauthenticated" in text or "authentication token" in text:
        return (
            f"The cluster at {address} refuses the token: set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to the file "
            "with that of the cluster."
        )
    if "version mismatch" in text or "versions differ" in text or "minor versions" in text:
        return (
            f"The cluster at {address} has another version of Ray or Python than this machine ({_last_line(said)}): "
            "install the same here."
        )
    if "could not find any running ray instance" in text:
        return "No Ray runs on this machine: give --address HOST:PORT, or --local to start one here."
    if "client connection timeout" in text:
        return (
            f"{address} answers, but not as a Ray client server: check the port, which is usually {CLIENT_PORT}, and "
            "the token in RAY_AUTH_TOKEN_PATH."
        )
    if any(words in text for words in ("node_ip_address", "no node", "this node", "local raylet", "raylet on")):
        host = address.rpartition(":")[0]
        return (
            f"This machine is no node of the cluster at {address}: give {CLIENT}{host}:{CLIENT_PORT}, or start Ray "
            f"here with 'ray start --address={address}'."
        )
    return (
        f"The cluster at {address} cannot be joined ({_last_line(said)}): check the address and whether Ray runs there."
    )


def _last_line(said: str) -> str:
    """The last line, without what logs begin with."""
    lines = [" ".join(_LOG.sub("", line).split()) for line in said.splitlines() if line.strip()]
    return (lines[-1] if lines else "no reason given")[:200].rstrip(".: ")


def _probe(address: str) -> None:
    """Whether anything listens there, since Ray tries for a minute. Raises UserError."""
    if address == AUTO:
        return
    host, _, port = address.removeprefix(CLIENT).rpartition(":")
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
