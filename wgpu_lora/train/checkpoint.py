"""A checkpoint directory: the adapter as PEFT has it, the optimizer's state, and where the run stood."""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from wgpu_lora.atomic import replace_directory, sweep
from wgpu_lora.bounded import read_json
from wgpu_lora.errors import UserError
from wgpu_lora.formats.checkpoint import read_header
from wgpu_lora.formats.file_names import TEMPLATE, TOKENIZER
from wgpu_lora.formats.peft import (
    CONFIG,
    WEIGHTS,
    AdapterConfig,
    Matrices,
    adapter_files,
    read_adapter,
    tensor_name,
)
from wgpu_lora.models.lora import AdapterSet
from wgpu_lora.names.naming import flag
from wgpu_lora.strict_json import to_json
from wgpu_lora.train.manifest import damage, write_manifest
from wgpu_lora.train.schema import SCHEMA, NewerSchemaError, schema_of
from wgpu_lora.train.session import Session
from wgpu_lora.train.state import STATE, RunState, read_state

OPTIMIZER, METADATA = "optimizer.safetensors", "metadata.json"
FILES = (WEIGHTS, CONFIG, OPTIMIZER, METADATA, STATE)
STEPS, LAST, NEXT = "checkpoints", "last", ".next"  # where a run by itself and where a pipeline's slot keep theirs
BEST, EPOCH = "best", "epoch-{}"
NAME = re.compile(r"step-([0-9]{1,15})")
EPOCH_NAME = re.compile(r"epoch-([0-9]{1,15})")
# What a run, or a pipeline, writes by way of a hidden name beside it.
WRITTEN = re.compile(
    rf"{re.escape(WEIGHTS)}|{re.escape(CONFIG)}|README\.md|log\.jsonl|(run|state|pipeline|member)\.json"
    rf"|{LAST}|\{NEXT}|{BEST}|epoch-[0-9]+|{TOKENIZER.pattern}|{TEMPLATE.pattern}"
)


def adapter_tensors(matrices: Matrices, config: AdapterConfig) -> dict[str, np.ndarray]:
    """PEFT's names and shapes: each module at its own rank."""
    tensors = {}
    for module, (a, b) in matrices.items():
        rank = config.rank(module)
        tensors[tensor_name(module, "A")] = np.ascontiguousarray(a[:rank])
        tensors[tensor_name(module, "B")] = np.ascontiguousarray(b[:, :rank])
    return tensors


def write_checkpoint(
    final: Path, session: Session, slot: int, config: AdapterConfig, state: RunState, facts: dict[str, Any]
) -> None:
    """Writes a slot's adapter, optimizer and run state, metadata and manifest beside `final`, syncs and renames them.

    facts: `identity` (see AdapterRun) and `metadata`. Raises OSError when the disk refuses; what was at `final` is then
    as it was.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(f".{final.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        device, adapters, optimizer = session.device, session.adapters, session.optimizer
        files = adapter_files(adapter_tensors(adapters.read(device, slot), config), config)
        files[OPTIMIZER] = save(optimizer.read_state(device, slot))
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
    """Removes all of `found` but the newest `keep`."""
    for _, old in found(root)[:-keep]:
        remove(old)


def remove_old_epochs(run: Path, keep: int) -> None:
    """Removes all of a run's epoch-N but the newest `keep`."""
    for _, old in found(run, EPOCH_NAME)[:-keep]:
        remove(old)


def remove(directory: Path) -> None:
    """Renames before it deletes: a crash half way must not leave something that looks like a checkpoint."""
    hidden = directory.with_name(f".{directory.name}.old")
    shutil.rmtree(hidden, ignore_errors=True)
    directory.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def found(root: Path, name: re.Pattern[str] = NAME) -> list[tuple[int, Path]]:
    """Checkpoints by step, or by what else their names count, ascending. What a crash left half-written has another."""
    if not root.is_dir():
        return []
    return sorted((int(m[1]), p) for p in root.iterdir() if (m := name.fullmatch(p.name)) and p.is_dir())


