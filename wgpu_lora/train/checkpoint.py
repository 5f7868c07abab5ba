"""A checkpoint directory: what is trained (an adapter in PEFT's format), the optimizer's state, and the run's state."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save

from wgpu_lora.atomic import replace_directory, sweep
from wgpu_lora.bounded import read_json
from wgpu_lora.errors import UserError
from wgpu_lora.formats.file_names import TEMPLATE, TOKENIZER
from wgpu_lora.formats.peft import CONFIG, WEIGHTS
from wgpu_lora.names.naming import flag
from wgpu_lora.strict_json import to_json
from wgpu_lora.train.manifest import damage, write_manifest
from wgpu_lora.train.optimizers import name_of
from wgpu_lora.train.schema import SCHEMA, NewerSchemaError, schema_of
from wgpu_lora.train.session import Session
from wgpu_lora.train.state import STATE, RunState, read_state
from wgpu_lora.train.subject import ADAPTER_FILES, CONSTANT_FILES, Damaged, Subject

OPTIMIZER, METADATA = "optimizer.safetensors", "metadata.json"
FILES = (OPTIMIZER, METADATA, STATE)  # besides those of what is trained
STEPS, LAST, NEXT = "checkpoints", "last", ".next"  # checkpoints of a single run, and of a pipeline's slot
BEST, EPOCH = "best", "epoch-{}"
NAME = re.compile(r"step-([0-9]{1,15})")
EPOCH_NAME = re.compile(r"epoch-([0-9]{1,15})")
# Names that a run or a pipeline writes by renaming a hidden temporary file.
WRITTEN = re.compile(
    rf"{re.escape(WEIGHTS)}|{re.escape(CONFIG)}|constants\.safetensors|README\.md|log\.jsonl|(run|state|pipeline|member)\.json"
    rf"|{LAST}|(last|best)-f(16|32)|\{NEXT}|{BEST}|epoch-[0-9]+|{TOKENIZER.pattern}|{TEMPLATE.pattern}"
)


def write_checkpoint(
    final: Path, session: Session, slot: int, subject: Subject, state: RunState, facts: dict[str, Any]
) -> None:
    """Write what a slot trains, optimizer and run state, metadata and manifest beside `final`, sync and rename them.

    facts: `identity` (see AdapterRun) and `metadata`. Raises OSError if the disk refuses; `final` is then unchanged.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(f".{final.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        files = subject.saved(session, slot)
        kept = {"optim": name_of(session.optimizer.rule)}
        files[OPTIMIZER] = save(session.optimizer.state.read(session.device, slot), kept)
        files[METADATA] = (to_json(facts["metadata"], indent=1) + "\n").encode()
        files[STATE] = to_json(
            {"schema": SCHEMA, "state": asdict(state), "identity": facts["identity"]}, indent=1
        ).encode()
        temporary.mkdir()
        for name, data in files.items():
            (temporary / name).write_bytes(data)
        write_manifest(temporary)
        replace_directory(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_old(root: Path, keep: int) -> None:
    """Remove all checkpoints in `found` but the newest `keep`."""
    for _, old in found(root)[:-keep]:
        remove(old)


def remove_old_epochs(run: Path, keep: int) -> None:
    """Remove all of a run's epoch-N but the newest `keep`."""
    for _, old in found(run, EPOCH_NAME)[:-keep]:
        remove(old)


def remove(directory: Path) -> None:
    """Remove a directory; it is renamed first, so that a crash does not leave half a checkpoint."""
    hidden = directory.with_name(f".{directory.name}.old")
    shutil.rmtree(hidden, ignore_errors=True)
    directory.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def found(root: Path, name: re.Pattern[str] = NAME) -> list[tuple[int, Path]]:
    """Checkpoints by the number in their names, ascending; incomplete ones have other names."""
    if not root.is_dir():
        return []
    return sorted((int(m[1]), p) for p in root.iterdir() if (m := name.fullmatch(p.name)) and p.is_dir())


def newest(run: Path) -> Path | None:
    """The checkpoint that a run in this directory would be resumed from."""
    if (run / LAST).is_dir():
        return run / LAST
    kept = found(run / STEPS)
    return kept[-1][1] if kept else None


def sweep_run(run: Path) -> None:
    """Remove incomplete files of a killed process from a run's directory, which must be locked."""
    sweep(run, WRITTEN)
    sweep(run / STEPS, NAME)


def trained_files(directory: Path) -> tuple[str, ...]:
    """The files of what was trained that a directory should have, by what it has."""
    return CONSTANT_FILES if (directory / CONSTANT_FILES[0]).exists() else ADAPTER_FILES


def fault(directory: Path) -> str | None:
    """What is wrong with a checkpoint; None if it is intact.

    Raises:
        NewerSchemaError: it is from a newer version.
    """
    wrong = damage(directory, (*trained_files(directory), *FILES))
    if wrong:
        return wrong
    try:
        step = read_state(directory)[0].step
    except NewerSchemaError:
        raise
    except (UserError, ValueError) as error:
        return error.problem if isinstance(error, UserError) else str(error)
    named = NAME.fullmatch(directory.name)
    return f"{STATE} says step {step}" if named and int(named[1]) != step else None


def refuse(directory: Path, wrong: str) -> UserError:
    """The error for a damaged checkpoint, which names the newest intact one of the run."""
    run = directory.parent.parent if directory.parent.name == STEPS else directory.parent
    said = f"The checkpoint {directory} is damaged: {wrong}"
    for _, path in reversed(found(run / STEPS)):
        if path != directory and not fault(path):
            return UserError(f"{said}; remove that directory to resume from {path.name}, which is intact.")
    others = [path for path in (*run.glob(EPOCH.format("*")), run / BEST) if path.is_dir() and not fault(path)]
    if others:
        latest = max(others, key=lambda path: read_state(path)[0].step)
        return UserError(
            f"{said}; start a new run from the adapter in {latest}, which is intact, with {flag('init_adapter')}."
        )
    return UserError(f"{said}; no other is intact, so start again in another directory.")


def check(directory: Path) -> tuple[RunState, dict[str, Any]]:
    """The state and the identity of a checkpoint. Raises UserError if it is damaged."""
    wrong = fault(directory)
    if wrong:
        raise refuse(directory, wrong)
    return read_state(directory)


def read_metadata(directory: Path) -> dict[str, Any]:
    """The contents of an intact checkpoint's metadata.json, such as the run's options."""
    facts = read_json(directory / METADATA)
    try:
        schema_of(facts, directory / METADATA)
    except ValueError as error:
        raise refuse(directory, str(error)) from None
    return facts


def modern(name: str, modules: Collection[str]) -> str:
    """Convert a state's name of version 0.1.0, such as '0.q_proj.A.first_moment', to the module's path."""
    layer, _, rest = name.partition(".")
    module, _, which = rest.partition(".")
    found = [m for m in modules if f".{layer}." in m and m.endswith(f".{module}")] if layer.isdecimal() else []
    return f"{found[0]}.{which}" if len(found) == 1 else name


def restore(directory: Path, session: Session, slot: int, subject: Subject) -> None:
    """Load what a checkpoint has trained and its optimizer's state onto the device.

    Raises:
        UserError: it is damaged, or from another run.
    """
    check(directory)
    try:
        with safe_open(directory / OPTIMIZER, "numpy") as file:
            optim = (file.metadata() or {}).get("optim")  # None in older checkpoints
        state = load_file(directory / OPTIMIZER)
    except (OSError, SafetensorError) as error:
        raise refuse(directory, str(error)) from error
    state = {modern(name, session.model.config.lora_modules): values for name, values in state.items()}
    wrong, own = session.optimizer.state.fault(slot, state), name_of(session.optimizer.rule)
    if optim not in (None, own):  # though it may be in the same form, as those of lion and muon
        wrong = f"it holds the state of {optim!r:.40}, not of {own!r}"
    if wrong:
        raise refuse(directory, f"{OPTIMIZER} does not match this run: {wrong}")
    try:
        subject.place(directory, session, slot)
    except Damaged as error:
        raise refuse(directory, str(error)) from error
    session.optimizer.state.write(session.device, slot, state)
