"""What the commands print with: whole lines for pipes, tables and bars for terminals."""

from __future__ import annotations

import sys
from typing import Any

from wgpu_lora.bounded import printable
from wgpu_lora.strict_json import to_json

PLAIN_WIDTH = 120  # of tables where there is no terminal to ask


def is_terminal(stream: Any) -> bool:
    """Whether a person sees it; a stream that was closed before the start is None."""
    return stream is not None and stream.isatty()


def console(stderr: bool = False) -> Any:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if is_terminal(stream) else PLAIN_WIDTH)


def line(label: str, text: str) -> None:
    """One fact, never wrapped."""
    print(f"{label:<9} {printable(text)}", flush=True)


def print_json(value: Any) -> None:
    print(to_json(value, indent=1, ensure_ascii=False), flush=True)


def bar(text: str, total: float | None) -> Any:
    """(a started rich Progress, its task) on stderr, or (None, None) where stderr is no terminal."""
    if not is_terminal(sys.stderr):
        return None, None
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=console(stderr=True), transient=True)
    progress.start()
    return progress, progress.add_task(text, total=total)


class Bar:
    """A progress bar that shows nothing where there is no terminal."""

    def __init__(self, text: str, total: float | None):
        self._text, self._total = text, total
        self._progress: Any = None
        self._task: Any = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def advance(self, text: str | None = None, to: float | None = None, total: float | None = None) -> None:
        """One further, or to a position; shown from the first call on."""
        if self._progress is None:
            self._progress, self._task = bar(self._text, self._total)
        if self._progress is None:
            return
        self._progress.update(
            self._task,
            description=text or self._text,
            completed=to,
            advance=1 if to is None else None,
            total=total,
        )

    def close(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
