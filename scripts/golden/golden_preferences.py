"""Preference training of a tiny model for 20 steps, with the losses, metrics and rotations of TRL's own trainers.

The trainers are created without their constructors, which want a tokenizer and a dataset of text, and are asked for the
loss of each batch; torch's AdamW takes the steps.
"""

from __future__ import annotations

import copy
import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.dpo_trainer import DataCollatorForPreference, DPOTrainer, add_fused_lm_head
from trl.trainer.kto_trainer import DataCollatorForUnpairedPreference, KTOTrainer

from scripts.golden.tiny_models import load

ARCHITECTURE, TARGETS = "qwen2", ("q_proj", "down_proj")
RANK, ALPHA, BETA, STEPS, BATCH, PAIRS = 4, 8, 0.3, 20, 4, 8
LEARNING_RATE, MAX_GRAD_NORM, IGNORE = 2e-3, 1.0, -100
EPSILON = 1e-5  # so that the sign of a gradient that is almost 0, which is rounding, does not decide a step
FIXTURES = Path(__file__).resolve().parents[2] / "tests" / "fixtures"
# Options by the name of the case, with the names of the package's options.
CASES: dict[str, dict[str, Any]] = json.loads((FIXTURES / "golden" / "preferences.json").read_text())
METRICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)
Arrays = dict[str, np.ndarray]
Pair = dict[str, list[int]]


def preferences(models: Path, initial: Arrays) -> Arrays:
    """What tests/fixtures/golden/preferences.safetensors holds. initial: the golden adapter of the model."""
    torch.use_deterministic_algorithms(True)
    base = load(models / ARCHITECTURE)
    rows = pairs(base.config.vocab_size)
    out = {f"{name}.{i}": np.array(ids, np.int32) for i, row in enumerate(rows) for name, ids in row.items()}
    own = [name.removeprefix("adapter.") for name in initial if name.startswith("adapter.")]
    start = {name: initial[f"adapter.{name}"] for name in own if name.split(".")[1] in TARGETS}
    for name, options in CASES.items():
        out |= {f"{name}.{key}": value for key, value in train(base, rows, start, options).items()}
    return out


def pairs(vocab: int) -> list[Pair]:
    rng = np.random.default_rng(5)

    def ids(low: int, high: int) -> list[int]:
        return rng.integers(3, vocab, rng.integers(low, high)).tolist()

    return [{"prompt_ids": ids(1, 6), "chosen_ids": ids(2, 8), "rejected_ids": ids(2, 8)} for _ in range(PAIRS)]


def labelled(rows: list[Pair]) -> list[dict[str, Any]]:
    """Every other pair's chosen answer as desirable, the other pairs' rejected one as undesirable."""
    answers = [row["rejected_ids" if i % 2 else "chosen_ids"] for i, row in enumerate(rows)]
    return [
        {"prompt_ids": row["prompt_ids"], "completion_ids": answer, "label": not i % 2}
        for i, (row, answer) in enumerate(zip(rows, answers, strict=True))
    ]


def train(base: PreTrainedModel, rows: list[Pair], start: Arrays, options: dict[str, Any]) -> Arrays:
    """Losses and metrics of each step, and the adapter after the last."""
    model, parameters = adapted(base, start, frozen="reference_adapter" in options)
    objective = options["objective"]
    trainer = {"dpo": dpo, "kto": kto, "cpo": cpo, "orpo": cpo}[objective](model, options)
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=LEARNING_RATE, betas=(0.9, 0.999), eps=EPSILON, weight_decay=0.01
    )
    history: dict[str, list[float]] = defaultdict(list)
    for step in range(STEPS):
        numbers = [(i + step * BATCH) % PAIRS for i in range(BATCH)]
        loss, metrics = trainer([rows[i] for i in numbers])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), MAX_GRAD_NORM)
        optimizer.step()
        history["loss"].append(loss.item())
        for name in METRICS:
            if name in metrics:
                history[name].append(float(metrics[name]))
        if "kl" in metrics:
            history["kl"].append(float(metrics["kl"]))
    final = {f"final.{name}": parameter.detach().numpy() for name, parameter in parameters.items()}
    return final | {name: np.array(values, np.float32) for name, values in history.items()}


def adapted(
    base: PreTrainedModel, start: Arrays, frozen: bool
) -> tuple[torch.nn.Module, dict[str, torch.nn.Parameter]]:
    """The model with the initial adapter and, with `frozen`, TRL's reference adapter, whose B is twice as large."""
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules=[*TARGETS], task_type="CAUSAL_LM")
    model = get_peft_model(copy.deepcopy(base), config)
    if frozen:
        model.add_adapter("ref", config)
    parameters = {}
    for name, parameter in model.named_parameters():
        if "lora_" not in name:
            continue
        parts = name.split(".")
        short = f"{parts[parts.index('layers') + 1]}.{parts[-4]}.{parts[-3].removeprefix('lora_')}"
        reference = parts[-2] == "ref"
        parameter.data.copy_(torch.from_numpy(start[short] * (2 if reference and short.endswith("B") else 1)))
        parameter.requires_grad_(not reference)
        if not reference:
            parameters[short] = parameter
    return model, parameters


