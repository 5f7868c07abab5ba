"""A policy: the reference values of the data owner, from policy.toml (RATS, RFC 9334: appraisal policy for evidence).

Every key is a rule (rules.py) or a setting (below). A rule that is left out restricts nothing, and every appraisal
says so; those without which a key must never be released are required.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from wgpu_lora.errors import UserError
from wgpu_lora.json_files import parse_toml, toml_bytes
from wgpu_lora.protect.policies import fields
from wgpu_lora.protect.policies.fields import Field, WrongValue
from wgpu_lora.protect.policies.rules import RULES
from wgpu_lora.text import escape_unprintable, join_words
from wgpu_lora.train.options.training_arguments import TrainingArguments

DAY = 86_400
MOST_NAMED = 20  # names in a message
# Settings that are no rules: section, key -> kind, and the default (None if there is none).
SETTINGS: dict[tuple[str, str], tuple[Field, Any]] = {
    ("policy", "name"): (fields.TEXT, None),
    ("policy", "version"): (fields.COUNT, None),
    ("nonce", "seconds"): (fields.seconds(1, DAY), 300.0),  # from a nonce's issue to its use, and the evidence's age
    ("nonce", "skew"): (fields.seconds(0, 300), 5.0),  # by which the trainer's clock may be ahead of the verifier's
    ("release", "seconds"): (fields.seconds(1, 30 * DAY), 3600.0),
    ("release", "sessions"): (fields.LIMIT, math.inf),  # that get the key, of all jobs together
}
KINDS: dict[tuple[str, str], Field] = {key: kind for key, (kind, _) in SETTINGS.items()} | {
    (rule.section, rule.key): rule.field for rule in RULES
}
REQUIRED = [key for key, (_, default) in SETTINGS.items() if default is None] + [
    (rule.section, rule.key) for rule in RULES if rule.required
]


@dataclass(frozen=True)
class Policy:
    """A policy that has been read and checked.

    values: by section and key, without those left out. sha256: of the file, which decisions and releases state.
    """

    values: Mapping[tuple[str, str], Any]
    sha256: str

    @classmethod
    def read(cls, path: Path) -> Policy:
        """Read policy.toml.

        Raises:
            UserError: it cannot be read, is too long, has an unknown section or key (the nearest one is suggested),
                lacks a required one, or a value is not of its kind.
        """
        return cls.parse(toml_bytes(path, "The policy"), f"The policy {path}")

    @classmethod
    def parse(cls, data: bytes, where: str = "The policy") -> Policy:
        """The same from bytes; `where` begins the messages."""
        found: dict[tuple[str, str], Any] = {}
        for section, table in parse_toml(data, where).items():
            if section not in (sections := dict.fromkeys(name for name, _ in KINDS)):
                raise UserError(f"{where} has an unknown section [{_name(section)}]: {_meant(section, sections)}")
            if not isinstance(table, dict):
                raise UserError(f"{where}: '{section}' must be a section: write [{section}], then its keys.")
            for key, value in table.items():
                if (section, key) not in KINDS:
                    keys = [name for where_, name in KINDS if where_ == section]
                    raise UserError(f"{where}: [{section}] has an unknown key '{_name(key)}': {_meant(key, keys)}")
                try:
                    found[section, key] = KINDS[section, key].read(value, f"'{key}'")
                except WrongValue as error:
                    raise UserError(f"{where}, [{section}]: {str(error).removesuffix('.')}.") from None
        _complete(found, where)
        return cls(found, hashlib.sha256(data).hexdigest())

    def _setting(self, section: str, key: str) -> Any:
        return self.values.get((section, key), SETTINGS[section, key][1])

    @property
    def name(self) -> str:
        return str(self._setting("policy", "name"))

    @property
    def version(self) -> int:
        return int(self._setting("policy", "version"))

    @property
    def nonce_seconds(self) -> float:
        """From the issue of a nonce to its use, and the oldest evidence that is accepted."""
        return float(self._setting("nonce", "seconds"))

    @property
    def skew_seconds(self) -> float:
        """By which the trainer's clock may be ahead of the verifier's."""
        return float(self._setting("nonce", "skew"))

    @property
    def release_seconds(self) -> float:
        """From a release to its expiry."""
        return float(self._setting("release", "seconds"))

    @property
    def sessions(self) -> float:
        """To how many sessions a broker releases the key, those of all jobs and those that resume."""
        return float(self._setting("release", "sessions"))

    @property
    def recipients(self) -> tuple[str, ...]:
        """To whom results and checkpoints may be sealed."""
        return tuple(self.values["release", "recipients"])

    @property
    def min_rows(self) -> int | None:
        return self.values.get(("training", "min_rows"))

    @property
    def max_steps(self) -> int | None:
        return self.values.get(("training", "max_steps"))

    def as_dict(self) -> dict[str, Any]:
        """What a release and a decision state of the policy."""
        return {"name": self.name, "version": self.version, "sha256": self.sha256}


def _complete(found: Mapping[tuple[str, str], Any], where: str) -> None:
    """Raise UserError for a missing value, or for values that need others."""
    for section, key in REQUIRED:
        if (section, key) not in found:
            raise UserError(f"{where} has no '{key}' in [{section}], which is required: add it.")
    quoted = found["attestation", "level"] == "quoted"
    if quoted and ("attestation", "tpm_keys") not in found:
        raise UserError(
            f"{where} asks for quotes without saying of which TPMs: add 'tpm_keys' to [attestation], since anybody "
            "can run a TPM in software."
        )
    for key in () if quoted else ("tpm_keys", "pcrs"):
        if ("attestation", key) in found:
            raise UserError(f"{where} has '{key}' in [attestation], which needs level = \"quoted\": add it.")
    if ("dependencies", "only_pinned") in found and ("dependencies", "pinned") not in found:
        raise UserError(f"{where} has 'only_pinned' in [dependencies], but no [dependencies.pinned]: add it.")
    for name in found.get(("recipe", "options"), ()):
        if name not in (options := TrainingArguments.__dataclass_fields__):
            raise UserError(f"{where}: [recipe.options] has no option '{_name(name)}': {_meant(name, options)}")


def _name(text: str) -> str:
    return escape_unprintable(text)[:60]


def _meant(name: str, known: Collection[str]) -> str:
    """The end of a sentence about an unknown name."""
    close = get_close_matches(name, known, n=1)
    return f"did you mean '{close[0]}'?" if close else f"use {join_words([*known][:MOST_NAMED])}."
