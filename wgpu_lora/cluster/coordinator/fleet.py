"""The devices and hosts that a coordinator knows: what surveys say of them, and what failures say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from wgpu_lora.cluster.coordinator.state import DeviceState, HostState, State, UnitState
from wgpu_lora.cluster.facts import NodeFacts
from wgpu_lora.errors import UserError

QUARANTINE = 2  # failures in a row
MEASURE_SECONDS = 120.0  # after which a device is used without its speed
AGAIN_SECONDS = 1800.0  # after which one that was measured beside other programs is measured again
MOST_REMEMBERED = 64  # bases and data of a host


def survey(state: State, nodes: Sequence[NodeFacts], now: float) -> None:
    """Take what the living nodes say of themselves; devices of all others are gone."""
    state.nodes = list(nodes)
    for node in nodes:
        state.hosts.setdefault(node.address, HostState()).node = node.id
    seen = {device.id: (node, device) for node in nodes for device in node.devices}
    for name, (node, facts) in seen.items():
        device = state.devices.get(name)
        if device is None or device.gone:
            state.say(now, f"{facts.name} on {node.host} is there")
        if device is None:
            device = state.devices[name] = DeviceState(facts, node.id)
        if facts.speed is None:
            facts = replace(facts, speed=device.speed, joined_speedup=device.joined_speedup)
        else:
            device.speed = device.joined_speedup = None
        device.facts, device.node, device.gone = facts, node.id, False
        # What has not loaded yet has no lease yet: the survey counts its bytes as free.
        coming = sum(unit.needed for unit in _on(state, name) if not _leased(state, unit))
        device.free = None if facts.free is None else max(facts.free - coming, 0)
    for name, device in state.devices.items():
        if name not in seen and not device.gone:
            device.gone = True
            state.say(now, f"{state.called(name)} is gone")
    if all(run.ended for run in state.runs.values()):  # until then, tables and sentences name those that are gone
        for name in [name for name, device in state.devices.items() if device.gone and not device.quarantined]:
            del state.devices[name]


def _on(state: State, device: str) -> list[UnitState]:
    return [unit for unit in state.placed() if device in unit.devices]


def _leased(state: State, unit: UnitState) -> bool:
    return any(task.state == "running" for task in state.members(unit))


def to_measure(state: State, now: float) -> list[tuple[str, str]]:
    """Idle devices whose hosts tell no speed: their nodes and keys. Nothing is placed on them meanwhile."""
    found = []
    busy = {name for unit in state.placed() for name in unit.devices}
    for name, device in state.devices.items():
        if device.speed == device.facts.speed and not device.out and name not in busy and now >= device.again:
            device.again, device.measuring = now + AGAIN_SECONDS, now + MEASURE_SECONDS
            found.append((device.node, device.facts.key))
    return found


def count_failure(state: State, name: str, now: float) -> None:
    """A unit's process failed on a device."""
    device = state.devices[name]
    device.failures += 1
    if device.failures >= QUARANTINE and not device.quarantined:
        device.quarantined = True
        said = f"{state.called(name)} is quarantined, since {device.failures} jobs in a row failed on it"
        state.say(now, f"{said}: 'wgpu-lora cluster release {name}' uses it again")


def take_back(state: State, name: str, now: float) -> None:
    """What failed on a device has failed on another, too: no failure of the device counts any more."""
    if (device := state.devices.get(name)) is None:
        return
    device.failures = 0
    if device.quarantined:
        device.quarantined = False
        state.say(now, f"{state.called(name)} is used again, since what failed on it fails on others, too")


def release_device(state: State, name: str, now: float) -> None:
    """Use a quarantined device again.

    Raises:
        UserError: it is not quarantined.
    """
    device = state.devices.get(name)
    if device is None or not device.quarantined:
        raise UserError(f"No device {name} is quarantined: 'wgpu-lora cluster status' lists all devices.")
    device.quarantined, device.failures = False, 0
    state.say(now, f"{state.called(name)} is used again")


def remember(state: State, device: str, base: str, data: Sequence[str]) -> None:
    """A device's host will soon have a base model and data in its caches."""
    host = state.hosts[state.devices[device].facts.address]
    host.bases = [*(name for name in host.bases if name != base), base][-MOST_REMEMBERED:]
    host.data = [*(name for name in host.data if name not in data), *data][-MOST_REMEMBERED:]
