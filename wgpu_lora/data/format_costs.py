"""Upper bounds on the length of `'...'.format()` and `'...' % ...`, computed before formatting.

Format strings are parsed as Python does. Features that published templates do not use are refused: computed widths, and
specifications that are not ASCII (Python accepts digits of any script as widths).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from string import Formatter

MAX_SPEC = 16  # characters of a specification
MAX_DIGITS = 4  # of a width or a precision
_NUMBER = 350  # characters that a float may take without a width

_DIGITS = re.compile(r"[0-9]+")
_FLAGS = re.compile(r"[-+ #0]*")


class FormatError(ValueError):
    """A format string uses an unsupported feature; the text says which."""


def fields_of(text: str) -> Iterator[int]:
    """Yield the number of characters that each field of a `str.format` string may add, besides its value.

    Raises:
        FormatError: a field accesses an attribute or item, or a specification is too long, not ASCII, or computed.
        ValueError: the format string is invalid.
    """
    for _, name, spec, _ in Formatter().parse(text):
        if name is not None:
            if "." in name or "[" in name:
                raise FormatError("it formats with a field that accesses an attribute or item")
            yield _width(spec or "")


def conversions_of(text: str) -> Iterator[int]:
    """The same for each conversion of a `%` format string. Raises FormatError as `fields_of` does."""
    at = 0
    while (at := text.find("%", at) + 1) > 0:
        if text[at : at + 1] == "%":
            at += 1
            continue
        at = _behind_key(text, at)
        begin = at
        at = _FLAGS.match(text, at).end()  # type: ignore[union-attr]
        while text[at : at + 1] in tuple("0123456789.*hlL"):
            at += 1
        yield _width(text[begin:at])


def _behind_key(text: str, at: int) -> int:
    """The position after a conversion's key in brackets, which may be nested."""
    if text[at : at + 1] != "(":
        return at
    depth = 0
    for end in range(at, len(text)):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        if depth == 0:
            return end + 1
    raise FormatError("it formats with a key that is not closed")


def _width(spec: str) -> int:
    if "{" in spec or "*" in spec:
        raise FormatError("it formats with a computed width")
    if len(spec) > MAX_SPEC or not spec.isascii():
        raise FormatError("it formats with a specification that is too long, or not ASCII")
    runs = _DIGITS.findall(spec)
    if any(len(run) > MAX_DIGITS for run in runs):
        raise FormatError("it formats with a width that is too large")
    return _NUMBER + sum(map(int, runs))
