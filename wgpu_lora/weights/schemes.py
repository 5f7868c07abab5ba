"""The names of low-bit base formats: `lut2`, `lut2-g16`, `int8-row`, and mixes by layer kind such as `q2a4`."""

from __future__ import annotations

import re
from dataclasses import dataclass

KINDS = {2: "lut2", 3: "lut3", 4: "lut4", 8: "int8"}  # by bits
GROUPS = (16, 32, 64)
DEFAULT_GROUP, ROW = 32, 0
ATTENTION = re.compile(r"(^|\.)(\w*attn|attention)(\.|$)")  # in the path of a module

_GROUP = r"(?:-(?:g(?P<group>16|32|64)|(?P<row>row)))?"
_SCHEME = re.compile(rf"(?P<kind>{'|'.join(KINDS.values())}){_GROUP}")
_MIX = re.compile(rf"q(?P<mlp>[2348])a(?P<attention>[2348]){_GROUP}")
PATTERN = rf"(?:{'|'.join(KINDS.values())}|q[2348]a[2348])(?:-(?:g16|g32|g64|row))?"  # of all names


@dataclass(frozen=True)
class Scheme:
    """Codes of 2, 3 or 4 bits with tables, or of 8 bits without. group: inputs that share a scale, or ROW."""

    bits: int
    group: int = DEFAULT_GROUP

    @property
    def name(self) -> str:
        return KINDS[self.bits] + suffix(self.group)

    @classmethod
    def of(cls, name: str) -> Scheme | None:
        """The scheme of this name, or None."""
        found = _SCHEME.fullmatch(name)
        bits = {kind: bits for bits, kind in KINDS.items()}
        return cls(bits[found["kind"]], _group(found)) if found else None


@dataclass(frozen=True)
class Mix:
    """A scheme for the matrices of attention, and another for all others, which are the MLP's."""

    mlp: Scheme
    attention: Scheme

    @property
    def name(self) -> str:
        return f"q{self.mlp.bits}a{self.attention.bits}{suffix(self.mlp.group)}"

    @classmethod
    def of(cls, name: str) -> Mix | None:
        """The mix of this name, or None."""
        found = _MIX.fullmatch(name)
        return cls(*(Scheme(int(found[kind]), _group(found)) for kind in ("mlp", "attention"))) if found else None

    def scheme(self, tensor: str) -> Scheme:
        """The scheme of a matrix, by its name in the checkpoint."""
        return self.attention if ATTENTION.search(tensor) else self.mlp


def suffix(group: int) -> str:
    """What a group adds to a name."""
    return "-row" if group == ROW else "" if group == DEFAULT_GROUP else f"-g{group}"


def _group(found: re.Match[str]) -> int:
    return ROW if found["row"] else int(found["group"] or DEFAULT_GROUP)


def format_of(name: str) -> Scheme | Mix:
    """The scheme or mix of this name. Raises ValueError if it is of none."""
    found = Scheme.of(name) or Mix.of(name)
    if found is None:
        raise ValueError(f"{name} is not a low-bit format")
    return found


def scheme_of(base_format: str, tensor: str) -> Scheme:
    """The scheme of a matrix in a low-bit format or mix of this name. Raises ValueError if the name is of none."""
    found = format_of(base_format)
    return found.scheme(tensor) if isinstance(found, Mix) else found
