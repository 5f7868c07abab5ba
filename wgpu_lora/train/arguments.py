"""The options of a training run: the command line, recipes, Python and run.json all use this dataclass."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from wgpu_lora.bounded import is_path
from wgpu_lora.errors import UserError
from wgpu_lora.names.aliases import real_names, real_value
from wgpu_lora.names.allowed import COMPUTE_DTYPES, OVERFLOW
from wgpu_lora.names.naming import Naming, flag, naming
from wgpu_lora.track.report_to import HELP, trackers_of
from wgpu_lora.train.declared import NOT_NEGATIVE, POSITIVE, TYPES, Range, check, check_heldout, kinds, option, require
from wgpu_lora.train.objectives import OBJECTIVES
from wgpu_lora.train.optimizers import OPTIMIZERS
from wgpu_lora.train.own_options import OWN_OPTIONS, as_text, checked, created
from wgpu_lora.train.preference_options import PREFERENCES, PreferenceOptions
from wgpu_lora.train.schedule import LR_SCHEDULES
from wgpu_lora.weights.registry import BASE_FORMATS, DEFAULT_FORMAT

# Options that may change when a run is resumed: they affect what is written, not what is trained.
FREE_ON_RESUME = {
    "output", "resume", "device", "memory_budget", "wait",
    "data", "split", "dataset_config", "skip_bad_rows", "model",  # their contents are compared by digest
    "tune",  # a resumed run keeps its tilings
    "logging_steps", "save_steps", "save_total_limit", "eval_data", "eval_split",
    "reference_adapter",  # its digest is compared
    "eval_steps", "eval_on_start", "goal", "notes", "run_log", "report_to",
}  # fmt: skip
# Options that may change to extend a run.
PLAN = ("num_train_epochs", "max_steps", "target_seconds")
PATHS = (
    "data",
    "eval_data",
    "model",
    "output",
    "init_adapter",
    "reference_adapter",
)  # options whose values may be paths
# Batches by default, unless the data are small (train/batching.py).
OUTPUT, ROWS_PER_BATCH, ACCUMULATION = "output", 2, 4
LENGTH = 1024  # tokens per row by default, if the model has as many positions
# Headings of the options in the command line's help.
FILES, ADAPTER, OPTIMISATION = "Model, data and device", "Adapter", "Optimisation"
BATCHES, MEMORY, SAVING = "Length of the run and batches", "Memory", "Logging and saving"
PANELS = (FILES, ADAPTER, OPTIMISATION, PREFERENCES, BATCHES, MEMORY, SAVING)
LISTS = ("target_modules", "report_to", "loss_type", "loss_weights")  # which may be given as lists
SIZE = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class TrainingArguments(PreferenceOptions):
    """Names and meanings are those of TRL, PEFT and transformers, where they have the option."""

    data: str | None = option(
        None,
        FILES,
        "File of rows (JSONL, JSON array, CSV, Parquet), folder with train.jsonl and optionally valid.jsonl, or "
        "Hugging Face dataset.",
    )
    output: str | None = option(
        None,
        FILES,
        "Directory for the adapter, log, model card and checkpoints. Default: 'output' or, with --adapters, the "
        "adapters' own directories.",
    )
    model: str | None = option(None, FILES, "Model directory, GGUF file, hub id, or 'demo'.")
    eval_data: str | None = option(
        None, FILES, "Held-out data, in any form of --data: the loss on it is logged, and best/ keeps the best adapter."
    )
    split: str | None = option(None, FILES, "Split of --data to train on, for example train or 'train[:90%]'.")
    eval_split: str | None = option(None, FILES, "Split to hold out, of --eval-data if given, else of --data.")
    validation_split: float | None = option(
        None, FILES, "Share (0.1) or number (50) of the rows of --data to hold out, instead of --eval-data; seeded."
    )
    dataset_config: str | None = option(None, FILES, "Configuration of a Hugging Face dataset that has several.")
    skip_bad_rows: bool = option(
        False, FILES, "Skip rows that cannot be read; they are listed in skipped_rows.jsonl in --output."
    )
    device: str | None = option(None, FILES, "Device index or part of its name; 'wgpu-lora info' lists the devices.")
    base_dtype: str = option(DEFAULT_FORMAT, MEMORY, "Storage type of the frozen base weights.", choices=BASE_FORMATS)
    compute_dtype: str = option(
        "f32",
        MEMORY,
        "Type that the inputs of frozen matmuls are rounded to; accumulation stays in f32.",
        choices=COMPUTE_DTYPES,
    )
    tune: bool = option(
        True, FILES, "Time kernel tilings on the device before a model's first run, and use the fastest."
    )
    init_adapter: str | None = option(None, FILES, "PEFT adapter directory to start from.")
    resume: bool = option(False, SAVING, "Continue the run in --output from its last checkpoint.")
    lora_r: int = option(16, ADAPTER, "Rank of the adapter.", within=POSITIVE)
    lora_alpha: float = option(32, ADAPTER, "Scale: the adapter's output is multiplied by alpha / r.", within=POSITIVE)
    lora_dropout: float = option(
        0.0, ADAPTER, "Dropout probability of the adapter's input.", within=Range(at_least=0, below=1)
    )
    use_rslora: bool = option(False, ADAPTER, "Scale by alpha / sqrt(r) instead (rsLoRA).")
    target_modules: str = option(
        "all-linear",
        ADAPTER,
        "'all-linear', names such as q_proj,v_proj, or a regular expression matched against module paths.",
    )
    learning_rate: float = option(2e-4, OPTIMISATION, "Peak learning rate.", within=NOT_NEGATIVE)
    lr_scheduler_type: str = option("cosine", OPTIMISATION, "Learning-rate schedule.", choices=LR_SCHEDULES)
    warmup_ratio: float = option(
        0.03,
        OPTIMISATION,
        "Fraction of the steps over which the learning rate warms up.",
        within=Range(at_least=0, at_most=1),
    )
    warmup_steps: int = option(
        0,
        OPTIMISATION,
        "Steps over which the learning rate warms up, instead of a fraction of them, if positive.",
        within=NOT_NEGATIVE,
    )
    objective: str = option("sft", OPTIMISATION, "Training objective.", choices=OBJECTIVES)
    objective_args: str | None = option(
        None, OPTIMISATION, "Options of the objective's own, as NAME=VALUE separated by commas."
    )
    optim: str = option("adamw", OPTIMISATION, "The optimizer.", choices=OPTIMIZERS)
    optim_args: str | None = option(
        None, OPTIMISATION, "Options of the optimizer's own, as NAME=VALUE separated by commas."
    )
    weight_decay: float = option(0.0, OPTIMISATION, "Decoupled weight decay.", within=NOT_NEGATIVE)
    adam_beta1: float = option(0.9, OPTIMISATION, "Decay of AdamW's first moment.", within=Range(at_least=0, below=1))
    adam_beta2: float = option(
        0.999, OPTIMISATION, "Decay of AdamW's second moment.", within=Range(at_least=0, below=1)
    )
    adam_epsilon: float = option(1e-8, OPTIMISATION, "Added to the root of AdamW's second moment.", within=POSITIVE)
    max_grad_norm: float = option(
        1.0, OPTIMISATION, "Clip the gradient's global norm to this value; 0 turns clipping off.", within=NOT_NEGATIVE
    )
    per_device_train_batch_size: int | None = option(
        None,
        BATCHES,
        "Rows per batch; with packing, the batch holds this many times --max-length tokens. Default: 2, adapted to "
        "small data.",
        within=POSITIVE,
    )
    gradient_accumulation_steps: int | None = option(
        None, BATCHES, "Batches per optimizer step. Default: 4, adapted to small data.", within=POSITIVE
    )
    num_train_epochs: float = option(
        3.0, BATCHES, "Number of passes over the data.", within=Range(above=0, at_most=1000), hint="max_steps"
    )
    max_steps: int = option(
        -1, BATCHES, "Number of optimizer steps, instead of epochs, if positive.", within=Range(above=0, unset=-1)
    )
    target_seconds: float | None = option(
        None, BATCHES, "Train for this many seconds of wall-clock time, instead of epochs.", within=POSITIVE
    )
    max_length: int | None = option(
        None,
        BATCHES,
        "Maximum tokens per row. Default: 1024, or the model's number of positions if that is smaller.",
        within=Range(at_least=2),
    )
    on_overflow: str = option("truncate", BATCHES, "What to do with longer rows.", choices=OVERFLOW)
    packing: bool | None = option(
        None,
        BATCHES,
        "Pack several rows into one batch, without attention between them. Default: on, unless the data are small.",
    )
    completion_only_loss: bool = option(True, BATCHES, "Compute the loss on answers only.")
    enable_thinking: bool | None = option(None, BATCHES, "Passed to the chat template.")
    shuffle: bool = option(True, BATCHES, "Shuffle the rows every epoch.")
    gradient_checkpointing: bool = option(
        False, MEMORY, "Recompute activations in the backward pass: less memory, about a third more work."
    )
    memory_budget: str | None = option(
        None, MEMORY, "Refuse a run that needs more device memory than this, for example 4GiB."
    )
    wait: float | None = option(
        None,
        MEMORY,
        "Seconds to wait for device memory in use by other processes; 0 or no number waits indefinitely.",
        within=NOT_NEGATIVE,
    )
    seed: int = option(
        42,
        OPTIMISATION,
        "Seed of the initial adapter, the order of rows and dropout.",
        within=Range(at_least=0, below=2**32, top="2^32"),
    )
    logging_steps: int | None = option(
        None,
        SAVING,
        "Steps between log lines. Default: 10, or 1 in runs of at most 100 steps.",
        within=POSITIVE,
    )
    save_steps: int = option(200, SAVING, "Steps between checkpoints; 0 saves only at the end.", within=NOT_NEGATIVE)
    save_total_limit: int = option(3, SAVING, "Number of checkpoints to keep.", within=POSITIVE)
    eval_steps: int = option(
        0, SAVING, "Steps between measurements of the held-out loss; 0 means after every epoch.", within=NOT_NEGATIVE
    )
    eval_on_start: bool = option(True, SAVING, "Also measure the held-out loss before the first step.")
    report_to: str | None = option(None, SAVING, HELP)
    goal: str | None = option(None, SAVING, "What the run is for, in the run log ('wgpu-lora runs').")
    notes: str | None = option(None, SAVING, "Notes on the run, in the run log.")
    run_log: bool = option(True, SAVING, "Record the run in the run log.")

    def __post_init__(self) -> None:
        for item in fields(self):
            check(item.name, getattr(self, item.name), item.metadata)
        for name in PATHS:
            require(
                is_path(getattr(self, name) or ""), name, "must be a path that is not too long", getattr(self, name)
            )
        if not self.target_modules.strip(" ,"):
            raise UserError(f"{flag('target_modules')} is empty: name at least one module, or use 'all-linear'.")
        for selected_by, registered in (("objective", OBJECTIVES), ("optim", OPTIMIZERS)):
            if getattr(self, name := OWN_OPTIONS[selected_by]) is not None:
                kind = registered[getattr(self, selected_by)]
                object.__setattr__(self, name, checked(kind, self, selected_by))  # comparable when a run is resumed
        check_heldout(self)
        if self.objective != "sft":
            created(OBJECTIVES[self.objective], self, "objective")  # checks options that depend on each other
        self.budget()
        trackers_of(self.report_to)

    def budget(self) -> int | None:
        """memory_budget in bytes."""
        if self.memory_budget is None:
            return None
        found = SIZE.fullmatch(self.memory_budget)
        require(found is not None, "memory_budget", "must be a size such as 4GiB or 800MB", self.memory_budget)
        assert found
        power = " kmgt".index(found[2].lower() or " ")
        return int(float(found[1]) * (1024 if found[3] else 1000) ** power)

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
        """Seconds to wait for memory: None does not wait, infinity (`wait` is 0) waits indefinitely."""
        return math.inf if self.wait == 0 else self.wait

    def template_kwargs(self) -> dict[str, Any]:
        return {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def from_values(
    values: Mapping[str, Any], where: str, base: TrainingArguments | None = None, names: Naming | None = None
) -> TrainingArguments:
    """Create arguments from a mapping such as a recipe's; option names of other programs are accepted.

    Args:
        where: the source of the values, which begins error messages.
        names: how messages spell option names; as currently set if not given.

    Raises:
        UserError: a name is unknown (the nearest one is suggested) or given twice, or a value is invalid.
    """
    known = {f.name: f for f in fields(TrainingArguments)}
    if names is not None:
        with naming(names):
            try:
                return from_values(values, where, base)
            except UserError as error:
                text = str(error)
                raise UserError(text if text.startswith(where) else f"{where}: {text}") from None
    given = {name: _typed(name, value, kinds(known[name]), where) for name, value in named(values, where).items()}
    base = base or TrainingArguments()
    for selected_by, own in OWN_OPTIONS.items():  # those of another objective or optimizer do not apply
        if given.get(selected_by, getattr(base, selected_by)) != getattr(base, selected_by):
            given.setdefault(own, None)
    return replace(base, **given)


def named(values: Mapping[str, Any], where: str, *more: str) -> dict[str, Any]:
    """Values by the names of options, or by those in `more`. Raises UserError, like `from_values`."""
    return real_names(values, [*(f.name for f in fields(TrainingArguments)), *more], where)


def _typed(name: str, value: Any, parts: list[str], where: str) -> Any:
    allowed: dict[str, Any] = {"str": str, "int": int, "float": (int, float), "bool": bool}
    if name in LISTS and isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    if name == "device" and type(value) is int:
        value = str(value)
    if name in OWN_OPTIONS.values() and isinstance(value, Mapping):
        value = as_text(value)
    if value is None and "None" in parts:
        return None
    fits = any(
        isinstance(value, allowed[p]) and (p == "bool" or not isinstance(value, bool)) for p in parts if p != "None"
    )
    if not fits:
        kind = " or ".join(TYPES[part] for part in parts if part != "None")
        raise UserError(f"{where}: {flag(name)} must be {kind}, not {value!r}.")
    return real_value(name, value)
