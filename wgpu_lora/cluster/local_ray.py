"""Ray of this user on this machine: started for --local, shared by programs, ended with its own processes only."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from filelock import Timeout
from platformdirs import user_state_dir

from wgpu_lora.atomic import write_bytes_atomic
from wgpu_lora.cluster import node_processes
from wgpu_lora.errors import UserError, reason
from wgpu_lora.json_files import read_json, to_json
from wgpu_lora.locks import lock_file
from wgpu_lora.process_identity import boot_id, process_start
from wgpu_lora.signals import end_signal_delayed
from wgpu_lora.typed_json import typed

SCHEMA = 1
DIRECTORY = "WGPU_LORA_CLUSTER_LOCAL_DIR"  # where its state is, instead of the user's state directory
JOINED = "joined"  # a file in its directory
START_SECONDS, LOCK_SECONDS = 120.0, 150.0
ATTEMPTS, SLOW = 3, "timed out during startup"
CONNECT = 2.0  # seconds
HERE = "127.0.0.1"
ALONE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # "0": Ray is for this machine only, and takes HERE for its address
TOKEN_BYTES = 32
STORE_BYTES = 200_000_000  # Ray's object store: calls take small values only


@dataclass(frozen=True)
class Local:
    """A running Ray of this machine.

    Attributes:
        address: HOST:PORT of its GCS; '' while it starts. place: its directory, with Ray's files and the token.
        boot: of which start of the machine it is, as `process_identity` names that: the clock may be set meanwhile.
    """

    address: str
    place: str
    boot: str
    schema: int = SCHEMA

    @property
    def environment(self) -> dict[str, str | None]:
        """What a program needs to join it, as `node_processes.environment` takes it."""
        token = {"RAY_AUTH_TOKEN": None, "RAY_AUTH_TOKEN_PATH": str(Path(self.place) / "token")}
        return {"RAY_AUTH_MODE": "token", **token, ALONE: "0"}

    @property
    def mark(self) -> str:
        """In the environment of all its processes; a name that no cluster file can give."""
        return f"local:{Path(self.place).name}"

    @property
    def shared(self) -> bool:
        """Whether other programs than the one that started it have used it for runs."""
        return Path(self.place, JOINED).exists()

    def alive(self) -> bool:
        """Whether its Ray has started, and has a process."""
        return bool(self.address) and self.boot == boot_id() and node_processes.running(self.mark) is not None

    def end(self) -> None:
        """End all of its processes, the jobs among them, and remove its files; a signal meanwhile acts afterwards."""
        with end_signal_delayed():
            node_processes.end(self.mark)
            shutil.rmtree(self.place, ignore_errors=True)


def state_directory() -> Path:
    """Where this user's local Ray is recorded: WGPU_LORA_CLUSTER_LOCAL_DIR, else in the user's state directory."""
    named = os.environ.get(DIRECTORY)
    return Path(named) if named else Path(user_state_dir("wgpu-lora")) / "cluster"


def running_ray() -> Local | None:
    """The local Ray that is running; what a killed one or an earlier start of the machine left is removed.

    Raises:
        UserError: the state directory cannot be used.
    """
    with locked():
        return _running()


def start_ray(resources: Callable[[], Mapping[str, float]], *, dashboard: bool = False) -> tuple[Local, bool]:
    """The local Ray, and whether it was started now.

    Args:
        resources: by Ray's names, if it is to be started.

    Raises:
        UserError: Ray does not start.
    """
    with locked():
        if running := _running():
            Path(running.place, JOINED).touch()
            return running, False
        local = _start_patiently(resources(), dashboard)
        _record(local)
        return local, True


def end_local(may: Callable[[], bool] = lambda: True) -> Local | None:
    """End the local Ray with its jobs; None if there is none.

    Args:
        may: asked first, while no program can begin to use it; None is returned if it says no.

    Raises:
        UserError: the state directory cannot be used.
    """
    with locked():
        running = _running()
        if running is None or not may():
            return None
        running.end()
        _file().unlink(missing_ok=True)
        return running


def _record(local: Local) -> None:
    write_bytes_atomic(_file(), to_json(asdict(local)).encode())


def _running() -> Local | None:
    file = _file()
    if not file.exists():
        return None
    try:
        local: Local = typed(Local, read_json(file), "Local")
    except (UserError, ValueError):  # damaged: what it spoke of cannot be known
        file.unlink(missing_ok=True)
        return None
    if local.alive() and _answers(local):
        return local
    if _ours(Path(local.place)):
        local.end()
    file.unlink(missing_ok=True)
    return None


def _ours(place: Path) -> bool:
    """Whether a directory was made here, before it is removed."""
    return place.name.startswith("wgl-") and (place / "token").is_file() and not place.is_symlink()


class _Slow(UserError):
    """Ray has given up after its own limit, which cannot be changed: 30 s for the second of its processes."""


def _start_patiently(resources: Mapping[str, float], dashboard: bool) -> Local:
    """Try again on a busy machine. Raises UserError."""
    for _ in range(ATTEMPTS - 1):
        with suppress(_Slow):
            return _start(resources, dashboard)
    return _start(resources, dashboard)


def _start(resources: Mapping[str, float], dashboard: bool) -> Local:
    # Paths of sockets have at most 107 characters: the usual temporary directory of macOS is too long for Ray.
    place = Path(tempfile.mkdtemp(prefix="wgl-", dir="/tmp" if os.name != "nt" else None))
    try:
        token = place / "token"
        with os.fdopen(os.open(token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(TOKEN_BYTES))
        local = Local("", str(place), boot_id())
        _record(local)  # if this program is killed, the next one ends what it has begun
        port = _free_port()
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--port={port}"),
            *(f"--temp-dir={place / 'ray'}", f"--resources={json.dumps(dict(resources))}"),
            *(
                f"--object-store-memory={STORE_BYTES}",
                "--disable-usage-stats",
                f"--ray-client-server-port={_free_port()}",
            ),
            *("--dashboard-agent-listen-port=0", f"--include-dashboard={str(dashboard).lower()}"),
            *(("--dashboard-host=127.0.0.1", "--dashboard-port=0") if dashboard else ()),
        ]
        own = {node_processes.MARK: f"{local.mark}/1"}
        changes = {**local.environment, **node_processes.SETTINGS, **own, "RAY_ADDRESS": None}
        output = _run(command, node_processes.environment(changes), place)
        return Local(_address(place, port, output), str(place), local.boot)
    except BaseException:
        Local("", str(place), "").end()
        _file().unlink(missing_ok=True)
        raise


def _run(command: list[str], environment: dict[str, str], place: Path) -> str:
    """Ray's command, in a session of its own, so that a Ctrl-C or the end of this terminal does not reach Ray."""
    apart: dict[str, Any] = {"start_new_session": True}
    if os.name == "nt":
        apart = {"creationflags": subprocess.CREATE_NEW_PROCESS_GROUP}  # type: ignore[attr-defined,unused-ignore]
    log = place / "start.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, **apart
        )
        try:
            code = process.wait(START_SECONDS)
        except subprocess.TimeoutExpired:
            raise UserError(
                f"Ray has not started in {START_SECONDS:.0f} s on this machine: end other programs, or try again."
            ) from None
    output = log.read_text(errors="replace")
    if code != 0:
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        kind = _Slow if SLOW in output else UserError
        raise kind(f"Ray does not start on this machine ({(lines or ['no reason given'])[-1][:200]}): mend that.")
    return output


