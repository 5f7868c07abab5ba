"""Every option of a training run, once: the command line, recipes, Python and run.json all read this dataclass."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.names.aliases import real_names, real_value
from wgpu_lora.names.allowed import COMPUTE_DTYPES, LR_SCHEDULERS, OVERFLOW
from wgpu_lora.names.naming import Naming, flag, naming
from wgpu_lora.train.declared import Range, check, kinds, option, require
from wgpu_lora.train.objectives import OBJECTIVES
from wgpu_lora.train.optimizers import OPTIMIZERS
from wgpu_lora.weights.registry import BASE_FORMATS, DEFAULT_FORMAT

# What may differ between a run and its resumption: it changes what is written, not what is trained.
FREE_ON_RESUME = {
    "output", "resume", "device", "memory_budget", "wait",
    "data", "split", "dataset_config", "skip_bad_rows", "model",  # what they hold is compared by digest
    "tune",  # a resumed run keeps its tiles
    "logging_steps", "save_steps", "save_total_limit", "eval_data", "eval_split",
    "eval_steps", "eval_on_start",
}  # fmt: skip
# What may also differ, by which a run is extended: how far it goes.
PLAN = ("num_train_epochs", "max_steps", "target_seconds")
# What batches are where nothing is said and the data are not small (train/batching.py).
OUTPUT, ROWS_PER_BATCH, ACCUMULATION = "output", 2, 4
LENGTH = 1024  # tokens of a row, where nothing is said and the model has as many positions
# Headings under which the command line's help lists the options.
FILES, ADAPTER, OPTIMISATION = "Model, data and device", "Adapter", "Optimisation"
BATCHES, MEMORY, SAVING = "Length of the run and batches", "Memory", "Logging and saving"
PANELS = (FILES, ADAPTER, OPTIMISATION, BATCHES, MEMORY, SAVING)
POSITIVE, NOT_NEGATIVE = Range(above=0), Range(at_least=0)
SIZE = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


@dataclass(frozen=True)
class TrainingArguments:
    """Names and meanings are those of TRL, PEFT and transformers wherever they have them."""

    data: str | None = option(
        None,
        FILES,
        "File of rows (JSONL, JSON array, CSV, Parquet), folder with train.jsonl and perhaps valid.jsonl, or data set "
        "of Hugging Face.",
    )
    output: str | None = option(
        None,
        FILES,
        "Directory for the adapter, log, card and checkpoints; 'output' if not given, and with --adapters no other "
        "than theirs.",
    )
    model: str | None = option(None, FILES, "Model directory, GGUF file, hub id, or 'demo'.")
    eval_data: str | None = option(
        None, FILES, "Held-out data, as --data: their loss is logged, and best/ keeps the best adapter."
    )
    split: str | None = option(None, FILES, "Split of --data to train on, such as train or 'train[:90%]'.")
    eval_split: str | None = option(None, FILES, "Split to hold out, of --eval-data or else of --data.")
    dataset_config: str | None = option(None, FILES, "Configuration of a data set of Hugging Face that has several.")
    skip_bad_rows: bool = option(
        False, FILES, "Go on without rows that cannot be read; they are set aside in skipped_rows.jsonl in --output."
    )
    device: str | None = option(None, FILES, "Device index or part of its name, as 'wgpu-lora info' lists them.")
    base_dtype: str = option(DEFAULT_FORMAT, MEMORY, "How the frozen weights are kept.", choices=BASE_FORMATS)
    compute_dtype: str = option(
        "f32",
        MEMORY,
        "What activations are rounded to before a frozen matrix; sums stay f32.",
        choices=COMPUTE_DTYPES,
    )
    tune: bool = option(
        True, FILES, "Time the kernels' tilings on this device before the first run, and remember the fastest."
    )
    init_adapter: str | None = option(None, FILES, "PEFT adapter directory to start from.")
    resume: bool = option(False, SAVING, "Continue the run in --output from its last checkpoint.")
    lora_r: int = option(16, ADAPTER, "Rank of the adapters.", within=POSITIVE)
    lora_alpha: float = option(32, ADAPTER, "Scale: alpha / r multiplies the adapter's output.", within=POSITIVE)
    lora_dropout: float = option(0.0, ADAPTER, "Dropout on the adapter's input.", within=Range(at_least=0, below=1))
    use_rslora: bool = option(False, ADAPTER, "Scale by alpha / sqrt(r) instead.")
    target_modules: str = option(
        "all-linear", ADAPTER, "'all-linear', names such as q_proj,v_proj, or a regular expression over modules' paths."
    )
    learning_rate: float = option(2e-4, OPTIMISATION, "Peak learning rate.", within=NOT_NEGATIVE)
    lr_scheduler_type: str = option(
        "cosine", OPTIMISATION, "How the learning rate changes over the steps.", choices=LR_SCHEDULERS
    )
    warmup_ratio: float = option(
        0.03,
        OPTIMISATION,
        "Share of the steps over which the learning rate rises.",
        within=Range(at_least=0, at_most=1),
    )
    warmup_steps: int = option(
        0,
        OPTIMISATION,
        "Steps over which the learning rate rises, instead of a share of them, if positive.",
        within=NOT_NEGATIVE,
    )
    objective: str = option("sft", OPTIMISATION, "What is learnt from the rows.", choices=OBJECTIVES)
    optim: str = option("adamw", OPTIMISATION, "The optimizer.", choices=OPTIMIZERS)
    weight_decay: float = option(0.0, OPTIMISATION, "Decoupled weight decay.", within=NOT_NEGATIVE)
    adam_beta1: float = option(0.9, OPTIMISATION, "Decay of AdamW's first moment.", within=Range(at_least=0, below=1))
    adam_beta2: float = option(
        0.999, OPTIMISATION, "Decay of AdamW's second moment.", within=Range(at_least=0, below=1)
    )
    adam_epsilon: float = option(1e-8, OPTIMISATION, "Added to the root of AdamW's second moment.", within=POSITIVE)
    max_grad_norm: float = option(
        1.0, OPTIMISATION, "Clip the gradient's global norm to this; 0 does not clip.", within=NOT_NEGATIVE
    )
    per_device_train_batch_size: int | None = option(
        None,
        BATCHES,
        "Rows a batch; with packing, the batch holds this many times max-length tokens. 2 if not given, or what suits "
        "small data.",
        within=POSITIVE,
    )
    gradient_accumulation_steps: int | None = option(
        None, BATCHES, "Batches an optimizer step; 4 if not given, or what suits small data.", within=POSITIVE
    )
    num_train_epochs: float = option(
        3.0, BATCHES, "Passes over the data.", within=Range(above=0, at_most=1000), hint="max_steps"
    )
    max_steps: int = option(
        -1, BATCHES, "Optimizer steps, instead of epochs, if positive.", within=Range(above=0, unset=-1)
    )
    target_seconds: float | None = option(
        None, BATCHES, "Wall-clock seconds to train for, instead of epochs.", within=POSITIVE
    )
    max_length: int | None = option(
        None,
        BATCHES,
        "Tokens of a row at most; if not given, 1024, or as many as the model has positions.",
        within=Range(at_least=2),
    )
    on_overflow: str = option("truncate", BATCHES, "What happens to longer rows.", choices=OVERFLOW)
    packing: bool | None = option(
        None,
        BATCHES,
        "Pack several rows into one batch; no row sees another. If not given, on unless the data are small.",
    )
    completion_only_loss: bool = option(True, BATCHES, "Train on answers only.")
    enable_thinking: bool | None = option(None, BATCHES, "Passed to the chat template.")
    shuffle: bool = option(True, BATCHES, "Draw a new order every epoch.")
    gradient_checkpointing: bool = option(
        False, MEMORY, "Recompute activations in the backward pass: less memory, a third more work."
    )
    memory_budget: str | None = option(
        None, MEMORY, "Refuse a run that needs more device memory than this, such as 4GiB."
    )
    wait: float | None = option(
        None,
        MEMORY,
        "Seconds to queue for device memory that others hold; without a number, as long as it takes.",
        within=NOT_NEGATIVE,
    )
    seed: int = option(
        42,
        OPTIMISATION,
        "Of the initial adapter, the order and dropout.",
        within=Range(at_least=0, below=2**32, top="2^32"),
    )
    logging_steps: int | None = option(
        None,
        SAVING,
        "Steps between log lines; if not given, 10, or 1 in a run of at most 100 steps.",
        within=POSITIVE,
    )
    save_steps: int = option(200, SAVING, "Steps between checkpoints; 0 saves only at the end.", within=NOT_NEGATIVE)
    save_total_limit: int = option(3, SAVING, "Checkpoints kept.", within=POSITIVE)
    eval_steps: int = option(
        0, SAVING, "Steps between held-out losses; 0 means after every epoch.", within=NOT_NEGATIVE
    )
    eval_on_start: bool = option(True, SAVING, "Measure the held-out loss before the first step too.")

    def __post_init__(self) -> None:
        for item in fields(self):
            check(item.name, getattr(self, item.name), item.metadata)
        if not self.target_modules.strip(" ,"):
            raise UserError(f"{flag('target_modules')} is empty: name at least one module, or use 'all-linear'.")
        self.budget()

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
        """Where the run writes."""
        return Path(self.output or OUTPUT)

    @property
    def batching(self) -> tuple[bool, int, int]:
        """Whether rows are packed, rows a batch, and batches a step."""
        rows, batches = self.per_device_train_batch_size, self.gradient_accumulation_steps
        return self.packing is not False, rows or ROWS_PER_BATCH, batches or ACCUMULATION

    @property
    def length(self) -> int:
        """Tokens of a row at most; while that is not given, what it will be with a model of enough positions."""
        return self.max_length or LENGTH

    def wait_seconds(self) -> float | None:
        """How long to queue for memory, None not to; 0 says as long as it takes."""
        return math.inf if self.wait == 0 else self.wait

    def template_kwargs(self) -> dict[str, Any]:
        return {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def from_values(
    values: Mapping[str, Any], where: str, base: TrainingArguments | None = None, names: Naming | None = None
) -> TrainingArguments:
    """Arguments from names and values such as a recipe has; names that other programs use are understood.

    Args:
        where: what the values are of; it begins the errors.
        names: what options are called there, by default as they are called already.

    Raises:
        UserError: a name is unknown (the nearest is suggested), given twice, or a value cannot be.
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
    return replace(base or TrainingArguments(), **given)


def named(values: Mapping[str, Any], where: str, *more: str) -> dict[str, Any]:
    """Values by the names of options, and of `more` than those; UserError as `from_values`."""
    return real_names(values, [*(f.name for f in fields(TrainingArguments)), *more], where)


_TYPES = {"str": "text", "int": "a whole number", "float": "a number", "bool": "true or false"}


def _typed(name: str, value: Any, parts: list[str], where: str) -> Any:
    allowed: dict[str, Any] = {"str": str, "int": int, "float": (int, float), "bool": bool}
    if name == "target_modules" and isinstance(value, list | tuple):
        value = ",".join(map(str, value))
    if value is None and "None" in parts:
        return None
    fits = any(
        isinstance(value, allowed[p]) and (p == "bool" or not isinstance(value, bool)) for p in parts if p != "None"
    )
    if not fits:
        kind = " or ".join(_TYPES[part] for part in parts if part != "None")
        raise UserError(f"{where}: {flag(name)} must be {kind}, not {value!r}.")
    return real_value(name, value)
