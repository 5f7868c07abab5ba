"""The gated delta rule, its convolution, norms and gates: in float64 against the recurrence and its differences, on the
device against float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from support.kernels.delta import runs_of
from support.models import allocated
from support.training.exact import run_exactly

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import Tensor, persistent
from wgpu_lora.models.batch_inputs import write
from wgpu_lora.ops.attention.delta_net import delta_rule
from wgpu_lora.ops.attention.delta_net.causal_conv import causal_conv
from wgpu_lora.ops.attention.delta_net.delta_rule import gated_delta_rule
from wgpu_lora.ops.attention.delta_net.delta_step import gated_delta_step, possible_slices
from wgpu_lora.ops.elementwise import copy
from wgpu_lora.ops.norm import gated_norm, l2norm
from wgpu_lora.ops.recorder import Recorder

KEY_HEADS, HEADS, KEY, VALUE, TAPS = 2, 4, 8, 12, 4
COLS = 2 * KEY_HEADS * KEY + HEADS * VALUE
EPS, NORM_EPS = 1e-6, 1e-5
SHAPES = {"x": (COLS,), "a": (HEADS,), "b": (HEADS,), "z": (HEADS * VALUE,)}
FROZEN = {"conv": (COLS, 1, TAPS), "a_log": (HEADS,), "dt_bias": (HEADS,), "norm": (VALUE,)}
Values = dict[str, np.ndarray]


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def recurrence(v: Values, lengths: Sequence[int]) -> np.ndarray:
    """A gated delta net without its projections, token by token, from the formulas (Yang et al. 2024)."""
    out, start = [], 0
    for length in lengths:
        part = {n: v[n][start : start + length].astype(np.float64) for n in SHAPES}
        start += length
        before = np.concatenate([np.zeros((TAPS - 1, COLS)), part["x"]])
        mixed = silu(sum(before[j : j + length] * v["conv"][:, 0, j] for j in range(TAPS)))
        q, k, values = np.split(mixed, (KEY_HEADS * KEY, 2 * KEY_HEADS * KEY), axis=1)
        q, k = (x.reshape(length, KEY_HEADS, KEY).repeat(HEADS // KEY_HEADS, axis=1) for x in (q, k))
        q, k = (x / np.sqrt((x**2).sum(axis=2, keepdims=True) + EPS) for x in (q, k))
        q, values = q / KEY**0.5, values.reshape(length, HEADS, VALUE)
        beta, g = 1 / (1 + np.exp(-part["b"])), -np.exp(v["a_log"]) * np.logaddexp(0, part["a"] + v["dt_bias"])
        state, y = np.zeros((HEADS, KEY, VALUE)), np.zeros((length, HEADS, VALUE))
        for t in range(length):
            state = np.exp(g[t])[:, None, None] * state
            u = beta[t, :, None] * (values[t] - np.einsum("hdc,hd->hc", state, k[t]))
            state = state + np.einsum("hd,hc->hdc", k[t], u)
            y[t] = np.einsum("hdc,hd->hc", state, q[t])
        y = v["norm"] * y / np.sqrt((y**2).mean(axis=2, keepdims=True) + NORM_EPS)
        out.append(y.reshape(length, -1) * silu(part["z"]))
    return np.concatenate(out)


def random_values(rng: np.random.Generator, rows: int) -> Values:
    arrays = {n: rng.normal(size=(rows, *shape)) for n, shape in SHAPES.items()}
    arrays |= {n: rng.normal(size=shape) for n, shape in FROZEN.items()}
    return {n: x.astype(np.float32) for n, x in arrays.items()}


@dataclass
class Net:
    """The recorded ops, on rows of several sequences. stepping: those of few rows, in generation."""

    device: Device
    runs: np.ndarray
    training: bool = True
    sequences: int = 0
    stepping: bool = False
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rows, self.program = len(self.runs), Program(self.device)
        rec = Recorder(self.program, training=self.training)
        shapes = {n: (rows, *shape) for n, shape in SHAPES.items()} | FROZEN
        shapes |= {"y": (rows, HEADS * VALUE), "dy": (rows, HEADS * VALUE)}
        shapes |= {f"d{n}": (rows, *shape) for n, shape in SHAPES.items()}
        if self.sequences:
            shapes |= {"inputs": (self.sequences, TAPS - 1, COLS), "state": (self.sequences, HEADS, KEY, VALUE)}
        self.tensors = {n: persistent(shape, "f32", "workspace", n) for n, shape in shapes.items()}
        self.tensors["runs"] = persistent(self.runs.shape, "u32", "workspace", "runs")
        t = self.tensors
        for name in SHAPES:
            rec.node(lambda: None, inputs=[], outputs=[t[name]], trains=True)
        y = (self._step if self.stepping else self._chunks)(rec, rows)
        rec.dispatch(copy, y, t["y"], size=y.size)
        if self.training:
            rec.give_gradient(y, t["dy"])
            rec.backward()
            for name in SHAPES:
                rec.dispatch(copy, rec.gradient(t[name]), t[f"d{name}"], size=t[name].size)

    def _chunks(self, rec: Recorder, rows: int) -> Tensor:
        t, parts = self.tensors, [(rows, KEY_HEADS, KEY)] * 2 + [(rows, HEADS, VALUE)]
        q, k, v = causal_conv(rec, t["x"], t["conv"], t["runs"], parts, t.get("inputs"))
        q, k = l2norm(rec, q, k, KEY**-0.5, EPS)
        y = gated_delta_rule(rec, q, k, v, t["a"], t["b"], t["a_log"], t["dt_bias"], t["runs"], t.get("state"))
        return gated_norm(rec, y, t["z"], t["norm"], NORM_EPS)

    def _step(self, rec: Recorder, rows: int) -> Tensor:
        t = self.tensors
        frozen = t["conv"], t["a_log"], t["dt_bias"], t["norm"]
        moving = t["x"], t["z"], t["a"], t["b"]
        return gated_delta_step(rec, *moving, frozen, t["runs"], t["inputs"], t["state"], KEY_HEADS, EPS, NORM_EPS)

    def exactly(self, values: Values) -> Values:
        buffers = run_exactly(self.program, {self.tensors[n]: x for n, x in {**values, "runs": self.runs}.items()})
        return {n: buffers[t.storage].reshape(t.shape) for n, t in self.tensors.items() if t.storage in buffers}

    def run(self, *steps: Values) -> list[Values]:
        """The results of steps one after another; what a step does not give stays as it was."""
        results = []
        with allocated(self.device, self.program, {t.storage for t in self.tensors.values()}) as arena:
            self.program.build(arena)
            write(self.device, self.tensors["runs"], self.runs)
            for values in steps:
                for name, x in values.items():
                    write(self.device, self.tensors[name], x)
                self.program.run()
                read = {n: self.device.read(t.storage.buffer).view(np.float32) for n, t in self.tensors.items()}
                results.append({n: x.reshape(self.tensors[n].shape) for n, x in read.items()})
        return results


LENGTHS = (3, 70, 1, 90)


@pytest.fixture(params=[1 << 27, 1], ids=["whole", "in blocks of heads"])
def limit(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delta_rule, "BLOCK_BYTES", request.param)


@pytest.mark.usefixtures("limit")
def test_float64(device: Device, rng: np.random.Generator) -> None:
    """The references make the recurrence and its gradient, by differences in random directions of each input."""
    net, rows = Net(device, runs_of(*LENGTHS, padding=2)), sum(LENGTHS)
    values = {n: x.astype(np.float64) for n, x in random_values(rng, rows + 2).items()}
    values["dy"] = rng.normal(size=(rows + 2, HEADS * VALUE))
    values["dy"][rows:] = 0
    results = net.exactly(values)
    np.testing.assert_allclose(results["y"][:rows], recurrence(values, LENGTHS), rtol=1e-9, atol=1e-11)
    for name in SHAPES:
        assert (results[f"d{name}"][rows:] == 0).all()
        for _ in range(4):
            way = rng.normal(size=values[name].shape)
            losses = [
                (recurrence({**values, name: values[name] + e * way}, LENGTHS) * values["dy"][:rows]).sum()
                for e in (1e-6, -1e-6)
            ]
            measured = (losses[0] - losses[1]) / 2e-6
            assert (results[f"d{name}"] * way).sum() == pytest.approx(measured, rel=1e-6, abs=1e-6), name


@pytest.mark.drivers
@pytest.mark.usefixtures("limit")
def test_device(device: Device, rng: np.random.Generator) -> None:
    net, rows = Net(device, runs_of(*LENGTHS, padding=2)), sum(LENGTHS) + 2
    values = {**random_values(rng, rows), "dy": rng.standard_normal((rows, HEADS * VALUE), np.float32)}
    want, (results, again) = net.exactly(values), net.run(values, values)
    for name in ("y", *(f"d{n}" for n in SHAPES)):
        error = np.abs(results[name] - want[name]).max() / np.abs(want[name]).max()
        assert error < 2e-5, f"{name}: {error:.2g}"
        assert results[name].tobytes() == again[name].tobytes()


@pytest.mark.parametrize("slope", [1e-4, 1.0, 20.0])
def test_a_long_sequence(device: Device, rng: np.random.Generator, slope: float) -> None:
    """4,096 tokens that hardly forget, forget, or forget nearly all with each token."""
    values = random_values(rng, 4096)
    values["a_log"][:] = np.log(slope)
    values["dt_bias"][:] = 1.0
    values["a"] *= 0.1
    (results,) = Net(device, runs_of(4096), training=False).run(values)
    want = recurrence(values, [4096])
    assert np.abs(results["y"] - want).max() / np.abs(want).max() < 1e-4


def test_pieces_leave_the_state_of_tokens(device: Device, rng: np.random.Generator) -> None:
    """A prompt of 130 tokens of the second of three sequences, at once, in pieces of 65 and one by one."""
    total, ends, outputs = 130, {}, {}
    values = random_values(rng, total)
    frozen = {n: values[n] for n in FROZEN}
    cache = {"inputs": np.full((3, TAPS - 1, COLS), 7.0), "state": np.full((3, HEADS, KEY, VALUE), 7.0)}
    for rows in (130, 65, 1):
        first, *following = ({n: values[n][at : at + rows] for n in SHAPES} for at in range(0, total, rows))
        results = Net(device, runs_of(rows, states=(1,), fresh=(1,)), False, 3).run({**frozen, **cache, **first})
        if following:
            state = {n: results[0][n] for n in cache}
            following[0] |= {**frozen, **state}
            results += Net(device, runs_of(rows, states=(1,)), False, 3).run(*following)
        ends[rows], outputs[rows] = results[-1], np.concatenate([step["y"] for step in results])
    want = recurrence(values, [total])
    for rows, end in ends.items():
        assert np.abs(outputs[rows] - want).max() / np.abs(want).max() < 1e-5
        for name in cache:
            assert (end[name][[0, 2]] == 7).all()
            np.testing.assert_allclose(end[name], ends[1][name], rtol=1e-5, atol=1e-5, err_msg=f"{name} by {rows}")


@pytest.mark.drivers
@pytest.mark.parametrize("states", [(1,), (4, 0, 2)], ids=["one", "three of five"])
def test_steps_are_the_chunks(device: Device, rng: np.random.Generator, states: tuple[int, ...]) -> None:
    """Tokens of several sequences, of which one begins: the same outputs and states, whatever computes which step."""
    rows, fresh = len(states) + 2, runs_of(*[1] * len(states), padding=2, states=states, fresh=states[:1])
    runs = runs_of(*[1] * len(states), padding=2, states=states)
    values = random_values(rng, rows)
    cache = {"inputs": rng.normal(size=(5, TAPS - 1, COLS)), "state": rng.normal(size=(5, HEADS, KEY, VALUE))}
    cache["state"][states[0]] = cache["inputs"][states[0]] = np.nan
    more = [{n: random_values(rng, rows)[n] for n in SHAPES} for _ in range(3)]
    results = []
    for stepping in (True, False):
        (first,) = Net(device, fresh, False, 5, stepping).run({**values, **cache})
        step_inputs = {n: values[n] for n in FROZEN} | {n: first[n] for n in cache}
        results.append([first, *Net(device, runs, False, 5, stepping).run({**step_inputs, **more[0]}, *more[1:])])
    for step, chunked in zip(*results, strict=True):
        for name in ("y", *cache):
            got, want = step[name], chunked[name]
            np.testing.assert_allclose(got, want, rtol=0, atol=1e-5 * np.abs(want[np.isfinite(want)]).max())


def test_steps_in_float64(device: Device, rng: np.random.Generator) -> None:
    """Several rows of two sequences are the recurrence, too."""
    values = {n: x.astype(np.float64) for n, x in random_values(rng, 8).items()}
    values |= {"inputs": np.full((2, TAPS - 1, COLS), 7.0), "state": np.full((2, HEADS, KEY, VALUE), 7.0)}
    net = Net(device, runs_of(3, 5, states=(1, 0), fresh=(0, 1)), False, 2, stepping=True)
    np.testing.assert_allclose(net.exactly(values)["y"], recurrence(values, [3, 5]), rtol=1e-9, atol=1e-11)


def test_states_that_do_not_fit_registers_are_left_to_chunks() -> None:
    assert possible_slices(128, 128) == [8, 4]
    assert possible_slices(4, 4) == [1]
    assert possible_slices(256, 512) == []


@pytest.mark.parametrize("name", [*SHAPES, "inputs", "state"])
def test_a_step_leaves_nan_in_its_sequence(device: Device, rng: np.random.Generator, name: str) -> None:
    net = Net(device, runs_of(1, 1, 1, states=(2, 0, 1)), False, 3, stepping=True)
    values = random_values(rng, 3)
    values |= {"inputs": rng.normal(size=(3, TAPS - 1, COLS)), "state": rng.normal(size=(3, HEADS, KEY, VALUE))}
    spoiled = {**values, name: values[name].copy()}
    spoiled[name][0 if name in ("inputs", "state") else 1] = np.nan  # of sequence 0
    clean, bad = net.run(values, spoiled)
    for out, row in (("y", 1), ("inputs", 0), ("state", 0)):
        rows_outside = [np.delete(v[out], row, axis=0) for v in (clean, bad)]
        assert rows_outside[0].tobytes() == rows_outside[1].tobytes()
    assert not np.isfinite(bad["y"][1]).all()


@pytest.mark.parametrize("name", ["x", "a", "b", "z", "dy"])
def test_nan_stays_in_its_sequence(device: Device, rng: np.random.Generator, name: str) -> None:
    net, rows = Net(device, runs_of(*LENGTHS)), sum(LENGTHS)
    values = {**random_values(rng, rows), "dy": rng.standard_normal((rows, HEADS * VALUE), np.float32)}
    spoiled = {**values, name: values[name].copy()}
    spoiled[name][40] = np.nan
    clean, bad = net.run(values, spoiled)
    inside = slice(3, 73)
    for out in ("y", *(f"d{n}" for n in SHAPES)):
        rows_outside = [np.delete(v[out], inside, axis=0) for v in (clean, bad)]
        assert rows_outside[0].tobytes() == rows_outside[1].tobytes()
    assert not np.isfinite(bad["dx"][inside]).all()
