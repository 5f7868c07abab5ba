"""How long a text a format makes, before it is made: of `'...'.format()` and of `'...' % ...`.

Both are read as Python reads them. What published templates have no use for is refused: widths that are computed, and
specifications that are not plain ASCII (Python takes the digits of every script for widths).
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
    """A format asks for what templates have no use for; the text says what."""


def fields_of(text: str) -> Iterator[int]:
    """Of each field of a text for `str.format`: how many characters it adds.

    Raises:
        FormatError: a field looks into its value, or a specification is too long, not ASCII, or computed.
        ValueError: Python does not take it either.
    """
    for _, name, spec, _ in Formatter().parse(text):
        if name is not None:
            if "." in name or "[" in name:
                raise FormatError("it formats with a field that looks into its value")
            yield _width(spec or "")


def conversions_of(text: str) -> Iterator[int]:
    """Of each conversion of a text for `%`: how many characters it adds; FormatError as with `fields_of`."""
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
    """Where a conversion goes on behind its key in brackets, which may hold brackets."""
    if text[at : at + 1] != "(":
        return at
    depth = 0
    for end in range(at, len(text)):
        depth += {"(": 1, ")": -1}.get(text[end], 0)
        if depth == 0:
            return end + 1
    raise FormatError("it formats with a key that does not end")


def _width(spec: str) -> int:
    if "{" in spec or "*" in spec:
        raise FormatError("it formats with a width that is computed")
    if len(spec) > MAX_SPEC or not spec.isascii():
        raise FormatError("it formats with a specification that is too long, or not ASCII")
    runs = _DIGITS.findall(spec)
    if any(len(run) > MAX_DIGITS for run in runs):
        raise FormatError("it formats with a width that is too large")
    return _NUMBER + sum(map(int, runs))
