"""A decoder-only language model on the device, and its forward pass. The backward pass follows from the ops."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from wgpu_lora.gpu.tensor import Storage, Tensor, persistent, share_storage
from wgpu_lora.models.batch_inputs import StepInputs
from wgpu_lora.models.kv_cache import LayerCache
from wgpu_lora.models.layer_context import Adapters, LayerContext, LayerWeights
from wgpu_lora.models.model_config import BIAS, KEPT, MATRIX, VECTOR, ModelConfig, module_of
from wgpu_lora.ops.embedding import embed
from wgpu_lora.ops.linear.linear import Linear
from wgpu_lora.ops.norm import rmsnorm
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.weights.base import Shared, StoredFormats, StoredMatrix, Table, Weight
from wgpu_lora.weights.base_formats import GGUF_PATTERN, declare
from wgpu_lora.weights.dense import DenseWeight
from wgpu_lora.weights.gguf.gguf_weight import GGUFTable


@dataclass(frozen=True)
class Decoder:
    """A model's tensors. `declare` allocates nothing, so that memory can be planned before weights are loaded."""

    config: ModelConfig
    base_dtype: str
    embedding: Table
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    head: Table

    @classmethod
    def declare(
        cls,
        config: ModelConfig,
        base_dtype: str,
        table_dtype: str,
        max_binding: int,
        formats: StoredFormats | None = None,
    ) -> Decoder:
        """Declares the tensors of a model.

        Args:
            table_dtype: dtype of the embedding, the LM head and matrices that are kept: bf16, f16 or f32.
            base_dtype: base format of the other linear layers if `formats` is None.
            formats: a checkpoint whose matrices keep the base formats that they are stored in.
        """
        shared = Shared(max_binding)

        def vector(shape: tuple[int, ...], name: str) -> Tensor:
            return persistent(shape, "f32", "base", name)

        def table(name: str, cap: float) -> Table:
            kind = formats.base_format(name) if formats else None
            if kind and re.fullmatch(GGUF_PATTERN, kind):
                return GGUFTable.declare(shape, kind, name, max_binding, cap)
            return DenseWeight.declare(shape, table_dtype, name, max_binding, cap)

        def layer(i: int) -> LayerWeights:
            path, parameters = config.path(i), config.layer(i)
            vectors = {n: vector(p.shape, f"{path}.{n}") for n, p in parameters.items() if p.kind in (BIAS, VECTOR)}
            linears = {}
            for name, item in parameters.items():
                if item.kind in (MATRIX, KEPT):
                    out, size_in = item.shape
                    dtype = base_dtype if item.kind == MATRIX else table_dtype
                    weight = declare(dtype, (out, size_in), f"{path}.{name}", shared, formats)
                    module = module_of(name)
                    linears[module] = Linear(weight, vectors.pop(f"{module}.bias", None))
            for stack in config.stacks(i):
                linears |= _stored_together({module: linears[module] for module in stack}, max_binding)
            weights: Sequence[Weight] = [item.weight for item in linears.values()]
            for kind in dict.fromkeys(type(weight) for weight in weights):
                weights = kind.of_layer(weights)
            pairs = zip(linears.items(), weights, strict=True)
            return LayerWeights(path, {module: Linear(weight, item.bias) for (module, item), weight in pairs}, vectors)

        shape = (config.vocab_size, config.hidden_size)
        tied, cap = config.tie_word_embeddings, config.logit_cap()
        embedding = table(config.EMBEDDING, cap if tied else 0.0)
        head = embedding if tied else table(config.HEAD, cap)
        layers = tuple(layer(i) for i in range(config.num_hidden_layers))
        return cls(config, base_dtype, embedding, layers, vector((config.hidden_size,), config.FINAL_NORM), head)

    def matrices(self) -> Iterator[tuple[str, StoredMatrix]]:
        """Yields every frozen matrix, including the embedding, with its name in the checkpoint."""
        yield self.config.EMBEDDING, self.embedding
        if self.head is not self.embedding:
            yield self.config.HEAD, self.head
        for layer in self.layers:
            yield from ((f"{layer.path}.{module}.weight", item.weight) for module, item in layer.linears.items())

    def vectors(self) -> Iterator[tuple[str, Tensor]]:
        """Yields the other parameters, which are stored in float32: norms, biases and other vectors."""
        yield self.config.FINAL_NORM, self.final_norm
        for layer in self.layers:
            yield from ((f"{layer.path}.{name}", tensor) for name, tensor in layer.vectors.items())
            for module, item in layer.linears.items():
                if item.bias:
                    yield f"{layer.path}.{module}.bias", item.bias

    def weights(self) -> Iterator[StoredMatrix]:
        """Every frozen matrix."""
        return (weight for _, weight in self.matrices())

    def storages(self) -> set[Storage]:
        """The storages of all frozen parameters."""
        return {tensor.storage for _, tensor in self.vectors()}.union(*(weight.storages() for weight in self.weights()))

    # -- forward ---------------------------------------------------------------------------------------------------

    def hidden(
        self, rec: Recorder, inputs: StepInputs, adapters: Adapters, caches: tuple[LayerCache, ...] | None = None
    ) -> Tensor:
        """Records the forward pass; returns the normalised last hidden state, f32 [T, hidden_size].

        caches: in generation, the state of each layer.
        """
        x = embed(rec, inputs.ids, self.embedding, scale=self.config.embedding_scale(self.embedding.dtype))
        for i, layer in enumerate(self.layers):
            block = LayerContext(rec, layer, inputs, adapters, caches[i] if caches else None)
            x = rec.checkpoint(partial(self.config.block, block, i), x)
        return rmsnorm(rec, x, self.final_norm, self.config.rms_norm_eps)


def _stored_together(linears: dict[str, Linear[Weight]], max_binding: int) -> dict[str, Linear[Weight]]:
    """Layers that read the same x, with matrices and biases in shared storages if one dispatch can multiply them."""
    first, *others = (item.weight for item in linears.values())
    weights = first.stacked(others, max_binding)
    biases = [item.bias for item in linears.values() if item.bias]
    together: Sequence[Tensor | None] = [item.bias for item in linears.values()]
    if len(biases) == len(linears):
        together = share_storage(biases, f"{biases[0].name} and others")
    pairs = zip(linears, weights, together, strict=True)
    return {module: Linear(weight, bias) for module, weight, bias in pairs}