def newest(run: Path) -> Path | None:
    """What a run in this directory would be resumed from."""
    if (run / LAST).is_dir():
        return run / LAST
    kept = found(run / STEPS)
    return kept[-1][1] if kept else None


def sweep_run(run: Path) -> None:
    """Removes what a killed process left half-written in a run's directory, which must be locked."""
    sweep(run, WRITTEN)
    sweep(run / STEPS, NAME)


def fault(directory: Path) -> str | None:
    """What is wrong with a checkpoint; None where it is as it was written, and makes sense.

    Raises:
        NewerSchemaError: a later version wrote it.
    """
    wrong = damage(directory, FILES)
    if wrong:
        return wrong
    try:
        step = read_state(directory)[0].step
    except NewerSchemaError:
        raise
    except (UserError, ValueError) as error:
        return str(error)
    named = NAME.fullmatch(directory.name)
    return f"{STATE} says step {step}" if named and int(named[1]) != step else None


def refuse(directory: Path, wrong: str) -> UserError:
    """What to say of a checkpoint that must not be used, with the newest other one of the run that is whole."""
    run = directory.parent.parent if directory.parent.name == STEPS else directory.parent
    said = f"The checkpoint {directory} is damaged: {wrong}"
    for _, path in reversed(found(run / STEPS)):
        if path != directory and not fault(path):
            return UserError(f"{said}; remove that directory to resume from {path.name}, which is whole.")
    others = [path for path in (*run.glob(EPOCH.format("*")), run / BEST) if path.is_dir() and not fault(path)]
    if others:
        latest = max(others, key=lambda path: read_state(path)[0].step)
        return UserError(
            f"{said}; start a new run from the adapter in {latest}, which is whole, with {flag('init_adapter')}."
        )
    return UserError(f"{said}; there is no other that is whole, so start again in another directory.")


def check(directory: Path) -> tuple[RunState, dict[str, Any]]:
    """The state and the identity of a checkpoint that is whole; UserError, with what is wrong, where it is not."""
    wrong = fault(directory)
    if wrong:
        raise refuse(directory, wrong)
    return read_state(directory)


def read_metadata(directory: Path) -> dict[str, Any]:
    """What metadata.json says of a checkpoint that is whole: the run's options among others."""
    facts = read_json(directory / METADATA)
    schema_of(facts, directory / METADATA)
    return facts


def modern(name: str, modules: Collection[str]) -> str:
    """A state's name by the module's path, from that of version 0.1.0: '0.q_proj.A.first_moment'."""
    layer, _, rest = name.partition(".")
    module, _, which = rest.partition(".")
    found = [m for m in modules if f".{layer}." in m and m.endswith(f".{module}")] if layer.isdecimal() else []
    return f"{found[0]}.{which}" if len(found) == 1 else name


def restore(directory: Path, session: Session, slot: int) -> None:
    """Puts a checkpoint's adapter and the optimizer's state on the device.

    Raises:
        UserError: it is not whole, or another run's.
    """
    check(directory)
    adapters: AdapterSet = session.adapters
    try:
        _, matrices = read_adapter(directory)
        stored = load_file(directory / OPTIMIZER)
    except (OSError, SafetensorError) as error:
        raise refuse(directory, str(error)) from error
    expected = set(adapters.modules(slot))
    if set(matrices) != expected or any(e.dtype != "F32" for e in read_header(directory / WEIGHTS).values()):
        raise refuse(directory, f"{WEIGHTS} holds other modules, or another type, than the run trains")
    stored = {modern(name, expected): values for name, values in stored.items()}
    wrong = session.optimizer.fault(slot, matrices, stored)
    if wrong:
        raise refuse(directory, f"{OPTIMIZER} is not this run's: {wrong}")
    adapters.write(session.device, slot, matrices)
    session.optimizer.write_state(session.device, slot, stored)
