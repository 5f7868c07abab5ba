"""How fast a device trains, measured once by a short brick and kept on disk."""

from __future__ import annotations

import hashlib
import os
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from platformdirs import user_cache_dir

from wgpu_lora.atomic import write_bytes_atomic
from wgpu_lora.cluster.devices.versions import own_versions
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device_list import DeviceInfo, choose
from wgpu_lora.json_files import read_json, to_json
from wgpu_lora.typed_json import typed
from wgpu_lora.worker.worker import Worker, WorkerFailed

SCHEMA = 1  # of the files, and of what the brick measures
TIMEOUT = 300.0  # seconds; drivers may compile slowly


@dataclass(frozen=True)
class Speed:
    """What the job `speed` measures.

    Attributes:
        tokens_per_second: processed tokens of the training step of one adapter on a small model.
        joined_speedup: tokens/s of three adapters in one pipeline over one after another.
        beside: who else held memory of the device meanwhile; such figures are not kept.
    """

    tokens_per_second: float
    joined_speedup: float
    beside: list[str] = field(default_factory=list)


def measured(device: DeviceInfo | int, again: bool = False) -> Speed:
    """The speed of a device, by its index or info: the one on disk, else measured in a worker process, which takes
    seconds, and kept if nobody else held memory of the device.

    Args:
        again: measure it even if it is on disk.

    Raises:
        UserError: there is no such device, it has too little memory left, or its driver failed.
    """
    info = choose(device)[0] if isinstance(device, int) else device
    if not again and (known := cached(info)):
        return known
    try:
        with Worker("speed", {"device": info.index}, timeout=TIMEOUT) as worker:
            found: Speed = typed(Speed, worker.result(), "the speed")
    except (WorkerFailed, ValueError) as error:
        raise UserError(f"The speed of {info.name} cannot be measured: {error}") from None
    if not found.beside:
        content = {"schema": SCHEMA, "of": _identity(info), "speed": asdict(found)}
        path = _file(info)
        with suppress(OSError):  # it is measured again then
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes_atomic(path, (to_json(content, indent=1) + "\n").encode())
    return found


def cached(info: DeviceInfo) -> Speed | None:
    """The speed on disk; None if it was not measured with this driver and these shaders, or the file is damaged."""
    try:
        content = read_json(_file(info))
        if content.get("schema") != SCHEMA or content.get("of") != _identity(info):
            return None
        found: Speed = typed(Speed, content.get("speed"), "the speed")
    except (UserError, OSError, ValueError):
        return None
    return found if found.tokens_per_second > 0 and found.joined_speedup > 0 else None


def _identity(info: DeviceInfo) -> dict[str, Any]:
    """All that a measurement depends on."""
    versions = own_versions()
    names = ("name", "driver", "backend", "kind", "vendor_id", "device_id")
    return {**{name: getattr(info, name) for name in names}, "wgpu": versions.wgpu, "shaders": versions.shaders}


def _file(info: DeviceInfo) -> Path:
    root = Path(os.environ.get("WGPU_LORA_CACHE_DIR") or user_cache_dir("wgpu-lora")) / "speed"
    slug = re.sub(r"[^a-z0-9]+", "-", info.name.lower()).strip("-")[:40]
    return root / f"{slug}-{hashlib.sha256(to_json(_identity(info)).encode()).hexdigest()[:12]}.json"
