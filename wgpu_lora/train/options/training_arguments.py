"""The options of a training run: the command line, recipes, Python and run.json all use this dataclass."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.files.paths import is_path
from wgpu_lora.formats.tokenizer.chat_template import check_date, template_kwargs
from wgpu_lora.names.aliases import real_names, real_value
from wgpu_lora.names.spelling import Naming, error_source, flag, setting
from wgpu_lora.train.init_methods import check_initialisation
from wgpu_lora.train.objectives import OBJECTIVES
from wgpu_lora.train.optimizers import OPTIMIZERS
from wgpu_lora.train.option_types import (
    F32_MAX,
    FOREVER,
    OWN_OPTIONS,
    TYPES,
    Range,
    check,
    check_heldout,
    format_args,
    from_options,
    kinds,
    normalized_args,
    require,
)
from wgpu_lora.train.options.option_fields import (
    ADAPTER,
    BATCHES,
    DISTILLATION,
    FILES,
    MEMORY,
    OPTIMISATION,
    PREFERENCES,
    REWARDS,
    SAVING,
    DistillationOptions,
    GeneralOptions,
    PreferenceOptions,
    RewardOptions,
)
from wgpu_lora.train.track.secret_masking import masked
from wgpu_lora.train.track.trackers import trackers_of

# Options that may change when a run is resumed: they affect what is written, not what is trained.
CHANGEABLE_ON_RESUME = {
    "output", "resume", "overwrite", "device", "memory_budget", "wait",
    "data", "split", "dataset_config", "skip_bad_rows", "model",  # their contents are compared by digest
    "offload_activations",  # the same values
    "lr_scheduler_restart",  # of the extension that it is given with
    "tune", "retune",  # a resumed run keeps its tilings
    "logging_steps", "save_steps", "save_minutes", "save_total_limit", "eval_data", "eval_split",
    "reference_adapter", "teacher", "teacher_adapter", "teacher_cache",  # their digests are compared
    "eval_teacher_cache",
    "rounded_from",  # its loss is measured once
    "reward_timeout", "log_completions",
    "eval_steps", "eval_on_start", "goal", "notes", "run_log", "report_to",
}  # fmt: skip
# Options that may change to extend a run.
LENGTH_OPTIONS = ("num_train_epochs", "max_steps", "target_seconds")
# Options whose values may be paths.
PATHS = (
    "data", "eval_data", "model", "output", "init_adapter", "reference_adapter", "teacher", "teacher_adapter",
    "teacher_cache", "eval_teacher_cache", "rounded_from",
)  # fmt: skip
# Batches by default, unless the data are small (train/training_data.py).
LEAST_BETA = Range(at_least=1e-9, at_most=1e9)  # squares of 1 / beta are float32 numbers
OUTPUT, ROWS_PER_BATCH, ACCUMULATION = "output", 2, 4
DEMO_RATE = 4e-3  # of a model far narrower than those that the default was measured on (docs/defaults.md)
LENGTH = 1024  # tokens per row by default, if the model has as many positions
# Headings of the options in the command line's help, in order.
PANELS = (FILES, ADAPTER, OPTIMISATION, PREFERENCES, DISTILLATION, REWARDS, BATCHES, MEMORY, SAVING)
LISTS = (
    "target_modules",
    "report_to",
    "loss_type",
    "loss_weights",
    "reward_funcs",
    "reward_weights",
    "tools",
)  # which may be given as lists
SIZE = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class TrainingArguments(RewardOptions, DistillationOptions, PreferenceOptions, GeneralOptions):
    """Names and meanings are those of TRL, PEFT and transformers, where they have the option.

    Fields are in the order of the bases from the last to the first.
    """

    def __post_init__(self) -> None:
        usual = self.objective == "sft" or self.objective not in OBJECTIVES  # and imports nothing
        objective = None if usual else OBJECTIVES[self.objective]
        for item in fields(self):
            check(item.name, getattr(self, item.name), item.metadata)
        for name in ("goal", "notes"):  # here, so that no file, tracker or log has secrets of theirs
            if getattr(self, name):
                object.__setattr__(self, name, masked(getattr(self, name)))
        for name in PATHS:
            require(
                is_path(getattr(self, name) or ""), name, "must be a path that is not too long", getattr(self, name)
            )
        if not self.target_modules.strip(" ,"):
            raise UserError(f"{flag('target_modules')} is empty: name at least one module, or use 'all-linear'.")
        check_date(self.template_date)
        if self.beta is not None and not (objective and objective.samples):
            require(LEAST_BETA.holds(self.beta), "beta", LEAST_BETA.rule(), self.beta)
        self._check_trained()
        for selected_by, registered in (("objective", OBJECTIVES), ("optim", OPTIMIZERS)):
            if getattr(self, name := OWN_OPTIONS[selected_by]) is not None:
                kind = registered[getattr(self, selected_by)]
                object.__setattr__(
                    self, name, normalized_args(kind, self, selected_by)
                )  # comparable when a run is resumed
                from_options(kind, self, selected_by)  # checks options that depend on each other
        if (self.learning_rate or 0.0) * self.loraplus_lr_ratio > F32_MAX:
            rate = setting("learning_rate", self.learning_rate)
            ratio = setting("loraplus_lr_ratio", self.loraplus_lr_ratio)
            raise UserError(f"{ratio} and {rate} give B a learning rate beyond float32's range: lower them.")
        if self.resume and self.overwrite:
            raise UserError(f"{flag('resume')} goes on with a run that {flag('overwrite')} removes: leave one out.")
        check_initialisation(self.init_lora_weights, self.lora_r, self.use_dora, self.init_adapter)
        check_heldout(self)
        if self.lr_scheduler_min > 0 and self.lr_scheduler_min > self.rate:
            peak, minimum = setting("learning_rate", self.rate), setting("lr_scheduler_min", self.lr_scheduler_min)
            raise UserError(f"{minimum} is more than the peak, {peak}: give a smaller one.")
        if self.objective != "sft":
            from_options(OBJECTIVES[self.objective], self, "objective")  # checks options that depend on each other
        self.budget()
        trackers_of(self.report_to)

    def _check_trained(self) -> None:
        """Raise UserError for options that contradict what is trained; of the MLP alone, `target_modules` is that."""
        train = setting("train", self.train)
        if self.train == "mlp":
            if self.target_modules not in ("all-linear", "mlp"):
                raise UserError(
                    f"{train} contradicts {setting('target_modules', self.target_modules)}: leave one of them out."
                )
            object.__setattr__(self, "target_modules", "mlp")
        for name in ("init_adapter", "reference_adapter"):
            if self.train == "quant-scales" and getattr(self, name):
                raise UserError(
                    f"{train} trains the base itself, so {flag(name)} cannot be used: merge the adapter first, or "
                    "leave it out."
                )

    def trains(self) -> str:
        """The trained parameters, as text."""
        parameters = "tables and scales" if self.train == "quant-scales" else f"rank {self.lora_r}"
        return f"{parameters} on {self.target_modules}"

    @property
    def rate(self) -> float:
        """The peak learning rate: by default the objective's for a model of 7B."""
        return OBJECTIVES[self.objective].learning_rate if self.learning_rate is None else self.learning_rate

    def rate_for(self, width: int) -> float:
        """The peak learning rate for a model whose hidden states have `width` values."""
        if self.learning_rate is not None:
            return self.learning_rate
        objective = OBJECTIVES[self.objective]
        on_answers = objective.learning_rate == OBJECTIVES["sft"].learning_rate
        return DEMO_RATE if self.model == "demo" and on_answers else objective.default_rate(width)

    def budget(self) -> int | None:
        """memory_budget in bytes."""
        if self.memory_budget is None:
            return None
        match = SIZE.fullmatch(self.memory_budget)
        require(match is not None, "memory_budget", "must be a size such as 4GiB or 800MB", self.memory_budget)
        assert match
        power = " kmgt".index(match[2].lower() or " ")
        return int(float(match[1]) * (1024 if match[3] else 1000) ** power)

    @property
    def directory(self) -> Path:
        """The output directory."""
        return Path(self.output or OUTPUT)

    @property
    def batching(self) -> tuple[bool, int, int]:
        """Whether rows are packed, rows per batch, and batches per step."""
        rows, batches = self.per_device_train_batch_size, self.gradient_accumulation_steps
        return self.packing is not False, rows or ROWS_PER_BATCH, batches or ACCUMULATION

    @property
    def length(self) -> int:
        """Maximum tokens per row; if not given, the default of a model with enough positions."""
        return self.max_length or LENGTH

    def wait_seconds(self) -> float | None:
        """Seconds to wait for memory: None does not wait, infinity (`wait` is FOREVER) waits as long as it takes."""
        return math.inf if self.wait == FOREVER else self.wait or None

    def template_kwargs(self) -> dict[str, Any]:
        return template_kwargs(self.enable_thinking, self.template_date)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def from_values(
    values: Mapping[str, Any], where: str, base: TrainingArguments | None = None, names: Naming | None = None
) -> TrainingArguments:
    """Create arguments from a mapping such as a recipe's; option names of other programs are accepted.

    Args:
        where: the source of the values, which begins error messages.
        names: how messages spell option names; as currently set by default.

    Raises:
        UserError: a name is unknown (the nearest one is suggested) or given twice, or a value is invalid.
    """
    fields_by_name = {f.name: f for f in fields(TrainingArguments)}
    if names is not None:
        with error_source(where, names):
            return from_values(values, where, base)
    explicit = {
        name: _typed(name, value, kinds(fields_by_name[name]), where) for name, value in named(values, where).items()
    }
    base = base or TrainingArguments()
    for selected_by, option in OWN_OPTIONS.items():  # those of another objective or optimizer do not apply
        if explicit.get(selected_by, getattr(base, selected_by)) != getattr(base, selected_by):
            explicit.setdefault(option, None)
    return replace(base, **explicit)


def named(values: Mapping[str, Any], where: str, *extra: str) -> dict[str, Any]:
    """Values by the names of options, or by those in `extra`. Raises UserError, like `from_values`."""
    return real_names(values, [*(f.name for f in fields(TrainingArguments)), *extra], where)


def _typed(name: str, value: Any, parts: list[str], where: str) -> Any:
    types: dict[str, Any] = {"str": str, "int": int, "float": (int, float), "bool": bool}
    if name in LISTS and isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    if name == "device" and type(value) is int:
        value = str(value)
    if name in OWN_OPTIONS.values() and isinstance(value, Mapping):
        value = format_args(value)
    if name == "init_lora_weights" and value is True:
        value = "true"
    if value is None and "None" in parts:
        return None
    fits = any(
        isinstance(value, types[p]) and (p == "bool" or not isinstance(value, bool)) for p in parts if p != "None"
    )
    if not fits:
        kind = " or ".join(TYPES[part] for part in parts if part != "None")
        raise UserError(f"{where}: {flag(name)} must be {kind}, not {value!r}.")
    return real_value(name, value)
