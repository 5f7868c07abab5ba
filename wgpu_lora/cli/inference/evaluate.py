"""wgpu-lora evaluate: the loss on data."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wgpu_lora.cli.console import Bar, TensorBar, console, line, print_json
from wgpu_lora.cli.inference.generate import as_rows
from wgpu_lora.cli.inference.sampling_options import MaxNewTokens, Seed, TopP
from wgpu_lora.cli.parameters import (
    THINKING,
    Adapter,
    AllowUnconfined,
    BaseDtype,
    Device,
    Goal,
    InRunLog,
    Json,
    Model,
    Notes,
    choice,
    refuse_unused,
)
from wgpu_lora.cli.run_summary import SHOWN, show_comparisons
from wgpu_lora.errors import NotFiniteError
from wgpu_lora.events import Evaluating
from wgpu_lora.names.choices import OVERFLOW
from wgpu_lora.names.text import count_noun, escape_unprintable
from wgpu_lora.train.objectives import OBJECTIVES
from wgpu_lora.weights.base_formats import AUTO

if TYPE_CHECKING:
    from wgpu_lora.infer.perplexity import Evaluation

OF_LOSSES = ("objective", "max_length", "on_overflow", "completion_only_loss", "skip_bad_rows", "teacher",
             "teacher_adapter", "teacher_cache", "exact_match", "match_pattern", "match_field")  # fmt: skip
OF_CHECKS = ("samples", "temperature", "top_p", "max_new_tokens", "seed", "batch_size", "timeout", "completion",
             "output", "allow_unconfined")  # fmt: skip


class _EvaluationProgress(TensorBar):
    """A bar of loaded tensors, then one of evaluated rows."""

    def __init__(self, loading_bar: Bar, row_bar: Bar):
        super().__init__(loading_bar)
        self._row_bar = row_bar

    def evaluating(self, evaluating: Evaluating) -> None:
        self._bar.close()
        self._row_bar.advance(to=evaluating.rows, total=evaluating.total)

    def answering(self, done: int, total: int, tokens: int) -> None:
        self._row_bar.advance(to=done, total=total, detail=f"{tokens:,} tokens of answers")


def evaluate(
    ctx: typer.Context,
    data: Annotated[str, typer.Option(help="File of rows, folder with valid.jsonl or test.jsonl, or hub id.")],
    split: Annotated[str | None, typer.Option(help="Split of --data; its validation split by default.")] = None,
    dataset_config: Annotated[str | None, typer.Option(help="Configuration of a dataset that has several.")] = None,
    skip_bad_rows: Annotated[bool, typer.Option("--skip-bad-rows", help="Skip rows that cannot be read.")] = False,
    model: Model = None,
    adapter: Adapter = None,
    compare: Annotated[bool, typer.Option("--compare", help="Also evaluate the base model alone.")] = False,
    max_length: Annotated[
        int | None,
        typer.Option(help="Maximum tokens per row. Default: as in training, else 1024 or the model's limit. [x>=2]"),
    ] = None,
    on_overflow: Annotated[
        str | None, choice("What to do with longer rows. Default: as in training, else truncate.", OVERFLOW)
    ] = None,
    completion_only_loss: Annotated[
        bool | None, typer.Option(help="Compute the loss on answers only. Default: as in training, else on.")
    ] = None,
    enable_thinking: Annotated[bool | None, typer.Option(help=THINKING)] = None,
    objective: Annotated[
        str | None,
        choice(
            "Whose loss to measure. Default: that of the adapter's training if it reads such rows, else sft.",
            OBJECTIVES,
        ),
    ] = None,
    teacher: Annotated[
        str | None, typer.Option(help="Model to compare with by --objective kd, as in its training.", metavar="MODEL")
    ] = None,
    teacher_adapter: Annotated[str | None, typer.Option(help="Its adapter.", metavar="DIR")] = None,
    teacher_cache: Annotated[
        str | None, typer.Option(help="Cache of what a teacher says about --data, instead of a model.", metavar="DIR")
    ] = None,
    exact_match: Annotated[
        bool, typer.Option("--exact-match", help="Also answer greedily, and count answers that equal the rows' own.")
    ] = False,
    match_pattern: Annotated[
        str | None,
        typer.Option(help="Compare what this expression (or its first group) matches first.", metavar="REGEX"),
    ] = None,
    match_field: Annotated[
        str | None, typer.Option(help="Compare this field of answers in JSON; a.b is within another.", metavar="NAME")
    ] = None,
    pass_at_k: Annotated[
        str | None,
        typer.Option(help="Run the unit checks of rows instead, and estimate pass@k for these k.", metavar="K,K..."),
    ] = None,
    samples: Annotated[int, typer.Option(help="Answers per row and adapter. [1<=x<=10000]")] = 1,
    temperature: Annotated[
        float | None, typer.Option(help="As in generate. Default: 0 for one sample, else 0.8. [x>=0]")
    ] = None,
    top_p: TopP = 1.0,
    max_new_tokens: MaxNewTokens = 512,
    seed: Seed = 0,
    batch_size: Annotated[
        int | None, typer.Option(help="Answers generated at a time; by default as many as fit, up to 16. [x>=1]")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that a check may take. [0<x<=3600]")] = 5.0,
    completion: Annotated[
        bool,
        typer.Option("--completion", help="Continue HumanEval's prompts as text, without the chat template."),
    ] = False,
    output: Annotated[Path | None, typer.Option(help="File for all answers and their outcomes, as JSONL.")] = None,
    allow_unconfined: AllowUnconfined = False,
    device: Device = None,
    base_dtype: BaseDtype = AUTO,
    goal: Goal = None,
    notes: Notes = None,
    run_log: InRunLog = True,
    as_json: Json = False,
) -> int:
    """Measure loss and perplexity on data, or pass@k of answers with unit checks.

    Several adapters are loaded together and evaluated one after the other. By default, rows are encoded as in the
    adapter's training, according to its run.json. With --pass-at-k, rows have HumanEval's fields (prompt, test,
    entry_point), or a prompt and a check with asserts; answers run in confined processes.
    """
    options: dict[str, Any]
    if pass_at_k is None:
        refuse_unused(ctx, OF_CHECKS, "without --pass-at-k")
    else:
        refuse_unused(ctx, OF_LOSSES, "with --pass-at-k")
        from wgpu_lora.cli.inference.pass_at_k import evaluate_checks

        sampling = {"temperature": temperature, "top_p": top_p, "max_new_tokens": max_new_tokens, "seed": seed}
        return evaluate_checks(
            data,
            split,
            dataset_config,
            pass_at_k,
            samples,
            {**sampling, "enable_thinking": enable_thinking},
            adapter or [],
            compare,
            model,
            output,
            {"batch": batch_size, "timeout": timeout, "completion": completion, "allow_unconfined": allow_unconfined},
            (device, base_dtype),
            as_json,
            {"goal": goal, "notes": notes, "log": run_log},
        )
    from wgpu_lora.api import evaluate as measure
    from wgpu_lora.api import evaluate_several, load
    from wgpu_lora.infer.answers import notes_for
    from wgpu_lora.infer.named_adapters import BASE, model_of, named_adapters, slots_of
    from wgpu_lora.train.run.trained_options import check_rows, evaluation_rows

    adapters = named_adapters(adapter or [])
    comparison = compare or len(adapters) > 1
    if comparison:
        slots_of(adapters, compare)  # before anything is opened
    options = {"objective": objective, "teacher": teacher}
    options |= {"teacher_adapter": teacher_adapter, "teacher_cache": teacher_cache}
    options |= {"split": split, "dataset_config": dataset_config, "skip_bad_rows": skip_bad_rows}
    options |= {"exact_match": exact_match, "match_pattern": match_pattern, "match_field": match_field}
    options |= {"goal": goal, "notes": notes, "run_log": run_log}
    row_options: dict[str, Any] = {
        "max_length": max_length,
        "on_overflow": on_overflow,
        "completion_only_loss": completion_only_loss,
        "enable_thinking": enable_thinking,
    }
    try:
        check_rows(row_options)  # before anything is opened
        opened = load(model_of(adapters, model), device=device, base_dtype=base_dtype)
        rows = evaluation_rows(row_options, list(adapters.values()), opened.config.max_position_embeddings)
        options |= {name: getattr(rows, name) for name in row_options}
        for note in () if as_json else (*notes_for(opened, adapters.values()), *([rows.note] if rows.note else [])):
            line("note", note)
        with Bar("loading", opened.tensors_to_load()) as loading, Bar("evaluating", None, " rows") as evaluating:
            options["events"] = _EvaluationProgress(loading, evaluating)
            if comparison:
                losses = evaluate_several(opened, data, adapters, include_base=compare, **options)
            else:
                name, directory = next(iter(adapters.items()), (BASE, None))
                losses = {name: measure(opened, data, adapter=directory, **options)}
    except NotFiniteError as error:  # a result, not a user error
        if as_json:
            print_json({"loss": None, "error": str(error)})
        return _fail(str(error))
    if comparison:
        if as_json:
            print_json(as_rows(losses, adapters))
        else:
            show_losses(losses)
    else:
        (result,) = losses.values()
        if as_json:
            info = opened.device.info
            device_facts = {"name": info.name, "driver": info.driver, "backend": info.backend}
            print_json(asdict(result) | {"device": device_facts})
        else:
            after = "" if result.perplexity is None else f", perplexity {result.perplexity:.4f}"
            line("loss", f"{result.loss:.6f}{after}")
            for name, value in result.metrics.items():
                line("metric", f"{name} {value:.6f}")
            tokens, over = count_noun(result.tokens, "trained token"), count_noun(result.rows, "row")
            line("over", f"{tokens} in {over}, in {result.seconds:.1f} s")
            show_comparisons(result.comparisons[:SHOWN])
    if not as_json:
        line("data", next(iter(losses.values())).data)
    bad = [name for name, result in losses.items() if not math.isfinite(result.loss)]
    return _fail(f"The loss of {', '.join(bad)} is not finite: its weights are damaged, or too large.") if bad else 0


def _fail(message: str) -> int:
    print(f"wgpu-lora: {escape_unprintable(message)}", file=sys.stderr)
    return 1


METRICS = {
    "mean_token_accuracy": "accuracy",
    "exact_match": "matches",
    "rewards/accuracies": "rewards/accuracies",
    "rewards/margins": "rewards/margins",
}  # that a table shows, and its columns


def show_losses(losses: Mapping[str, Evaluation]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column("name", overflow="fold")
    some = [name for name in METRICS if any(name in result.metrics for result in losses.values())]
    perplexity = any(result.perplexity is not None for result in losses.values())
    for title in ("loss", *(["perplexity"] if perplexity else []), *(METRICS[name] for name in some), "tokens"):
        table.add_column(title, justify="right", no_wrap=True)
    for name, result in losses.items():
        figures = [*([result.perplexity] if perplexity else []), *(result.metrics.get(metric) for metric in some)]
        values = ["" if value is None else f"{value:.4f}" for value in figures]
        table.add_row(Text(escape_unprintable(name)), f"{result.loss:.6f}", *values, f"{result.tokens:,}")
    console().print(table)
    rows, seconds = next(iter(losses.values())).rows, sum(result.seconds for result in losses.values())
    line("over", f"{rows:,} rows in {seconds:.1f} s")
