"""The optimizers, one file each (`--optim`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wgpu_lora.names.registry import Registry
from wgpu_lora.train.option_types import from_options

if TYPE_CHECKING:
    from wgpu_lora.train.optimizers.update_rule import UpdateRule

OPTIMIZERS: Registry[type[UpdateRule]] = Registry(
    {
        "adamw": "wgpu_lora.train.optimizers.adamw:AdamW",
        "adamw_8bit": "wgpu_lora.train.optimizers.adamw_8bit:AdamW8bit",
        "adamw_bf16": "wgpu_lora.train.optimizers.adamw_bf16:AdamWBf16",
        "lion": "wgpu_lora.train.optimizers.lion:Lion",
        "lion_8bit": "wgpu_lora.train.optimizers.lion_8bit:Lion8bit",
        "muon": "wgpu_lora.train.optimizers.muon:Muon",
        "sgd": "wgpu_lora.train.optimizers.sgd:SGD",
    }
)


def optimizer_of(args: Any) -> UpdateRule:
    """The optimizer that TrainingArguments select."""
    return from_options(OPTIMIZERS[args.optim], args, "optim")


def name_of(rule: UpdateRule) -> str:
    """The name of an optimizer, as `--optim` has it."""
    return next(name for name in OPTIMIZERS if OPTIMIZERS[name] is type(rule))
