"""Reads and writes LoRA adapters in PEFT's format: adapter_model.safetensors and adapter_config.json."""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from wgpu_lora.atomic import replace_directory, write_bytes_atomic
from wgpu_lora.bounded import check_path, is_path, read_json
from wgpu_lora.errors import NotFiniteError, UserError
from wgpu_lora.formats.checkpoint import SUPPORTED_DTYPES, read_f32_entry, read_header
from wgpu_lora.patterns import first_matches

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
_KEY = re.compile(r"base_model\.model\.([\w.]{1,400})\.lora_([AB])\.weight", re.ASCII)
Matrices = Mapping[str, tuple[np.ndarray, np.ndarray]]  # by module, A [rank, in] and B [out, rank]

MAX_PATTERNS = 2000  # models have fewer linear layers

# Unsupported fields of adapter_config.json that change what an adapter computes or contains, with the values that turn
# them off. Other values are refused.
_UNSUPPORTED = (
    "use_dora",
    "modules_to_save",
    "lora_bias",
    "layer_replication",
    "fan_in_fan_out",
    "trainable_token_indices",
    "target_parameters",
    "use_qalora",
    "use_bdlora",
    "alora_invocation_tokens",
    "arrow_config",
    "kasa_config",
    "velora_config",
    "monteclora_config",
    "megatron_config",
)


