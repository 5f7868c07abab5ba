"""Answers every held-out request greedily and runs each answer against its unit check."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

from wgpu_lora.api import answer, load
from wgpu_lora.data import read_jsonl
from wgpu_lora.demo.check import run_check
from wgpu_lora.demo.compare import BATCH, NEW_TOKENS
from wgpu_lora.train.arguments import TrainingArguments


def run(options: dict[str, Any], device: int, adapter: str | None) -> dict[str, Any]:
    args = TrainingArguments(**options)
    assert args.eval_data, "a proof's recipe has held-out data"
    rows = [row for _, row in read_jsonl(Path(args.eval_data))]
    model = load(args.model or "demo", device=device, base_dtype=args.base_dtype)
    requests = [row["messages"][0]["content"] for row in rows]
    found = answer(model, requests, adapter=adapter, max_new_tokens=NEW_TOKENS, batch=BATCH)
    verdicts = [run_check(a.text, row["check"]) for a, row in zip(found, rows, strict=True)]
    return {
        "answers": [
            {"request": request, "text": a.text, "parses": parses(a.text), "passed": v.passed, "reason": v.reason}
            for request, a, v in zip(requests, found, verdicts, strict=True)
        ]
    }


def parses(text: str) -> bool:
    """Whether Python's own parser takes it."""
    try:
        ast.parse(text)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False
    return True