def fused(trainer: Any, model: torch.nn.Module) -> None:
    """What DPO's and KTO's trainers have in common."""
    add_fused_lm_head(model.get_base_model(), outputs=("log_probs", "entropy", "mean_logits", "is_top1"))
    trainer.model, trainer.ref_model, trainer.beta = model, None, BETA
    trainer.accelerator, trainer.args = Accelerator(cpu=True), SimpleNamespace(gradient_checkpointing_kwargs=None)
    trainer.precompute_ref_logps, trainer.aux_loss_enabled = False, False
    trainer._total_train_tokens, trainer._tp_size = 0, 1


def trainer_step(trainer: Any, model: torch.nn.Module, inputs: dict[str, Any]) -> tuple[torch.Tensor, dict[str, float]]:
    trainer._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
    loss = trainer._compute_loss(model, inputs, return_outputs=False)
    return loss, {name: values[-1] for name, values in trainer._metrics["train"].items()}


def dpo(model: torch.nn.Module, options: dict[str, Any]) -> Any:
    trainer: Any = DPOTrainer.__new__(DPOTrainer)
    fused(trainer, model)
    trainer.loss_types = options["loss_type"].split(",")
    weights = options.get("loss_weights")
    trainer.loss_weights = [*map(float, weights.split(","))] if weights else [1.0] * len(trainer.loss_types)
    trainer.ld_alpha, trainer.label_smoothing = options.get("ld_alpha"), options.get("label_smoothing", 0.0)
    trainer.f_divergence_type, trainer.f_alpha_divergence_coef, trainer.use_weighting = "reverse_kl", 0.5, False
    collate = DataCollatorForPreference(pad_token_id=0)
    return lambda rows: trainer_step(trainer, model, collate(rows))


def kto(model: torch.nn.Module, options: dict[str, Any]) -> Any:
    trainer: Any = KTOTrainer.__new__(KTOTrainer)
    fused(trainer, model)
    trainer.loss_type = options["loss_type"]
    trainer.calculate_KL = trainer.loss_type == "kto"
    trainer.desirable_weight = options.get("desirable_weight", 1.0)
    trainer.undesirable_weight = options.get("undesirable_weight", 1.0)
    collate = DataCollatorForUnpairedPreference(pad_token_id=0)

    def loss(rows: list[Pair]) -> tuple[torch.Tensor, dict[str, float]]:
        examples = labelled(rows)
        answers = [example["completion_ids"] for example in examples]
        if trainer.calculate_KL:  # rotated as in KTOTrainer._prepare_dataset
            for example, answer in zip(examples, [answers[-1], *answers[:-1]], strict=True):
                example["KL_completion_ids"] = answer
        return trainer_step(trainer, model, collate(examples))

    return loss


def cpo(model: torch.nn.Module, options: dict[str, Any]) -> Any:
    kind: Any = {"cpo": CPOTrainer, "orpo": ORPOTrainer}[options["objective"]]
    trainer = kind.__new__(kind)
    trainer.accelerator, trainer.beta = Accelerator(cpu=True), BETA
    trainer.is_encoder_decoder, trainer.aux_loss_enabled = False, False
    trainer.pad_token_id = trainer.padding_value = 0
    trainer.loss_type, trainer.label_smoothing = options.get("loss_type"), options.get("label_smoothing", 0.0)
    trainer.cpo_alpha, trainer.simpo_gamma, trainer.alpha = 1.0, 0.5, 0.0

    def padded(lists: list[list[int]], value: int) -> torch.Tensor:
        longest = max(map(len, lists))
        return torch.tensor([ids + [value] * (longest - len(ids)) for ids in lists])

    def loss(rows: list[Pair]) -> tuple[torch.Tensor, dict[str, float]]:
        batch: dict[str, torch.Tensor] = {}
        for side in ("chosen", "rejected"):
            ids = [row["prompt_ids"] + row[f"{side}_ids"] for row in rows]
            labels = [[IGNORE] * len(row["prompt_ids"]) + row[f"{side}_ids"] for row in rows]
            batch[f"{side}_input_ids"], batch[f"{side}_labels"] = padded(ids, 0), padded(labels, IGNORE)
            batch[f"{side}_attention_mask"] = padded([[1] * len(row) for row in ids], 0)
        result: tuple[torch.Tensor, dict[str, float]] = trainer.get_batch_loss_metrics(model, batch, "train")
        return result

    return loss
