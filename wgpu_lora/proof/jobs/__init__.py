"""What the proof's child processes compute: kinds of jobs that only its workers know."""

from __future__ import annotations

from wgpu_lora.worker.registry import KINDS

NAMES = ("devices", "generate", "answers", "gradients", "clock")


def register() -> None:
    """Makes them known to this process, as kinds `proof-devices` and so on."""
    for name in NAMES:
        KINDS[f"proof-{name}"] = f"wgpu_lora.proof.jobs.{name}:run"
