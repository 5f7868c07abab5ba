"""Reads and writes LoRA adapters in PEFT's format: adapter_model.safetensors and adapter_config.json."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from safetensors.numpy import save

from wgpu_lora.errors import NotFiniteError, UserError
from wgpu_lora.files.atomic import new_directory, write_bytes_atomic
from wgpu_lora.files.json_files import parse_object, read_json
from wgpu_lora.files.locks import is_directory
from wgpu_lora.files.paths import check_path
from wgpu_lora.formats.file_digests import EMPTY, check_digests, with_digests
from wgpu_lora.formats.peft_config import AdapterConfig, config_dict, parse_config
from wgpu_lora.formats.safetensors_checkpoint import SUPPORTED_DTYPES, read_f32_entry
from wgpu_lora.formats.safetensors_header import read_header

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_KEY = re.compile(
    r"base_model\.model\.([\w.]{1,400})\.(?:lora_([AB])\.weight|lora_(m)agnitude_vector(?:\.weight)?)", re.ASCII
)
# Tensors that PEFT writes for other options than LoRA of linear layers, by their names.
_KINDS = {
    r"lora_embedding_[AB]|trainable_tokens": "a part of an adapter of the embedding",
    r"lora_[AB]\.bias|lora_bias": "a bias of a LoRA (lora_bias)",
    r"embed_tokens|wte\b|word_embeddings": "a tensor of the embedding (modules_to_save)",
    r"^(lm_head|embed_out)\b": "a tensor of the LM head (an adapter of lm_head, or modules_to_save)",
    r"\b(score|classifier|v_head)\b": "the weights of a head for classification or rewards (modules_to_save)",
    r"\.bias$": "a bias of the base that was trained (bias)",
    r"norm": "the weights of a norm that was trained (modules_to_save)",
    r"modules_to_save|original_module|base_layer": "the weights of a module that was trained whole (modules_to_save)",
    r"hada_|lokr_|oft_|ia3_|vera_|boft_|prompt_|ranknum|lora_E": "a tensor of another kind of adapter than LoRA",
}
_HEAD = re.compile(r"(?:lm_head|embed_out|(?:model\.)?embed_tokens)$")
PARTS = "ABM"  # of a module's adapter
# By module, A [rank, in] and B [out, rank], and DoRA's magnitudes [out] behind them.
Matrices = Mapping[str, tuple[np.ndarray, ...]]


def tensor_name(module: str, factor: str) -> str:
    """PEFT's key of the factor 'A' or 'B' of a module, or of its magnitudes 'M'."""
    if factor == "M":
        return f"base_model.model.{module}.lora_magnitude_vector"
    return f"base_model.model.{module}.lora_{factor}.weight"


def write_adapter(directory: str | Path, tensors: Mapping[str, np.ndarray], config: AdapterConfig) -> None:
    """Writes an adapter that `PeftModel.from_pretrained` loads, replacing an existing one.

    A new directory appears only once it is complete. In an existing one, the two files are replaced atomically and
    other files are not changed.

    Args:
        tensors: float32 A [r, in], B [out, r] and magnitudes [out] under PEFT's keys (`tensor_name`).

    Raises:
        ValueError: PEFT would not expect a key or dtype.
        OSError: a file cannot be written.
    """
    files = adapter_files(tensors, config)
    directory = Path(directory)
    with nullcontext(directory) if directory.exists() else new_directory(directory) as target:
        for name, data in files.items():
            write_bytes_atomic(target / name, data)


def adapter_files(
    tensors: Mapping[str, np.ndarray], config: AdapterConfig, companions: Mapping[str, bytes] = EMPTY
) -> dict[str, bytes]:
    """The content of an adapter's two files, by name. Raises ValueError as `write_adapter` does.

    companions: files that are written beside them, such as the tokenizer's.
    """
    for name, tensor in tensors.items():
        match = _KEY.fullmatch(name)
        if not match or tensor.dtype != np.float32 or tensor.ndim != (1 if match[3] else 2):
            raise ValueError(f"{name} ({tensor.dtype}, {tensor.ndim}-D) is not a float32 LoRA matrix")
    files = {CONFIG: json.dumps(config_dict(config), indent=2, sort_keys=True).encode() + b"\n"}
    weights = save({name: np.ascontiguousarray(t) for name, t in tensors.items()})
    return {WEIGHTS: with_digests(weights, {**companions, **files}), **files}


