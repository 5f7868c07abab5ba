"""Every option of a training run, once: the command line, recipes, Python and run.json all read this dataclass."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from wgpu_lora.bounded import is_name, read_toml
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.assets import asset_dir
from wgpu_lora.models.config import LINEAR_PATHS

SCHEDULERS = ("cosine", "linear", "constant", "constant_with_warmup")
OVERFLOW = ("truncate", "drop")
# What may differ between a run and its resumption: it changes what is written, not what is trained.
FREE_ON_RESUME = {
    "output",
    "data",  # what they hold is compared by digest
    "model",
    "resume",
    "device",
    "memory_budget",
    "wait",
    "tune",  # a resumed run keeps its tiles
    "logging_steps",
    "save_steps",
    "save_total_limit",
    "eval_data",
    "eval_steps",
    "eval_on_start",
}
# What may also differ, by which a run is extended: how far it goes.
PLAN = ("num_train_epochs", "max_steps", "target_seconds")
# What batches are where nothing is said and the data are not small (train/batching.py).
OUTPUT, ROWS_PER_BATCH, ACCUMULATION = "output", 2, 4
# Headings under which the command line's help lists the options.
FILES, ADAPTER, OPTIMISATION = "Model, data and device", "Adapter", "Optimisation"
BATCHES, MEMORY, SAVING = "Length of the run and batches", "Memory", "Logging and saving"
PANELS = (FILES, ADAPTER, OPTIMISATION, BATCHES, MEMORY, SAVING)
F32_TINY, F32_MAX = 1.1754943508222875e-38, 3.4028234663852886e38
SIZE = re.compile(r"\s*([0-9]{1,15}(?:\.[0-9]{1,15})?)\s*([kmgt]?)(i?)b?\s*", re.IGNORECASE)


def option(default: Any, panel: str, text: str) -> Any:
    return field(default=default, metadata={"help": text, "panel": panel})


@dataclass(frozen=True)
class TrainingArguments:
    """Names and meanings are those of TRL, PEFT and transformers wherever they have them."""

    data: str | None = option(None, FILES, "JSONL file, or a folder with train.jsonl and perhaps valid.jsonl.")
    output: str | None = option(
        None,
        FILES,
        "Directory for the adapter, log, card and checkpoints; 'output' if not given, and with --adapters no other "
        "than theirs.",
    )
    model: str | None = option(None, FILES, "Model directory, GGUF file, hub id, or 'demo'.")
    eval_data: str | None = option(
        None, FILES, "Held-out JSONL file: its loss is logged, and best/ keeps the best adapter."
    )
    device: str | None = option(None, FILES, "Adapter index or a part of its name, as 'wgpu-lora info' lists them.")
    base_dtype: str = option("nf4", MEMORY, "How the frozen weights are kept: nf4, bf16, f16 or f32.")
    compute_dtype: str = option(
        "f32", MEMORY, "What activations are rounded to before a frozen matrix: f32, bf16 or f16. Sums stay f32."
    )
    tune: bool = option(
        True, FILES, "Time the kernels' tilings on this device before the first run, and remember the fastest."
    )
    init_adapter: str | None = option(None, FILES, "PEFT adapter directory to start from.")
    resume: bool = option(False, SAVING, "Continue the run in --output from its last checkpoint.")
    lora_r: int = option(16, ADAPTER, "Rank of the adapters.")
    lora_alpha: float = option(32, ADAPTER, "Scale: alpha / r multiplies the adapter's output.")
    lora_dropout: float = option(0.0, ADAPTER, "Dropout on the adapter's input.")
    use_rslora: bool = option(False, ADAPTER, "Scale by alpha / sqrt(r) instead.")
    target_modules: str = option("all-linear", ADAPTER, "'all-linear', or names such as q_proj,v_proj.")
    learning_rate: float = option(2e-4, OPTIMISATION, "Peak learning rate.")
    lr_scheduler_type: str = option("cosine", OPTIMISATION, "cosine, linear, constant or constant_with_warmup.")
    warmup_ratio: float = option(0.03, OPTIMISATION, "Share of the steps over which the learning rate rises.")
    weight_decay: float = option(0.0, OPTIMISATION, "Decoupled weight decay of AdamW.")
    max_grad_norm: float = option(1.0, OPTIMISATION, "Clip the gradient's global norm to this; 0 does not clip.")
    per_device_train_batch_size: int | None = option(
        None,
        BATCHES,
        "Rows a batch; with packing, the batch holds this many times max-length tokens. 2 if not given, or what suits "
        "small data.",
    )
    gradient_accumulation_steps: int | None = option(
        None, BATCHES, "Batches an optimizer step; 4 if not given, or what suits small data."
    )
    num_train_epochs: float = option(3.0, BATCHES, "Passes over the data.")
    max_steps: int = option(-1, BATCHES, "Optimizer steps, instead of epochs, if positive.")
    target_seconds: float | None = option(None, BATCHES, "Wall-clock seconds to train for, instead of epochs.")
    max_length: int = option(1024, BATCHES, "Tokens of a row at most.")
    on_overflow: str = option("truncate", BATCHES, "What happens to longer rows: truncate or drop.")
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
        None, MEMORY, "Seconds to queue for device memory that others hold; without a number, as long as it takes."
    )
    seed: int = option(42, OPTIMISATION, "Of the initial adapter, the order and dropout.")
    logging_steps: int | None = option(
        None, SAVING, "Steps between log lines; if not given, 10, or 1 in a run of at most 100 steps."
    )
    save_steps: int = option(200, SAVING, "Steps between checkpoints; 0 saves only at the end.")
    save_total_limit: int = option(3, SAVING, "Checkpoints kept.")
    eval_steps: int = option(0, SAVING, "Steps between held-out losses; 0 means after every epoch.")
    eval_on_start: bool = option(True, SAVING, "Measure the held-out loss before the first step too.")

    def __post_init__(self) -> None:
        self._check_values()
        positive = (
            "lora_r",
            "per_device_train_batch_size",
            "gradient_accumulation_steps",
            "logging_steps",
            "save_total_limit",
            "lora_alpha",
            "num_train_epochs",
        )
        for name in positive:
            value = getattr(self, name)
            self._require(value is None or 0 < value < math.inf, name, "must be greater than 0")
        for name in (
            "warmup_ratio",
            "weight_decay",
            "max_grad_norm",
            "learning_rate",
            "save_steps",
            "eval_steps",
            "seed",
        ):
            value = getattr(self, name)
            self._require(math.isfinite(value) and value >= 0, name, "must be 0 or more")
        self._require(self.wait is None or 0 <= self.wait < math.inf, "wait", "must be 0 or more")
        self._require(self.max_length >= 2, "max_length", "must be at least 2")
        self._require(0 <= self.lora_dropout < 1, "lora_dropout", "must be at least 0 and less than 1")
        self._require(self.warmup_ratio <= 1, "warmup_ratio", "must be at most 1")
        self._require(
            self.target_seconds is None or 0 < self.target_seconds < math.inf,
            "target_seconds",
            "must be greater than 0",
        )
        # Here, because they bring the GPU's library: --help needs none.
        from wgpu_lora.models.decoder import BASE_DTYPES
        from wgpu_lora.ops.half import COMPUTE_DTYPES

        choices = {
            "lr_scheduler_type": SCHEDULERS,
            "base_dtype": BASE_DTYPES,
            "compute_dtype": COMPUTE_DTYPES,
            "on_overflow": OVERFLOW,
        }
        for name, allowed in choices.items():
            self._require(getattr(self, name) in allowed, name, f"must be one of {', '.join(allowed)}")
        self._require(self.max_steps == -1 or self.max_steps > 0, "max_steps", "must be greater than 0")
        self._require(self.seed < 2**32, "seed", "must be less than 2^32")
        self._require(self.num_train_epochs <= 1000, "num_train_epochs", "must be at most 1000 (use --max-steps)")
        self.modules()
        self.budget()

    def _check_values(self) -> None:
        """Refuses what no option can hold: text that names no file, numbers that the device cannot."""
        for name, value in asdict(self).items():
            if isinstance(value, str):
                self._require(is_name(value), name, "must be text in UTF-8 without NUL", shown=ascii(value))
            elif isinstance(value, int) and not isinstance(value, bool):
                self._require(-(2**31) <= value < 2**32, name, "must be a whole number of 32 bits")
            elif isinstance(value, float) and math.isfinite(value):
                fits = value == 0 or F32_TINY <= abs(value) <= F32_MAX
                self._require(fits, name, "must be a number within float32's range")

    def _require(self, fine: bool, name: str, rule: str, shown: str | None = None) -> None:
        if not fine:
            raise UserError(f"{flag(name)} {rule}, not {shown or getattr(self, name)!s:.80}.")

    def modules(self) -> tuple[str, ...]:
        """The module names that target_modules stands for."""
        if self.target_modules == "all-linear":
            return tuple(LINEAR_PATHS)
        names = tuple(n.strip() for n in self.target_modules.split(",") if n.strip())
        for name in names:
            if name not in LINEAR_PATHS:
                raise UserError(
                    f"--target-modules has no '{name:.40}': choose among {', '.join(LINEAR_PATHS)}, or 'all-linear'."
                )
        if not names:
            raise UserError("--target-modules is empty: name at least one module, or use 'all-linear'.")
        return tuple(n for n in LINEAR_PATHS if n in names)

    def budget(self) -> int | None:
        """memory_budget in bytes."""
        if self.memory_budget is None:
            return None
        found = SIZE.fullmatch(self.memory_budget)
        self._require(found is not None, "memory_budget", "must be a size such as 4GiB or 800MB")
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

    def wait_seconds(self) -> float | None:
        """How long to queue for memory, None not to; 0 says as long as it takes."""
        return math.inf if self.wait == 0 else self.wait

    def template_kwargs(self) -> dict[str, Any]:
        return {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def from_values(values: Mapping[str, Any], where: str, base: TrainingArguments | None = None) -> TrainingArguments:
    """Arguments from names and values such as a recipe has.

    Raises:
        UserError: a name is unknown (the nearest is suggested) or a value is of the wrong type.
    """
    known = {f.name: f for f in fields(TrainingArguments)}
    given: dict[str, Any] = {}
    for key, value in values.items():
        name = key.replace("-", "_")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f": did you mean '{near[0]}'?" if near else "; 'wgpu-lora finetune --help' lists the options."
            raise UserError(f"{where} has an unknown option '{key}'{hint}")
        given[name] = _typed(name, value, str(known[name].type), where)
    return replace(base or TrainingArguments(), **given)


def gather(
    given: Mapping[str, Any], recipe: str | None, where: str, demo: bool = True, beside: str | None = None
) -> tuple[TrainingArguments, Path | None]:
    """The options that were given, over a recipe's or those of a run that is resumed; also the recipe's path.

    With `demo`, where neither a recipe nor data nor another model is named, it is the demo's recipe. `beside` is a
    pipeline's first checkpoint directory, which finds the pipeline's record where no output is named.
    """
    if given.get("resume"):
        from wgpu_lora.train.resume import take_up

        path = find_recipe(recipe) if recipe else None
        values = {**(read_recipe(path) if path else {}), **given}
        return take_up(values, Path(values.get("output") or beside or _last_output()), where), path
    if demo and recipe is None and not given.get("data") and given.get("model") in (None, "demo"):
        recipe = "demo"
    if recipe is None:
        return from_values(given, where), None
    path = find_recipe(recipe)
    return from_values(given, where, from_values(read_recipe(path), f"The recipe {path}")), path


def _last_output() -> str:
    """Where a run that nobody named is: the demo's or, where there is none, the directory that is taken by default."""
    demo = read_recipe(find_recipe("demo"))["output"]
    return demo if Path(demo).exists() else OUTPUT


