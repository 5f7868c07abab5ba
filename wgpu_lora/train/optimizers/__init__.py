"""The optimizers, one file each (`--optim`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wgpu_lora.registry import Registry

if TYPE_CHECKING:
    from wgpu_lora.train.optimizers.base import UpdateRule

OPTIMIZERS: Registry[type[UpdateRule]] = Registry({"adamw": "wgpu_lora.train.optimizers.adamw:AdamW"})
