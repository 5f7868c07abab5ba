"""Trackers, a file each: programs that runs are reported to, through their own libraries."""

from __future__ import annotations

from wgpu_lora.registry import Registry
from wgpu_lora.track.trackers.base import Tracker

JSONL = "jsonl"  # log.jsonl, which every run has
TRACKERS: Registry[type[Tracker]] = Registry(
    {
        "tensorboard": "wgpu_lora.track.trackers.tensorboard:TensorBoard",
        "wandb": "wgpu_lora.track.trackers.wandb:WandB",
        "trackio": "wgpu_lora.track.trackers.trackio:Trackio",
    }
)
