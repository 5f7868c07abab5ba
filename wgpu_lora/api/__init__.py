"""The Python API: load, fine-tune, generate, compare, evaluate. The command line uses it too."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack, cast

from wgpu_lora.api.ask import answer, compare, generate
from wgpu_lora.api.bars import Bars
from wgpu_lora.api.listeners import Callback, listeners
from wgpu_lora.api.multi_adapter import MultiAdapterPipeline
from wgpu_lora.api.plain import plain
from wgpu_lora.api.signatures import listing
from wgpu_lora.data import Prepared, Source, given_rows, heldout_data, prepare, rows_given
from wgpu_lora.errors import UserError
from wgpu_lora.events import Evaluating, Events, Passing, StepResult
from wgpu_lora.infer import Evaluation
from wgpu_lora.infer import evaluate as evaluate_rows
from wgpu_lora.infer.answer import Answer
from wgpu_lora.infer.named import BASE, check_directory, on_device, slots_of
from wgpu_lora.infer.settings import AnswerOptions, Settings
from wgpu_lora.models.loaded import LoadedModel, open_model
from wgpu_lora.train.arguments import TrainingArguments, from_values, named
from wgpu_lora.train.finetune import prepare_job
from wgpu_lora.train.idle import idle
from wgpu_lora.train.length import check_rows, fit_rows
from wgpu_lora.train.options import TrainingOptions
from wgpu_lora.train.recipes import gather
from wgpu_lora.train.records import RunRecord
from wgpu_lora.weights.registry import DEFAULT_FORMAT

__all__ = [
    "Answer", "Events", "MultiAdapterPipeline", "RunRecord", "StepResult", "TrainingArguments",
    "answer", "compare", "evaluate", "evaluate_several", "finetune", "generate", "load",
]  # fmt: skip

for _asking in (answer, compare, generate):
    listing(Settings, AnswerOptions)(_asking)


def load(
    model: str | Path = "demo", *, device: str | int | None = None, base_dtype: str = DEFAULT_FORMAT
) -> LoadedModel:
    """Open a model and a device. The weights are loaded onto the device on first use, and stay there.

    Args:
        model: a directory, a GGUF file, a hub id, or `demo`.
        device: device index or part of its name; `wgpu-lora info` lists the devices.
    """
    return open_model(str(model), device, base_dtype)


@listing(TrainingArguments, TrainingOptions, leave_out=("model",))
def finetune(
    model: LoadedModel | str | Path | None = None,
    /,
    args: TrainingArguments | None = None,
    *,
    recipe: str | Path | None = None,
    callback: Callback | None = None,
    events: Events | None = None,
    progress_bar: bool | None = None,
    **options: Unpack[TrainingOptions],
) -> RunRecord:
    """Train an adapter and save it to `output`; returns the record of the run, which is also saved as run.json.

    The options are those of `wgpu-lora finetune`, with underscores.

    Args:
        model: a loaded model, or an argument of `load`; may be given by name too.
        args: all options at once; options given by name override it.
        recipe: a TOML file of options, or the name of a bundled one; options given by name override it.
        callback: called with a StepResult after every step; if it returns True, the run ends.
        events: receives all progress events of the run.
        progress_bar: whether to show progress; by default, on a terminal and in a notebook.

    Raises:
        UserError: an option is unknown or out of range, or the model, the data or the device is unsuitable.
    """
    told = listeners("finetune()", events, cast("dict[str, Any]", options), callback)
    said = named(options, "finetune()", "recipe")
    also = said.pop("model", None)
    if model is not None and also is not None:
        raise UserError("finetune() was given two models: pass one of them.")
    model = also if model is None else model
    said, rows = given_rows(said)
    given = {name: plain(value, name, "finetune()") for name, value in said.items()}
    loaded = model if isinstance(model, LoadedModel) else None
    if loaded:
        for name, fixed in (("model", loaded.name), ("base_dtype", loaded.decoder.base_dtype)):
            if given.setdefault(name, fixed) != fixed:
                raise UserError(f"The model was loaded with {name} {fixed!r}: load another one with {given[name]!r}.")
    elif model is not None:
        given["model"] = plain(str(model), "model", "finetune()")
    chosen = _chosen(given, args, None if recipe is None else str(plain(recipe, "recipe", "finetune()")))
    for text in idle(given, chosen):
        warnings.warn(text, stacklevel=2)
    job = prepare_job(chosen, loaded, rows=rows)
    with Bars(progress_bar) as bars:
        return job.train(Passing(bars, *told))


def _chosen(given: Mapping[str, Any], args: TrainingArguments | None, recipe: str | None) -> TrainingArguments:
    """Options given by name, over `args`, a recipe, or the run that is resumed."""
    if args is None:
        return gather(given, recipe, "finetune()")[0]
    if not isinstance(args, TrainingArguments):
        raise UserError(f"finetune(): args must be TrainingArguments, not {args!r:.60}; rows are given as data=...")
    if recipe:
        raise UserError("finetune() was given args and a recipe: pass one of them.")
    whole = from_values(given, "finetune()", args)
    if not whole.resume:
        return whole
    usual = TrainingArguments().as_dict()
    return gather({k: v for k, v in whole.as_dict().items() if v != usual[k]}, None, "finetune()")[0]


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
        events: receives `loading` and `evaluating`.
        progress_bar: whether to show progress; by default, on a terminal and in a notebook.

    Raises:
        UserError: a value is out of range, the data cannot be read or have no trained tokens, or the adapter does not
            fit.
    """
    told = _listeners("evaluate()", events, before)
    if adapter is not None:
        check_directory(adapter)
    adapters = [] if adapter is None else [adapter]
    source = _source(data, split, dataset_config)
    given = _given(max_length, on_overflow, completion_only_loss, enable_thinking)
    opened, prepared = _heldout(model, source, adapters, given, skip_bad_rows)
    slots = {BASE: 0 if adapters else None}
    return _measured(opened, prepared, adapters, slots, told, progress_bar)[BASE]


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
    told = _listeners("evaluate_several()", events, before)
    slots = slots_of(adapters, include_base)
    directories = list(adapters.values())
    source = _source(data, split, dataset_config)
    given = _given(max_length, on_overflow, completion_only_loss, enable_thinking)
    opened, prepared = _heldout(model, source, directories, given, skip_bad_rows)
    return _measured(opened, prepared, directories, slots, told, progress_bar)


