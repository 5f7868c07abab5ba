"""The memory guard: too little memory is said before anything is allocated, with the options that would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import psutil  # type: ignore[import-untyped]

from wgpu_lora.errors import UserError

if TYPE_CHECKING:
    from wgpu_lora.gpu.device import Device
    from wgpu_lora.train.arguments import TrainingArguments

SHARE = 0.9  # of the system's free memory; the rest is for the driver, the host and everyone else
Replan = Callable[[Mapping[str, Any]], int]  # changed options -> the peak they would give, in bytes


def available_bytes(device: Device, budget: int | None = None) -> int | None:
    """Bytes that a run may use, those that the device holds for it already included; None where nobody can tell.

    WebGPU does not say how much memory a discrete GPU has. The others live in the system's memory.
    """
    if device.info.kind not in ("software", "integrated"):
        return budget
    free = int(SHARE * psutil.virtual_memory().available) + device.allocated
    return free if budget is None else min(budget, free)


def check_memory(peak: int, available: int | None, args: TrainingArguments, replan: Replan) -> None:
    """Raises UserError where `peak` is over `available`, naming the options that would make it fit."""
    if available is None or peak <= available:
        return
    need = f"This run needs {readable(peak)} ({peak:,} bytes) of device memory, but {readable(available)} "
    need += f"({available:,} bytes) are available"
    found = ways_to_fit(available, args, replan)
    if found:
        raise UserError(f"{need}: it would fit with {', or with '.join(found)}.")
    raise UserError(f"{need}: lower --max-length or --lora-r, or choose a smaller model.")


def ways_to_fit(available: int, args: TrainingArguments, replan: Replan) -> list[str]:
    """Options that make the run fit, each enough by itself; where none is, all of them together."""
    single: list[tuple[str, dict[str, Any]]] = []
    if args.base_dtype != "nf4":
        single.append(("--base-dtype nf4", {"base_dtype": "nf4"}))
    if not args.gradient_checkpointing:
        single.append(("--gradient-checkpointing", {"gradient_checkpointing": True}))
    found = [text for text, changes in single if replan(changes) <= available]
    rows = _largest_batch(available, args, replan, {})
    if rows:
        found.append(f"--per-device-train-batch-size {rows}")
    if found or not single:
        return found
    everything = {name: value for _, changes in single for name, value in changes.items()}
    text = " ".join(text for text, _ in single)
    if replan(everything) <= available:
        return [text]
    rows = _largest_batch(available, args, replan, everything)
    return [f"{text} --per-device-train-batch-size {rows}"] if rows else []


def _largest_batch(available: int, args: TrainingArguments, replan: Replan, changes: Mapping[str, Any]) -> int:
    """The most rows a batch that fit, fewer than now; 0 where not even one does."""
    fits, too_many = 0, args.per_device_train_batch_size
    if too_many == 1 or replan({**changes, "per_device_train_batch_size": 1}) > available:
        return 0
    fits = 1
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if replan({**changes, "per_device_train_batch_size": middle}) <= available:
            fits = middle
        else:
            too_many = middle
    return fits


def readable(nbytes: int) -> str:
    """Bytes as a person reads them: 1.5 GiB."""
    value, unit = float(nbytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{nbytes} bytes" if unit == "bytes" else f"{value:,.1f} {unit}"
