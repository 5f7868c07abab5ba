"""What every optimizer keeps: in checkpoints, of several adapters, and where a step is not taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from support.optimizing import Optimizing

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.ops.gradient_norm import MAX_PARAMETER
from wgpu_lora.train.optimizers import OPTIMIZERS

# With rank 8, a.A and b.B have at least 4,096 values; with rank 3, none has.
MODULES = {"a": (40, 640), "b": (520, 30)}
KINDS = [*OPTIMIZERS, "sgd momentum=0.9"]
KEPT = {"adamw": 8.0, "adamw_8bit": 2.03125, "adamw_bf16": 4.0, "lion": 4.0, "lion_8bit": 1.015625, "muon": 4.0}


def options(kind: str) -> dict[str, Any]:
    name, _, own = kind.partition(" ")
    return {"optim": name, "optim_args": own or None}


def drawn(rng: np.random.Generator, rank: int, scale: float = 0.1) -> dict[str, np.ndarray]:
    shapes = {f"{m}.{w}": (rank, i) if w == "A" else (o, rank) for m, (o, i) in MODULES.items() for w in "AB"}
    return {name: (scale * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


def same(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and np.array_equal(one[name], other[name]) for name in one
    )


@pytest.fixture(params=KINDS)
def run(request: pytest.FixtureRequest, device: Device) -> Any:
    made = Optimizing(device, MODULES, (8, 3), weight_decay=0.01, **options(request.param))
    yield made
    made.close()


def kept(run: Optimizing, slot: int) -> dict[str, np.ndarray]:
    return run.optimizer.state.read(run.device, slot)


def test_continuing_from_what_was_read(run: Optimizing, rng: np.random.Generator) -> None:
    """Also into another place, beside other adapters: the same bytes as without a break."""
    start, steps = [drawn(rng, 8), drawn(rng, 3)], [[drawn(rng, 8), drawn(rng, 3)] for _ in range(4)]
    for slot, values in enumerate(start):
        run.write(slot, values)
    for number, gradients in enumerate(steps[:2]):
        run.step(dict(enumerate(gradients)), number + 1, 1e-2)
    weights, states = [run.read(slot) for slot in (0, 1)], [kept(run, slot) for slot in (0, 1)]
    for number, gradients in enumerate(steps[2:]):
        run.step(dict(enumerate(gradients)), number + 3, 1e-2)
    after = [(run.read(slot), kept(run, slot)) for slot in (0, 1)]
    for slot in (0, 1):
        run.optimizer.state.fill(run.device, rng)
        run.write(slot, weights[slot])
        run.optimizer.state.write(run.device, slot, states[slot])
        assert same(kept(run, slot), states[slot])
        for number, gradients in enumerate(steps[2:]):  # the other adapter takes no step
            run.step({slot: gradients[slot]}, number + 3, 1e-2)
        assert same(run.read(slot), after[slot][0])
        assert same(kept(run, slot), after[slot][1])


def test_steps_that_are_not_taken(run: Optimizing, rng: np.random.Generator) -> None:
    """A slot whose gradient is not finite, or that would move beyond the largest weight; the other one moves."""
    for slot, rank in enumerate((8, 3)):
        run.write(slot, drawn(rng, rank))
    run.step({0: drawn(rng, 8), 1: drawn(rng, 3)}, 1, 1e-2)
    before, states = run.read(0), kept(run, 0)
    broken = drawn(rng, 8)
    broken["b.B"][519, 7] = np.nan
    for gradients, rate in ((broken, 1e-2), (drawn(rng, 8), 100 * MAX_PARAMETER)):
        others = run.read(1)
        reports = run.step({0: gradients, 1: drawn(rng, 3)}, 2, rate)
        assert not reports[0].applied
        assert reports[0].diverged == (rate > 1)
        assert same(run.read(0), before)
        assert same(kept(run, 0), states)
        assert reports[1].applied == (rate < 1)
        assert same(run.read(1), others) == (rate > 1)
    report = run.step({0: drawn(rng, 8)}, 2, 1e-2)[0]
    assert report.applied
    assert np.isfinite(report.grad_norm)  # gradients were zeroed
    assert not same(run.read(0), before)


def test_what_a_checkpoint_may_hold(run: Optimizing, rng: np.random.Generator) -> None:
    state = run.optimizer.state
    for slot, rank in enumerate((8, 3)):
        run.write(slot, drawn(rng, rank))
        run.step({slot: drawn(rng, rank)}, 1, 1e-2)
    for slot in (0, 1):
        stored = kept(run, slot)
        assert state.fault(slot, stored) is None
        assert not stored or state.fault(1 - slot, stored)
        for name, values in stored.items():
            wrong = values.copy().reshape(-1)
            if values.dtype == np.float32:
                wrong[-1] = np.nan
                assert state.fault(slot, {**stored, name: wrong.reshape(values.shape)}) == (
                    f"{name} has values that are not finite"
                )
            if ("second_moment" in name and values.dtype == np.float32) or name.endswith("_absmax"):
                wrong[-1] = -1
                assert "has values below 0" in str(state.fault(slot, {**stored, name: wrong.reshape(values.shape)}))
            assert f"{name} is" in str(state.fault(slot, {**stored, name: values[:-1]}))
            assert "another optimizer" in str(state.fault(slot, {n: v for n, v in stored.items() if n != name}))


def test_the_state_of_another_kind(device: Device, rng: np.random.Generator) -> None:
    """Is never taken for its own, unless it is the same: lion, muon and sgd all keep a momentum by parameter."""
    runs = {kind: Optimizing(device, MODULES, (8,), **options(kind)) for kind in KINDS}
    states = {kind: kept(run, 0) for kind, run in runs.items()}
    alike = {"lion", "muon", "sgd momentum=0.9"}
    for kind, run in runs.items():
        for other, stored in states.items():
            fine = kind == other or {kind, other} <= alike
            assert (run.optimizer.state.fault(0, stored) is None) == fine, (kind, other)
    for run in runs.values():
        run.close()


@pytest.mark.parametrize("kind", KEPT)
def test_bytes_of_a_parameter(device: Device, kind: str) -> None:
    """As declared, and as allocated: a large matrix has little padding."""
    run = Optimizing(device, {"a": (8192, 8192)}, (1,), **options(kind))
    assert sum(state.bytes_per_parameter for state in run.optimizer.rule.state) == KEPT[kind]
    pages = run.optimizer.state.pages
    found = sum(tensor.nbytes for page in pages for tensor in page if not tensor.name.startswith(("places", "homes")))
    blocks = sum(table.size for table in run.adapters.block_owners)
    used = 16 if kind.endswith("8bit") else blocks  # records of blocks that have an owner
    assert found == pytest.approx(KEPT[kind] * 1024 * used, rel=1e-3)
    run.close()


def test_small_matrices_are_not_rounded(device: Device, rng: np.random.Generator) -> None:
    """Of fewer than 4,096 values at the adapter's own rank, whatever ranks are beside it, as in bitsandbytes."""
    run = Optimizing(device, MODULES, (8, 3), optim="adamw_8bit")
    types = [{name: values.dtype.name for name, values in kept(run, slot).items()} for slot in (0, 1)]
    run.close()
    assert {name for name, kind in types[0].items() if kind == "uint8"} == {
        f"{matrix}.{moment}" for matrix in ("a.A", "b.B") for moment in ("first_moment", "second_moment")
    }
    assert set(types[1].values()) == {"float32"}


def test_magnitudes(device: Device, rng: np.random.Generator) -> None:
    """Of DoRA, which are vectors, have a state as matrices do; Muon refuses them."""
    modules = {"a": (4500, 20), "b": (60, 20)}
    for kind in ("adamw_8bit", "adamw_bf16", "lion"):
        run = Optimizing(device, modules, (8, 3), optim=kind, use_dora=True)
        run.optimizer.state.fill(run.device, rng)
        stored = kept(run, 1)
        shapes = {name: values.shape for name, values in stored.items() if name.startswith("a.M")}
        assert (4500,) in shapes.values()
        assert run.optimizer.state.fault(1, stored) is None
        run.optimizer.state.write(run.device, 0, {})
        run.optimizer.state.write(run.device, 1, {})
        assert not any(values.any() for slot in (0, 1) for values in kept(run, slot).values())
        run.optimizer.state.write(run.device, 1, stored)
        assert same(kept(run, 1), stored)
        assert not any(values.any() for values in kept(run, 0).values())
        run.close()
    with pytest.raises(UserError, match=r"trains the A and B of LoRA only, not a\.M: choose another optimizer"):
        Optimizing(device, modules, (8,), optim="muon", use_dora=True)
