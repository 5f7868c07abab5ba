"""Matrices stored in a base format: as arrays, and as the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np


@dataclass(frozen=True)
class Packed:
    """A matrix [out, in] that a file stores in a base format; it is loaded without requantising.

    parts: names of its arrays, described in the format's module. read: returns the arrays in that order.
    """

    format: str
    shape: tuple[int, int]
    parts: tuple[str, ...]
    read: Callable[[], tuple[np.ndarray, ...]]


class StoredTensors(Protocol):
    """The tensors of a checkpoint as a packed form reads them (see `formats.packed.PackedCheckpoint`)."""

    @property
    def directory(self) -> Path: ...

    def __contains__(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def stored_dtype(self, name: str) -> str:
        """A tensor's dtype, in safetensors' notation."""

    def array(self, name: str, dtype: str) -> np.ndarray:
        """A tensor's values, flattened. Raises UserError unless it has this dtype, in safetensors' notation."""


class PackedForm(Protocol):
    """How checkpoints store the matrices of a base format: `BaseFormat.packed_form`."""

    @property
    def title(self) -> str:
        """Its name in messages."""

    def quantization_config(self, base_format: str, skipped: Sequence[str] = ()) -> Mapping[str, Any]:
        """The entry of config.json that is written for a model in this format.

        skipped: beginnings of the paths of modules that are not packed, besides the LM head.
        """

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The suffixes of all tensors of a packed matrix except the one with the matrix's own name."""

    def base_format(self, quantization_config: Mapping[str, Any]) -> str | None:
        """The base format that a config.json with this entry means; None if it means another form. Its values are
        untrusted and may have any type."""

    def is_packed(self, tensors: StoredTensors, name: str) -> bool:
        """Whether the tensors have the matrix of this name packed."""

    def check(self, tensors: StoredTensors, name: str, shape: tuple[int, ...], base_format: str) -> None:
        """Raises UserError unless the packed matrix is complete, has this shape and can be read.

        base_format: of the model, as config.json states it.
        """

    def read(self, tensors: StoredTensors, name: str, shape: tuple[int, ...]) -> Packed:
        """The packed matrix, checked before; its arrays are not read yet."""

    def decode(self, packed: Packed) -> np.ndarray:
        """W, float32 [out, in], of a packed matrix."""

    def tensors(self, name: str, packed: Packed, dtype: str) -> dict[str, np.ndarray]:
        """The tensors to write, by name. dtype: of the matrix before it was quantised, such as bfloat16."""
