"""The kinds of values in a policy: how each is read from TOML, and how it is shown."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version
from pyrage import RecipientError

from wgpu_lora.bounded import escape_unprintable
from wgpu_lora.protect.sealed.age_streams import parse_recipient
from wgpu_lora.typed_json import Check, Positive, Text, typed

MOST = 10_000  # items of a list or a table
DIGEST = re.compile(r"[0-9a-f]{64}")
PEM = re.compile(r"\s*-----BEGIN PUBLIC KEY-----[A-Za-z0-9+/=\s]{40,8000}-----END PUBLIC KEY-----\s*")
LONGEST = 80  # characters of a value in a message


class WrongValue(ValueError):
    """A value is not of its kind; the message says what it must be."""


@dataclass(frozen=True)
class Field:
    """A kind of value: its type in TOML. show: what a rule with this value expects. made: of the value, once read."""

    kind: Any
    show: Callable[[Any], str]
    made: Callable[[Any], Any] = lambda value: value

    def read(self, value: Any, name: str = "what is stated") -> Any:
        """The value from TOML. Raises WrongValue, which calls it `name`."""
        try:
            return self.made(typed(self.kind, value, name, unknown="refuse"))
        except ValueError as error:
            raise WrongValue(str(error)) from None


@dataclass(frozen=True)
class Bound:
    """The bound of an option."""

    min: int | float | None = None
    max: int | float | None = None
    allow: Annotated[tuple[str | bool | int | float, ...], Check(len, "a list with at least one value")] | None = None


def shown(value: Any) -> str:
    """A value of a claim or a policy for a message, short and printable."""
    try:
        text = str(value) if isinstance(value, int | float) else repr(value)
    except ValueError:  # Python refuses to print very large integers
        text = "an integer of thousands of digits"
    text = escape_unprintable(text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def matches(text: str, pattern: str) -> bool:
    """Whether a text matches a pattern with `*`, `?` and `[...]`, of which only printable ASCII is matched.

    All other characters must be in the pattern itself, so that look-alikes in other scripts match no wildcard.
    """
    return fnmatchcase(text, pattern) and all((" " <= c <= "~") or c in pattern for c in text)


def within(version: str, specifier: str) -> bool:
    """Whether a version satisfies a PEP 440 specifier; one that is no such version does not."""
    try:
        return SpecifierSet(specifier).contains(Version(version), prereleases=True)
    except ValueError:  # InvalidVersion, or Python refuses to read a number of thousands of digits
        return False


def _list(one: Any, what: str, least: int = 1) -> Any:
    wanted = f"a list of {what}{', with at least one' if least else ''}"
    return Annotated[tuple[one, ...], Check(lambda value: least <= len(value) <= MOST, wanted)]


def _table(one: Any) -> Any:
    return Annotated[dict[str, one], Check(lambda value: len(value) <= MOST, f"a table of at most {MOST:,} keys")]


def _is_recipient(value: str) -> bool:
    try:
        parse_recipient(value)
    except (RecipientError, TypeError):
        return False
    return True


def _is_specifier(value: str) -> bool:
    try:
        SpecifierSet(value)
    except InvalidSpecifier:
        return False
    return True


def seconds(least: float, most: float) -> Field:
    fits = Check(lambda value: least <= value <= most, f"between {least:g} and {most:,g} seconds")
    return Field(Annotated[float, fits], lambda value: f"at most {value:g} s")


def _by_package(value: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """Digests by normalised name."""
    made: dict[str, tuple[str, ...]] = {
        canonicalize_name(name): digests for name, digests in _digests_by(value).items()
    }
    if len(made) < len(value):
        names = [canonicalize_name(name) for name in value]
        raise WrongValue(f"has {shown(next(name for name in names if names.count(name) > 1))} twice")
    return made


def _digests_by(value: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    return {name: (digests,) if isinstance(digests, str) else digests for name, digests in value.items()}


def any_of(values: Any) -> str:
    """`'a'`, or `one of 'a', 'b' and 3 more`."""
    texts = [shown(value) for value in values]
    if len(texts) < 2:
        return texts[0] if texts else "none"
    return f"one of {', '.join(texts[:4])}" + (f" and {len(texts) - 4} more" if len(texts) > 4 else "")


_Short = Annotated[Text, Check(lambda value: len(value) <= MOST, f"at most {MOST:,} characters long")]
_Digest = Annotated[str, Check(DIGEST.fullmatch, "the 64 lower-case hexadecimal digits of a SHA-256")]
_Pem = Annotated[str, Check(PEM.fullmatch, "a public key in PEM")]
_Recipient = Annotated[str, Check(_is_recipient, "an age recipient (age1...)")]
_Digests = _list(_Digest, "SHA-256 digests")
_Pcr = Annotated[str, Check(re.compile(r"\d|1\d|2[0-3]").fullmatch, "the number of a PCR, from 0 to 23")]
_Bound = Annotated[Bound, Check(lambda bound: bound != Bound(), "a value, or a table with min, max or allow")]

TEXT = Field(_Short, shown)
TEXTS = Field(_list(_Short, "texts"), any_of)
GLOBS = Field(_list(_Short, "names, in which * and ? stand for any characters"), any_of)
DIGESTS = Field(_Digests, any_of)
ONLY_DIGESTS = Field(_list(_Digest, "SHA-256 digests", least=0), any_of)  # an empty list allows nothing
ONLY_TEXTS = Field(_list(_Short, "texts", least=0), any_of)
RECIPIENTS = Field(_list(_Recipient, "age recipients"), any_of)
PEMS = Field(_list(_Pem, "public keys in PEM"), lambda keys: f"one of {len(keys)} keys")
SPECIFIER = Field(
    Annotated[_Short, Check(_is_specifier, "a version specifier such as '>=1.2,<2' (PEP 440)")],
    lambda value: f"a version {value}",
)
COUNT = Field(Positive, lambda value: f"at least {value:,}")
LIMIT = Field(Positive, lambda value: f"at most {value:,}")
LEVEL = Field(Literal["self-reported", "quoted"], shown)
TRUE = Field(Annotated[bool, Check(bool, "true, or left out")], lambda value: "true")
PINS = Field(_table(_Digest | _Digests), lambda value: f"the pinned digests of {len(value)} packages", _by_package)
VALUES = Field(_table(_Digest | _Digests), lambda value: f"only {any_of(value)}" if value else "none", _digests_by)
PCRS = Field(
    dict[_Pcr, _Digest],
    lambda value: f"the values of {len(value)} PCRs",
    lambda value: {int(number): digest for number, digest in value.items()},
)
OPTIONS = Field(
    _table(_Bound | str | bool | int | float),
    lambda value: f"options within the bounds of {any_of(value)}",
    lambda value: {
        name: {key: item for key, item in asdict(bound).items() if item is not None}
        if isinstance(bound, Bound)
        else {"allow": [bound]}
        for name, bound in value.items()
    },
)
