"""Which tiling a device was found to be fastest with, by kernel and size, kept on disk between runs."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock
from platformdirs import user_cache_dir

from wgpu_lora.gpu.assets import asset_dir
from wgpu_lora.gpu.kernel import Kernel, Tiles

if TYPE_CHECKING:
    from wgpu_lora.gpu.device import Device

SCHEMA = 1
Choices = dict[str, Tiles]


def bucket(size: int) -> int:
    """The nearest power of two, by ratio: sizes of one bucket share a choice."""
    return 1 << round(math.log2(max(size, 1)))


def choice_key(kernel: Kernel, present: tuple[str, ...], constants: dict[str, Any]) -> str:
    """What calls that may share a tiling have in common: all that is compiled in, and the bucket of each dim."""
    dims = {name: bucket(constants[name]) for name in kernel.dims if name in ("m", "n", "k")}
    return json.dumps([kernel.name, present, sorted(kernel.compiled_in(constants).items()), dims])


def shader_digest(kernel: Kernel) -> str:
    """Changes whenever the kernel's text may."""
    root = Path(str(asset_dir("shaders")))
    sha = hashlib.sha256()
    for path in (root / kernel.file, *sorted((root / "lib").iterdir())):
        sha.update(path.read_bytes())
    return sha.hexdigest()[:16]


class ChoiceFile:
    """The choices of one device and driver. Damaged files count as empty; entries of other shaders are dropped."""

    def __init__(self, device: Device, directory: Path | None = None):
        info, traits = device.info, device.traits
        facts = f"{info.name}|{info.driver}|{info.backend}|{traits}|{device.options}"
        slug = re.sub(r"[^a-z0-9]+", "-", info.name.lower()).strip("-")[:40]
        root = directory or Path(os.environ.get("WGPU_LORA_CACHE_DIR") or user_cache_dir("wgpu-lora")) / "tuning"
        self.path = root / f"{slug}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}.json"

    def read(self, digests: dict[str, str]) -> dict[str, dict[str, Any]]:
        """Entries by key, of kernels (by name) whose shaders still have these digests."""
        try:
            content = json.loads(self.path.read_text())
            entries = content["entries"] if content["schema"] == SCHEMA else {}
            return {k: e for k, e in entries.items() if e["digest"] == digests.get(e["kernel"]) and e["tiles"]}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return {}

    def add(self, entries: dict[str, dict[str, Any]], digests: dict[str, str]) -> None:
        """Merges with what other processes wrote meanwhile. A cache that cannot be written is done without."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(self.path.with_suffix(".lock"), timeout=10):
                merged = {**self.read(digests), **entries}
                partial = self.path.with_suffix(f".{os.getpid()}.tmp")
                partial.write_text(json.dumps({"schema": SCHEMA, "entries": merged}, indent=1))
                partial.replace(self.path)
        except (OSError, TimeoutError):
            return
