"""What this process has loaded that no list of files accounts for: modules, compiled files, libraries, hooks."""

from __future__ import annotations

import hashlib
import importlib.util
import marshal
import os
import site
import struct
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

import psutil

from wgpu_lora.atomic import file_digest
from wgpu_lora.protect.attestation.dependencies import PACKAGE, accounted, loaded_files

MAX_PYC, HEADER = 32 << 20, 16
MOST_NAMED = 500  # files of each kind
STANDARD = {"BuiltinImporter", "FrozenImporter", "PathFinder"}


def measure(listed: Collection[str]) -> dict[str, Any]:
    """What is loaded now.

    Args:
        listed: files that the dependencies' RECORDs account for, as absolute paths.

    Returns:
        unlisted: SHA-256, by path, of loaded modules and .pth files that belong to no package.
        fileless: modules without a file that are not Python's own: parts of compiled ones, or made at run time.
        compiled_otherwise: modules that are loaded, or of this package, whose compiled file is not what their source
            compiles to.
        libraries: SHA-256, by path, of native libraries that belong to no package; absent where they cannot be listed.
        import_hooks: types of finders other than Python's own. traced: whether a debugger or tracer is attached.
    """

    modules = loaded_files()
    others = [path for path in [*modules, *_pth_files()] if not accounted(path, listed)]
    found: dict[str, Any] = {
        "unlisted": _named({path: _digest(path) for path in others}),
        "fileless": _fileless(),
        "compiled_otherwise": sorted(path for path in {*modules, *_own_modules()} if _compiled_otherwise(path)),
        "import_hooks": sorted({_name(hook) for hook in sys.meta_path} - STANDARD),
        "traced": sys.gettrace() is not None or sys.getprofile() is not None or _tracer(),
    }
    libraries = _libraries()
    if libraries is not None:
        found["libraries"] = _named({path: _digest(path) for path in libraries if not accounted(path, listed)})
    return found


def _own_modules() -> list[str]:
    """All modules of this package, of which some are loaded later."""
    return [str(path) for path in Path(PACKAGE).rglob("*.py")]


def _named(digests: Mapping[str, str]) -> dict[str, str]:
    """The first files, and one digest over all others, so that evidence stays short."""
    first = dict(list(digests.items())[:MOST_NAMED])
    rest = [f"{value}  {name}\n" for name, value in digests.items() if name not in first]
    text = "".join(rest).encode("utf-8", "surrogateescape")
    return {**first, f"and {len(rest)} more": hashlib.sha256(text).hexdigest()} if rest else first


def _fileless() -> list[str]:
    loaded = {name: module for name, module in list(sys.modules.items()) if name not in sys.builtin_module_names}
    return sorted(
        name
        for name, module in loaded.items()
        if not isinstance(getattr(module, "__file__", None), str) and not hasattr(module, "__path__")
    )


def _compiled_otherwise(source: str) -> bool:
    """Whether Python would load, for a module, a compiled file that is not what its source compiles to.

    RECORD has no digests of compiled files, and Python trusts one that states the time and size of the source.
    """
    if not source.endswith(".py"):
        return False
    try:
        with open(importlib.util.cache_from_source(source), "rb") as file:
            cached = file.read(MAX_PYC)
        if not _would_be_loaded(cached, os.stat(source)):
            return False
    except (OSError, NotImplementedError):
        return False  # there is none
    try:
        code = marshal.loads(cached[HEADER:])
        meant = compile(Path(source).read_bytes(), source, "exec", dont_inherit=True, optimize=sys.flags.optimize)
    except (OSError, ValueError, EOFError, TypeError, SyntaxError):
        return True
    return not isinstance(code, CodeType) or code != meant


def _would_be_loaded(cached: bytes, source: os.stat_result) -> bool:
    """Whether a compiled file's header (PEP 552) fits this Python and its source; one by hash is taken to do so."""
    if len(cached) < HEADER or cached[:4] != importlib.util.MAGIC_NUMBER:
        return False
    flags, stated, size = struct.unpack("<3I", cached[4:HEADER])
    return bool(flags) or (stated, size) == (int(source.st_mtime) & 0xFFFFFFFF, source.st_size & 0xFFFFFFFF)


def _libraries() -> list[str] | None:
    """The native libraries and programs that are mapped into this process to be executed, gone ones too.

    Memory that a driver shares by a name of its own, such as lavapipe's /memfd:allocation, is none.
    """
    try:
        maps = psutil.Process().memory_maps(grouped=False)
    except (AttributeError, psutil.Error, OSError):  # macOS
        return None
    return sorted({one.path for one in maps if "x" in one.perms and os.path.isabs(one.path)})


def _pth_files() -> list[str]:
    """Files whose lines Python runs when it starts (`site`)."""
    folders = {*site.getsitepackages(), site.getusersitepackages()} if hasattr(site, "getsitepackages") else set()
    return sorted(str(path) for folder in folders for path in Path(folder).glob("*.pth"))


def _tracer() -> bool:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return False
    return any(line.startswith("TracerPid:") and line.split()[1] != "0" for line in lines)


def _digest(path: str) -> str:
    try:
        return file_digest(Path(path))
    except OSError:
        return "unreadable"


def _name(hook: object) -> str:
    kind = hook if isinstance(hook, type) else type(hook)
    return kind.__name__
