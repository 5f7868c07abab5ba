"""The interface of an architecture's GGUF form: its name, its metadata, and what llama.cpp does not support."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

if TYPE_CHECKING:
    from gguf import GGUFWriter

    from wgpu_lora.formats.gguf.header import Header

Config = TypeVar("Config")


class GGUFForm(ABC, Generic[Config]):
    """How GGUF files with the `general.architecture` `name` describe a model with the config class `Config`."""

    name: str  # general.architecture
    pretokenizer: str | None = None  # default of tokenizer.ggml.pre

    @abstractmethod
    def fields(self, header: Header) -> dict[str, Any] | None:
        """The fields of config.json; None if the file is of another architecture with the same name.

        Raises:
            UserError: the metadata are invalid or unsupported.
        """

    def passed_over(self, header: Header) -> str:
        """A pattern of tensors in a file that are not parameters."""
        return ""

    def read_tensors(self, config: Config, header: Header) -> Config:
        """The config, completed by values that the file stores as tensors."""
        return config

    def stated(self, config: Config, path: Path) -> Mapping[str, Any]:
        """Further fields for a config.json made from the file. Raises UserError if config.json cannot express it."""
        return {}

    def refusal(self, config: Config) -> str | None:
        """The property of this model, as a noun phrase, that llama.cpp does not support, if any."""
        return None

    def notes(self, config: Config) -> list[str]:
        """Notes for the user on results that differ in llama.cpp."""
        return []

    @abstractmethod
    def write(self, config: Config, writer: GGUFWriter) -> None:
        """Writes the architecture's metadata."""

    def tensors(self, config: Config) -> Mapping[str, np.ndarray]:
        """Values that are stored as float32 tensors."""
        return {}

    def widens_values(self, config: Config) -> bool:
        """Whether llama.cpp's quantiser gives attn_v a finer type in all layers, as it does for 70B models."""
        return False
