"""Checks of claims against the values of a policy: each yields its failures, as (expected, found).

A check whose claim is missing or has the wrong type raises `ClaimError`, which is a failure: nothing passes because it
is not stated.
"""

from __future__ import annotations

import glob
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from fnmatch import fnmatchcase
from typing import Any

from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from wgpu_lora.files.typed_json import SHA256
from wgpu_lora.names.text import escape_unprintable

MOST = 10_000  # items of a list or a table, and characters of a text
MOST_FAILURES = 20  # of a rule: claims of ten thousand wrong variables need no line for each
LONGEST = 80  # characters of a value in a message
NOTHING = "nothing"
Mismatch = tuple[str, str]  # what was expected, and what was found
Facts = Mapping[str, Any]  # the claims, and beside them `quote`, the verified one or None, and `pins`


class ClaimError(Exception):
    """A claim is missing or has the wrong type; the message says what was found."""


@dataclass(frozen=True)
class ClaimCheck:
    """A check of claims.

    Attributes:
        failures: from the value in the policy and the facts.
        path, accepting: of a claim, and what makes the value of a policy that accepts it; None if nothing does.
    """

    failures: Callable[[Any, Facts], Iterator[Mismatch]]
    path: str = ""
    accepting: Callable[[Any], Any] | None = None

    def reference(self, claims: Facts) -> Any:
        """The value of a policy that accepts these claims; None if they do not state it."""
        value = claim_or_none(claims, self.path) if self.path else claims
        return None if value is None or self.accepting is None else self.accepting(value)


def failures_of(check: Callable[[Facts], Iterator[Mismatch]], facts: Facts, expected: str) -> Iterator[Mismatch]:
    """A check's failures, at most `MOST_FAILURES`; a claim that it cannot use is one."""
    try:
        for number, mismatch in enumerate(check(facts)):
            if number == MOST_FAILURES:
                yield mismatch[0], "more like these"
                return
            yield mismatch
    except ClaimError as error:
        yield expected, str(error)


def claim(facts: Facts, path: str, kind: type | tuple[type, ...] = str) -> Any:
    """The claim at a path such as `device.name`. Raises ClaimError unless it is there and has the type."""
    value = claim_or_none(facts, path)
    if value is None:
        raise ClaimError(f"{NOTHING}: the evidence does not state {path}")
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ClaimError(f"{value_text(value)}, which is of the wrong type")
    if isinstance(value, float) and not math.isfinite(value):
        raise ClaimError(f"{value}, which is not a finite number")
    if isinstance(value, Mapping | list | str) and len(value) > MOST:  # more would only take the verifier's time
        raise ClaimError(f"more than {MOST:,} {'characters' if isinstance(value, str) else 'entries'}")
    return value


def claim_or_none(facts: Facts, path: str) -> Any:
    """The claim at a path, of any type."""
    value: Any = facts
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


# -- values in messages ------------------------------------------------------------------------------------------------


