"""Default batches, the number of steps, and learning rates."""

from __future__ import annotations

import pytest

from wgpu_lora.errors import UserError
from wgpu_lora.train.lr_schedule import LR_SCHEDULES, learning_rate, warmup_steps
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.options.unused_options import unused_options
from wgpu_lora.train.training_data import FEW, default_batches


def sizes(rows: int, tokens: int = 100, weight: float = 1.0, **said: object) -> tuple[bool | None, int, int, bool]:
    """(packing, rows per batch, batches per step, whether there is a note) for this many rows of this many tokens."""
    args, note = default_batches(TrainingArguments(**said), [tokens] * rows, weight)
    packing, a_batch, batches = args.batching
    assert (args.packing, args.per_device_train_batch_size, args.gradient_accumulation_steps) == args.batching
    return packing, a_batch, batches, bool(note)


def test_small_data_have_small_steps() -> None:
    assert sizes(296) == (False, 8, 1, True)
    assert sizes(200) == (False, 4, 1, True)
    assert sizes(50) == (False, 2, 1, True)
    assert sizes(1) == (False, 1, 1, True)  # there is no second row
    assert sizes(FEW * 2 * 1024 * 4 // 100 + 1) == (True, 2, 4, False)


def test_between_them_there_are_fewer_packed_batches_a_step() -> None:
    assert sizes(296, 1000) == (True, 2, 4, False)
    assert sizes(200, 1000) == (True, 2, 2, True)
    assert sizes(100, 1000) == (True, 2, 1, True)
    assert sizes(60, 1000) == (False, 2, 1, True)


def test_a_batch_is_no_longer_than_a_packed_one() -> None:
    args, _ = default_batches(TrainingArguments(), [60] * 280 + [1000] * 8)
    assert args.batching == (False, 2, 4)


def test_what_was_said_holds() -> None:
    assert sizes(50, packing=True) == (True, 2, 1, True)
    assert sizes(50, packing=True, gradient_accumulation_steps=4) == (True, 2, 4, False)
    assert sizes(50, per_device_train_batch_size=4) == (False, 4, 1, True)
    assert sizes(50, gradient_accumulation_steps=4) == (False, 1, 4, True)
    three = {"packing": False, "per_device_train_batch_size": 16, "gradient_accumulation_steps": 3}
    assert sizes(50, **three) == (False, 16, 3, False)
    assert sizes(50, per_device_train_batch_size=2, gradient_accumulation_steps=8) == (False, 2, 8, True)


def test_the_note_counts_the_rows_of_a_step() -> None:
    def note(rows: int, weight: float = 1.0, **said: object) -> str:
        return default_batches(TrainingArguments(**said), [100] * rows, weight)[1].partition(" per step")[0]

    assert [note(1), note(3), note(50, 2), note(50, 0.5)] == ["1 row", "2 rows", "4 rows", "1 row"]
    assert note(3, per_device_train_batch_size=16) == "3 rows"


def test_a_weight_multiplies_what_was_left_open() -> None:
    assert sizes(50, weight=2) == (False, 2, 2, True)
    assert sizes(50, weight=0.5) == (False, 1, 1, True)
    assert sizes(100_000, weight=2) == (True, 2, 8, False)
    assert sizes(200, 1000, weight=0.5) == (True, 2, 1, True)
    assert sizes(200, 1000, weight=2) == (True, 2, 4, True)
    assert sizes(50, weight=2, gradient_accumulation_steps=6) == (False, 1, 6, True)  # multiplied already


@pytest.mark.parametrize("kind", LR_SCHEDULES)
@pytest.mark.parametrize(("total", "ratio"), [(1, 0.03), (1, 1.0), (2, 1.0), (12, 0.5), (12, 1.0), (100, 0.03)])
def test_every_step_trains_and_the_peak_is_reached(kind: str, total: int, ratio: float) -> None:
    warmup = warmup_steps(total, ratio)
    rates = [learning_rate(kind, 1e-3, step, total, warmup) for step in range(total)]
    assert min(rates) > 0
    assert max(rates) == pytest.approx(1e-3)


@pytest.mark.parametrize("kind", LR_SCHEDULES)
def test_decays_end_at_the_least_rate(kind: str) -> None:
    """min + (peak - min) * decay: transformers' `cosine_with_min_lr`, for every schedule that decays."""
    total, warmup, peak, least = 40, 4, 5e-5, 1e-5
    plain, floored = (
        [learning_rate(kind, peak, step, total, warmup, to) for step in range(total + 1)] for to in (0.0, least)
    )
    assert floored[:warmup] == plain[:warmup]
    falls = LR_SCHEDULES[kind].decay is not None
    assert floored[total] == (pytest.approx(least, rel=1e-12) if falls else peak)
    expected = [least + (peak - least) * rate / peak if falls else rate for rate in plain[warmup:]]
    assert floored[warmup:] == pytest.approx(expected, rel=1e-12)


def test_a_least_rate_above_the_peak_is_refused_and_idle_without_decay() -> None:
    with pytest.raises(UserError, match="more than the peak"):
        TrainingArguments(learning_rate=1e-5, lr_scheduler_min=2e-5)
    constant = TrainingArguments(lr_scheduler_type="constant", lr_scheduler_min=1e-5)
    assert any("does not decay" in line for line in unused_options(["lr_scheduler_min"], constant))
    assert not unused_options(["lr_scheduler_min"], TrainingArguments(lr_scheduler_min=1e-5))


def test_a_warmup_that_is_said_in_steps() -> None:
    assert (warmup_steps(100, 0.03, 20), warmup_steps(10, 0.03, 20)) == (20, 9)
