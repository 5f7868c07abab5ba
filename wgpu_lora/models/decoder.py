"""A decoder-only language model as it lies on the device, and its forward pass. Backward follows from the ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from wgpu_lora.gpu.tensor import Storage, Tensor, persistent
from wgpu_lora.models.config import LINEAR_PATHS, ModelConfig
from wgpu_lora.models.inputs import StepInputs
from wgpu_lora.ops.attention import attention
from wgpu_lora.ops.elementwise import residual, swiglu
from wgpu_lora.ops.embedding import embed, scatter_rows
from wgpu_lora.ops.linear import Linear, LoraSlots, linear
from wgpu_lora.ops.norm import rmsnorm
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.ops.rope import rope
from wgpu_lora.weights.base import MatrixSource, Shared, Weight
from wgpu_lora.weights.dense import DenseWeight
from wgpu_lora.weights.registry import declare

Adapters = Mapping[tuple[int, str], LoraSlots]  # (layer, module name) -> its adapters


@dataclass(frozen=True)
class Layer:
    """One block: its seven linears by name and its norm weights, q_norm and k_norm only where the model has them."""

    linears: dict[str, Linear[Weight]]
    norms: dict[str, Tensor]


@dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer, [capacity, kv_heads, head_dim] each, and where this step's rows go in them."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    rows: Tensor  # u32 [T]

    @classmethod
    def declare(cls, config: ModelConfig, capacity: int, rows: Tensor) -> KVCache:
        shape = (capacity, config.num_key_value_heads, config.head_dim)

        def make(kind: str) -> tuple[Tensor, ...]:
            count = config.num_hidden_layers
            return tuple(persistent(shape, "f32", "workspace", f"{kind} cache {i}") for i in range(count))

        return cls(make("key"), make("value"), rows)


@dataclass(frozen=True)
class Decoder:
    """A model's tensors. `declare` allocates nothing: a plan can be made of a declared model alone."""

    config: ModelConfig
    base_dtype: str
    embedding: DenseWeight
    layers: tuple[Layer, ...]
    final_norm: Tensor
    head: DenseWeight

    @classmethod
    def declare(
        cls,
        config: ModelConfig,
        base_dtype: str,
        table_dtype: str,
        max_binding: int,
        stored: MatrixSource | None = None,
    ) -> Decoder:
        """The tensors of a model whose embedding and LM head are stored as `table_dtype` (bf16, f16, f32).

        base_dtype: the base format of the linears, but where `stored`, a checkpoint with linears in a base format
            already, has them otherwise.
        """
        shared = Shared(max_binding)
        shapes = config.linear_shapes()

        def weight(layer: int, module: str) -> Weight:
            return declare(base_dtype, shapes[module], f"layers.{layer}.{LINEAR_PATHS[module]}", shared, stored)

        def vector(size: int, name: str) -> Tensor:
            return persistent((size,), "f32", "base", name)

        def layer(i: int) -> Layer:
            linears = {
                m: Linear(weight(i, m), vector(shapes[m][0], f"layers.{i}.{m}.bias") if config.has_bias(m) else None)
                for m in shapes
            }
            sizes = {"input_layernorm": config.hidden_size, "post_attention_layernorm": config.hidden_size}
            if config.qk_norm:
                sizes |= {"self_attn.q_norm": config.head_dim, "self_attn.k_norm": config.head_dim}
            return Layer(linears, {n: vector(size, f"layers.{i}.{n}") for n, size in sizes.items()})

        shape = (config.vocab_size, config.hidden_size)
        embedding = DenseWeight.declare(shape, table_dtype, "embed_tokens", max_binding)
        tied = config.tie_word_embeddings
        head = embedding if tied else DenseWeight.declare(shape, table_dtype, "lm_head", max_binding)
        layers = tuple(layer(i) for i in range(config.num_hidden_layers))
        return cls(config, base_dtype, embedding, layers, vector(config.hidden_size, "norm"), head)

    def weights(self) -> Iterator[Weight]:
        """Every frozen matrix, the embedding among them."""
        yield self.embedding
        if self.head is not self.embedding:
            yield self.head
        for layer in self.layers:
            yield from (item.weight for item in layer.linears.values())

    def storages(self) -> set[Storage]:
        """Everything that is loaded once and never changes."""
        found = {self.final_norm.storage}.union(*(weight.storages() for weight in self.weights()))
        for layer in self.layers:
            found |= {norm.storage for norm in layer.norms.values()}
            found |= {item.bias.storage for item in layer.linears.values() if item.bias}
        return found

    # -- forward ---------------------------------------------------------------------------------------------------

    def hidden(self, rec: Recorder, inputs: StepInputs, adapters: Adapters, cache: KVCache | None = None) -> Tensor:
        """The normalised last hidden state [T, hidden_size]."""
        x = embed(rec, inputs.ids, self.embedding)
        for i in range(len(self.layers)):
            x = rec.checkpoint(self._block(rec, i, inputs, adapters, cache), x)
        return rmsnorm(rec, x, self.final_norm, self.config.rms_norm_eps)

    def _block(
        self, rec: Recorder, index: int, inputs: StepInputs, adapters: Adapters, cache: KVCache | None
    ) -> Callable[[Tensor], Tensor]:
        layer, config = self.layers[index], self.config

        def project(
            x: Tensor, module: str, into: Tensor | None = None, first_row: int | None = None, accumulate: bool = False
        ) -> Tensor:
            lora = adapters.get((index, module))
            if lora and first_row is not None:
                lora = lora.block(first_row, first_row + x.shape[0])
            return linear(rec, x, layer.linears[module], lora, into, accumulate)

        def norm(x: Tensor, name: str) -> Tensor:
            return rmsnorm(rec, x, layer.norms[name], config.rms_norm_eps)

        def heads(x: Tensor, name: str) -> Tensor:
            x = x.reshape(x.shape[0], x.shape[1] // config.head_dim, config.head_dim)
            x = norm(x, name) if name in layer.norms else x
            return rope(rec, x, inputs.positions, inputs.rope_table, config.head_dim)

        def attend(x: Tensor, onto: Tensor | None = None) -> Tensor:
            q = heads(project(x, "q_proj"), "self_attn.q_norm")
            k = heads(project(x, "k_proj"), "self_attn.k_norm")
            v = project(x, "v_proj").reshape(*k.shape)
            if cache:
                k = _cached(rec, k, cache.keys[index], cache.rows)
                v = _cached(rec, v, cache.values[index], cache.rows)
            ranges = inputs.ranges[config.sliding_windows[index]]
            y = attention(rec, q, k, v, ranges, config.num_key_value_heads, config.head_dim**-0.5)
            y = y.reshape(y.shape[0], y.shape[1] * y.shape[2])
            return project(y, "o_proj", onto, accumulate=onto is not None)

        def mlp(x: Tensor, onto: Tensor | None = None) -> Tensor:
            y = onto or rec.temp(x.shape, name="mlp")
            for start, stop in rec.row_blocks(x.shape[0], config.intermediate_size):
                rows = x.rows(start, stop)
                inner = swiglu(rec, project(rows, "gate_proj", None, start), project(rows, "up_proj", None, start))
                project(inner, "down_proj", y.rows(start, stop), start, accumulate=onto is not None)
            return y

        def block(x: Tensor) -> Tensor:
            if not rec.training:  # nothing reads x again: what is added to it goes where it lies
                attend(norm(x, "input_layernorm"), x)
                return mlp(norm(x, "post_attention_layernorm"), x)
            x = residual(rec, x, attend(norm(x, "input_layernorm")))
            return residual(rec, x, mlp(norm(x, "post_attention_layernorm")))

        return block


def _cached(rec: Recorder, new: Tensor, cache: Tensor, rows: Tensor) -> Tensor:
    rec.dispatch(scatter_rows, new, rows, cache, rows=new.shape[0], cols=new.size // new.shape[0])
    return cache
