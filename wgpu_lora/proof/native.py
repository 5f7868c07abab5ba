"""Looks into native libraries for the names of CUDA's."""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from pathlib import Path, PurePath

from wgpu_lora.proof.cuda import NVIDIA_OWN

NAMES = (b"libcuda", b"libcudart", b"libcublas", b"libnvrtc", b"nvcuda.dll")
PACKAGES = {"site-packages", "dist-packages"}


def ours(mapped: Iterable[str]) -> list[str]:
    """The installed packages' libraries among mapped ones, NVIDIA's excepted, and wgpu-native wherever it is."""
    found = []
    for path in mapped:
        parts = PurePath(path.replace("\\", "/"))
        installed = bool(PACKAGES & set(parts.parts)) or "wgpu_native" in parts.name
        if installed and not NVIDIA_OWN.match(parts.name):
            found.append(path)
    return sorted(found)


def names_in(path: str) -> list[str]:
    """Those of NAMES that stand anywhere in a file. Raises OSError where it cannot be read."""
    with Path(path).open("rb") as file:
        if not file.seek(0, 2):
            return []
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return [name.decode() for name in NAMES if content.find(name) >= 0]


def look_into(paths: Iterable[str]) -> tuple[dict[str, list[str]], list[str]]:
    """(names found by path, where there are any; paths that could not be read)."""
    found: dict[str, list[str]] = {}
    unread = []
    for path in paths:
        try:
            names = names_in(path)
        except (OSError, ValueError):
            unread.append(path)
            continue
        if names:
            found[path] = names
    return found, unread
