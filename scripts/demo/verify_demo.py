"""Fine-tunes the demo with torch, transformers and PEFT, and scores it by its unit checks, before and after.

    python -m scripts.demo.verify_demo --nf4 --steps 360 --learning-rate 1e-3

`--nf4` first rounds every linear layer but the head to NF4 (blocks of 64, double quantization), as QLoRA does.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, DataCollatorForSeq2Seq, Trainer, TrainingArguments

from scripts.golden.golden_training import nf4_base
from wgpu_lora.files.assets import DEMO_HELDOUT, DEMO_MODEL, DEMO_TRAIN
from wgpu_lora.train.checks.code_check import run_check
from wgpu_lora.train.checks.sandbox.sandbox_process import confinement

IGNORED = -100
NEW_TOKENS = 96
BATCH = 30  # requests answered together
LOGGED = 20  # steps that a logged loss is the mean of


def encode(tokenizer, row: dict) -> dict[str, list[int]]:
    """Token ids of a row, and labels without the request."""
    prompt = tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template(row["messages"])
    return {**whole, "labels": [IGNORED] * len(prompt) + whole["input_ids"][len(prompt) :]}


@torch.no_grad()
def generate(model, tokenizer, rows: list[dict]) -> list[str]:
    """Greedy answers to the rows' requests."""
    answers = []
    for at in range(0, len(rows), BATCH):
        requests = [row["messages"][:-1] for row in rows[at : at + BATCH]]
        padded = {"return_tensors": "pt", "padding": True, "tokenizer_kwargs": {"padding_side": "left"}}
        batch = tokenizer.apply_chat_template(requests, add_generation_prompt=True, return_dict=True, **padded)
        out = model.generate(**batch, max_new_tokens=NEW_TOKENS, do_sample=False)
        answers += tokenizer.batch_decode(out[:, batch["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def score(model, tokenizer, rows: list[dict], show: int, allow_unconfined: bool) -> float:
    """The share of rows whose greedy answer passes its check."""
    model.eval()
    passed = 0
    for row, text in zip(rows, generate(model, tokenizer, rows), strict=True):
        result = run_check(text, row["check"], allow_unconfined=allow_unconfined)
        passed += result.passed
        if not result.passed and show > 0:
            show -= 1
            print(f"--- {row['messages'][0]['content']}\n{text}\n=> {result.reason}", flush=True)
    return passed / len(rows)


def finetune(model, tokenizer, rows: list[dict], args: argparse.Namespace) -> tuple[int, float]:
    """Train the adapter; return the tokens seen and the last logged loss."""
    with tempfile.TemporaryDirectory() as directory:
        options = TrainingArguments(
            directory,
            per_device_train_batch_size=args.rows,
            dataloader_drop_last=True,
            max_steps=args.steps,
            learning_rate=args.learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=round(0.03 * args.steps),
            seed=args.seed,
            logging_steps=min(LOGGED, args.steps),
            include_num_input_tokens_seen="non_padding",
            save_strategy="no",
            report_to="none",
            use_cpu=True,
        )
        encoded = [encode(tokenizer, row) for row in rows]
        trainer = Trainer(model, options, DataCollatorForSeq2Seq(tokenizer), encoded)
        trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    return trainer.state.num_input_tokens_seen, losses[-1]


def main() -> None:
    """Score, fine-tune, score again, and print a line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument("--train", type=Path, default=DEMO_TRAIN)
    parser.add_argument("--heldout", type=Path, default=DEMO_HELDOUT)
    parser.add_argument("--nf4", action="store_true")
    parser.add_argument("--steps", type=int, default=360)
    parser.add_argument("--rows", type=int, default=16, help="rows of one step")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--show", type=int, default=3, help="failed answers to print")
    parser.add_argument("--record", action="store_true", help="add the result to the model's training.json")
    parser.add_argument("--allow-unconfined", action="store_true", help="run answers where they cannot be confined")
    args = parser.parse_args()
    print(f"answers run under {confinement(args.allow_unconfined)}", flush=True)
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    if args.nf4:
        model = nf4_base(model)
    heldout, train = ([json.loads(line) for line in path.open(encoding="utf-8")] for path in (args.heldout, args.train))
    record = {"nf4": args.nf4, "steps": args.steps, "rows": args.rows, "learning_rate": args.learning_rate}
    before = score(model, tokenizer, heldout, args.show, args.allow_unconfined)
    print(f"before {before:.3f}", flush=True)
    tuned = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
    start = time.monotonic()
    tokens, loss = finetune(tuned, tokenizer, train, args)
    seconds = time.monotonic() - start
    after = score(tuned, tokenizer, heldout, args.show, args.allow_unconfined)
    record |= {"tokens": tokens, "loss": round(loss, 5), "seconds": round(seconds), "before": before, "after": after}
    print(json.dumps(record), flush=True)
    if args.record:
        path = args.model / "training.json"
        whole = json.loads(path.read_text(encoding="utf-8"))
        whole["verified"] = [*whole.get("verified", []), record]
        path.write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
