"""Share a device between processes: its memory budget, leases on it, and the wait queue."""

from wgpu_lora.gpu.memory_leases.claims import claim
from wgpu_lora.gpu.memory_leases.ledger import Ledger, LedgerEntry, device_key
from wgpu_lora.gpu.memory_leases.memory_budget import Budget, DeviceMemory, budget_bytes, device_memory, is_unified

__all__ = [
    "Budget",
    "DeviceMemory",
    "Ledger",
    "LedgerEntry",
    "budget_bytes",
    "claim",
    "device_key",
    "device_memory",
    "is_unified",
]
