"""The state of several adapters that train together, and where it is: in --output if given, else with the first.

Every other adapter's directory has a small file that points there, so that the state is found from any of them.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import write_bytes_atomic
from wgpu_lora.files.json_files import read_json, to_json
from wgpu_lora.files.paths import is_path
from wgpu_lora.files.typed_json import Count, typed
from wgpu_lora.names.spelling import flag
from wgpu_lora.train.run.run_state import SCHEMA, STATE, NewerSchemaError, schema_of

MEMBER = "member.json"


@dataclass
class MultiAdapterState:
    """The state of several adapters: their steps, its policy's state and, by name, each one's steps and why it ended.

    request: the options, schedule, batch_tokens and working directory, and the adapters, whose checkpoints are
        relative to the record.
    """

    identity: dict[str, Any] = field(default_factory=dict)
    request: dict[str, Any] = field(default_factory=dict)
    step: Count = 0
    policy: dict[str, Any] = field(default_factory=dict)
    steps: dict[str, Count] = field(default_factory=dict)
    ended: dict[str, str] = field(default_factory=dict)


def home_of(directory: Path) -> Path | None:
    """The directory with the record of the pipeline that a directory belongs to; None if it belongs to none."""
    if (directory / STATE).is_file():
        return directory
    if not (directory / MEMBER).is_file():
        return None
    home = read_json(directory / MEMBER).get("pipeline")
    if not (isinstance(home, str) and is_path(home) and not os.path.isabs(home) and _is_home(directory / home)):
        raise UserError(
            f"{directory / MEMBER} does not lead to the record of its pipeline: move the adapters' directories back to "
            f"where they were, or start a new run from this adapter with {flag('init_adapter')}."
        )
    return Path(os.path.normpath(directory / home))


def _is_home(directory: Path) -> bool:
    return os.path.isfile(directory / STATE)  # pathlib raises OSError if the whole is too long


def link_members(home: Path, members: Iterable[Path]) -> None:
    """Write the location of the record into every adapter's directory."""
    for member in members:
        if member.resolve() != home.resolve():
            content = {"pipeline": os.path.relpath(home.resolve(), member.resolve())}
            write_bytes_atomic(member / MEMBER, (to_json(content) + "\n").encode())


def write_multi_adapter_state(directory: Path, state: MultiAdapterState) -> None:
    """Replace the state, with its SHA-256."""
    values = vars(state)
    text = to_json({"schema": SCHEMA, "sha256": _digest(values), "state": values}, indent=1)
    write_bytes_atomic(directory / STATE, (text + "\n").encode())


def read_multi_adapter_state(directory: Path) -> MultiAdapterState:
    """Read the state. Raises UserError if it is missing, damaged, or from a newer version."""
    path = directory / STATE
    if not path.is_file():
        raise UserError(f"There is no pipeline in {directory} to resume: start without {flag('resume')}.")
    advice = f"start again elsewhere, from the adapters' own checkpoints with {flag('init_adapter')}"
    try:
        result = read_json(path)
        schema_of(result, path)
    except NewerSchemaError:
        raise
    except (UserError, ValueError) as error:
        wrong = error.problem if isinstance(error, UserError) else error
        raise UserError(f"The pipeline's state is damaged ({wrong}): {advice}.") from None
    values = result.get("state")
    if not isinstance(values, dict) or result.get("sha256") != _digest(values) or not _is_state(values):
        raise UserError(f"The pipeline's state {path} is damaged: {advice}.")
    return MultiAdapterState(**values)


def difference(before: dict[str, Any], now: dict[str, Any]) -> str:
    """The most relevant difference between two identities, as text."""
    previous, current = ([adapter["name"] for adapter in of.get("adapters", [])] for of in (before, now))
    if previous != current:
        return f"its adapters were {', '.join(previous)}, not {', '.join(current)}"
    for old, new in zip(before["adapters"], now["adapters"], strict=True):
        result = next((key for key in new if old.get(key) != new[key]), None)
        if result:
            return f"the {result} of adapter '{new['name']}' was {old.get(result)!r}, not {new[result]!r}"
    flat_before, flat_now = ({**d, **d.get("options", {})} for d in (before, now))
    names = [name for name in flat_now if name != "options" and flat_before.get(name) != flat_now[name]]
    name = names[0] if names else "options"
    return f"{flag(name)} was {flat_before.get(name)!r}, not {flat_now.get(name)!r}"


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(to_json(values).encode()).hexdigest()


def _is_state(values: Mapping[str, Any]) -> bool:
    try:
        request = typed(MultiAdapterState, values, unknown="refuse").request
    except ValueError:
        return False
    kinds = {"options": dict, "schedule": str, "batch_tokens": int, "directory": str, "adapters": list}
    complete = set(values) == {f.name for f in fields(MultiAdapterState)}
    return complete and all(isinstance(request.get(name), kind) for name, kind in kinds.items())
