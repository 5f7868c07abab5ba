"""Resolves PEFT's `target_modules` to modules of a model."""

from __future__ import annotations

import re
from collections.abc import Collection

from wgpu_lora.errors import UserError
from wgpu_lora.models.config import ModelConfig, module_of
from wgpu_lora.names.naming import flag
from wgpu_lora.patterns import first_matches

ALL = "all-linear"
_NAMES = re.compile(r"[\w.,\s-]*")


def target_names(target_modules: str) -> tuple[str, ...] | None:
    """The names in a comma-separated list; None for a regular expression."""
    if not _NAMES.fullmatch(target_modules):
        return None
    return tuple(name.strip() for name in target_modules.split(",") if name.strip())


def targeted(target_modules: str, config: ModelConfig) -> list[str]:
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
            (found,) = first_matches([[target_modules]], modules)
        except UserError as error:
            raise UserError(f"{flag('target_modules')} cannot be used: {error}.") from None
        chosen = [module for module, number in zip(modules, found, strict=True) if number is not None]
        if not chosen:
            raise UserError(
                f"{flag('target_modules')} '{target_modules:.80}' matches none of the model's modules: match paths "
                f"such as {modules[0]}, or name modules, or use '{ALL}'."
            )
        return chosen
    wanted: set[str] = set()
    for name in names:
        named = [module for module in modules if _ends_with(module, name)]
        named = named or [module for module in modules if config.layer_part(module) == name]
        if not named:
            there = ", ".join((*shortest(modules, config), *config.LAYER_PARTS))
            raise UserError(f"{flag('target_modules')} has no '{name:.40}': choose among {there}, or '{ALL}'.")
        wanted.update(named)
    return [module for module in modules if module in wanted]


def shortest(modules: Collection[str], config: ModelConfig) -> tuple[str, ...]:
    """The shortest names that select exactly these modules, in the model's order."""
    may, chosen = config.may_be_packed(), set(modules)
    everything = [module_of(name) for name in config.parameters if name in may]
    by_name: dict[str, set[str]] = {}
    for module in everything:
        for name in _endings(module):
            by_name.setdefault(name, set()).add(module)
    ordered = [module for module in everything if module in chosen]
    return tuple(dict.fromkeys(next(n for n in _endings(module) if by_name[n] <= chosen) for module in ordered))


def expression(modules: Collection[str], config: ModelConfig) -> str:
    """A regular expression for PEFT that matches exactly these modules, and none of other parts of the model.

    Vision towers have modules of the same names, sometimes at paths with the same ending.
    """
    whole = f"{re.escape(config.LAYERS)}\\.\\d+\\.(?:%s)"
    inside = {module: module.removeprefix(f"{config.LAYERS}.").partition(".")[2] for module in config.lora_modules}
    wanted = tuple(dict.fromkeys(inside[module] for module in modules))
    everywhere = {module for module, name in inside.items() if name in wanted} == set(modules)
    if everywhere:
        return whole % "|".join(map(re.escape, wanted))
    return "|".join(map(re.escape, modules))


def stated(modules: Collection[str], config: ModelConfig) -> tuple[str, ...] | str:
    """target_modules for adapter_config.json that make PEFT choose exactly these modules: names or an expression."""
    return expression(modules, config) if config.TEXT_TYPES else shortest(modules, config)


def _endings(module: str) -> list[str]:
    """'a.b.c' -> c, b.c, a.b.c."""
    parts = module.split(".")
    return [".".join(parts[i:]) for i in range(len(parts) - 1, -1, -1)]


def _ends_with(module: str, name: str) -> bool:
    return module == name or module.endswith(f".{name}")
