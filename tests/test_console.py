"""How far something is: bars on a terminal, lines elsewhere."""

from __future__ import annotations

import errno
import io
import sys

import pytest
from rich.console import Console

from wgpu_lora.cli import console
from wgpu_lora.cli.console import Bar, duration


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 100.0
        monkeypatch.setattr(console.time, "monotonic", lambda: self.now)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_without_a_terminal_there_are_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is over in two seconds says nothing; then it is a line, and another every ten seconds."""
    clock = Clock(monkeypatch)
    with Bar("loading", 80) as bar:
        for count in range(1, 81):
            clock.now += 0.3
            if count == 41:
                clock.now += 3600
            bar.advance()
    said = capsys.readouterr()
    assert not said.out
    assert said.err.splitlines() == [
        "loading: 7 of 80 after 2 s, about 22 s left",
        "loading: 41 of 80 after 1:00:12 h, about 57:16 min left",
        "loading: 75 of 80 after 1:00:23 h, about 4:02 min left",
    ]


def test_lines_of_what_has_no_total_or_another_unit(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    bar, seconds = Bar("reading", None), Bar("tuning", 15, " s")
    clock.now += 5
    bar.advance()
    seconds.advance("tuning: matmul\x1b, size 2 of 3", 5)
    assert capsys.readouterr().err.splitlines() == [
        "reading: 1 after 5 s",
        "tuning: matmul\\x1b, size 2 of 3: 5 of 15 s after 5 s, about 10 s left",
    ]


def test_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)

    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    for stream in (None, Full()):
        monkeypatch.setattr(sys, "stderr", stream)
        with Bar("loading", 3) as bar:
            clock.now += 60
            bar.advance()


def test_on_a_terminal_there_is_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it counts, its total and the time that is left; and a second line where there is more to say."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    with Bar("held-out requests, before", 60) as bar:
        bar.advance(to=0)
        bar._progress.get_time = lambda: 50.0
        bar.advance(to=10, detail=10 * "more than fits on a line; ")
        bar._progress.get_time = lambda: 60.0
        bar.advance(to=20, detail="[dim] 12 tokens")
        shown = io.StringIO()
        Console(file=shown, width=80).print(bar._progress.get_renderable())
    first, second = shown.getvalue().splitlines()
    assert "held-out requests, before" in first
    assert "20/60" in first
    assert "40 s left" in first
    assert second.rstrip() == "[dim] 12 tokens"
    assert "\x1b[?25h" in stream.getvalue()  # the cursor is back


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1:00 min"), (3661, "1:01:01 h")])
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text
