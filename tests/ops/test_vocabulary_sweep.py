"""The sweep over the vocabulary on the device, in chunks, against its formula in float64: with and without a cap."""

from __future__ import annotations

import numpy as np
import pytest
from support.models import allocated

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import Tensor, persistent
from wgpu_lora.models.batch_inputs import write
from wgpu_lora.ops import loss
from wgpu_lora.ops.elementwise import copy
from wgpu_lora.ops.loss import SweepGradient, Targets, seed, sweep
from wgpu_lora.ops.recorder import Recorder
from wgpu_lora.weights.dense import DenseWeight

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

    def given(name: str, values: np.ndarray, dtype: str = "f32") -> Tensor:
        tensor = persistent(values.shape, dtype, "workspace", name)
        uploads.append((tensor, values))
        return tensor

    program = Program(device)
    rec = Recorder(program, training=True)
    hidden, head = given("hidden", h), DenseWeight((given("head", w),), "f32", cap)
    rec.node(lambda: None, inputs=[], outputs=[hidden], trains=True)
    at = Targets(
        given("rows", np.arange(ROWS), "u32"), given("ids", targets, "u32"), given("count", np.array([ROWS]), "u32")
    )
    support = given("support", ids, "u32")
    swept = sweep(rec, hidden, head, at, temperatures=(1.0, TEMPERATURE), supports=[support])
    by_rest = {t: [given(f"rest {t}", values)] for t, values in rests.items()}
    seed(swept, SweepGradient(given("weights", weights), by_rest, {support: given("beta", beta)}))
    rec.backward()
    out = persistent((ROWS, COLS), "f32", "workspace", "out")
    program.dispatch(copy, rec.gradient(hidden), out, size=out.size)
    logprobs = persistent((ROWS,), "f32", "workspace", "logprobs")
    program.dispatch(copy, swept.logprobs, logprobs, size=ROWS)
    with allocated(device, program, {tensor.storage for tensor, _ in uploads}) as arena:
        program.build(arena)
        for tensor, values in uploads:
            write(device, tensor, values)
        program.run()
        found = device.read(out.storage.buffer).view(np.float32).reshape(ROWS, COLS)
        said = device.read(logprobs.storage.buffer).view(np.float32)

    raw = h.astype(np.float64) @ w.T.astype(np.float64)
    logits = cap * np.tanh(raw / cap) if cap else raw
    rest, by_logits = logits.copy(), np.zeros_like(logits)
    for r in np.flatnonzero(~plain):
        rest[r, ids[r]] = -np.inf
        by_logits[r, ids[r]] = beta[r]
    one_hot = np.eye(VOCAB)[targets]
    by_logits += weights[:, None] * (softmax(rest) - one_hot)
    by_logits += sum(values[:, None] * softmax(rest / t) for t, values in rests.items())
    expected = (by_logits * (1 - (logits / cap) ** 2 if cap else 1)) @ w
    np.testing.assert_allclose(found, expected, rtol=0, atol=2e-5 * np.abs(expected).max())
    np.testing.assert_allclose(said[plain], np.log(softmax(logits))[np.arange(ROWS), targets][plain], rtol=1e-5)
