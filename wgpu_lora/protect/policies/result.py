"""The result of an appraisal, as EAR (draft-ietf-rats-ear: EAT attestation results) has it.

Of AR4SI's trustworthiness claims (draft-ietf-rats-ar4si) only those are made that the evidence can justify.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

PROFILE = "tag:github.com,2023:veraison/ear"  # the profile of EAR's implementations
# AR4SI: the claim that a section's failure contradicts. 33 and 97 stand for what is not recognised; failures that have
# no standard value get one of the private range for contraindications.
VECTOR = {
    "attestation": ("instance-identity", 97),
    "device": ("hardware", 97),
    "package": ("executables", 33),
    "wgpu": ("executables", 33),
    "python": ("executables", 33),
    "dependencies": ("executables", 33),
    "process": ("executables", 33),
    "kernel": ("configuration", -97),
    "host": ("configuration", -97),
    "environment": ("configuration", -97),
    "job": ("configuration", -97),
    "recipe": ("configuration", -97),
    "training": ("configuration", -97),
    "base": ("sourced-data", -97),
    "data": ("sourced-data", -97),
}


@dataclass(frozen=True)
class Failure:
    """A rule that failed. rule: `section.key` of the policy, or what is always checked."""

    rule: str
    expected: str
    found: str

    def line(self) -> str:
        return f"{self.rule}: expected {self.expected}, found {self.found}"

    def as_dict(self) -> dict[str, str]:
        return {"rule": self.rule, "expected": self.expected, "found": self.found}


@dataclass(frozen=True)
class Appraisal:
    """What a verifier found.

    applied: the rules that were checked, passed or not. not_applied: those that the policy leaves out, and checks for
    which the verifier had no value, such as the expected nonce.
    """

    policy: Mapping[str, Any]
    evidence_sha256: str
    nonce: str | None
    time: float
    level: str
    failures: Sequence[Failure]
    applied: Sequence[str]
    not_applied: Sequence[str]

    @property
    def passed(self) -> bool:
        return not self.failures

    @property
    def status(self) -> str:
        """EAR's `ear.status`."""
        return "affirming" if self.passed else "contraindicated"

    def to_json(self) -> dict[str, Any]:
        """An attestation result with EAR's names; those of this package start with `ear.wgpu-lora.`."""
        own: dict[str, Any] = {
            "ear.status": self.status,
            "ear.appraisal-policy-ids": [f"{self.policy['name']}:{self.policy['version']}"],
            "ear.wgpu-lora.policy": dict(self.policy),
            "ear.wgpu-lora.evidence-sha256": self.evidence_sha256,
            "ear.wgpu-lora.level": self.level,
            "ear.wgpu-lora.failures": [failure.as_dict() for failure in self.failures],
            "ear.wgpu-lora.applied": [*self.applied],
            "ear.wgpu-lora.not-applied": [*self.not_applied],
        }
        if vector := self._vector():
            own["ear.trustworthiness-vector"] = vector
        made = {
            "eat_profile": PROFILE,
            "iat": int(self.time),
            "ear.verifier-id": {"developer": "wgpu-lora", "build": f"wgpu-lora {version('wgpu-lora')}"},
            "submods": {"wgpu-lora": own},
        }
        return made | ({"eat_nonce": self.nonce} if self.nonce is not None else {})

    def _vector(self) -> dict[str, int]:
        """Self-reported claims affirm nothing. A quote by a TPM of the policy affirms which machine it is, no more."""
        vector = {"instance-identity": 2} if "attestation.tpm_keys" in self.applied else {}
        for failure in self.failures:
            name, value = VECTOR.get(failure.rule.split(".")[0], ("", 0))
            if name:
                vector[name] = value
        return vector
