"""Ray of this user on this machine: started for --local, shared by programs, ended with its own processes only."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import ReadWriteLock, Timeout
from platformdirs import user_state_dir

from wgpu_lora.cluster.launch import node_processes
from wgpu_lora.errors import UserError, reason
from wgpu_lora.files.atomic import write_bytes_atomic
from wgpu_lora.files.locks import lock_file
from wgpu_lora.processes.child_process import python
from wgpu_lora.processes.signals import end_signal_delayed

DIRECTORY = "WGPU_LORA_CLUSTER_LOCAL_DIR"  # where its state is, instead of the user's state directory
RECORD, LOCK, USERS = "local", "local.lock", "users.lock"  # in that directory
PREFIX, TOKEN = "wgl-", "token"
START_SECONDS, LOCK_SECONDS = 300.0, 330.0  # a busy machine takes more than two minutes
ATTEMPTS, SLOW = 3, "timed out during startup"  # after 30 s for the second of its processes, which cannot be changed
HERE = "127.0.0.1"
ALONE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0": Ray is for this machine only, and takes HERE for its address
TOKEN_BYTES = 32
STORE_BYTES = 200_000_000  # Ray's object store: calls take small values only


@dataclass(frozen=True)
class LocalRay:
    """A Ray of this machine. directory: its directory, with Ray's files and the token."""

    directory: Path

    @property
    def address(self) -> str:
        """HOST:PORT of its GCS, as Ray has written it; '' while it starts."""
        with suppress(OSError, ValueError):  # a record may be damaged
            return (self.directory / "ray" / "ray_current_cluster").read_text().strip()
        return ""

    @property
    def environment(self) -> dict[str, str | None]:
        """What a program needs to join it, as `node_processes.environment` takes it."""
        token = {"RAY_AUTH_TOKEN": None, "RAY_AUTH_TOKEN_PATH": str(self.directory / TOKEN)}
        return {"RAY_AUTH_MODE": "token", **token, ALONE: "0"}

    @property
    def mark(self) -> str:
        """In the environment of all its processes; a name that no cluster file can give."""
        return f"local:{self.directory.name}"

    def alive(self) -> bool:
        """Whether it has started, and has a process."""
        return bool(self.address) and node_processes.start_id(self.mark) is not None

    def end(self) -> None:
        """End all of its processes, the jobs among them, and remove its files; a signal meanwhile acts afterwards."""
        with end_signal_delayed():
            node_processes.end(self.mark)
            shutil.rmtree(self.directory, ignore_errors=True)


def state_directory() -> Path:
    """Where this user's local Ray is recorded: WGPU_LORA_CLUSTER_LOCAL_DIR, else in the user's state directory."""
    directory = os.environ.get(DIRECTORY)
    return Path(directory) if directory else Path(user_state_dir("wgpu-lora")) / "cluster"


def running_ray() -> LocalRay | None:
    """The local Ray that is running; what a killed one has left is removed.

    Raises:
        UserError: the state directory cannot be used.
    """
    with _locked() as directory:
        return _live_ray(directory)


def start_ray(resources: Callable[[], Mapping[str, float]], *, dashboard: bool = False) -> tuple[LocalRay, bool]:
    """The local Ray, and whether it was started now.

    Args:
        resources: by Ray's names, if it is to be started.

    Raises:
        UserError: Ray does not start.
    """
    with _locked() as directory:
        if ray := _live_ray(directory):
            return ray, False
        return _start(directory / RECORD, resources(), dashboard), True


def end_local(may: Callable[[], bool] = lambda: True) -> LocalRay | None:
    """End the local Ray with its jobs; None if there is none.

    Args:
        may: called first, while no program can begin to use it; None is returned if it returns False.

    Raises:
        UserError: the state directory cannot be used.
    """
    with _locked() as directory:
        ray = _live_ray(directory)
        if ray is None or not may():
            return None
        ray.end()
        (directory / RECORD).unlink(missing_ok=True)
        return ray


@contextmanager
def using() -> Iterator[None]:
    """Count this program among those that use the local Ray, also before it runs. Raises UserError."""
    with _locked() as directory:
        users = ReadWriteLock(str(directory / USERS))
        users.acquire_read()
    try:
        yield
    finally:
        users.release()


