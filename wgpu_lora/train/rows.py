"""The rows that a run trains on and holds out, prepared for its objective."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from wgpu_lora.data import Prepared, Sample, Source, hold_out, prepare, training_data
from wgpu_lora.data.columns import RowFormats
from wgpu_lora.errors import UserError
from wgpu_lora.models.files import ModelFiles
from wgpu_lora.models.loaded import LoadedModel
from wgpu_lora.names.naming import flag
from wgpu_lora.train.objectives import formats_of, objective_of
from wgpu_lora.train.options.arguments import TrainingArguments


def sources_of(args: TrainingArguments, rows: Mapping[str, Source] | None = None) -> tuple[Source, Source | None]:
    """The sources of training and held-out rows. Raises UserError if they cannot be found."""
    assert args.data is not None
    training, held_out = training_data(
        args.data,
        args.eval_data,
        split=args.split,
        eval_split=args.eval_split,
        dataset_config=args.dataset_config,
        given=rows,
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
) -> tuple[Prepared, Prepared | None]:
    """Training rows, and held-out rows if there are any.

    Args:
        formats: instead of those of the objective.

    Raises:
        UserError: rows cannot be read, or there are too few to hold some out.
    """
    training, held_out = sources
    prepared = prepared_for(args, model, training, formats)
    if args.validation_split is not None:
        return hold_out(prepared, args.validation_split, args.seed)
    return prepared, prepared_for(args, model, held_out) if held_out else None


def prepared_for(
    args: TrainingArguments, model: LoadedModel | ModelFiles, source: Source, formats: RowFormats[Sample] | None = None
) -> Prepared:
    """The samples that the objective trains on.

    Args:
        formats: instead of those of the objective.

    Raises:
        UserError: the rows cannot be read.
    """
    objective = objective_of(args)
    cut = objective.cut()
    prepared = prepare(
        source,
        model.tokenizer,
        max_length=args.length,
        completion_only_loss=args.completion_only_loss or cut is not None,
        on_overflow="drop" if args.on_overflow == "drop" else "truncate",
        chat_template_kwargs=args.template_kwargs(),
        vocab_size=model.config.vocab_size,
        skip_bad_rows=args.skip_bad_rows,
        formats=formats or formats_of(objective),
        parts=objective.parts,
        cut=cut,
    )
    return replace(prepared, longest_fork=model.config.longest_fork())
