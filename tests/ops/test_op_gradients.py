"""Each float64 reference of a backward kernel against central differences of its forward reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.kernels.attention import forked, packed
from support.models import allocated

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.kernel import Kernel
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import Tensor, persistent
from wgpu_lora.models.batch_inputs import write
from wgpu_lora.ops.attention.attention import (
    attention_backward_kv,
    attention_backward_q,
    attention_forward,
    attention_stats,
)
from wgpu_lora.ops.attention.rope import rope_backward, rope_forward
from wgpu_lora.ops.elementwise import (
    copy,
    dropout_apply,
    geglu_backward,
    geglu_forward,
    swiglu_backward,
    swiglu_forward,
)
from wgpu_lora.ops.embedding import cap_gradient, cap_logits
from wgpu_lora.ops.loss import loss
from wgpu_lora.ops.loss.loss import (
    Targets,
    VocabularyGradient,
    logprob_gradient,
    seed,
    softmax_chunk,
    target_logprobs,
    vocabulary_logprobs,
)
from wgpu_lora.ops.matmul.matmul import lora_nn, lora_nt, lora_tn, matmul_nn, matmul_nt
from wgpu_lora.ops.norm import rmsnorm_backward, rmsnorm_forward
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.weights.dense import DenseWeight
from wgpu_lora.weights.lowbit.lowbit_layout import constant_count, decode_device, table_size, word_rows
from wgpu_lora.weights.lowbit.lowbit_training import codes_gradient, codes_gradient_sum

STEP = 1e-5
RANGES = np.array([(1, 4), (4, 4), (5, 7)], np.uint32)  # rows 0, 4 and 7 belong to no slot


def differences(forward: Callable[[np.ndarray], np.ndarray], x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    """d (forward(x) · dy) / dx, one value at a time."""
    gradient = np.zeros(x.size)
    for i in range(x.size):
        shift = np.zeros(x.size)
        shift[i] = STEP
        shift = shift.reshape(x.shape)
        gradient[i] = ((forward(x + shift) - forward(x - shift)).reshape(-1) * dy.reshape(-1)).sum() / (2 * STEP)
    return gradient.reshape(x.shape)


def agree(gradient: Any, forward: Callable[[np.ndarray], np.ndarray], x: np.ndarray, dy: np.ndarray) -> None:
    np.testing.assert_allclose(np.reshape(gradient, x.shape), differences(forward, x, dy), rtol=1e-6, atol=1e-8)


def test_rmsnorm(rng: np.random.Generator) -> None:
    x, weight, dy, shape = rng.normal(size=(3, 5)), rng.normal(size=5), rng.normal(size=(3, 5)), {"rows": 3, "cols": 5}
    _, rstd = rmsnorm_forward(x, weight, None, None, eps=1e-3, **shape)
    gradient = rmsnorm_backward(x, weight, rstd, dy, None, **shape)
    agree(gradient, lambda x: rmsnorm_forward(x, weight, None, None, eps=1e-3, **shape)[0], x, dy)
    before = rng.normal(size=(3, 5))
    added = rmsnorm_backward(x, weight, rstd, dy, before, accumulate=True, **shape)
    np.testing.assert_allclose(added, before + gradient)


@pytest.mark.parametrize("rotated", [6, 2])
@pytest.mark.parametrize("norm", [False, True])
def test_rope(rng: np.random.Generator, norm: bool, rotated: int) -> None:
    shape = {"rows": 4, "heads": 3, "kv_heads": 2, "dim": 6, "eps": 1e-3, "q_first": 0, "k_first": 72}
    shape |= {"yq_first": 0, "yk_first": 72, "rotated": rotated}
    angle, positions = rng.random((9, rotated // 2)), np.array([3, 0, 8, 3], np.uint32)
    at = positions, np.stack([np.cos(angle), np.sin(angle)], axis=2)
    x, dy = rng.normal(size=(2, 4 * 5 * 6))
    weights = rng.normal(size=(2, 6)) if norm else (None, None)
    gradient = rope_backward(dy, *at, x, *weights, np.zeros_like(x) if norm else None, **shape)
    agree(gradient[1] if norm else gradient, lambda x: rope_forward(x, *at, *weights, **shape)[0], x, dy)


@pytest.mark.parametrize(("forward", "backward"), [(swiglu_forward, swiglu_backward), (geglu_forward, geglu_backward)])
def test_gates(rng: np.random.Generator, forward: Kernel, backward: Kernel) -> None:
    gate, up, dy = 2 * rng.normal(size=(3, 17))
    dgate, dup = backward(gate, up, dy, None, None, size=17)
    agree(dgate, lambda gate: forward(gate, up, None, size=17), gate, dy)
    agree(dup, lambda up: forward(gate, up, None, size=17), up, dy)


def test_a_soft_cap(rng: np.random.Generator) -> None:
    x, dy, at = 4 * rng.normal(size=17), rng.normal(size=17), {"size": 17, "cap": 2.5}
    agree(cap_gradient(dy, cap_logits(x, **at), None, **at), lambda x: cap_logits(x, **at), x, dy)


@pytest.mark.parametrize(("group", "cap"), [(1, 0.0), (2, 0.8), (4, 0.0)])
@pytest.mark.parametrize(
    "ranges",
    [packed(5), packed(3, 1, 2), packed(2, 5, window=3), forked((2, 2, 1), (1, 1, 2))],
    ids=["one", "packed", "window", "forked"],
)
def test_attention(rng: np.random.Generator, ranges: np.ndarray, group: int, cap: float) -> None:
    rows, kv_heads, dim = len(ranges), 2, 3
    shape: dict[str, Any] = {"rows": rows, "kv_heads": kv_heads, "group": group, "dim": dim, "scale": 0.7, "cap": cap}
    q, dy = rng.normal(size=(2, rows, kv_heads * group, dim))
    k, v = rng.normal(size=(2, rows, kv_heads, dim))

    def forward(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        return attention_forward(q, k, v, ranges, None, None, keys=rows, **shape)[0]

    y, lse = attention_forward(q, k, v, ranges, None, None, keys=rows, **shape)
    stats = attention_stats(y.reshape(-1), dy.reshape(-1), lse, None, rows=rows * kv_heads * group, dim=dim)
    agree(attention_backward_q(q, k, v, dy, stats, ranges, None, keys=rows, **shape), lambda q: forward(q, k, v), q, dy)
    dk, dv = attention_backward_kv(q, k, v, dy, stats, ranges, None, None, **shape)
    agree(dk, lambda k: forward(q, k, v), k, dy)
    agree(dv, lambda v: forward(q, k, v), v, dy)


@pytest.mark.parametrize(("bits", "group"), [(2, 16), (3, 16), (4, 32), (8, 16), (2, 0), (3, 0), (4, 0), (8, 0)])
def test_constants_of_codes(rng: np.random.Generator, bits: int, group: int) -> None:
    """By way of dW of a block of rows, in slices of the inputs: tables, and scales of groups or of rows."""
    out, size_in, first, columns = 5, 160 if group else 139, 1, 3
    codes = rng.integers(0, 2**32, (word_rows(size_in, bits), out), np.uint32)
    constants, dw = rng.normal(size=constant_count(out, size_in, bits, group)), rng.normal(size=(size_in, columns))
    shape = {"columns": columns, "first": first}
    present = np.zeros(1) if table_size(bits) or not group else None
    gradient = np.zeros_like(constants)
    results = codes_gradient(
        dw, codes, constants, gradient, present, out=out, size_in=size_in, bits=bits, group=group, **shape
    )
    if group:
        gradient, *results = results
    for partials in results:
        sums = {"slices": len(partials), "entries": partials.shape[1]}
        gradient = codes_gradient_sum(partials, gradient, **sums, **shape)

    def weights(constants: np.ndarray) -> np.ndarray:
        return decode_device(codes, constants, (out, size_in), bits, group)[first : first + columns].T

    agree(gradient, weights, constants, dw)


def test_attention_that_sees_nothing_is_zero(rng: np.random.Generator) -> None:
    q, k, v = rng.normal(size=(3, 2, 1, 3))
    ranges = np.array([(1, 1, 1, 0), (0, 2, 2, 0)], np.uint32)
    y, _ = attention_forward(q, k, v, ranges, None, None, rows=2, keys=2, kv_heads=1, group=1, dim=3, scale=1.0)
    assert (y[0] == 0).all()
    assert (y[1] != 0).all()


def cross_entropy(
    hidden: np.ndarray, head: np.ndarray, targets: np.ndarray, weight: np.ndarray, chunk: int, cap: float = 0.0
) -> Any:
    """The pass of ops/loss/loss.py: (-log p, gradient of the sum of those times weight by hidden)."""
    rows, cols = hidden.shape
    state, rescale, dh = np.full((rows, 4), np.nan), np.full(rows, np.nan), np.full((rows, cols), np.nan)
    for first in range(0, len(head), chunk):
        part = head[first : first + chunk]
        shape = {"m": rows, "n": len(part), "k": cols}
        logits = matmul_nt(hidden, part, np.zeros((rows, len(part))), **shape)
        logits = cap_logits(logits, size=logits.size, cap=cap) if cap else logits
        p, state, rescale = softmax_chunk(
            logits, targets, np.array([rows]), state, rescale, rows=rows, cols=len(part), first=first, cap=cap
        )
        dh = matmul_nn(p, part, dh, rescale if first else None, m=rows, n=cols, k=len(part))
    logprobs = target_logprobs(state, np.array([rows]), None, rows=rows)
    at = state, weight, np.array([rows]), head[targets], dh
    return -logprobs, logprob_gradient(*at, rows=rows, cols=cols, cap=cap)


@pytest.mark.parametrize("cap", [0.0, 3.0])
@pytest.mark.parametrize("chunk", [4, 13])
def test_cross_entropy(rng: np.random.Generator, chunk: int, cap: float) -> None:
    hidden, head = rng.normal(size=(3, 5)), 3 * rng.normal(size=(13, 5))
    targets, weight = np.array([0, 12, 5]), np.array([0.5, 0.0, 2.0])
    losses, gradient = cross_entropy(hidden, head, targets, weight, chunk, cap)
    logits = hidden @ head.T
    logits = cap * np.tanh(logits / cap) if cap else logits
    expected = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(3), targets]
    np.testing.assert_allclose(losses, expected)
    agree(gradient, lambda h: cross_entropy(h, head, targets, weight, chunk, cap)[0], hidden, weight)


def test_dense_product(rng: np.random.Generator) -> None:
    x, w, dy, bias = rng.normal(size=(3, 5)), rng.normal(size=(4, 5)), rng.normal(size=(3, 4)), rng.normal(size=4)
    gradient = matmul_nn(dy, w, np.zeros((3, 5)), m=3, n=5, k=4)
    agree(gradient, lambda x: matmul_nt(x, w, np.zeros((3, 4)), bias, m=3, n=4, k=5), x, dy)


def test_lora(rng: np.random.Generator) -> None:
    rows, size_in, rank, out, slots = 8, 5, 2, 3, 3
    x, dy = rng.normal(size=(rows, size_in)), rng.normal(size=(rows, out))
    a, b = rng.normal(size=(slots, rank * size_in)), rng.normal(size=(slots, out * rank))
    scale = np.repeat(rng.normal(size=(slots, 1)), rank, axis=1)
    at_a, at_b = {"slots": slots, "stride": rank * size_in}, {"slots": slots, "stride": out * rank}

    def hidden(x: np.ndarray, a: np.ndarray) -> np.ndarray:
        return lora_nt(x, a, np.zeros((rows, rank)), RANGES, scale, m=rows, n=rank, k=size_in, **at_a)

    def forward(x: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return lora_nt(hidden(x, a), b, np.zeros((rows, out)), RANGES, m=rows, n=out, k=rank, accumulate=True, **at_b)

    assert (forward(x, a, b)[[0, 4, 7]] == 0).all()
    dh = lora_nn(dy, b, np.zeros((rows, rank)), RANGES, scale, m=rows, n=rank, k=out, **at_b)
    dx = lora_nn(dh, a, np.zeros((rows, size_in)), RANGES, m=rows, n=size_in, k=rank, accumulate=True, **at_a)
    agree(dx, lambda x: forward(x, a, b), x, dy)
    grad_b = lora_tn(dy, hidden(x, a), np.zeros(b.shape), RANGES, m=out, n=rank, k=rows, **at_b)
    agree(grad_b, lambda b: forward(x, a, b), b, dy)
    grad_a = lora_tn(dh, x, np.zeros(a.shape), RANGES, m=rank, n=size_in, k=rows, **at_a)
    agree(grad_a, lambda a: forward(x, a, b), a, dy)


def test_dropout(rng: np.random.Generator) -> None:
    rows, cols, p = 7, 19, 0.3
    draws = rng.integers(0, 2**32, (rows, 4), np.uint32)
    draws[:, 2], draws[:, 3] = p * 2**32, np.float32(1 / (1 - p)).view(np.uint32)
    x, dy = rng.normal(size=(rows, cols)), rng.normal(size=(rows, cols))
    shape = {"rows": rows, "cols": cols, "module": 3}
    gradient = dropout_apply(dy, draws, np.zeros((rows, cols)), accumulate=True, **shape)
    agree(gradient, lambda x: dropout_apply(x, draws, x, **shape), x, dy)


def test_dropout_keeps_its_share_and_the_mean(rng: np.random.Generator) -> None:
    rows, cols, p = 400, 100, 0.3
    draws = rng.integers(0, 2**32, (rows, 4), np.uint32)
    draws[:, 2], draws[:, 3] = p * 2**32, np.float32(1 / (1 - p)).view(np.uint32)
    y = dropout_apply(np.ones((rows, cols)), draws, np.zeros((rows, cols)), rows=rows, cols=cols, module=0)
    other = dropout_apply(np.ones((rows, cols)), draws, np.zeros((rows, cols)), rows=rows, cols=cols, module=1)
    assert abs((y == 0).mean() - p) < 0.01
    assert abs(y.mean() - 1) < 0.015
    assert abs(((y == 0) & (other == 0)).mean() - p * p) < 0.01  # modules draw independently


# -- the pass over the vocabulary --------------------------------------------------------------------------------------


ROWS, VOCAB, COLS, KEPT, TEMPERATURE = 6, 300, 20, 3, 2.0


def softmax(logits: np.ndarray) -> np.ndarray:
    p = np.exp(logits - logits.max(axis=1, keepdims=True))
    return p / p.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_all_derivatives_reach_the_hidden_states(
    device: Device, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch, cap: float
) -> None:
    """Of log-probabilities, of the logits of a support, and of those that are not in it at two temperatures. A row has
    either a weight or a support."""
    monkeypatch.setattr(loss, "CHUNK_BYTES", 4 * ROWS * 128)
    h, w = rng.normal(size=(ROWS, COLS)).astype(np.float32), rng.normal(size=(VOCAB, COLS)).astype(np.float32)
    targets, plain = rng.integers(0, VOCAB, ROWS), np.arange(ROWS) % 2 == 0
    ids = np.stack([rng.permutation(VOCAB)[:KEPT] for _ in range(ROWS)])
    ids[plain] = 0xFFFFFFFF
    weights = np.where(plain, rng.normal(size=ROWS), 0)
    rests = {t: np.where(plain, 0, rng.normal(size=ROWS)) for t in (1.0, TEMPERATURE)}
    beta = np.where(plain[:, None], 0, rng.normal(size=(ROWS, KEPT)))

    uploads: list[tuple[Tensor, np.ndarray]] = []

    def upload_values(name: str, values: np.ndarray, dtype: str = "f32") -> Tensor:
        tensor = persistent(values.shape, dtype, "workspace", name)
        uploads.append((tensor, values))
        return tensor

    program = Program(device)
    rec = Recorder(program, training=True)
    hidden, head = upload_values("hidden", h), DenseWeight((upload_values("head", w),), "f32", cap)
    rec.node(lambda: None, inputs=[], outputs=[hidden], trains=True)
    at = Targets(
        upload_values("rows", np.arange(ROWS), "u32"),
        upload_values("ids", targets, "u32"),
        upload_values("count", np.array([ROWS]), "u32"),
    )
    support = upload_values("support", ids, "u32")
    vocabulary = vocabulary_logprobs(rec, hidden, head, at, temperatures=(1.0, TEMPERATURE), supports=[support])
    by_rest = {t: [upload_values(f"rest {t}", values)] for t, values in rests.items()}
    seed(
        vocabulary,
        VocabularyGradient({1.0: upload_values("weights", weights)}, by_rest, {support: upload_values("beta", beta)}),
    )
    rec.backward()
    out = persistent((ROWS, COLS), "f32", "workspace", "out")
    program.dispatch(copy, rec.gradient(hidden), out, size=out.size)
    logprobs = persistent((ROWS,), "f32", "workspace", "logprobs")
    program.dispatch(copy, vocabulary.logprobs, logprobs, size=ROWS)
    with allocated(device, program, {tensor.storage for tensor, _ in uploads}) as arena:
        program.build(arena)
        for tensor, values in uploads:
            write(device, tensor, values)
        program.run()
        gradient = device.read(out.storage.buffer).view(np.float32).reshape(ROWS, COLS)
        actual_logprobs = device.read(logprobs.storage.buffer).view(np.float32)

    raw = h.astype(np.float64) @ w.T.astype(np.float64)
    logits = cap * np.tanh(raw / cap) if cap else raw
    without_support, by_logits = logits.copy(), np.zeros_like(logits)
    for r in np.flatnonzero(~plain):
        without_support[r, ids[r]] = -np.inf
        by_logits[r, ids[r]] = beta[r]
    one_hot = np.eye(VOCAB)[targets]
    by_logits += weights[:, None] * (softmax(without_support) - one_hot)
    by_logits += sum(values[:, None] * softmax(without_support / t) for t, values in rests.items())
    expected = (by_logits * (1 - (logits / cap) ** 2 if cap else 1)) @ w
    np.testing.assert_allclose(gradient, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    np.testing.assert_allclose(
        actual_logprobs[plain], np.log(softmax(logits))[np.arange(ROWS), targets][plain], rtol=1e-5
    )
