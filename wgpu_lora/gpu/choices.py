"""Which tiling a device was found to be fastest with, by kernel and size, kept on disk between runs."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock
from platformdirs import user_cache_dir

from wgpu_lora.assets import asset_dir
from wgpu_lora.gpu.kernel import Kernel, Tiles

if TYPE_CHECKING:
    from wgpu_lora.gpu.device import Device

SCHEMA = 2
REACH = 2  # octaves of a batch's rows over which a choice holds: up to four times as many, or as few
SIZES = ("m", "n", "k", "rows", "keys")
Choices = dict[str, Tiles]
# tiles: the choice. seconds: of each tiling that was timed, none where there was no time for it, or where the choice is
# that of the entry `like`. took: the seconds of all of that.
Entry = dict[str, Any]


def bucket(size: int) -> int:
    """The nearest power of two, by ratio: sizes of one bucket share a choice."""
    return 1 << round(math.log2(max(size, 1)))


def choice_key(kernel: Kernel, present: tuple[str, ...], constants: dict[str, Any]) -> str:
    """What calls that may share a tiling have in common: all that is compiled in, and the bucket of each dim."""
    dims = {name: bucket(constants[name]) for name in kernel.dims if name in SIZES}
    return json.dumps([kernel.name, present, sorted(kernel.compiled_in(constants).items()), dims])


def _parts(key: str) -> tuple[list[Any], dict[str, int], int]:
    """(what neighbours share, their rows, adapters of a batch) of a key. Raises ValueError, TypeError or KeyError.

    Neighbours multiply by matrices of one size, and differ in the batch's rows or in the adapters these belong to.
    """
    name, present, compiled, dims = json.loads(key)
    facts = dict(compiled)
    slots = facts.pop("slots", 1)
    rows = ("k",) if facts.get("form") == "tn" else ("m", "rows", "keys")
    size = {dim: value for dim, value in dims.items() if dim in rows}
    rest = {dim: value for dim, value in dims.items() if dim not in rows}
    return [name, present, sorted(facts.items()), rest], size, slots


def same_shader(one: str, other: str) -> bool:
    """Whether the calls of two keys compile to one shader, given one tiling."""
    return bool(json.loads(one)[:3] == json.loads(other)[:3])


def nearest(key: str, entries: Mapping[str, Entry]) -> str | None:
    """The key of the entry whose batch is most like this call's, of those whose choice holds here.

    One that was timed comes before one that there was no time for; what was taken over itself says nothing.
    """
    shared, size, slots = _parts(key)
    found: list[tuple[bool, int, bool, str]] = []
    for other, entry in entries.items():
        try:
            its, its_size, its_slots = _parts(other)
            octaves = max((abs(_octaves(value, its_size[dim])) for dim, value in size.items()), default=0)
        except (ValueError, TypeError, KeyError):  # a damaged file
            continue
        if its == shared and octaves <= REACH and "like" not in entry:
            found.append((not entry.get("seconds"), octaves, its_slots != slots, other))
    return min(found)[-1] if found else None


def _octaves(one: int, other: int) -> int:
    return one.bit_length() - other.bit_length()


def shader_digest(kernel: Kernel) -> str:
    """Changes whenever the kernel's text may."""
    root = Path(str(asset_dir("shaders")))
    sha = hashlib.sha256()
    for path in (root / kernel.file, *sorted((root / "lib").iterdir())):
        sha.update(path.read_bytes())
    return sha.hexdigest()[:16]


def _is_entry(entry: Any) -> bool:
    """Whether it may be one. Raises KeyError, TypeError or AttributeError where it is none."""
    timed, took = entry.get("seconds", []), entry.get("took", 0.0)
    whole = entry["kernel"] and entry["digest"] and entry["tiles"]
    return bool(whole) and isinstance(timed, list) and isinstance(took, int | float)


class ChoiceFile:
    """The choices of one device and driver. Damaged files count as empty; entries of other shaders are dropped."""

    def __init__(self, device: Device, directory: Path | None = None):
        info, traits = device.info, device.traits
        facts = f"{info.name}|{info.driver}|{info.backend}|{traits}|{device.options}"
        slug = re.sub(r"[^a-z0-9]+", "-", info.name.lower()).strip("-")[:40]
        root = directory or Path(os.environ.get("WGPU_LORA_CACHE_DIR") or user_cache_dir("wgpu-lora")) / "tuning"
        self.path = root / f"{slug}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}.json"

    def read(self, digests: dict[str, str]) -> dict[str, Entry]:
        """Entries by key, of kernels (by name) whose shaders still have these digests."""
        return {k: e for k, e in self._entries().items() if e["digest"] == digests.get(e["kernel"])}

    def _entries(self) -> dict[str, Entry]:
        try:
            content = json.loads(self.path.read_text())
            entries = content["entries"] if content["schema"] == SCHEMA else {}
            return {key: entry for key, entry in entries.items() if _is_entry(entry)}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def add(self, entries: dict[str, Entry], digests: dict[str, str]) -> None:
        """Merges with what other processes wrote meanwhile. A cache that cannot be written is done without."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self.path.with_suffix(".lock"), timeout=10):
                kept = {
                    k: e for k, e in self._entries().items() if digests.get(e["kernel"], e["digest"]) == e["digest"]
                }
                partial = self.path.with_suffix(f".{os.getpid()}.tmp")
                partial.write_text(json.dumps({"schema": SCHEMA, "entries": kept | entries}, indent=1))
                partial.replace(self.path)
        except (OSError, TimeoutError):
            return
