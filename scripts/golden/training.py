"""Logits, gradients and the training curve of a tiny model, in float32 with transformers, PEFT and torch's AdamW."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel, get_cosine_schedule_with_warmup

from golden.models import KEPT, SEEDS, linears, load
from golden.quant import quantize

RANK, ALPHA = 4, 8
STEPS, WARMUP, LEARNING_RATE, WEIGHT_DECAY, MAX_GRAD_NORM = 30, 3, 2e-3, 0.01, 1.0
BATCH_LENGTHS = (13, 7, 10)
DATA_LENGTHS = (12, 5, 9, 16, 7, 11, 14, 8)
ROWS_PER_STEP = 2
IGNORE = -100

Arrays = dict[str, np.ndarray]
Rows = tuple[np.ndarray, np.ndarray, np.ndarray]  # ids, labels, lengths


def golden(architecture: str, directory: Path) -> Arrays:
    """Everything that tests/fixtures/golden/<architecture>.safetensors holds, from the model saved in `directory`."""
    torch.use_deterministic_algorithms(True)
    base = load(directory)
    rng = np.random.default_rng(SEEDS[architecture] + 1)
    batch = _rows(rng, BATCH_LENGTHS, base.config.get_text_config().vocab_size)
    data = _rows(rng, DATA_LENGTHS, base.config.get_text_config().vocab_size)
    out = dict(zip(("input_ids", "labels", "lengths"), batch, strict=True))
    out |= dict(zip(("data_ids", "data_labels", "data_lengths"), data, strict=True))
    adapter = _initial_adapter(base, rng)
    out |= {f"adapter.{name}": value for name, value in adapter.items()}
    for kind, model in (("f32", base), ("nf4", nf4_base(base))):
        with torch.no_grad():
            logits, mask = _logits(model, batch)
        out[f"logits.{kind}"] = (logits * mask[:, :, None]).numpy()  # without an adapter; zero for padding
        out |= one_step(model, adapter, batch, kind) | curve(model, adapter, data, kind)
    return out


def nf4_base(model: PreTrainedModel) -> PreTrainedModel:
    """A copy whose block linears hold the values that double-quantised NF4 gives back."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for (_, module), linear in linears(model).items():
            if module in KEPT:
                continue
            linear.weight.copy_(torch.from_numpy(quantize(linear.weight.numpy())["dequantised"]))
    return model


