"""What must agree on all machines of a cluster, so that an adapter can move between them."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from wgpu_lora.cluster.messages import Versions
from wgpu_lora.files.assets import combined, package_files
from wgpu_lora.files.atomic import file_digest
from wgpu_lora.files.installation import NAME
from wgpu_lora.gpu.backends import backend

SHOWN = 12  # characters of a digest in a message


@cache
def own_versions() -> Versions:
    """Those of this process, read once. Raises OSError if a file of the package cannot be read."""
    files = package_files()
    return Versions(
        package=_version(NAME),
        code=_digest((name, path) for name, path in files.items() if name.endswith(".py")),
        shaders=_digest((name, path) for name, path in files.items() if name.startswith("shaders/")),
        python=platform.python_version(),
        ray=_version("ray"),
        wgpu=f"{_version('wgpu')} ({' '.join(*backend().versions().items())})",
    )


def difference(local: Versions, remote: Versions) -> str | None:
    """The first thing that differs on another machine, as part of a sentence such as "its Python is 3.12.1, not
    3.11.7"; None if nothing does."""
    if local.python.rpartition(".")[0] != remote.python.rpartition(".")[0]:
        return f"its Python is {remote.python}, not {local.python}"
    for field, name in (("package", NAME), ("ray", "Ray"), ("wgpu", "wgpu")):
        expected, actual = getattr(local, field), getattr(remote, field)
        if expected != actual:
            return f"its {name} is {actual or 'missing'}, not {expected or 'missing'}"
    for field in ("code", "shaders"):
        expected, actual = getattr(local, field), getattr(remote, field)
        if expected != actual:
            digests = f"SHA-256 {actual[:SHOWN]}..., not {expected[:SHOWN]}..."
            return f"its {NAME} {remote.package} has other {field} ({digests}), though the versions are equal"
    return None


def _digest(files: Iterable[tuple[str, Path]]) -> str:
    return combined({name: file_digest(path) for name, path in files})


def _version(name: str) -> str:
    """The installed version of a distribution; '' if there is none."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
