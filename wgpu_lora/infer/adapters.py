"""Loading PEFT adapters onto the device, one slot each, without the buffers that only training needs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import allocate, missing_bytes
from wgpu_lora.models.config import ModelConfig
from wgpu_lora.models.fitting import read_fitting
from wgpu_lora.models.lora import AdapterSet, SlotSpec
from wgpu_lora.share import claim


def load_adapters(device: Device, config: ModelConfig, directories: Sequence[Path]) -> AdapterSet:
    """Read adapters and upload them; slot i is the adapter of directories[i].

    Args:
        directories: one or more, each with adapter_config.json and adapter_model.safetensors.

    Raises:
        UserError: an adapter cannot be read, or does not fit the model (with the module and both shapes).
    """
    assert directories, "there is no adapter to load"
    read = [read_fitting(config, directory) for directory in directories]
    specs = [SlotSpec.of(adapter, matrices) for adapter, matrices in read]
    adapters = AdapterSet.declare(config, specs, device.max_binding)
    with claim(device, missing_bytes(adapters.storages()), "adapters"):
        allocate(device, adapters.storages())
    adapters.upload_constants(device)
    for slot, (_, matrices) in enumerate(read):
        adapters.write(device, slot, matrices)
    return adapters
