"""The held-out loss equals the golden one, whoever computes it and however rows are packed."""

from pathlib import Path

import numpy as np
import pytest
from support.models import ARCHITECTURES, ROWS, allocated, full_logits, golden, golden_rows, load, save_golden_adapter

from wgpu_lora.data import Row, TokenizedData
from wgpu_lora.data.row_counts import RowCounts
from wgpu_lora.data.row_files import FileSource
from wgpu_lora.errors import UserError
from wgpu_lora.infer import Evaluator, evaluate, load_adapters
from wgpu_lora.models.batch_inputs import Segment


def rows_of(architecture):
    tensors = golden(architecture)
    pairs = zip(golden_rows(tensors, "input_ids"), golden_rows(tensors, "labels"), strict=True)
    return [Row(ids, labels, i) for i, (ids, labels) in enumerate(pairs)]


def prepared(rows):
    trained, total = sum(row.trained_tokens for row in rows), sum(len(row.input_ids) for row in rows)
    return TokenizedData("rows.jsonl", rows, "", 64, RowCounts(FileSource(Path("rows.jsonl"))), trained, total)


def two_adapters(model, architecture, directory):
    """Slot 0 has an adapter of a smaller rank, slot 1 the golden one."""
    smaller = save_golden_adapter(architecture, directory / "smaller", 0.5, rank=3)
    return load_adapters(model.device, model.config, [smaller, save_golden_adapter(architecture, directory / "whole")])


def summed_loss(logits, row):
    """In float64, from logits."""
    logits = logits[:-1].astype(np.float64)
    top = logits.max(axis=1, keepdims=True)
    log_sum = top[:, 0] + np.log(np.exp(logits - top).sum(axis=1))
    used = row.labels[1:] != -100
    return float((log_sum - logits[np.arange(len(logits)), np.where(used, row.labels[1:], 0)])[used].sum())


@pytest.mark.parametrize(
    ("architecture", "base"),
    [
        pytest.param(a, b, marks=[pytest.mark.drivers] if (a, b) == ("qwen2", "nf4") else [])
        for a in ARCHITECTURES
        for b in ("f32", "nf4")
    ],
)
def test_loss_with_the_adapter_equals_the_golden_one(device, tmp_path, architecture, base):
    model, rows = load(architecture, device, base), rows_of(architecture)
    adapters = two_adapters(model, architecture, tmp_path)
    evaluator = Evaluator(model, adapters, ROWS)
    with allocated(device, evaluator.program, evaluator.storages()) as arena:
        evaluator.build(arena)
        loss, tokens = evaluator.loss(rows, slot=1)
    assert tokens == sum(row.trained_tokens for row in rows)
    assert loss == pytest.approx(golden(architecture)[f"loss.{base}"].item(), rel=1e-5)


def test_slots_and_the_base_alone_are_told_apart(device, tmp_path):
    model, rows = load("qwen2", device), rows_of("qwen2")
    adapters = two_adapters(model, "qwen2", tmp_path)
    base = full_logits(model, [Segment(row.input_ids) for row in rows])
    tokens = sum(row.trained_tokens for row in rows)
    expected = sum(summed_loss(logits, row) for logits, row in zip(base, rows, strict=True)) / tokens
    evaluator = Evaluator(model, adapters, ROWS)
    with allocated(device, evaluator.program, evaluator.storages()) as arena:
        evaluator.build(arena)
        losses = [evaluator.loss(rows, slot)[0] for slot in (None, 1, 0, 1, None)]
    assert losses[0] == pytest.approx(expected, rel=1e-5)
    assert losses[1] == pytest.approx(golden("qwen2")["loss.f32"].item(), rel=1e-5)
    assert abs(losses[2] - losses[0]) > 1e-4
    assert abs(losses[2] - losses[1]) > 1e-4
    assert losses[3:] == [losses[1], losses[0]]


def test_evaluate_packs_into_several_batches_and_frees_what_it_took(device):
    model, rows = load("qwen2", device), rows_of("qwen2")
    before = device.allocated
    base = full_logits(model, [Segment(row.input_ids) for row in rows])
    expected = sum(summed_loss(logits, row) for logits, row in zip(base, rows, strict=True))
    result = evaluate(model, prepared(rows * 3), batch_tokens=ROWS)
    assert result.tokens == 3 * sum(row.trained_tokens for row in rows)
    assert result.rows == 3 * len(rows)
    assert result.loss == pytest.approx(3 * expected / result.tokens, rel=1e-5)
    assert result.perplexity == pytest.approx(np.exp(result.loss))
    assert device.allocated == before


def test_rows_without_a_trained_token_are_refused(device):
    row = Row(np.array([3, 4, 5], np.int32), np.array([4, -100, -100], np.int32), 0)
    with pytest.raises(UserError, match="no trained tokens"):
        evaluate(load("qwen2", device), prepared([row] * 14), batch_tokens=ROWS)
