"""What a batch is where nobody says: packed, unless that leaves the data too few steps to learn in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from wgpu_lora.train.arguments import ROWS_PER_BATCH, TrainingArguments
from wgpu_lora.words import counted

FEW = 32  # steps of an epoch: with fewer, what was left open is chosen by the rows
ROWS = (8, 4, 2)  # of a step then, the first that gives that many steps


def fitted(
    args: TrainingArguments, lengths: Sequence[int], weight: float = 1.0, members: int = 1
) -> tuple[TrainingArguments, str]:
    """Fills in packing, rows a batch and batches a step where they were left open; also a note where data are small.

    Small data are those of which packed batches, 4 a step, would make fewer than FEW steps an epoch. They get 2 or 1 a
    step and, where those are few too, are not packed: steps of 8 rows, as TRL would take, or of 4 or 2 where 8 are too
    many, in batches of no more tokens than a packed one.

    Args:
        lengths: tokens of each row, or of all that a sample of several has in a batch.
        members: how many that are; a batch is larger by so much.
        weight: batches a step, by those of an adapter of weight 1, where they were left open.
    """
    packing, rows, accumulation = args.batching
    said = args.packing, args.per_device_train_batch_size, args.gradient_accumulation_steps
    longest = args.length * members
    a_batch = rows * longest if packing else rows * sum(lengths) / len(lengths)  # tokens

    def few(batches: int) -> bool:
        return sum(lengths) / (a_batch * batches) < FEW

    note, small = "", f"since the data are small ({counted(len(lengths), 'row')}, {sum(lengths):,} tokens)"
    least = math.ceil(1 / weight)
    if None in said and few(accumulation):
        if packing and said[2] is None:
            accumulation = next((n for n in (2, 1) if n >= least and not few(n)), least)
            note = f"{counted(max(1, round(accumulation * weight)), 'packed batch', 'packed batches')} a step, {small}"
        if few(accumulation) and not args.packing:
            packing = False
            rows, accumulation = _sizes(said[1], said[2], lengths, ROWS_PER_BATCH * longest, weight)
            batches = accumulation if said[2] else max(1, round(accumulation * weight))
            note = f"{counted(min(rows * batches, len(lengths)), 'row')} a step, not packed, {small}"
    if said[2] is None:
        accumulation = max(1, round(accumulation * weight))
    filled = replace(args, packing=packing, per_device_train_batch_size=rows, gradient_accumulation_steps=accumulation)
    return filled, note


def _sizes(
    rows: int | None, accumulation: int | None, lengths: Sequence[int], most: int, weight: float
) -> tuple[int, int]:
    """Rows a batch and batches a step, as they were said or else chosen; `most`: tokens of a batch."""
    longest, least = sorted(lengths), math.ceil(1 / weight)
    batch, batches = 1, 1
    for a_step in (min(count, len(lengths)) for count in ROWS):
        batch = rows or max(1, a_step // max(accumulation or 1, least))
        while not rows and batch > 1 and sum(longest[-batch:]) > most:
            batch //= 2
        batches = accumulation or max(least, a_step // batch)
        if len(lengths) / (batch * batches) >= FEW:
            break
    return batch, batches
