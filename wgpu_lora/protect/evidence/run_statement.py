"""The statement at the end of a run: in-toto Statement v1 with SLSA provenance v1, signed by the session's key.

SLSA provenance: https://slsa.dev/spec/v1.0/provenance. Subjects are the adapter, file by file and sealed; the resolved
dependencies are what it was made of; the by-products are the log's end, the cleanup record and the run's facts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from in_toto_attestation.predicates.provenance.v1 import provenance_pb2

from wgpu_lora.files.atomic import sha256
from wgpu_lora.protect.evidence import dsse
from wgpu_lora.protect.evidence.run_evidence import CLEANUP, EvidenceLog
from wgpu_lora.protect.evidence.run_evidence import NAME as LOG
from wgpu_lora.protect.evidence.signed_log import Entry, read_bytes

NAME = "statement.json"
KIND = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "https://example.org/wgpu-lora/protected-finetune/v1"
BUILDER = "https://example.org/wgpu-lora"
RUN = "run"  # the by-product that has the run's facts
ADAPTER = "adapter/"  # what the names of the adapter's files start with


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """What a run did.

    Attributes:
        target_seconds, budget_steps: the time and the steps that it was to take; None if it had no such limit.
        elapsed_seconds: from its first to its last step. steps: optimizer steps. tokens: trained tokens.
        stop_reason: why it ended.
        initial_loss, final_loss, best_loss: of held-out rows, or of training rows if there are none.
        rows: of the training data. weights_sha256: of all values of the base, as they were loaded.
    """

    steps: int
    elapsed_seconds: float
    stop_reason: str
    target_seconds: float | None = None
    budget_steps: int | None = None
    initial_loss: float | None = None
    final_loss: float | None = None
    best_loss: float | None = None
    rows: int | None = None
    tokens: int | None = None
    weights_sha256: str | None = None


def write_statement(
    log: EvidenceLog, claims: Mapping[str, Any], adapter: Mapping[str, str], sealed: tuple[str, str], facts: RunFacts
) -> Path:
    """Write statement.json, after the log's last line.

    Args:
        log: ends with the lines `finished` and `wiped`, the last one.
        claims: of this session's evidence.
        adapter: SHA-256 of the adapter's files, model.sig among them, by their names.
        sealed: path in the run's directory, and SHA-256, of the sealed adapter.

    Raises:
        UserError: it cannot be written.
    """
    cleanup = sha256(read_bytes(log.directory / CLEANUP))
    predicate = provenance(log.entries, claims, cleanup, asdict(facts))
    json_format.ParseDict(predicate, provenance_pb2.Provenance())  # its schema
    subjects = [(f"{ADAPTER}{name}", digest) for name, digest in sorted(adapter.items())]
    log.keep(NAME, log.sign(dsse.statement(KIND, [*subjects, sealed], predicate)))
    return log.directory / NAME


def provenance(
    entries: Sequence[Entry], claims: Mapping[str, Any], cleanup: str, facts: Mapping[str, Any]
) -> dict[str, Any]:
    """The predicate of a run's statement.

    Args:
        entries: all lines of its log. claims: of its last session's evidence. cleanup: SHA-256 of cleanup.json.
        facts: of the line `finished`.
    """
    package = claims.get("package", {})
    return {
        "buildDefinition": {
            "buildType": BUILD_TYPE,
            "externalParameters": parameters(claims),
            "internalParameters": {name: claims[name] for name in ("device", "kernel") if name in claims},
            "resolvedDependencies": materials(claims, facts.get("weights_sha256")),
        },
        "runDetails": {
            "builder": {"id": BUILDER, "version": {"wgpu-lora": str(package.get("version", ""))}},
            "metadata": {
                "invocationId": entries[-1].chain,
                "startedOn": entries[0].time,
                "finishedOn": entries[-1].time,
            },
            "byproducts": [
                {"name": f"{LOG}:{entries[-1].sequence}", "digest": {"sha256": entries[-1].digest}},
                {"name": CLEANUP, "digest": {"sha256": cleanup}},
                {"name": RUN, "annotations": dict(facts)},
            ],
        },
    }


def parameters(claims: Mapping[str, Any]) -> dict[str, Any]:
    """What a run was asked to do: the parts of its job that are in the claims."""
    job = claims.get("job", {})
    return {name: job[name] for name in ("name", "sha256", "options", "recipients") if name in job}


def materials(claims: Mapping[str, Any], weights: str | None) -> list[dict[str, Any]]:
    """What a run was made of, as in-toto resource descriptors: base, data, recipe, package, wgpu-native.

    Args:
        claims: of its last session's evidence. weights: SHA-256 of the base's values, which is known at the end.
    """
    base, job, package, wgpu = (claims.get(name, {}) for name in ("base", "job", "package", "wgpu"))
    digests = [
        (f"base:{base.get('name', '')}", base.get("sha256")),
        (f"weights:{base.get('name', '')}", weights),
        *((f"{data['role']}:{data['name']}", data.get("sha256")) for data in job.get("data", [])),
        ("recipe", job.get("recipe_sha256")),
        (f"wgpu-lora {package.get('version', '')}", package.get("sha256")),
        (f"wgpu-native {wgpu.get('native_version', '')}", wgpu.get("native_sha256")),
    ]
    return [{"name": name, "digest": {"sha256": digest}} for name, digest in digests if digest]
