"""Every option of a training run, once: the command line, recipes, Python and run.json all read this dataclass."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.models.config import LINEAR_PATHS
from wgpu_lora.models.decoder import BASE_DTYPES

SCHEDULERS = ("cosine", "linear", "constant", "constant_with_warmup")
OVERFLOW = ("truncate", "drop")
# What may differ between a run and its resumption: it changes what is written, not what is trained.
FREE_ON_RESUME = {"output", "resume", "device", "logging_steps", "save_steps", "save_total_limit", "eval_data", "eval_steps"}


def option(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class TrainingArguments:
    """Names and meanings are those of TRL, PEFT and transformers wherever they have them."""

    data: str | None = option(None, "JSONL file, or a folder with train.jsonl and perhaps valid.jsonl.")
    output: str = option("output", "Directory for the adapter, log, card and checkpoints.")
    model: str | None = option(None, "Model directory, hub id, or 'demo'.")
    eval_data: str | None = option(None, "Held-out JSONL file: its loss is logged, and best/ keeps the best adapter.")
    device: str | None = option(None, "Adapter index or a part of its name, as 'wgpu-lora info' lists them.")
    base_dtype: str = option("nf4", "How the frozen weights are kept: nf4, bf16, f16 or f32.")
    init_adapter: str | None = option(None, "PEFT adapter directory to start from.")
    resume: bool = option(False, "Continue the run in --output from its last checkpoint.")
    lora_r: int = option(16, "Rank of the adapters.")
    lora_alpha: float = option(32, "Scale: alpha / r multiplies the adapter's output.")
    lora_dropout: float = option(0.0, "Dropout on the adapter's input.")
    use_rslora: bool = option(False, "Scale by alpha / sqrt(r) instead.")
    target_modules: str = option("all-linear", "'all-linear', or names such as q_proj,v_proj.")
    learning_rate: float = option(2e-4, "Peak learning rate.")
    lr_scheduler_type: str = option("cosine", "cosine, linear, constant or constant_with_warmup.")
    warmup_ratio: float = option(0.03, "Share of the steps over which the learning rate rises.")
    weight_decay: float = option(0.0, "Decoupled weight decay of AdamW.")
    max_grad_norm: float = option(1.0, "Clip the gradient's global norm to this; 0 does not clip.")
    per_device_train_batch_size: int = option(2, "Rows a batch; with packing, the batch holds this many times max-length tokens.")
    gradient_accumulation_steps: int = option(4, "Batches an optimizer step.")
    num_train_epochs: float = option(3.0, "Passes over the data.")
    max_steps: int = option(-1, "Optimizer steps, instead of epochs, if positive.")
    target_seconds: float | None = option(None, "Wall-clock seconds to train for, instead of epochs.")
    max_length: int = option(1024, "Tokens of a row at most.")
    on_overflow: str = option("truncate", "What happens to longer rows: truncate or drop.")
    packing: bool = option(True, "Pack several rows into one batch; no row sees another.")
    completion_only_loss: bool = option(True, "Train on answers only.")
    enable_thinking: bool | None = option(None, "Passed to the chat template.")
    shuffle: bool = option(True, "Draw a new order every epoch.")
    gradient_checkpointing: bool = option(False, "Recompute activations in the backward pass: less memory, a third more work.")
    seed: int = option(42, "Of the initial adapter, the order and dropout.")
    logging_steps: int = option(10, "Steps between log lines.")
    save_steps: int = option(200, "Steps between checkpoints; 0 saves only at the end.")
    save_total_limit: int = option(3, "Checkpoints kept.")
    eval_steps: int = option(0, "Steps between held-out losses; 0 means after every epoch.")

    def __post_init__(self) -> None:
        positive = ("lora_r", "per_device_train_batch_size", "gradient_accumulation_steps", "logging_steps",
                    "save_total_limit", "lora_alpha", "num_train_epochs")
        for name in positive:
            self._require(getattr(self, name) > 0, name, "must be greater than 0")
        for name in ("warmup_ratio", "weight_decay", "max_grad_norm", "learning_rate", "save_steps", "eval_steps", "seed"):
            value = getattr(self, name)
            self._require(math.isfinite(value) and value >= 0, name, "must be 0 or more")
        self._require(self.max_length >= 2, "max_length", "must be at least 2")
        self._require(0 <= self.lora_dropout < 1, "lora_dropout", "must be at least 0 and less than 1")
        self._require(self.warmup_ratio <= 1, "warmup_ratio", "must be at most 1")
        self._require(self.target_seconds is None or self.target_seconds > 0, "target_seconds", "must be greater than 0")
        choices = {"lr_scheduler_type": SCHEDULERS, "base_dtype": BASE_DTYPES, "on_overflow": OVERFLOW}
        for name, allowed in choices.items():
            self._require(getattr(self, name) in allowed, name, f"must be one of {', '.join(allowed)}")
        self.modules()

    def _require(self, fine: bool, name: str, rule: str) -> None:
        if not fine:
            raise UserError(f"{flag(name)} {rule}, not {getattr(self, name)}.")

    def modules(self) -> tuple[str, ...]:
        """The module names that target_modules stands for."""
        if self.target_modules == "all-linear":
            return tuple(LINEAR_PATHS)
        names = tuple(n.strip() for n in self.target_modules.split(",") if n.strip())
        for name in names:
            if name not in LINEAR_PATHS:
                raise UserError(
                    f"--target-modules has no '{name}': choose among {', '.join(LINEAR_PATHS)}, or 'all-linear'."
                )
        if not names:
            raise UserError("--target-modules is empty: name at least one module, or use 'all-linear'.")
        return tuple(n for n in LINEAR_PATHS if n in names)

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


def read_recipe(path: Path) -> dict[str, Any]:
    """A flat TOML file of option names and values."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"The recipe {path} does not exist.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"The recipe {path} is not valid TOML: {error}.") from error
    nested = [key for key, value in values.items() if isinstance(value, dict)]
    if nested:
        raise UserError(f"The recipe {path} has a table [{nested[0]}]: recipes are flat, one option a line.")
    return values


def _typed(name: str, value: Any, kind: str, where: str) -> Any:
    allowed = {"str": str, "int": int, "float": (int, float), "bool": bool}
    parts = [p.strip() for p in kind.split("|")]
    if name == "target_modules" and isinstance(value, list):
        value = ",".join(map(str, value))
    if value is None and "None" in parts:
        return None
    fits = any(isinstance(value, allowed[p]) and (p == "bool" or not isinstance(value, bool)) for p in parts if p != "None")
    if not fits:
        raise UserError(f"{where}: '{name}' must be {' or '.join(p for p in parts if p != 'None')}, not {value!r}.")
    return value
