"""Paths of options as the machines of a cluster have them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.paths import is_path
from wgpu_lora.train.options.training_arguments import PATHS

NODE_PATHS = "WGPU_LORA_CLUSTER_PATHS"  # of a node: a JSON object, folders of the others -> its own
DATA = ("data", "eval_data", "teacher_cache", "eval_teacher_cache")  # whose relative paths `[data] root` is for
SENDABLE = ("data", "eval_data")  # small enough to be sent, and compared by content when a run is resumed
HERE = tuple(name for name in PATHS if name != "output")
SENT = "sent:"  # begins the value of an option whose files the driver has sent: sent:DIGEST/NAME
_SENT = re.compile(rf"{SENT}([0-9a-f]{{64}})/([^/\0]{{1,255}})")
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")


def for_nodes(options: Mapping[str, Any], root: str | None = None) -> dict[str, Any]:
    """Options with the paths that they have on all machines: absolute, unless they are names of the hub or `demo`.

    Args:
        root: the folder that relative paths of data refer to; None: the working directory, as other paths do.
    """
    return {
        name: _absolute(name, value, root) if name in HERE and isinstance(value, str) else value
        for name, value in options.items()
    }


def _absolute(name: str, text: str, root: str | None) -> str:
    if text == "demo" or text.startswith(SENT):
        return text
    if root and name in DATA:
        return text if is_hub_id(text, root) else str(PurePosixPath(root) / text)
    if is_hub_id(text, "."):
        return text
    return os.path.abspath(os.path.expanduser(text))


def is_hub_id(text: str, folder: str) -> bool:
    """Whether a text is OWNER/NAME, and no file here."""
    plain = Path(text).suffix.lower() not in (".jsonl", ".json", ".csv", ".parquet", ".gz", ".gguf")
    return bool(_HUB_ID.fullmatch(text)) and plain and not Path(folder, text).exists()


def node_paths(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The folders that this node has elsewhere than the others.

    Raises:
        UserError: the variable is not what `cluster up` sets.
    """
    said = environment.get(NODE_PATHS)
    if not said:
        return {}
    try:
        found = json.loads(said)
        good = isinstance(found, dict) and all(isinstance(v, str) and is_path(v) for v in found.values())
    except (ValueError, RecursionError):
        good = False
    if not good:
        raise UserError(f"{NODE_PATHS} is {said!a:.80}, but must be a JSON object of folders: start the node again.")
    return dict(found)


def on_node(options: Mapping[str, Any], paths: Mapping[str, str], sent: Path) -> dict[str, Any]:
    """Options of a task with the paths that they have on a node.

    Args:
        paths: its folders that others have elsewhere, as `node_paths`. sent: the folder of what drivers have sent.
    """
    found = dict(options)
    for name in HERE:
        value = found.get(name)
        if isinstance(value, str):
            found[name] = _there(value, paths, sent)
    return found


def _there(text: str, paths: Mapping[str, str], sent: Path) -> str:
    parcel = sent_name(text)
    if parcel:
        return str(sent / parcel[0] / parcel[1])
    if text.startswith("/"):
        path = PurePosixPath(text)
        for folder in sorted(paths, key=len, reverse=True):
            if path.is_relative_to(folder):
                return str(PurePosixPath(paths[folder]) / path.relative_to(folder))
    return text


def sent_name(text: str) -> tuple[str, str] | None:
    """The digest and the name of what has been sent, if the value of an option is that."""
    found = _SENT.fullmatch(text)
    return (found[1], found[2]) if found and found[2] not in (".", "..") else None
