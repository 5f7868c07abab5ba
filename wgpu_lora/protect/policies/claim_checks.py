"""Checks of claims against the values of a policy: each yields its failures, as (expected, found).

A check whose claim is missing or has the wrong type raises `ClaimError`, which is a failure: nothing passes because it
is not stated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key
from packaging.utils import canonicalize_name

from wgpu_lora.protect.policies.fields import MOST, any_of, matches, shown, within

Failed = tuple[str, str]  # what was expected, and what was found
Facts = Mapping[str, Any]  # the claims, and beside them `quote`, the verified one or None, and `pins`
Check = Callable[[Any, Facts], Iterator[Failed]]  # failures, from the value in the policy and the facts
NOTHING = "nothing"


class ClaimError(Exception):
    """A claim is missing or has the wrong type; the message says what was found."""


def claim(facts: Facts, path: str, kind: type | tuple[type, ...] = str) -> Any:
    """The claim at a path such as `device.name`. Raises Unfit unless it is there and has the type."""
    value: Any = facts
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if value is None:
        raise ClaimError(f"{NOTHING}: the evidence does not state {path}")
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ClaimError(f"{shown(value)}, which is of the wrong type")
    if isinstance(value, float) and not math.isfinite(value):
        raise ClaimError(f"{value}, which is not a finite number")
    if isinstance(value, Mapping | list | str) and len(value) > MOST:  # more would only take the verifier's time
        raise ClaimError(f"more than {MOST:,} {'characters' if isinstance(value, str) else 'entries'}")
    return value


def listed_in(path: str) -> Check:
    def failures(allowed: Sequence[str], facts: Facts) -> Iterator[Failed]:
        if (found := claim(facts, path)) not in allowed:
            yield any_of(allowed), shown(found)

    return failures


def like(path: str) -> Check:
    def failures(patterns: Sequence[str], facts: Facts) -> Iterator[Failed]:
        found = claim(facts, path)
        if not any(matches(found, pattern) for pattern in patterns):
            yield any_of(patterns), shown(found)

    return failures


def version(path: str) -> Check:
    def failures(specifier: Any, facts: Facts) -> Iterator[Failed]:
        if not within(found := claim(facts, path), specifier):
            yield f"a version {specifier}", shown(found)

    return failures


def level(level: str, facts: Facts) -> Iterator[Failed]:
    found = claim(facts, "level")
    if level == "quoted" and not (found == level and facts["quote"]):
        yield "quoted by a TPM", "no quote beside the claims" if found == level else shown(found)
    if found not in ("self-reported", "quoted"):
        yield "'self-reported' or 'quoted'", shown(found)


def tpm_keys(keys: Sequence[str], facts: Facts) -> Iterator[Failed]:
    if _der(found := claim(facts, "quote.key_pem")) not in {_der(key) for key in keys} - {None}:
        yield f"one of the {len(keys)} keys of [attestation]", "another key" if _der(found) else "no key"


def _der(pem: str) -> bytes | None:
    """A public key in its one form, since PEM may be folded differently."""
    try:
        return load_pem_public_key(pem.encode()).public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    except Exception:  # the library raises many kinds; whatever it is, this is no key
        return None


def pcrs(expected: Mapping[int, str], facts: Facts) -> Iterator[Failed]:
    found = claim(facts, "quote.pcrs", Mapping)
    for number, value in expected.items():
        other = found.get(number, found.get(str(number)))
        if other != value:
            yield f"PCR {number} = {value}", shown(other) if other else NOTHING


def intact(_: bool, facts: Facts) -> Iterator[Failed]:
    for name, package in _dependencies(facts).items():
        if not (isinstance(package, Mapping) and package.get("intact") is True):
            changed = package.get("changed") if isinstance(package, Mapping) else None
            yield (
                f"{shown(name)} as its RECORD lists it",
                f"changed files {shown(changed)}" if changed else "other files",
            )


def only_pinned(_: bool, facts: Facts) -> Iterator[Failed]:
    pins = facts["pins"]
    for name in _dependencies(facts):
        if name not in pins:
            yield "only the packages in [dependencies.pinned]", shown(name)


def pinned(pins: Mapping[str, Sequence[str]], facts: Facts) -> Iterator[Failed]:
    found = _dependencies(facts)
    for name, digests in pins.items():
        package = found.get(name)
        digest = package.get("sha256") if isinstance(package, Mapping) else None
        if digest not in digests:
            yield f"{name} with {any_of(digests)}", shown(digest) if digest else NOTHING


def _dependencies(facts: Facts) -> dict[str, Any]:
    """By normalised name; no package at all and a name in two spellings are unfit."""
    stated = claim(facts, "dependencies", Mapping)
    if not stated:
        raise ClaimError("no package at all")
    found: dict[str, Any] = {canonicalize_name(name): package for name, package in stated.items()}
    if len(found) != len(stated):
        raise ClaimError("one package under two spellings of its name")
    return found


def forbidden(patterns: Sequence[str], facts: Facts) -> Iterator[Failed]:
    for name in claim(facts, "environment", Mapping):
        if any(matches(name, pattern) for pattern in patterns):
            yield f"no variable like {any_of(patterns)}", shown(name)


def only(values: Mapping[str, Sequence[str]], facts: Facts) -> Iterator[Failed]:
    for name, digest in claim(facts, "environment", Mapping).items():
        if digest not in values.get(name, ()):
            yield "only the variables of [environment.only] with their values", shown(name)


def untraced(_: bool, facts: Facts) -> Iterator[Failed]:
    if claim(facts, "process.traced", bool):
        yield "a process without debugger or tracer", "one that is traced"


def compiled(_: bool, facts: Facts) -> Iterator[Failed]:
    for module in claim(facts, "process.compiled_otherwise", list):
        yield "modules that are compiled from their sources", shown(module)


def loaded(path: str) -> Check:
    """Files by path: each must have an allowed digest, wherever it is."""

    def failures(allowed: Sequence[str], facts: Facts) -> Iterator[Failed]:
        for name, digest in claim(facts, path, Mapping).items():
            if digest not in allowed:
                yield any_of(allowed), f"{shown(digest)} ({shown(name)})"

    return failures


def hooks(allowed: Sequence[str], facts: Facts) -> Iterator[Failed]:
    for found in claim(facts, "process.import_hooks", list):
        if found not in allowed:
            yield any_of(allowed), shown(found)


def no_core_dumps(_: bool, facts: Facts) -> Iterator[Failed]:
    if not claim(facts, "host.core_dumps.off", bool):
        yield "core dumps turned off", "core dumps that can be written"


def no_swap(_: bool, facts: Facts) -> Iterator[Failed]:
    if claim(facts, "host.memory.locked") != "all" and claim(facts, "host.swap", list):
        yield "all memory locked, or no swap", f"locked {shown(facts['host']['memory']['locked'])}, and swap"


def recipients(allowed: Sequence[str], facts: Facts) -> Iterator[Failed]:
    found = claim(facts, "job.recipients", list)
    if not found:
        yield any_of(allowed), "no recipient"
    for one in found:
        if one not in allowed:
            yield any_of(allowed), shown(one)


def _data(facts: Facts) -> list[Facts]:
    """The sealed files of a job."""
    files = claim(facts, "job.data", list)
    if not all(isinstance(file, Mapping) for file in files):
        raise ClaimError("an entry that is not an object")
    roles = [shown(file.get("role")) for file in files]
    if shown("data") not in roles:
        raise ClaimError("no training data among the job's files")
    if len(set(roles)) != len(roles):
        raise ClaimError("two files for one purpose")
    return files  # type: ignore[no-any-return]


def sealed(allowed: Sequence[str], facts: Facts) -> Iterator[Failed]:
    for file in _data(facts):
        if (found := file.get("sha256")) not in allowed:
            yield any_of(allowed), f"{shown(found) if found else NOTHING} ({shown(file.get('role'))})"


def rows(least: int, facts: Facts) -> Iterator[Failed]:
    found = [claim(file, "rows", int) for file in _data(facts) if file.get("role") == "data"]
    if min(found) < 0 or sum(found) < least:
        yield f"at least {least:,} rows", f"{shown(sum(found))} rows"


def steps(most: int, facts: Facts) -> Iterator[Failed]:
    options = claim(facts, "job.options", Mapping)
    found = options.get("max_steps")
    if found is None:
        yield f"at most {most:,} steps", "no bound on them: set max_steps in the job"
    elif (steps := claim(options, "max_steps", int)) < 1 or steps > most:
        yield f"at most {most:,} steps", shown(steps)


def options(bounds: Mapping[str, Mapping[str, Any]], facts: Facts) -> Iterator[Failed]:
    stated = claim(facts, "job.options", Mapping)
    for name, bound in bounds.items():
        said = f"{name} {' and '.join(f'{key} {shown(value)}' for key, value in bound.items())}"
        if name not in stated:
            yield said, f"{NOTHING}: the evidence does not state {name}"
        elif not _within(stated[name], bound):
            yield said, shown(stated[name])


def _within(value: Any, bound: Mapping[str, Any]) -> bool:
    if "allow" in bound and not any(
        value == one and isinstance(value, bool) == isinstance(one, bool) for one in bound["allow"]
    ):
        return False
    if not {"min", "max"} & set(bound):
        return True
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and bound.get("min", -math.inf) <= value <= bound.get("max", math.inf)
