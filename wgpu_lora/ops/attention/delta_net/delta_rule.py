"""The gated delta rule (Yang et al. 2024), in chunks of 64 tokens, and its gradient.

For each value head, S <- exp(g) S; u = beta (v - S^T k); S <- S + k u^T; y = S^T q, with beta = sigmoid(b) and g =
-exp(a_log) softplus(a + dt_bias). With G the sum of g from the beginning of a chunk, D[i, j] = exp(G[i] - G[j]) and the
state S before it:

    M = strictly lower part of beta (K K^T) * D         T = (I + M)^-1
    U = T (beta V)    W = T (beta exp(G) K)             V' = U - W S
    P = lower part of (Q K^T) * D                       Y = exp(G) Q S + P V'
    S <- exp(G[last]) S + (exp(G[last] - G) K)^T V'

What depends on a chunk alone is computed for all chunks at once; only V' and S are computed chunk by chunk. A sequence
that begins within a chunk does not see what is before it (`delta_chunks.pieces`). For the backward pass, only the
states before the chunks are kept; the rest is computed again. Value heads are independent, so they are taken in blocks
if the states would exceed a binding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from wgpu_lora.gpu.kernel import Kernel, cdiv
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.ops.attention.delta_net.delta_chunks import (
    CHUNK,
    delta_group_sum,
    delta_inverse,
    delta_mix,
    delta_pairs,
    delta_scaled,
    delta_sums,
)
from wgpu_lora.ops.attention.delta_net.delta_scan import (
    delta_beta_gradient,
    delta_flow,
    delta_gates,
    delta_gates_backward,
    delta_scan,
    delta_scan_backward,
    delta_through,
)
from wgpu_lora.ops.recorder import Recorder

BLOCK_BYTES = 1 << 27  # of the states, or of another array of a block of heads


@dataclass(frozen=True)
class _Inputs:
    """q and k f32 [T, key_heads, key_dim] are regions of one storage."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    decay: Tensor
    runs: Tensor

    @property
    def rows(self) -> int:
        return self.q.shape[0]

    @property
    def heads(self) -> dict[str, int]:
        return {"key_heads": self.q.shape[1], "value_heads": self.v.shape[1]}

    @property
    def dims(self) -> dict[str, int]:
        return {"key_dim": self.q.shape[2], "value_dim": self.v.shape[2]}

    @property
    def qk(self) -> Tensor:
        return Tensor((self.q.storage.nbytes // 4,), "f32", self.q.storage, name="q and k")

    @property
    def offsets(self) -> dict[str, int]:
        return {"q_first": self.q.byte_offset // 4, "k_first": self.k.byte_offset // 4}

    def blocks(self, limit: int) -> Iterator[_Block]:
        """Blocks of value heads whose arrays are at most `limit` bytes each, unless those of one key head are
        larger."""
        (key_heads, heads), (key, value) = self.heads.values(), self.dims.values()
        group = heads // key_heads
        group_bytes = 4 * group * max(cdiv(self.rows, CHUNK) * key * value, self.rows * max(key, value, CHUNK))
        count = cdiv(key_heads, max(1, limit // group_bytes))
        bounds = [group * (key_heads * i // count) for i in range(count + 1)]
        for first, stop in pairwise(bounds):
            yield _Block(self, {"rows": self.rows, "first": first, "heads": stop - first, **self.heads})


@dataclass(frozen=True)
class _Block:
    """Records the kernels for a block of value heads. Its own arrays are f32 [T, heads, dim] or [T, heads, CHUNK]."""

    of: _Inputs
    shape: dict[str, int]

    def temp(self, rec: Recorder, dim: int, name: str) -> Tensor:
        return rec.temp((self.of.rows, self.shape["heads"], dim), name=name)

    def dispatch(self, rec: Recorder, kernel: Kernel, *args: Tensor | None, **constants: Any) -> None:
        rec.dispatch(kernel, self.of.runs, *args, **self.shape, **constants)

    def states(self, rec: Recorder) -> Tensor:
        key, value = self.of.dims.values()
        return rec.temp((cdiv(self.of.rows, CHUNK), self.shape["heads"], key, value), name="states")

    def inverse(self, rec: Recorder) -> Tensor:
        of, m, t = self.of, self.temp(rec, CHUNK, "m"), self.temp(rec, CHUNK, "t")
        key = of.dims["key_dim"]
        self.dispatch(
            rec, delta_pairs, of.k, None, None, None, of.decay, of.beta, m, dim=key, x_of="key", y_of="key", strict=True
        )
        self.dispatch(rec, delta_inverse, m, t)
        return t

    def products(self, rec: Recorder, t: Tensor) -> tuple[Tensor, Tensor]:
        """U and W."""
        of, (key, value) = self.of, self.of.dims.values()
        u, w = self.temp(rec, value, "u"), self.temp(rec, key, "w")
        self.dispatch(rec, delta_mix, t, of.v, of.beta, None, u, dim=value, x_of="value", y_of="block")
        self.dispatch(rec, delta_mix, t, of.k, of.beta, of.decay, w, dim=key, x_of="key", y_of="block")
        return u, w

    def pairs(self, rec: Recorder) -> Tensor:
        of, p = self.of, self.temp(rec, CHUNK, "p")
        dim = of.dims["key_dim"]
        self.dispatch(rec, delta_pairs, of.q, of.k, None, None, of.decay, None, p, dim=dim, x_of="key", y_of="key")
        return p

    def forward(self, rec: Recorder, y: Tensor, states: Tensor, cached: bool) -> None:
        """Fills the block's heads of y [T, value_heads, value_dim], and the states."""
        of, value = self.of, self.of.dims["value_dim"]
        u, w = self.products(rec, self.inverse(rec))
        new = self.temp(rec, value, "new values")
        constants = {**of.offsets, **of.dims, "sequences": states.shape[0], "cached": cached}
        self.dispatch(rec, delta_scan, u, w, states, new, of.qk, of.decay, y, **constants)
        self.dispatch(
            rec, delta_mix, self.pairs(rec), new, None, None, y, dim=value, x_of="block", y_of="value", accumulate=True
        )

    def backward(self, rec: Recorder, states: Tensor, dy: Tensor, gradients: _Gradients, a: _Decays) -> None:
        of, (key, value), heads = self.of, self.of.dims.values(), self.shape["heads"]
        t = self.inverse(rec)
        u, w = self.products(rec, t)
        new = self.temp(rec, value, "new values")
        self.dispatch(rec, delta_scan, u, w, states, new, **of.dims, given=True)

        # by V' and by the states
        dnew, dstates = self.temp(rec, value, "dnew"), self.states(rec)
        self._mix(rec, self.pairs(rec), dy, dnew, value, "value", transposed=True)
        self.dispatch(rec, delta_scan_backward, w, of.qk, of.decay, dy, dnew, dstates, **of.offsets, **of.dims)

        # by U and W, from there by beta V and beta exp(G) K
        dw, du, dx = self.temp(rec, key, "dw"), self.temp(rec, value, "dbeta v"), self.temp(rec, key, "dbeta k")
        self.dispatch(rec, delta_through, dnew, states, None, dw, **of.dims, x_of="block", negative=True)
        self._mix(rec, t, dnew, du, value, "block", transposed=True)
        self._mix(rec, t, dw, dx, key, "block", transposed=True)

        # by K as the row of M and W (dk), by K as what later rows see (dk_behind), and by Q
        by_m, by_p = self.temp(rec, CHUNK, "dm"), self.temp(rec, CHUNK, "dp")
        options = {"x_of": "block", "y_of": "block", "strict": True, "negative": True}
        self.dispatch(rec, delta_pairs, du, u, dx, w, of.decay, of.beta, by_m, dim=value, dim2=key, **options)
        self.dispatch(
            rec, delta_pairs, dy, new, None, None, of.decay, None, by_p, dim=value, x_of="value", y_of="block"
        )
        dq, dk, dk_behind = (self.temp(rec, key, name) for name in ("dq", "dk", "dk behind"))
        self._mix(rec, by_p, of.k, dq, key, "key")
        self.dispatch(rec, delta_through, dy, states, of.decay, dq, **of.dims, x_of="value", accumulate=True)
        shape = {name: self.shape[name] for name in ("rows", "first", "heads", "value_heads")}
        rec.dispatch(delta_scaled, dx, of.beta, of.decay, dk, **shape, dim=key, y_of="block")
        self._mix(rec, by_m, of.k, dk, key, "key", accumulate=True)
        self._mix(rec, by_p, of.q, dk_behind, key, "key", transposed=True)
        self._mix(rec, by_m, of.k, dk_behind, key, "key", transposed=True, accumulate=True)
        behind = {"x_of": "block", "behind": True, "accumulate": True}
        self.dispatch(rec, delta_through, new, dstates, of.decay, dk_behind, **of.dims, **behind)

        rec.dispatch(delta_scaled, du, of.beta, None, gradients.v, **shape, dim=value, y_of="value")
        rec.dispatch(delta_group_sum, dq, None, gradients.q, **self.shape, dim=key)
        rec.dispatch(delta_group_sum, dk, dk_behind, gradients.k, **self.shape, dim=key)
        sums = self.temp(rec, 2, "sums")
        vectors = of.qk, of.v, dq, dk, dk_behind, gradients.v, sums
        rec.dispatch(delta_sums, *vectors, **self.shape, **of.offsets, **of.dims)
        chunks = cdiv(of.rows, CHUNK)
        flow = rec.temp((chunks, heads), name="flow")
        sizes = {"rows": chunks * heads, "heads": heads, "cols": key * value, "last": chunks - 1}
        rec.dispatch(delta_flow, of.runs, states, dstates, flow, **sizes)
        rec.dispatch(delta_gates_backward, of.runs, a.a, a.a_log, a.dt_bias, sums, flow, gradients.a, **shape)
        rec.dispatch(delta_beta_gradient, a.b, sums, gradients.b, **shape)

    def _mix(self, rec: Recorder, a: Tensor, x: Tensor, y: Tensor, dim: int, x_of: str, **flags: bool) -> None:
        self.dispatch(rec, delta_mix, a, x, None, None, y, dim=dim, x_of=x_of, y_of="block", **flags)


@dataclass(frozen=True)
class _Decays:
    """The inputs of the decays and betas."""

    a: Tensor
    b: Tensor
    a_log: Tensor
    dt_bias: Tensor


@dataclass(frozen=True)
class _Gradients:
    q: Tensor
    k: Tensor
    v: Tensor
    a: Tensor
    b: Tensor


def gated_delta_rule(
    rec: Recorder,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    runs: Tensor,
    state: Tensor | None = None,
) -> Tensor:
    """The outputs of the gated delta rule, f32 [T, value_heads, value_dim].

    Args:
        q, k: f32 [T, key_heads, key_dim], normalised, in one storage; v: f32 [T, value_heads, value_dim]. Dimensions
        are
            multiples of 4; value head j uses the key head j // (value_heads / key_heads). They have no other uses.
        a, b: f32 [T, value_heads].
        a_log, dt_bias: f32 [value_heads], frozen.
        runs: u32 [T, 4], see `ops.attention.delta_net.delta_chunks`.
        state: in generation, f32 [sequences, value_heads, key_dim, value_dim], which is read and replaced.
    """
    beta, decay = rec.temp(b.shape, name="beta"), rec.temp(a.shape, name="decay")
    rec.dispatch(delta_gates, runs, a, b, a_log, dt_bias, beta, decay, rows=a.shape[0], heads=a.shape[1])
    y, inputs = rec.temp(v.shape, name="delta"), _Inputs(q, k, v, beta, decay, runs)
    if state is not None:
        _Block(inputs, {"rows": a.shape[0], "first": 0, "heads": v.shape[1], **inputs.heads}).forward(
            rec, y, state, True
        )
        return y
    blocks = list(inputs.blocks(min(BLOCK_BYTES, rec.program.device.max_binding)))
    block_states = [block.states(rec) for block in blocks]
    for block, states in zip(blocks, block_states, strict=True):
        block.forward(rec, y, states, False)
        rec.save_for_backward(states)

    def backward() -> None:
        qkv = rec.rematerialize(q), rec.rematerialize(k), rec.rematerialize(v)
        targets = [rec.gradient_target(x) for x in (q, k, v, a, b)]
        assert not any(accumulate for _, accumulate in targets), "an input of the delta rule has another use"
        gradients, decays = _Gradients(*(target for target, _ in targets)), _Decays(a, b, a_log, dt_bias)
        for block, states in zip(blocks, block_states, strict=True):
            _Block(_Inputs(*qkv, beta, decay, runs), block.shape).backward(
                rec, states, rec.gradient(y), gradients, decays
            )

    rec.node(backward, inputs=[q, k, v, a, b], outputs=[y])
    return y
