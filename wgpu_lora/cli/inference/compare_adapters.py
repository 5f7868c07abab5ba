"""Output of generate and evaluate for several adapters, by name."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wgpu_lora.cli.console import console, is_terminal, line
from wgpu_lora.names.text import count_noun, escape_unprintable

if TYPE_CHECKING:
    from wgpu_lora.infer.answers import Answer
    from wgpu_lora.infer.perplexity import Evaluation


def as_rows(results: Mapping[str, Any], adapters: Mapping[str, Path]) -> list[dict[str, Any]]:
    """Rows for JSON: each adapter's result with its name and directory; the base has none."""
    directories = {name: str(directory) for name, directory in adapters.items()}
    return [{"name": name, "adapter": directories.get(name), **asdict(value)} for name, value in results.items()]


def show_answers(answers: Mapping[str, Answer]) -> None:
    """Print the answers, in panels on a terminal, else in blocks under their names."""
    if not is_terminal(sys.stdout):
        print("\n\n".join(f"== {name} ==\n{answer.text}" for name, answer in answers.items()), flush=True)
        return
    from rich.panel import Panel
    from rich.text import Text

    screen = console()
    for name, answer in answers.items():
        end = Text(f"{count_noun(len(answer.token_ids), 'token')}, {answer.stop_reason}", "dim")
        title = Text(escape_unprintable(name), "bold")
        screen.print(
            Panel(
                Text(escape_unprintable(answer.text, "\n\t")),
                title=title,
                title_align="left",
                subtitle=end,
                subtitle_align="right",
            )
        )


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
