"""The memory check: refuses a run before anything is allocated, and names options that would make it fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from psutil import virtual_memory

from wgpu_lora.errors import UserError
from wgpu_lora.models.adapter_modules import resolve_target_modules
from wgpu_lora.names.spelling import flag, setting, settings
from wgpu_lora.names.text import count_noun
from wgpu_lora.train.optimizers import optimizer_of
from wgpu_lora.weights.base_formats import AUTO, DEFAULT_FORMAT, base_format

if TYPE_CHECKING:
    from wgpu_lora.gpu.memory_leases import Budget
    from wgpu_lora.models.model_config import ModelConfig
    from wgpu_lora.train.options.training_arguments import TrainingArguments


SHORTEST = 64  # tokens per row: with fewer, most data have no trained tokens
Replan = Callable[[Mapping[str, Any]], int]  # changed options -> the peak they would give, in bytes
Fitting = Callable[[Mapping[str, Any]], int | None]  # the same, but None if it does not fit


@dataclass(frozen=True)
class Suggestion:
    """Options that make a run fit, and its peak with them, in bytes."""

    options: str
    peak: int


def check_memory(peak: int, base: int, budget: Budget, args: TrainingArguments, replan: Replan) -> None:
    """Raise UserError if `peak` exceeds the budget, naming options that would make the run fit, with their bytes.

    base: bytes of the base model's weights, which only --base-dtype can reduce.
    """
    available = budget.bytes
    if available is None or peak <= available:
        return
    need = f"This run needs {format_bytes_exact(peak)} of device memory, but the budget is {format_bytes(available)} "
    need += f"({budget.source})"
    result = options_that_fit(available, args, replan)
    advice = f"it would fit with {result}" if result else no_fit_advice(base, available, args, replan)
    raise UserError(f"{need}: {advice}.")


def check_adapters(runs: Sequence[TrainingArguments], config: ModelConfig, budget: Budget) -> None:
    """Raise UserError for ranks that are far too large, before anything is built, even for planning."""
    if any(args.train == "quant-scales" for args in runs):
        return
    available = max(virtual_memory().total, budget.bytes or 0)  # smaller excesses are left to the plan
    modules = {module for args in runs for module in resolve_target_modules(args.target_modules, config)}
    # Parameters and gradients in float32, and the optimizer's state; all slots use the largest rank.
    parameter_bytes = 8 + max(sum(state.bytes_per_parameter for state in optimizer_of(args).state) for args in runs)
    a_rank = math.ceil(parameter_bytes * len(runs) * sum(sum(config.lora_modules[module]) for module in modules))
    rank = max(args.lora_r for args in runs)
    if rank * a_rank > available:
        advice = f"lower it to at most {available // a_rank:,}" if available >= a_rank else "choose a smaller model"
        raise UserError(
            f"{setting('lora_r', rank)} needs {format_bytes(rank * a_rank)} of device memory for the adapter's "
            "training "
            f"alone, but only {format_bytes(available)} is available: {advice}."
        )


def no_fit_advice(base: int, available: int, args: TrainingArguments, replan: Replan) -> str:
    """Advice if no option makes a run fit."""
    smaller = f"lower {flag('lora_r')}, or choose a smaller model"
    if base > available and "base_dtype" not in _savings(args):
        return f"the base model alone takes {base:,} bytes, so choose a smaller model"
    for savings in (_savings(args), {}):
        smallest = {**savings, "per_device_train_batch_size": 1, "max_length": min(SHORTEST, args.length)}
        with suppress(UserError):  # a tensor exceeds the limits of the device
            return f"even with {settings(smallest)} it would need {replan(smallest):,} bytes, so {smaller}"
    return smaller


def options_that_fit(available: int, args: TrainingArguments, replan: Replan) -> str:
    """Options that make the run fit, as text with their bytes; empty if there are none."""
    return ", or with ".join(
        f"{way.options} ({way.peak:,} bytes)" for way in fitting_suggestions(available, args, replan)
    )


def fitting_suggestions(available: int, args: TrainingArguments, replan: Replan) -> list[Suggestion]:
    """Options that make the run fit, each sufficient by itself; if none is, all of them together, with rows as long as
    then fit."""

    def fitting(changes: Mapping[str, Any]) -> int | None:
        try:
            peak = replan(changes)
        except UserError:  # a tensor exceeds the limits of the device
            return None
        return peak if peak <= available else None

    savings = _savings(args)
    single = {name: _way({name: value}, fitting) for name, value in savings.items()}
    batch = _largest_batch(args, fitting, {})
    offloaded = None if args.offload_activations else _way({"offload_activations": True}, fitting)
    result = [single.get("gradient_checkpointing"), offloaded, batch, single.get("base_dtype")]
    ways = [way for way in result if way]
    if ways:
        return ways
    together = _way(savings, fitting) if len(savings) > 1 else None
    together = together or (_largest_batch(args, fitting, savings) if savings else None)
    together = together or _longest_rows(args, fitting, savings)
    return [together] if together else []


def _savings(args: TrainingArguments) -> dict[str, Any]:
    """Options that would save memory with little effect on the result, if not chosen yet."""
    result: dict[str, Any] = {} if args.gradient_checkpointing else {"gradient_checkpointing": True}
    base_dtype = DEFAULT_FORMAT if args.base_dtype == AUTO else args.base_dtype
    smaller = base_format(DEFAULT_FORMAT).bits < base_format(base_dtype).bits and args.train != "quant-scales"
    return result | ({"base_dtype": DEFAULT_FORMAT} if smaller else {})


def _way(changes: Mapping[str, Any], fitting: Fitting) -> Suggestion | None:
    peak = fitting(changes)
    return None if peak is None else Suggestion(settings(changes), peak)


def _largest_batch(args: TrainingArguments, fitting: Fitting, changes: Mapping[str, Any]) -> Suggestion | None:
    """The most rows per batch that fit, fewer than now, beside other options; None if not even one does."""
    result, fits, too_many = None, 0, args.batching[1]
    middle = 1
    while too_many - fits > 1:
        way = _way({**changes, "per_device_train_batch_size": middle}, fitting)
        if way is None:
            if not result:
                return None
            too_many = middle
        else:
            result, fits = way, middle
        middle = (fits + too_many) // 2
    return result


def _longest_rows(args: TrainingArguments, fitting: Fitting, changes: Mapping[str, Any]) -> Suggestion | None:
    """Rows of half the current length, or a quarter and so on, one per batch."""
    length = args.length // 2
    while length >= SHORTEST:
        way = _way({**changes, "per_device_train_batch_size": 1, "max_length": length}, fitting)
        if way:
            return way
        length //= 2
    return None


def format_bytes(nbytes: int) -> str:
    """Bytes as readable text: 1.5 GiB."""
    value, unit = float(nbytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if value < 1024:
            break
        value, unit = value / 1024, larger
    return count_noun(nbytes, "byte") if unit == "bytes" else f"{value:,.1f} {unit}"


def format_bytes_exact(nbytes: int) -> str:
    """1.5 GiB (1,610,612,736 bytes); just the bytes below 1 KiB."""
    return format_bytes(nbytes) if abs(nbytes) < 1024 else f"{format_bytes(nbytes)} ({nbytes:,} bytes)"


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by group during training, and during loading; the peak is the larger of the two.

    host: bytes of offloaded activations in the host's memory, which no group counts.
    unified: whether the device has no other memory than the host's.
    """

    groups: dict[str, int]
    loading: int
    host: int = 0
    unified: bool = False

    @property
    def training(self) -> int:
        return sum(self.groups.values())

    @property
    def peak(self) -> int:
        return max(self.training, self.loading)

    @property
    def device_bytes(self) -> int:
        """Bytes during training of the memory that the device uses."""
        return self.training + (self.host if self.unified else 0)

    @property
    def peak_device_bytes(self) -> int:
        """The same, or those during loading if they are more."""
        return max(self.device_bytes, self.loading)


@dataclass(frozen=True)
class RunRequirements:
    """The requirements of a run on its device.

    Attributes:
        needed: bytes at the peak, by the exact plan. base_bytes: those of the base model's weights.
        base: a digest of the base model, then one of the options that adapters of one pipeline must share. Equal for
            runs that may be joined.
        data: digests of the encoded rows, and of the held-out ones.
        work: processed tokens of the whole run. steps: of the whole run. Both are 0 if it ends by time.
        heldout: whether a held-out loss is measured.
        refused: why it cannot run, a sentence; the other values are 0 then.
    """

    needed: int = 0
    base_bytes: int = 0
    base: str = ""
    data: list[str] = field(default_factory=list)
    work: int = 0
    steps: int = 0
    heldout: bool = False
    refused: str | None = None
