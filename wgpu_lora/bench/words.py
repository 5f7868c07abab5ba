"""What is refused to a training run names that run's options; the same is done here by others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from wgpu_lora.errors import UserError

SIZES = "--per-device-train-batch-size or --max-length"  # what the plan says to lower
ROW = {SIZES: "--tokens", "--lora-r": "--rank"}
TRAINING = {
    "--per-device-train-batch-size": "--batch",
    "--gradient-accumulation-steps": "--accumulation",
    "--max-length": "--tokens",
    "--lora-r": "--rank",
}


@contextmanager
def own_words(names: Mapping[str, str]) -> Iterator[None]:
    """Says a UserError with other names of options: a training run's -> those of the command at hand."""
    try:
        yield
    except UserError as error:
        text = str(error)
        for theirs, ours in names.items():
            text = text.replace(theirs, ours)
        if text == str(error):
            raise
        raise UserError(text) from None
