"""What an architecture says of GGUF: its name there, its metadata, and what llama.cpp has not of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np

if TYPE_CHECKING:
    from gguf import GGUFWriter

    from wgpu_lora.formats.gguf.header import Header

Config = TypeVar("Config")


class GGUFForm(ABC, Generic[Config]):
    """How files of one `general.architecture` state a model; `Config` is the architecture's own."""

    name: str  # general.architecture
    passed_over: ClassVar[str] = ""  # a pattern of tensors that are no parameters
    pretokenizer: str | None = None  # what tokenizer.ggml.pre is in files that do not state it

    @abstractmethod
    def fields(self, header: Header) -> dict[str, Any] | None:
        """What config.json would say; None where the file is of another architecture with this name.

        UserError where the metadata make no sense or say something that is not supported.
        """

    def read_tensors(self, config: Config, header: Header) -> Config:
        """The config with what the file states as a tensor."""
        return config

    def stated(self, config: Config, path: Path) -> Mapping[str, Any]:
        """What else config.json says of a model that was read from a file; UserError where it cannot say it."""
        return {}

    def refusal(self, config: Config) -> str | None:
        """What of this model llama.cpp would not load, or compute otherwise."""
        return None

    def notes(self, config: Config) -> list[str]:
        """What llama.cpp does otherwise, for the person who exports."""
        return []

    @abstractmethod
    def write(self, config: Config, writer: GGUFWriter) -> None:
        """The architecture's own keys."""

    def tensors(self, config: Config) -> Mapping[str, np.ndarray]:
        """What is stated as float32 tensors."""
        return {}

    def widens_values(self, config: Config) -> bool:
        """Whether llama.cpp's quantiser gives attn_v a finer type throughout, as it does for models of 70B."""
        return False