def value_text(value: Any) -> str:
    """A value of a claim or a policy for a message, short and printable."""
    try:
        text = str(value) if isinstance(value, int | float) else repr(value)
    except ValueError:  # Python refuses to print very large integers
        text = "an integer of thousands of digits"
    text = escape_unprintable(text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def any_of(values: Iterable[Any]) -> str:
    """`'a'`, or `one of 'a', 'b' and 3 more`."""
    texts = [value_text(value) for value in values]
    if len(texts) < 2:
        return texts[0] if texts else "none"
    return f"one of {', '.join(texts[:4])}" + (f" and {len(texts) - 4} more" if len(texts) > 4 else "")


# -- checks ------------------------------------------------------------------------------------------------------------


def listed(
    path: str,
    fits: Callable[[str, str], bool] = operator.eq,
    pattern: Callable[[str], str] = lambda text: text,
) -> ClaimCheck:
    """A text that is, or by `fits` is like, one of a list; `pattern` makes the one that fits a text."""

    def failures(allowlist: Sequence[str], facts: Facts) -> Iterator[Mismatch]:
        value = claim(facts, path)
        if not any(fits(value, item) for item in allowlist):
            yield any_of(allowlist), value_text(value)

    return ClaimCheck(failures, path, lambda value: [pattern(value) if isinstance(value, str) else value])


def like(path: str) -> ClaimCheck:
    """A text that matches a pattern."""
    return listed(path, matches, glob.escape)


def matches(text: str, pattern: str) -> bool:
    """Whether a text matches a pattern with `*`, `?` and `[...]`, of which only printable ASCII is matched.

    All other characters must be in the pattern itself, so that look-alikes in other scripts match no wildcard.
    """
    return fnmatchcase(text, pattern) and all((" " <= c <= "~") or c in pattern for c in text)


def version(path: str) -> ClaimCheck:
    """A version within a PEP 440 specifier; one that is no such version is not."""

    def failures(specifier: str, facts: Facts) -> Iterator[Mismatch]:
        value = claim(facts, path)
        try:
            fits = SpecifierSet(specifier).contains(Version(value), prereleases=True)
        except ValueError:  # InvalidVersion, or Python refuses to read a number of thousands of digits
            fits = False
        if not fits:
            yield f"a version {specifier}", value_text(value)

    return ClaimCheck(failures, path, lambda value: f"=={value}")


def true(failures: Callable[[Any, Facts], Iterator[Mismatch]]) -> ClaimCheck:
    """A check that a policy can only ask for."""
    return ClaimCheck(failures, accepting=lambda claims: True)


def states(path: str, expected: bool) -> ClaimCheck:
    """A claim that is true, or false."""

    def failures(_: bool, facts: Facts) -> Iterator[Mismatch]:
        if claim(facts, path, bool) is not expected:
            yield f"{path} = {str(expected).lower()}", str(not expected).lower()

    return true(failures)


def all_items(path: str, kind: type) -> ClaimCheck:
    """All items of a list, or all values of an object, which are allowed ones."""

    def failures(allowlist: Sequence[str], facts: Facts) -> Iterator[Mismatch]:
        items = claim(facts, path, kind)
        for item in items:
            value, where = (items[item], f" ({value_text(item)})") if kind is dict else (item, "")
            if value not in allowlist:
                yield any_of(allowlist), f"{value_text(value)}{where}"

    return ClaimCheck(failures, path, lambda value: digests(value.values()) if isinstance(value, Mapping) else value)


def digests(values: Iterable[Any]) -> list[str]:
    """Those of some values that are SHA-256 digests, in order."""
    return sorted({value for value in values if isinstance(value, str) and SHA256.fullmatch(value)})


def level(level: str, facts: Facts) -> Iterator[Mismatch]:
    claimed_level = claim(facts, "level")
    if level == "quoted" and not (claimed_level == level and facts["quote"]):
        yield "quoted by a TPM", "no quote beside the claims" if claimed_level == level else value_text(claimed_level)
    if claimed_level not in ("self-reported", "quoted"):
        yield "'self-reported' or 'quoted'", value_text(claimed_level)


def tpm_keys(keys: Sequence[str], facts: Facts) -> Iterator[Mismatch]:
    if _der(pem := claim(facts, "quote.key_pem")) not in {_der(key) for key in keys} - {None}:
        yield f"one of the {len(keys)} keys of [attestation]", "another key" if _der(pem) else "no key"


def _der(pem: str) -> bytes | None:
    """A public key in its one form, since PEM may be folded differently."""
    try:
        return load_pem_public_key(pem.encode()).public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    except Exception:  # the library raises many kinds; whatever it is, this is no key
        return None


def pcrs(expected: Mapping[str, str], facts: Facts) -> Iterator[Mismatch]:
    quoted_pcrs = {str(number): value for number, value in claim(facts, "quote.pcrs", Mapping).items()}
    for number, value in expected.items():
        if quoted_pcrs.get(number) != value:
            yield f"PCR {number} = {value}", value_text(quoted_pcrs[number]) if number in quoted_pcrs else NOTHING


def dependencies(facts: Facts) -> dict[str, Mapping[str, Any]]:
    """What is claimed of each package, by its normalised name; none at all and a name in two spellings are errors."""
    packages = claim(facts, "dependencies", Mapping)
    by_name = {
        canonicalize_name(name): package if isinstance(package, Mapping) else {} for name, package in packages.items()
    }
    if not by_name or len(by_name) != len(packages):
        raise ClaimError("one package under two spellings of its name" if by_name else "no package at all")
    return {str(name): package for name, package in by_name.items()}


def intact(_: bool, facts: Facts) -> Iterator[Mismatch]:
    for name, package in dependencies(facts).items():
        if package.get("intact") is not True:
            yield f"{value_text(name)} as its RECORD lists it", f"changed files {value_text(package.get('changed'))}"


def only_pinned(_: bool, facts: Facts) -> Iterator[Mismatch]:
    for name in dependencies(facts):
        if name not in facts["pins"]:
            yield "only the packages in [dependencies.pinned]", value_text(name)


def pinned(pins: Mapping[str, Any], facts: Facts) -> Iterator[Mismatch]:
    packages = dependencies(facts)
    for name, pin in pins.items():
        digest = packages.get(canonicalize_name(name), {}).get("sha256")
        if digest not in as_tuple(pin):
            yield f"{name} with {any_of(as_tuple(pin))}", value_text(digest) if digest else NOTHING


def as_tuple(values: str | Sequence[str]) -> tuple[str, ...]:
    """One value or several, as several."""
    return (values,) if isinstance(values, str) else tuple(values)


def forbidden(patterns: Sequence[str], facts: Facts) -> Iterator[Mismatch]:
    for name in claim(facts, "environment", Mapping):
        if any(matches(name, pattern) for pattern in patterns):
            yield f"no variable like {any_of(patterns)}", value_text(name)


def only(values: Mapping[str, Any], facts: Facts) -> Iterator[Mismatch]:
    for name, digest in claim(facts, "environment", Mapping).items():
        if digest not in as_tuple(values.get(name, ())):
            yield "only the variables of [environment.only] with their values", value_text(name)


def compiled(_: bool, facts: Facts) -> Iterator[Mismatch]:
    for module in claim(facts, "process.compiled_otherwise", list):
        yield "modules that are compiled from their sources", value_text(module)


def no_swap(_: bool, facts: Facts) -> Iterator[Mismatch]:
    if (locked := claim(facts, "host.memory.locked")) != "all" and claim(facts, "host.swap", list):
        yield "all memory locked, or no swap", f"locked {value_text(locked)}, and swap"


def recipients(allowlist: Sequence[str], facts: Facts) -> Iterator[Mismatch]:
    if not claim(facts, "job.recipients", list):
        yield any_of(allowlist), "no recipient"
    yield from all_items("job.recipients", list).failures(allowlist, facts)


def _data(facts: Facts) -> list[Facts]:
    """The sealed files of a job."""
    files = claim(facts, "job.data", list)
    if not all(isinstance(file, Mapping) for file in files):
        raise ClaimError("an entry that is not an object")
    roles = [value_text(file.get("role")) for file in files]
    if value_text("data") not in roles:
        raise ClaimError("no training data among the job's files")
    if len(set(roles)) != len(roles):
        raise ClaimError("two files for one purpose")
    return files  # type: ignore[no-any-return]


def sealed(allowlist: Sequence[str], facts: Facts) -> Iterator[Mismatch]:
    for file in _data(facts):
        if (digest := file.get("sha256")) not in allowlist:
            yield any_of(allowlist), f"{value_text(digest) if digest else NOTHING} ({value_text(file.get('role'))})"


def rows(minimum: int, facts: Facts) -> Iterator[Mismatch]:
    (data,) = (file for file in _data(facts) if file.get("role") == "data")
    if (count := claim(data, "rows", int)) < minimum:
        yield f"at least {minimum:,} rows", f"{value_text(count)} rows"


def steps(maximum: int, facts: Facts) -> Iterator[Mismatch]:
    options = claim(facts, "job.options", Mapping)
    if options.get("max_steps") is None:
        yield f"at most {maximum:,} steps", "no bound on them: set max_steps in the job"
    elif not 0 < (max_steps := claim(options, "max_steps", int)) <= maximum:
        yield f"at most {maximum:,} steps", value_text(max_steps)


def options(bounds: Mapping[str, Any], facts: Facts) -> Iterator[Mismatch]:
    job_options = claim(facts, "job.options", Mapping)
    for name, value in bounds.items():
        bound = asdict(value) if is_dataclass(value) and not isinstance(value, type) else {"allow": [value]}
        bound = {key: limit for key, limit in bound.items() if limit is not None}
        expected = f"{name} {' and '.join(f'{key} {value_text(limit)}' for key, limit in bound.items())}"
        if name not in job_options:
            yield expected, f"{NOTHING}: the evidence does not state {name}"
        elif not _within(job_options[name], bound):
            yield expected, value_text(job_options[name])


def _within(value: Any, bound: Mapping[str, Any]) -> bool:
    values = bound.get("allow", [value])
    if not any(value == item and isinstance(value, bool) == isinstance(item, bool) for item in values):
        return False
    number = isinstance(value, int | float) and not isinstance(value, bool)
    minimum, maximum = bound.get("min"), bound.get("max")
    return (minimum is None or (number and value >= minimum)) and (maximum is None or (number and value <= maximum))
