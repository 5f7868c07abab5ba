"""Evaluation from Python: the loss of data, with or without adapters."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from wgpu_lora.api.call_arguments import listeners
from wgpu_lora.api.notebook_progress import Bars
from wgpu_lora.data import Source, TokenizedData, heldout_data, python_source, tokenize_source
from wgpu_lora.errors import UserError
from wgpu_lora.events import Evaluating, EventForwarder, Events
from wgpu_lora.formats.tokenizer.chat_template import template_kwargs
from wgpu_lora.formats.tokenizer.tokenizer import Tokenizer
from wgpu_lora.infer.answers import tokenizer_of
from wgpu_lora.infer.exact_match import Match, compared
from wgpu_lora.infer.named_adapters import BASE, adapters_on_device, check_directory, slots_of
from wgpu_lora.infer.perplexity import Evaluation
from wgpu_lora.infer.perplexity import evaluate as evaluate_rows
from wgpu_lora.models.loaded_model import LoadedModel, open_model
from wgpu_lora.names.spelling import flag, setting
from wgpu_lora.train.objective_eval import TEACHER, evaluate_objective, objective_options, reads
from wgpu_lora.train.objectives import formats_of, objective_of
from wgpu_lora.train.options.training_arguments import TrainingArguments, from_values
from wgpu_lora.train.run.trained_options import check_rows, evaluation_rows
from wgpu_lora.train.track.run_log import HELD_OUT, DataFile, Losses, run_name
from wgpu_lora.train.track.run_recorder import device_facts, given_options, recorded, remarks
from wgpu_lora.train.training_data import prepared_for
from wgpu_lora.weights.base_formats import DEFAULT_FORMAT


def evaluate(
    model: LoadedModel | str | Path,
    data: str | Path | Iterable[Mapping[str, Any]],
    *,
    split: str | None = None,
    dataset_config: str | None = None,
    skip_bad_rows: bool = False,
    adapter: str | Path | None = None,
    max_length: int | None = None,
    on_overflow: str | None = None,
    completion_only_loss: bool | None = None,
    enable_thinking: bool | None = None,
    objective: str | None = None,
    teacher: str | Path | None = None,
    teacher_adapter: str | Path | None = None,
    teacher_cache: str | Path | None = None,
    exact_match: bool = False,
    match_pattern: str | None = None,
    match_field: str | None = None,
    goal: str | None = None,
    notes: str | None = None,
    run_log: bool = True,
    events: Events | None = None,
    progress_bar: bool | None = None,
    **before: Any,
) -> Evaluation:
    """Measure the loss and perplexity of data, with or without an adapter.

    Args:
        data: as in `finetune`: a file, a folder, a Hugging Face dataset, or rows. Of a folder or a dataset, the split
            in `split`, by default the validation split, else the test split, else all rows.
        skip_bad_rows: skip rows that cannot be read.
        max_length: maximum tokens per row; longer rows are truncated or, if `on_overflow` is drop, left out. By
            default as in the adapter's training, according to its run.json, else 1024 or the model's number of
            positions if that is smaller; the result states it.
        on_overflow, completion_only_loss, enable_thinking: as in training. By default as in the adapter's training,
            else truncate, True, and no value for the chat template.
        objective: whose loss and metrics to measure. By default that of the adapter's training if it reads such rows,
            with the same options (beta, reference_adapter, ...), else sft, also after distillation.
        teacher, teacher_adapter, teacher_cache: whom to compare with, if the objective is kd (then the default).
        exact_match: also answer each row greedily and compare the answer with the row's own, for the metric
            `exact_match` and for `comparisons`. match_pattern: a regular expression, whose first match (or first group)
            is compared instead of the whole text. match_field: the field of a JSON object that is compared, `a.b` of
            one within another. Either includes `exact_match`.
        goal, notes, run_log: what the run log says about the evaluation, and whether it is recorded there.
        events: receives `loading` and `evaluating`.
        progress_bar: whether to show progress; by default, on a terminal and in a notebook.

    Raises:
        UserError: a value is out of range, the data cannot be read or have no trained tokens, or the adapter does not
            fit.
    """
    receivers = _listeners("evaluate()", events, before)
    if adapter is not None:
        check_directory(adapter)
    adapters = [] if adapter is None else [adapter]
    data = data if isinstance(data, str | Path) else list(data)
    options = _row_options(max_length, on_overflow, completion_only_loss, enable_thinking)
    source = _source(data, split, dataset_config)
    whom = _teacher(teacher, teacher_adapter, teacher_cache)
    settings = _objective(source, adapter, objective, whom)
    source = _source(data, split, dataset_config)
    match = _match(exact_match, match_pattern, match_field, settings["objective"])
    if settings["objective"] != "sft":
        opened = model if isinstance(model, LoadedModel) else open_model(str(model))
        with remarks(goal, notes, run_log):
            return _objective_loss(
                BASE, opened, source, adapter, options, skip_bad_rows, settings, receivers, progress_bar
            )
    opened, prepared = _heldout(model, source, adapters, options, skip_bad_rows)
    slots = {BASE: 0 if adapters else None}
    with remarks(goal, notes, run_log):
        return _evaluate_slots(opened, prepared, adapters, slots, receivers, progress_bar, match)[BASE]


def evaluate_several(
    model: LoadedModel | str | Path,
    data: str | Path | Iterable[Mapping[str, Any]],
    adapters: Mapping[str, str | Path],
    *,
    include_base: bool = True,
    split: str | None = None,
    dataset_config: str | None = None,
    skip_bad_rows: bool = False,
    max_length: int | None = None,
    on_overflow: str | None = None,
    completion_only_loss: bool | None = None,
    enable_thinking: bool | None = None,
    objective: str | None = None,
    teacher: str | Path | None = None,
    teacher_adapter: str | Path | None = None,
    teacher_cache: str | Path | None = None,
    exact_match: bool = False,
    match_pattern: str | None = None,
    match_field: str | None = None,
    goal: str | None = None,
    notes: str | None = None,
    run_log: bool = True,
    events: Events | None = None,
    progress_bar: bool | None = None,
    **before: Any,
) -> dict[str, Evaluation]:
    """Measure the loss and perplexity of the same data with several adapters, which are loaded together.

    Args:
        adapters: PEFT adapter directories by name; their ranks and modules may differ.
        include_base: also evaluate the base model alone, as "base".

    The other arguments are as in `evaluate`.

    Returns:
        Evaluations by name: "base" first, then the adapters in order.

    Raises:
        UserError: there is no adapter, one is named "base" beside the base, or as `evaluate`.
    """
    receivers = _listeners("evaluate_several()", events, before)
    slots = slots_of(adapters, include_base)
    directories = list(adapters.values())
    data = data if isinstance(data, str | Path) else list(data)
    row_options = _row_options(max_length, on_overflow, completion_only_loss, enable_thinking)
    names = {BASE: None, **adapters} if include_base else adapters
    whom = _teacher(teacher, teacher_adapter, teacher_cache)
    settings = {
        name: _objective(_source(data, split, dataset_config), path, objective, whom) for name, path in names.items()
    }
    objectives = [options["objective"] for options in settings.values()]
    match = _match(exact_match, match_pattern, match_field, *objectives)
    if any(name != "sft" for name in objectives):
        opened = model if isinstance(model, LoadedModel) else open_model(str(model))
        usual = next(options for options in settings.values() if options["objective"] != "sft")
        with remarks(goal, notes, run_log):
            return {
                name: _objective_loss(
                    name,
                    opened,
                    _source(data, split, dataset_config),
                    path,
                    row_options,
                    skip_bad_rows,
                    settings[name] if path is not None or objective else usual,
                    receivers,
                    progress_bar,
                )
                for name, path in names.items()
            }
    source = _source(data, split, dataset_config)
    opened, prepared = _heldout(model, source, directories, row_options, skip_bad_rows)
    with remarks(goal, notes, run_log):
        return _evaluate_slots(opened, prepared, directories, slots, receivers, progress_bar, match)


def prepared_rows(model: LoadedModel, data: str | Path) -> TokenizedData:
    """The rows that `evaluate` measures by default, encoded. Raises UserError."""
    return _heldout(model, _source(data, None, None), [], _row_options(None, None, None, None), False)[1]


def _listeners(where: str, events: Events | None, before: dict[str, Any]) -> tuple[Events, ...]:
    receivers = listeners(where, events, before)
    if before:
        raise TypeError(f"{where} got an unexpected keyword argument {next(iter(before))!r}")
    return receivers


def _evaluate_slots(
    model: LoadedModel,
    prepared: TokenizedData,
    directories: Sequence[str | Path],
    slots: Mapping[str, int | None],
    receivers: Sequence[Events],
    progress_bar: bool | None,
    match: Match | None = None,
) -> dict[str, Evaluation]:
    """The loss of the same rows for each of `slots`, by name, and answers if `match` compares them."""
    result: dict[str, Evaluation] = {}
    with Bars(progress_bar) as bars, adapters_on_device(model, directories) as adapters:
        for name, slot in slots.items():
            events = SummedProgress(len(result), len(slots), bars, *receivers)
            directory = None if slot is None else directories[slot]
            with recorded_evaluation(model, prepared, name, directory) as entry:
                evaluation = evaluate_rows(model, prepared, adapters, slot, events=events)
                if match:
                    answers = compared(model, prepared.rows, directory, match, events)
                    share = fmean(comparison.matches for comparison in answers)
                    metrics = evaluation.metrics | {"exact_match": share}
                    evaluation = replace(evaluation, metrics=metrics, comparisons=answers)
                result[name] = evaluation
                note_results(entry, evaluation)
    return {name: replace(value, data=prepared.summary()) for name, value in result.items()}


def _match(asked: bool, pattern: str | None, field: str | None, *objectives: str) -> Match | None:
    """What `evaluate` compares of answers, if anything. Raises UserError if there are none to compare."""
    if not asked and pattern is None and field is None:
        return None
    other = next((name for name in objectives if name != "sft"), None)
    if other:
        raise UserError(
            f"{flag('exact_match')} compares answers of rows for sft, and these are evaluated by {other}: give "
            f"{setting('objective', 'sft')} with such rows, or leave it out."
        )
    return Match(pattern, field)


def _teacher(*values: str | Path | None) -> dict[str, str]:
    return {name: str(value) for name, value in zip(TEACHER, values, strict=True) if value is not None}


def _objective(
    source: Source, adapter: str | Path | None, objective: str | None, teacher: Mapping[str, str]
) -> dict[str, Any]:
    """The objective to evaluate and its options: as given, else that of the adapter if it reads such rows, else sft."""
    settings = objective_options(adapter, objective, teacher)
    if objective is None and settings["objective"] != "sft" and not reads(settings["objective"], source):
        return {"objective": "sft"}
    return settings


def merged_losses(model: str, adapter: Path, merged: Path, dtype: str, data: Path) -> Iterator[tuple[str, float]]:
    """Yields losses of held-out data: of an adapter beside its base and then, of the model merged meanwhile, in its
    dtype and in NF4.

    Raises:
        UserError: as `evaluate`.
    """
    opened = open_model(model)
    rows = evaluation_rows({}, [adapter], opened.config.max_position_embeddings)
    names = ("max_length", "on_overflow", "completion_only_loss", "enable_thinking")
    options: dict[str, Any] = {name: getattr(rows, name) for name in names}
    options |= {"objective": "sft", "run_log": False}
    yield "beside its base", evaluate(opened, data, adapter=adapter, **options).loss
    opened.unload()
    for base_dtype in (dtype, DEFAULT_FORMAT):
        opened = open_model(str(merged), base_dtype=base_dtype)
        yield f"merged, in {base_dtype}", evaluate(opened, data, **options).loss
        opened.unload()


def _objective_loss(
    name: str,
    model: LoadedModel,
    source: Source,
    adapter: str | Path | None,
    row_options: Mapping[str, Any],
    skip_bad_rows: bool,
    settings: Mapping[str, Any],
    receivers: Sequence[Events],
    progress_bar: bool | None,
) -> Evaluation:
    """The loss and the metrics of an objective other than sft."""
    rows = evaluation_rows(row_options, [] if adapter is None else [adapter], model.config.max_position_embeddings)
    encoding = {name: getattr(rows, name) for name in ("max_length", "on_overflow", "enable_thinking", "template_date")}
    options = {**settings, **encoding, "skip_bad_rows": skip_bad_rows, "init_adapter": adapter and str(adapter)}
    args = from_values(options, "evaluate")
    tokenizer = common_tokenizer(model, [] if adapter is None else [adapter])
    prepared, begin = prepared_for(args, replace(model, tokenizer=tokenizer), source), time.perf_counter()
    with Bars(progress_bar) as bars, recorded_evaluation(model, prepared, name, adapter, args.objective) as entry:
        result = evaluate_objective(model, prepared, args, EventForwarder(bars, *receivers))
        seconds = time.perf_counter() - begin
        facts = prepared.trained_tokens, len(prepared.rows), seconds, prepared.max_length, prepared.summary()
        evaluation = Evaluation(result.pop("loss"), None, *facts, args.objective, result)
        note_results(entry, evaluation)
    return evaluation


class SummedProgress(EventForwarder):
    """Adds up the rows of several evaluations for one progress display."""

    def __init__(self, before: int, count: int, *to: Events):
        super().__init__(*to)
        self._before, self._count = before, count

    def evaluating(self, evaluating: Evaluating) -> None:
        rows = evaluating.rows + self._before * evaluating.total
        super().evaluating(replace(evaluating, rows=rows, total=self._count * evaluating.total))


def _source(data: str | Path | Iterable[Mapping[str, Any]], split: str | None, config: str | None) -> Source:
    if isinstance(data, str | Path):
        return heldout_data(data, split, config)
    if split:
        raise UserError("'split' applies to a dataset or a folder, not to rows: leave it out.")
    return python_source(data)


def _row_options(
    max_length: int | None, on_overflow: str | None, completion_only_loss: bool | None, enable_thinking: bool | None
) -> dict[str, Any]:
    """The row options of a call, checked before a model is opened."""
    row_options = {
        "max_length": max_length,
        "on_overflow": on_overflow,
        "completion_only_loss": completion_only_loss,
        "enable_thinking": enable_thinking,
    }
    check_rows(row_options)
    return row_options


def _heldout(
    model: LoadedModel | str | Path,
    source: Source,
    adapters: Sequence[str | Path],
    row_options: Mapping[str, Any],
    skip_bad_rows: bool,
) -> tuple[LoadedModel, TokenizedData]:
    """The opened model, and the rows to evaluate."""
    opened = model if isinstance(model, LoadedModel) else open_model(str(model))
    rows = evaluation_rows(row_options, adapters, opened.config.max_position_embeddings)
    prepared = tokenize_source(
        source,
        common_tokenizer(opened, adapters),
        max_length=rows.max_length,
        completion_only_loss=rows.completion_only_loss,
        on_overflow="drop" if rows.on_overflow == "drop" else "truncate",
        chat_template_kwargs=template_kwargs(rows.enable_thinking, rows.template_date),
        vocab_size=opened.config.vocab_size,
        skip_bad_rows=skip_bad_rows,
        formats=formats_of(objective_of(TrainingArguments())),
    )
    return opened, prepared


def common_tokenizer(model: LoadedModel, adapters: Sequence[str | Path]) -> Tokenizer | None:
    """The tokenizer of the model or, if they have their own, of the adapters. UserError if the adapters' differ."""
    if model.tokenizer is None or not adapters:
        return model.tokenizer
    tokenizers = [tokenizer_of(model, adapter) for adapter in adapters]
    if any(other is not tokenizers[0] and other.files() != tokenizers[0].files() for other in tokenizers[1:]):
        raise UserError("The adapters have different tokenizers or chat templates: evaluate one at a time.")
    return tokenizers[0]


def recorded_evaluation(
    model: LoadedModel, prepared: TokenizedData, name: str, adapter: str | Path | None, objective: str = "sft"
) -> AbstractContextManager[dict[str, Any]]:
    """An evaluation in the run log."""
    quant = model.decoder.base_dtype
    config = {"model": model.name, "adapter": adapter and str(adapter), "max_length": prepared.max_length}
    return recorded(
        "evaluate",
        run_name(model.name, quant, adapter is not None, False, "evaluate", "f32"),
        objective="evaluate",
        adapter=None if name == BASE else name,
        device=device_facts(model.device.info),
        config=given_options({**config, "base_dtype": quant, "objective": objective}),
        data=DataFile(prepared.path, prepared.digest),
    )


def note_results(entry: dict[str, Any], evaluation: Evaluation) -> None:
    """The results of an evaluation, in its entry of the run log."""
    entry["losses"] = Losses(HELD_OUT, final=evaluation.loss)
    entry |= {"tokens": evaluation.tokens, "seconds": round(evaluation.seconds, 3)}
    entry["results"] = {"perplexity": evaluation.perplexity, "rows": evaluation.rows, **evaluation.metrics}
