"""Makes tests/fixtures/models and tests/fixtures/golden. Needs the `reference` extra.

    python -m scripts.golden.make_golden [OUTPUT]

OUTPUT is tests/fixtures unless given. The same versions on the same kind of processor give the same tensors;
tests/models/test_reference_golden.py checks that any others give the same numbers, to what training makes of rounding.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from scripts.golden.golden_optimizers import is_clear_cut, nf4_quantize, optimizers
from scripts.golden.golden_training import ADAPTERS, adapter_logits, generation, golden, save_adapter, variants
from scripts.golden.tiny_models import CONFIGS, save

NF4_SHAPES = ((37, 91), (64, 64), (5, 20), (48, 80), (130, 257))


def nf4_matrices() -> dict[str, np.ndarray]:
    """Clear-cut matrices of awkward shapes, one with a block of zeros, and what bitsandbytes makes of them."""
    rng = np.random.default_rng(7)
    out = {}
    for rows, cols in NF4_SHAPES:
        while True:
            weight = (rng.standard_normal((rows, cols)) * 0.05).astype(np.float32)
            if (rows, cols) == (64, 64):
                weight[5] = 0
            if is_clear_cut(weight):
                break
        name = f"{rows}x{cols}"
        out[f"{name}.weight"] = weight
        out |= {f"{name}.{key}": value for key, value in nf4_quantize(weight).items()}
    return out


def peft_adapters(output: Path) -> dict[str, np.ndarray]:
    """PEFT's adapters in OUTPUT/peft, and their logits on the first row of their model's golden batch."""
    out = {}
    for name, (architecture, _) in ADAPTERS.items():
        directory = output / "peft" / name
        save_adapter(name, output / "models", directory)
        tensors = load_file(output / "golden" / f"{architecture}.safetensors")
        ids = tensors["input_ids"][:1, : tensors["lengths"][0]]
        out |= {f"{name}.input_ids": ids, f"{name}.logits": adapter_logits(name, output / "models", directory, ids)}
    return out


def main(output: Path) -> None:
    torch.set_num_threads(1)
    (output / "golden").mkdir(parents=True, exist_ok=True)
    save_file(nf4_matrices(), output / "golden" / "nf4.safetensors")
    for architecture in CONFIGS:
        directory = output / "models" / architecture
        save(architecture, directory)
        save_file(golden(architecture, directory), output / "golden" / f"{architecture}.safetensors")
        print(architecture, "done", flush=True)
    save_file(generation(output / "models", output / "golden"), output / "golden" / "generation.safetensors")
    save_file(optimizers(), output / "golden" / "optimizers.safetensors")
    save_file(peft_adapters(output), output / "golden" / "peft.safetensors")
    save_file(variants(output / "models", output / "golden"), output / "golden" / "variants.safetensors")
    from scripts.golden.golden_grpo import grpo  # needs TRL
    from scripts.golden.golden_preferences import ARCHITECTURE, preferences

    initial = load_file(output / "golden" / f"{ARCHITECTURE}.safetensors")
    save_file(preferences(output / "models", initial), output / "golden" / "preferences.safetensors")
    save_file(grpo(output / "models", initial), output / "golden" / "grpo.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2] / "tests" / "fixtures")
