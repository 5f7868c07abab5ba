"""The state that layers keep between tokens: keys and values, or other tensors that they declare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wgpu_lora.gpu.tensor import Storage, Tensor, persistent
from wgpu_lora.ops.embedding import gather_rows
from wgpu_lora.ops.recorder import Recorder


@dataclass(frozen=True)
class CacheTensor:
    """A tensor of a layer's state. shape: per token, or per sequence if `per_sequence`, which is always f32."""

    shape: tuple[int, ...]
    per_sequence: bool = False


@dataclass(frozen=True)
class LayerCache:
    """A layer's state in a recorded step of T rows.

    rows: u32 [T], the index of each row of the step in per-token tensors.
    blocks: u32 [count], the blocks of the step's sequences in them, one sequence after the other (`ops.attention`).
    newest: u32 [sequences], the last row of each sequence in the step, or NOWHERE; None without per-sequence tensors.
    """

    tensors: Mapping[str, Tensor]
    rows: Tensor
    blocks: Tensor
    newest: Tensor | None

    def token_tensors(self, *names: str) -> tuple[Tensor, ...]:
        """Per-token tensors [tokens, ...] by name, and the row of each of the step's rows in them."""
        return (*(self.tensors[name] for name in names), self.rows)

    def replace(self, rec: Recorder, name: str, new: Tensor) -> None:
        """Stores each sequence's last row of the step's rows [T, ...] in a per-sequence tensor, [sequences, ...]."""
        cache = self.tensors[name]
        assert self.newest is not None, "no layer has per-sequence tensors"
        rec.dispatch(gather_rows, new, self.newest, cache, rows=cache.shape[0], cols=cache.size // cache.shape[0])


@dataclass(frozen=True)
class Cache:
    """The state of all layers: [tokens, ...] per token, [sequences, ...] per sequence."""

    layers: tuple[Mapping[str, Tensor], ...]
    by_sequence: bool  # whether any layer has per-sequence tensors

    @classmethod
    def declare(
        cls, layers: Sequence[Mapping[str, CacheTensor]], sequences: int, tokens: int, dtype: str = "f32"
    ) -> Cache:
        """Declares the tensors that the layers ask for, without allocating them. dtype: of those per token."""

        def make(name: str, item: CacheTensor, layer: int) -> Tensor:
            rows, kind = (sequences, "f32") if item.per_sequence else (tokens, dtype)
            return persistent((rows, *item.shape), kind, "cache", f"{name} of layer {layer}")

        tensors = tuple(
            {name: make(name, item, i) for name, item in layer_items.items()} for i, layer_items in enumerate(layers)
        )
        return cls(tensors, any(item.per_sequence for layer_items in layers for item in layer_items.values()))

    @property
    def shares_prefixes(self) -> bool:
        """Whether a sequence can begin with another one's tokens. Per-sequence tensors only have the newest state."""
        return not self.by_sequence

    def largest(self) -> tuple[str, int]:
        """Name and bytes of a layer's largest tensor."""
        result = [(tensor.nbytes, name) for layer in self.layers for name, tensor in layer.items()]
        nbytes, name = max(result, default=(0, "nothing"))
        return name, nbytes

    def layer(self, index: int, rows: Tensor, blocks: Tensor, newest: Tensor | None) -> LayerCache:
        return LayerCache(self.layers[index], rows, blocks, newest)

    def storages(self) -> set[Storage]:
        return {tensor.storage for layer in self.layers for tensor in layer.values()}
