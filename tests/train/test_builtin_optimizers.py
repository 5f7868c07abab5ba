"""The optimizers of the package: golden steps, what they keep, and runs with them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.models import FIXTURES
from support.training.optimizing import GOLDEN_LIMITS, Optimizing
from support.training.training import golden_arguments, random_rows

from wgpu_lora.api.multi_adapter import MultiAdapterPipeline
from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.ops.gradient_norm import MAX_PARAMETER
from wgpu_lora.train.optimizers import OPTIMIZERS
from wgpu_lora.train.prepare_job import prepare_job
from wgpu_lora.train.run.records import RunRecord
from wgpu_lora.train.run.run_checkpoint import MANIFEST, write_manifest

MODULES = {"a": (40, 640), "b": (520, 30)}
RANK, STEPS, RATE = 8, 200, 1e-3
NAMES = ("a.A", "a.B", "b.A", "b.B")
# Case -> options, where they are more than its name.
OPTIONS: dict[str, dict[str, Any]] = {
    "sgd": {"optim_args": "momentum=0.9,nesterov=true"},
    "loraplus": {"optim": "adamw", "loraplus_lr_ratio": 4.0},
}


@pytest.fixture(scope="module")
def golden() -> dict[str, np.ndarray]:
    return load_file(FIXTURES / "golden" / "optimizers.safetensors")


def gradients(golden: dict[str, np.ndarray], step: int) -> dict[str, np.ndarray]:
    return {name: golden["weights"][step] * golden[f"gradients.{name}"][step % 10] for name in NAMES}


def trained(device: Device, golden: dict[str, np.ndarray], **options_of: Any) -> dict[str, np.ndarray]:
    """After all steps, in the first of two slots; the other one has a larger rank, and takes no step."""
    run = Optimizing(device, MODULES, (RANK, RANK), weight_decay=0.01, max_grad_norm=0.0, **options_of)
    run.write(0, {name: golden[f"initial.{name}"] for name in NAMES})
    for step in range(STEPS):
        assert run.step({0: gradients(golden, step)}, step + 1, RATE)[0].applied
    matrices = run.read(0)
    run.close()
    return matrices


def distance(matrices: dict[str, np.ndarray], golden: dict[str, np.ndarray], case: str) -> dict[str, float]:
    """By matrix, relative to the way from the initial values."""
    return {
        name: float(
            np.linalg.norm(matrices[name] - (want := golden[f"{case}.{name}"]))
            / np.linalg.norm(want - golden[f"initial.{name}"])
        )
        for name in NAMES
    }


@pytest.mark.parametrize("case", GOLDEN_LIMITS)
def test_200_steps(device: Device, golden: dict[str, np.ndarray], case: str) -> None:
    distances = distance(trained(device, golden, **{"optim": case, **OPTIONS.get(case, {})}), golden, case)
    assert max(distances.values()) < GOLDEN_LIMITS[case], distances


def orthogonalised(x: np.ndarray) -> np.ndarray:
    """Five iterations of Newton-Schulz in float64, as Jordan's muon.py has them."""
    y = x.T if x.shape[0] > x.shape[1] else x
    y = y / max(float(np.linalg.norm(y)), 1e-7)
    for _ in range(5):
        gram = y @ y.T
        y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
    return y.T if x.shape[0] > x.shape[1] else y


@pytest.mark.parametrize("adjust", ["match_rms_adamw", "original"])
def test_muon_in_float64(device: Device, golden: dict[str, np.ndarray], adjust: str) -> None:
    """20 steps; on the whole matrix instead of its small side, and without bf16."""
    initial = {name: golden[f"initial.{name}"] for name in NAMES}
    options_of = {"optim": "muon", "optim_args": f"adjust_lr_fn={adjust}", "max_grad_norm": 0.0, "weight_decay": 0.1}
    run = Optimizing(device, MODULES, (RANK, RANK + 3), **options_of)
    run.write(0, initial)
    want = {name: values.astype(np.float64) for name, values in initial.items()}
    momentum = {name: np.zeros_like(values) for name, values in want.items()}
    for step in range(20):
        grads = gradients(golden, step)
        assert run.step({0: grads}, step + 1, RATE)[0].applied
        for name, g in grads.items():
            momentum[name] += 0.05 * (g - momentum[name])
            rows, cols = g.shape
            scale = 0.2 * max(rows, cols) ** 0.5 if adjust == "match_rms_adamw" else max(1, rows / cols) ** 0.5
            moved = scale * orthogonalised(g + 0.95 * (momentum[name] - g))
            want[name] = want[name] * (1 - RATE * 0.1) - RATE * moved
    matrices = run.read(0)
    run.close()
    for name, values in want.items():
        assert np.linalg.norm(matrices[name] - values) < 1e-4 * np.linalg.norm(values - initial[name])


# -- what every optimizer keeps ----------------------------------------------------------------------------------------

