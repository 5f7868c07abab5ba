"""Bricks of one decoder layer: what its linears, its adapters, its attention and its elementwise ops take."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from wgpu_lora.bench.recording import KeptProgram, Recording, fixed
from wgpu_lora.bench.workload import Context, ProgramWorkload, Workload
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.models.blocks.attention import KeyRanges
from wgpu_lora.models.blocks.transformer import Transformer
from wgpu_lora.models.config import MATRIX, module_of
from wgpu_lora.models.rope import RopeTable
from wgpu_lora.models.rows import Rows
from wgpu_lora.ops.attention import attention
from wgpu_lora.ops.elementwise import swiglu
from wgpu_lora.ops.linear import Linear, LoraSlots, linear
from wgpu_lora.ops.matmul import lora_nn, lora_nt, lora_tn
from wgpu_lora.ops.norm import rmsnorm
from wgpu_lora.ops.rope import rope
from wgpu_lora.weights.nf4 import NF4

READS = {"q_proj": "x", "k_proj": "x", "v_proj": "x", "o_proj": "attended", "gate_proj": "h", "up_proj": "h"}
THIN = (lora_nt, lora_nn, lora_tn)


def nf4_matmul(context: Context) -> Iterator[Workload]:
    recording = Recording(context.device, context.compute_dtype)
    _linears(context, recording, NF4.name, adapters=False)
    yield ProgramWorkload(recording, recording.forward)


def nf4_matmul_backward(context: Context) -> Iterator[Workload]:
    recording = Recording(context.device, context.compute_dtype)
    recording.record_backward(*_linears(context, recording, NF4.name, adapters=False))
    yield ProgramWorkload(recording, recording.backward)


def lora_forward(context: Context) -> Iterator[Workload]:
    recording = Recording(context.device, context.compute_dtype)
    _linears(context, recording, context.base_dtype, adapters=True)
    thin, frozen = _thin_and_frozen(recording, recording.forward)
    yield ProgramWorkload(recording, thin, beside=frozen)


def lora_backward(context: Context) -> Iterator[Workload]:
    recording = Recording(context.device, context.compute_dtype)
    recording.record_backward(*_linears(context, recording, context.base_dtype, adapters=True))
    thin, frozen = _thin_and_frozen(recording, recording.backward)
    yield ProgramWorkload(recording, thin, beside=frozen)


def attention_forward(context: Context) -> Iterator[Workload]:
    recording = Recording(context.device)
    _, pairs = _attention(context, recording)
    yield ProgramWorkload(recording, recording.forward, {"pairs": pairs})


def attention_backward(context: Context) -> Iterator[Workload]:
    recording = Recording(context.device)
    y, pairs = _attention(context, recording)
    recording.record_backward(y)
    yield ProgramWorkload(recording, recording.backward, {"pairs": pairs})


def norms(context: Context) -> Iterator[Workload]:
    """Both norms of a layer and, where the model has them, those of the heads; forward and backward."""
    config, tokens = _transformer(context), context.tokens
    recording = _there_and_back(context)
    shapes: list[tuple[int, ...]] = [(tokens, config.hidden_size)] * 2
    if config.qk_norm:
        shapes += [(tokens, heads, config.head_dim) for heads in _heads(config)]
    weights = {size: recording.input((size,), name=f"weight {size}") for size in {shape[-1] for shape in shapes}}
    ys = [rmsnorm(recording.rec, recording.tracked(s), weights[s[-1]], config.rms_norm_eps) for s in shapes]
    yield _both_ways(recording, ys)


def rotary(context: Context) -> Iterator[Workload]:
    """Of a layer's queries and keys, forward and backward."""
    config, tokens = _transformer(context), context.tokens
    recording = _there_and_back(context)
    positions = recording.input((tokens,), fixed(np.arange(tokens)), "u32", "positions")
    table = RopeTable.of(config).values(tokens)
    angles = recording.input(table.shape, fixed(table), name="rope table")
    xs = [recording.tracked((tokens, heads, config.head_dim)) for heads in _heads(config)]
    yield _both_ways(recording, [rope(recording.rec, x, positions, angles, config.head_dim) for x in xs])