def end_unused(over: Callable[[], bool]) -> None:
    """End the local Ray if no other program is `using` it, as this one is, and `over` says so.

    Raises:
        UserError: the state directory cannot be used.
    """
    end_local(lambda: _is_alone() and over())


def _is_alone() -> bool:
    users = ReadWriteLock(str(state_directory() / USERS))
    users.release()
    try:
        users.acquire_write(timeout=0)
        users.release()
        return True
    except Timeout:
        return False
    finally:
        users.acquire_read()


def _live_ray(directory: Path) -> LocalRay | None:
    record = directory / RECORD
    if not record.exists():
        return None
    ray = LocalRay(Path(record.read_text(errors="replace").strip()))
    if ray.alive():
        return ray
    # Only what was made here is removed.
    if ray.directory.name.startswith(PREFIX) and (ray.directory / TOKEN).is_file() and not ray.directory.is_symlink():
        ray.end()
    record.unlink(missing_ok=True)
    return None


def _start(record: Path, resources: Mapping[str, float], dashboard: bool, attempts: int = ATTEMPTS) -> LocalRay:
    # Paths of sockets have at most 107 characters: the usual temporary directory of macOS is too long for Ray.
    ray = LocalRay(Path(tempfile.mkdtemp(prefix=PREFIX, dir="/tmp" if os.name != "nt" else None)))
    try:
        with os.fdopen(os.open(ray.directory / TOKEN, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(TOKEN_BYTES))
        write_bytes_atomic(
            record, str(ray.directory).encode()
        )  # if this program is killed, the next one ends what it began
        with socket.socket() as probe:
            probe.bind((HERE, 0))
            client_port = probe.getsockname()[1]
        command = [
            *python("-m", "ray.scripts.scripts", "start", "--head", "--port=0"),
            *(f"--temp-dir={ray.directory / 'ray'}", f"--resources={json.dumps(dict(resources))}"),
            *(f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats"),
            *(f"--ray-client-server-port={client_port}", "--dashboard-agent-listen-port=0"),
            f"--include-dashboard={str(dashboard).lower()}",
            *(("--dashboard-host=127.0.0.1", "--dashboard-port=0") if dashboard else ()),
        ]
        changes = {**ray.environment, **node_processes.SETTINGS, node_processes.MARK: f"{ray.mark}/1"}
        output = _run(
            command, node_processes.environment({**changes, "RAY_ADDRESS": None}), ray.directory / "start.log"
        )
        if ray.address:
            return ray
        lines = [line.strip() for line in output.splitlines() if line.strip()] or ["no reason given"]
        if attempts == 1 or SLOW not in output:
            raise UserError(f"Ray does not start on this machine ({lines[-1][:200]}): mend that.")
    except BaseException:
        ray.end()
        record.unlink(missing_ok=True)
        raise
    ray.end()
    return _start(record, resources, dashboard, attempts - 1)


def _run(command: list[str], environment: dict[str, str], log: Path) -> str:
    """Ray's command, in a session of its own, so that a Ctrl-C or the end of this terminal does not reach Ray."""
    popen_options: dict[str, Any] = {"start_new_session": True}
    if os.name == "nt":
        popen_options = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}  # type: ignore[attr-defined,unused-ignore]
    with log.open("wb") as out:
        # To a file, since the processes that it leaves behind keep its output open.
        popen_options |= {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}
        try:
            subprocess.run(command, env=environment, timeout=START_SECONDS, check=False, **popen_options)
        except subprocess.TimeoutExpired:
            raise UserError(
                f"Ray has not started in {START_SECONDS:.0f} s on this machine: end other programs, or try again."
            ) from None
    return log.read_text(errors="replace")


@contextmanager
def _locked() -> Iterator[Path]:
    """The state directory, which no other program changes meanwhile. Raises UserError if it cannot be used."""
    directory = state_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = lock_file(directory / LOCK, LOCK_SECONDS).lock
    except Timeout:
        raise UserError(f"Another program has been starting Ray for long ({directory}): try again later.") from None
    except OSError as error:
        raise UserError(
            f"{directory} cannot be used ({reason(error)}): fix that, or set {DIRECTORY} to another directory."
        ) from None
    try:
        yield directory
    finally:
        lock.release()
