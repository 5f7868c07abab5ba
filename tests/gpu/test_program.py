"""Recording, planning and replaying."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.training.tuning import product

from wgpu_lora.gpu import program as module
from wgpu_lora.gpu.arena_plan import plan_arenas
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.device_errors import BindingTooLarge, GridTooLarge
from wgpu_lora.gpu.program import Arena, Program, allocate
from wgpu_lora.gpu.tensor import ALIGNMENT, Storage, Tensor, align, persistent
from wgpu_lora.ops.elementwise import add_forward, fill, residual, swiglu
from wgpu_lora.ops.norm import rmsnorm, rmsnorm_forward
from wgpu_lora.ops.recorder import Recorder

MAX_ARENA = 8 * ALIGNMENT
Spans = list[tuple[int, int, int]]  # bytes, first dispatch, dispatches after it
SPANS = st.lists(st.tuples(st.integers(1, MAX_ARENA), st.integers(0, 20), st.integers(0, 8)), max_size=24)


def lifetimes(spans: Spans) -> dict[Storage, tuple[int, int]]:
    return {
        Storage(n, "activations", str(i), temporary=True): (first, first + more)
        for i, (n, first, more) in enumerate(spans)
    }


@given(SPANS)
def test_what_lives_together_never_overlaps(spans: Spans) -> None:
    lives = lifetimes(spans)
    plan = plan_arenas(lives, MAX_ARENA, MAX_ARENA)
    locations = [(s, *plan.locations[s], *lives[s]) for s in lives]
    for i, (buffer, arena, offset, first, last) in enumerate(locations):
        assert offset % ALIGNMENT == 0
        assert offset + buffer.nbytes <= plan.sizes[arena] <= MAX_ARENA
        for other, other_arena, other_offset, other_first, other_last in locations[:i]:
            if arena == other_arena and first <= other_last and other_first <= last:
                assert offset + buffer.nbytes <= other_offset or other_offset + other.nbytes <= offset
    assert all(size % ALIGNMENT == 0 for size in plan.sizes)


@given(SPANS)
def test_a_plan_is_no_smaller_than_its_fullest_moment(spans: Spans) -> None:
    lives = lifetimes(spans)
    moments = [sum(align(s.nbytes) for s, (a, b) in lives.items() if a <= t <= b) for t in range(30)]
    plan = plan_arenas(lives, 1 << 40, 1 << 40)
    assert max(moments) <= plan.nbytes <= sum(align(s.nbytes) for s in lives)
    assert len(plan.sizes) <= 1


@pytest.mark.parametrize(
    ("spans", "sizes"),
    [
        ([(1000, 0, 1), (1000, 2, 1), (1000, 4, 0)], [1024]),  # what never lives together shares its place
        ([(MAX_ARENA, 0, 1)] * 3, [MAX_ARENA] * 3),
    ],
)
def test_arenas(spans: Spans, sizes: list[int]) -> None:
    assert plan_arenas(lifetimes(spans), MAX_ARENA, MAX_ARENA).sizes == sizes


@pytest.mark.parametrize("limits", [(MAX_ARENA, 1 << 30), (1 << 30, MAX_ARENA)])
def test_a_tensor_that_cannot_be_bound_is_named(limits: tuple[int, int]) -> None:
    with pytest.raises(BindingTooLarge, match=r"'0' needs 2,049 bytes.*at most 2,048"):
        plan_arenas(lifetimes([(MAX_ARENA + 1, 0, 1)]), *limits)


# -- recording ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operands", "constants", "message"),
    [
        (2, {"size": 8}, r"add_forward: missing tensors \['y'\]"),
        (3, {"size": 8, "wrong": 1}, r"constants \['size', 'wrong'\]"),
        (3, {}, r"constants \[\]"),
    ],
)
def test_dispatch_names_what_is_missing(device: Device, operands: int, constants: Any, message: str) -> None:
    program = Program(device)
    with pytest.raises(TypeError, match=message):
        program.dispatch(add_forward, *[program.temp((8,))] * operands, **constants)
    assert not program.dispatches


def test_a_grid_must_be_one_that_webgpu_allows(device: Device) -> None:
    program = Program(device)
    with pytest.raises(GridTooLarge, match="more than WebGPU"):
        program.dispatch(fill, program.temp((1,)), size=2**38)


def test_views() -> None:
    whole = persistent((256, 6), "bf16", "base", "whole")
    part = whole.rows(128, 256)
    assert (part.shape, part.byte_offset, part.nbytes) == ((128, 6), 1536, 1536)
    assert part.rows(64, 65).byte_offset == 2304
    assert whole.reshape(6, 256).shape == (6, 256)
    with pytest.raises(AssertionError, match="not aligned"):
        whole.rows(1, 2)
    with pytest.raises(AssertionError, match="cannot become"):
        whole.reshape(5)
    with pytest.raises(AssertionError, match="has not been allocated"):
        whole.binding()


# -- replaying ---------------------------------------------------------------------------------------------------------


def values(device: Device, tensor: Tensor) -> np.ndarray:
    buffer, offset, size = tensor.binding()
    return device.read(buffer, size, offset).view(np.float32).reshape(tensor.shape).copy()


def upload(device: Device, *arrays: np.ndarray) -> list[Tensor]:
    tensors = [persistent(a.shape, "f32", "base", "input") for a in arrays]
    allocate(device, {t.storage for t in tensors})
    for tensor, array in zip(tensors, arrays, strict=True):
        device.write(tensor.storage.buffer, array.astype(np.float32))
    return tensors


@pytest.mark.drivers
def test_a_replay_repeats_itself_and_every_byte_is_counted(device: Device, rng: np.random.Generator) -> None:
    before = device.allocated
    x, weight = upload(device, rng.normal(size=(7, 20)), rng.normal(size=20))
    y = persistent((7, 20), "f32", "workspace", "y")
    program = Program(device)
    for _ in range(30):  # more than are submitted at once before anything is timed
        middle = program.temp((7, 20))
        rstd = program.temp((7,))
        program.dispatch(rmsnorm_forward, x, weight, middle, rstd, rows=7, cols=20, eps=1e-6)
        program.dispatch(add_forward, x, middle, y, size=140)
    allocate(device, program.persistent_storages())
    plan = program.plan()
    arena = Arena(device, Arena.sizes_for([plan]))
    program.build(arena)
    persistents = program.persistent_storages()
    assert device.allocated - before == plan.nbytes + sum(s.nbytes for s in persistents)
    assert plan.nbytes == align(560) + align(28)
    program.run()
    first = values(device, y)
    for _ in range(2):
        device.write(y.storage.buffer, np.full(140, np.nan, np.float32))
        program.run()
        assert values(device, y).tobytes() == first.tobytes()
    arena.free()
    for storage in persistents:
        device.free(storage.buffer)
    assert device.allocated == before <= device.peak_allocated


# -- the tape ----------------------------------------------------------------------------------------------------------


def gradients(device: Device, x: np.ndarray, forward: Callable[[Recorder, Tensor], Tensor], recompute: bool) -> Any:
    """(gradient of forward(x)'s sum by x, bytes of the plan)."""
    (parameter,) = upload(device, x)
    program = Program(device)
    rec = Recorder(program, training=True, recompute=recompute)
    rec.node(lambda: None, inputs=[], outputs=[parameter], trains=True)
    y = forward(rec, parameter)

    def seed() -> None:
        dy = rec.new_gradient(y)
        rec.dispatch(fill, dy, size=dy.size, value=1.0)

    rec.node(seed, inputs=[y], outputs=[])
    rec.backward()
    plan = program.plan()
    arena = Arena(device, Arena.sizes_for([plan]))
    program.build(arena)
    program.run()
    result = values(device, rec.gradient(parameter))
    arena.free()
    device.free(parameter.storage.buffer)
    return result, plan.nbytes


def test_recomputed_gradients_are_the_same_and_need_less(device: Device, rng: np.random.Generator) -> None:
    x = rng.normal(size=(5, 64))
    weights = upload(device, *(rng.normal(size=(8, 64)).astype(np.float32)))

    def forward(rec: Recorder, x: Tensor) -> Tensor:
        for layer in range(4):

            def block(x: Tensor, layer: int = layer) -> Tensor:
                gate, up = (rmsnorm(rec, x, weights[2 * layer + i], 1e-6) for i in (0, 1))
                return residual(rec, x, swiglu(rec, gate, up))

            x = rec.checkpoint(block, x)
        return x

    plain, plain_bytes = gradients(device, x, forward, recompute=False)
    again, again_bytes = gradients(device, x, forward, recompute=True)
    assert np.isfinite(plain).all()
    assert again.tobytes() == plain.tobytes()
    assert again_bytes < plain_bytes


def test_unread_work_is_pruned(device: Device) -> None:
    program = Program(device)
    x, y = program.temp((4,)), persistent((4,), "f32", "workspace", "y")
    program.dispatch(fill, x, size=4)
    program.dispatch(fill, program.temp((4,)), size=4)
    program.dispatch(add_forward, x, x, program.temp((4,)), size=4)
    program.dispatch(add_forward, x, x, y, size=4)
    program.prune()
    assert [step.kernel for step in program.dispatches] == [fill, add_forward]


def test_submits_are_short_before_they_have_been_timed(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a watchdog might end a model's first step on a slow device."""
    program, _ = product(device)
    (heavy,) = program.dispatches
    assert heavy.kernel.tuning is not None
    monkeypatch.setattr(module, "FIRST_WORK", 2.5 * heavy.kernel.tuning.work(heavy.constants))
    program.dispatch(fill, heavy.tensors[2], size=20)
    program.dispatches = [heavy] * 5 + program.dispatches[-1:] * 30
    allocate(device, program.persistent_storages())
    program.build(Arena(device))
    submitted = Mock(wraps=program.submit)
    monkeypatch.setattr(program, "submit", submitted)
    for _ in range(2):
        program.run()
        assert [call.args for call in submitted.call_args_list] == [(0, 2), (2, 4), (4, 28), (28, 35)]
        submitted.reset_mock()
    program.run()
    assert submitted.call_count < 4
