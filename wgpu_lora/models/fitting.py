"""Reads an adapter for a model: by the model's names of modules, and only if its matrices are of these modules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.formats.adapter_config import AdapterConfig
from wgpu_lora.formats.peft import Matrices, in_order, read_adapter
from wgpu_lora.models.config import ModelConfig
from wgpu_lora.models.targets import expression, stated


def read_fitting(
    config: ModelConfig, adapter: Path | str, model: str = "the model", contents: Mapping[str, bytes] | None = None
) -> tuple[AdapterConfig, dict[str, tuple[np.ndarray, ...]]]:
    """Reads a PEFT adapter of a model, as `formats.peft.read_adapter` does.

    Modules may also have the names of a larger model that this one is part of (`ModelConfig.STORED`), as PEFT gives
    them over `AutoModelForImageTextToText`. What is returned has the model's own names everywhere.

    Args:
        model: names the model in errors.
        contents: of the adapter's files by name, if they are in memory.

    Raises:
        UserError: the adapter cannot be read or does not fit (`check_fits`), or has a module under two names.
        NotFiniteError: a value is NaN or infinite.
    """
    said, stored = read_adapter(adapter, contents)
    names = {theirs: config.STORED.own(theirs) for theirs in stored}
    matrices: dict[str, tuple[np.ndarray, ...]] = {}
    for theirs, ours in sorted(names.items(), key=lambda pair: in_order(pair[1])):
        if ours in matrices:
            raise UserError(f"The adapter {adapter} holds {ours} under two names: save it again, or use another.")
        matrices[ours] = stored[theirs]
    check_fits(config, matrices, adapter, model)
    return said if matrices.keys() == stored.keys() else _renamed(said, names, config), matrices


def _renamed(said: AdapterConfig, names: Mapping[str, str], config: ModelConfig) -> AdapterConfig:
    """The config of an adapter whose modules, old name -> new, were renamed: the same ranks and alphas by new patterns.

    The old patterns may be any expressions over the old names, so they are evaluated instead of rewritten.
    """

    def patterns(value_of: Callable[[str], float], usual: float) -> dict[str, float]:
        modules: dict[float, list[str]] = {}
        for theirs, ours in names.items():
            modules.setdefault(value_of(theirs), []).append(ours)
        return {expression(some, config): value for value, some in modules.items() if value != usual}

    ranks = {pattern: int(rank) for pattern, rank in patterns(said.rank, said.r).items()}
    alphas = patterns(said.alpha, said.lora_alpha)
    targets = stated(names.values(), config)
    return replace(said, target_modules=targets, rank_pattern=ranks, alpha_pattern=alphas)


def check_fits(config: ModelConfig, matrices: Matrices, adapter: Path | str, model: str = "the model") -> None:
    """Raises UserError unless every module of an adapter is one that the model allows, with the right shape."""
    for module, (a, b, *magnitude) in matrices.items():
        have, need = (b.shape[0], a.shape[1]), config.lora_modules.get(module)
        if config.STORED.is_skipped(module):
            raise UserError(
                f"The adapter {adapter} does not fit {model}: it has {module}, but only the text part of this model is "
                "used: train it on modules of the language model alone."
            )
        if need is None:
            raise UserError(
                f"The adapter {adapter} does not fit {model}: it has {module}, but {_what_there_is(config, module)}: "
                "use the model that it was trained on."
            )
        if have != need:
            raise UserError(
                f"The adapter {adapter} does not fit {model}: its {module} is of shape {list(have)}, but the model's "
                f"of {list(need)}: use the model that it was trained on."
            )
        if magnitude and magnitude[0].shape != need[:1]:
            raise UserError(
                f"The adapter {adapter} does not fit {model}: the magnitudes of {module} are of shape "
                f"{list(magnitude[0].shape)}, but the model has {need[0]} rows there: use the model that it was "
                "trained on."
            )


def _what_there_is(config: ModelConfig, module: str) -> str:
    inside = module.startswith(tuple(f"{config.path(i)}." for i in range(config.num_hidden_layers)))
    if module.startswith(f"{config.LAYERS}.") and not inside:
        return f"the model has only {config.num_hidden_layers} layers"
    return "the model has no such linear layer that adapters may target"
