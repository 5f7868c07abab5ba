"""Rounds the fine-tuned demo model's MLP to 2 bits and recovers it from a teacher's cache, by recipes/recover-q2.toml
cut down: the distillation loss and the passed checks before rounding (4 bits), after it, and after training.

    python -m scripts.demo.recover ADAPTER OUTPUT [--steps 300] [--learning-rate 1e-3]

ADAPTER is the result of `wgpu-lora demo` or of `wgpu-lora finetune --recipe demo`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from wgpu_lora import answer, finetune, load
from wgpu_lora.api.teacher_caches import teacher_cache
from wgpu_lora.data import read_jsonl
from wgpu_lora.demo.before_and_after import BATCH, NEW_TOKENS, request_of
from wgpu_lora.files.assets import DEMO_HELDOUT, DEMO_MODEL, DEMO_TRAIN
from wgpu_lora.models.export.adapter_merge import merge_adapter
from wgpu_lora.models.export.quantized_model import write_packed
from wgpu_lora.models.loaded_model import open_model
from wgpu_lora.train.checks.code_check import run_check
from wgpu_lora.train.resolve_options import find_recipe, read_recipe

LENGTH = 128  # tokens; the demo's longest row has fewer


def passed(model: Path) -> int:
    """How many of the held-out requests the model answers with code that passes its check."""
    rows = [row for _, row in read_jsonl(DEMO_HELDOUT)]
    loaded_model, count = load(str(model)), 0
    for start in range(0, len(rows), BATCH):
        batch = rows[start : start + BATCH]
        answers = answer(loaded_model, [request_of(row) for row in batch], max_new_tokens=NEW_TOKENS, batch=BATCH)
        count += sum(
            run_check(completion.text, row["check"]).passed for completion, row in zip(answers, batch, strict=True)
        )
    loaded_model.unload()
    return count


def prepared(adapter: Path, output: Path, bases: tuple[str, str]) -> dict[str, Path]:
    """The merged model, its two bases, and the caches of what it says about training and held-out rows."""
    paths = {name: output / name for name in ("merged", *bases, "cache", "heldout-cache")}
    if not paths["merged"].exists():
        merge_adapter(DEMO_MODEL, adapter, paths["merged"], "f32")
    for base in bases:
        if not paths[base].exists():
            write_packed(open_model(str(paths["merged"]), None, base), paths[base])
    for name, rows in (("cache", DEMO_TRAIN), ("heldout-cache", DEMO_HELDOUT)):
        if not paths[name].exists():
            merged = open_model(str(paths["merged"]), None, "f32")
            teacher_cache(merged, str(rows), paths[name], top_k=64, random=0, length=LENGTH)
            merged.unload()
    return paths


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("adapter", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--target-modules", default="mlp")
    parser.add_argument(
        "--before", default="q4a4", help="base format before rounding: bits of the MLP and of attention"
    )
    parser.add_argument("--after", default="q2a4")
    parser.add_argument("--run", default="run")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    paths = prepared(args.adapter, args.output, (args.before, args.after))
    recipe: dict[str, Any] = read_recipe(find_recipe("recover-q2"))
    run = args.output / args.run
    record = finetune(
        **recipe
        | {
            "model": str(paths[args.after]),
            "base_dtype": args.after,
            "rounded_from": str(paths[args.before]),
            "data": str(DEMO_TRAIN),
            "eval_data": str(DEMO_HELDOUT),
            "teacher_cache": str(paths["cache"]),
            "eval_teacher_cache": str(paths["heldout-cache"]),
            "output": str(run),
            "target_modules": args.target_modules,
            "max_length": LENGTH,
            "max_steps": args.steps,
            "learning_rate": args.learning_rate,
            "lr_scheduler_min": args.learning_rate / 5,
            "eval_steps": max(1, args.steps // 5),
            "save_steps": 0,
            "tune": False,
            "run_log": False,
        }
    )
    state = record.state
    losses = state.unrounded_eval_loss, state.first_eval_loss, state.last_eval_loss, state.best_eval_loss
    names = ("before rounding", "after rounding", "after training", "best")
    models = {
        "before rounding": paths[args.before],
        "after rounding": paths[args.after],
        "after training": run / "last-f16",
    }
    checks = {name: passed(path) for name, path in models.items()}
    result = {"kd loss": dict(zip(names, losses, strict=True)), "passed of 60": checks, "seconds": state.seconds}
    assert state.first_eval_loss
    assert state.last_eval_loss
    result["fallen by"] = 1 - state.last_eval_loss / state.first_eval_loss
    (run / "recovered.json").write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
