"""200 steps of torch's and bitsandbytes' optimizers, and of PEFT's LoRA+, on the same gradients.

bitsandbytes rounds to the nearest code on GPUs and in its default backend. Its compiled quantiser for CPUs does not: it
gives 7e-9 the code of 1.6e-5. So the optimizers of its CPU backend run with the default backend's rounding here.

And NF4 by bitsandbytes on the CPU, and matrices on which its answer is beyond doubt.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import bitsandbytes.functional as bnb
import numpy as np
import torch
from bitsandbytes.backends.cpu import ops
from bitsandbytes.optim import AdamW8bit, Lion, Lion8bit
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer

from wgpu_lora.weights.nf4 import nf4_reference as nf4

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
    factories: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
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
    for case, make in factories.items():
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


# -- NF4 ---------------------------------------------------------------------------------------------------------------


def nf4_quantize(w: np.ndarray) -> dict[str, np.ndarray]:
    """bitsandbytes' double-quantised NF4 of a float32 matrix: codes, absmax codes, nested absmax, offset, values.

    The matrix goes in flattened. The codes are the same either way, but where AVX-512 is at hand, bitsandbytes' CPU
    kernel finds the absmax of a 2-D matrix by row, which is wrong when a block of 64 spans two rows.
    """
    packed, state = bnb.quantize_4bit(torch.from_numpy(w.reshape(-1)), quant_type="nf4", compress_statistics=True)
    codes = packed.numpy().reshape(-1)
    absmax = nf4.double_dequantize(state.absmax.numpy(), state.state2.absmax.numpy(), state.offset.item())
    if w.size % 2:
        # bitsandbytes would compile a torch kernel for an odd count; the formula is the same
        values = nf4.dequantize_nf4(nf4.unpack_bnb(codes, w.size), absmax)
    else:
        values = bnb.dequantize_4bit(packed, state).numpy()
    return {
        "codes": codes,
        "absmax_codes": state.absmax.numpy(),
        "nested_absmax": state.state2.absmax.numpy(),
        "offset": state.offset.numpy().reshape(1),
        "dequantised": values.reshape(w.shape),
    }


def is_clear_cut(w: np.ndarray) -> bool:
    """Whether no value lies so near a threshold that rounding, or bitsandbytes' look-up table, decides its code.

    On such a matrix every correct quantiser, on whatever device, gives exactly the same codes.
    """
    codes, absmax = nf4.quantize_nf4(w)
    peak = np.maximum(absmax.astype(np.float64), 1e-38)  # a block of zeros is clear-cut too
    scaled = w.reshape(-1).astype(np.float64) / np.repeat(peak, nf4.BLOCK)[: w.size]
    centred = absmax.astype(np.float64) - absmax.mean(dtype=np.float64)
    peaks = np.maximum.reduceat(np.abs(centred), np.arange(0, centred.size, nf4.NESTED_BLOCK))
    nested = centred / np.repeat(peaks, nf4.NESTED_BLOCK)[: centred.size]
    golden = nf4_quantize(w)
    return bool(
        _distance(scaled, nf4.NF4_MIDPOINTS) > 5e-7
        and _distance(nested, nf4.DYNAMIC_MIDPOINTS) > 4e-6
        and np.array_equal(nf4.pack_bnb(codes), golden["codes"])
        and np.array_equal(nf4.double_quantize(absmax)[0], golden["absmax_codes"])
    )


def _distance(values: np.ndarray, thresholds: np.ndarray) -> float:
    return float(np.abs(values[:, None] - thresholds[None, :].astype(np.float64)).min())
