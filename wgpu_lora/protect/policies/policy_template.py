"""A policy from reference values: TOML that accepts the claims of one session, for the data owner to edit."""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from packaging.utils import canonicalize_name

from wgpu_lora.bounded import escape_unprintable
from wgpu_lora.protect.attestation import tpm
from wgpu_lora.protect.policies.appraisal import failures_of
from wgpu_lora.protect.policies.fields import DIGEST, WrongValue
from wgpu_lora.protect.policies.policy import KINDS
from wgpu_lora.protect.policies.rules import RULES

# Variables with which others' code runs inside the trainer.
FORBIDDEN = ("LD_PRELOAD", "LD_AUDIT", "LD_LIBRARY_PATH", "DYLD_*", "PYTHONSTARTUP", "PYTHONINSPECT", "PYTHONHOME")
BOOT = [str(number) for number in tpm.BOOT]
TABLES = ("options", "pinned", "only")  # written as sections of their own
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


@dataclass(frozen=True)
class Line:
    """A key of a policy with its reference value. strict: only in a strict policy."""

    section: str
    key: str
    value: Any
    strict: bool = False


def policy_for(claims: Mapping[str, Any], quote: Mapping[str, Any] | None = None, strict: bool = False) -> str:
    """The text of a policy that accepts these claims.

    Args:
        quote: the verified quote, if the claims are quoted.
        strict: pins every digest and release too, so that an update of any part needs a new policy.

    Returns:
        TOML. A value that is not known here, or that these claims do not meet, is a comment that says so.
    """
    facts = {
        **claims,
        "quote": quote,
        "pins": [canonicalize_name(name) for name in _object(claims.get("dependencies"))],
    }
    lines = [line for line in _lines(claims, quote) if strict or not line.strict]
    sections: dict[str, list[str]] = {}
    for line in lines:
        sections.setdefault(line.section, []).append(_written(line, facts))
    text = []
    for name, written in sections.items():
        said = [f"# {SECTIONS[name]}"] if name in SECTIONS else []
        # Tables of a section come after its keys.
        ordered = sorted(written, key=lambda one: one.startswith("["))
        text.append("\n".join([f"[{name}]", *said, *ordered]))
    return "\n\n".join(text) + "\n"


def _written(line: Line, facts: Mapping[str, Any]) -> str:
    """A key and its value, or a comment that says why it is not there."""
    if line.value is None:
        return f"# {line.key} is not known here."
    try:
        value = KINDS[line.section, line.key].read(line.value)
    except WrongValue as error:
        return f"# {line.key} is left out: {escape_unprintable(str(error))}."
    text = f"{line.key} = {toml(line.value)}"
    if line.key in TABLES:
        text = "\n".join(
            [f"[{line.section}.{line.key}]", *(f"{_key(k)} = {toml(v)}" for k, v in sorted(line.value.items()))]
        )
    rule = next((rule for rule in RULES if (rule.section, rule.key) == (line.section, line.key)), None)
    found = [] if rule is None else [*failures_of(partial(rule.failures, value), facts, "")]
    if not found:
        return text
    commented = "\n".join(f"# {one}" for one in text.split("\n"))
    return f"# Not so here: expected {found[0][0]}, found {found[0][1]}.\n{commented}"


