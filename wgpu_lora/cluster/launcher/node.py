"""What the launcher runs on a host, `python -m wgpu_lora.cluster.launcher.node COMMAND FOLDER`.

Each prints one line of JSON last: what was asked for, or `refused` with a sentence.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from wgpu_lora.cluster.launcher import processes
from wgpu_lora.cluster.messages import to_plain
from wgpu_lora.errors import UserError

PATHS = "WGPU_LORA_CLUSTER_PATHS"
START_SECONDS, PROBE_SECONDS, CONNECT_SECONDS = 150.0, 60.0, 5.0
TRIES = 2
FILES = 65536  # that a process may have open


def check(folder: Path) -> dict[str, Any]:
    """Before anything is started: versions, addresses, and whether a node of this cluster runs."""
    from wgpu_lora.cluster.node_versions import own_versions

    return {
        "versions": to_plain(own_versions()),
        "addresses": processes.addresses(),
        "rsync": shutil.which("rsync") is not None,
        "running": processes.running(_name(folder)),
    }


def start(folder: Path) -> dict[str, Any]:
    """Starts Ray as the folder's node.json says.

    Raises:
        UserError: it does not start.
    """
    node = json.loads((folder / "node.json").read_text(encoding="utf-8"))
    if left := processes.end(node["cluster"]):  # of a node that died
        raise UserError(f"{node['host']} still runs processes of {node['cluster']} that cannot be ended: {left[0]}.")
    ports, head = node["ports"], (node["head_address"], node["ports"]["gcs"])
    if not node["head"]:
        _reach(*head)
    given = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token"), **processes.SETTINGS,
             processes.MARK: f"{node['cluster']}/{node['id']}", PATHS: json.dumps(node["paths"])}  # fmt: skip
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | given
    of_head = ["--head", f"--port={ports['gcs']}", f"--ray-client-server-port={ports['ray-client-server']}",
               "--dashboard-host=127.0.0.1", f"--dashboard-port={ports['dashboard']}"]  # fmt: skip
    argv = [sys.executable, "-P", "-m", "ray.scripts.scripts", "start"]
    argv += of_head if node["head"] else [f"--address={head[0]}:{head[1]}"]
    argv += [f"--node-ip-address={node['address']}", f"--temp-dir={_temporary(node['id'])}", "--disable-usage-stats"]
    argv += [f"--resources={json.dumps(_resources(environment))}", "--log-style=record"]
    if node["labels"]:
        argv += ["--labels", ",".join(f"{name}={value}" for name, value in node["labels"].items())]
    argv += [f"--{name}-port={ports[name]}" for name in ("node-manager", "object-manager", "runtime-env-agent",
             "dashboard-agent-grpc", "metrics-export")]  # fmt: skip
    argv += [f"--dashboard-agent-listen-port={ports['dashboard-agent-listen']}"]
    _allow_files()
    for _ in range(TRIES):  # on a busy host, Ray's processes may miss Ray's own time limits
        done = _run(argv, environment, START_SECONDS)
        if not done.returncode and processes.running(node["cluster"]):
            return {"running": node["id"]}
        processes.end(node["cluster"])
    raise UserError(f"{node['host']}: Ray does not start: {_why(done.stdout)}")


def stop(folder: Path) -> dict[str, Any]:
    """Ends all processes of the cluster here and removes its token and its temporary files.

    Raises:
        UserError: some cannot be ended.
    """
    temporary = None
    with suppress(OSError, ValueError, KeyError):  # nothing was put here
        temporary = _temporary(json.loads((folder / "node.json").read_text(encoding="utf-8"))["id"])
    left = processes.end(_name(folder))
    shutil.rmtree(folder, ignore_errors=True)
    if temporary:
        shutil.rmtree(temporary, ignore_errors=True)
    if left:
        raise UserError(f"{socket.gethostname()}: these processes cannot be ended: {', '.join(left[:5])}.")
    return {"ended": True}


def ports(folder: Path) -> dict[str, Any]:
    """On which ports processes of the cluster listen here, and which addresses of this host are public."""
    return {"listening": processes.listening(_name(folder)), "public": processes.public(processes.addresses())}


def _name(folder: Path) -> str:
    """The cluster's name, which `files.on_host` put into the path."""
    return folder.parent.name


def _temporary(start: str) -> Path:
    """A folder with a short path, since Ray's sockets are below it, for this user alone. Raises UserError."""
    top = Path(tempfile.gettempdir()) / f"wgpu-lora-{os.getuid()}"
    top.mkdir(mode=0o700, exist_ok=True)
    found = top.lstat()
    if top.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UserError(f"{top} is not for this user alone: remove it.")
    made = top / start[:8]
    made.mkdir(mode=0o700, exist_ok=True)
    return made


def _reach(address: str, port: int) -> None:
    try:
        socket.create_connection((address, port), CONNECT_SECONDS).close()
    except OSError as error:
        raise UserError(
            f"{socket.gethostname()} cannot reach the head at {address}:{port} ({error.strerror or error}): open the "
            "way between the hosts, or correct the head's 'address'."
        ) from None


def _resources(environment: dict[str, str]) -> dict[str, float]:
    """What Ray is told of the devices of this host."""
    done = _run([sys.executable, "-P", "-m", "wgpu_lora", "cluster", "resources"], environment, PROBE_SECONDS, False)
    try:
        found = json.loads(done.stdout) if done.returncode == 0 else None
    except ValueError:
        found = None
    if not isinstance(found, dict):
        said = (done.stderr or done.stdout).strip().splitlines()
        raise UserError(f"{socket.gethostname()}: its devices cannot be listed: {said[-1] if said else 'no answer'}")
    return found


def _run(argv: list[str], environment: dict[str, str], seconds: float, joined: bool = True) -> Any:
    """A command with its output; joined: standard error in standard output."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:  # Ray's children keep pipes open
        try:
            code = subprocess.run(argv, env=environment, stdin=subprocess.DEVNULL, stdout=out,
                                  stderr=out if joined else error, timeout=seconds).returncode  # fmt: skip
        except subprocess.TimeoutExpired:
            code = 124
        out.seek(0)
        error.seek(0)
        return subprocess.CompletedProcess(argv, code, out.read(), error.read())


def _why(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    telling = [line for line in lines if "rror" in line or "already" in line or "nable" in line]
    return (telling or lines or ["it said nothing."])[-1][:300]


def _allow_files() -> None:
    with suppress(ImportError, OSError, ValueError):
        import resource

        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
        if soft != resource.RLIM_INFINITY and soft < wanted:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


COMMANDS: dict[str, Callable[[Path], dict[str, Any]]] = {"check": check, "start": start, "stop": stop, "ports": ports}


def main(argv: list[str]) -> int:
    """Runs a command; 1 if it was refused."""
    command, folder = argv
    try:
        print(json.dumps(COMMANDS[command](Path(folder).expanduser())))
    except UserError as error:
        print(json.dumps({"refused": str(error)}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
