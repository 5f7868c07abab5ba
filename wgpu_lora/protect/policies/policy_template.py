"""A policy from reference values: TOML that accepts the claims of one session, for the data owner to edit."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from packaging.utils import canonicalize_name

from wgpu_lora.files.typed_json import typed
from wgpu_lora.names.text import escape_unprintable
from wgpu_lora.protect.attestation import tpm
from wgpu_lora.protect.policies.claim_checks import claim_or_none, digests, failures_of
from wgpu_lora.protect.policies.policy import KEYS, Key

# Variables with which others' code runs inside the trainer.
FORBIDDEN = ("LD_PRELOAD", "LD_AUDIT", "LD_LIBRARY_PATH", "DYLD_*", "PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONHOME")
BOOT = [str(number) for number in tpm.BOOT]
TABLES = ("recipe.options", "dependencies.pinned", "environment.only")  # written as sections of their own
STRICT = {
    "job.sha256", "recipe.sha256", "python.sha256", "python.library_sha256", "dependencies.only_pinned",
    "dependencies.pinned", "device.drivers", "kernel.releases", "environment.only", "process.unlisted",
    "process.libraries",
}  # fmt: skip
SECTIONS = {
    "policy": "Raise the version with every change.",
    "nonce": "Seconds from a nonce's issue to its use, and by which the trainer's clock may be ahead.",
    "release": "Seconds for which a release can be used, and to whom checkpoints and the adapter may be sealed.",
    "attestation": "What the evidence must be: self-reported, or quoted by a TPM with one of tpm_keys.",
    "data": "Digests of the sealed files, and of a teacher and a reference adapter.",
    "environment": "Variables by name; in [environment.only], those that may be set, with their values' digests.",
    "host": "What keeps the trainer's memory off its disk.",
    "process": "What may be loaded that belongs to no package.",
}


def policy_for(claims: Mapping[str, Any], quote: Mapping[str, Any] | None = None, strict: bool = False) -> str:
    """The text of a policy that accepts these claims.

    Args:
        quote: the verified quote, if the claims are quoted.
        strict: pins every digest and release too, so that an update of any part needs a new policy.

    Returns:
        TOML. A value that is not known here, or that these claims do not meet, is a comment that says so.
    """
    pins = [canonicalize_name(name) for name in _object(claims.get("dependencies"))]
    facts = {**claims, "quote": quote, "pins": pins}
    values = _values(claims, quote)
    sections: dict[str, list[str]] = {}
    for key in KEYS:
        if key.name in values:
            value = values[key.name]
        elif key.check and (quote or key.name not in ("attestation.tpm_keys", "attestation.pcrs")):
            value = key.check.reference(claims)
        else:
            continue
        if strict or key.name not in STRICT:
            sections.setdefault(key.name.split(".")[0], []).append(_line(key, value, facts))
    text = []
    for name, lines in sections.items():
        about = [f"# {SECTIONS[name]}"] if name in SECTIONS else []
        # Tables of a section come after its keys.
        text.append("\n".join([f"[{name}]", *about, *sorted(lines, key=lambda line: line.startswith("["))]))
    return "\n\n".join(text) + "\n"


def _line(key: Key, value: Any, facts: Mapping[str, Any]) -> str:
    """A key and its value, or a comment that says why it is not there."""
    name = key.name.split(".")[1]
    if value is None:
        return f"# {name} is not known here."
    try:
        checked = typed(key.kind, value, f"'{name}'", unknown="refuse")
    except ValueError as error:
        return f"# {name} is left out: {escape_unprintable(str(error))}."
    text = f"{name} = {toml(value)}"
    if key.name in TABLES:
        text = "\n".join([f"[{key.name}]", *(f"{_name(k)} = {toml(item)}" for k, item in sorted(value.items()))])
    failures = [*failures_of(partial(key.check.failures, checked), facts, name)] if key.check else []
    if not failures:
        return text
    expected, actual = failures[0]
    comment = f"Not so here: expected {expected}, found {actual}."
    return "\n".join(f"# {line}" for line in [comment, *text.split("\n")])


def _values(claims: Mapping[str, Any], quote: Mapping[str, Any] | None) -> dict[str, Any]:
    """Settings, and values of rules whose check cannot make them from claims, by name."""
    job = _object(claims.get("job"))
    files = job["data"] if isinstance(job.get("data"), list) else []
    files = [file for file in files if isinstance(file, Mapping)]
    rows = [file.get("rows") for file in files if file.get("role") == "data"]
    options = _object(job.get("options"))
    bounds = {"objective": options.get("objective")} if "objective" in options else {}
    if "learning_rate" in options:
        bounds["learning_rate"] = {"max": options["learning_rate"]}
    dependencies = _object(claims.get("dependencies"))
    values = {
        "policy.name": job.get("name"),
        "policy.version": 1,
        "nonce.seconds": 300,
        "nonce.skew": 5,
        "release.seconds": 3600,
        "release.recipients": job.get("recipients"),
        "attestation.level": claim_or_none(claims, "level"),
        "data.sha256": digests(file.get("sha256") for file in files) or None,
        "training.min_rows": rows[0] if len(rows) == 1 else None,
        "training.max_steps": options.get("max_steps"),
        "dependencies.pinned": {name: _object(package).get("sha256") for name, package in dependencies.items()} or None,
        "environment.forbidden": list(FORBIDDEN),
        "recipe.options": bounds or None,
    }
    if quote is not None:
        # PCRs above 7 are the running system's: IMA extends 10 with every file that is opened.
        pcrs = {str(number): value for number, value in _object(quote.get("pcrs")).items() if str(number) in BOOT}
        values |= {"attestation.tpm_keys": [quote.get("key_pem")], "attestation.pcrs": pcrs}
    return values


def _object(value: Any) -> Mapping[str, Any]:
    """Claims are untrusted: anything else counts as empty."""
    return value if isinstance(value, Mapping) else {}


def toml(value: Any) -> str:
    """A value as TOML. JSON's texts, numbers, true and false are TOML's; all but printable ASCII is escaped."""
    if isinstance(value, list | tuple):
        if len(value) < 2:
            return f"[{', '.join(map(toml, value))}]"
        return "[\n" + "".join(f"    {toml(item)},\n" for item in value) + "]"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_name(key)} = {toml(item)}' for key, item in value.items())} }}"
    if isinstance(value, str):
        quoted_text = json.dumps(value, ensure_ascii=False)
        return "".join(c if c.isascii() and c.isprintable() else f"\\U{ord(c):08x}" for c in quoted_text)
    return json.dumps(value, allow_nan=False)


def _name(name: str) -> str:
    plain = name.isascii() and name.replace("-", "a").replace("_", "a").isalnum()
    return name if plain else toml(name)
