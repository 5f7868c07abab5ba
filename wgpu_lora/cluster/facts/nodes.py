"""Machines and their devices."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class DeviceFacts:
    """A WebGPU device of a node.

    Attributes:
        key: the name of its resource in Ray, `webgpu:<uuid or pci address>`; unique on its host only.
        address: of its host, as Ray knows it. index: in `list_devices` of its host.
        plan_class: equal for devices on which every job needs the same memory: same limits, features and backend.
        budget: bytes that all programs together may hold; None if unknown. held: bytes that leases hold now.
        free: bytes that a new job could get now: of the budget less the leases, and of what the system reports.
        leases: who holds how much, as `share status` says it.
        speed: processed tokens/s of the speed brick; None if not measured yet.
        joined_speedup: tokens/s of several adapters in one pipeline over one after another, measured.
    """

    key: str
    address: str
    index: int
    name: str
    driver: str
    kind: str
    backend: str
    plan_class: str
    budget: int | None = None
    held: int = 0
    free: int | None = None
    leases: list[str] = field(default_factory=list)
    speed: float | None = None
    joined_speedup: float | None = None

    @property
    def id(self) -> str:
        """Unique in the cluster, also after its node has restarted."""
        return f"{self.address}/{self.key}"


@dataclass(frozen=True)
class Versions:
    """What must agree on all machines. code: SHA-256 of the package's Python files; shaders: of the shaders."""

    package: str
    code: str
    shaders: str
    python: str
    ray: str
    wgpu: str


@dataclass(frozen=True)
class NodeFacts:
    """A machine of the cluster. id: Ray's, which changes with each start; host: its name, for people."""

    id: str
    address: str
    host: str
    versions: Versions
    devices: list[DeviceFacts]
    driver_host: bool = False  # whether the program that asks runs on it
