"""Whether an adapter's matrices are of a model's modules."""

from __future__ import annotations

from pathlib import Path

from wgpu_lora.errors import UserError
from wgpu_lora.formats.peft import Matrices
from wgpu_lora.models.config import ModelConfig


def check_fits(config: ModelConfig, matrices: Matrices, adapter: Path | str, model: str = "the model") -> None:
    """Raises UserError unless every module of an adapter is one that the model allows, with the right shape."""
    for module, (a, b, *magnitude) in matrices.items():
        have, need = (b.shape[0], a.shape[1]), config.lora_modules.get(module)
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
