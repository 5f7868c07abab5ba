"""WebGPU devices of a machine as resources of Ray: stable names, memory, leases, measured speed."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from platformdirs import user_cache_dir

from wgpu_lora.cluster.cluster_paths import cluster_root
from wgpu_lora.cluster.messages import DeviceFacts
from wgpu_lora.cluster.node_versions import own_versions
from wgpu_lora.cluster.worker.worker import Worker, WorkerFailed
from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import write_bytes_atomic
from wgpu_lora.files.json_files import read_json, to_json
from wgpu_lora.files.typed_json import typed
from wgpu_lora.gpu.device_list import DeviceInfo, choose, list_devices
from wgpu_lora.gpu.memory_leases import Ledger, budget_bytes, device_key, device_memory
from wgpu_lora.gpu.memory_leases.memory_budget import ask_nvml
from wgpu_lora.train.memory import format_bytes

# Adapters of OpenGL, which are listed and released too, belong to a thread: releasing one while another thread uses its
# EGL context aborts the process.
_ONE_THREAD = ThreadPoolExecutor(1, thread_name_prefix="devices")


def devices_here() -> list[DeviceInfo]:
    """As `list_devices`, for any thread."""
    return _ONE_THREAD.submit(list_devices).result()


PREFIX = "webgpu:"  # of the resources in Ray, one per device
DEVICE = "webgpu"  # the resource of which a node has as many as devices
PCI = Path("/sys/bus/pci/devices")
NVIDIA = 0x10DE


def resource_key(info: DeviceInfo, listed: Sequence[DeviceInfo], pci: Path = PCI) -> str:
    """The name of a device among all `listed` ones of its machine.

    WebGPU does not tell equal cards apart, so these are numbered as they are listed. A device that several backends or
    drivers list has the same name.
    """
    return PREFIX + (_uuid(info, listed) or _address(info, listed, pci) or _slug(device_key(info, listed)))


def _uuid(info: DeviceInfo, listed: Sequence[DeviceInfo]) -> str | None:
    """The UUID of an NVIDIA card; None if NVML is missing, or knows another number of such cards than one."""
    if info.vendor_id != NVIDIA or not _single(info, listed):
        return None

    def ask(nvml: Any, cards: list[Any]) -> str | None:
        pci_id = info.device_id << 16 | NVIDIA
        uuids = [
            nvml.nvmlDeviceGetUUID(card) for card in cards if nvml.nvmlDeviceGetPciInfo(card).pciDeviceId == pci_id
        ]
        if len(uuids) != 1:
            return None
        return uuids[0].decode() if isinstance(uuids[0], bytes) else str(uuids[0])

    return ask_nvml(ask)


def _address(info: DeviceInfo, listed: Sequence[DeviceInfo], pci: Path) -> str | None:
    """The PCI address of the only device with these ids; None elsewhere than on Linux."""
    if not info.vendor_id or not info.device_id or not _single(info, listed):
        return None
    ids = (info.vendor_id, info.device_id)
    addresses = [entry.name for entry in sorted(pci.glob("*")) if (_id(entry / "vendor"), _id(entry / "device")) == ids]
    return addresses[0] if len(addresses) == 1 else None


def _single(info: DeviceInfo, listed: Sequence[DeviceInfo]) -> bool:
    """Whether no other listed device is an equal card."""

    def listing(device: DeviceInfo) -> tuple[str, ...]:
        return device.name, device.kind, device.backend, device.driver

    return sum(listing(device) == listing(info) for device in listed) <= 1


def _id(path: Path) -> int | None:
    try:
        return int(path.read_text().strip(), 16)
    except (OSError, ValueError):
        return None


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def node_devices(address: str) -> list[DeviceFacts]:
    """The devices of this machine, each once: by the first backend or driver that lists it.

    Args:
        address: of this machine, as Ray knows it.
    """
    listed, devices = devices_here(), dict[str, DeviceInfo]()
    for info in listed:
        devices.setdefault(resource_key(info, listed), info)
    return [_facts(key, info, Ledger(device_key(info, listed)), address) for key, info in devices.items()]


def plan_class(info: DeviceInfo) -> str:
    """Equal for devices on which every job needs the same memory, since its programs are the same."""
    facts = [info.kind, info.backend, info.vendor_id, info.name, sorted(info.features), sorted(info.limits.items())]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


def _facts(key: str, info: DeviceInfo, ledger: Ledger, address: str) -> DeviceFacts:
    budget, memory, speed = budget_bytes(info).bytes, device_memory(info), cached(info)
    lease_bytes, leases, usable = _leases(ledger)
    room = [] if budget is None else [max(0, budget - lease_bytes)]
    room += [memory.free] if memory and memory.free is not None else []
    return DeviceFacts(
        key=key,
        address=address,
        index=info.index,
        name=info.name,
        driver=info.driver,
        kind=info.kind,
        backend=info.backend,
        plan_class=plan_class(info),
        budget=budget,
        held=lease_bytes,
        free=min(room, default=None) if usable else 0,
        leases=leases,
        speed=speed.tokens_per_second if speed else None,
        joined_speedup=speed.joined_speedup if speed else None,
    )


def _leases(ledger: Ledger) -> tuple[int, list[str], bool]:
    """Bytes held by living processes, who holds how much, and whether the ledger is usable: if not, nobody can allocate
    memory on its device, and the reason is in place of the leases."""
    try:
        entries = [entry for entry in ledger.read() if entry.is_of_this_host and entry.holds and not entry.dead]
    except UserError as error:
        return 0, [str(error)], False
    leases = [f"{format_bytes(entry.bytes)} by {entry.owner}" for entry in entries]
    return sum(entry.bytes for entry in entries), leases, True


def advertised(devices: Iterable[DeviceFacts]) -> dict[str, float]:
    """The resources of a node for `ray start --resources`: one of each device, and as many `webgpu`."""
    keys = [device.key for device in devices]
    return {**dict.fromkeys(keys, 1.0), **({DEVICE: float(len(keys))} if keys else {})}


SCHEMA = 1  # of the files, and of what the brick measures
TIMEOUT = 900.0  # seconds; drivers may compile slowly, as SwiftShader does beside other work


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


def measure_speed(device: DeviceInfo | int, refresh: bool = False) -> Speed:
    """The speed of a device, by its index or info: the one on disk, else measured in a worker process, which takes
    seconds, and kept if nobody else held memory of the device.

    Args:
        refresh: measure it even if it is on disk.

    Raises:
        UserError: there is no such device, it has too little memory left, or its driver failed.
    """
    info = choose(device)[0] if isinstance(device, int) else device
    if not refresh and (cached_speed := cached(info)):
        return cached_speed
    try:
        with Worker("speed", {"device": info.index}, timeout=TIMEOUT) as worker:
            speed: Speed = typed(Speed, worker.result(), "the speed")
    except (WorkerFailed, ValueError) as error:
        raise UserError(f"The speed of {info.name} cannot be measured: {error}") from None
    if not speed.beside:
        save_speed(info, speed)
    return speed


def save_speed(info: DeviceInfo, speed: Speed) -> None:
    """Write the speed of a device to disk; without effect if that fails, since it is measured again then."""
    content = {"schema": SCHEMA, "of": _identity(info), "speed": asdict(speed)}
    path = _file(info)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes_atomic(path, (to_json(content, indent=1) + "\n").encode())


def cached(info: DeviceInfo) -> Speed | None:
    """The speed on disk; None if it was not measured with this driver and these shaders, or the file is damaged."""
    try:
        content = read_json(_file(info))
        if content.get("schema") != SCHEMA or content.get("of") != _identity(info):
            return None
        speed: Speed = typed(Speed, content.get("speed"), "the speed")
    except (UserError, OSError, ValueError):
        return None
    return speed if speed.tokens_per_second > 0 and speed.joined_speedup > 0 else None


def _identity(info: DeviceInfo) -> dict[str, Any]:
    """All that a measurement depends on."""
    versions = own_versions()
    names = ("name", "driver", "backend", "kind", "vendor_id", "device_id")
    return {**{name: getattr(info, name) for name in names}, "wgpu": versions.wgpu, "shaders": versions.shaders}


def _file(info: DeviceInfo) -> Path:
    root = Path(os.environ.get("WGPU_LORA_CACHE_DIR") or user_cache_dir("wgpu-lora")) / "speed"
    return root / f"{_slug(info.name)[:40]}-{hashlib.sha256(to_json(_identity(info)).encode()).hexdigest()[:12]}.json"


@contextmanager
def hold_device(key: str) -> Iterator[bool]:
    """Mark a device of this host as used by a training; whether no other one has marked it."""
    folder = cluster_root() / "devices"
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / f"{re.sub(r'[^A-Za-z0-9-]', '-', key)}.lock", timeout=0)
    try:
        lock.acquire()
    except Timeout:
        yield False
        return
    try:
        yield True
    finally:
        lock.release()


@contextmanager
def hold_any_device() -> Iterator[int]:
    """The number of a device of this host that no training has marked. Raises UserError if there is none."""
    for device in node_devices(""):
        with hold_device(device.key) as is_free:
            if is_free:
                yield device.index
                return
    raise UserError("No device of this host is free: look at 'wgpu-lora cluster status'.")


def device_index(key: str) -> int | None:
    """The number of the device with this key now; None if it is not there any more."""
    return next((device.index for device in node_devices("") if device.key == key), None)
