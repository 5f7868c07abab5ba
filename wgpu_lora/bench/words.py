"""What is refused to a training run names that run's options; the same is done here by others."""

from __future__ import annotations

from contextlib import AbstractContextManager

from wgpu_lora.names.naming import COMMAND_LINE, naming, renamed

ROW = {"per_device_train_batch_size": "tokens", "max_length": "tokens", "lora_r": "rank"}
TRAINING = {
    "per_device_train_batch_size": "batch",
    "gradient_accumulation_steps": "accumulation",
    "max_length": "tokens",
    "lora_r": "rank",
}


def own_words(names: dict[str, str]) -> AbstractContextManager[None]:
    """Calls options by other names meanwhile: a training run's -> those of the command at hand."""
    return naming(renamed(names, COMMAND_LINE))
