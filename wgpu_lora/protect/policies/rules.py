"""The rules of a policy: the keys of its sections, each with the kind of its value and the check of a claim."""

from __future__ import annotations

from dataclasses import dataclass

from wgpu_lora.protect.policies import claim_checks as checks
from wgpu_lora.protect.policies import fields
from wgpu_lora.protect.policies.claim_checks import Check
from wgpu_lora.protect.policies.fields import Field


@dataclass(frozen=True)
class Rule:
    """A key of a section. required: a policy without it is refused."""

    section: str
    key: str
    field: Field
    failures: Check
    required: bool = False

    @property
    def name(self) -> str:
        return f"{self.section}.{self.key}"


# In the order of reports. Those of [policy], [nonce] and [release] that are no rules on claims are in policy.py.
RULES = (
    Rule("attestation", "level", fields.LEVEL, checks.level, required=True),
    Rule("attestation", "tpm_keys", fields.PEMS, checks.tpm_keys),
    Rule("attestation", "pcrs", fields.PCRS, checks.pcrs),
    Rule("data", "sha256", fields.DIGESTS, checks.sealed, required=True),
    Rule("release", "recipients", fields.RECIPIENTS, checks.recipients, required=True),
    Rule("job", "names", fields.TEXTS, checks.listed_in("job.name")),
    Rule("job", "sha256", fields.DIGESTS, checks.listed_in("job.sha256")),
    Rule("base", "sha256", fields.DIGESTS, checks.listed_in("base.sha256")),
    Rule("base", "config_sha256", fields.DIGESTS, checks.listed_in("base.config_sha256")),
    Rule("recipe", "sha256", fields.DIGESTS, checks.listed_in("job.recipe_sha256")),
    Rule("recipe", "options", fields.OPTIONS, checks.options),
    Rule("training", "min_rows", fields.COUNT, checks.rows),
    Rule("training", "max_steps", fields.LIMIT, checks.steps),
    Rule("package", "versions", fields.SPECIFIER, checks.version("package.version")),
    Rule("package", "sha256", fields.DIGESTS, checks.listed_in("package.sha256")),
    Rule("wgpu", "versions", fields.SPECIFIER, checks.version("wgpu.version")),
    Rule("wgpu", "native_versions", fields.SPECIFIER, checks.version("wgpu.native_version")),
    Rule("wgpu", "native_sha256", fields.DIGESTS, checks.listed_in("wgpu.native_sha256")),
    Rule("python", "versions", fields.SPECIFIER, checks.version("python.version")),
    Rule("python", "implementations", fields.TEXTS, checks.listed_in("python.implementation")),
    Rule("python", "sha256", fields.DIGESTS, checks.listed_in("python.sha256")),
    Rule("python", "library_sha256", fields.DIGESTS, checks.listed_in("python.library_sha256")),
    Rule("dependencies", "intact", fields.TRUE, checks.intact),
    Rule("dependencies", "only_pinned", fields.TRUE, checks.only_pinned),
    Rule("dependencies", "pinned", fields.PINS, checks.pinned),
    Rule("device", "names", fields.GLOBS, checks.like("device.name")),
    Rule("device", "backends", fields.TEXTS, checks.listed_in("device.backend")),
    Rule("device", "kinds", fields.TEXTS, checks.listed_in("device.kind")),
    Rule("device", "drivers", fields.GLOBS, checks.like("device.driver")),
    Rule("kernel", "systems", fields.TEXTS, checks.listed_in("kernel.system")),
    Rule("kernel", "releases", fields.GLOBS, checks.like("kernel.release")),
    Rule("kernel", "machines", fields.TEXTS, checks.listed_in("kernel.machine")),
    Rule("environment", "forbidden", fields.GLOBS, checks.forbidden),
    Rule("environment", "only", fields.VALUES, checks.only),
    Rule("host", "no_core_dumps", fields.TRUE, checks.no_core_dumps),
    Rule("host", "no_swap", fields.TRUE, checks.no_swap),
    Rule("process", "untraced", fields.TRUE, checks.untraced),
    Rule("process", "compiled", fields.TRUE, checks.compiled),
    Rule("process", "import_hooks", fields.ONLY_TEXTS, checks.hooks),
    Rule("process", "unlisted", fields.ONLY_DIGESTS, checks.loaded("process.unlisted")),
    Rule("process", "libraries", fields.ONLY_DIGESTS, checks.loaded("process.libraries")),
)
