"""Options shared by `generate` and `chat`, and answers that grow side by side."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from wgpu_lora.cli.console import is_terminal
from wgpu_lora.cli.parameters import THINKING, choice
from wgpu_lora.names.text import escape_unprintable

System = Annotated[str | None, typer.Option(help="System message of the chat template.")]
PromptFormat = Annotated[
    str | None,
    choice(
        "How a text is asked: with the chat template, in Alpaca's wording, or as it is; by default as the adapter was "
        "trained, else with the chat template if there is one.",
        ("chat", "alpaca", "text"),
    ),
]
EnableThinking = Annotated[
    bool | None,
    typer.Option(help=THINKING + " Use the value from training."),
]
MaxNewTokens = Annotated[int, typer.Option(help="Maximum tokens of an answer. [x>=1]")]
Temperature = Annotated[
    float, typer.Option(help="0 always takes the most likely token; higher values vary more. [x>=0]")
]
TopP = Annotated[
    float,
    typer.Option(help="Sample from the most likely tokens up to this total probability; 1 keeps all. [0<x<=1]"),
]
TopK = Annotated[int, typer.Option(help="Sample from this many of the most likely tokens; 0 keeps all. [x>=0]")]
MinP = Annotated[
    float,
    typer.Option(
        help="Sample from tokens at least this fraction as likely as the most likely one; 0 keeps all. [0<=x<=1]"
    ),
]
RepetitionPenalty = Annotated[
    float, typer.Option(help="Values above 1 make tokens that have occurred less likely. [x>0]")
]
Stop = Annotated[
    list[str] | None,
    typer.Option(help="Text that ends an answer and is not part of it; may be given several times."),
]
Seed = Annotated[int, typer.Option(help="Seed of sampling, if the temperature is not 0.")]
Url = Annotated[
    str | None,
    typer.Option(help="Ask this server of OpenAI's API, such as http://127.0.0.1:8000; --model is one of its models."),
]
OWN = ("adapter", "compare", "device", "base_dtype")  # options that a server decides
NARROW = 36  # columns; narrower answers are shown one below the other


def for_stdout(text: str) -> str:
    """Text from a model, without control characters on a terminal, and unchanged in a pipe."""
    return escape_unprintable(text, "\n\t") if is_terminal(sys.stdout) else text


class SideBySide:
    """Answers that grow side by side on a terminal, or one below the other if it is narrow."""

    def __init__(self, console: Any, names: list[str]):
        from rich.live import Live

        self._console, self.texts = console, dict.fromkeys(names, "")
        self._live = Live(self._grid(), console=console, transient=True, refresh_per_second=8)

    def __enter__(self) -> SideBySide:
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._live.stop()
        if any(self.texts.values()):
            self._console.print(self._grid())

    def add(self, name: str, piece: str) -> None:
        self.texts[name] += escape_unprintable(piece, "\n\t")
        self._live.update(self._grid())

    def _grid(self) -> Any:
        from rich.panel import Panel
        from rich.table import Table
        from rich.text import Text

        panels = [
            Panel(Text(text), title=Text(escape_unprintable(name), "bold"), title_align="left")
            for name, text in self.texts.items()
        ]
        grid = Table.grid(expand=True)
        if self._console.width // len(panels) < NARROW:
            grid.add_column(ratio=1)
            for panel in panels:
                grid.add_row(panel)
        else:
            for _ in panels:
                grid.add_column(ratio=1)
            grid.add_row(*panels)
        return grid
