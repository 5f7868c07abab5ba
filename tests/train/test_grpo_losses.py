"""The losses, advantages and masks of GRPO and RLOO against TRL's own code (scripts/golden/golden_grpo.py)."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from support import short_of
from support.models import FIXTURES, save_golden_adapter
from support.training.training import assert_gradient_is_slope, model_dir

from wgpu_lora.errors import UserError
from wgpu_lora.formats.peft_adapter import PARTS
from wgpu_lora.gpu.device import Device
from wgpu_lora.models.adapter_set import AdapterSet, SlotSpec
from wgpu_lora.models.batch_inputs import Segment
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.train.objectives.grpo import GRPO, KEPT, OLD
from wgpu_lora.train.objectives.objective import Group
from wgpu_lora.train.objectives.rloo import RLOO
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.run.adapter_init import frozen_adapter
from wgpu_lora.train.session.optimizer_update import SlotUpdate
from wgpu_lora.train.session.session import Session

CASES: dict[str, dict[str, Any]] = json.loads((FIXTURES / "golden" / "grpo.json").read_text())
KINDS = {"grpo": GRPO, "rloo": RLOO}
TRUNCATED, GENERATIONS = 5, 4  # of scripts/golden/golden_grpo.py
RATE, EPSILON = 2e-3, 1e-5


@cache
def golden() -> dict[str, np.ndarray]:
    return load_file(FIXTURES / "golden" / "grpo.safetensors")


def objective(**options: Any) -> GRPO:
    kind = KINDS[options.pop("objective", "grpo")]
    return kind(**{"reward_funcs": "accuracy", "beta": 0.0, **options})


def opened(device: Device, tmp_path: Path, grpo: GRPO) -> Session:
    """A session with the initial golden adapter of the matrices that TRL trains."""
    model = open_model(str(model_dir("qwen2")), device, "f32")
    frozen = frozen_adapter(str(save_golden_adapter("qwen2", tmp_path / "initial")), model.config)
    matrices = {m: parts for m, parts in frozen.matrices.items() if m.endswith(("q_proj", "down_proj"))}
    modules = {m: frozen.spec.scaling[m] for m in matrices}
    trained = AdapterSet.declare(model.config, [SlotSpec(frozen.spec.rank, modules)], device.max_binding)
    session = Session(model, trained, [112], positions=16, objectives=[grpo])
    session.allocate()
    session.place_initial(0, matrices)
    return session


def groups_of(grpo: GRPO, name: str) -> list[Group]:
    values = golden()
    answers = [values[f"answer.{i}"] for i in range(2 * GENERATIONS)]
    lengths = [0 if i == TRUNCATED else len(answer) for i, answer in enumerate(answers)]
    weights = grpo.completion_weights(lengths, sum(lengths), 1)
    groups = []
    for i, answer in enumerate(answers):
        prompt = values[f"prompt.{i // GENERATIONS}"]
        ids = np.concatenate([prompt, answer])
        labels = np.concatenate([np.full(len(prompt), -100), answer])
        inputs = np.zeros((len(answer), 3), np.float32)
        inputs[:, OLD], inputs[:, KEPT] = values[f"{name}.old"][i, : len(answer)], 1
        weight = 0.0 if i == TRUNCATED else weights[i]
        groups.append(Group((Segment(ids, labels),), 0, weight, float(values["advantages"][i]), inputs=inputs))
    return groups


@pytest.mark.parametrize("name", [name for name in CASES if name != "entropy"])
def test_twenty_steps_are_those_of_trl(device: Device, tmp_path: Path, name: str) -> None:
    """Losses, metrics and adapters; the reference is the base model alone, and one completion is masked."""
    grpo, values = objective(**CASES[name]), golden()
    session = opened(device, tmp_path, grpo)
    curves: dict[str, list[float]] = {}
    args = TrainingArguments(adam_epsilon=EPSILON, weight_decay=0.01)
    for step in range(20):
        session.begin()
        session.accumulate(groups_of(grpo, name))
        [report] = session.optimizer.apply(device, {0: SlotUpdate(step + 1, RATE, args)}).values()
        metrics = grpo.logged(session.totals.read_metrics(device, 0, grpo), 1)
        for key, value in {"loss": report.loss_sum, **metrics}.items():
            curves.setdefault(key, []).append(value)
    compared = [key for key in curves if f"{name}.{key}" in values]
    assert {"loss", "entropy"} <= set(compared)
    assert "kl" in compared or not CASES[name].get("beta")
    for key in compared:
        counted = 8 / 7 if grpo.by_sequence and "clip" in key else 1  # TRL counts the masked completion there
        expected = counted * values[f"{name}.{key}"]
        if key == "loss" and name == "rloo":  # to which that completion, of ratio 1, adds a constant in TRL
            expected = expected + values["advantages"][TRUNCATED] / 8
        np.testing.assert_allclose(curves[key], expected, rtol=1e-3, atol=1e-5, err_msg=key)
    drift = np.abs(values["drift"])
    lengths = [len(values[f"answer.{i}"]) for i in range(8)]
    largest = max(drift[i, :length].max() for i, length in enumerate(lengths) if i != TRUNCATED)
    assert curves["sampling/sampling_logp_difference/max"][0] == pytest.approx(largest, rel=1e-4)
    for key, parts in session.adapters.read(device, 0).items():
        for part, matrix in zip(PARTS, parts, strict=False):
            matrices = values[f"{name}.final.{short_of(key)}.{part}"]
            assert np.linalg.norm(matrix - matrices) <= 1e-3 * np.linalg.norm(matrices), (key, part)
    session.close()


def test_only_tokens_of_high_entropy_are_trained(device: Device, tmp_path: Path) -> None:
    """The entropies that the first step finds choose the tokens, by which it has TRL's loss."""
    grpo = objective(**{k: v for k, v in CASES["entropy"].items() if k != "steps"})
    session = opened(device, tmp_path, grpo)
    groups = groups_of(grpo, "entropy")
    active = [group for group in groups if group.weight]
    entropies = []
    for group in active:  # each alone, with all other tokens out of the loss
        sums = []
        for token in range(len(group.inputs)):
            labels = group.segments[0].labels.copy()
            trained = np.flatnonzero(labels != -100)
            labels[np.delete(trained, token)] = -100
            token_group = Group(
                (Segment(group.segments[0].input_ids, labels),), 0, 1.0, inputs=group.inputs[token : token + 1]
            )
            session.begin()
            session.accumulate([token_group])
            sums.append(session.totals.read_metrics(device, 0, grpo)["entropy"])
        entropies.append(np.array(sums))
    for group, mask in zip(active, grpo.token_masks(entropies), strict=True):
        group.inputs[:, KEPT] = mask
    session.begin()
    session.accumulate(groups)
    assert session.totals.read_loss(device, 0) == pytest.approx(float(golden()["entropy.loss"][0]), rel=1e-4)
    session.close()


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_gradients_are_those_of_the_loss(device: Device, tmp_path: Path, level: str) -> None:
    """Of the loss without kinks, at another temperature and with the KL term."""
    name, options = "sapo", {"temperature": 0.7, "beta": 0.2, "importance_sampling_level": level}
    grpo = objective(loss_type="sapo", **options)
    session = opened(device, tmp_path, grpo)

    def loss() -> float:
        session.begin()
        session.accumulate(groups_of(grpo, name))
        return session.totals.read_loss(device, 0)

    loss()
    assert_gradient_is_slope(session, loss, 0.005)
    session.close()


