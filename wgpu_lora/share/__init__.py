"""Sharing a device with other runs: how much memory it has, who holds how much of it, and whose turn is next."""

from wgpu_lora.share.budget import Budget, DeviceMemory, budget_bytes, device_memory
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
]
