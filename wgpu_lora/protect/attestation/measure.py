"""Measurements of the program that attests: files, libraries, system and environment, as claims.

They are taken by the process that they describe. They show a file that was changed and a library that was swapped to
whoever runs an unchanged program; a changed program can state what it likes (`claims.LEVELS`).
Everything is read anew: no digest is kept on disk, where it could be edited.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from wgpu_lora.assets import PACKAGE, combined, package_files, walk
from wgpu_lora.atomic import file_digest
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device_list import native_library, native_version
from wgpu_lora.installation import NAME
from wgpu_lora.protect.attestation import dependencies, process
from wgpu_lora.protect.hygiene.host import environment_at_start

FLAGS = ("optimize", "isolated", "no_site", "ignore_environment")
# Variables of this package, Python, the loader, the Vulkan loader, drivers, wgpu, NumPy's libraries and the network.
BEHAVIOUR = re.compile(
    "(WGPU|PYTHON|LD|DYLD|VK|MESA|LIBGL|GALLIUM|LP|LVP|RADV|ANV|INTEL|NVK|NIR|ACO|AMD|DRI|D3D12|MTL|CUDA|NVIDIA"
    "|__GL|__NV|__EGL|RUST|MALLOC|OMP|OPENBLAS|MKL|HF|HUGGINGFACE|TRANSFORMERS|TOKENIZERS|SSL|OPENSSL|REQUESTS|CURL"
    "|TPM2TOOLS|TSS2|XDG)_?.*|(ZINK|NOUVEAU|NAK|HK|TU|FD|IR3|PAN|VN|AGX|ASAHI|V3D|V3DV|EGL|VULKAN)_.*"
    "|GLIBC_TUNABLES|GCONV_PATH|LOCPATH|PATH|HOME|TMPDIR|TEMP|TMP|(https?|no|all)_proxy",
    re.IGNORECASE | re.DOTALL,
)


def everything() -> dict[str, Any]:
    """All measurements, by the names of their claims. It reads the files of all dependencies.

    Raises:
        UserError: a file of this package or of Python cannot be read.
    """
    found = package()
    installed = dependencies.installed()
    listed = dependencies.own_files().union(*(one.files for one in installed.values()))
    return {
        "package": found,
        "wgpu": wgpu(),
        "python": python(),
        "dependencies": {name: one.claims for name, one in sorted(installed.items())},
        "process": process.measure(listed),
        "kernel": kernel(),
        "environment": environment(),
    }


def package() -> dict[str, Any]:
    """This package: its version, the SHA-256 of each of its files, and `sha256` over them all.

    The names, and so the digest, are the same for a checkout and for the wheel that is built from it.
    """
    with _measuring():
        digests = {name: file_digest(path) for name, path in package_files(PACKAGE).items()}
    try:
        found = version(NAME)
    except PackageNotFoundError:  # run from source
        found = "0"
    return {"version": found, "sha256": combined(digests), "files": digests}


def wgpu() -> dict[str, Any]:
    """wgpu-py, and the wgpu-native library that it loaded."""
    return {"version": version("wgpu"), "native_version": native_version(), "native_sha256": digest(native_library())}


def python() -> dict[str, Any]:
    """The interpreter: its executable, its standard library, and flags that change what code means."""
    files: dict[str, Path] = {}
    for name in ("stdlib", "platstdlib"):
        with _measuring():
            files |= dict(walk(Path(sysconfig.get_path(name)), ("site-packages", "dist-packages", "test")))
    return {
        "version": platform.python_version(),
        "implementation": platform.python_implementation(),
        "sha256": digest(Path(sys.executable).resolve()),
        "library_sha256": combined({name: digest(path) for name, path in sorted(files.items())}),
        "flags": {name: int(getattr(sys.flags, name)) for name in FLAGS},
    }


def kernel() -> dict[str, Any]:
    """The operating system (without the machine's name) and, on Linux, what guards a process from its administrator."""
    system = platform.uname()
    found: dict[str, Any] = {
        "system": system.system, "release": system.release, "version": system.version, "machine": system.machine,
    }  # fmt: skip
    guards = {
        "ptrace_scope": Path("/proc/sys/kernel/yama/ptrace_scope"),
        "tainted": Path("/proc/sys/kernel/tainted"),
        "lockdown": Path("/sys/kernel/security/lockdown"),
    }
    for name, path in guards.items():
        try:
            found[name] = path.read_text().strip()[:80]
        except (OSError, ValueError):
            continue
    return {name: value for name, value in found.items() if value}


def environment(now: Mapping[str, str] | None = None) -> dict[str, str]:
    """SHA-256 of the values of the variables that change behaviour, those at the process's start included.

    Args:
        now: the variables; by default this process's.
    """
    values = environment_at_start() | dict(os.environ) if now is None else dict(now)
    return {
        name: hashlib.sha256(value.encode("utf-8", "surrogateescape")).hexdigest()
        for name, value in sorted(values.items())
        if BEHAVIOUR.fullmatch(name)
    }


def digest(path: Path) -> str:
    """A file's SHA-256. Raises UserError if it cannot be read."""
    with _measuring():
        return file_digest(path)


@contextmanager
def _measuring() -> Iterator[None]:
    """Raises a UserError for a file that cannot be read."""
    try:
        yield
    except OSError as error:
        why = f"{error.filename} cannot be measured ({error.strerror})"
        raise UserError(f"{why}: make it readable, or install it again.") from None
