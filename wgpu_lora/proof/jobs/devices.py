"""Which devices there are, which of them are used, and whether each of those computes."""

from __future__ import annotations

from typing import Any

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.devices import DeviceInfo, choose, list_devices, native_version
from wgpu_lora.gpu.single import SingleKernel
from wgpu_lora.gpu.values import nmse, widened
from wgpu_lora.ops.matmul import matmul_nt
from wgpu_lora.share.ledger import device_key
from wgpu_lora.worker.child import Port

AT_ONCE = 2  # devices that are used by default
TOLERANCE = 1e-9  # mean squared error of an f32 product over its mean square; rounding alone gives about 1e-13


def devices(port: Port, *, select: str | None, discrete: int = 0) -> dict[str, Any]:
    """The devices, the hardware behind each, the indices of those used, and the error of a product on each of these.

    select: indices or names, separated by commas; `refused` says what is wrong with it.
    discrete: how many discrete devices are wanted if `select` is None.
    """
    found = list_devices()
    try:
        used = named(select) if select and found else by_default(found, max(AT_ONCE, discrete))
    except UserError as error:
        return {"refused": str(error)}
    return {
        "devices": [info.as_dict() for info in found],
        "hardware": [device_key(info, found) for info in found],
        "used": used,
        "asked": select is not None,
        "computed": {index: multiply(index) for index in used},
        "wgpu_native": native_version(),
    }


def named(select: str) -> list[int]:
    indices = [choose(part.strip())[0].index for part in select.split(",")]
    if len(set(indices)) != len(indices):
        raise UserError(f"--devices {select} names a device twice: name each once.")
    return indices


def by_default(found: list[DeviceInfo], count: int = AT_ONCE) -> list[int]:
    """The first devices of different hardware, discrete ones first: Windows lists a device once for each API."""
    first = {device_key(info, found): info.index for info in reversed(found)}
    return sorted(first.values())[:count]


def multiply(index: int) -> dict[str, Any]:
    """A product of random matrices, compared with float64."""
    device, rng = Device(index), np.random.default_rng(0)
    a, b = rng.standard_normal((32, 64), np.float32), rng.standard_normal((48, 64), np.float32)
    arrays = {"a": a, "b": b, "y": np.zeros((32, 48), np.float32)}
    single = SingleKernel(device, matmul_nt, arrays, {"m": 32, "n": 48, "k": 64, **matmul_nt.defaults})
    single.run()
    error = nmse(single.outputs()[0], widened(a) @ widened(b).T)
    single.free()
    return {"error": error, "fine": error < TOLERANCE}
