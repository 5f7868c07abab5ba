"""The pretraining corpus: the installed Python's own library source, and generated instruction pairs."""

from __future__ import annotations

import sysconfig
from contextlib import suppress
from pathlib import Path

LEFT_OUT = {
    "site-packages", "test", "tests", "idle_test", "lib2to3", "idlelib", "turtledemo", "pydoc_data", "encodings",
}  # fmt: skip
LARGEST_FILE = 200_000


def library_sources() -> list[str]:
    """The text of the standard library's modules, in path order, without tests and generated tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    for path in sorted(root.rglob("*.py")):
        # Build-specific files (config-3.x, _sysconfigdata) differ between machines and are no code to learn from.
        left_out = LEFT_OUT & set(path.relative_to(root).parts) or path.name.startswith("_sysconfigdata")
        if not left_out and path.stat().st_size <= LARGEST_FILE:
            with suppress(UnicodeDecodeError):
                texts.append(path.read_text(encoding="utf-8"))
    return texts
