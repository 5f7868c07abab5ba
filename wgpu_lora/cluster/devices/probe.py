"""The devices of this machine, with their memory and who holds it."""

from __future__ import annotations

import hashlib
import json

from wgpu_lora.cluster.devices.keys import resource_key
from wgpu_lora.cluster.devices.listing import devices_here
from wgpu_lora.cluster.devices.speed import cached
from wgpu_lora.cluster.facts import DeviceFacts
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device_list import DeviceInfo
from wgpu_lora.memory_leases import Ledger, LedgerEntry, budget_bytes, device_key, device_memory
from wgpu_lora.train.memory import format_bytes


def node_devices(address: str) -> list[DeviceFacts]:
    """The devices of this machine, each once: by the first backend or driver that lists it.

    Args:
        address: of this machine, as Ray knows it.
    """
    listed, found = devices_here(), dict[str, DeviceInfo]()
    for info in listed:
        found.setdefault(resource_key(info, listed), info)
    return [_facts(key, info, Ledger(device_key(info, listed)), address) for key, info in found.items()]


def plan_class(info: DeviceInfo) -> str:
    """Equal for devices on which every job needs the same memory, since its programs are the same."""
    facts = [info.kind, info.backend, info.vendor_id, info.name, sorted(info.features), sorted(info.limits.items())]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]


def _facts(key: str, info: DeviceInfo, ledger: Ledger, address: str) -> DeviceFacts:
    budget, memory, speed = budget_bytes(info).bytes, device_memory(info), cached(info)
    held, leases, usable = _leases(ledger)
    room = [] if budget is None else [max(0, budget - held)]
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
        held=held,
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
    return sum(entry.bytes for entry in entries), [_said(entry) for entry in entries], True


def _said(entry: LedgerEntry) -> str:
    return f"{format_bytes(entry.bytes)} by {entry.who}"
