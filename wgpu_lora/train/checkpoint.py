"""A checkpoint directory: the adapter as PEFT has it, both moments, and where the run stood."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from wgpu_lora.errors import UserError
from wgpu_lora.formats.atomic import file_digest, replace_directory
from wgpu_lora.formats.peft import AdapterConfig, module_path, read_adapter, tensor_name, write_adapter
from wgpu_lora.gpu.choices import Choices
from wgpu_lora.models.lora import AdapterSet, Matrices
from wgpu_lora.train.session import Session

STATE, OPTIMIZER, METADATA = "state.json", "optimizer.safetensors", "metadata.json"
STEPS, LAST = "checkpoints", "last"  # where a run by itself and where a pipeline's slot keep what they resume from
NAME = re.compile(r"step-(\d+)")


@dataclass
class RunState:
    """What a slot's run has come to: all of it that is not on the device."""

    step: int = 0
    epoch: int = 0
    index: int = 0  # the next step within the epoch
    total_steps: int = 0
    tokens: int = 0
    seconds: float = 0.0
    calibrated: bool = False
    heldout_seconds: float = 0.0  # of one held-out loss, where there is a time to keep to
    first_eval_loss: float | None = None
    best_eval_loss: float | None = None
    last_loss: float | None = None
    last_eval_loss: float | None = None
    tiles: Choices = field(default_factory=dict)  # another tiling rounds differently, so a resumed run keeps its own
    pending: list[float] = field(default_factory=list)  # losses of the steps since the last log line
    pending_tokens: int = 0
    pending_seconds: float = 0.0


def adapter_tensors(matrices: Matrices, config: AdapterConfig) -> dict[str, np.ndarray]:
    """PEFT's names and shapes: each module at its own rank."""
    tensors = {}
    for (layer, module), (a, b) in matrices.items():
        rank = config.rank(module_path(layer, module))
        tensors[tensor_name(layer, module, "A")] = np.ascontiguousarray(a[:rank])
        tensors[tensor_name(layer, module, "B")] = np.ascontiguousarray(b[:, :rank])
    return tensors


def write_checkpoint(
    final: Path, session: Session, slot: int, config: AdapterConfig, state: RunState, facts: dict[str, Any]
) -> None:
    """Writes a slot's adapter, moments, state and metadata.json beside `final`, syncs and renames them.

    facts: `identity` (see AdapterRun) and `metadata`. Raises OSError when the disk refuses; what was at `final` is then
    as it was.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    temporary = final.with_name(f".{final.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        device, adapters, optimizer = session.device, session.adapters, session.optimizer
        write_adapter(temporary, adapter_tensors(adapters.read(device, slot), config), config)
        moments: dict[str, np.ndarray] = {}
        for kind, pages in (("first_moment", optimizer.first_moment), ("second_moment", optimizer.second_moment)):
            for (layer, module), pair in adapters.read(device, slot, pages).items():
                moments |= {f"{layer}.{module}.{which}.{kind}": m for which, m in zip("AB", pair, strict=True)}
        (temporary / OPTIMIZER).write_bytes(save(moments))
        digest = file_digest(temporary / "adapter_model.safetensors")
        metadata = {**facts["metadata"], "adapter_sha256": digest}
        (temporary / METADATA).write_text(json.dumps(metadata, indent=1) + "\n")
        (temporary / STATE).write_text(json.dumps({"state": asdict(state), "identity": facts["identity"]}, indent=1))
        replace_directory(temporary, final)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def remove_old(root: Path, keep: int) -> None:
    """Removes all of `found` but the newest `keep`."""
    for _, old in found(root)[:-keep]:
        _remove(old)


def _remove(directory: Path) -> None:
    """Renames before it deletes: a crash half way must not leave something that looks like a checkpoint."""
    hidden = directory.with_name(f".{directory.name}.old")
    shutil.rmtree(hidden, ignore_errors=True)
    directory.rename(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def found(root: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints by step, ascending. What a crash left half-written has another name, or no state."""
    if not root.is_dir():
        return []
    named = [(int(m[1]), p) for p in root.iterdir() if (m := NAME.fullmatch(p.name)) and (p / STATE).is_file()]
    return sorted(named)


def newest(run: Path) -> Path | None:
    """What a run in this directory would be resumed from."""
    if (run / LAST / STATE).is_file():
        return run / LAST
    complete = found(run / STEPS)
    return complete[-1][1] if complete else None


def read_state(directory: Path) -> tuple[RunState, dict[str, Any]]:
    """The state of a checkpoint, and the facts of the run that wrote it."""
    try:
        facts = json.loads((directory / STATE).read_text())
        return RunState(**facts.pop("state")), facts
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"The checkpoint {directory} cannot be read ({error}): remove it to resume from an earlier one."
        ) from error


def restore(directory: Path, session: Session, slot: int) -> None:
    """Puts a checkpoint's adapter and moments on the device."""
    adapters: AdapterSet = session.adapters
    try:
        _, matrices = read_adapter(directory)
        stored = load_file(directory / OPTIMIZER)
        adapters.write(session.device, slot, matrices)
        for kind, pages in (
            ("first_moment", session.optimizer.first_moment),
            ("second_moment", session.optimizer.second_moment),
        ):
            moments = {
                (layer, module): (stored[f"{layer}.{module}.A.{kind}"], stored[f"{layer}.{module}.B.{kind}"])
                for layer, module in adapters.modules(slot)
            }
            adapters.write(session.device, slot, moments, pages)
    except (OSError, KeyError, SafetensorError) as error:
        raise UserError(
            f"The checkpoint {directory} is incomplete ({error}): remove it to resume from an earlier one."
        ) from error
