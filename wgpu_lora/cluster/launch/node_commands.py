"""What `cluster up` and `down` run on a host by SSH: `python -m wgpu_lora.cluster.launch.node_commands COMMAND`.

Each command reads a JSON object on standard input. Its last line is the answer, another one: what was asked for, or
`refused` with a sentence.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from wgpu_lora.cluster.launch import node_processes
from wgpu_lora.errors import UserError, reason
from wgpu_lora.processes.child_process import python

START_SECONDS, CONNECT_SECONDS = 150.0, 5.0
TRIES = 2
OPEN_FILES = 65536


def check(node: dict[str, Any]) -> dict[str, Any]:
    """Before anything is started: versions, addresses, and start and token of the cluster's node if it runs."""
    from wgpu_lora.cluster.node_versions import own_versions

    start_id = node_processes.start_id(node["cluster"])
    token = (node["folder"] / "token").read_text("utf-8") if start_id else None
    facts = {"versions": asdict(own_versions()), "addresses": node_processes.addresses()}
    return {**facts, "running": start_id, "token": token}


def start(node: dict[str, Any]) -> dict[str, Any]:
    """Start Ray with the given options.

    Raises:
        UserError: it does not start.
    """
    import resource

    from wgpu_lora.cluster.cluster_paths import NODE_PATHS
    from wgpu_lora.cluster.device_resources import advertised, node_devices

    if remaining := node_processes.end(node["cluster"]):  # of a node that died
        raise UserError(
            f"{node['host']} still runs processes of {node['cluster']} that cannot be ended: {remaining[0]}."
        )
    if node["head"]:
        address, port = node["head"]
        try:
            socket.create_connection((address, port), CONNECT_SECONDS).close()
        except OSError as error:
            raise UserError(
                f"{node['host']} cannot reach the head at {address}:{port} ({reason(error)}): open the way between the "
                "hosts, or correct the head's 'address'."
            ) from None
    folder, temporary = node["folder"], _temporary(node)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    token = folder / "token"
    token.touch(0o600)
    token.chmod(0o600)
    token.write_text(node["token"], encoding="utf-8")
    environment = node_processes.environment({
        **node_processes.SETTINGS, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_ADDRESS": None, NODE_PATHS: json.dumps(node["paths"]),
        node_processes.MARK: f"{node['cluster']}/{node['id']}",
    })  # fmt: skip
    argv = [*python("-m", "ray.scripts.scripts", "start"), *node["options"], f"--temp-dir={temporary}",
            f"--resources={json.dumps(advertised(node_devices('')))}"]  # fmt: skip
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < OPEN_FILES:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(OPEN_FILES, hard) if hard >= 0 else OPEN_FILES, hard))
    log = folder / "start.log"
    for _ in range(TRIES):  # on a busy host, Ray's processes may miss Ray's own time limits
        with log.open("wb") as output:  # no pipe, which Ray's processes would keep open
            try:
                process = subprocess.run(argv, env=environment, stdin=subprocess.DEVNULL, stdout=output,
                                      stderr=subprocess.STDOUT, timeout=START_SECONDS)  # fmt: skip
                if not process.returncode and node_processes.start_id(node["cluster"]):
                    return {}
            except subprocess.TimeoutExpired:
                pass
        node_processes.end(node["cluster"])
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    error_lines = [line for line in lines if "rror" in line or "already" in line or "nable" in line] or lines or ["?"]
    raise UserError(f"{node['host']}: Ray does not start ({error_lines[-1][:300]}): see {log} there.")


def stop(node: dict[str, Any]) -> dict[str, Any]:
    """End all processes of the cluster here and remove its token and its temporary files.

    Raises:
        UserError: some cannot be ended.
    """
    remaining = node_processes.end(node["cluster"])
    for path in (node["folder"], _temporary(node)):
        shutil.rmtree(path, ignore_errors=True)
    if remaining:
        raise UserError(f"{node['host']}: these processes cannot be ended: {', '.join(remaining[:5])}.")
    return {}


def ports(node: dict[str, Any]) -> dict[str, Any]:
    """On which ports processes of the cluster listen here, and which addresses of this host are public."""
    listeners = node_processes.listening(node["cluster"])
    return {"listening": listeners, "public": node_processes.public(node_processes.addresses())}


def _temporary(node: dict[str, Any]) -> Path:
    """A folder with a short path, since Ray's sockets are below it, for this user alone. Raises UserError."""
    top = Path(tempfile.gettempdir()) / f"wgpu-lora-{os.getuid()}"
    top.mkdir(mode=0o700, exist_ok=True)
    stat = top.lstat()
    if top.is_symlink() or stat.st_uid != os.getuid() or stat.st_mode & 0o077:
        raise UserError(f"{top} is not for this user alone: remove it.")
    directory = top / hashlib.sha256(node["cluster"].encode()).hexdigest()[:8]
    directory.mkdir(mode=0o700, exist_ok=True)
    return directory


COMMANDS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "check": check, "start": start, "stop": stop, "ports": ports
}  # fmt: skip


def main(command: str) -> int:
    """Run a command; 1 if it was refused."""
    try:
        node = json.load(sys.stdin)
        print(json.dumps(COMMANDS[command]({**node, "folder": Path(node["folder"]).expanduser()})))
    except UserError as error:
        print(json.dumps({"refused": str(error)}))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
