"""PEFT's adapter_config.json: what an adapter is, read, checked and written."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from wgpu_lora.bounded import is_path
from wgpu_lora.errors import UserError
from wgpu_lora.patterns import first_matches

MAX_PATTERNS = 2000  # models have fewer linear layers

# Unsupported fields of adapter_config.json that change what an adapter computes or contains, with the values that turn
# them off. Other values are refused.
_UNSUPPORTED = (
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
        use_dora=bool(d.get("use_dora", False)),
    )


def fits_float32(value: float) -> bool:
    """Whether a number is positive and finite in float32, and not rounded to 0."""
    return float(np.finfo(np.float32).tiny) <= value <= float(np.finfo(np.float32).max)


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


def _number(value: Any, name: str, where: str, whole: bool = False) -> float:
    kinds = (int,) if whole else (int, float)
    fits = isinstance(value, kinds) and not isinstance(value, bool) and fits_float32(value)
    if not fits:
        kind = "positive integer" if whole else "positive number within float32's range"
        raise UserError(f"{name} in {where} is {value!r}, expected a {kind}: correct it.")
    return value
