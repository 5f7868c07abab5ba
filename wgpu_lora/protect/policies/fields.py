"""The kinds of values in a policy: how each is read from TOML, and how it is shown."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from pyrage import RecipientError

from wgpu_lora.bounded import printable
from wgpu_lora.protect.sealed.streams import parse_recipient

MOST = 10_000  # items of a list or a table
DIGEST = re.compile(r"[0-9a-f]{64}")
PEM = re.compile(r"\s*-----BEGIN PUBLIC KEY-----[A-Za-z0-9+/=\s]{40,8000}-----END PUBLIC KEY-----\s*")
BOUNDS = ("min", "max", "allow")
LONGEST = 80  # characters of a value in a message


class WrongValue(ValueError):
    """A value is not of its kind; the message says what it must be."""


@dataclass(frozen=True)
class Field:
    """A kind of value. read: from TOML, raises WrongValue. show: what a rule with this value expects."""

    read: Callable[[Any], Any]
    show: Callable[[Any], str]


def shown(value: Any) -> str:
    """A value of a claim or a policy for a message, short and printable."""
    try:
        text = str(value) if isinstance(value, int | float) else repr(value)
    except ValueError:  # Python refuses to print very large integers
        text = "an integer of thousands of digits"
    text = printable(text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def matches(text: str, pattern: str) -> bool:
    """Whether a text matches a pattern with `*`, `?` and `[...]`, of which only printable ASCII is matched.

    All other characters must be in the pattern itself, so that look-alikes in other scripts match no wildcard.
    """
    return fnmatchcase(text, pattern) and all((" " <= c <= "~") or c in pattern for c in text)


def within(version: str, specifier: SpecifierSet) -> bool:
    """Whether a version satisfies a PEP 440 specifier; one that is no such version does not."""
    try:
        return specifier.contains(Version(version), prereleases=True)
    except ValueError:  # InvalidVersion, or Python refuses to read a number of thousands of digits
        return False


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value.strip() or len(value) > 10_000:
        raise WrongValue("must be text that is not empty")
    return value


def _list(one: Callable[[Any], Any], what: str, least: int = 1) -> Callable[[Any], tuple[Any, ...]]:
    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list) or not least <= len(value) <= MOST:
            raise WrongValue(f"must be a list of {what}{', with at least one' if least else ''}")
        return tuple(map(one, value))

    return read


def _matching(pattern: re.Pattern[str], what: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise WrongValue(f"has {shown(value)}, but must be {what}")
        return value

    return read


_digest = _matching(DIGEST, "the 64 lower-case hexadecimal digits of a SHA-256")


def _recipient(value: Any) -> str:
    try:
        parse_recipient(value)
    except (RecipientError, TypeError):
        raise WrongValue(f"has {shown(value)}, but must be an age recipient (age1...)") from None
    return str(value)


def _specifier(value: Any) -> SpecifierSet:
    try:
        return SpecifierSet(_text(value))
    except InvalidSpecifier:
        raise WrongValue("must be a version specifier such as '>=1.2,<2' (PEP 440)") from None


def whole(value: Any, least: int = 0) -> int:
    if type(value) is not int or value < least:
        raise WrongValue(f"must be a whole number of at least {least}")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise WrongValue("must be a finite number")
    return value  # type: ignore[no-any-return]


def seconds(least: float, most: float) -> Field:
    def read(value: Any) -> float:
        if not least <= _number(value) <= most:
            raise WrongValue(f"must be between {least:g} and {most:,g} seconds")
        return float(value)

    return Field(read, lambda value: f"at most {value:g} s")


def _table(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict) or len(value) > MOST:
        raise WrongValue("must be a table")
    return value


def _digests_by(name: Callable[[str], str]) -> Callable[[Any], dict[str, tuple[str, ...]]]:
    def read(value: Any) -> dict[str, tuple[str, ...]]:
        made: dict[str, tuple[str, ...]] = {}
        for key, item in _table(value).items():
            if name(key) in made:
                raise WrongValue(f"has {shown(key)} twice")
            made[name(key)] = _list(_digest, "digests")(item if isinstance(item, list) else [item])
        return made

    return read


def _pcrs(value: Any) -> dict[int, str]:
    for key in _table(value):
        if not re.fullmatch(r"\d|1\d|2[0-3]", key):
            raise WrongValue(f"has {shown(key)}, but PCRs are numbered from 0 to 23")
    return {int(key): _digest(item) for key, item in value.items()}


def _bounds(value: Any) -> dict[str, dict[str, Any]]:
    """Bounds by option: a value, or a table with `min`, `max` or `allow`."""
    made = {}
    for name, given in _table(value).items():
        bound = given if isinstance(given, dict) else {"allow": [given]}
        if not bound or not set(bound) <= set(BOUNDS):
            raise WrongValue(f"has {shown(name)}, whose bound must be a value, or a table with min, max or allow")
        for key in {"min", "max"} & set(bound):
            _number(bound[key])
        allowed = bound.get("allow", [True])
        if not (isinstance(allowed, list) and allowed):
            raise WrongValue(f"has {shown(name)}, whose 'allow' must be a list with at least one value")
        if not all(isinstance(one, str | bool | int | float) for one in allowed):
            raise WrongValue(f"has {shown(name)}, whose 'allow' must hold texts, numbers, true or false")
        made[name] = dict(bound)
    return made


def _true(value: Any) -> bool:
    if value is not True:
        raise WrongValue("must be true, or left out")
    return True


def _one_of(*allowed: str) -> Callable[[Any], str]:
    def read(value: Any) -> str:
        if value not in allowed:
            raise WrongValue(f"must be {' or '.join(map(repr, allowed))}, not {shown(value)}")
        return str(value)

    return read


def any_of(values: Any) -> str:
    """`'a'`, or `one of 'a', 'b' and 3 more`."""
    texts = [shown(value) for value in values]
    if len(texts) < 2:
        return texts[0] if texts else "none"
    return f"one of {', '.join(texts[:4])}" + (f" and {len(texts) - 4} more" if len(texts) > 4 else "")


TEXT = Field(_text, shown)
TEXTS = Field(_list(_text, "texts"), any_of)
GLOBS = Field(_list(_text, "names, in which * and ? stand for any characters"), any_of)
DIGESTS = Field(_list(_digest, "SHA-256 digests"), any_of)
ONLY_DIGESTS = Field(_list(_digest, "SHA-256 digests", least=0), any_of)  # an empty list allows nothing
ONLY_TEXTS = Field(_list(_text, "texts", least=0), any_of)
RECIPIENTS = Field(_list(_recipient, "age recipients"), any_of)
PEMS = Field(
    _list(_matching(PEM, "a public key in PEM"), "public keys in PEM"), lambda keys: f"one of {len(keys)} keys"
)
SPECIFIER = Field(_specifier, lambda value: f"a version {value}")
COUNT = Field(lambda value: whole(value, 1), lambda value: f"at least {value:,}")
LIMIT = Field(lambda value: whole(value, 1), lambda value: f"at most {value:,}")
LEVEL = Field(_one_of("self-reported", "quoted"), shown)
TRUE = Field(_true, lambda value: "true")
PINS = Field(_digests_by(canonicalize_name), lambda value: f"the pinned digests of {len(value)} packages")
VALUES = Field(_digests_by(str), lambda value: f"only {any_of(value)}" if value else "none")
PCRS = Field(_pcrs, lambda value: f"the values of {len(value)} PCRs")
OPTIONS = Field(_bounds, lambda value: f"options within the bounds of {any_of(value)}")
