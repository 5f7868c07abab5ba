"""Evidence for tests: measurements that take no time, a job, and what is signed over them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from wgpu_lora.gpu.device_list import DeviceInfo
from wgpu_lora.protect.attestation import claims, measurements
from wgpu_lora.protect.sealed.keys import SessionKeys

NONCE = "nonce-of-a-test"
A, B, C, D = (letter * 64 for letter in "abcd")
DEVICE = DeviceInfo(
    0, "Test GPU", "Test driver 1.2", 0x10DE, "Vulkan", "discrete", ("subgroup",), {"max-buffer-size": 1 << 40}
)
BASE = {"name": "base", "sha256": A, "hashed": claims.HASHED, "config_sha256": B}
OPTIONS = {"max_steps": 10, "learning_rate": 1e-4, "objective": "sft"}
MEASURED: dict[str, Any] = {
    "package": {"version": "0.1.0", "sha256": A, "files": {"wgpu_lora/a.py": B}},
    "wgpu": {"version": "0.32.0", "native_version": "29.0.1.1", "native_sha256": B},
    "python": {
        "version": "3.11.7",
        "implementation": "CPython",
        "sha256": C,
        "library_sha256": D,
        "flags": {"optimize": 0},
    },
    "dependencies": {"numpy": {"version": "2.4.6", "intact": True, "sha256": A, "record_sha256": B}},
    "process": {
        "unlisted": {},
        "compiled_otherwise": [],
        "import_hooks": [],
        "traced": False,
        "libraries": {"/lib/c": C},
    },
    "kernel": {"system": "Linux", "release": "6.1", "version": "#1", "machine": "x86_64"},
    "environment": {"PATH": D},
}


@dataclass(frozen=True)
class Job:
    """A job as far as claims need one."""

    recipients: list[str]
    name: str = "job"
    sha256: str = C
    recipe_sha256: str = D
    options: dict[str, Any] = field(
        default_factory=lambda: {"max_steps": 10, "learning_rate": 1e-4, "objective": "sft"}
    )

    def digests(self) -> dict[str, dict[str, Any]]:
        return {"data": {"name": "rows.jsonl.age", "sha256": B, "bytes": 1000, "rows": 100}}


def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is measured: reading all installed files takes seconds."""
    monkeypatch.setattr(measurements, "measurements", lambda: MEASURED)


def claimed(keys: SessionKeys, job: Job, **changes: Any) -> dict[str, Any]:
    """Claims as `claims.gather` makes them, without measuring; `changes` replace some."""
    with pytest.MonkeyPatch.context() as patch:
        quick(patch)
        evidence = claims.gather(DEVICE, nonce=NONCE, keys=keys, job=job, base=BASE)
    return {**evidence, **changes}