def _rows(rng: np.random.Generator, lengths: tuple[int, ...], vocab: int) -> Rows:
    """Rows padded with 0 on the right; the first third of each row is an untrained prompt."""
    ids = np.zeros((len(lengths), max(lengths)), np.int32)
    labels = np.full_like(ids, IGNORE)
    for row, length in enumerate(lengths):
        ids[row, :length] = rng.integers(3, vocab, length)
        labels[row, length // 3 : length] = ids[row, length // 3 : length]
    labels[0, lengths[0] - 3] = IGNORE  # a hole amid trained tokens
    return ids, labels, np.array(lengths, np.int32)


def _initial_adapter(model: PreTrainedModel, rng: np.random.Generator) -> Arrays:
    """A as kaiming_uniform(a=sqrt(5)) draws it, B small but not zero, so that no gradient is zero."""
    adapter = {}
    for (layer, module), linear in linears(model).items():
        out_dim, in_dim = linear.weight.shape
        bound = in_dim**-0.5
        adapter[f"{layer}.{module}.A"] = rng.uniform(-bound, bound, (RANK, in_dim)).astype(np.float32)
        adapter[f"{layer}.{module}.B"] = (rng.standard_normal((out_dim, RANK)) * 0.02).astype(np.float32)
    return adapter


def with_adapter(
    model: PreTrainedModel, adapter: Arrays | None, **options: object
) -> tuple[torch.nn.Module, dict[str, torch.nn.Parameter]]:
    """A copy of the model with PEFT's adapter of these values, or as PEFT makes it, and its parameters by name."""
    usual = {"r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0, "target_modules": "all-linear"}
    if hasattr(model.config, "text_config"):  # not those of the vision tower
        usual["target_modules"] = r".*\.language_model\..*_proj"
    config = LoraConfig(task_type="CAUSAL_LM", **usual | options)
    peft_model = get_peft_model(copy.deepcopy(model), config)
    parameters = {}
    for name, parameter in peft_model.named_parameters():
        if parameter.requires_grad:
            parts = name.split(".")
            which = parts[-3].removeprefix("lora_").replace("magnitude_vector", "M")
            short = f"{parts[parts.index('layers') + 1]}.{parts[-4]}.{which}"
            if adapter is not None:
                parameter.data.copy_(torch.from_numpy(adapter[short]))
            parameters[short] = parameter
    assert adapter is None or set(parameters) == set(adapter)
    return peft_model, parameters


def _logits(model: torch.nn.Module, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits [rows, tokens, vocab], attention mask [rows, tokens])."""
    ids, _, lengths = rows
    mask = torch.from_numpy((np.arange(ids.shape[1])[None, :] < lengths[:, None]).astype(np.int64))
    if "longrope" in str(getattr(model.config, "rope_parameters", "")):
        return _alone(model, ids, lengths), mask
    return model(input_ids=torch.from_numpy(ids).long(), attention_mask=mask).logits, mask


def _alone(model: torch.nn.Module, ids: np.ndarray, lengths: np.ndarray) -> torch.Tensor:
    """Logits of each row on its own, because the longest row decides the factors of all rows in a batch."""
    rows = [
        model(input_ids=torch.from_numpy(row[None, :n]).long()).logits[0] for row, n in zip(ids, lengths, strict=True)
    ]
    return torch.stack([torch.nn.functional.pad(row, (0, 0, 0, ids.shape[1] - len(row))) for row in rows])


def _loss(model: torch.nn.Module, rows: Rows) -> torch.Tensor:
    """Cross-entropy of each token given those before it, averaged over the trained tokens of all rows together."""
    logits, _ = _logits(model, rows)
    targets = torch.from_numpy(rows[1]).long()[:, 1:].reshape(-1)
    flat = logits[:, :-1].reshape(-1, logits.shape[-1])
    return torch.nn.functional.cross_entropy(flat, targets, ignore_index=IGNORE)


def one_step(model: PreTrainedModel, adapter: Arrays, batch: Rows, kind: str, **options: object) -> Arrays:
    """The loss of the batch and its gradients. options: of LoraConfig."""
    peft_model, parameters = with_adapter(model, adapter, **options)
    loss = _loss(peft_model, batch)
    loss.backward()
    grads = {name: parameter.grad for name, parameter in parameters.items()}
    assert all(bool((grad != 0).any()) for grad in grads.values())
    return {
        f"loss.{kind}": loss.detach().numpy().reshape(1),
        **{f"grad.{kind}.{name}": grad.numpy() for name, grad in grads.items()},
    }


def curve(model: PreTrainedModel, adapter: Arrays | None, data: Rows, kind: str, **options: object) -> Arrays:
    """Losses, norms and rates of training on the data, and the final adapter. options: of LoraConfig."""
    peft_model, parameters = with_adapter(model, adapter, **options)
    optimizer = torch.optim.AdamW(
        parameters.values(), lr=LEARNING_RATE, betas=(0.9, 0.999), eps=1e-8, weight_decay=WEIGHT_DECAY
    )
    # The schedule's first rate is 0 and is skipped, so its warm-up and its total are one step longer.
    schedule = get_cosine_schedule_with_warmup(optimizer, WARMUP + 1, STEPS + 1)
    schedule.step()
    losses, norms, rates = [], [], []
    for step in range(STEPS):
        rows = (np.arange(ROWS_PER_STEP) + step * ROWS_PER_STEP) % len(DATA_LENGTHS)
        loss = _loss(peft_model, tuple(array[rows] for array in data))
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(parameters.values(), MAX_GRAD_NORM).item())
        losses.append(loss.item())
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    final = {f"final.{kind}.{name}": parameter.detach().numpy() for name, parameter in parameters.items()}
    said = {f"losses.{kind}": losses, f"grad_norms.{kind}": norms, "learning_rates": rates}
    return final | {name: np.array(values, np.float32) for name, values in said.items()}
