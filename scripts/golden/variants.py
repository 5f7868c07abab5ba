"""What PEFT makes of DoRA, and of initialisations that change the weights, on one tiny model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file

from golden.models import linears, load
from golden.training import ALPHA, RANK, Arrays, curve, nf4_base, one_step, with_adapter

ARCHITECTURE = "llama"  # with biases everywhere
INITIALISATIONS = ("pissa", "olora")


def variants(models: Path, golden: Path) -> Arrays:
    """Everything that tests/fixtures/golden/variants.safetensors holds."""
    base, stored = load(models / ARCHITECTURE), load_file(golden / f"{ARCHITECTURE}.safetensors")
    batch = stored["input_ids"], stored["labels"], stored["lengths"]
    data = stored["data_ids"], stored["data_labels"], stored["data_lengths"]
    adapter = {name.removeprefix("adapter."): values for name, values in stored.items() if name.startswith("adapter.")}
    rng, out = np.random.default_rng(60), {}
    for (layer, module), linear in linears(base).items():
        norms = torch.linalg.norm(linear.weight, dim=1).detach().numpy()
        adapter[f"{layer}.{module}.M"] = norms * rng.uniform(0.7, 1.3, norms.shape).astype(np.float32)
        out[f"dora.adapter.{layer}.{module}.M"] = adapter[f"{layer}.{module}.M"]
    for kind, model in (("f32", base), ("nf4", nf4_base(base))):
        steps = one_step(model, adapter, batch, kind, use_dora=True), curve(model, adapter, data, kind, use_dora=True)
        out |= {f"dora.{name}": values for step in steps for name, values in step.items()}
    for name in INITIALISATIONS:
        said = curve(base, None, data, "f32", init_lora_weights=name)
        out |= {f"{name}.{key}.f32": said[f"{key}.f32"] for key in ("losses", "grad_norms")}
        _, parameters = with_adapter(base, None, init_lora_weights=name)
        for short, b in parameters.items():
            if short.startswith("0.") and short.endswith(".B"):
                delta = ALPHA / RANK * b @ parameters[short[:-1] + "A"]
                out[f"{name}.product.{short[:-2]}"] = delta.detach().numpy()
    return out
