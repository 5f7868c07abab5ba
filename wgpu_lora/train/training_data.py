"""The rows that a run trains on and holds out, prepared for its objective."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from wgpu_lora.data import Sample, Source, TokenizedData, split_validation, tokenize_source, training_data
from wgpu_lora.data.row_formats import RowFormats
from wgpu_lora.errors import UserError
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.models.model_files import ModelFiles
from wgpu_lora.names.spelling import flag
from wgpu_lora.names.text import count_noun
from wgpu_lora.train.objectives import formats_of, objective_of
from wgpu_lora.train.options.training_arguments import ROWS_PER_BATCH, TrainingArguments
from wgpu_lora.train.rewards.function_process import Tools


def sources_of(args: TrainingArguments, rows: Mapping[str, Source] | None = None) -> tuple[Source, Source | None]:
    """The sources of training and held-out rows. Raises UserError if they cannot be found."""
    assert args.data is not None
    training, held_out = training_data(
        args.data,
        args.eval_data,
        split=args.split,
        eval_split=args.eval_split,
        dataset_config=args.dataset_config,
        sources=rows,
    )
    if held_out and args.validation_split is not None:
        raise UserError(
            f"{args.data} has held-out rows of its own, {held_out.name}: leave {flag('validation_split')} out, or name "
            f"the file to train on with {flag('data')}."
        )
    return training, held_out


def read_rows(
    args: TrainingArguments,
    model: LoadedModel,
    sources: tuple[Source, Source | None],
    formats: RowFormats[Sample] | None = None,
    tools: Tools | None = None,
) -> tuple[TokenizedData, TokenizedData | None]:
    """Training rows, and held-out rows if there are any.

    Args:
        formats: instead of those of the objective.
        tools: see `tools_of`.

    Raises:
        UserError: rows cannot be read, or there are too few to hold some out.
    """
    training, held_out = sources
    tools = tools or tools_of(args)
    prepared = prepared_for(args, model, training, formats, tools)
    if args.validation_split is not None:
        return split_validation(prepared, args.validation_split, args.seed)
    return prepared, prepared_for(args, model, held_out, tools=tools) if held_out else None


def tools_of(args: TrainingArguments) -> Tools | None:
    """The tools that completions may call, if the objective samples some. Raises UserError."""
    return Tools(args.tools, args.reward_timeout) if args.tools and objective_of(args).samples else None


def prepared_for(
    args: TrainingArguments,
    model: LoadedModel | ModelFiles,
    source: Source,
    formats: RowFormats[Sample] | None = None,
    tools: Tools | None = None,
) -> TokenizedData:
    """The samples that the objective trains on.

    Args:
        formats: instead of those of the objective.
        tools: that prompts have.

    Raises:
        UserError: the rows cannot be read.
    """
    objective = objective_of(args)
    cut, variables = objective.cut(), args.template_kwargs()
    if tools:
        variables = {**variables, "tools": tools.schemas}
    prepared = tokenize_source(
        source,
        model.tokenizer,
        max_length=args.length,
        completion_only_loss=args.completion_only_loss or cut is not None,
        on_overflow="drop" if args.on_overflow == "drop" else "truncate",
        chat_template_kwargs=variables,
        vocab_size=model.config.vocab_size,
        skip_bad_rows=args.skip_bad_rows,
        formats=formats or formats_of(objective),
        parts=objective.rows_per_sample,
        cut=cut,
    )
    return replace(prepared, longest_fork=model.config.longest_fork())


FEW = 32  # steps per epoch: with fewer, batch options that were not given are adapted to the data
ROWS = (8, 4, 2)  # rows per step that are then tried, until there are that many steps


def default_batches(
    args: TrainingArguments, lengths: Sequence[int], weight: float = 1.0, members: int = 1
) -> tuple[TrainingArguments, str]:
    """Fill in packing, rows per batch and batches per step where unset; also returns a note if the data are small.

    Data are small if packed batches, 4 per step, would give fewer than FEW steps per epoch. They get 2 batches or 1 per
    step and, if the steps are still too few, are not packed: steps of 8 rows as in TRL, or of 4 or 2 if 8 are too many,
    in batches of no more tokens than a packed one.

    Args:
        lengths: tokens of each sample in a batch.
        members: segments per sample, a factor of the batch size.
        weight: batches per step, if unset, relative to an adapter of weight 1.
    """
    packing, rows, accumulation = args.batching
    sizes = args.packing, args.per_device_train_batch_size, args.gradient_accumulation_steps
    longest = args.length * members
    a_batch = rows * longest if packing else rows * sum(lengths) / len(lengths)  # tokens

    def few(batches: int) -> bool:
        return sum(lengths) / (a_batch * batches) < FEW

    noun = "row" if members == 1 else "pair"
    note, small = "", f"since the data are small ({count_noun(len(lengths), noun)}, {sum(lengths):,} tokens)"
    minimum = math.ceil(1 / weight)
    if None in sizes and few(accumulation):
        if packing and sizes[2] is None:
            accumulation = next((n for n in (2, 1) if n >= minimum and not few(n)), minimum)
            packed = count_noun(max(1, round(accumulation * weight)), "packed batch", "packed batches")
            note = f"{packed} per step, {small}"
        if few(accumulation) and not args.packing:
            packing = False
            rows, accumulation = _sizes(sizes[1], sizes[2], lengths, ROWS_PER_BATCH * longest, weight)
            batches = accumulation if sizes[2] else max(1, round(accumulation * weight))
            note = f"{count_noun(min(rows * batches, len(lengths)), noun)} per step, not packed, {small}"
    if sizes[2] is None:
        accumulation = max(1, round(accumulation * weight))
    filled = replace(args, packing=packing, per_device_train_batch_size=rows, gradient_accumulation_steps=accumulation)
    return filled, note


def _sizes(
    rows: int | None, accumulation: int | None, lengths: Sequence[int], max_tokens: int, weight: float
) -> tuple[int, int]:
    """Rows per batch and batches per step, as given or else chosen; `max_tokens`: maximum tokens of a batch."""
    longest, minimum = sorted(lengths), math.ceil(1 / weight)
    batch, batches = 1, 1
    for a_step in (min(count, len(lengths)) for count in ROWS):
        batch = rows or max(1, a_step // max(accumulation or 1, minimum))
        while not rows and batch > 1 and sum(longest[-batch:]) > max_tokens:
            batch //= 2
        batches = accumulation or max(minimum, a_step // batch)
        if len(lengths) / (batch * batches) >= FEW:
            break
    return batch, batches
