"""Measurements of a device, cached on disk between runs: the fastest tiling by kernel and size, and verdicts."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from platformdirs import user_cache_dir

from wgpu_lora.files.assets import asset_dir
from wgpu_lora.files.atomic import write_bytes_atomic
from wgpu_lora.files.locks import lock_file
from wgpu_lora.gpu.kernel import Kernel
from wgpu_lora.gpu.struct import wgsl_struct
from wgpu_lora.gpu.tiling import Constants, Tiling

if TYPE_CHECKING:
    from wgpu_lora.gpu.device import Device

SCHEMA = 3
Choices = Mapping[str, Tiling]  # by `choice_key`
NO_CHOICES: Choices = MappingProxyType({})
# What reading a damaged file raises: JSON may be nested without end, and its integers may have any number of digits.
DAMAGE = (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
T = TypeVar("T")


@dataclass(frozen=True)
class TuningEntry:
    """A tiling that was chosen by timing it beside others.

    seconds: measured time per tiling. took: seconds spent on the measurements.
    """

    kernel: str
    digest: str
    tiling: Tiling
    seconds: tuple[tuple[float, Tiling], ...] = ()
    took: float = 0.0

    def to_json(self) -> dict[str, Any]:
        timed = [[seconds, tiling.to_json()] for seconds, tiling in self.seconds]
        return {**vars(self), "tiling": self.tiling.to_json(), "seconds": timed}

    @classmethod
    def from_json(cls, value: Any) -> TuningEntry:
        """Raises one of DAMAGE if `value` is not an entry."""
        timed = tuple((float(seconds), Tiling.from_json(tiling)) for seconds, tiling in value["seconds"])
        if not all(isinstance(value[name], str) for name in ("kernel", "digest")):
            raise ValueError("'kernel' and 'digest' must be strings")
        elapsed = float(value["took"])
        if not all(math.isfinite(seconds) for seconds in (elapsed, *(seconds for seconds, _ in timed))):
            raise ValueError("times must be finite")
        return cls(value["kernel"], value["digest"], Tiling.from_json(value["tiling"]), timed, elapsed)


@dataclass(frozen=True)
class Verdict:
    """Whether a compute pipeline agreed with its kernel's reference.

    nmse: the mean squared error relative to the mean square, and its `limit`; None if it does not compile, for this
        `reason`.
    """

    kernel: str
    digest: str
    right: bool
    nmse: float | None
    limit: float
    reason: str = ""

    @classmethod
    def from_json(cls, value: Any) -> Verdict:
        """Raises one of DAMAGE if `value` is not a verdict."""
        result, error = cls(**value), value["nmse"]
        if not isinstance(result.right, bool) or not all(
            isinstance(text, str) for text in (result.kernel, result.digest, result.reason)
        ):
            raise ValueError("a verdict's values have other types")
        return replace(result, nmse=None if error is None else float(error), limit=float(result.limit))


NO_VERDICTS: Mapping[str, Verdict] = MappingProxyType({})
NOTHING: Mapping[str, str] = MappingProxyType({})


def bucket(size: int) -> int:
    """The power of two nearest in ratio. Sizes of one bucket share a choice."""
    return 1 << round(math.log2(max(size, 1)))


def choice_key(kernel: Kernel, present: tuple[str, ...], constants: Constants) -> str:
    """The key of a call: everything compiled into its shader, and the bucket of each size.

    Checkpoints contain these keys, so changing their form discards the saved choices. Constants that a kernel got later
    (`Tunable.later`) are left out at their default.
    """
    assert kernel.tuning is not None, f"{kernel.name} is not tuned"
    later = {name: kernel.defaults[name] for name in kernel.tuning.later}
    compiled = [item for item in kernel.compiled_in(constants).items() if later.get(item[0]) != item[1]]
    sizes = {name: bucket(constants[name]) for name in kernel.dims if name in kernel.tuning.sizes}
    return json.dumps([kernel.name, present, sorted(compiled), sizes])


def shader_digest(kernel: Kernel) -> str:
    """A digest of all files and structs that a kernel's WGSL may be assembled from, and of the module of its layout."""
    root = Path(str(asset_dir("shaders")))
    folder, file = (root / kernel.file).parent, root / kernel.file
    sha = hashlib.sha256("".join(map(wgsl_struct, kernel.structs)).encode())
    own = [file] if folder == root else folder.rglob("*.wgsl*")
    for path in sorted((*own, *(root / "lib").iterdir())):
        sha.update(path.read_bytes())
    if kernel.layout:
        sha.update(Path(inspect.getfile(kernel.layout)).read_bytes())
    return sha.hexdigest()[:16]


