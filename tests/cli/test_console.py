"""What is shown: bars on a terminal, lines elsewhere, and characters that an encoding lacks."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from rich.console import Console
from support import MODELS
from support.cli import SMALL, flags, write_rows
from support.models import words_model
from support.sampling import sample
from tokenizers import models, pre_tokenizers

from wgpu_lora.cli import console
from wgpu_lora.cli.console import Bar
from wgpu_lora.cli.finetune import TrainingProgress
from wgpu_lora.cli.training_progress import BARS, PLAIN, StartupProgress, Trend, describe_tuning, hardware
from wgpu_lora.events import StepResult, Tuning
from wgpu_lora.names.text import duration


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now = 100.0
        monkeypatch.setattr(console.time, "monotonic", lambda: self.now)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def screen(bar: Bar) -> list[str]:
    """The lines that 80 columns of a terminal have."""
    stream = io.StringIO()
    Console(file=stream, width=80).print(bar._progress.get_renderable())
    return stream.getvalue().splitlines()


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
    output = capsys.readouterr()
    assert not output.out
    assert output.err.splitlines() == [
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
        "reading after 5 s",
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
        first, second = screen(bar)
    assert "held-out requests, before" in first
    assert "20/60" in first
    assert "40 s left" in first
    assert second.rstrip() == "[dim] 12 tokens"
    assert "\x1b[?25h" in stream.getvalue()  # the cursor is back


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1:00 min"), (3661, "1:01:01 h")])
def test_durations_are_for_people(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def job(tensors: int = 1, tuning: Tuning | None = None, logs: bool = False) -> Any:
    model = SimpleNamespace(tensors_to_load=lambda: tensors)
    session = SimpleNamespace(model=model, programs=list, device=SimpleNamespace(allocated=3 << 20))
    tuner = SimpleNamespace(estimate=lambda programs: tuning)
    run = SimpleNamespace(name=None, logs=lambda step, heldout: logs, state=SimpleNamespace(step=0))
    run.args, run.stream = SimpleNamespace(target_seconds=None), SimpleNamespace(total_steps=lambda: 50)
    return SimpleNamespace(session=session, runs=[run], tuner=lambda: tuner)


def test_steps_that_are_not_logged_are_shown_all_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a terminal: the first, and then one every ten seconds at the latest."""
    clock = Clock(monkeypatch)
    with TrainingProgress(job()) as watcher:
        for step in range(1, 51):
            clock.now += 3
            watcher.step(StepResult(step, 50, 0.1, 1.0, 1e-3, 1.0, tokens=9, seconds=3.0, eval_loss=None))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[1] for line in lines] == [f"{step}/50" for step in range(1, 51, 4)]
    assert lines[1].endswith("  2:15 min left")


