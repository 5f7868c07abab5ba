"""Initial adapters by PEFT's names: their values, PEFT's loss curves, and how they are saved and continued."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import FIXTURES, path_of, short_of
from support.models import golden
from support.training.training import golden_arguments, gradients_of, model_dir, random_rows

from wgpu_lora.errors import UserError
from wgpu_lora.formats.peft_adapter import PARTS, read_adapter, tensor_name, write_adapter
from wgpu_lora.formats.peft_config import AdapterConfig
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.train import init_methods
from wgpu_lora.train.adapter_tasks import task_of
from wgpu_lora.train.init_methods import FROM_WEIGHT, INITIALISATIONS, from_weight, largest, offsets, subspace
from wgpu_lora.train.job import Job
from wgpu_lora.train.options.training_arguments import TrainingArguments, from_values
from wgpu_lora.train.prepare_job import prepare_job, prepare_multi_adapter_job
from wgpu_lora.train.run.adapter_init import SeededMatrices, initial_matrices, read_weight
from wgpu_lora.train.run.training_log import LOG, read_log
from wgpu_lora.weights.base_formats import base_format

WEIGHTS = "adapter_model.safetensors"


def job_of(device: Device, args: TrainingArguments) -> Job[Any]:
    return prepare_job(args, open_model(str(args.model), device, args.base_dtype))


def decaying(rng: np.random.Generator, out: int, size_in: int) -> np.ndarray:
    u, _ = np.linalg.qr(rng.standard_normal((out, min(out, size_in))))
    v, _ = np.linalg.qr(rng.standard_normal((size_in, min(out, size_in))))
    return ((u * 0.8 ** np.arange(u.shape[1])) @ v.T).astype(np.float32)


@pytest.mark.parametrize("shape", [(30, 50), (50, 30)])
def test_the_largest_singular_triplets(rng: np.random.Generator, shape: tuple[int, int]) -> None:
    w = decaying(rng, *shape)
    u, s, vt = np.linalg.svd(w.astype(np.float64), full_matrices=False)
    want = (u[:, :5] * s[:5]) @ vt[:5]
    for triplet, bound in ((largest(w, 5), 1e-6), (subspace(w, 5, 16, rng), 1e-5), (subspace(w, 5, 1, rng), 0.05)):
        product = (triplet[0] * triplet[1]) @ triplet[2]
        assert np.linalg.norm(product - want) < bound * np.linalg.norm(want)
        np.testing.assert_allclose(triplet[1], s[:5], rtol=max(bound, 1e-5))


@pytest.mark.parametrize("name", sorted({*FROM_WEIGHT, "pissa_niter_16"}))
@pytest.mark.parametrize("shape", [(30, 20), (20, 30), (3, 20)])
def test_factors_from_a_weight(rng: np.random.Generator, name: str, shape: tuple[int, int]) -> None:
    w, rank, scaling = decaying(rng, *shape), 6, 2.5
    a, b = from_weight(name, w, rank, scaling, rng)
    assert (a.shape, b.shape, a.dtype, b.dtype) == ((6, shape[1]), (shape[0], 6), np.float32, np.float32)
    u, s, vt = np.linalg.svd(w.astype(np.float64), full_matrices=False)
    fits = min(rank, *shape)
    if name == "olora":  # LAPACK's signs cancel
        q, r = np.linalg.qr(w.astype(np.float64))
        np.testing.assert_allclose(b @ a, q[:, :fits] @ r[:fits], atol=1e-6)
    else:
        np.testing.assert_allclose(scaling * b @ a, (u[:, :fits] * s[:fits]) @ vt[:fits], atol=1e-5)
        np.testing.assert_allclose(np.linalg.norm(a, axis=1)[:fits], np.linalg.norm(b, axis=0)[:fits], rtol=1e-3)
    assert not a[fits:].any()
    assert not b[:, fits:].any()


def test_factors_from_a_shape() -> None:
    a, b = initial_matrices(1, 2, (300, 400), 8, "gaussian")
    assert a.std() == pytest.approx(1 / 8, rel=0.05)
    assert not b.any()
    a, b = initial_matrices(1, 2, (300, 400), 8, "orthogonal")
    assert np.abs(b @ a).max() < 1e-6 < 0.01 < min(a.std(), b.std())
    again = initial_matrices(1, 2, (300, 400), 8, "orthogonal")
    np.testing.assert_array_equal(a, again[0])
    assert (a != initial_matrices(1, 3, (300, 400), 8, "orthogonal")[0]).all()


@pytest.mark.parametrize("name", ["pissa", "olora"])
def test_loss_curves_are_pefts(device: Device, tmp_path: Path, name: str) -> None:
    """Also the products that are subtracted: signs of A and B depend on the library, and change nothing."""
    expected = load_file(FIXTURES / "golden" / "variants.safetensors")
    args = golden_arguments(tmp_path, "llama", base_dtype="f32", init_adapter=None, lora_r=4, lora_alpha=8.0)
    args = from_values({"init_lora_weights": name}, "test", args)
    job = job_of(device, args)
    job.train()
    log = [line for line in read_log(tmp_path / "run" / LOG) if "loss" in line]
    assert [line["loss"] for line in log] == pytest.approx(expected[f"{name}.losses.f32"].tolist(), rel=1e-3)
    assert [line["grad_norm"] for line in log] == pytest.approx(expected[f"{name}.grad_norms.f32"].tolist(), rel=1e-2)
    config, matrices = read_adapter(tmp_path / "run")
    assert (config.r, config.lora_alpha) == (8, 16)
    for key, want in expected.items():
        if key.startswith(f"{name}.product."):
            _, _, layer, module = key.split(".")
            a, b = matrices[path_of(layer, module)]
            np.testing.assert_allclose(-2 * b[:, 4:] @ a[4:], want, atol=2e-5)


def options(tmp_path: Path, run: str = "run", **changes: Any) -> TrainingArguments:
    data = tmp_path / "rows.jsonl"
    if not data.exists():
        random_rows(data, 8, 301)
    usual: dict[str, Any] = {
        "model": str(model_dir("qwen2")),
        "data": str(data),
        "output": str(tmp_path / run),
        "base_dtype": "nf4",
        "lora_r": 4,
        "lora_alpha": 6,
        "use_rslora": True,
        "learning_rate": 2e-3,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_length": 16,
        "packing": False,
        "max_steps": 3,
        "lr_scheduler_type": "constant",
        "save_steps": 2,
        "logging_steps": 1,
        "tune": False,
    }
    return TrainingArguments(**(usual | changes))


# A pipeline's adapters, of all kinds beside a plain one.
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dora": {"use_dora": True, "dropout": 0.1, "rank": 3},
    "pissa": {"init_lora_weights": "pissa_niter_2", "dropout": 0.1, "target_modules": "q_proj,down_proj"},
    "loftq": {"init_lora_weights": "loftq"},
}


def pipeline(model: LoadedModel, tmp_path: Path, place: str, start: str = "", **changes: Any) -> Job[Any]:
    """start: of adapters to continue, as plain ones."""
    args = replace(options(tmp_path, f"{place}/record"), data=None, lora_dropout=0.0, **changes)
    data = {"data": str(tmp_path / "rows.jsonl"), "eval_data": str(tmp_path / "rows.jsonl")}
    tasks = []
    for name, kind in KINDS.items():
        own = {"init_adapter": str(tmp_path / start / name)} if start else kind
        tasks.append(task_of({**data, "checkpoint": str(tmp_path / place / name), **own}, "task"))
    return prepare_multi_adapter_job(args, tasks, model=model)


def test_adapters_of_all_kinds_beside_each_other(device: Device, tmp_path: Path) -> None:
    """They begin as the base, are resumed to the byte, give the results of each alone, and continue where they were."""
    model = open_model(str(model_dir("qwen2")), device, "nf4")
    once = pipeline(model, tmp_path, "once")
    once.train()
    first = {run.adapter_name: run.state.first_eval_loss for run in once.runs}
    last = {run.adapter_name: run.state.last_eval_loss for run in once.runs}
    for name in ("dora", "pissa"):
        assert first[name] == pytest.approx(first["plain"], rel=1e-5), name
    assert abs(first["loftq"] / first["plain"] - 1) > 1e-4
    pipeline(model, tmp_path, "cut", max_steps=1).train()
    pipeline(model, tmp_path, "cut", resume=True).train()
    for name in KINDS:
        for file in (WEIGHTS, "last/optimizer.safetensors"):
            actual, want = ((tmp_path / place / name / file).read_bytes() for place in ("cut", "once"))
            assert actual == want, f"{file} of {name}"
    for name in ("dora", "pissa"):
        task = task_of({"data": str(tmp_path / "rows.jsonl"), "checkpoint": "x", **KINDS[name]}, "task")
        args = replace(task.arguments(replace(once.shared.args, data=None)), output=str(tmp_path / "alone" / name))
        prepare_job(args, model).train()
        (_, alone), (_, beside) = (read_adapter(tmp_path / place / name) for place in ("alone", "once"))
        for module, parts in alone.items():
            for ours, theirs in zip(parts, beside[module], strict=True):
                # The first updates of Adam are all of one size, and rounding may turn the smallest gradients round.
                change = 3 * once.shared.args.learning_rate * np.sqrt(ours.size)
                assert np.linalg.norm(ours - theirs) < 0.01 * change, module
    again = pipeline(model, tmp_path, "again", start="once", max_steps=1, lora_r=16, lora_alpha=32.0, use_rslora=False)
    again.train()
    for run in again.runs:
        assert run.state.first_eval_loss == pytest.approx(last[run.adapter_name], rel=1e-5), run.adapter_name
    model.unload()


def test_loftq_restores_what_quantising_took(device: Device, tmp_path: Path) -> None:
    args = options(tmp_path, init_lora_weights="loftq", lora_r=52)  # all of it
    model = open_model(str(args.model), device, "nf4")
    model.load_weights()
    module = path_of("0", "q_proj")
    a, b = SeededMatrices(args, model.config, model)[module]
    w = read_weight(model, f"{module}.weight")
    quantised = base_format("nf4").round_trip(w)
    scaling = args.lora_alpha / np.sqrt(args.lora_r)
    assert np.abs(w - quantised).max() > 0.01
    np.testing.assert_allclose(quantised + scaling * b @ a, w, atol=1e-5)
    model.unload()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"init_lora_weights": "eva"},
            "must be one of true, gaussian, orthogonal, pissa, olora, loftq",
        ),
        ({"init_lora_weights": "pissa_niter_"}, "must be one of"),
        ({"init_lora_weights": "pissa", "use_dora": True}, "use_dora cannot be combined"),
        ({"init_lora_weights": "orthogonal", "lora_r": 3}, "needs an even rank: use lora_r 4"),
        ({"init_lora_weights": "pissa", "init_adapter": "x"}, "init_adapter cannot be combined"),
    ],
)
def test_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as refused:
        from_values(values, "x")
    assert message in str(refused.value).replace("--", "").replace("-", "_").replace("=", " ")


def test_loftq_needs_a_quantised_base(device: Device, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs a base that is quantised while it is loaded"):
        job_of(device, options(tmp_path, base_dtype="f32", init_lora_weights="loftq"))
    assert not (tmp_path / "run").exists()


def test_a_recipe_may_say_true() -> None:
    assert from_values({"init_lora_weights": True}, "x").init_lora_weights in INITIALISATIONS
    assert not offsets(init_methods.DEFAULT)


# -- DoRA --------------------------------------------------------------------------------------------------------------

ARCHITECTURE = "llama"


def variants() -> dict[str, np.ndarray]:
    return load_file(FIXTURES / "golden" / "variants.safetensors")


def initial(directory: Path) -> Path:
    """The golden adapter with magnitudes that are not the weights'."""
    stored = {name: values for name, values in golden(ARCHITECTURE).items() if name.startswith("adapter.")}
    stored |= {name[5:]: values for name, values in variants().items() if name.startswith("dora.adapter.")}
    tensors = {}
    for name, values in stored.items():
        _, layer, module, part = name.split(".")
        tensors[tensor_name(path_of(layer, module), part)] = values
    write_adapter(directory, tensors, AdapterConfig(r=4, lora_alpha=8, use_dora=True))
    return directory


