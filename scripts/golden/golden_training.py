"""What transformers and PEFT make of the tiny models: logits, gradients, curves, variants, adapters, tokens."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.numpy import load_file
from transformers import PreTrainedModel, get_cosine_schedule_with_warmup

from scripts.golden.golden_optimizers import nf4_quantize
from scripts.golden.tiny_models import CONFIGS, KEPT, SEEDS, linears, load

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
            linear.weight.copy_(torch.from_numpy(nf4_quantize(linear.weight.numpy())["dequantised"]))
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
            factor = parts[-3].removeprefix("lora_").replace("magnitude_vector", "M")
            short = f"{parts[parts.index('layers') + 1]}.{parts[-4]}.{factor}"
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
    series = {f"losses.{kind}": losses, f"grad_norms.{kind}": norms, "learning_rates": rates}
    return final | {name: np.array(values, np.float32) for name, values in series.items()}


# -- DoRA, and initialisations that change the weights -----------------------------------------------------------------

VARIANTS_OF = "llama"  # with biases everywhere
INITIALISATIONS = ("pissa", "olora")


def variants(models: Path, golden: Path) -> Arrays:
    """Everything that tests/fixtures/golden/variants.safetensors holds."""
    base, tensors = load(models / VARIANTS_OF), load_file(golden / f"{VARIANTS_OF}.safetensors")
    batch = tensors["input_ids"], tensors["labels"], tensors["lengths"]
    data = tensors["data_ids"], tensors["data_labels"], tensors["data_lengths"]
    adapter = {name.removeprefix("adapter."): values for name, values in tensors.items() if name.startswith("adapter.")}
    rng, out = np.random.default_rng(60), {}
    for (layer, module), linear in linears(base).items():
        norms = torch.linalg.norm(linear.weight, dim=1).detach().numpy()
        adapter[f"{layer}.{module}.M"] = norms * rng.uniform(0.7, 1.3, norms.shape).astype(np.float32)
        out[f"dora.adapter.{layer}.{module}.M"] = adapter[f"{layer}.{module}.M"]
    for kind, model in (("f32", base), ("nf4", nf4_base(base))):
        steps = one_step(model, adapter, batch, kind, use_dora=True), curve(model, adapter, data, kind, use_dora=True)
        out |= {f"dora.{name}": values for step in steps for name, values in step.items()}
    for name in INITIALISATIONS:
        result = curve(base, None, data, "f32", init_lora_weights=name)
        out |= {f"{name}.{key}.f32": result[f"{key}.f32"] for key in ("losses", "grad_norms")}
        _, parameters = with_adapter(base, None, init_lora_weights=name)
        for short, b in parameters.items():
            if short.startswith("0.") and short.endswith(".B"):
                delta = ALPHA / RANK * b @ parameters[short[:-1] + "A"]
                out[f"{name}.product.{short[:-2]}"] = delta.detach().numpy()
    return out


# -- adapters as PEFT writes them --------------------------------------------------------------------------------------

# name -> (model, LoraConfig's options)
ADAPTERS: dict[str, tuple[str, dict]] = {
    "patterns": ("qwen2", {
        "r": 4, "lora_alpha": 8, "target_modules": "all-linear",
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 6, "^model.layers.2.self_attn.v_proj": 1},
        "alpha_pattern": {"v_proj": 3, r"layers\.[01]\.mlp\.down_proj": 20},
    }),
    "rslora": ("llama", {"r": 4, "lora_alpha": 3, "use_rslora": True, "target_modules": ["q_proj", "down_proj"]}),
    "expression": ("mistral", {"r": 3, "target_modules": r".*layers\.1\.(self_attn\.v_proj|mlp\.gate_proj)"}),
    "rslora-patterns": ("qwen3", {
        "r": 2, "lora_alpha": 5, "use_rslora": True, "target_modules": ["k_proj", "o_proj", "up_proj"],
        "rank_pattern": {"o_proj": 7}, "alpha_pattern": {"k_proj": 9},
    }),
    "dora-patterns": ("llama", {
        "r": 4, "lora_alpha": 6, "use_dora": True, "use_rslora": True, "target_modules": "all-linear",
        "rank_pattern": {"q_proj": 2, "up_proj": 6}, "alpha_pattern": {"v_proj": 3},
    }),
}  # fmt: skip


def save_adapter(name: str, models: Path, directory: Path) -> None:
    """Writes an adapter with PEFT, whose B is not zero."""
    architecture, options = ADAPTERS[name]
    torch.manual_seed(sum(map(ord, name)))
    model = get_peft_model(load(models / architecture), LoraConfig(task_type="CAUSAL_LM", **options))
    with torch.no_grad():
        for key, value in model.named_parameters():
            if ".lora_B." in key:
                value.normal_(std=0.3)
            elif ".lora_magnitude_vector." in key:
                value.mul_(torch.empty_like(value).uniform_(0.7, 1.3))
    model.peft_config["default"].base_model_name_or_path = architecture
    model.save_pretrained(directory, save_embedding_layers=False)
    (directory / "README.md").unlink(missing_ok=True)


def adapter_logits(name: str, models: Path, directory: Path, input_ids: np.ndarray) -> np.ndarray:
    """Logits that PEFT computes with the adapter in a directory: float32 [rows, tokens, vocab]."""
    model = PeftModel.from_pretrained(load(models / ADAPTERS[name][0]), directory)
    with torch.no_grad():
        return model(input_ids=torch.tensor(input_ids, dtype=torch.long)).logits.float().numpy()


# -- greedy continuations ----------------------------------------------------------------------------------------------

TOKENS = 64
LEAST_MARGIN = 1e-3  # between the two largest logits, so that rounding decides nothing
LEAST_DIFFERENT = 3


def generation(models: Path, golden: Path) -> Arrays:
    """Everything that tests/fixtures/golden/generation.safetensors holds: prompts and their tokens, by architecture."""
    out = {}
    for architecture in CONFIGS:
        model, tensors = load(models / architecture), load_file(golden / f"{architecture}.safetensors")
        prompts = (ids[:length] for ids in tensors["data_ids"] for length in (2, 3, 4, 5))
        prompt, tokens = next(
            (prompt, candidate) for prompt in prompts if (candidate := continued(model, prompt)) is not None
        )
        out |= {f"{architecture}.prompt": prompt, f"{architecture}.tokens": tokens}
    return out


def continued(model: PreTrainedModel, prompt: np.ndarray) -> np.ndarray | None:
    """The tokens; None if rounding might change one, or if they only repeat a few."""
    ids = torch.from_numpy(prompt[None]).long()
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS, eos_token_id=None,
        pad_token_id=0, return_dict_in_generate=True, output_scores=True,
    )  # fmt: skip
    best = torch.stack(output.scores)[:, 0].topk(2).values
    tokens = output.sequences[0, len(prompt) :].numpy().astype(np.int32)
    certain = float((best[:, 0] - best[:, 1]).min()) > LEAST_MARGIN
    return tokens if certain and len(set(tokens.tolist())) >= LEAST_DIFFERENT else None
