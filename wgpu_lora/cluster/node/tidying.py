"""What a host keeps for a cluster and nobody has used for long: runs that ended while it was away, and sent data."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from wgpu_lora.cluster.node.layout import Layout

KEEP_SECONDS = 30 * 86400.0  # longer than a coordinator keeps results, and than a machine is usually away


def tidy(layout: Layout, now: float | None = None) -> list[Path]:
    """Remove directories of runs in which no file has changed for a month, and data that no job has asked for since
    then; returns what was removed."""
    oldest = (time.time() if now is None else now) - KEEP_SECONDS
    runs = [place for part in ("units", "shelf", "caches") for place in _directories(layout.root / part)]
    old = [place for place in runs if _newest(place) < oldest]
    old += [place for place in _directories(layout.sent) if _changed(place) < oldest]
    for place in old:
        shutil.rmtree(place, ignore_errors=True)
        with suppress(OSError):
            place.with_name(f"{place.name}.json").unlink(missing_ok=True)  # the list of sent data
    return old


def _directories(root: Path) -> Iterator[Path]:
    if root.is_dir():
        yield from (place for place in root.iterdir() if place.is_dir() and not place.is_symlink())


def _newest(place: Path) -> float:
    return max(map(_changed, [place, *place.rglob("*")]))


def _changed(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:  # it has just been removed, so it is in use
        return float("inf")
