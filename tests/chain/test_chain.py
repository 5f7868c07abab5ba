"""A chain runs what has to run, whatever it was interrupted by, and nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from wgpu_lora.errors import UserError
from wgpu_lora.files import atomic
from wgpu_lora.train.chain import chain_run as running
from wgpu_lora.train.chain import chain_run as states
from wgpu_lora.train.chain.chain_file import read_chain
from wgpu_lora.train.chain.chain_run import run, stage_statuses
from wgpu_lora.train.chain.stage import ChainWatch, EndedEarlyError, Stage, Watch
from wgpu_lora.train.chain.stages import STAGES

RAN: list[str] = []


@dataclass(frozen=True)
class Write(Stage):
    """Writes a text and what its inputs hold."""

    text: str = ""
    inputs: list[str] | None = None
    model: str = "none"

    def files(self, download: bool) -> Iterator[Path]:
        yield from map(Path, self.inputs or [])

    def run(self, output: Path, watch: Watch, resuming: bool) -> None:
        RAN.append("write")
        assert not any(output.iterdir())
        texts = [Path(name).read_text() for name in self.inputs or []]
        (output / "text").write_text(self.text + "".join(texts))


@dataclass(frozen=True)
class Long(Write):
    """Takes three steps, each of which it keeps; `stop`: a file whose existence ends it."""

    resumes: ClassVar[bool] = True
    stop: str = ""

    def run(self, output: Path, watch: Watch, resuming: bool) -> None:
        output.mkdir(exist_ok=True)
        for step in range(3):
            if (output / f"{step}").exists():
                assert resuming
                continue
            RAN.append(f"step {step}")
            (output / f"{step}").write_text("")
            if self.stop and Path(self.stop).exists() and step == 1:
                raise EndedEarlyError(130)
        (output / "text").write_text(self.text)

    def outputs(self, output: Path) -> Iterator[Path]:
        yield output / "text"


CHAIN = """
model = "m"
[[stage]]
kind = "long"
text = "a"
stop = "{tmp}/stop"
[[stage]]
kind = "write"
name = "second"
inputs = ["{{long}}/text", "{tmp}/in"]
[[stage]]
kind = "write"
name = "third"
text = "c"
inputs = ["{{second}}/text"]
"""


class Noted(ChainWatch):
    def __init__(self) -> None:
        self.why: dict[str, str] = {}

    def stage(self, number: int, name: str, kind: str, why: str, seconds: float | None) -> None:
        self.why[name] = why


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(STAGES, "write", Write)
    monkeypatch.setitem(STAGES, "long", Long)
    (tmp_path / "in").write_text("b")
    (tmp_path / "chain.toml").write_text(CHAIN.format(tmp=tmp_path))
    RAN.clear()
    return tmp_path


def ran(place: Path, start: str | None = None) -> dict[str, str]:
    """Why stages run now, by name; those listed before are the same."""
    chain = read_chain(str(place / "chain.toml"), str(place / "out"))
    listed = {status.link.name: status.why for status in stage_statuses(chain, start) if status.why}
    noted = Noted()
    run(chain, noted, start)
    assert listed.keys() >= noted.why.keys()
    return noted.why


def changed(place: Path, before: str, after: str) -> None:
    path = place / "chain.toml"
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after))


def test_what_has_not_changed_is_skipped(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text, third = place / "out" / "second" / "text", place / "out" / "third" / "text"
    assert ran(place) == dict.fromkeys(("long", "second", "third"), "it has not run yet")
    assert third.read_text() == "cab"
    for change, why in (
        (lambda: None, {}),
        (lambda: (place / "in").write_text("B"), {"second": "in changed", "third": "text changed"}),
        (lambda: changed(place, 'text = "c"', 'text = "C"'), {"third": "its options have changed"}),
        (text.unlink, {"second": "text is missing"}),  # written anew, as it was
        (lambda: third.write_text("x"), {"third": "text has changed"}),
        (lambda: overwrite(third, "Cax"), {"third": "text has changed"}),
        (third.touch, {}),
    ):
        change()
        assert ran(place) == why
    assert third.read_text() == "CaB"
    assert list(ran(place, "second")) == ["second", "third"]
    monkeypatch.setattr(states, "code_digest", lambda: "other")
    assert set(ran(place).values()) == {"wgpu-lora has changed"}
    assert (place / "out" / "long-1" / "text").read_text() == "a"  # what took long is kept
    text.write_text("x")
    with pytest.raises(UserError, match="'second' comes before 'third', but text has changed: run it first"):
        ran(place, "third")


def overwrite(path: Path, text: str) -> None:
    """Keeps the times of the file."""
    times = path.stat()
    path.write_text(text)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def test_an_interrupted_stage_goes_on(place: Path) -> None:
    (place / "stop").write_text("")
    with pytest.raises(EndedEarlyError):
        ran(place)
    assert RAN == ["step 0", "step 1"]
    (place / "stop").unlink()
    assert ran(place)["long"] == "it was interrupted"
    assert RAN == ["step 0", "step 1", "step 2", "write", "write"]
    (place / "stop").write_text("")
    changed(place, 'text = "a"', 'text = "A"')
    with pytest.raises(EndedEarlyError):
        ran(place)
    changed(place, 'text = "A"', 'text = "aa"')  # other options: what was begun is not continued
    (place / "stop").unlink()
    RAN.clear()
    ran(place)
    assert RAN[:3] == ["step 0", "step 1", "step 2"]
    assert sorted(path.name for path in (place / "out").glob("long*")) == ["long", "long-1", "long-2"]


class KilledError(BaseException):
    """Stands for SIGKILL: nothing that follows is run."""


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("module", "name"), [(states, "write_bytes_atomic"), (atomic, "replace_directory")])
def test_killed_anywhere(place: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str, after: bool) -> None:
    """Before and after every write of its state and its digests, and every replacement of a directory."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    real, points = getattr(module, name), 0
    while True:
        out, countdown = place / f"{points}", points
        chain = read_chain(str(place / "chain.toml"), str(out))

        def dying(*args: Any) -> None:
            nonlocal countdown
            if countdown < 0 or (countdown == 0 and not after):
                countdown = -1
                raise KilledError
            real(*args)
            countdown -= 1
            if countdown < 0:
                raise KilledError

        with monkeypatch.context() as patched:
            patched.setattr(module, name, dying)
            patched.setattr(running, "remove_leftovers", lambda *args: None)
            try:
                run(chain, ChainWatch())
            except KilledError:
                points += 1
            else:
                break
        run(chain, ChainWatch())
        assert (out / "third" / "text").read_text() == "cab"
        assert not [status for status in stage_statuses(chain) if status.why]
        names = ["chain.json", "digests.json", "long", "second", "third"]
        assert sorted(path.name for path in out.iterdir()) == names
    assert points == (12 if module is states else 2)


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        ('kind = "long"', 'kind = "lang"', "stage 1: 'kind' is 'lang', but must be one of"),
        ('name = "third"', 'name = "second"', "stage 3 has the name 'second', like an earlier one"),
        ('name = "third"', 'name = "Second"', "stage 3 has the name 'Second', like an earlier one"),
        ('name = "third"', 'name = "../x"', "'name' is '../x', but must be letters"),
        (
            "{second}",
            "{fourth}",
            r"stage 3 \('third'\) names \{fourth\}, which is no earlier stage: choose of long and",
        ),
        ('text = "c"', "text = 3", r"stage 3 \('third'\): 'text' must be text, not 3"),
        ('text = "c"', 'textt = "c"', r"stage 3 \('third'\): 'textt' is not known: did you mean 'text'"),
        ('model = "m"', "modal = 3", "'modal' is not known: did you mean 'model'"),
        ("[[stage]]", "[[stages]]", r"has no \[\[stage\]\] table"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(place: Path, before: str, after: str, words: str) -> None:
    changed(place, before, after)
    with pytest.raises(UserError, match=words):
        ran(place)
    assert not (place / "out").exists()
    assert not RAN


def test_directories_of_others_are_not_touched(place: Path) -> None:
    (place / "out" / "second").mkdir(parents=True)
    (place / "out" / "second" / "mine").write_text("")
    with pytest.raises(UserError, match="second exists, but not from this chain"):
        ran(place)
    assert (place / "out" / "second" / "mine").exists()
    (place / "out" / "chain.json").write_text("{")
    with pytest.raises(UserError, match=r"chain.json cannot be read as JSON"):
        ran(place)
    with pytest.raises(UserError, match="The chain has no stage 'x': choose of long, second and third"):
        run(read_chain(str(place / "chain.toml"), str(place / "new")), ChainWatch(), "x")