@dataclass(frozen=True)
class AdapterConfig:
    """A LoRA adapter's adapter_config.json, with PEFT's names.

    target_modules: a tuple of module names, a regular expression, or 'all-linear'.
    rank_pattern, alpha_pattern: names or regular expressions -> rank or alpha of the modules whose path ends with a
        match.
    """

    r: int = 8
    lora_alpha: float = 8
    lora_dropout: float = 0.0
    target_modules: tuple[str, ...] | str = "all-linear"
    use_rslora: bool = False
    base_model_name_or_path: str | None = None
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)

    def rank(self, module: str) -> int:
        """The rank of a module, given its path such as 'model.layers.0.self_attn.q_proj'."""
        return int(self._of("rank_pattern", module, self.r))

    def scaling(self, module: str) -> float:
        """The factor of B(A(x)): alpha / r, or alpha / sqrt(r) for rsLoRA."""
        alpha, rank = self._of("alpha_pattern", module, self.lora_alpha), self.rank(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def match(self, modules: Sequence[str]) -> None:
        """Matches the patterns against all modules at once, for `rank` and `scaling`.

        Raises:
            UserError: a pattern is invalid, or matching takes too long; the message has no full stop.
        """
        tables = (self.rank_pattern, self.alpha_pattern)
        found = first_matches([list(table) for table in tables], modules, endings=True)
        for known, table, numbers in zip(self._matched, tables, found, strict=True):
            values = list(table.values())
            known.update({m: None if n is None else values[n] for m, n in zip(modules, numbers, strict=True)})

    @cached_property
    def _matched(self) -> tuple[dict[str, float | None], dict[str, float | None]]:
        """Rank and alpha by module, from the first pattern that matches, as in PEFT."""
        return {}, {}

    def _of(self, name: str, module: str, default: float) -> float:
        if not getattr(self, name):
            return default
        known = self._matched[name == "alpha_pattern"]
        if module not in known:
            self.match([module])
        value = known[module]
        return default if value is None else value


def tensor_name(module: str, factor: str) -> str:
    """PEFT's key of the factor 'A' or 'B' of a module."""
    return f"base_model.model.{module}.lora_{factor}.weight"


def write_adapter(directory: str | Path, tensors: Mapping[str, np.ndarray], config: AdapterConfig) -> None:
    """Writes an adapter that `PeftModel.from_pretrained` loads, replacing an existing one.

    A new directory appears only once it is complete. In an existing one, the two files are replaced atomically and
    other files are not changed.

    Args:
        tensors: float32 A [r, in] and B [out, r] under PEFT's keys (`tensor_name`).

    Raises:
        ValueError: PEFT would not expect a key or dtype.
        OSError: a file cannot be written.
    """
    files = adapter_files(tensors, config)
    directory = Path(directory)
    if directory.exists():
        for name, data in files.items():
            write_bytes_atomic(directory / name, data)
        return
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", suffix=".tmp", dir=directory.parent))
    try:
        temporary.chmod(0o755)
        for name, data in files.items():
            (temporary / name).write_bytes(data)
        replace_directory(temporary, directory)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def adapter_files(tensors: Mapping[str, np.ndarray], config: AdapterConfig) -> dict[str, bytes]:
    """The content of an adapter's two files, by name. Raises ValueError as `write_adapter` does."""
    for name, tensor in tensors.items():
        if not _KEY.fullmatch(name) or tensor.dtype != np.float32 or tensor.ndim != 2:
            raise ValueError(f"{name} ({tensor.dtype}, {tensor.ndim}-D) is not a float32 LoRA matrix")
    weights = save({name: np.ascontiguousarray(t) for name, t in tensors.items()}, metadata={"format": "pt"})
    return {WEIGHTS: weights, CONFIG: json.dumps(_config_dict(config), indent=2, sort_keys=True).encode() + b"\n"}


def read_adapter(directory: str | Path) -> tuple[AdapterConfig, dict[str, tuple[np.ndarray, np.ndarray]]]:
    """Reads a PEFT LoRA adapter: its config, and (A [r, in], B [out, r]) in float32 by module.

    Modules are paths such as 'model.layers.0.self_attn.q_proj'; `models.lora.check_fits` compares them with a model.

    Raises:
        UserError: a file is missing or damaged, the adapter's type or an option is not supported, or shapes contradict
            the config.
        NotFiniteError: a value is NaN or infinite.
    """
    check_path(directory)
    directory = Path(directory)
    if not directory.is_dir():
        raise UserError(f"{directory} is not a directory: give the directory that holds {CONFIG}.")
    where = str(directory / CONFIG)
    config = parse_config(read_json(directory / CONFIG), where)
    path = directory / WEIGHTS
    if not path.exists():
        raise UserError(f"{path} does not exist: save the adapter in safetensors format.")
    halves: dict[str, dict[str, np.ndarray]] = {}
    for name, entry in read_header(path).items():
        match = _KEY.fullmatch(name)
        if not match:
            raise UserError(f"{path} holds {name}, which is not a LoRA factor of a module: use another adapter.")
        if entry.dtype not in SUPPORTED_DTYPES:
            supported = ", ".join(SUPPORTED_DTYPES)
            raise UserError(f"{name} in {path} has dtype {entry.dtype}: store the adapter as one of {supported}.")
        values = read_f32_entry(name, entry)
        if not np.isfinite(values).all():
            raise NotFiniteError(
                f"{name} in {path} has values that are not finite: train the adapter again, or use another."
            )
        halves.setdefault(match[1], {})[match[2]] = values
    if not halves:
        raise UserError(f"{path} holds no tensors: train or download the adapter again.")
    try:
        config.match(list(halves))
    except UserError as error:
        raise UserError(f"The rank_pattern and alpha_pattern in {where} cannot be used: {error}.") from None
    modules = sorted(halves, key=in_order)
    return config, {module: _pair(module, halves[module], config, path) for module in modules}


def in_order(module: str) -> list[tuple[int, str]]:
    """A sort key for modules: layer 10 comes after layer 9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in module.split(".")]


def parse_config(d: Mapping[str, Any], where: str) -> AdapterConfig:
    """Reads adapter_config.json's content. Raises UserError if a field is invalid or not supported."""
    if d.get("peft_type") != "LORA":
        raise UserError(f"peft_type {d.get('peft_type')!r} in {where} is not supported: use a LORA adapter.")
    for name in _UNSUPPORTED:
        if d.get(name):
            raise UserError(f"{name} = {d[name]!r} in {where} is not supported: use a plain LoRA adapter.")
    # With PiSSA, OLoRA and similar, PEFT also changes the base weights when it loads the adapter.
    init = d.get("init_lora_weights", True)
    if isinstance(init, str) and init not in ("gaussian", "eva", "orthogonal"):
        raise UserError(
            f"init_lora_weights = {init!r} in {where} is not supported: convert it to a plain LoRA adapter."
        )
    if d.get("bias", "none") != "none":
        raise UserError(f"bias = {d['bias']!r} in {where} is not supported: use an adapter trained with bias 'none'.")
    targets = d.get("target_modules")
    if isinstance(targets, list) and all(isinstance(t, str) for t in targets):
        targets = tuple(targets)
    elif not isinstance(targets, str):
        raise UserError(f"target_modules in {where} is {targets!r}, expected a list of names or a string: correct it.")
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = d.get(name) or {}
        if not isinstance(patterns, dict):
            raise UserError(f"{name} in {where} is {patterns!r}, expected an object of module names: correct it.")
        if len(patterns) > MAX_PATTERNS:
            raise UserError(f"{name} in {where} has more than {MAX_PATTERNS:,} patterns: simplify it.")
        for key, value in patterns.items():
            _number(value, f"{name}[{key!r}]", where, whole=name == "rank_pattern")
        try:
            first_matches([list(patterns)], [], endings=True)
        except UserError as error:
            raise UserError(f"{name} in {where} has a bad pattern: {error}.") from None
    dropout = d.get("lora_dropout", 0.0)
    if isinstance(dropout, bool) or not isinstance(dropout, (int, float)) or not 0 <= dropout < 1:
        raise UserError(f"lora_dropout in {where} is {dropout!r}, expected a number from 0 to below 1: correct it.")
    base = d.get("base_model_name_or_path")
    if not isinstance(base, str | None) or (base is not None and not is_path(base)):
        raise UserError(f"base_model_name_or_path in {where} is {base!a:.60}, expected a path or an id: correct it.")
    return AdapterConfig(
        r=int(_number(d.get("r", 8), "r", where, whole=True)),
        lora_alpha=_number(d.get("lora_alpha", 8), "lora_alpha", where),
        lora_dropout=float(dropout),
        target_modules=targets,
        use_rslora=bool(d.get("use_rslora", False)),
        base_model_name_or_path=base,
        rank_pattern=dict(d.get("rank_pattern") or {}),
        alpha_pattern=dict(d.get("alpha_pattern") or {}),
    )


def fits_float32(value: float) -> bool:
    """Whether a number is positive and finite in float32, and not rounded to 0."""
    return float(np.finfo(np.float32).tiny) <= value <= float(np.finfo(np.float32).max)


def _config_dict(config: AdapterConfig) -> dict[str, Any]:
    targets = config.target_modules
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": config.base_model_name_or_path,
        "inference_mode": True,
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "lora_dropout": config.lora_dropout,
        "target_modules": targets if isinstance(targets, str) else list(targets),
        "use_rslora": config.use_rslora,
        "rank_pattern": dict(config.rank_pattern),
        "alpha_pattern": dict(config.alpha_pattern),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "use_dora": False,
    }


def _pair(
    module: str, factors: dict[str, np.ndarray], config: AdapterConfig, path: Path
) -> tuple[np.ndarray, np.ndarray]:
    if factors.keys() != {"A", "B"}:
        raise UserError(f"{path} holds only lora_{next(iter(factors))} of {module}: save the adapter again.")
    a, b, rank = factors["A"], factors["B"], config.rank(module)
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != rank or b.shape[1] != rank:
        raise UserError(
            f"{module} in {path} has shapes A {list(a.shape)} and B {list(b.shape)}, which do not fit rank {rank} of "
            f"{CONFIG}: use the two files of one adapter."
        )
    return a, b


def _number(value: Any, name: str, where: str, whole: bool = False) -> float:
    kinds = (int,) if whole else (int, float)
    fits = isinstance(value, kinds) and not isinstance(value, bool) and fits_float32(value)
    if not fits:
        kind = "positive integer" if whole else "positive number within float32's range"
        raise UserError(f"{name} in {where} is {value!r}, expected a {kind}: correct it.")
    return value