def gated(context: Context) -> Iterator[Workload]:
    """SwiGLU of a layer, forward and backward."""
    recording = _there_and_back(context)
    shape = (context.tokens, _transformer(context).intermediate_size)
    yield _both_ways(recording, [swiglu(recording.rec, recording.tracked(shape), recording.tracked(shape))])


# -- parts -------------------------------------------------------------------------------------------------------------


def _linears(context: Context, recording: Recording, dtype: str, adapters: bool) -> list[Tensor]:
    """All linears of a layer, as they share their inputs; their outputs."""
    tokens, parameters = context.tokens, _transformer(context).layer(0)
    matrices = {module_of(name): item.shape for name, item in parameters.items() if item.kind == MATRIX}
    xs: dict[str, Tensor] = {}
    ranges = recording.input((1, 2), fixed(np.array([0, tokens])), "u32", "ranges") if adapters else None
    ys = []
    for number, (module, (out, size_in)) in enumerate(matrices.items()):
        reads = READS.get(module.rpartition(".")[2], "inner")
        x = xs.get(reads) or recording.tracked((tokens, size_in), reads)
        xs[reads] = x
        bias = recording.input((out,), name=f"{module}.bias") if f"{module}.bias" in parameters else None
        layer = Linear(recording.weight((out, size_in), dtype, module), bias)
        lora = _adapter(recording, context.rank, out, size_in, ranges, number) if ranges else None
        ys.append(linear(recording.rec, x, layer, lora))
    return ys


def _adapter(recording: Recording, rank: int, out: int, size_in: int, ranges: Tensor, number: int) -> LoraSlots:
    a, grad_a = (recording.input((1, rank * size_in), name=name) for name in ("A", "dA"))
    b, grad_b = (recording.input((1, out * rank), name=name) for name in ("B", "dB"))
    scale = recording.input((1,), fixed(np.ones(1)), name="scale")
    return LoraSlots(a, b, grad_a, grad_b, scale, ranges, None, number, rank)


def _thin_and_frozen(recording: Recording, whole: Program) -> tuple[Program, Program]:
    """The adapters' own dispatches of a program, and all others."""
    thin, frozen = (KeptProgram(recording.device, f"{whole.name} {part}", []) for part in ("thin", "frozen"))
    for step in whole.dispatches:
        (thin if step.kernel in THIN else frozen).dispatches.append(step)
    return thin, frozen


def _attention(context: Context, recording: Recording) -> tuple[Tensor, int]:
    """Causal attention over one row of all tokens; its output, and how many pairs of query and key it sees."""
    config, tokens = _transformer(context), context.tokens
    row = np.arange(tokens)
    bounds = KeyRanges(config.sliding_windows[0]).values(Rows(row, 0 * row, row, 0 * row, 0 * row + tokens))
    ranges = recording.input((tokens, 4), fixed(bounds), "u32", "ranges")
    heads, kv_heads = _heads(config)
    q = recording.tracked((tokens, heads, config.head_dim), "q")
    k, v = (recording.tracked((tokens, kv_heads, config.head_dim), name) for name in "kv")
    y = attention(recording.rec, q, k, v, ranges, kv_heads, config.head_dim**-0.5)
    return y, int((bounds[:, 1] - bounds[:, 0]).sum())


def _transformer(context: Context) -> Transformer:
    """The model's shape, where it is one that these bricks are of."""
    if not isinstance(context.config, Transformer):
        raise UserError(f"{context.name} has no layers of attention and a gated MLP: choose another shape or model.")
    return context.config


def _heads(config: Transformer) -> tuple[int, int]:
    return config.num_attention_heads, config.num_key_value_heads


def _there_and_back(context: Context) -> Recording:
    """A recording whose backward pass follows in the same program."""
    recording = Recording(context.device)
    recording.backward = recording.forward
    return recording


def _both_ways(recording: Recording, ys: list[Tensor]) -> Workload:
    recording.record_backward(*ys)
    return ProgramWorkload(recording, recording.forward)