def test_a_terminal_shows_training_before_its_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which compiles: for whoever waits, the most important step of all."""
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with TrainingProgress(job(tensors=2)) as watcher:
        watcher.loading("model", "a", 1, 2)
        assert "compiling" not in stream.getvalue()
        watcher.loading("model", "b", 2, 2)
        first, second = screen(watcher._training)
        assert "0/50" in first
        assert second.rstrip() == "compiling the kernels of the first step"
        for step, loss in ((1, 2.5), (2, None)):
            watcher.step(StepResult(step, 50, 0.1, 1.0, 1e-3, 1.0, tokens=9, seconds=3.0, eval_loss=loss))
            watcher.logged({"gpu_busy": 97.0}, None)
        first, second, third = screen(watcher._training)
        assert "2/50" in first
        assert third.split() == ["▁▁", "3.0", "MiB", "on", "the", "device", "97%", "busy"]
        assert second.rstrip().endswith("held-out 2.5000")  # the newest stays in sight
    assert "\x1b[?25h" in stream.getvalue()


def test_tuning_says_what_it_will_take_and_what_it_took(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock(monkeypatch)
    tuning = Tuning(3, 12, 15.0)
    describe_tuning(job(tuning=tuning))
    tuning.each = 0.5
    describe_tuning(job(tuning=tuning))
    describe_tuning(job(tuning=Tuning(0, 0, 15.0)))
    starting = StartupProgress(job())
    for step in range(4):
        clock.now += 3
        tuning.kernel, tuning.tilings_done, tuning.seconds = "matmul_nt", 4 * step, clock.now - 103
        tuning.sizes_done, tuning.over = min(step, 2), step == 3
        starting.tuning(tuning)
    output = capsys.readouterr()
    assert output.out.splitlines() == [
        "tuning    3 kernel sizes will be timed on this device, once: at most 15 s, before the first step",
        "tuning    3 kernel sizes will be timed on this device, once: about 6 s, before the first step",
        "tuned     2 kernel sizes in 9 s; 1 keep their defaults, as a tiling takes up to 0 s here: 'wgpu-lora tune "
        "--seconds N' takes longer",
    ]
    assert output.err.splitlines() == ["tuning: matmul_nt, tiling 5 of 12: 3 of 7 s after 3 s, about 4 s left"]


def test_json_has_nothing_that_a_terminal_obeys(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"run\x9b2J": ["\x1b[2J", "\x7f", "\u202e", "\U000e0001", "Stra\u00dfe"]}
    console.print_json(value)
    output = capsys.readouterr().out
    assert json.loads(output) == value
    assert all(c.isascii() and (c.isprintable() or c == "\n") for c in output)


# -- the line of bars that shows how a loss develops -------------------------------------------------------------------

UTF8, ASCII = (io.TextIOWrapper(io.BytesIO(), encoding=name) for name in ("utf-8", "ascii"))


def trend(*values: float, stream: io.TextIOWrapper = UTF8) -> Trend:
    result = Trend(stream)
    for value in values:
        result.add(value)
    return result


def test_bars() -> None:
    assert trend(*range(8, 0, -1)).bars() == BARS[::-1]
    assert trend(*range(8), stream=ASCII).bars() == PLAIN
    assert trend(*range(8)).bars(3) == BARS[0] + BARS[4] + BARS[7]
    assert trend(1.0).bars() == trend().bars() == ""
    assert trend(2.0, 2.0).bars() == BARS[0] * 2
    assert trend(1.0, math.nan, math.inf, 2.0).bars() == BARS[0] + BARS[-1]


def test_hardware() -> None:
    assert hardware({"loss": 1.0}) == ""
    assert hardware({"gpu_busy": 97.4, "gpu_temperature": 61.0}) == "97% busy, 61 °C"


# -- output in encodings that lack some of its characters --------------------------------------------------------------

WORDS = "ł→é中😀"  # one of them is in cp1252
ENCODINGS = {
    "cp1252": {"PYTHONIOENCODING": "cp1252"},
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "C": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
    "UTF-8": {"PYTHONIOENCODING": "utf-8"},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows few words in ASCII, rows, and a recipe and names that are not ASCII either."""
    place = tmp_path_factory.mktemp("encodings")
    model = words_model(place / "model")
    words = tokenizers.Tokenizer(models.WordLevel({f"{WORDS}{i}": i for i in range(211)}, unk_token=f"{WORDS}0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words.save(str(model / "tokenizer.json"))
    (place / "prompts.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    write_rows(place / "rows.jsonl")
    (place / "goal.toml").write_text(f'goal = "{WORDS}"\n', encoding="utf-8")
    (place / "recipe.toml").write_text(f'output = "{WORDS}"\nlearning_rat = 1\n', encoding="utf-8")
    return place


def run_in(place: Path, encoding: str, arguments: list[str], stdin: str = "") -> tuple[int, bytes, str]:
    runs = {"XDG_STATE_HOME": str(place), "XDG_DATA_HOME": str(place), "WGPU_LORA_NO_TUNE": "1"}
    process = subprocess.run(
        [sys.executable, "-m", "wgpu_lora", *arguments],
        input=stdin.encode(), capture_output=True, cwd=place, env=os.environ | runs | ENCODINGS[encoding], timeout=300,
    )  # fmt: skip
    return process.returncode, process.stdout, process.stderr.decode("latin-1")


ASK = ["--model", "model", "--base-dtype", "f32", "--max-new-tokens", "4"]
TRAIN = flags(recipe="goal.toml", model=MODELS / "qwen2", data="rows.jsonl", output="run", **SMALL)
COMMANDS: dict[str, tuple[list[str], str, int]] = {
    "an answer": (["generate", *ASK, "--prompt", "a"], "", 0),
    "two answers": (["generate", *ASK, "--prompt", "a", "--prompt", "b"], "", 0),
    "compared": (["generate", *ASK, "--prompt", "a", "--compare"], "", 2),
    "JSON": (["generate", *ASK, "--prompt", "a", "--json"], "", 0),
    "JSON lines": (["generate", *ASK, "--prompts", "prompts.jsonl"], "", 0),
    "a chat": (["chat", *ASK], "a\n", 0),
    "a run": (["finetune", *TRAIN], "", 0),
    "a wrong recipe": (["finetune", "--recipe", "recipe.toml"], "", 2),
    "a wrong path": (["generate", "--model", f"{WORDS}\udcff", "--prompt", "a"], "", 2),
    "a wrong option": (["generate", f"--{WORDS}"], "", 2),
    "help": (["finetune", "--help-all"], "", 0),
}


CASES = [(encoding, name) for encoding in ENCODINGS for name in COMMANDS]


@pytest.mark.slow
@pytest.mark.parametrize(("encoding", "name"), sample(CASES, 1 / 6))
def test_commands_end_well_in_every_encoding(place: Path, tmp_path: Path, encoding: str, name: str) -> None:
    for file in ("model", "rows.jsonl", "prompts.jsonl", "goal.toml", "recipe.toml"):
        (tmp_path / file).symlink_to(place / file)
    arguments, stdin, code = COMMANDS[name]
    exit_code, out, err = run_in(tmp_path, encoding, arguments, stdin)
    assert exit_code == code, err
    assert "Traceback" not in err
    if name == "a run":
        assert run_in(tmp_path, encoding, ["runs", "last"])[0] == 0
    elif name.startswith("JSON"):
        assert out.isascii()
        assert WORDS in str([json.loads(line) for line in out.splitlines()] if "lines" in name else json.loads(out))
    elif "answer" in name or name == "a chat":
        codec = {"C": "ascii"}.get(encoding, encoding)
        assert WORDS.encode(codec, "backslashreplace") in out


def test_a_handler_that_somebody_chose_is_kept(tmp_path: Path) -> None:
    code = (
        "from wgpu_lora.processes.signals import discard_when_closed; import sys; "
        "print('ł', file=discard_when_closed(sys.stdout), flush=True)"
    )
    for encoding, shown in (("ascii:replace", b"?\n"), ("ascii:strict", b"\\u0142\n"), ("utf-8", "ł\n".encode())):
        process = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, env=os.environ | {"PYTHONIOENCODING": encoding}
        )
        assert process.stdout == shown, process.stderr
