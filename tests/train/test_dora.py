"""DoRA in training, compared with PEFT's, with finite differences, and with runs that were interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import FIXTURES, path_of, short_of
from support.models import golden
from support.training import golden_arguments

from wgpu_lora.formats.peft_adapter import PARTS, read_adapter, tensor_name, write_adapter
from wgpu_lora.formats.peft_config import AdapterConfig
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.batch_inputs import Segment
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.train.finetune import FinetuneJob, prepare_job
from wgpu_lora.train.objectives.objective import Group
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.run.training_log import LOG, read_log

ARCHITECTURE = "llama"


def variants() -> dict[str, np.ndarray]:
    return load_file(FIXTURES / "golden" / "variants.safetensors")


def initial(directory: Path) -> Path:
    """The golden adapter with magnitudes that are not the weights'."""
    stored = {name: values for name, values in golden(ARCHITECTURE).items() if name.startswith("adapter.")}
    stored |= {name[5:]: values for name, values in variants().items() if name.startswith("dora.adapter.")}
    tensors = {}
    for name, values in stored.items():
        _, layer, module, which = name.split(".")
        tensors[tensor_name(path_of(layer, module), which)] = values
    write_adapter(directory, tensors, AdapterConfig(r=4, lora_alpha=8, use_dora=True))
    return directory


def arguments(tmp_path: Path, base: str, **changes: Any) -> TrainingArguments:
    args = golden_arguments(tmp_path, ARCHITECTURE, base_dtype=base, **changes)
    from dataclasses import replace

    return replace(args, init_adapter=str(initial(tmp_path / "dora"))) if "init_adapter" not in changes else args


def job_of(device: Device, args: TrainingArguments) -> FinetuneJob:
    return prepare_job(args, open_model(str(args.model), device, args.base_dtype))


@pytest.mark.parametrize(("base", "recompute"), [("f32", False), ("nf4", True)])
def test_gradients_match_pefts(device: Device, tmp_path: Path, base: str, recompute: bool) -> None:
    values, expected = golden(ARCHITECTURE), variants()
    job = job_of(device, arguments(tmp_path, base, gradient_checkpointing=recompute))
    session = job.session
    session.allocate()
    job.run.place_initial(session)
    rows = [(values["input_ids"][i, :n], values["labels"][i, :n]) for i, n in enumerate(values["lengths"])]
    tokens = sum(int((labels[1:] != -100).sum()) for _, labels in rows)
    session.begin()
    session.accumulate([Group((Segment(ids, labels),), weight=1 / tokens) for ids, labels in rows])
    total = session.totals.read_loss(device, 0)
    pairs = session.adapters.read(device, 0, session.adapters.grads)
    session.close()
    assert total / tokens == pytest.approx(expected[f"dora.loss.{base}"][0], rel=1e-5)
    for module, parts in pairs.items():
        assert len(parts) == len(PARTS)
        for which, found in zip(PARTS, parts, strict=True):
            want = expected[f"dora.grad.{base}.{short_of(module)}.{which}"]
            assert np.abs(found - want).max() < 2e-5 * np.abs(want).max(), f"{module}.{which}"


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
        for which, found in zip(PARTS, parts, strict=True):
            first = expected if which == "M" else golden(ARCHITECTURE)
            begun = first[f"{'dora.' if which == 'M' else ''}adapter.{short_of(module)}.{which}"]
            final = expected[f"dora.final.{base}.{short_of(module)}.{which}"]
            error = np.linalg.norm(found - final) / np.linalg.norm(final - begun)
            assert error < 1e-3, f"{module}.{which}: {error}"
