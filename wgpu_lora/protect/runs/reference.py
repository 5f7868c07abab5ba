"""Reference values for a policy: the claims of a job on this machine, or those of evidence that a trainer sent."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.protect.attestation.claims import base_facts, gather, load_evidence
from wgpu_lora.protect.hygiene.host import harden
from wgpu_lora.protect.runs import job as jobs
from wgpu_lora.protect.runs.job import Job
from wgpu_lora.protect.sealed.keys import SessionKeys


def job_claims(job: Job, *, nonce: str, keys: SessionKeys, device: str | None = None) -> dict[str, Any]:
    """The claims of a session of a job on this machine, which opens the model's files without loading its weights.

    Args:
        device: instead of the job's, index or part of a name.

    Raises:
        UserError: the model or a sealed file cannot be read, or there is no such device.
    """
    import_module("wgpu_lora.protect.runs.run")  # the claims name what is loaded: as much as in a training session
    options = job.arguments
    model = open_model(options.model or "demo", device or options.device, options.base_dtype)
    base = base_facts(model.name, model.checkpoint, model.config)
    return gather(model.device.info, nonce=nonce, keys=keys, job=job, base=base)


def reference_claims(path: Path, device: str | None = None) -> tuple[dict[str, Any], Mapping[str, Any] | None]:
    """The claims, and the verified quote if there is one, from which a policy is made.

    Args:
        path: of JOB.toml, or of evidence (.json), whose claims are believed as they are.

    Raises:
        UserError: the file cannot be read, or states no job.
    """
    if path.suffix.lower() == ".json":
        if device is not None:
            raise UserError("--device does not apply to evidence, which states its own: leave it out, or give the job.")
        evidence = load_evidence(path)
        if "job" not in evidence.claims:
            raise UserError(f"{path} states no job, so it has no data to allow: attest with --job JOB.toml.")
        return evidence.claims, evidence.quote
    job, keys, host = jobs.read(path), SessionKeys.generate(), harden()
    try:
        claims = job_claims(job, nonce=secrets.token_urlsafe(), keys=keys, device=device)
        return {**claims, "host": host.facts}, None
    finally:
        keys.wipe()
        host.restore()
