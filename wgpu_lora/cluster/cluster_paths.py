"""Paths: where a host keeps what belongs to a cluster, and paths of options as each machine has them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from platformdirs import user_cache_dir

from wgpu_lora.cluster.messages import SENT
from wgpu_lora.data.huggingface import is_hub_id
from wgpu_lora.errors import UserError
from wgpu_lora.files.paths import is_path
from wgpu_lora.files.typed_json import typed
from wgpu_lora.formats.hub import NAMES, hub_id
from wgpu_lora.names.spelling import flag
from wgpu_lora.train.options.training_arguments import PATHS

ROOT = "WGPU_LORA_CLUSTER_DIR"
ADAPTERS, MULTI_ADAPTER = "adapters", "pipeline"  # in a unit's directory
NAME = re.compile(r"(?!\.)[A-Za-z0-9._=,+-]{1,200}")


def cluster_root() -> Path:
    """The directory of this host: WGPU_LORA_CLUSTER_DIR, else in the user's cache."""
    return Path(os.environ.get(ROOT) or Path(user_cache_dir("wgpu-lora")) / "cluster").absolute()


def checked_part(text: object) -> str:
    """A name that becomes a directory. Raises UserError."""
    if not isinstance(text, str) or not NAME.fullmatch(text):
        raise UserError(f"{text!a:.80} cannot be the name of a run or a task: use letters, digits, '.', '_' and '-'.")
    return text


def unit_parts(unit: object) -> tuple[str, str]:
    """The run and the first task of a unit, `<run>/<first task>`. Raises UserError."""
    run, slash, task = str(unit).partition("/")
    if not slash:
        raise UserError(f"{unit!a:.80} cannot be the name of a unit: it must be RUN/TASK.")
    return checked_part(run), checked_part(task)


def unit_directory(unit: str) -> Path:
    """The directory of this host in which a unit is trained, a directory per generation."""
    return Path(cluster_root(), "units", *unit_parts(unit))


def checkpoints_directory() -> Path:
    """The folder of this host's store."""
    return cluster_root() / "checkpoints"


def sent_directory() -> Path:
    """The folder of files that drivers have sent."""
    return cluster_root() / "sent"


NODE_PATHS = "WGPU_LORA_CLUSTER_PATHS"  # of a node: a JSON object, folders of the others -> its own
DATA = ("data", "eval_data", "teacher_cache", "eval_teacher_cache")  # whose relative paths `[data] root` is for
SENDABLE = ("data", "eval_data")  # small enough to be sent, and compared by content when a run is resumed
HERE = tuple(name for name in PATHS if name != "output")
_SENT = re.compile(rf"{SENT}([0-9a-f]{{64}})/([^/\0]{{1,255}})")


def for_nodes(options: Mapping[str, Any], root: str | None = None) -> dict[str, Any]:
    """Options with the paths that they have on all machines: absolute, unless they are names.

    Args:
        root: the folder that relative paths of data refer to; None: the working directory, as other paths do.
    """
    return {
        name: _absolute(name, value, root) if name in HERE and isinstance(value, str) else value
        for name, value in options.items()
    }


def _absolute(name: str, text: str, root: str | None) -> str:
    if text in NAMES or text.startswith(SENT):
        return text
    if root and name in DATA:
        path = PurePosixPath(root, text)
        return text if _is_hub_id(name, text) and not Path(path).exists() else str(path)
    return text if _is_hub_id(name, text) else os.path.abspath(os.path.expanduser(text))


def _is_hub_id(name: str, text: str) -> bool:
    """Whether the value of an option is OWNER/NAME of a data set or a model, and no path here."""
    return is_hub_id(text) if name in DATA else hub_id(text) is not None


def node_paths(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The folders that this node has elsewhere than the others.

    Raises:
        UserError: the variable is not what `cluster up` sets.
    """
    text = environment.get(NODE_PATHS)
    if not text:
        return {}
    try:
        paths: dict[str, str] = typed(dict[str, str], json.loads(text))
    except (ValueError, RecursionError):
        raise UserError(
            f"{NODE_PATHS} is {text!a:.80}, but must be a JSON object of folders: start the node again."
        ) from None
    return paths


def on_node(options: Mapping[str, Any], paths: Mapping[str, str], parcels: Path) -> dict[str, Any]:
    """Options of a task with the paths that they have on a node.

    Args:
        paths: its folders that others have elsewhere, as `node_paths`. parcels: the folder of what drivers have sent.
    """
    return {
        name: _node_path(value, paths, parcels) if name in HERE and isinstance(value, str) else value
        for name, value in options.items()
    }


def _node_path(text: str, paths: Mapping[str, str], parcels: Path) -> str:
    parcel = sent_name(text)
    if parcel:
        return str(parcels / parcel[0] / parcel[1])
    if text.startswith("/"):
        path = PurePosixPath(text)
        for folder in sorted(paths, key=len, reverse=True):
            if path.is_relative_to(folder):
                return str(PurePosixPath(paths[folder]) / path.relative_to(folder))
    return text


def sent_name(text: str) -> tuple[str, str] | None:
    """The digest and the name of what has been sent, if the value of an option is that."""
    match = _SENT.fullmatch(text)
    return (match[1], match[2]) if match and match[2] not in (".", "..") else None


ROOTS = "WGPU_LORA_CLUSTER_ROOTS"  # directories that jobs may read and publish to, separated as in PATH


def allowed_roots() -> list[Path]:
    """The directories that jobs of a cluster are confined to on this host; none: all that the user may read."""
    return [Path(text).resolve() for text in os.environ.get(ROOTS, "").split(os.pathsep) if text.strip()]


def refused_path(text: str, roots: Sequence[Path]) -> str | None:
    """Why a path may not be used on this host, as part of a sentence; None if it may be."""
    if not is_path(text) or not os.path.isabs(text):
        return "is not an absolute path"
    real = Path(os.path.realpath(text))
    if roots and not any(real.is_relative_to(root) for root in roots):
        return f"is outside {', '.join(map(str, roots))}, which {ROOTS} allows"
    return None


def unreadable(path: str, roots: Sequence[Path]) -> str | None:
    """Why a path cannot be read on this host, as part of a sentence; None if it can be."""
    if refusal := refused_path(path, roots):
        return refusal
    if not os.path.exists(path):
        return "does not exist"
    return None if os.access(path, os.R_OK) else "cannot be read"


def options_here(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options with the paths of this host.

    Raises:
        UserError: a path is outside the folders that jobs may read here, or begins with `~`.
    """
    local, roots = on_node(options, node_paths(), sent_directory()), allowed_roots()
    for name in HERE:
        value = local.get(name)
        if not isinstance(value, str) or sent_name(str(options[name])):
            continue
        if value.startswith("~"):  # drivers say whole paths; whoever opens it would look into a home directory
            raise UserError(
                f"{flag(name)} {value} begins with '~', which each machine has elsewhere: give a whole path."
            )
        if roots and value not in NAMES and not _is_hub_id(name, value) and (refusal := refused_path(value, roots)):
            raise UserError(f"{flag(name)} {value} {refusal}: use a path that this host allows.")
    return local


def parcels_of(options: Mapping[str, Any]) -> list[str]:
    """The digests of sent data that options name."""
    names = (sent_name(options[name]) for name in HERE if isinstance(options.get(name), str))
    return [match[0] for match in names if match]
