"""From what a person says to a cluster that answers: an address, a cluster file, or Ray on this machine."""

from __future__ import annotations

import os
import re
import shlex
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from wgpu_lora.cluster.client import local
from wgpu_lora.cluster.client.bridge import Bridge, NotConnected
from wgpu_lora.cluster.spec.file import check_address
from wgpu_lora.errors import UserError

if TYPE_CHECKING:
    from wgpu_lora.cluster.spec.file import ClusterFile

AUTO, CLIENT = "auto", "ray://"
PROBE_SECONDS = 5.0
CLIENT_PORT = 10001
ATTEMPTS, SERVER_FAILED = 3, "Starting Ray client server failed"
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
    from wgpu_lora.cluster.spec.file import read_cluster_file

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
    if local.found():
        return Target(here=True)
    raise UserError(
        "No cluster is named: give --address or -f cluster.toml, or --local for the devices of this machine alone."
    )


@contextmanager
def connected(what: Target) -> Iterator[Bridge]:
    """A connection to a cluster, which runs already.

    Raises:
        UserError: it cannot be reached, refuses the token, or has another version of Ray or Python.
    """
    with endpoint(what) as end:
        _probe(end.address)
        bridge = _joined(end)
        try:
            yield bridge
        finally:
            bridge.close()


def _joined(end: Endpoint) -> Bridge:
    """A connection; tried again where Ray's client server has failed to start, which it does now and then."""
    for attempt in range(ATTEMPTS):
        bridge = Bridge(end.environment)
        try:
            bridge.connect(end.address)
            return bridge
        except NotConnected as error:
            bridge.close()
            if attempt + 1 < ATTEMPTS and SERVER_FAILED in str(error):
                continue
            raise UserError(explained(str(error), end.address)) from None
        except BaseException:
            bridge.close()
            raise
    raise AssertionError("the last attempt returns or raises")


@contextmanager
def endpoint(what: Target) -> Iterator[Endpoint]:
    """Where a cluster is; for one of `cluster up`, through an SSH tunnel while the block runs. Raises UserError."""
    if what.here:
        running = local.found()
        if running is None:
            raise UserError("Ray does not run on this machine: start a run with 'wgpu-lora cluster run --local'.")
        yield Endpoint(running.address, running.environment)
    elif what.file and what.file.hosts:
        from wgpu_lora.cluster.launcher.token import authentication
        from wgpu_lora.cluster.launcher.tunnel import tunnel

        with tunnel(what.file) as address:
            yield Endpoint(address, authentication(what.file))
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
            f"The cluster at {address} has another version of Ray or Python than this machine ({_why(said)}): install "
            "the same here."
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
    return f"The cluster at {address} cannot be joined ({_why(said)}): check the address and whether Ray runs there."


def _why(said: str) -> str:
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
