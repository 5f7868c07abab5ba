"""A device with matrix units, which lavapipe of the newest Mesa has: `make test-matrix`."""

from __future__ import annotations

import pytest

from wgpu_lora.gpu.backends import DAWN
from wgpu_lora.gpu.device import Device, DeviceOptions


@pytest.fixture(scope="session")
def units() -> Device:
    device = Device(options=DeviceOptions(backend=DAWN))
    assert device.capabilities.matrix, f"{device.info.name} ({device.info.driver}) has no matrix units"
    return device
