"""200 steps of torch's and bitsandbytes' optimizers, and of PEFT's LoRA+, on the same gradients.

bitsandbytes rounds to the nearest code on GPUs and in its default backend. Its compiled quantiser for CPUs does not: it
gives 7e-9 the code of 1.6e-5. So the optimizers of its CPU backend run with the default backend's rounding here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from bitsandbytes.backends.cpu import ops
from bitsandbytes.optim import AdamW8bit, Lion, Lion8bit
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer

RANK, STEPS, RECORDED = 8, 200, 10
LEARNING_RATE, WEIGHT_DECAY, RATIO = 1e-3, 0.01, 4.0
# (out_features, in_features): A of `a` and B of `b` have at least 4,096 values, the others fewer.
MODULES = {"a": (40, 640), "b": (520, 30)}
Arrays = dict[str, np.ndarray]


def quantize(x: torch.Tensor, code: torch.Tensor, absmax: torch.Tensor, out: torch.Tensor, blocksize: int) -> None:
    """As quantize_blockwise of bitsandbytes' default backend, into absmax and out."""
    blocks = torch.nn.functional.pad(x.reshape(-1), (0, -x.numel() % blocksize)).reshape(-1, blocksize)
    absmax.copy_(blocks.abs().max(dim=-1)[0])
    scaled = (blocks * (1.0 / absmax.clamp(min=1e-38).view(-1, 1))).reshape(-1)[: x.numel()]
    out.copy_(torch.bucketize(scaled, (code[:-1] + code[1:]) / 2).to(torch.uint8).reshape(out.shape))


def optimizers() -> Arrays:
    """What tests/fixtures/golden/optimizers.safetensors holds."""
    rng = np.random.default_rng(16)
    shapes = {f"{m}.{w}": (RANK, i) if w == "A" else (o, RANK) for m, (o, i) in MODULES.items() for w in "AB"}
    initial = {name: (0.05 * rng.standard_normal(shape)).astype(np.float32) for name, shape in shapes.items()}
    # Rows and columns of gradients differ in size, as they do in training; a step's is a recorded one times a weight.
    gradients = {
        name: (
            1e-3
            * rng.standard_normal((RECORDED, *shape))
            * np.exp(0.5 * (rng.standard_normal((1, shape[0], 1)) + rng.standard_normal((1, 1, shape[1]))))
        ).astype(np.float32)
        for name, shape in shapes.items()
    }
    weights = (0.5 + rng.standard_normal(STEPS)).astype(np.float32)
    out = {f"initial.{name}": values for name, values in initial.items()}
    out |= {f"gradients.{name}": values for name, values in gradients.items()} | {"weights": weights}
    usual: dict[str, Any] = {"lr": LEARNING_RATE, "weight_decay": WEIGHT_DECAY}
    betas = {"betas": (0.9, 0.999)}
    made: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "adamw": lambda params: torch.optim.AdamW(params, **usual),
        "adamw_8bit": lambda params: AdamW8bit(params, **usual),
        "lion": lambda params: Lion(params, **usual, **betas),
        "lion_8bit": lambda params: Lion8bit(params, **usual, **betas),
        "sgd": lambda params: torch.optim.SGD(params, **usual, momentum=0.9, nesterov=True),
        "muon": lambda params: torch.optim.Muon(params, **usual, adjust_lr_fn="match_rms_adamw"),
        "loraplus": lambda params: create_loraplus_optimizer(
            model, torch.optim.AdamW, lr=LEARNING_RATE, loraplus_lr_ratio=RATIO, loraplus_weight_decay=WEIGHT_DECAY
        ),
    }
    ops._quant_blockwise_fp32_direct = quantize
    for case, make in made.items():
        model = torch.nn.ModuleDict({m: torch.nn.Linear(i, o) for m, (o, i) in MODULES.items()})
        model = get_peft_model(model, LoraConfig(r=RANK, target_modules=list(MODULES)))
        params = {
            name: model.get_parameter(f"base_model.model.{name[0]}.lora_{name[2]}.default.weight") for name in shapes
        }
        with torch.no_grad():
            for name, values in initial.items():
                params[name].copy_(torch.from_numpy(values))
        optimizer = make(list(params.values()))
        for step in range(STEPS):
            for name, values in gradients.items():
                params[name].grad = torch.from_numpy(weights[step] * values[step % RECORDED])
            optimizer.step()
        out |= {f"{case}.{name}": values.detach().numpy() for name, values in params.items()}
    return out
