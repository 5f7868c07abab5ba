"""What tests of several rooms share."""

from pathlib import Path

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests" / "fixtures"
MODELS = FIXTURES / "models"


def path_of(layer: int | str, module: str, architecture: str = "") -> str:
    """A linear of the usual decoder as adapters name it: (0, 'q_proj') -> 'model.layers.0.self_attn.q_proj'."""
    delta = module.startswith("in_proj_") or module == "out_proj"
    attention = module in ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj")
    part = "linear_attn" if delta else "self_attn" if attention else "mlp"
    whole = "model.language_model" if architecture == "gemma3" else "model"
    return f"{whole}.layers.{layer}.{part}.{module}"


def short_of(path: str) -> str:
    """The same as golden fixtures name it: '0.q_proj'."""
    parts = path.split(".")
    return f"{parts[parts.index('layers') + 1]}.{parts[-1]}"
