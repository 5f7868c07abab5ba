"""PEFT's adapter_config.json: what an adapter is, read, checked and written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge, Le, Lt

from wgpu_lora.errors import UserError
from wgpu_lora.files.paths import is_path
from wgpu_lora.files.typed_json import Check, read_as
from wgpu_lora.names.text import escape_unprintable
from wgpu_lora.processes.untrusted_patterns import first_matches

MAX_PATTERNS = 2000  # models have fewer linear layers

# Fields beside those of `AdapterConfig` that are checked below, or that change nothing of what the weights say. Any
# other field that has a value is refused.
_CHECKED = ("peft_type", "init_lora_weights", "bias")
_HARMLESS = (
    *("task_type", "auto_mapping", "peft_version", "revision", "inference_mode"),  # of the file
    *("exclude_modules", "layers_to_transform", "layers_pattern", "ensure_weight_tying"),  # which modules have weights
    *("loftq_config", "eva_config", "corda_config", "lora_ga_config"),  # how they began
    *("megatron_core", "qalora_group_size", "lora_dtype", "lorap_lr_ratio", "lorap_emb_lr"),  # of what is off, or over
)


_NULLABLE = ("rank_pattern", "alpha_pattern")  # null in some files, which means none
_LARGEST, _SMALLEST = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
Rank = Annotated[int, Ge(1), Le(1 << 31)]
Alpha = Annotated[
    int | float,
    Check(lambda value: _SMALLEST <= value <= _LARGEST, "a positive number within float32's range"),
]


@dataclass(frozen=True)
class AdapterConfig:
    """A LoRA adapter's adapter_config.json, with PEFT's names.

    target_modules: a tuple of module names, a regular expression, or 'all-linear'.
    rank_pattern, alpha_pattern: names or regular expressions -> rank or alpha of the modules whose path ends with a
        match.
    """

    r: Rank = 8
    lora_alpha: Alpha = 8
    lora_dropout: Annotated[float, Ge(0), Lt(1)] = 0.0
    target_modules: tuple[str, ...] | str = "all-linear"
    use_rslora: bool = False
    base_model_name_or_path: str | None = None
    rank_pattern: Mapping[str, Rank] = field(default_factory=dict)
    alpha_pattern: Mapping[str, Alpha] = field(default_factory=dict)
    use_dora: bool = False

    def rank(self, module: str) -> int:
        """The rank of a module, given its path such as 'model.layers.0.self_attn.q_proj'."""
        return int(self._of("rank_pattern", module, self.r))

    def alpha(self, module: str) -> float:
        """The alpha of a module."""
        return self._of("alpha_pattern", module, self.lora_alpha)

    def scaling(self, module: str) -> float:
        """The factor of B(A(x)): alpha / r, or alpha / sqrt(r) for rsLoRA."""
        alpha, rank = self.alpha(module), self.rank(module)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def match(self, modules: Sequence[str]) -> None:
        """Matches the patterns against all modules at once, for `rank` and `scaling`.

        Raises:
            UserError: a pattern is invalid, or matching takes too long; the message has no full stop.
        """
        tables = (self.rank_pattern, self.alpha_pattern)
        result = first_matches([list(table) for table in tables], modules, endings=True)
        for cache, table, numbers in zip(self._matched, tables, result, strict=True):
            values = list(table.values())
            cache.update({m: None if n is None else values[n] for m, n in zip(modules, numbers, strict=True)})

    @cached_property
    def _matched(self) -> tuple[dict[str, float | None], dict[str, float | None]]:
        """Rank and alpha by module, from the first pattern that matches, as in PEFT."""
        return {}, {}

    def _of(self, name: str, module: str, default: float) -> float:
        if not getattr(self, name):
            return default
        cache = self._matched[name == "alpha_pattern"]
        if module not in cache:
            self.match([module])
        value = cache[module]
        return default if value is None else value


def parse_config(d: Mapping[str, Any], where: str) -> AdapterConfig:
    """Reads adapter_config.json's content. Raises UserError if a field is invalid or not supported."""
    if d.get("peft_type") != "LORA":
        raise UserError(f"peft_type {d.get('peft_type')!r} in {where} is not supported: use a LORA adapter.")
    known = {*AdapterConfig.__dataclass_fields__, *_CHECKED, *_HARMLESS}
    for name, value in d.items():
        if value and name not in known:
            stated = f"{escape_unprintable(name):.60} = {value!r:.100}"
            raise UserError(f"{stated} in {where} is not supported: use a plain LoRA adapter.")
    # With PiSSA, OLoRA and similar, PEFT also changes the base weights when it loads the adapter.
    init = d.get("init_lora_weights", True)
    if isinstance(init, str) and init not in ("gaussian", "eva", "orthogonal"):
        raise UserError(
            f"init_lora_weights = {init!r} in {where} is not supported: convert it to a plain LoRA adapter."
        )
    if d.get("bias", "none") != "none":
        raise UserError(f"bias = {d['bias']!r} in {where} is not supported: use an adapter trained with bias 'none'.")
    if "target_modules" not in d:
        raise UserError(f"{where} lacks target_modules: add a list of names or a string.")
    d = {name: value for name, value in d.items() if value is not None or name not in _NULLABLE}
    config = read_as(AdapterConfig, d, where, unknown="ignore")
    for name in ("rank_pattern", "alpha_pattern"):
        patterns = getattr(config, name)
        if len(patterns) > MAX_PATTERNS:
            raise UserError(f"{name} in {where} has more than {MAX_PATTERNS:,} patterns: simplify it.")
        try:
            first_matches([list(patterns)], [], endings=True)
        except UserError as error:
            raise UserError(f"{name} in {where} has a bad pattern: {error}.") from None
    base = config.base_model_name_or_path
    if base is not None and not is_path(base):
        raise UserError(f"base_model_name_or_path in {where} is {base!a:.60}, expected a path or an id: correct it.")
    return config


def config_dict(config: AdapterConfig) -> dict[str, Any]:
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
        "use_dora": config.use_dora,
    }
