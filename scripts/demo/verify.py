"""Fine-tune the demo with torch and PEFT, and score it by its unit checks, before and after.

    python scripts/demo/verify.py --nf4 --steps 360 --learning-rate 1e-3

`--nf4` first sends every linear layer but the head through NF4 (blocks of 64, double quantization), as QLoRA does.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import time
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from golden.training import nf4_base  # noqa: E402

from wgpu_lora.assets import DEMO_HELDOUT, DEMO_MODEL, DEMO_TRAIN  # noqa: E402
from wgpu_lora.demo.check import run_check  # noqa: E402
from wgpu_lora.demo.confine.parent import confinement  # noqa: E402

IGNORED = -100
NEW_TOKENS = 96


def encode(tokenizer, row: dict) -> tuple[list[int], list[int]]:
    """Token ids of a row, and labels that leave out the request."""
    prompt = tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template(row["messages"], return_dict=False)
    return whole, [IGNORED] * len(prompt) + whole[len(prompt) :]


@torch.no_grad()
def generate(model, tokenizer, rows: list[dict]) -> list[str]:
    """Greedy answers to the rows' requests."""
    answers = []
    tokenizer.padding_side = "left"
    for at in range(0, len(rows), 30):
        prompts = [
            tokenizer.apply_chat_template(row["messages"][:-1], add_generation_prompt=True, tokenize=False)
            for row in rows[at : at + 30]
        ]
        batch = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
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
    """Train the adapter; return the tokens seen and the mean loss of the last 20 steps."""
    rng = random.Random(args.seed)
    encoded = [encode(tokenizer, row) for row in rows]
    weights = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=args.learning_rate, weight_decay=0.0)
    order: list[int] = []
    tokens, recent = 0, [0.0]
    model.train()
    for step in range(args.steps):
        if len(order) < args.rows:
            order = rng.sample(range(len(encoded)), len(encoded))
        picked, order = order[: args.rows], order[args.rows :]
        # Rows padded on the right to the longest.
        batch = [(torch.tensor(ids), torch.tensor(labels)) for ids, labels in (encoded[i] for i in picked)]
        ids, labels = map(pad_sequence, zip(*batch, strict=True), (True, True), (tokenizer.pad_token_id, IGNORED))
        warm = min(1.0, (step + 1) / max(1, round(0.03 * args.steps)))
        for group in optimizer.param_groups:
            group["lr"] = args.learning_rate * warm * 0.5 * (1 + math.cos(math.pi * step / args.steps))
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tokens += sum(len(encoded[i][0]) for i in picked)
        recent = [*recent[-19:], loss.item()]
        if step % 40 == 0:
            print(f"step {step} loss {loss.item():.4f}", flush=True)
    return tokens, sum(recent) / len(recent)


def main() -> None:
    """Score, fine-tune, score again, and print one line of JSON."""
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
    began = time.monotonic()
    tokens, loss = finetune(tuned, tokenizer, train, args)
    seconds = time.monotonic() - began
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
