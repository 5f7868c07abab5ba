"""The memory guard: too little memory is said before anything is allocated, with the options that would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from psutil import virtual_memory

from wgpu_lora.errors import UserError

if TYPE_CHECKING:
    from wgpu_lora.models.config import ModelConfig
    from wgpu_lora.share import Budget
    from wgpu_lora.train.arguments import TrainingArguments

NO_WAY = "lower --max-length or --lora-r, or choose a smaller model"
Replan = Callable[[Mapping[str, Any]], int]  # changed options -> the peak they would give, in bytes
Fitting = Callable[[Mapping[str, Any]], int | None]  # the same, but None where that does not fit


@dataclass(frozen=True)
class Way:
    """Options that make a run fit, and its peak with them, in bytes."""

    options: str
    peak: int


def check_memory(peak: int, base: int, budget: Budget, args: TrainingArguments, replan: Replan) -> None:
    """Raises UserError where `peak` is over the budget, naming the options that would make it fit and their bytes.

    base: bytes of the base model's weights, which no other option makes smaller.
    """
    available = budget.bytes
    if available is None or peak <= available:
        return
    need = (
        f"This run needs {readable(peak)} ({peak:,} bytes) of device memory, but the budget is {readable(available)} "
    )
    need += f"({budget.source})"
    found = options_that_fit(available, args, replan)
    advice = f"it would fit with {found}" if found else without_a_way(base, available)
    raise UserError(f"{need}: {advice}.")


def check_adapters(runs: Sequence[TrainingArguments], config: ModelConfig, budget: Budget) -> None:
    """Raises UserError where adapters of these ranks cannot be meant: before anything is built, planning included."""
    available = max(virtual_memory().total, budget.bytes or 0)  # the plan knows better what is too much by less
    shapes = config.linear_shapes()
    modules = {module for args in runs for module in args.modules()}
    # Parameters, gradients and two moments in float32; all slots have the largest rank.
    a_rank = 16 * len(runs) * config.num_hidden_layers * sum(sum(shapes[module]) for module in modules)
    rank = max(args.lora_r for args in runs)
    if rank * a_rank > available:
        advice = f"lower it to at most {available // a_rank:,}" if available >= a_rank else "choose a smaller model"
        raise UserError(
            f"--lora-r {rank} needs {readable(rank * a_rank)} of device memory for the adapter's training alone, but "
            f"there is {readable(available)}: {advice}."
        )


def without_a_way(base: int, available: int) -> str:
    """Advice where no option makes a run fit."""
    return f"the base alone takes {base:,} bytes, so choose a smaller model" if base > available else NO_WAY


def options_that_fit(available: int, args: TrainingArguments, replan: Replan) -> str:
    """The ways to fit as words with their bytes, empty where there is none."""
    return ", or with ".join(f"{way.options} ({way.peak:,} bytes)" for way in ways_to_fit(available, args, replan))


def ways_to_fit(available: int, args: TrainingArguments, replan: Replan) -> list[Way]:
    """Options that make the run fit, each enough by itself; where none is, all of them together."""

    def fitting(changes: Mapping[str, Any]) -> int | None:
        try:
            peak = replan(changes)
        except UserError:  # something in it is larger than the device can bind or dispatch
            return None
        return peak if peak <= available else None

    single: list[tuple[str, dict[str, Any]]] = []
    if args.base_dtype != "nf4":
        single.append(("--base-dtype nf4", {"base_dtype": "nf4"}))
    if not args.gradient_checkpointing:
        single.append(("--gradient-checkpointing", {"gradient_checkpointing": True}))
    tried = [_way(text, fitting(changes)) for text, changes in single]
    found = [way for way in [*tried, _largest_batch(args, fitting, "", {})] if way]
    if found or not single:
        return found
    text = " ".join(text for text, _ in single)
    everything = {name: value for _, changes in single for name, value in changes.items()}
    together = _way(text, fitting(everything)) if len(single) > 1 else None
    together = together or _largest_batch(args, fitting, f"{text} ", everything)
    return [together] if together else []


def _way(options: str, peak: int | None) -> Way | None:
    return None if peak is None else Way(options, peak)


def _largest_batch(args: TrainingArguments, fitting: Fitting, before: str, changes: Mapping[str, Any]) -> Way | None:
    """The most rows a batch that fit, fewer than now, after other options; None where not even one does."""
    found, fits, (_, too_many, _) = None, 0, args.batching
    middle = 1
    while too_many - fits > 1:
        peak = fitting({**changes, "per_device_train_batch_size": middle})
        if peak is None:
            if not found:
                return None
            too_many = middle
        else:
            found = Way(f"{before}--per-device-train-batch-size {middle}", peak)
            fits = middle
        middle = (fits + too_many) // 2
    return found


def readable(nbytes: int) -> str:
    """Bytes as a person reads them: 1.5 GiB."""
    value, unit = float(nbytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return f"{nbytes} bytes" if unit == "bytes" else f"{value:,.1f} {unit}"