SCALES: dict[str, dict[str, Any]] = {
    "group": {},
    "batch": {"scale_rewards": "batch"},
    "none": {"scale_rewards": "none"},
    "sum": {"multi_objective_aggregation": "normalize_then_sum"},
    "rloo": {"objective": "rloo"},
    "reinforce": {"objective": "rloo", "normalize_advantages": True},
}


@pytest.mark.parametrize("rewards", ["plain", "equal", "none"])
@pytest.mark.parametrize("name", SCALES)
def test_advantages_are_those_of_trl(name: str, rewards: str) -> None:
    """Of two functions with the weights 1 and 0.5, for two prompts with three completions each."""
    values = golden()
    advantages, metrics = objective(**SCALES[name]).advantages(
        values[f"rewards.{rewards}"].astype(np.float64).reshape(2, 3, 2), np.array([1.0, 0.5])
    )
    np.testing.assert_allclose(advantages.reshape(-1), values[f"{rewards}.{name}.advantages"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose([*metrics.values()], values[f"{rewards}.{name}.metrics"], rtol=1e-6, equal_nan=True)


def test_wrong_options_are_refused() -> None:
    with pytest.raises(UserError, match=r"reward_funcs.* is missing"):
        GRPO()
    with pytest.raises(UserError, match=r"loss_type.* must be one of dapo, grpo"):
        objective(loss_type="kto")
    with pytest.raises(UserError, match=r"delta.* clips before"):
        objective(delta=1.1)
