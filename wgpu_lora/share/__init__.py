"""Share a device between processes: its memory budget, leases on it, and the wait queue."""

from wgpu_lora.share.budget import Budget, DeviceMemory, budget_bytes, device_memory, is_unified
from wgpu_lora.share.entry import Entry
from wgpu_lora.share.holding import claim
from wgpu_lora.share.ledger import Ledger, device_key

__all__ = [
    "Budget",
    "DeviceMemory",
    "Entry",
    "Ledger",
    "budget_bytes",
    "claim",
    "device_key",
    "device_memory",
    "is_unified",
]
