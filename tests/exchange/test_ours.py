"""llama.cpp's greedy answers and losses beside our own, on the demo with an adapter merged into it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from llama_cpp_helpers import loss, opened
from support.gguf_models import DEMO, make_adapter

from wgpu_lora import api
from wgpu_lora.formats.tokenizer.tokenizer import Tokenizer
from wgpu_lora.models.export.gguf_export import export_model

ROWS = 5


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Small enough for the demo to stay sensible, large enough to change what it says."""
    return make_adapter(tmp_path_factory.mktemp("a") / "adapter", DEMO, lora_alpha=8)


@pytest.fixture(scope="module")
def rows() -> list[dict[str, object]]:
    lines = (DEMO.parent / "data" / "heldout.jsonl").read_text().splitlines()[:ROWS]
    return [{"messages": json.loads(line)["messages"]} for line in lines]


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
def test_greedy_answers_and_the_loss(tmp_path: Path, adapter: Path, rows: list, kind: str) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    export_model(DEMO, tmp_path / "demo.gguf", kind, adapter)
    ours = api.load("demo", base_dtype="f32")
    measured = api.evaluate(ours, data, adapter=adapter, completion_only_loss=False)
    base = api.evaluate(ours, data, completion_only_loss=False)
    tokenizer = Tokenizer.load(DEMO)
    assert tokenizer is not None
    model = opened(tmp_path / "demo.gguf")
    total, tokens = 0.0, 0
    for row in rows:
        ids = tokenizer.encode(tokenizer.render(row["messages"]))
        model.reset()
        model.eval(ids)
        total += loss(np.array(model.scores[: len(ids)]), ids) * (len(ids) - 1)
        tokens += len(ids) - 1
    assert tokens == measured.tokens
    print(kind, total / tokens, measured.loss, base.loss)
    assert abs(total / tokens - measured.loss) < (0.0005 if kind == "f16" else 0.01)
    assert abs(base.loss - measured.loss) > 0.02
    if kind == "q8_0":
        return
    for row in rows:
        question = row["messages"][:1]
        theirs = model.create_chat_completion(question, temperature=0, max_tokens=120)["choices"][0]
        mine = api.generate(ours, question[0]["content"], adapter=adapter, max_new_tokens=120)
        assert theirs["message"]["content"] == mine