def find_recipe(name: str) -> Path:
    """A recipe file by its path, or one of the bundled ones by its name."""
    bundled = asset_dir("recipes") / f"{name}.toml"
    return bundled if not Path(name).exists() and bundled.is_file() else Path(name)


def read_recipe(path: Path) -> dict[str, Any]:
    """A flat TOML file of option names and values."""
    if not path.exists():
        names = ", ".join(sorted(p.stem for p in asset_dir("recipes").glob("*.toml")))
        raise UserError(f"The recipe {path} does not exist: give a TOML file, or a bundled one ({names}).")
    values = read_toml(path, "The recipe")
    nested = [key for key, value in values.items() if isinstance(value, dict)]
    if nested:
        raise UserError(f"The recipe {path} has a table [{nested[0]}]: recipes are flat, one option a line.")
    return values


def _typed(name: str, value: Any, kind: str, where: str) -> Any:
    allowed: dict[str, Any] = {"str": str, "int": int, "float": (int, float), "bool": bool}
    parts = [p.strip() for p in kind.split("|")]
    if name == "target_modules" and isinstance(value, list):
        value = ",".join(map(str, value))
    if value is None and "None" in parts:
        return None
    fits = any(
        isinstance(value, allowed[p]) and (p == "bool" or not isinstance(value, bool)) for p in parts if p != "None"
    )
    if not fits:
        raise UserError(f"{where}: '{name}' must be {' or '.join(p for p in parts if p != 'None')}, not {value!r}.")
    return value
