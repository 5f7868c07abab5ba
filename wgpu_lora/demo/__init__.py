"""The embedded demo: a small Qwen3-architecture model, its data, and the unit checks that score it."""

from pathlib import Path

_HERE = Path(__file__).resolve().parent

MODEL_DIR = _HERE / "model"
TRAIN_FILE = _HERE / "data" / "train.jsonl"
HELDOUT_FILE = _HERE / "data" / "heldout.jsonl"

__all__ = ["HELDOUT_FILE", "MODEL_DIR", "TRAIN_FILE"]
