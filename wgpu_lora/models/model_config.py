"""The interface of an architecture: its config, the parameters of a layer, its forward pass and its state."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from dataclasses import fields as fields_of
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

import numpy as np

from wgpu_lora.errors import UserError
from wgpu_lora.formats.gguf.gguf_layout import PLAIN_LAYOUT, Layout
from wgpu_lora.formats.safetensors_checkpoint import TensorNames
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.models import config_fields
from wgpu_lora.models.kv_cache import CacheTensor
from wgpu_lora.models.layer_context import LayerContext
from wgpu_lora.models.row_inputs import PositionTable, RowInput

if TYPE_CHECKING:
    from gguf import GGUFWriter

    from wgpu_lora.formats.gguf.gguf_header import Header


MATRIX, KEPT, BIAS, VECTOR, TABLE = "matrix", "kept", "bias", "vector", "table"


@dataclass(frozen=True)
class Parameter:
    """A parameter of a model.

    kind: a `matrix` [out, in] is stored in the base format, one that is `kept` is too small to gain from it and has the
        checkpoint's dtype, a `bias` belongs to the matrix of the same module, a `vector` of any shape is stored in
        float32, and a `table` (the embedding and the LM head) in the checkpoint's dtype.
    lora: whether the matrix may have an adapter.
    gguf: its module in GGUF, within a block, such as 'attn_q'; its name there if it is neither a weight nor a bias.
    gguf_layout: how GGUF arranges it.
    offset: what a model adds to the values of a vector, as in norms by (1 + w). Vectors on the device and in GGUF are
        sums, those in checkpoints are not.
    """

    shape: tuple[int, ...]
    kind: str = VECTOR
    lora: bool = False
    gguf: str | None = None
    gguf_layout: Layout = PLAIN_LAYOUT
    offset: float = 0.0

    @property
    def layout(self) -> Layout:
        """How GGUF arranges it, and its offset."""
        return replace(self.gguf_layout, offset=self.offset)


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ABC):
    """The config of a decoder-only language model, with config.json's names.

    architecture: config.json's model_type.
    packed: the base format that the linear layers are stored in, if any.

    Subclasses add the fields that their blocks need. All fields except `eos_token_ids` and `packed` are in `digest`,
    those with a default only if they differ from it, so that a new one does not change the digests of other models.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    packed: str | None = None

    # Names in the checkpoint: the parameters outside of layers, and the prefix of the layers.
    EMBEDDING: ClassVar[str] = "model.embed_tokens.weight"
    FINAL_NORM: ClassVar[str] = "model.norm.weight"
    HEAD: ClassVar[str] = "lm_head.weight"
    LAYERS: ClassVar[str] = "model.layers"
    STORED: ClassVar[TensorNames] = TensorNames()  # how checkpoints name them, and what else checkpoints may hold
    # The model_types of text_config, if config.json describes a larger model that this one is the text part of.
    TEXT_TYPES: ClassVar[tuple[str, ...]] = ()
    DEFAULTS: ClassVar[Mapping[str, Any]] = {}  # of fields that published files leave out, as in transformers
    NORM_OFFSET: ClassVar[float] = 0.0  # `Parameter.offset` of the final norm
    POSITIONS: ClassVar[int] = 2048  # default of max_position_embeddings
    TRANSFORMERS: ClassVar[str | None] = None  # class in transformers, for a config.json made from a GGUF file
    AUTO_CLASS: ClassVar[str] = "AutoModelForCausalLM"  # that loads models for PEFT, with the modules named here
    # 'mlp' and 'attention' -> the prefixes of their modules in a layer: what --target-modules and mixed formats name.
    LAYER_PARTS: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    MODULES: ClassVar[tuple[str, ...]] = ()  # names that LoRA may target, for shell completion
    GGUF: ClassVar[GGUFForm[Any] | None] = None  # None if GGUF files of the architecture are not supported

    # -- defined by architectures ----------------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def parse(cls, d: Mapping[str, Any], where: str) -> Self:
        """Reads config.json's content, as written by transformers 5 or earlier.

        Args:
            where: names the source in errors.

        Raises:
            UserError: a field is missing, invalid or unsupported.
        """

    @classmethod
    def defaults(cls, d: Mapping[str, Any]) -> Mapping[str, Any]:
        """DEFAULTS, where config.json's content determines them."""
        return cls.DEFAULTS

    @abstractmethod
    def layer(self, index: int) -> Mapping[str, Parameter]:
        """The parameters of a layer by their names in it ('self_attn.q_proj.weight'), in a fixed order.

        The order numbers the modules that may have an adapter, and these numbers key dropout and initialisation.
        """

    def stacks(self, index: int) -> Sequence[Sequence[str]]:
        """Modules of a layer that read the same x, as the block passes them to `LayerContext.linears` (up to 3).

        Their matrices are stored together, if their formats allow it, so that one dispatch multiplies them.
        """
        return ()

    @abstractmethod
    def block(self, block: LayerContext, index: int, x: Tensor) -> Tensor:
        """Records a layer's forward pass, x [T, hidden_size] -> [T, hidden_size].

        Without training (`block.rec.training`), x may be overwritten.
        """

    def cache(self, index: int) -> Mapping[str, CacheTensor]:
        """The state that a layer keeps between tokens, by the names that its block uses."""
        return {}

    def row_inputs(self) -> Sequence[RowInput]:
        """The inputs that blocks need for each batch, besides ids and positions, such as key ranges."""
        return ()

    def longest_fork(self) -> int | None:
        """Tokens of the longest sequence that may share rows with another (`models.batch_inputs`), None for any. Blocks
        must then use no order of rows but positions and key ranges."""
        return 0

    def switch(self) -> int | None:
        """Tokens of the longest sequence before all of its tokens are computed in another way (`Rows.lengths`), so that
        a cache is of no use beyond; None if there is no such length."""
        return None

    def embedding_scale(self, dtype: str) -> float:
        """The factor of embeddings, of a table that is stored in this dtype."""
        return 1.0

    def logit_cap(self) -> float:
        """The soft cap of the logits (`ops.embedding`), 0 if there is none."""
        return 0.0

    def tables(self) -> Sequence[PositionTable]:
        """The tables that blocks need and that only depend on positions, such as rotary angles."""
        return ()

    def cut(self, layers: int) -> Self:
        """The config cut to its first `layers` layers."""
        return replace(self, num_hidden_layers=layers)

    # -- common to all architectures -------------------------------------------------------------------------------

    @classmethod
    def common(cls, d: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The fields that all architectures have, read from config.json. Raises UserError."""
        return {
            "architecture": d["model_type"],
            "vocab_size": config_fields.whole(d, "vocab_size", where),
            "hidden_size": config_fields.whole(d, "hidden_size", where),
            "num_hidden_layers": config_fields.whole(d, "num_hidden_layers", where),
            "rms_norm_eps": config_fields.epsilon(d, where),
            "max_position_embeddings": config_fields.whole(d, "max_position_embeddings", where, cls.POSITIONS),
            "tie_word_embeddings": config_fields.boolean(d, "tie_word_embeddings", where),
            "eos_token_ids": config_fields.token_ids(d, where),
            "packed": config_fields.packed(d, where),
        }

    def digest(self) -> str:
        """SHA-256 (hex) of the fields that determine what the model computes."""
        defaults = {item.name: item.default for item in fields_of(self)}
        facts = {
            name: value
            for name, value in asdict(self).items()
            if name not in ("eos_token_ids", "packed") and value != defaults[name]
        }
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def path(self, index: int) -> str:
        """A layer's path in the checkpoint: 'model.layers.0'."""
        return f"{self.LAYERS}.{index}"

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """All parameters of the model, by their names in the checkpoint."""
        table = Parameter((self.vocab_size, self.hidden_size), TABLE, gguf="token_embd")
        result = {self.EMBEDDING: table}
        for i in range(self.num_hidden_layers):
            result |= {f"{self.path(i)}.{name}": item for name, item in self.layer(i).items()}
        result[self.FINAL_NORM] = Parameter((self.hidden_size,), gguf="output_norm", offset=self.NORM_OFFSET)
        if not self.tie_word_embeddings:
            result[self.HEAD] = replace(table, gguf="output")
        return result

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every parameter, by name."""
        return {name: item.shape for name, item in self.parameters.items()}

    def matrices(self) -> dict[str, tuple[int, int]]:
        """(out, in) of every matrix stored in the base format, by parameter name."""
        return {name: (i.shape[0], i.shape[1]) for name, i in self.parameters.items() if i.kind == MATRIX}

    def may_be_packed(self) -> set[str]:
        """Names of the matrices that a checkpoint may have packed: also those that are kept as they are otherwise."""
        return {name for name, item in self.parameters.items() if item.kind in (MATRIX, KEPT)}

    def kept_modules(self) -> tuple[str, ...]:
        """The last parts of the paths of modules whose matrices are kept, such as 'in_proj_a'."""
        paths = (module_of(name) for name, item in self.parameters.items() if item.kind == KEPT)
        return tuple(dict.fromkeys(path.rpartition(".")[2] for path in paths))

    @cached_property
    def lora_modules(self) -> dict[str, tuple[int, int]]:
        """(out, in) of every module that may have an adapter, by path: 'model.layers.0.self_attn.q_proj'."""
        return {module_of(name): (item.shape[0], item.shape[1]) for name, item in self.parameters.items() if item.lora}

    def layer_part(self, module: str) -> str | None:
        """Which of LAYER_PARTS a module path, such as 'model.layers.0.mlp.up_proj', belongs to."""
        inside = module.removeprefix(f"{self.LAYERS}.").partition(".")[2]
        parts = ((part, f"{prefix}.") for part, prefixes in self.LAYER_PARTS.items() for prefix in prefixes)
        return next((part for part, prefix in parts if inside.startswith(prefix)), None)

    def gguf(self) -> GGUFForm[Any]:
        """The GGUF form of the architecture. Raises UserError if there is none."""
        if self.GGUF is None:
            raise UserError(
                f"GGUF files of the architecture {self.architecture} are not supported: write the model with merge."
            )
        return self.GGUF


def module_of(tensor: str) -> str:
    """The module of a parameter: its name without the last part."""
    return tensor.rpartition(".")[0]


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

    def ignored_tensors(self, header: Header) -> str:
        """A pattern of tensors in a file that are not parameters."""
        return ""

    def read_tensors(self, config: Config, header: Header) -> Config:
        """The config, completed by values that the file stores as tensors."""
        return config

    def config_fields(self, config: Config, path: Path) -> Mapping[str, Any]:
        """Further fields for a config.json made from the file. Raises UserError if config.json cannot express it."""
        return {}

    def unsupported_feature(self, config: Config) -> str | None:
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
