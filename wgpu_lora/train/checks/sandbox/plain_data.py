"""Plain Python data as typed JSON, read within limits.

Results of an answer are untrusted: an instance of a subclass is encoded as its built-in base with its actual contents,
and none of its code runs on this side.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

MAX_DEPTH = 32
MAX_VALUES = 10_000
MAX_LENGTH = 1 << 15  # of all strings, bytes and hexadecimal digits together
MAX_MEMBERS = 1000  # of a set or a dict, since hashes of all keys may collide
CONTAINERS: dict[str, type] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
VIEWS: tuple[type, ...] = (type({}.keys()), type({}.items()))
RATIOS = (("decimal", "Decimal"), ("fractions", "Fraction"))
RATIO_COST = 128  # characters that a number counts as, since Python code compares them


class NotPlainError(ValueError):
    """A value is not plain data, or too large."""


class Opaque:
    """Stands for an object that is not plain data: it is not None, and not equal to any plain data."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, name: str, true: bool):
        self._name, self._true = name, true

    def __repr__(self) -> str:
        return f"<{self._name} object>"

    def __bool__(self) -> bool:
        return self._true

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Opaque):
            raise TypeError(f"{self} and {other} are not plain data, so they cannot be compared")
        return False


def dump(value: Any) -> str:
    """Encode a value. Raises NotPlainError."""
    return json.dumps(_Writer().write(value, 0))


def load(text: str | bytes) -> Any:
    """Decode a value. Raises NotPlainError."""
    try:
        return _Reader().read(json.loads(text), 0)
    except NotPlainError:
        raise
    except RecursionError:
        raise NotPlainError(f"nested more than {MAX_DEPTH} deep") from None
    except (ValueError, TypeError, ArithmeticError, KeyError, AttributeError) as error:
        raise NotPlainError(f"data that are not plain ({type(error).__name__})") from None


class _Bounded:
    def __init__(self) -> None:
        self._remaining, self._room = MAX_VALUES, MAX_LENGTH

    def count(self, depth: int) -> None:
        self._remaining -= 1
        if self._remaining < 0:
            raise NotPlainError(f"more than {MAX_VALUES:,} values")
        if depth > MAX_DEPTH:
            raise NotPlainError(f"nested more than {MAX_DEPTH} deep")

    def measure(self, length: int) -> None:
        self._room -= length
        if self._room < 0:
            raise NotPlainError(f"more than {MAX_LENGTH:,} characters or digits")


class _Writer(_Bounded):
    def write(self, value: Any, depth: int) -> Any:
        self.count(depth)
        kind = type(value)
        if value is None or kind is bool:
            return value
        # The base's own methods, since a subclass may override them.
        if issubclass(kind, str):
            self.measure(str.__len__(value))
            return str.__str__(value)
        if issubclass(kind, int):
            self.measure(int.bit_length(value) // 4)
            return ["int", f"{int.__pos__(value):x}"]  # decimal digits are limited, and take quadratic time
        if issubclass(kind, float):
            return ["float", float.hex(value)]
        if issubclass(kind, complex):
            real, imaginary = complex.__pos__(value).real, complex.__pos__(value).imag
            return ["complex", real.hex(), imaginary.hex()]
        for octets in (bytes, bytearray):
            if issubclass(kind, octets):
                self.measure(octets.__len__(value))
                return ["bytes", octets.hex(value)]
        if kind is range:
            return ["range", self._all((value.start, value.stop, value.step), depth + 1)]
        if issubclass(kind, VIEWS):
            return ["set", self._all(value, depth + 1)]
        if issubclass(kind, dict):
            return ["dict", [self._all(pair, depth + 1) for pair in dict.items(value)]]
        for name, base in CONTAINERS.items():
            if issubclass(kind, base):
                return [name, self._all(base.__iter__(value), depth + 1)]  # type: ignore[attr-defined]
        for module, name in RATIOS:
            number = getattr(sys.modules.get(module), name, None)  # only if the answer imported it
            if isinstance(number, type) and issubclass(kind, number):
                return self._ratio(number, value)
        name = type.__dict__["__name__"].__get__(kind)
        self.measure(len(name))
        return ["object", name, bool(value)]

    def _ratio(self, base: Any, value: Any) -> list[str]:
        self.measure(RATIO_COST)
        if base.__name__ == "Decimal":
            if not base.is_finite(value):
                return ["float", float.hex(base.__float__(value))]
            self.measure(abs(base.adjusted(value)))
        numbers = base.as_integer_ratio(value)
        for number in numbers:
            self.measure(number.bit_length() // 4)
        return ["ratio", "/".join(f"{number:x}" for number in numbers)]

    def _all(self, values: Iterable[Any], depth: int) -> list[Any]:
        return [self.write(value, depth) for value in values]


class _Reader(_Bounded):
    def read(self, value: Any, depth: int) -> Any:
        self.count(depth)
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            self.measure(len(value))
            return value
        if not isinstance(value, list):
            raise NotPlainError(f"data that are not plain (a bare JSON {type(value).__name__})")
        kind, *parts = value
        if kind == "complex":
            real, imaginary = parts
            return complex(float.fromhex(real), float.fromhex(imaginary))
        if kind == "object":
            name, true = parts
            if not isinstance(name, str) or not isinstance(true, bool):
                raise NotPlainError("data that are not plain (an object without a name)")
            self.measure(len(name))
            return Opaque(name, true)
        (content,) = parts
        if isinstance(content, str):
            self.measure(len(content) // 2)  # bytes have two digits each
        if kind == "int":
            return int(content, 16)
        if kind == "ratio":
            from fractions import Fraction  # lazy: the child starts without it

            self.measure(RATIO_COST)
            numerator, denominator = content.split("/")
            return Fraction(int(numerator, 16), int(denominator, 16))
        if kind == "float":
            return float.fromhex(content)
        if kind == "bytes":
            return bytes.fromhex(content)
        if not isinstance(content, list):
            raise NotPlainError("data that are not plain (a container without contents)")
        if kind not in ("list", "tuple") and len(content) > MAX_MEMBERS:
            raise NotPlainError(f"a {kind} of more than {MAX_MEMBERS:,}")
        if kind == "range":
            span = range(*(self.read(end, depth + 1) for end in content))
            if len(span) > MAX_VALUES:  # a search may go through all of it
                raise NotPlainError(f"a range of more than {MAX_VALUES:,}")
            return span
        if kind == "dict":
            return {self.read(key, depth + 1): self.read(item, depth + 1) for key, item in content}
        return CONTAINERS[kind](self.read(item, depth + 1) for item in content)
