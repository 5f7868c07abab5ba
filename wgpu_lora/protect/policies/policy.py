"""A policy: the reference values of the data owner, from policy.toml (RATS, RFC 9334: appraisal policy for evidence).

`KEYS` has every key of every section with its type. Those with a check are rules on claims. A rule that is left out
restricts nothing, and every appraisal says so; what must be known before a key is released is required.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, make_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from pyrage import RecipientError

from wgpu_lora.errors import UserError
from wgpu_lora.files.json_files import parse_toml, small_file
from wgpu_lora.files.typed_json import Check, Positive, Sha256, Text, read_as
from wgpu_lora.names.aliases import advice
from wgpu_lora.names.spelling import IN_FILE, naming
from wgpu_lora.names.text import escape_unprintable
from wgpu_lora.protect.attestation.tpm import Pcr
from wgpu_lora.protect.policies import claim_checks as checks
from wgpu_lora.protect.policies.claim_checks import MOST, ClaimCheck, all_items, like, listed, states, true, version
from wgpu_lora.protect.sealed.age_streams import parse_recipient
from wgpu_lora.train.options.training_arguments import TrainingArguments

DAY = 86_400
PEM = re.compile(r"\s*-----BEGIN PUBLIC KEY-----[A-Za-z0-9+/=\s]{40,8000}-----END PUBLIC KEY-----\s*")


def _parses(read: Callable[[str], Any]) -> Callable[[str], bool]:
    def fits(value: str) -> bool:
        try:
            read(value)
        except (InvalidSpecifier, RecipientError, TypeError):
            return False
        return True

    return fits


_Some = Check(lambda value: 1 <= len(value) <= MOST, "a list with at least one value")
_Few = Check(lambda value: len(value) <= MOST, f"at most {MOST:,} entries")
Short = Annotated[Text, Check(lambda value: len(value) <= MOST, f"at most {MOST:,} characters long")]
Pem = Annotated[str, Check(PEM.fullmatch, "a public key in PEM")]
Recipient = Annotated[str, Check(_parses(parse_recipient), "an age recipient (age1...)")]
Specifier = Annotated[Short, Check(_parses(SpecifierSet), "a version specifier such as '>=1.2,<2' (PEP 440)")]
Texts = Annotated[tuple[Short, ...], _Some]  # in patterns, * and ? stand for any characters
Digests = Annotated[tuple[Sha256, ...], _Some]
OnlyTexts = Annotated[tuple[Short, ...], _Few]  # an empty list allows nothing
OnlyDigests = Annotated[tuple[Sha256, ...], _Few]
DigestsByName = Annotated[dict[str, Sha256 | Digests], _Few]
Pins = Annotated[
    DigestsByName,
    Check(
        lambda pins: len({*map(canonicalize_name, pins)}) == len(pins), "a table with each package once, not one twice"
    ),
]
TrueOnly = Annotated[bool, Check(bool, "true, or left out")]
Number = str | bool | int | float


def _seconds(minimum: float, maximum: float) -> Check:
    return Check(lambda value: minimum <= value <= maximum, f"between {minimum:g} and {maximum:,g} seconds")


@dataclass(frozen=True)
class Bound:
    """The bound of an option."""

    min: int | float | None = None
    max: int | float | None = None
    allow: Annotated[tuple[Number, ...], _Some] | None = None


Limit = Annotated[Bound, Check(lambda bound: bound != Bound(), "a value, or a table with min, max or allow")]


@dataclass(frozen=True)
class Key:
    """A key of a policy, `section.key`. kind: the type of its value. check: makes it a rule on claims."""

    name: str
    kind: Any
    check: ClaimCheck | None = None
    default: Any = None
    required: bool = False


KEYS = (
    Key("policy.name", Short, required=True),
    Key("policy.version", Positive, required=True),
    # From a nonce's issue to its use, and the evidence's age; by which the trainer's clock may be ahead.
    Key("nonce.seconds", Annotated[float, _seconds(1, DAY)], default=300.0),
    Key("nonce.skew", Annotated[float, _seconds(0, 300)], default=5.0),
    Key("release.seconds", Annotated[float, _seconds(1, 30 * DAY)], default=3600.0),
    Key("release.sessions", Positive, default=math.inf),  # that get the key, of all jobs together
    Key("release.recipients", Annotated[tuple[Recipient, ...], _Some], ClaimCheck(checks.recipients), required=True),
    Key("attestation.level", Literal["self-reported", "quoted"], ClaimCheck(checks.level), required=True),
    Key("attestation.tpm_keys", Annotated[tuple[Pem, ...], _Some], ClaimCheck(checks.tpm_keys)),
    Key("attestation.pcrs", dict[Pcr, Sha256], ClaimCheck(checks.pcrs)),
    Key("data.sha256", Digests, ClaimCheck(checks.sealed), required=True),
    Key("job.names", Texts, listed("job.name")),
    Key("job.sha256", Digests, listed("job.sha256")),
    Key("base.sha256", Digests, listed("base.sha256")),
    Key("base.config_sha256", Digests, listed("base.config_sha256")),
    Key("recipe.sha256", Digests, listed("job.recipe_sha256")),
    Key("recipe.options", Annotated[dict[str, Limit | Number], _Few], ClaimCheck(checks.options)),
    Key("training.min_rows", Positive, ClaimCheck(checks.rows)),
    Key("training.max_steps", Positive, ClaimCheck(checks.steps)),
    Key("package.versions", Specifier, version("package.version")),
    Key("package.sha256", Digests, listed("package.sha256")),
    Key("wgpu.versions", Specifier, version("wgpu.version")),
    Key("wgpu.native_versions", Specifier, version("wgpu.native_version")),
    Key("wgpu.native_sha256", Digests, listed("wgpu.native_sha256")),
    Key("python.implementations", Texts, listed("python.implementation")),
    Key("python.versions", Specifier, version("python.version")),
    Key("python.sha256", Digests, listed("python.sha256")),
    Key("python.library_sha256", Digests, listed("python.library_sha256")),
    Key("dependencies.intact", TrueOnly, true(checks.intact)),
    Key("dependencies.only_pinned", TrueOnly, true(checks.only_pinned)),
    Key("dependencies.pinned", Pins, ClaimCheck(checks.pinned)),
    Key("device.names", Texts, like("device.name")),
    Key("device.backends", Texts, listed("device.backend")),
    Key("device.kinds", Texts, listed("device.kind")),
    Key("device.drivers", Texts, like("device.driver")),
    Key("kernel.systems", Texts, listed("kernel.system")),
    Key("kernel.machines", Texts, listed("kernel.machine")),
    Key("kernel.releases", Texts, like("kernel.release")),
    Key("environment.forbidden", Texts, ClaimCheck(checks.forbidden)),
    Key("environment.only", DigestsByName, ClaimCheck(checks.only, "environment", lambda value: value)),
    Key("host.no_core_dumps", TrueOnly, states("host.core_dumps.off", True)),
    Key("host.no_swap", TrueOnly, true(checks.no_swap)),
    Key("process.untraced", TrueOnly, states("process.traced", False)),
    Key("process.compiled", TrueOnly, true(checks.compiled)),
    Key("process.import_hooks", OnlyTexts, all_items("process.import_hooks", list)),
    Key("process.unlisted", OnlyDigests, all_items("process.unlisted", dict)),
    Key("process.libraries", OnlyDigests, all_items("process.libraries", dict)),
)
RULES = tuple(key for key in KEYS if key.check)


def _file_type() -> Any:
    """A dataclass of the whole file, which has one for each section."""
    sections: dict[str, list[Any]] = {}
    for key in KEYS:
        section, name = key.name.split(".")
        kind, default = (key.kind, MISSING) if key.required else (key.kind | None, key.default)
        sections.setdefault(section, []).append((name, kind, field(default=default, kw_only=True)))
    kinds = {name: make_dataclass(name, parts, frozen=True) for name, parts in sections.items()}
    required = {key.name.split(".")[0] for key in KEYS if key.required}
    parts = [
        (name, kind, field(kw_only=True) if name in required else field(default_factory=kind, kw_only=True))
        for name, kind in kinds.items()
    ]
    return make_dataclass("PolicyFile", parts, frozen=True)


PolicyFile = _file_type()


@dataclass(frozen=True)
class Policy:
    """A policy that has been read and checked.

    Attributes:
        values: by `section.key`, defaults among them; None for a rule that is left out.
        sha256: of the file, which decisions and releases state.
    """

    values: Mapping[str, Any]
    sha256: str

    @classmethod
    def read(cls, path: Path) -> Policy:
        """Read policy.toml.

        Raises:
            UserError: it cannot be read, is too long, has an unknown section or key (the nearest one is suggested),
                lacks a required one, or a value is not of its kind.
        """
        return cls.parse(small_file(path, "The policy"), f"The policy {path}")

    @classmethod
    def parse(cls, data: bytes, where: str = "The policy") -> Policy:
        """The same from bytes; `where` begins the messages."""
        file = read_as(PolicyFile, parse_toml(data, where), where)
        values = {key.name: attrgetter(key.name)(file) for key in KEYS}
        _check_whole(values, where)
        return cls(values, hashlib.sha256(data).hexdigest())

    def __getitem__(self, name: str) -> Any:
        return self.values[name]

    def as_dict(self) -> dict[str, Any]:
        """What a release and a decision state of the policy."""
        return {"name": self["policy.name"], "version": self["policy.version"], "sha256": self.sha256}


def _check_whole(values: Mapping[str, Any], where: str) -> None:
    """Raise UserError for values that need others, and for bounds of options that there are not."""
    is_quoted = values["attestation.level"] == "quoted"
    if is_quoted and values["attestation.tpm_keys"] is None:
        raise UserError(
            f"{where} asks for quotes without saying of which TPMs: add 'tpm_keys' to [attestation], since anybody "
            "can run a TPM in software."
        )
    for key in () if is_quoted else ("tpm_keys", "pcrs"):
        if values[f"attestation.{key}"] is not None:
            raise UserError(f"{where} has '{key}' in [attestation], which needs level = \"quoted\": add it.")
    if values["dependencies.only_pinned"] and values["dependencies.pinned"] is None:
        raise UserError(f"{where} has 'only_pinned' in [dependencies], but no [dependencies.pinned]: add it.")
    names = list(TrainingArguments.__dataclass_fields__)
    for name in values["recipe.options"] or ():
        if name not in names:
            with naming(IN_FILE):
                cure = advice(name, names, "use an option of finetune.")
            raise UserError(f"{where}: [recipe.options] has no option '{escape_unprintable(name)[:60]}': {cure}")