def _address(place: Path, port: int, output: str) -> str:
    """Where it listens, as Ray says it."""
    with suppress(OSError):
        text = (place / "ray" / "ray_current_cluster").read_text().strip()
        if text.endswith(f":{port}"):
            return text
    raise UserError(f"Ray has not output where it listens ({output[-200:]!a}): try again.")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        return int(probe.getsockname()[1])


def _answers(local: Local) -> bool:
    host, _, port = local.address.rpartition(":")
    end = time.monotonic() + 10  # a stopped machine that goes on needs a moment
    while time.monotonic() < end:
        with suppress(OSError, ValueError), socket.create_connection((host, int(port)), timeout=CONNECT):
            return True
        if not local.alive():
            return False
        time.sleep(0.5)
    return False


def _file() -> Path:
    return state_directory() / "local.json"


@contextlib.contextmanager
def locked() -> Iterator[Path]:
    """The state directory, which no other program changes meanwhile. Raises UserError if it cannot be used."""
    directory = state_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = lock_file(directory / "local.lock", LOCK_SECONDS).lock
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


_NUMBERS = itertools.count()


@contextmanager
def using() -> Iterator[None]:
    """Count this program among those that use the local Ray, also before it runs. Raises UserError."""
    with locked() as directory:
        mine = _users(directory) / f"{os.getpid()}-{process_start(os.getpid())}-{next(_NUMBERS)}"
        mine.parent.mkdir(exist_ok=True)
        mine.touch()
    try:
        yield
    finally:
        mine.unlink(missing_ok=True)


def end_unused(over: Callable[[], bool]) -> None:
    """End the local Ray if no other program uses it, and `over`, asked while none can begin to, says so.

    Raises:
        UserError: the state directory cannot be used.
    """
    end_local(lambda: not _others(state_directory()) and over())


def _others(directory: Path) -> bool:
    """Whether another program uses it; what killed ones have left is removed."""
    found = False
    for file in _users(directory).iterdir() if _users(directory).is_dir() else ():
        pid, _, rest = file.name.partition("-")
        started = rest.partition("-")[0]
        if not pid.isdecimal() or str(process_start(int(pid))) != started:
            file.unlink(missing_ok=True)
        elif int(pid) != os.getpid():
            found = True
    return found


def _users(directory: Path) -> Path:
    return directory / "users"