class ChoiceFile:
    """The cache file of a device and driver. A damaged file counts as empty; entries of changed shaders are dropped.

    `skipped` has the sizes that time ran out for, as a shader digest by key, so that only `wgpu-lora tune` tries again.
    """

    def __init__(self, device: Device, directory: Path | None = None):
        info, capabilities = device.info, device.capabilities
        facts = f"{info.name}|{info.driver}|{info.backend}|{capabilities}|{device.options}"
        slug = re.sub(r"[^a-z0-9]+", "-", info.name.lower()).strip("-")[:40]
        root = directory or Path(os.environ.get("WGPU_LORA_CACHE_DIR") or user_cache_dir("wgpu-lora")) / "tuning"
        self.path = root / f"{slug}-{hashlib.sha256(facts.encode()).hexdigest()[:12]}.json"

    def read(self, digests: dict[str, str]) -> dict[str, TuningEntry]:
        """Entries by key, for kernels whose shader digest is still the one in `digests` (by kernel name)."""
        return {k: e for k, e in self._entries().items() if e.digest == digests.get(e.kernel)}

    def verdicts(self) -> dict[str, Verdict]:
        """All verdicts by key, of earlier shaders too."""
        return self._section("verdicts", Verdict.from_json)

    def skipped_keys(self, digests: Collection[str]) -> set[str]:
        """The keys of sizes that time ran out for, of these shaders."""
        return {key for key, digest in self._section("skipped", str).items() if digest in digests}

    def clear(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)

    def _entries(self) -> dict[str, TuningEntry]:
        """Without those of earlier versions that were copied from another size, or not compared with another tiling."""
        return {k: e for k, e in self._section("entries", TuningEntry.from_json).items() if len(e.seconds) > 1}

    def _section(self, name: str, of: Callable[[Any], T]) -> dict[str, T]:
        try:
            content = json.loads(self.path.read_text())
            result = content.get(name, {}) if content["schema"] == SCHEMA else {}
            return {key: of(value) for key, value in result.items()}
        except DAMAGE:
            return {}

    def add(
        self,
        entries: dict[str, TuningEntry],
        digests: dict[str, str],
        verdicts: Mapping[str, Verdict] = NO_VERDICTS,
        skipped: Mapping[str, str] = NOTHING,
    ) -> None:
        """Adds to what other processes have written, except about other shaders than those of the digests, by kernel.
        An unwritable cache is ignored."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with lock_file(self.path.with_suffix(".lock"), 10):
                all_entries = {k: e for k, e in self._entries().items() if digests.get(e.kernel, e.digest) == e.digest}
                old = {k: v for k, v in self.verdicts().items() if digests.get(v.kernel, v.digest) == v.digest}
                all_entries |= entries
                all_skipped = self._section("skipped", str) | dict(skipped)
                content = {
                    "schema": SCHEMA,
                    "entries": {key: entry.to_json() for key, entry in all_entries.items()},
                    "skipped": {key: digest for key, digest in all_skipped.items() if key not in all_entries},
                    "verdicts": {key: asdict(verdict) for key, verdict in (old | dict(verdicts)).items()},
                }
                write_bytes_atomic(self.path, json.dumps(content, indent=1).encode())
        except (OSError, TimeoutError):
            return