def read_adapter(
    directory: str | Path, contents: Mapping[str, bytes] | None = None
) -> tuple[AdapterConfig, dict[str, tuple[np.ndarray, ...]]]:
    """Reads a PEFT LoRA adapter: its config, and (A [r, in], B [out, r]) in float32 by module.

    With DoRA, the magnitudes [out] follow.

    Modules are paths such as 'model.layers.0.self_attn.q_proj'; `models.adapter_modules.read_adapter_for` compares
    them with a model.

    Args:
        contents: of the files by name, if they are in memory; the directory is then for messages only.

    Raises:
        UserError: a file is missing or damaged, the adapter's type or an option is not supported, or shapes contradict
            the config.
        NotFiniteError: a value is NaN or infinite.
    """
    check_path(directory)
    directory = Path(directory)
    if contents is None and not is_directory(directory):
        raise UserError(f"{directory} is not a directory: give the directory that holds {CONFIG}.")
    where, path = str(directory / CONFIG), directory / WEIGHTS
    content = read_json(directory / CONFIG) if contents is None else parse_object(contents.get(CONFIG, b""), where)
    if "fine_tune_type" in content and "peft_type" not in content:
        raise UserError(
            f"{directory} is an adapter of mlx-lm, which is not in PEFT's format: convert it (lora_A.weight and "
            "lora_B.weight are lora_a and lora_b transposed, lora_alpha is scale times rank)."
        )
    config = parse_config(content, where)
    if not path.exists() if contents is None else WEIGHTS not in contents:
        raise UserError(f"{path} does not exist: save the adapter in safetensors format.")
    halves: dict[str, dict[str, np.ndarray]] = {}
    for name, entry in read_header(path, contents[WEIGHTS] if contents is not None else None).items():
        match = _KEY.fullmatch(name)
        if not match or _HEAD.match(match[1]):
            raise UserError(f"{path} holds {name}, {_kind(name)}.")
        if entry.dtype not in SUPPORTED_DTYPES:
            supported = ", ".join(SUPPORTED_DTYPES)
            raise UserError(f"{name} in {path} has dtype {entry.dtype}: store the adapter as one of {supported}.")
        values = read_f32_entry(name, entry)
        if not np.isfinite(values).all():
            raise NotFiniteError(
                f"{name} in {path} has values that are not finite: train the adapter again, or use another."
            )
        halves.setdefault(match[1], {})[(match[2] or match[3]).upper()] = values
    check_digests(path, contents)
    if not halves:
        raise UserError(f"{path} holds no tensors: train or download the adapter again.")
    try:
        config.match(list(halves))
    except UserError as error:
        raise UserError(f"The rank_pattern and alpha_pattern in {where} cannot be used: {error}.") from None
    modules = sorted(halves, key=in_order)
    return config, {module: _pair(module, halves[module], config, path) for module in modules}


def _kind(name: str) -> str:
    """What a tensor is that is no factor of a supported module's LoRA, and what to do about it."""
    if ".default." in name or name.endswith((".lora_a", ".lora_b")):
        return "which is not a LoRA factor of a module as PEFT saves it: write it with save_pretrained"
    module = name.removeprefix("base_model.model.")
    for pattern, kind in _KINDS.items():
        if re.search(pattern, module):
            return f"{kind}, which is not supported: train the adapter without it"
    return "which is not a LoRA factor of a module: use another adapter"


def in_order(module: str) -> list[tuple[int, str]]:
    """A sort key for modules: layer 10 comes after layer 9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in module.split(".")]


def _pair(module: str, factors: dict[str, np.ndarray], config: AdapterConfig, path: Path) -> tuple[np.ndarray, ...]:
    pair = factors.keys() & {"A", "B"}
    if len(pair) < 2:
        tensor = f"lora_{next(iter(pair))}" if pair else "lora_magnitude_vector"
        raise UserError(f"{path} holds only {tensor} of {module}: save the adapter again.")
    if ("M" in factors) != config.use_dora:
        raise UserError(
            f"{path} has {'a' if 'M' in factors else 'no'} lora_magnitude_vector of {module}, but use_dora in {CONFIG} "
            f"is {str(config.use_dora).lower()}: use the two files of one adapter."
        )
    a, b, rank = factors["A"], factors["B"], config.rank(module)
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise UserError(
            f"{module} in {path} has shapes A {list(a.shape)} and B {list(b.shape)}, which do not fit rank {rank} of "
            f"{CONFIG}: use the two files of one adapter."
        )
    if config.use_dora and factors["M"].shape != (b.shape[0],):
        raise UserError(
            f"{module} in {path} has magnitudes of shape {list(factors['M'].shape)}, expected [{b.shape[0]}]: save the "
            "adapter again."
        )
    return tuple(factors[part] for part in PARTS if part in factors)
