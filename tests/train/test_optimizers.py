"""An optimizer is one file and one line: SGD with momentum is added, trained, saved and resumed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support.training.shared_runs import assert_resumes_exactly
from support.training.training import golden_arguments

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.kernel import F32, REGISTRY, U32, In, InOut, Kernel, Out, ReadOnly, kernel, linear_grid
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import Tensor
from wgpu_lora.ops.gradient_norm import BLOCK
from wgpu_lora.train.job import Job
from wgpu_lora.train.optimizers import OPTIMIZERS
from wgpu_lora.train.optimizers.update_rule import Page, PlainState, State
from wgpu_lora.train.option_types import Range, own_option
from wgpu_lora.train.prepare_job import prepare_job
from wgpu_lora.train.run.run_checkpoint import MANIFEST, write_manifest
from wgpu_lora.train.session.optimizer_update import SlotUpdate

BINDINGS = """const SIZE: u32 = 1024u;
@group(0) @binding(0) var<storage, read_write> params: array<f32>;
@group(0) @binding(1) var<storage, read_write> grads: array<f32>;
@group(0) @binding(2) var<storage, read_write> momentum: array<f32>;
@group(0) @binding(3) var<storage, read> block_owners: array<u32>;
@group(0) @binding(4) var<storage, read> hyper: array<Hyper>;
@group(0) @binding(5) var<storage, read_write> report: array<vec4<f32>>;
"""
UPDATE = """@group(0) @binding(6) var<storage, read_write> updates: array<u32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let i = linear_index(group, local);
    if (i >= SIZE) { return; }
    let owner = block_owners[i / 1024u];
    if (owner == 0xffffffffu) { return; }
    let slot = owner / 2u;
    let g = grads[i] * report[slot].y;
    grads[i] = 0.0;
    if (report[slot].z == 0.0) { return; }
    momentum[i] = hyper[owner].momentum * momentum[i] + g;
    params[i] -= hyper[owner].learning_rate * momentum[i];
    if (i % 1024u == 0u) { updates[i / 1024u] += 1u; }
}
"""
CHECK = """@group(0) @binding(6) var<storage, read_write> diverged: array<f32>;

@compute @workgroup_size(64)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) local: u32) {
    let b = linear_index(group, local);
    if (b >= SIZE / 1024u) { return; }
    let owner = block_owners[b];
    diverged[b] = 0.0;
    if (owner == 0xffffffffu || report[owner / 2u].z == 0.0) { return; }
    let slot = owner / 2u;
    for (var i = b * 1024u; i < (b + 1u) * 1024u; i++) {
        let m = hyper[owner].momentum * momentum[i] + grads[i] * report[slot].y;
        let p = params[i] - hyper[owner].learning_rate * m;
        if ((bitcast<u32>(p) & 0x7fffffffu) > bitcast<u32>(1048576.0)) { diverged[b] = 1.0; }
    }
}
"""


@dataclass(frozen=True)
class Hyper:
    learning_rate: F32
    momentum: F32


@dataclass(frozen=True)
class Momentum:
    """p -= lr m with m = beta m + g. It also counts each block's updates: a state of one integer per block."""

    state: ClassVar[tuple[State, ...]] = (State("momentum"), State("updates", "u32", 1))
    state_class: ClassVar[Any] = PlainState
    Hyper: ClassVar[type] = Hyper
    kernels: ClassVar[list[Kernel]] = []

    momentum: float = own_option(0.9, "Decay of the gradient's sum.", within=Range(at_least=0, below=1))

    def hyper(self, step: int, learning_rate: float) -> Any:
        return Hyper(learning_rate, self.momentum)

    def record_check(self, program: Program, page: Page, diverged: Tensor) -> None:
        program.dispatch(Momentum.kernels[0], *Momentum.values(page), diverged, size=page.size)

    def record_update(self, program: Program, page: Page) -> None:
        program.dispatch(Momentum.kernels[1], *Momentum.values(page), page.state[1], size=page.size)

    @staticmethod
    def values(page: Page) -> tuple[Tensor, ...]:
        return page.params, page.grads, page.state[0], page.block_owners, page.hyper, page.report


