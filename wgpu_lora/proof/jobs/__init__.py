"""The jobs of the proof's child processes: kinds `proof-devices` and so on, which only its workers know."""

from __future__ import annotations

from wgpu_lora.worker.registry import KINDS

JOBS = ("devices:devices", "generate:generate", "generate:answers", "trained:clock", "trained:gradients")


def register() -> None:
    for job in JOBS:
        KINDS[f"proof-{job.partition(':')[2]}"] = f"wgpu_lora.proof.jobs.{job}"
