"""What a model keeps between tokens: keys and values, or whatever else its layers declare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wgpu_lora.gpu.tensor import Storage, Tensor, persistent
from wgpu_lora.ops.embedding import gather_rows, scatter_rows
from wgpu_lora.ops.recorder import Recorder


@dataclass(frozen=True)
class CacheTensor:
    """A tensor of a layer's state, f32. `shape` is what is kept of one token, or of a sequence as a whole."""

    shape: tuple[int, ...]
    per_sequence: bool = False


@dataclass(frozen=True)
class LayerCache:
    """One layer's tensors as a step's block sees them.

    rows: u32 [T], where each row of the step lies in tensors by token. newest: u32 [batch], each sequence's last row of
    the step, NOWHERE for sequences that have none; only where a layer has tensors by sequence.
    """

    tensors: Mapping[str, Tensor]
    rows: Tensor
    newest: Tensor | None

    def append(self, rec: Recorder, name: str, new: Tensor) -> Tensor:
        """Puts a step's rows [T, ...] where they belong; all tokens so far, [batch * capacity, ...]."""
        cache = self.tensors[name]
        rec.dispatch(scatter_rows, new, self.rows, cache, rows=new.shape[0], cols=new.size // new.shape[0])
        return cache

    def replace(self, rec: Recorder, name: str, new: Tensor) -> None:
        """Keeps of a step's rows [T, ...] each sequence's newest, in the tensor by sequence of this name."""
        cache = self.tensors[name]
        assert self.newest is not None, "no layer has a tensor by sequence"
        rec.dispatch(gather_rows, new, self.newest, cache, rows=cache.shape[0], cols=cache.size // cache.shape[0])


@dataclass(frozen=True)
class Cache:
    """Every layer's state of `batch` sequences: [batch * capacity, ...] by token, [batch, ...] by sequence."""

    layers: tuple[Mapping[str, Tensor], ...]
    by_sequence: bool  # some of it is

    @classmethod
    def declare(cls, layers: Sequence[Mapping[str, CacheTensor]], batch: int, capacity: int) -> Cache:
        """The tensors that layers ask for; nothing is allocated."""

        def make(name: str, item: CacheTensor, layer: int) -> Tensor:
            rows = batch if item.per_sequence else batch * capacity
            return persistent((rows, *item.shape), "f32", "workspace", f"{name} of layer {layer}")

        tensors = tuple({name: make(name, item, i) for name, item in asked.items()} for i, asked in enumerate(layers))
        return cls(tensors, any(item.per_sequence for asked in layers for item in asked.values()))

    @property
    def rewinds(self) -> bool:
        """Whether a sequence can be taken up at any token that it has had: not where a layer keeps only the newest."""
        return not self.by_sequence

    def largest(self) -> tuple[str, int]:
        """What the largest tensor of a layer is called, and its bytes."""
        found = [(tensor.nbytes, name) for layer in self.layers for name, tensor in layer.items()]
        nbytes, name = max(found, default=(0, "nothing"))
        return name, nbytes

    def layer(self, index: int, rows: Tensor, newest: Tensor | None) -> LayerCache:
        return LayerCache(self.layers[index], rows, newest)

    def storages(self) -> set[Storage]:
        return {tensor.storage for layer in self.layers for tensor in layer.values()}