def _listeners(where: str, events: Events | None, before: dict[str, Any]) -> tuple[Events, ...]:
    told = listeners(where, events, before)
    if before:
        raise TypeError(f"{where} got an unexpected keyword argument {next(iter(before))!r}")
    return told


def _measured(
    model: LoadedModel,
    prepared: Prepared,
    directories: Sequence[str | Path],
    slots: Mapping[str, int | None],
    told: Sequence[Events],
    progress_bar: bool | None,
) -> dict[str, Evaluation]:
    """The loss of the same rows for each of `slots`, by name."""
    found: dict[str, Evaluation] = {}
    with Bars(progress_bar) as bars, on_device(model, directories) as loaded:
        for name, slot in slots.items():
            events = _OfAll(len(found), len(slots), bars, *told)
            found[name] = evaluate_rows(model, prepared, loaded, slot, events=events)
    return {name: replace(one, data=prepared.summary()) for name, one in found.items()}


class _OfAll(Passing):
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
    return rows_given(data)


def _given(
    max_length: int | None, on_overflow: str | None, completion_only_loss: bool | None, enable_thinking: bool | None
) -> dict[str, Any]:
    """The given row options, checked before a model is opened."""
    given = {
        "max_length": max_length,
        "on_overflow": on_overflow,
        "completion_only_loss": completion_only_loss,
        "enable_thinking": enable_thinking,
    }
    check_rows(given)
    return given


def _heldout(
    model: LoadedModel | str | Path,
    source: Source,
    adapters: Sequence[str | Path],
    given: Mapping[str, Any],
    skip_bad_rows: bool,
) -> tuple[LoadedModel, Prepared]:
    """The opened model, and the rows to evaluate."""
    opened = model if isinstance(model, LoadedModel) else load(model)
    rows = fit_rows(given, adapters, opened.config.max_position_embeddings)
    prepared = prepare(
        source,
        opened.tokenizer,
        max_length=rows.max_length,
        completion_only_loss=rows.completion_only_loss,
        on_overflow="drop" if rows.on_overflow == "drop" else "truncate",
        chat_template_kwargs={} if rows.enable_thinking is None else {"enable_thinking": rows.enable_thinking},
        vocab_size=opened.config.vocab_size,
        skip_bad_rows=skip_bad_rows,
    )
    return opened, prepared