@pytest.fixture(autouse=True)
def momentum(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Registers it for a test."""
    shaders = {name: tmp_path / f"{name}.wgsl" for name in ("check", "update")}
    shaders["check"].write_text(BINDINGS + CHECK)
    shaders["update"].write_text(BINDINGS + UPDATE)

    @kernel(str(shaders["check"]), grid=lambda c: linear_grid(c.size // BLOCK), lib=("linear",), structs=(Hyper,))
    def momentum_check(
        params: In, grads: In, momentum: In, block_owners: ReadOnly, hyper: ReadOnly, report: In, diverged: Out, *,
        size: U32
    ) -> Any:  # fmt: skip
        """diverged[b] = 1 where the update would leave a parameter beyond 2^20."""

    @kernel(str(shaders["update"]), grid=lambda c: linear_grid(c.size), lib=("linear",), structs=(Hyper,))
    def momentum_update(
        params: InOut, grads: InOut, momentum: InOut, block_owners: ReadOnly, hyper: ReadOnly, report: In,
        updates: InOut,
        *, size: U32,
    ) -> Any:  # fmt: skip
        """m = beta m + g; p = p - lr m; updates += 1."""

    monkeypatch.setattr(Momentum, "kernels", [momentum_check, momentum_update])
    OPTIMIZERS["momentum"] = Momentum
    yield
    for name in ("momentum_check", "momentum_update"):
        del REGISTRY[name]
    del OPTIMIZERS["momentum"]


def job(directory: Path, **changes: Any) -> Job:
    directory.mkdir(exist_ok=True)
    options = {
        "optim": "momentum",
        "optim_args": "momentum=0.5",
        "learning_rate": 0.1,
        "weight_decay": 0.0,
        "max_steps": 4,
    }
    return prepare_job(golden_arguments(directory, "qwen2", **{**options, "lr_scheduler_type": "constant", **changes}))


def test_it_trains_as_its_formula_says(device: Device, tmp_path: Path) -> None:
    """The first step alone, after reading its gradients; then what is saved after two steps."""
    first = job(tmp_path / "a", max_steps=1)
    session, run = first.session, first.run
    run.prepare_directory()
    session.allocate()
    run.place(session)
    session.begin()
    for groups in run.stream.groups(next(run.stream.steps())):
        session.accumulate(groups)
    before = session.adapters.read(session.device, 0)
    gradients = session.adapters.read(session.device, 0, session.adapters.grads)
    report = session.optimizer.apply(session.device, {0: SlotUpdate(1, 0.1, run.args)})[0]
    assert report.applied
    factor = min(1.0, 1 / (report.grad_norm + 1e-6))
    after, state = session.adapters.read(session.device, 0), session.optimizer.state.read(session.device, 0)
    for module, pair in before.items():
        for part, old, new, g in zip("AB", pair, after[module], gradients[module], strict=True):
            np.testing.assert_allclose(new, old - 0.1 * factor * g, rtol=1e-5, atol=1e-7)
            np.testing.assert_allclose(state[f"{module}.{part}.momentum"], factor * g, rtol=1e-5, atol=1e-9)
            counts = state[f"{module}.{part}.updates"]
            assert counts.dtype == np.uint32
            assert (counts == 1).all()
    session.close()


def test_it_is_saved_and_resumed(device: Device, tmp_path: Path) -> None:
    """With the same bytes as an uninterrupted run; the state of another optimizer, or a damaged one, is refused."""
    assert_resumes_exactly(job, tmp_path)
    steps = tmp_path / "b" / "run" / "checkpoints"
    state = load_file(steps / "step-4" / "optimizer.safetensors")
    assert {name.rsplit(".", 1)[1] for name in state} == {"momentum", "updates"}
    assert {int(values.min()) for name, values in state.items() if name.endswith("updates")} == {4}
    broken = {name: values.astype(np.float32) if name.endswith("updates") else values for name, values in state.items()}
    save_file(broken, steps / "step-4" / "optimizer.safetensors")
    (steps / "step-4" / MANIFEST).unlink()
    write_manifest(steps / "step-4")
    with pytest.raises(UserError, match=r"updates is float32 \[\d+, 1\], expected uint32 \[\d+, 1\]"):
        job(tmp_path / "b", resume=True, max_steps=6).train()


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16"])
def test_values_that_no_state_can_have(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """Whatever the state is stored in: bf16 is read as integers."""
    monkeypatch.setattr(Momentum, "state", (State("momentum"), State("updates", dtype, 2, minimum=0.0)))
    run = job(tmp_path / "a")
    run.session.allocate()
    optimizer_state = run.session.optimizer.state
    own = run.session.device
    stored = optimizer_state.read(own, 0)
    run.session.close()
    assert optimizer_state.fault(0, stored) is None
    (name, *_) = (name for name in stored if name.endswith(".updates"))
    for value, message in (
        (np.nan, "that are not finite"),
        (-np.inf, "that are not finite"),
        (-1.0, "below 0"),
        (2.0, None),
    ):
        stored[name][-1, -1] = np.float32(value).view(np.uint32) >> 16 if dtype == "bf16" else value
        assert optimizer_state.fault(0, stored) == (message and f"{name} has values {message}")
