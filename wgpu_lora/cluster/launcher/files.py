"""Where the launcher keeps what it knows of a cluster on this machine, and where its hosts keep theirs."""

from __future__ import annotations

import os
import secrets
import shutil
from pathlib import Path

from platformdirs import user_state_path

from wgpu_lora.cluster.cluster_file import HostSpec
from wgpu_lora.errors import UserError, reason

PRIVATE_FOLDER, PRIVATE_FILE = 0o700, 0o600


def folder_of(name: str) -> Path:
    """The folder of a cluster on this machine, for this user alone; it is made if it is missing.

    Raises:
        UserError: it cannot be made or used.
    """
    path = user_state_path("wgpu-lora") / "clusters" / name
    try:
        path.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        path.chmod(PRIVATE_FOLDER)
    except OSError as error:
        raise UserError(f"{path} cannot be used ({reason(error)}): set XDG_STATE_HOME to another folder.") from None
    return path


def on_host(name: str, host: HostSpec) -> str:
    """The folder of a cluster on one of its hosts, below the home there, which several hosts may share."""
    return f"~/.local/state/wgpu-lora/nodes/{name}/{host.host}"


def write_private(path: Path, text: str) -> None:
    """Replace a file that no other user may read. Raises OSError."""
    path.parent.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, PRIVATE_FILE)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def forget(name: str) -> None:
    """Remove the folder of a cluster on this machine."""
    shutil.rmtree(folder_of(name), ignore_errors=True)