# With rank 8, a.A and b.B have at least 4,096 values; with rank 3, none has.
KINDS = [*OPTIMIZERS, "sgd momentum=0.9"]
KEPT = {"adamw": 8.0, "adamw_8bit": 2.03125, "adamw_bf16": 4.0, "lion": 4.0, "lion_8bit": 1.015625, "muon": 4.0}


def options(kind: str) -> dict[str, Any]:
    name, _, own = kind.partition(" ")
    return {"optim": name, "optim_args": own or None}


def random_matrices(rng: np.random.Generator, rank: int, scale: float = 0.1) -> dict[str, np.ndarray]:
    shapes = {f"{m}.{w}": (rank, i) if w == "A" else (o, rank) for m, (o, i) in MODULES.items() for w in "AB"}
    return {name: (scale * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}


def same(first: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    return first.keys() == other.keys() and all(
        first[name].dtype == other[name].dtype and np.array_equal(first[name], other[name]) for name in first
    )


@pytest.fixture(params=KINDS)
def run(request: pytest.FixtureRequest, device: Device) -> Any:
    trainer = Optimizing(device, MODULES, (8, 3), weight_decay=0.01, **options(request.param))
    yield trainer
    trainer.close()


def optimizer_state(run: Optimizing, slot: int) -> dict[str, np.ndarray]:
    return run.optimizer.state.read(run.device, slot)


def test_continuing_from_what_was_read(run: Optimizing, rng: np.random.Generator) -> None:
    """Also into another place, beside other adapters: the same bytes as without a break."""
    start, steps = (
        [random_matrices(rng, 8), random_matrices(rng, 3)],
        [[random_matrices(rng, 8), random_matrices(rng, 3)] for _ in range(4)],
    )
    for slot, values in enumerate(start):
        run.write(slot, values)
    for number, gradients in enumerate(steps[:2]):
        run.step(dict(enumerate(gradients)), number + 1, 1e-2)
    weights, states = [run.read(slot) for slot in (0, 1)], [optimizer_state(run, slot) for slot in (0, 1)]
    for number, gradients in enumerate(steps[2:]):
        run.step(dict(enumerate(gradients)), number + 3, 1e-2)
    after = [(run.read(slot), optimizer_state(run, slot)) for slot in (0, 1)]
    for slot in (0, 1):
        run.optimizer.state.fill(run.device, rng)
        run.write(slot, weights[slot])
        run.optimizer.state.write(run.device, slot, states[slot])
        assert same(optimizer_state(run, slot), states[slot])
        for number, gradients in enumerate(steps[2:]):  # the other adapter takes no step
            run.step({slot: gradients[slot]}, number + 3, 1e-2)
        assert same(run.read(slot), after[slot][0])
        assert same(optimizer_state(run, slot), after[slot][1])


def test_steps_that_are_not_taken(run: Optimizing, rng: np.random.Generator) -> None:
    """A slot whose gradient is not finite, or that would move beyond the largest weight; the other one moves."""
    for slot, rank in enumerate((8, 3)):
        run.write(slot, random_matrices(rng, rank))
    run.step({0: random_matrices(rng, 8), 1: random_matrices(rng, 3)}, 1, 1e-2)
    before, states = run.read(0), optimizer_state(run, 0)
    broken = random_matrices(rng, 8)
    broken["b.B"][519, 7] = np.nan
    for gradients, rate in ((broken, 1e-2), (random_matrices(rng, 8), 100 * MAX_PARAMETER)):
        other_slot = run.read(1)
        reports = run.step({0: gradients, 1: random_matrices(rng, 3)}, 2, rate)
        assert not reports[0].applied
        assert reports[0].diverged == (rate > 1)
        assert same(run.read(0), before)
        assert same(optimizer_state(run, 0), states)
        assert reports[1].applied == (rate < 1)
        assert same(run.read(1), other_slot) == (rate > 1)
    report = run.step({0: random_matrices(rng, 8)}, 2, 1e-2)[0]
    assert report.applied
    assert np.isfinite(report.grad_norm)  # gradients were zeroed
    assert not same(run.read(0), before)


def test_what_a_checkpoint_may_hold(run: Optimizing, rng: np.random.Generator) -> None:
    state = run.optimizer.state
    for slot, rank in enumerate((8, 3)):
        run.write(slot, random_matrices(rng, rank))
        run.step({slot: random_matrices(rng, rank)}, 1, 1e-2)
    for slot in (0, 1):
        stored = optimizer_state(run, slot)
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
    states = {kind: optimizer_state(run, 0) for kind, run in runs.items()}
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
    size = sum(tensor.nbytes for page in pages for tensor in page if not tensor.name.startswith(("places", "homes")))
    blocks = sum(table.size for table in run.adapters.block_owners)
    used = 16 if kind.endswith("8bit") else blocks  # records of blocks that have an owner
    assert size == pytest.approx(KEPT[kind] * 1024 * used, rel=1e-3)
    run.close()


def test_small_matrices_are_not_rounded(device: Device, rng: np.random.Generator) -> None:
    """Of fewer than 4,096 values at the adapter's own rank, whatever ranks are beside it, as in bitsandbytes."""
    run = Optimizing(device, MODULES, (8, 3), optim="adamw_8bit")
    types = [{name: values.dtype.name for name, values in optimizer_state(run, slot).items()} for slot in (0, 1)]
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
        stored = optimizer_state(run, 1)
        shapes = {name: values.shape for name, values in stored.items() if name.startswith("a.M")}
        assert (4500,) in shapes.values()
        assert run.optimizer.state.fault(1, stored) is None
        run.optimizer.state.write(run.device, 0, {})
        run.optimizer.state.write(run.device, 1, {})
        assert not any(values.any() for slot in (0, 1) for values in optimizer_state(run, slot).values())
        run.optimizer.state.write(run.device, 1, stored)
        assert same(optimizer_state(run, 1), stored)
        assert not any(values.any() for values in optimizer_state(run, 0).values())
        run.close()
    with pytest.raises(UserError, match=r"trains the A and B of LoRA only, not a\.M: choose another optimizer"):
        Optimizing(device, modules, (8,), optim="muon", use_dora=True)


# -- runs with other optimizers than AdamW -----------------------------------------------------------------------------

FILES = ("adapter_model.safetensors", "optimizer.safetensors")


def train(qwen2: LoadedModel, directory: Path, optim: str, **changes: Any) -> RunRecord:
    directory.mkdir(exist_ok=True)
    options = {"init_adapter": None, "lora_r": 96, "target_modules": "q_proj", "lr_scheduler_type": "constant"}
    args = golden_arguments(directory, "qwen2", optim=optim, loraplus_lr_ratio=4.0, save_steps=2, **options | changes)
    return prepare_job(args, qwen2).train()


def test_resuming(qwen2: LoadedModel, tmp_path: Path) -> None:
    whole = train(qwen2, tmp_path / "a", "adamw_8bit", max_steps=4)
    train(qwen2, tmp_path / "b", "adamw_8bit", max_steps=2)
    resumed = train(qwen2, tmp_path / "b", "adamw_8bit", max_steps=4, resume=True)
    assert resumed.options.loraplus_lr_ratio == 4.0
    assert whole.adapter_sha256 == resumed.adapter_sha256
    last = [tmp_path / name / "run" / "checkpoints" / "step-4" for name in "ab"]
    for file in FILES:
        assert (last[0] / file).read_bytes() == (last[1] / file).read_bytes()
    types = {values.dtype.name for values in load_file(last[0] / FILES[1]).values()}
    assert types == {"uint8", "float32"}
    with pytest.raises(UserError, match="optim was 'adamw_8bit', not 'lion'"):
        train(qwen2, tmp_path / "b", "lion", max_steps=6, resume=True)


def test_a_state_in_the_same_form_of_another_optimizer(qwen2: LoadedModel, tmp_path: Path) -> None:
    """As those of lion and muon: refused by name, and nothing is written."""
    steps = {}
    for optim in ("lion", "muon"):
        train(qwen2, tmp_path / optim, optim, max_steps=1)
        steps[optim] = tmp_path / optim / "run" / "checkpoints" / "step-1"
    (steps["lion"] / FILES[1]).write_bytes((steps["muon"] / FILES[1]).read_bytes())
    (steps["lion"] / MANIFEST).unlink()
    write_manifest(steps["lion"])
    before = {path: path.stat().st_mtime_ns for path in steps["lion"].parent.rglob("*")}
    with pytest.raises(UserError, match=r"optimizer.safetensors .* holds the state of 'muon', not of 'lion'"):
        train(qwen2, tmp_path / "lion", "lion", max_steps=2, resume=True)
    assert before == {path: path.stat().st_mtime_ns for path in steps["lion"].parent.rglob("*")}


def test_several_adapters(qwen2: LoadedModel, tmp_path: Path) -> None:
    """Of different ranks and ratios of LoRA+, with Muon: resumed with the same bytes."""
    data = str(random_rows(tmp_path / "rows.jsonl", 8, 301))
    own: dict[str, dict[str, Any]] = {"a": {"rank": 4}, "b": {"rank": 2, "loraplus_lr_ratio": 8.0}}
    shared: dict[str, Any] = {
        "optim": "muon",
        "target_modules": "q_proj,down_proj",
        "lr_scheduler_type": "constant",
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 1,
        "max_length": 16,
        "packing": False,
        "learning_rate": 1e-2,
    }

    def together(place: str, **how: Any) -> list[dict[str, np.ndarray]]:
        tasks = [{"data": data, "checkpoint": str(tmp_path / place / name), **values} for name, values in own.items()]
        MultiAdapterPipeline(tasks, qwen2, output=str(tmp_path / place / "all"), **shared | how).train()
        return [load_file(tmp_path / place / name / FILES[0]) for name in own]

    whole = together("whole", max_steps=2)
    together("parts", max_steps=1)
    for adapter, other in zip(whole, together("parts", max_steps=2, resume=True), strict=True):
        assert all(np.array_equal(adapter[name], other[name]) for name in adapter)
