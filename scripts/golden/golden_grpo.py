"""Losses of completions with given advantages for 20 steps of a tiny model, and advantages of given rewards, by TRL's
own trainers. As in golden_preferences.py, these are created without their constructors."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
from accelerate import Accelerator
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from trl.trainer.utils import add_fused_lm_head

from scripts.golden.golden_preferences import (
    ARCHITECTURE,
    EPSILON,
    FIXTURES,
    LEARNING_RATE,
    MAX_GRAD_NORM,
    STEPS,
    TARGETS,
    Arrays,
    adapted,
)  # fmt: skip
from scripts.golden.tiny_models import load

CASES: dict[str, dict[str, Any]] = json.loads((FIXTURES / "golden" / "grpo.json").read_text())
PROMPTS, GENERATIONS, TRUNCATED = 2, 4, 5  # the completion that is masked
METRICS = ("kl", "entropy", "clip_ratio/low_mean", "clip_ratio/high_mean", "cispo_clip_ratio")
KINDS: dict[str, Any] = {"grpo": GRPOTrainer, "rloo": RLOOTrainer}


def grpo(models: Path, initial: Arrays) -> Arrays:
    """What tests/fixtures/golden/grpo.safetensors holds. initial: the golden adapter of the model."""
    torch.use_deterministic_algorithms(True)
    base = load(models / ARCHITECTURE)
    own = [name.removeprefix("adapter.") for name in initial if name.startswith("adapter.")]
    start = {name: initial[f"adapter.{name}"] for name in own if name.split(".")[1] in TARGETS}
    rng = np.random.default_rng(11)
    prompts = [rng.integers(3, base.config.vocab_size, size).tolist() for size in (3, 5)]
    answers = [
        rng.integers(3, base.config.vocab_size, rng.integers(2, 9)).tolist() for _ in range(PROMPTS * GENERATIONS)
    ]
    longest = max(map(len, answers))
    drift = rng.normal(0, 0.25, (len(answers), longest)).astype(np.float32)
    fixed_inputs = {"advantages": rng.normal(size=len(answers)).astype(np.float32), "drift": drift}
    out = {f"prompt.{i}": np.array(ids, np.int32) for i, ids in enumerate(prompts)}
    out |= {f"answer.{i}": np.array(ids, np.int32) for i, ids in enumerate(answers)} | fixed_inputs
    for name, options in CASES.items():
        model, parameters = adapted(base, start, frozen=False)
        out |= {
            f"{name}.{key}": value
            for key, value in train(model, parameters, prompts, answers, fixed_inputs, options).items()
        }
    return out | advantages()


def trainer_of(options: dict[str, Any]) -> Any:
    trainer = KINDS[options.get("objective", "grpo")].__new__(KINDS[options.get("objective", "grpo")])
    low = options.get("epsilon", 0.2)
    trainer.accelerator, trainer.aux_loss_enabled = Accelerator(cpu=True), False
    trainer.epsilon_low, trainer.epsilon_high = low, options.get("epsilon_high", low)
    trainer.beta, trainer.loss_type = options.get("beta", 0.0), options.get("loss_type", "dapo")
    trainer.importance_sampling_level = options.get("importance_sampling_level", "token")
    trainer.top_entropy_quantile = options.get("top_entropy_quantile", 1.0)
    trainer.off_policy_mask_threshold, trainer.use_vllm, trainer._entropy_bonus_enabled = None, False, False
    trainer.max_completion_length, trainer.current_gradient_accumulation_steps = (
        options.get("max_completion_length", 512),
        1,
    )
    trainer.args = SimpleNamespace(
        delta=options.get("delta"), sapo_temperature_pos=1.0, sapo_temperature_neg=1.05, use_bias_correction_kl=True,
        steps_per_generation=1, gradient_checkpointing_kwargs=None,
    )  # fmt: skip
    return trainer


def padded(lists: list[Any], left: bool = False, dtype: Any = torch.long) -> torch.Tensor:
    longest = max(map(len, lists))
    fill = [[0] * (longest - len(items)) for items in lists]
    return torch.tensor(
        [f + list(items) if left else list(items) + f for f, items in zip(fill, lists, strict=True)], dtype=dtype
    )


def train(
    model: Any,
    parameters: Any,
    prompts: list[list[int]],
    answers: list[list[int]],
    fixed_inputs: Arrays,
    options: dict[str, Any],
) -> Arrays:
    """Losses and metrics of each step, and the adapter after the last."""
    trainer = trainer_of(options)
    add_fused_lm_head(
        model.get_base_model(), temperature=options.get("temperature", 1.0), outputs=("log_probs", "entropy")
    )
    trainer.model = model
    mask = padded([[int(i != TRUNCATED)] * len(tokens) for i, tokens in enumerate(answers)])
    prompt_rows = [prompts[i // GENERATIONS] for i in range(len(answers))]
    inputs: dict[str, Any] = {
        "prompt_ids": padded(prompt_rows, left=True),
        "prompt_mask": padded([[1] * len(tokens) for tokens in prompt_rows], left=True),
        "completion_ids": padded(answers),
        "completion_mask": mask,
        "advantages": torch.from_numpy(fixed_inputs["advantages"]),
        "num_items_in_batch": mask.sum(),
    }
    ids = torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], 1)
    attended = torch.cat([inputs["prompt_mask"], mask], 1)

    def logprobs() -> torch.Tensor:
        with torch.no_grad():
            logps: torch.Tensor = trainer._get_per_token_logps_and_entropies(model, ids, attended, mask.shape[1])[0]
            return logps

    old = (logprobs() + torch.from_numpy(fixed_inputs["drift"])) * mask
    inputs["old_per_token_logps"], inputs["old_logps"] = old, old.sum(1)
    with model.disable_adapter():
        inputs["ref_per_token_logps"] = logprobs() * mask
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=LEARNING_RATE, betas=(0.9, 0.999), eps=EPSILON, weight_decay=0.01
    )
    history: dict[str, list[float]] = defaultdict(list)
    for _ in range(options.get("steps", STEPS)):
        trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        loss = trainer._compute_loss(model, inputs)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), MAX_GRAD_NORM)
        optimizer.step()
        history["loss"].append(loss.item())
        for name in METRICS:
            if name in trainer._metrics["train"]:
                history[name].append(trainer._metrics["train"][name][-1])
    final = {f"final.{name}": parameter.detach().numpy() for name, parameter in parameters.items()}
    values = {name: np.array(series, np.float32) for name, series in history.items()}
    return final | values | {"old": old.numpy(), "reference": inputs["ref_per_token_logps"].numpy()}


# Rewards of two functions for two prompts with three completions each: plain, all equal, and with None.
NONE = float("nan")
REWARDS = {
    "plain": [[1, 0], [0, 1], [0.5, 3], [3, 0], [0, 0], [1, 1]],
    "equal": [[1, 1], [1, 1], [1, 1], [0, 0], [2, 1], [0, 3]],
    "none": [[2, NONE], [NONE, NONE], [0, 2], [NONE, NONE], [NONE, NONE], [1, 0]],
}
SCALES: dict[str, dict[str, Any]] = {
    "group": {},
    "batch": {"scale_rewards": "batch"},
    "none": {"scale_rewards": "none"},
    "sum": {"multi_objective_aggregation": "normalize_then_sum"},
    "rloo": {"objective": "rloo"},
    "reinforce": {"objective": "rloo", "normalize_advantages": True},
}
LOGGED = ("reward", "reward_std", "frac_reward_zero_std")


def advantages() -> Arrays:
    """Advantages and masks of generated completions, of which the second and the last are truncated."""
    ids = [[5, 2], [5, 6], [7, 2], [2], [8, 2], [9, 9]]
    out: Arrays = {}
    for rewards_name, rewards in REWARDS.items():
        out[f"rewards.{rewards_name}"] = np.array(rewards, np.float32)
        for name, options in SCALES.items():
            kind = KINDS[options.get("objective", "grpo")]
            trainer = MagicMock()
            trainer.accelerator, trainer.num_generations, trainer.num_generations_eval = Accelerator(cpu=True), 3, 3
            trainer.environment_factories = trainer.environments = trainer.tools = None
            trainer.log_multimodal = False
            trainer.beta, trainer.use_vllm, trainer.mask_truncated_completions = 0.0, False, True
            trainer.pad_to_multiple_of, trainer._tokenizer.pad_token_id, trainer.eos_token_ids = None, 0, [2]
            trainer.scale_rewards = options.get("scale_rewards", "group")
            trainer.multi_objective_aggregation = options.get("multi_objective_aggregation", "sum_then_normalize")
            trainer.normalize_advantages, trainer.reward_clip_range = options.get("normalize_advantages", False), None
            trainer.reward_weights, trainer.reward_funcs = torch.tensor([1.0, 0.5]), [None, None]
            trainer.reward_func_names = ["a", "b"]
            trainer.args = SimpleNamespace(
                steps_per_generation=1, gradient_accumulation_steps=1, per_device_train_batch_size=6,
                gradient_checkpointing_kwargs=None,
            )  # fmt: skip
            trainer.num_iterations, trainer._metrics = 1, {"train": defaultdict(list)}
            trainer._pending_extra_logs, trainer._pending_metrics = {}, {}
            trainer._calculate_rewards = lambda *_, rewards=rewards: torch.tensor(rewards, dtype=torch.float32)
            extra: list[Any] = [None, {}, None, None]
            if kind is RLOOTrainer:
                trainer._generate = lambda prompts: ([[4]] * 6, ids, [""] * 6)
                trainer._get_per_token_logps_and_entropies = lambda *_, **__: (torch.zeros(6, 2), None, None)
            else:
                trainer._generate = lambda prompts, extra=extra: ([[4]] * 6, ids, None, [""] * 6, *extra)
            result = kind._generate_and_score_completions(trainer, [{"prompt": "x"}] * 6)
            out[f"{rewards_name}.{name}.advantages"] = result["advantages"].numpy()
            out[f"{rewards_name}.{name}.mask"] = result["completion_mask"].numpy().astype(np.int32)
            metrics = [trainer._metrics["train"][metric][-1] for metric in LOGGED]
            out[f"{rewards_name}.{name}.metrics"] = np.array(metrics, np.float32)
    return out
