"""Finds a model's files: the bundled demo, a path, `smollm2`, or a Hugging Face id."""

from __future__ import annotations

import re
from difflib import get_close_matches
from pathlib import Path

from wgpu_lora.errors import UserError
from wgpu_lora.files.assets import DEMO_MODEL
from wgpu_lora.files.locks import is_directory
from wgpu_lora.files.paths import check_path
from wgpu_lora.formats.smollm2 import smollm2
from wgpu_lora.names.spelling import flag

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