def arguments(tmp_path: Path, base: str, **changes: Any) -> TrainingArguments:
    args = golden_arguments(tmp_path, ARCHITECTURE, base_dtype=base, **changes)
    return replace(args, init_adapter=str(initial(tmp_path / "dora")))


@pytest.mark.parametrize(("base", "recompute"), [("f32", False), ("nf4", True)])
def test_gradients_match_pefts(device: Device, tmp_path: Path, base: str, recompute: bool) -> None:
    expected, job = variants(), job_of(device, arguments(tmp_path, base, gradient_checkpointing=recompute))
    loss, gradients = gradients_of(job, device, ARCHITECTURE)
    assert loss == pytest.approx(expected[f"dora.loss.{base}"][0], rel=1e-5)
    assert {name.rpartition(".")[2] for name in gradients} == set(PARTS)
    for name, gradient in gradients.items():
        want = expected[f"dora.grad.{base}.{name}"]
        assert np.abs(gradient - want).max() < 2e-5 * np.abs(want).max(), name


@pytest.mark.parametrize("base", ["f32", "nf4"])
def test_loss_curve_matches_pefts(device: Device, tmp_path: Path, base: str) -> None:
    expected = variants()
    job_of(device, arguments(tmp_path, base)).train()
    log = [line for line in read_log(tmp_path / "run" / LOG) if "loss" in line]
    assert [line["loss"] for line in log] == pytest.approx(expected[f"dora.losses.{base}"].tolist(), rel=1e-4)
    assert [line["grad_norm"] for line in log] == pytest.approx(expected[f"dora.grad_norms.{base}"].tolist(), rel=1e-3)
    config, matrices = read_adapter(tmp_path / "run")
    assert config.use_dora
    for module, parts in matrices.items():
        for part, matrix in zip(PARTS, parts, strict=True):
            first = expected if part == "M" else golden(ARCHITECTURE)
            start = first[f"{'dora.' if part == 'M' else ''}adapter.{short_of(module)}.{part}"]
            final = expected[f"dora.final.{base}.{short_of(module)}.{part}"]
            error = np.linalg.norm(matrix - final) / np.linalg.norm(final - start)
            assert error < 1e-3, f"{module}.{part}: {error}"