def _lines(claims: Mapping[str, Any], quote: Mapping[str, Any] | None) -> Iterator[Line]:
    def at(path: str) -> Any:
        value: Any = claims
        for part in path.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def one(path: str, form: Callable[[str], str] = str) -> list[Any] | None:
        value = at(path)
        return None if value is None else [form(value) if isinstance(value, str) else value]

    def exactly(path: str) -> str | None:
        value = at(path)
        return None if value is None else f"=={value}"

    files = _objects(at("job.data"))
    rows = [file.get("rows") for file in files if file.get("role") == "data"]
    options = _object(at("job.options"))
    yield Line("policy", "name", at("job.name"))
    yield Line("policy", "version", 1)
    yield Line("nonce", "seconds", 300)
    yield Line("nonce", "skew", 5)
    yield Line("release", "seconds", 3600)
    yield Line("release", "recipients", at("job.recipients"))
    yield Line("attestation", "level", at("level"))
    if quote is not None:
        yield Line("attestation", "tpm_keys", [quote.get("key_pem")])
        # PCRs above 7 are the running system's: IMA extends 10 with every file that is opened.
        pcrs = {str(key): value for key, value in _object(quote.get("pcrs")).items()}
        yield Line("attestation", "pcrs", {number: value for number, value in pcrs.items() if number in BOOT})
    yield Line("data", "sha256", _digests(file.get("sha256") for file in files) or None)
    yield Line("job", "names", one("job.name"))
    yield Line("job", "sha256", one("job.sha256"), strict=True)
    yield Line("base", "sha256", one("base.sha256"))
    yield Line("base", "config_sha256", one("base.config_sha256"))
    yield Line("recipe", "sha256", one("job.recipe_sha256"), strict=True)
    bounds: dict[str, Any] = {}
    if "objective" in options:
        bounds["objective"] = options["objective"]
    if "learning_rate" in options:
        bounds["learning_rate"] = {"max": options["learning_rate"]}
    if bounds:
        yield Line("recipe", "options", bounds)
    yield Line("training", "min_rows", rows[0] if len(rows) == 1 else None)
    yield Line("training", "max_steps", options.get("max_steps"))
    yield Line("package", "versions", exactly("package.version"))
    yield Line("package", "sha256", one("package.sha256"))
    yield Line("wgpu", "versions", exactly("wgpu.version"))
    yield Line("wgpu", "native_versions", exactly("wgpu.native_version"))
    yield Line("wgpu", "native_sha256", one("wgpu.native_sha256"))
    yield Line("python", "implementations", one("python.implementation"))
    yield Line("python", "versions", exactly("python.version"))
    yield Line("python", "sha256", one("python.sha256"), strict=True)
    yield Line("python", "library_sha256", one("python.library_sha256"), strict=True)
    yield Line("dependencies", "intact", True)
    pins = {name: _object(package).get("sha256") for name, package in _object(at("dependencies")).items()}
    yield Line("dependencies", "only_pinned", True, strict=True)
    yield Line("dependencies", "pinned", pins or None, strict=True)
    yield Line("device", "names", one("device.name", glob.escape))
    yield Line("device", "backends", one("device.backend"))
    yield Line("device", "kinds", one("device.kind"))
    yield Line("device", "drivers", one("device.driver", glob.escape), strict=True)
    yield Line("kernel", "systems", one("kernel.system"))
    yield Line("kernel", "machines", one("kernel.machine"))
    yield Line("kernel", "releases", one("kernel.release", glob.escape), strict=True)
    yield Line("environment", "forbidden", list(FORBIDDEN))
    yield Line("environment", "only", at("environment"), strict=True)
    yield Line("host", "no_core_dumps", True)
    yield Line("host", "no_swap", True)
    yield Line("process", "untraced", True)
    yield Line("process", "compiled", True)
    yield Line("process", "import_hooks", at("process.import_hooks"))
    for key in ("unlisted", "libraries"):
        loaded = at(f"process.{key}")
        yield Line("process", key, None if loaded is None else _digests(_object(loaded).values()), strict=True)


def _object(value: Any) -> Mapping[str, Any]:
    """Claims are untrusted: anything else counts as empty."""
    return value if isinstance(value, Mapping) else {}


def _digests(values: Iterable[Any]) -> list[str]:
    return sorted({value for value in values if isinstance(value, str) and DIGEST.fullmatch(value)})


def _objects(value: Any) -> list[Mapping[str, Any]]:
    return [one for one in value if isinstance(one, Mapping)] if isinstance(value, list) else []


def toml(value: Any) -> str:
    """A value as TOML. JSON's texts, numbers, true and false are TOML's; all but printable ASCII is escaped."""
    if isinstance(value, list | tuple):
        if len(value) < 2:
            return f"[{', '.join(map(toml, value))}]"
        return "[\n" + "".join(f"    {toml(one)},\n" for one in value) + "]"
    if isinstance(value, Mapping):
        return f"{{ {', '.join(f'{_key(key)} = {toml(one)}' for key, one in value.items())} }}"
    if isinstance(value, str):
        quoted = json.dumps(value, ensure_ascii=False)
        return "".join(c if c.isascii() and c.isprintable() else f"\\U{ord(c):08x}" for c in quoted)
    return json.dumps(value, allow_nan=False)


def _key(name: str) -> str:
    plain = name.isascii() and name.replace("-", "a").replace("_", "a").isalnum()
    return name if plain else toml(name)
