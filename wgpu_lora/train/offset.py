"""Adapters beside a frozen offset of the weight, on disk: PEFT's form of a converted PiSSA, of twice the rank.

The weight of the run is W - s B0 A0, of the files W: s (B A - B0 A0) is the product of [B, -B0] and [A; A0].
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from wgpu_lora.formats.adapter_config import AdapterConfig
from wgpu_lora.formats.peft import Matrices
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.lora import AdapterSet


def doubled(config: AdapterConfig) -> AdapterConfig:
    """With twice the rank and the same scaling."""
    factor = math.sqrt(2) if config.use_rslora else 2
    return replace(config, r=2 * config.r, lora_alpha=factor * config.lora_alpha)


def halved(config: AdapterConfig, alpha: float) -> AdapterConfig:
    """The inverse of `doubled`. alpha: that of the options, which is kept if it is the config's up to rounding."""
    found = config.lora_alpha / (math.sqrt(2) if config.use_rslora else 2)
    return replace(config, r=config.r // 2, lora_alpha=alpha if math.isclose(alpha, found) else found)


def parted(matrices: Matrices) -> tuple[Matrices, Matrices]:
    """The trained factors, and the offset's: (A, B) and (A0, -B0) by module."""
    own, rest = {}, {}
    for module, (a, b, *_) in matrices.items():
        rank = len(a) // 2
        own[module], rest[module] = (a[:rank], b[:, :rank]), (a[rank:], b[:, rank:])
    return own, rest


def stored(device: Device, adapters: AdapterSet, slot: int, config: AdapterConfig) -> tuple[Matrices, AdapterConfig]:
    """A slot's adapter as files have it."""
    matrices = adapters.read(device, slot)
    if not (adapters.offset and adapters.specs[slot].offset):
        return matrices, config
    rest = adapters.offset.read(device, slot)
    joined = {
        module: (np.concatenate([a, rest[module][0]]), np.concatenate([b, rest[module][1]], axis=1))
        for module, (a, b) in matrices.items()
    }
    return joined, doubled(config)


def trained(matrices: Matrices, adapters: AdapterSet, slot: int) -> tuple[Matrices, Matrices | None]:
    """The trained factors of a slot's adapter as files have it, and those of its offset, if there is one."""
    return parted(matrices) if adapters.specs[slot].offset else (matrices, None)
