"""What a batch is where nobody says: packed, unless that leaves the data too few steps to learn in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from wgpu_lora.train.arguments import ROWS_PER_BATCH, TrainingArguments
from wgpu_lora.words import counted

FEW = 32  # steps of an epoch: with fewer, what was left open is chosen by the rows
ROWS = (8, 4, 2)  # of a step then, the first that gives that many steps


def fitted(args: TrainingArguments, lengths: Sequence[int], weight: float = 1.0) -> tuple[TrainingArguments, str]:
    """Fills in packing, rows a batch and batches a step where they were left open; also a note where data are small.

    Small data are those of which packed batches would make fewer than FEW steps an epoch. They are trained on in steps
    of 8 rows, as TRL would, or of 4 or 2 where 8 are too many, and in batches of no more tokens than a packed one.

    Args:
        lengths: tokens of each row.
        weight: batches a step, by those of an adapter of weight 1, where they were left open.
    """
    packing, rows, accumulation = args.batching
    said = args.packing, args.per_device_train_batch_size, args.gradient_accumulation_steps
    steps = sum(lengths) / (rows * args.length * accumulation) if packing else len(lengths) / (rows * accumulation)
    small = None in said and not args.packing and steps < FEW
    if small:
        packing = False
        rows, accumulation = _sizes(said[1], said[2], lengths, ROWS_PER_BATCH * args.length, weight)
    if said[2] is None:
        accumulation = max(1, round(accumulation * weight))
    data = f"{counted(len(lengths), 'row')}, {sum(lengths):,} tokens"
    a_step = counted(min(rows * accumulation, len(lengths)), "row")
    note = f"{a_step} a step, not packed, since the data are small ({data})" if small else ""
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
