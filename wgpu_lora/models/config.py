"""What every architecture is: facts of config.json, and what is asked of the file that reads them."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar, Self

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.models import fields
from wgpu_lora.models.block import Block
from wgpu_lora.models.cache import CacheTensor
from wgpu_lora.models.gguf_form import GGUFForm
from wgpu_lora.models.rows import RowInput, Table

MATRIX, BIAS, VECTOR, TABLE = "matrix", "bias", "vector", "table"


@dataclass(frozen=True)
class Parameter:
    """A tensor of a layer.

    kind: a `matrix` [out, in] is kept in the base format and multiplied by, a `bias` is that of the matrix beside it,
        a `vector` is kept in float32, a `table` (the embedding and the output layer) as it is stored.
    lora: whether the matrix may carry an adapter.
    gguf: what GGUF calls it within a block, without its last part: 'attn_q'. gguf_heads: of a matrix or bias whose rows
        GGUF stores with the halves of each head interleaved, how many heads.
    """

    shape: tuple[int, ...]
    kind: str = VECTOR
    lora: bool = False
    gguf: str | None = None
    gguf_heads: int | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig(ABC):
    """The shape of a decoder-only language model, in config.json's own names, and what follows from it.

    `architecture` is config.json's model_type. `packed`: the base format that the linears are stored in, if any. A
    subclass adds the facts that its blocks need; all of them but `eos_token_ids` and `packed` are in `digest`.
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

    # Where a checkpoint has what is in no layer, and its layers.
    EMBEDDING: ClassVar[str] = "model.embed_tokens.weight"
    FINAL_NORM: ClassVar[str] = "model.norm.weight"
    HEAD: ClassVar[str] = "lm_head.weight"
    LAYERS: ClassVar[str] = "model.layers"
    POSITIONS: ClassVar[int] = 2048  # max_position_embeddings where config.json is silent
    TRANSFORMERS: ClassVar[str | None] = None  # the class of transformers, for a config.json that is made
    MODULES: ClassVar[tuple[str, ...]] = ()  # names that LoRA targets, for shell completion
    GGUF: ClassVar[GGUFForm[Any] | None] = None  # None: llama.cpp does not have it

    # -- what an architecture's file says --------------------------------------------------------------------------

    @classmethod
    @abstractmethod
    def parse(cls, d: Mapping[str, Any], where: str) -> Self:
        """Reads config.json as transformers 5 or earlier wrote it; `where` names it in errors (UserError)."""

    @abstractmethod
    def layer(self, index: int) -> Mapping[str, Parameter]:
        """The tensors of a layer by their names in it ('self_attn.q_proj.weight'), in a fixed order.

        Matrices that may carry LoRA are numbered in this order, by which their random draws are keyed.
        """

    @abstractmethod
    def block(self, block: Block, index: int, x: Tensor) -> Tensor:
        """Records a layer's forward pass, x [T, hidden_size] -> the same. Without training, x may be written over."""

    def cache(self, index: int) -> Mapping[str, CacheTensor]:
        """What a layer keeps between tokens, by the names that its block uses."""
        return {}

    def row_inputs(self) -> Sequence[RowInput]:
        """What blocks read of a batch beyond ids and positions."""
        return ()

    def tables(self) -> Sequence[Table]:
        """What blocks read that depends on positions alone."""
        return ()

    def cut(self, layers: int) -> Self:
        """The same with its first layers alone."""
        return replace(self, num_hidden_layers=layers)

    # -- what follows ----------------------------------------------------------------------------------------------

    @classmethod
    def common(cls, d: Mapping[str, Any], where: str) -> dict[str, Any]:
        """The facts that all architectures have, by field."""
        return {
            "architecture": d["model_type"],
            "vocab_size": fields.whole(d, "vocab_size", where),
            "hidden_size": fields.whole(d, "hidden_size", where),
            "num_hidden_layers": fields.whole(d, "num_hidden_layers", where),
            "rms_norm_eps": fields.epsilon(d, where),
            "max_position_embeddings": fields.whole(d, "max_position_embeddings", where, cls.POSITIONS),
            "tie_word_embeddings": fields.boolean(d, "tie_word_embeddings", where),
            "eos_token_ids": fields.token_ids(d, where),
            "packed": fields.packed(d, where),
        }

    def digest(self) -> str:
        """A sha256 (hex) of what decides what the model computes."""
        facts = {name: value for name, value in asdict(self).items() if name not in ("eos_token_ids", "packed")}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def path(self, index: int) -> str:
        """A layer's name in the checkpoint: 'model.layers.0'."""
        return f"{self.LAYERS}.{index}"

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """Every tensor that a checkpoint of this model must hold, by name."""
        table = Parameter((self.vocab_size, self.hidden_size), TABLE, gguf="token_embd")
        found = {self.EMBEDDING: table}
        for i in range(self.num_hidden_layers):
            found |= {f"{self.path(i)}.{name}": item for name, item in self.layer(i).items()}
        found[self.FINAL_NORM] = Parameter((self.hidden_size,), gguf="output_norm")
        if not self.tie_word_embeddings:
            found[self.HEAD] = replace(table, gguf="output")
        return found

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """The same, name -> shape."""
        return {name: item.shape for name, item in self.parameters.items()}

    def matrices(self) -> dict[str, tuple[int, int]]:
        """(out, in) of every matrix that the base format keeps, by the name of its tensor."""
        return {name: (i.shape[0], i.shape[1]) for name, i in self.parameters.items() if i.kind == MATRIX}

    @cached_property
    def lora_modules(self) -> dict[str, tuple[int, int]]:
        """(out, in) of every module that may carry an adapter, by its path: 'model.layers.0.self_attn.q_proj'."""
        return {module_of(name): (item.shape[0], item.shape[1]) for name, item in self.parameters.items() if item.lora}

    def gguf(self) -> GGUFForm[Any]:
        """How GGUF has it; UserError where it does not."""
        if self.GGUF is None:
            raise UserError(
                f"llama.cpp does not have the architecture {self.architecture}: write it with merge instead."
            )
        return self.GGUF


def module_of(tensor: str) -> str:
    """The module that a tensor belongs to: without its last part."""
    return tensor.rpartition(".")[0]
