"""Output of the commands: plain lines for pipes, tables and bars for terminals."""

from __future__ import annotations

import shlex
import shutil
import sys
import textwrap
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import repeat
from pathlib import Path
from typing import Any, ClassVar

from wgpu_lora.events import Events
from wgpu_lora.files.installation import program
from wgpu_lora.files.json_files import to_json
from wgpu_lora.names.text import duration, escape_unprintable

PLAIN_WIDTH = 120  # of tables without a terminal
TICK = 0.5  # seconds
FEWEST = 2  # items before a time is estimated, since the first may take longer
SOON, OFTEN = 2.0, 10.0  # seconds until a Bar's first line without a terminal, and between lines


def is_terminal(stream: Any) -> bool:
    """Whether a stream is a terminal; it is None if it was closed before the start."""
    return stream is not None and stream.isatty()


def console(stderr: bool = False) -> Any:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(stderr=stderr, highlight=False, width=None if is_terminal(stream) else PLAIN_WIDTH)


def line(label: str, text: str, whole: bool = False) -> None:
    """Print a label and a text; `whole`: not even wrapped on a terminal, for commands to be copied."""
    label = f"{label:<9} "
    text = escape_unprintable(text)
    print(label + text if whole else folded(label + text, len(label)), flush=True)


OF_ADAPTERS = (
    "{program} chat --adapter {place}",
    "{program} serve --lora-modules {place}",
    "{program} export gguf --adapter {place} --output adapted.gguf && llama-cli -m adapted.gguf",
)
OF_MODELS = ("{program} chat --model {place}", "{program} serve --model {place}")


def next_commands(place: Path | str, commands: Sequence[str]) -> None:
    """What to do next with an adapter or a model, a command a line."""
    label = "next"
    for command in commands:
        line(label, command.format(program=program(), place=shlex.quote(str(place))), whole=True)
        label = ""


def folded(text: str, indent: int = 0) -> str:
    """Text wrapped between words on a terminal; else unchanged."""
    if not is_terminal(sys.stdout):
        return text
    wrap = textwrap.TextWrapper(
        max(shutil.get_terminal_size().columns, 2 * indent),
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(wrap.fill(paragraph) for paragraph in text.split("\n"))


def table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    text_columns: Collection[str] = (),
    styles: Iterable[str | None] = repeat(None),
) -> Any:
    """A table without borders. `text_columns` are left-aligned and fold, the others are numbers.

    rows: of text with rich's markup, or of what rich renders. styles: one per row.
    """
    from rich.table import Table

    result = Table(box=None, pad_edge=False)
    for name in columns:
        is_text = name in text_columns
        result.add_column(name, justify="left" if is_text else "right", overflow="fold", no_wrap=not is_text)
    for row, style in zip(rows, styles, strict=False):
        result.add_row(*row, style=style)
    return result


def print_json(value: Any) -> None:
    """Print JSON in ASCII, which every terminal and pipe can take."""
    print(to_json(value, indent=1), flush=True)


class Bar:
    """Progress on stderr: a bar on a terminal, else a line after two seconds and then every ten.

    Args:
        text: the current work. total: None if unknown. unit: of the count, such as " s".
    """

    instances: ClassVar[set[Bar]] = set()

    def __init__(self, text: str, total: float | None, unit: str = ""):
        self._text, self._total, self._unit = text, total, unit
        self._position = 0.0
        self._start = time.monotonic()
        self._last_print = self._start + SOON - OFTEN
        self._progress: Any = None

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def advance(
        self, text: str | None = None, to: float | None = None, total: float | None = None, detail: str = ""
    ) -> None:
        """Advance by one, or to a position; the bar appears with the first call.

        Args:
            text, total: replace the current ones. detail: further lines on a terminal.
        """
        self._text = text or self._text
        self._total = total or self._total
        self._position = self._position + 1 if to is None else to
        Bar.instances.add(self)
        if not is_terminal(sys.stderr):
            self.say()
            return
        begins = self._progress is None
        if begins:
            self._progress = _progress(self._unit)
            self._progress.add_task("", total=self._total)
        (task,) = self._progress.task_ids
        self._progress.update(task, description=self._text, completed=self._position, total=self._total, detail=detail)
        if begins:
            self._progress.start()

    @property
    def full(self) -> bool:
        return self._total is not None and self._position >= self._total

    def say(self) -> None:
        """Print a line if there is no bar and the last line was long ago."""
        now = time.monotonic()
        if now - self._last_print < OFTEN or sys.stderr is None or is_terminal(sys.stderr):
            return
        self._last_print, seconds = now, now - self._start
        count = f"{self._position:,.0f}" + (f" of {self._total:,.0f}" if self._total else "") + self._unit
        count = f": {count}" if self._total or self._unit else ""
        remaining = seconds * ((self._total or 0) - self._position) / max(self._position, 1e-9)
        eta = f", about {duration(remaining)} left" if self._position >= FEWEST and remaining > 0 else ""
        with suppress(OSError):  # the reader is gone
            print(
                f"{escape_unprintable(self._text)}{count} after {duration(seconds)}{eta}", file=sys.stderr, flush=True
            )

    def close(self) -> None:
        Bar.instances.discard(self)
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


@contextmanager
def long_work_shown() -> Iterator[None]:
    """Say what goes on where it takes longer than two seconds: bars that do not advance, and files that are read."""
    from wgpu_lora.data.compressed_files import files_in_use, position

    end = threading.Event()

    def watch() -> None:
        since: dict[Path, float] = {}
        bar: Bar | None = None
        while not end.wait(TICK):
            for instance in Bar.instances - {bar}:
                if not instance.full:
                    instance.say()
            now, paths = time.monotonic(), files_in_use()
            since = {path: since.get(path, now) for path in paths}
            path = next((path for path in paths if now - since[path] >= SOON), None)
            if path is None or Bar.instances - {bar}:
                if bar:
                    bar.close()
                bar = None
                continue
            with suppress(OSError):
                bar = bar or Bar("", 100, "%")
                bar.advance(f"reading {path.name}", 100 * (position(path) or 0) / max(1, path.stat().st_size))
        if bar:
            bar.close()

    thread = threading.Thread(target=watch, name="progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
        Bar.instances.clear()  # whatever was not closed belongs to this command


class TensorBar(Events):
    """A progress bar of loaded and written tensors."""

    def __init__(self, bar: Bar):
        self._bar = bar

    def loading(self, model: str, tensor: str, done: int, total: int) -> None:
        self._bar.advance()
        if self._bar.full:
            self._bar.advance("compiling the kernels", total)

    def written(self, tensor: str, done: int, total: int) -> None:
        self._bar.advance()


def _progress(unit: str) -> Any:
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.text import Text

    class Count(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(f"{task.completed:,.0f}" + ("" if task.total is None else f"/{task.total:,.0f}") + unit)

    class TimeRemaining(ProgressColumn):
        max_refresh = 0.5

        def render(self, task: Task) -> Text:
            remaining = task.time_remaining
            unknown = remaining is None or task.finished or task.completed < FEWEST
            return Text("" if unknown else f"{duration(remaining or 0)} left")

    class WithDetail(Progress):
        def get_renderables(self) -> Iterable[Any]:
            yield from super().get_renderables()
            for task in self.tasks:
                for text in filter(None, task.fields.get("detail", "").split("\n")):
                    yield Text(text, no_wrap=True, overflow="ellipsis")

    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=None), Count(), TimeRemaining())
    return WithDetail(*columns, console=console(stderr=True), transient=True, expand=True)
