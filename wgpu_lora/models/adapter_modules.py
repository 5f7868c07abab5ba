"""Reads an adapter for a model: by the model's names of modules, and only if its matrices are of these modules."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.formats.peft_adapter import Matrices, in_order, read_adapter
from wgpu_lora.formats.peft_config import AdapterConfig
from wgpu_lora.models.model_config import ModelConfig, module_of
from wgpu_lora.names.spelling import flag
from wgpu_lora.processes.untrusted_patterns import first_matches


def read_adapter_for(
    config: ModelConfig, adapter: Path | str, model: str = "the model", contents: Mapping[str, bytes] | None = None
) -> tuple[AdapterConfig, dict[str, tuple[np.ndarray, ...]]]:
    """Reads a PEFT adapter of a model, as `formats.peft_adapter.read_adapter` does.

    Modules may also have the names of a larger model that this one is part of (`ModelConfig.STORED`), as PEFT gives
    them over `AutoModelForImageTextToText`. The result has the model's names everywhere.

    Args:
        model: names the model in errors.
        contents: of the adapter's files by name, if they are in memory.

    Raises:
        UserError: the adapter cannot be read or does not fit (`check_adapter_shapes`), or has a module under two names.
        NotFiniteError: a value is NaN or infinite.
    """
    adapter_config, arrays = read_adapter(adapter, contents)
    names = {stored_name: config.STORED.model_name(stored_name) for stored_name in arrays}
    matrices: dict[str, tuple[np.ndarray, ...]] = {}
    for stored_name, name in sorted(names.items(), key=lambda pair: in_order(pair[1])):
        if name in matrices:
            raise UserError(f"The adapter {adapter} holds {name} under two names: save it again, or use another.")
        matrices[name] = arrays[stored_name]
    check_adapter_shapes(config, matrices, adapter, model)
    return adapter_config if matrices.keys() == arrays.keys() else _renamed(adapter_config, names, config), matrices


def _renamed(adapter_config: AdapterConfig, names: Mapping[str, str], config: ModelConfig) -> AdapterConfig:
    """The config of an adapter whose modules, old name -> new, were renamed: the same ranks and alphas by new patterns.

    The old patterns may be any expressions over the old names, so they are evaluated instead of rewritten.
    """

    def patterns(value_of: Callable[[str], float], usual: float) -> dict[str, float]:
        modules: dict[float, list[str]] = {}
        for old, new in names.items():
            modules.setdefault(value_of(old), []).append(new)
        return {expression(group, config): value for value, group in modules.items() if value != usual}

    ranks = {pattern: int(rank) for pattern, rank in patterns(adapter_config.rank, adapter_config.r).items()}
    alphas = patterns(adapter_config.alpha, adapter_config.lora_alpha)
    targets = target_modules_text(names.values(), config)
    return replace(adapter_config, target_modules=targets, rank_pattern=ranks, alpha_pattern=alphas)


def check_adapter_shapes(
    config: ModelConfig, matrices: Matrices, adapter: Path | str, model: str = "the model"
) -> None:
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
                f"The adapter {adapter} does not fit {model}: it has {module}, but "
                f"{available_modules(config, module)}: "
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


def available_modules(config: ModelConfig, module: str) -> str:
    inside = module.startswith(tuple(f"{config.path(i)}." for i in range(config.num_hidden_layers)))
    if module.startswith(f"{config.LAYERS}.") and not inside:
        return f"the model has only {config.num_hidden_layers} layers"
    return "the model has no such linear layer that adapters may target"


ALL = "all-linear"
_NAMES = re.compile(r"[\w.,\s-]*")


def target_names(target_modules: str) -> tuple[str, ...] | None:
    """The names in a comma-separated list; None for a regular expression."""
    if not _NAMES.fullmatch(target_modules):
        return None
    return tuple(name.strip() for name in target_modules.split(",") if name.strip())


def resolve_target_modules(target_modules: str, config: ModelConfig) -> list[str]:
    """The paths of the targeted modules, in the model's order.

    Args:
        target_modules: 'all-linear'; comma-separated names, which are paths, ends of paths after a dot, or the parts of
            a layer, 'mlp' and 'attention'; or a regular expression that matches whole paths, as `re.fullmatch` does.

    Raises:
        UserError: the model has no such module, or the expression is invalid.
    """
    modules = list(config.lora_modules)
    if target_modules == ALL:
        return modules
    names = target_names(target_modules)
    if names is None:
        try:
            (result,) = first_matches([[target_modules]], modules)
        except UserError as error:
            raise UserError(f"{flag('target_modules')} cannot be used: {error}.") from None
        selection = [module for module, number in zip(modules, result, strict=True) if number is not None]
        if not selection:
            raise UserError(
                f"{flag('target_modules')} '{target_modules:.80}' matches none of the model's modules: match paths "
                f"such as {modules[0]}, or name modules, or use '{ALL}'."
            )
        return selection
    targets: set[str] = set()
    for name in names:
        matches = [module for module in modules if _ends_with(module, name)]
        matches = matches or [module for module in modules if config.layer_part(module) == name]
        if not matches:
            choices = ", ".join((*shortest(modules, config), *config.LAYER_PARTS))
            raise UserError(f"{flag('target_modules')} has no '{name:.40}': choose among {choices}, or '{ALL}'.")
        targets.update(matches)
    return [module for module in modules if module in targets]


def shortest(modules: Collection[str], config: ModelConfig) -> tuple[str, ...]:
    """The shortest names that select exactly these modules, in the model's order."""
    may, targets = config.may_be_packed(), set(modules)
    all_modules = [module_of(name) for name in config.parameters if name in may]
    by_name: dict[str, set[str]] = {}
    for module in all_modules:
        for name in _endings(module):
            by_name.setdefault(name, set()).add(module)
    selection = [module for module in all_modules if module in targets]
    return tuple(dict.fromkeys(next(n for n in _endings(module) if by_name[n] <= targets) for module in selection))


def expression(modules: Collection[str], config: ModelConfig) -> str:
    """A regular expression for PEFT that matches exactly these modules, and none of other parts of the model.

    Vision towers have modules of the same names, sometimes at paths with the same ending.
    """
    whole = f"{re.escape(config.LAYERS)}\\.\\d+\\.(?:%s)"
    inside = {module: module.removeprefix(f"{config.LAYERS}.").partition(".")[2] for module in config.lora_modules}
    names = tuple(dict.fromkeys(inside[module] for module in modules))
    everywhere = {module for module, name in inside.items() if name in names} == set(modules)
    if everywhere:
        return whole % "|".join(map(re.escape, names))
    return "|".join(map(re.escape, modules))


def target_modules_text(modules: Collection[str], config: ModelConfig) -> tuple[str, ...] | str:
    """target_modules for adapter_config.json that make PEFT choose exactly these modules: names or an expression."""
    return expression(modules, config) if config.TEXT_TYPES else shortest(modules, config)


def _endings(module: str) -> list[str]:
    """'a.b.c' -> c, b.c, a.b.c."""
    parts = module.split(".")
    return [".".join(parts[i:]) for i in range(len(parts) - 1, -1, -1)]


def _ends_with(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")
