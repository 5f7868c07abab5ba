"""Validation of tokenizers' regular expressions, so that matching cannot take exponential time.

The library matches by backtracking (Oniguruma). Patterns are parsed by a subset of Oniguruma's grammar, and anything
else is refused. Published tokenizers need alternatives, character classes, short look-arounds, and repeats of single
characters. Repeats of longer parts make backtracking exponential, so these parts must have a fixed length or few ways
to match; several repeats in a row cost a power of the text's length, which the child's time limit bounds.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_PATTERN = 4096  # characters; DeepSeek's longest has about 500
MAX_DEPTH = 12
MAX_REPEATS = 3  # unbounded repeats in a row; published patterns have two
MAX_WAYS = 256  # ways to match `?`, {m,n} and alternatives; published patterns have up to 40
MAX_COUNT, MAX_RANGE = 256, 16  # n, and n - m, in {m,n}; a larger range counts as unbounded
MAX_WIDTH = 1024  # total characters of all fixed repeats

_PROPERTY = re.compile(r"[pP]\{\^?[A-Za-z_ ]{1,40}\}")
_CODE = re.compile(r"u[0-9A-Fa-f]{4}|x[0-9A-Fa-f]{2}|x\{[0-9A-Fa-f]{1,6}\}")
_INTERVAL = re.compile(r"\{(\d{1,3})(,(\d{1,3})?)?\}")
_NAMED = re.compile(r"\[:\^?(?:alnum|alpha|blank|cntrl|digit|graph|lower|print|punct|space|upper|xdigit|word):\]")
# Nested repeats of two disjoint sets of characters, as in `(?:'\p{L}+)*`, match any text in one way only, like repeats
# of single characters. Ignoring case, some letters and marks are the same.
_UNLIKE = r"(\\p\{[LMN]\}|['_,\u2019-]|\\[-'_,.])"
_PAIRS = re.compile(rf"\((?:\?:)?{_UNLIKE}(?!\1){_UNLIKE}([*+])\)([*+])(?![*+?{{])")
_CASELESS = re.compile(r"\(\?[a-z]*i")
_GROUPS = re.compile(r"\?(?:[imx]{0,3}:|=|!|<=|<!|>)|(?!\?)")
_FLAGS = re.compile(r"\?[im]{1,2}\)")
_CLASSES, _CONTROLS, _ANCHORS = "sSdDwW", "rntfv", "bBAzZ"


class PatternError(ValueError):
    """A pattern is not accepted; the text says why."""


@dataclass(frozen=True)
class Shape:
    """How a part of a pattern may match.

    least: characters of the shortest match. most: of the longest, None if unbounded.
    repeats: unbounded repeats in a row. ways: number of ways in which the bounded parts may match.
    """

    least: int = 0
    most: int | None = 0
    repeats: int = 0
    ways: int = 1


_CHARACTER = Shape(1, 1)


def shape_of(pattern: str) -> Shape:
    """The shape of a whole pattern. Raises PatternError."""
    if len(pattern) > MAX_PATTERN:
        raise PatternError(f"it has more than {MAX_PATTERN:,} characters")
    reader = _Reader(pattern)
    shape = reader.alternatives(0)
    if reader.at != len(pattern):
        raise PatternError("a bracket closes that was not opened")
    return shape


class _Reader:
    def __init__(self, pattern: str) -> None:
        self.text, self.at = pattern, 0

    def peek(self) -> str:
        return self.text[self.at : self.at + 1]

    def take(self, expression: re.Pattern[str]) -> str | None:
        found = expression.match(self.text, self.at)
        if found is None:
            return None
        self.at = found.end()
        return found[0]

    def alternatives(self, depth: int) -> Shape:
        if depth > MAX_DEPTH:
            raise PatternError("its brackets are nested too deeply")
        found = [self.sequence(depth)]
        while self.peek() == "|":
            self.at += 1
            found.append(self.sequence(depth))
        if len(found) == 1:
            return found[0]
        longest = [shape.most for shape in found]
        return Shape(
            min(shape.least for shape in found),
            None if None in longest else max(most for most in longest if most is not None),
            max(shape.repeats for shape in found),
            sum(shape.ways for shape in found),
        )

    def sequence(self, depth: int) -> Shape:
        whole = Shape()
        while (sign := self.peek()) and sign not in "|)":
            part = self.repeated(self.atom(depth), outermost=depth == 0)
            most = None if whole.most is None or part.most is None else whole.most + part.most
            whole = Shape(whole.least + part.least, most, whole.repeats + part.repeats, whole.ways * part.ways)
            if whole.repeats > MAX_REPEATS or whole.ways > MAX_WAYS:
                raise PatternError("there are too many ways in which it may match")
            if (whole.most or whole.least) > MAX_WIDTH:
                raise PatternError("its repeats are too long")
        return whole

    def atom(self, depth: int) -> Shape:
        sign = self.text[self.at]
        self.at += 1
        if sign == "(":
            return self.pairs() or self.group(depth)
        if sign == "[":
            self.character_class(depth)
            return _CHARACTER
        if sign == "\\":
            return self.escape()
        if sign in "^$":
            return Shape()
        if sign in "*+?{":
            raise PatternError(f"a {sign!r} has no meaning at its place, or differs between libraries")
        return _CHARACTER

    def pairs(self) -> Shape | None:
        found = _PAIRS.match(self.text, self.at - 1)
        if not found or _CASELESS.search(self.text) or found[1][-1] == found[2][-1] != "}":
            return None
        self.at = found.end()
        return Shape((found[4] == "+") * (1 + (found[3] == "+")), None, 1)

    def group(self, depth: int) -> Shape:
        if self.take(_FLAGS):
            return self.alternatives(depth + 1)  # flags apply up to the end of the enclosing group
        kind = self.take(_GROUPS)
        if kind is None or "x" in kind:
            raise PatternError("it has a kind of group that tokenizers have no use for")
        inner = self.alternatives(depth + 1)
        if self.peek() != ")":
            raise PatternError("a bracket is not closed")
        self.at += 1
        if kind in ("?=", "?!"):
            return Shape(0, 0, inner.repeats, inner.ways)
        if kind in ("?<=", "?<!"):
            if inner.most is None or inner.most > 16:
                raise PatternError("it looks back too far")
            return Shape(0, 0, inner.repeats, inner.ways)
        return inner

    def escape(self) -> Shape:
        sign = self.peek()
        if self.take(_PROPERTY) or self.take(_CODE):
            return _CHARACTER
        self.at += 1
        if sign and sign in _ANCHORS:
            return Shape()
        if not sign or (sign not in _CLASSES + _CONTROLS and (not sign.isascii() or sign.isalnum())):
            raise PatternError(f"it has an escape, \\{sign}, that tokenizers have no use for")
        return _CHARACTER

    def character_class(self, depth: int) -> None:
        """Read a class from after its opening bracket; classes may be nested and joined by `&&`."""
        if depth > MAX_DEPTH:
            raise PatternError("its brackets are nested too deeply")
        if self.peek() == "^":
            self.at += 1
        if self.peek() in ("]", ""):
            raise PatternError("it has an empty character class")
        while (sign := self.peek()) != "]":
            if not sign:
                raise PatternError("a bracket is not closed")
            if self.take(_NAMED):
                continue
            self.at += 1
            if sign == "[":
                if self.peek() == ":":
                    raise PatternError("it has a class with a name in colons, which differs between libraries")
                self.character_class(depth + 1)
            elif sign == "\\" and self.escape() != _CHARACTER:
                raise PatternError("it has an anchor in a character class")
        self.at += 1

    def repeated(self, part: Shape, outermost: bool) -> Shape:
        """Apply the repeat that follows a part, if any; it may be lazy or possessive."""
        sign = self.peek()
        if sign and sign in "*+?":
            self.at += 1
            least, most = {"*": (0, None), "+": (1, None), "?": (0, 1)}[sign]
            marks, comma = "?+", None
        elif found := self.take(_INTERVAL):
            first, comma, last = _INTERVAL.match(found).groups()  # type: ignore[union-attr]
            least = int(first)
            most = int(last) if last else None if comma else least
            marks = "?" if comma else ""  # `{n}?` and `{n}+` are repeats of a repeat to Oniguruma
        else:
            return part
        if least > MAX_COUNT or (most or 0) > MAX_COUNT or (most is not None and most < least):
            raise PatternError("it repeats something too often")
        if self.peek() and self.peek() in marks:
            self.at += 1
        elif outermost and comma and part == _CHARACTER and self.text[self.at : self.at + 2] in ("+", "+|"):
            self.at += 1  # as in GPT-4's: {1,3}+ with nothing after it that would cause backtracking
            most = None
        if self.peek() and self.peek() in "*+?{":
            raise PatternError("it repeats a repeat")
        endless = most is None or most - least > MAX_RANGE
        fixed = part.ways == 1 and part.most == part.least and part.least > 0
        if (endless and not fixed) or (most != 1 and part.repeats):
            raise PatternError("it repeats a part without a fixed length")
        if most is None or endless:
            return Shape(part.least * least, None, part.repeats + 1)
        longest = None if part.most is None else part.most * most
        ways = sum(part.ways**count for count in range(least, most + 1))
        return Shape(part.least * least, longest, part.repeats, ways)
