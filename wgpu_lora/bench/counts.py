"""What the formulas of contracts may count of a model, by name."""

from __future__ import annotations

from math import prod

from wgpu_lora.models.config import ModelConfig


def numbers_of(config: ModelConfig) -> dict[str, float]:
    """The numbers of a config by their names in config.json, and these of its layers:

    linear_weights: values of all linear layers; matrix_weights: of those that are stored in the base format.
    linear_sizes: inputs and outputs of all linear layers.
    first_modules, first_outputs: of those that read the embedding, which need no gradient of their inputs.
    attention_layers: layers with a key-value cache.
    state_values: values of the matrices that delta nets keep of a sequence, of all layers.
    """
    first = [path for path in config.lora_modules if _attends(config, path)][:-1]
    caches = [config.cache(layer) for layer in range(config.num_hidden_layers)]
    of_sequences = [[item for item in cache.values() if item.per_sequence] for cache in caches]
    counted = {
        "linear_weights": sum(prod(shape) for shape in config.lora_modules.values()),
        "matrix_weights": sum(prod(shape) for shape in config.matrices().values()),
        "linear_sizes": sum(sum(shape) for shape in config.lora_modules.values()),
        "first_modules": len(first),
        "first_outputs": sum(config.lora_modules[path][0] for path in first),
        "attention_layers": sum(not items for items in of_sequences),
        "state_values": sum(prod(cache["state"].shape) for cache in caches if "state" in cache),
    }
    stated = {name: value for name, value in vars(config).items() if isinstance(value, int | float)}
    return {name: float(value) for name, value in {**stated, **counted}.items()}


def _attends(config: ModelConfig, path: str) -> bool:
    """Whether a module is of the first layer's attention, or of what it has instead; its last one is the output."""
    return path.startswith(f"{config.path(0)}.") and config.layer_part(path) == "attention"
