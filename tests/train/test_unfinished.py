"""Runs that were killed, or whose disk is full: resumed from their newest state, begun over only on request."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.events import hearing
from support.sampling import sample
from support.training.shared_runs import files_of, killed_run, result, run_options

from wgpu_lora import api
from wgpu_lora.api.multi_adapter import MultiAdapterPipeline
from wgpu_lora.errors import StorageError, UserError
from wgpu_lora.events import StepResult
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.train.loop import trainer
from wgpu_lora.train.loop.slot_progress import CHECKPOINT
from wgpu_lora.train.options.training_arguments import TrainingArguments
from wgpu_lora.train.prepare_job import prepare_job
from wgpu_lora.train.run import run_checkpoint
from wgpu_lora.train.run.checkpoint_store import PlainFiles
from wgpu_lora.train.run.disk_space import GROWTH
from wgpu_lora.train.run.multi_adapter_state import read_multi_adapter_state
from wgpu_lora.train.run.run_checkpoint import RESERVE
from wgpu_lora.train.run.run_state import STATE, read_state
from wgpu_lora.train.run.training_log import LOG, Log, read_log

NEVER: dict[str, Any] = {"save_steps": 0, "save_minutes": 0.0}
EVERY: dict[str, Any] = {"save_steps": 0, "save_minutes": 10.0}


class Killed(Exception):
    """Ends a run as a kill does: nothing more is saved."""


def killed_after(step: int) -> Callable[[StepResult], None]:
    def callback(result: StepResult) -> None:
        if result.step == step:
            raise Killed

    return callback


def make_steps_take(seconds: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the clock that tells when to save."""
    passed = count(seconds, seconds)
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + next(passed), perf_counter=time.perf_counter)
    monkeypatch.setattr(trainer, "time", clock)


@pytest.fixture
def long_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step takes twenty minutes."""
    make_steps_take(20 * 60, monkeypatch)


def options(place: Path, name: str = "run", **changes: Any) -> dict[str, Any]:
    """Without checkpoints, unless a test asks for them."""
    arguments = run_options(place, name, **{"model": None, "save_total_limit": None, **NEVER, **changes})
    return {name: value for name, value in arguments.items() if value is not None}


@pytest.mark.usefixtures("long_steps")
@pytest.mark.parametrize(
    ("changes", "newest"),
    [
        ({}, "best"),
        ({"save_steps": 3}, "best"),  # of step 4, and a checkpoint of step 3
        ({"save_steps": 4}, "step-4"),  # best/ is of the same step
        (EVERY, "step-4"),
    ],
)
def test_the_newest_complete_state_is_resumed(
    qwen2: LoadedModel, tmp_path: Path, finished_run: Path, changes: dict[str, Any], newest: str
) -> None:
    arguments = options(finished_run, output=str(tmp_path / "run"), **changes)
    with pytest.raises(Killed):
        api.finetune(qwen2, callback=killed_after(5), **arguments)
    checkpoint = run_checkpoint.latest_checkpoint(tmp_path / "run")
    assert (checkpoint.name, read_state(checkpoint)[0].step) == (newest, 4)
    with pytest.raises(UserError, match=r"already holds a run: continue it with resume=True, begin over with overwr"):
        api.finetune(qwen2, **arguments)
    api.finetune(qwen2, resume=True, output=arguments["output"])
    assert result(tmp_path / "run") == result(finished_run / "run")


@pytest.mark.parametrize("finished", [False, True])
def test_overwriting_begins_over_and_keeps_what_is_not_the_runs(
    qwen2: LoadedModel, tmp_path: Path, finished_run: Path, finished: bool
) -> None:
    run = tmp_path / "run"
    if finished:
        shutil.copytree(finished_run / "run", run)
    else:
        killed_run(finished_run, tmp_path)
    own = [run / "notes.txt", run / "checkpoints" / "notes.txt"]
    for path in own:
        path.write_text("mine")
    stale = run / "tokenizer.json"  # of another qwen2, say
    stale.write_text("{}")
    changes = {"max_steps": 3, "learning_rate": 2e-3, **NEVER}
    api.finetune(qwen2, **options(finished_run, output=str(run), **changes), overwrite=True)
    api.finetune(qwen2, **options(finished_run, output=str(tmp_path / "whole"), **changes))
    assert result(run) == result(tmp_path / "whole")
    assert [path.read_text() for path in own] == ["mine"] * 2
    assert not stale.exists()
    assert [path.name for _, path in run_checkpoint.list_checkpoints(run / "checkpoints")] == ["step-3"]
    record = api.finetune(qwen2, resume=True, output=str(run), max_steps=4)  # which is not overwritten again
    assert record.steps == 4


def test_a_run_that_is_refused_overwrites_nothing(qwen2: LoadedModel, tmp_path: Path, finished_run: Path) -> None:
    run = Path(shutil.copytree(finished_run / "run", tmp_path / "run"))
    (tmp_path / "bad.jsonl").write_text("{")
    arguments = options(finished_run, output=str(run), overwrite=True)
    for wrong in ({"data": str(tmp_path / "bad.jsonl")}, {"memory_budget": "1kB"}, {"resume": True}):
        with pytest.raises(UserError):
            api.finetune(qwen2, **arguments | wrong)
    assert files_of(run) == files_of(finished_run / "run")


@pytest.mark.usefixtures("long_steps")
@pytest.mark.parametrize(
    ("minutes", "steps", "took", "saved"),
    [
        (50.0, 0, 0.0, [3, 6, 7]),
        (0.0, 0, 0.0, [7]),
        (50.0, 2, 0.0, [2, 4, 6, 7]),
        (20.0, 0, 0.0, [*range(1, 8)]),
        (20.0, 0, 36.0, [3, 6, 7]),  # 1% of an hour
    ],
)
def test_a_checkpoint_is_due_by_time(
    qwen2: LoadedModel, tmp_path: Path, minutes: float, steps: int, took: float, saved: list[int]
) -> None:
    arguments = options(tmp_path, eval_data=None, save_steps=steps, save_minutes=minutes)
    job, checkpoint_steps = prepare_job(TrainingArguments(**arguments), qwen2), list[int]()

    def step(result: StepResult) -> None:
        job.run.state.between_seconds[CHECKPOINT] = took

    job.train(hearing(step=step, saved=lambda path, step, adapter: checkpoint_steps.append(step)))
    assert checkpoint_steps == saved


def test_by_default_the_first_checkpoint_comes_after_a_minute(
    qwen2: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_steps_take(25, monkeypatch)
    arguments = options(tmp_path, eval_data=None, save_steps=None, save_minutes=None)
    with pytest.raises(Killed):
        api.finetune(qwen2, callback=killed_after(5), **arguments)
    assert read_state(run_checkpoint.latest_checkpoint(tmp_path / "run"))[0].step == 3


def pipeline(qwen2: LoadedModel, tmp_path: Path, place: str, **how: Any) -> MultiAdapterPipeline:
    arguments = options(tmp_path, place, **how)
    own = {name: arguments.pop(name) for name in ("data", "eval_data", "output", "max_steps", "lora_r")}
    adapters = [
        {"data": own["data"], "eval_data": own["eval_data"], "checkpoint": f"{own['output']}/{n}", "max_steps": s}
        for n, s in (("a", 7), ("b", 4))
    ]
    return MultiAdapterPipeline(adapters, qwen2, output=f"{own['output']}/pipeline", lora_r=4, **arguments)


@pytest.mark.usefixtures("long_steps")
@pytest.mark.parametrize("changes", [EVERY, {"eval_steps": 2}])
def test_a_killed_pipeline_goes_on_from_its_newest_state(
    qwen2: LoadedModel, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """Saved by time, or once with the first best adapter, since best/ alone is not the state of a pipeline."""
    with pytest.raises(Killed):
        pipeline(qwen2, tmp_path, "run", **changes).train(killed_after(3))
    home = tmp_path / "run" / "pipeline"
    assert read_multi_adapter_state(home).step == 2
    with pytest.raises(UserError, match="already belongs to a pipeline: continue it with resume=True, begin over with"):
        pipeline(qwen2, tmp_path, "run", **changes).train()
    pipeline(qwen2, tmp_path, "run", **changes, resume=True).train()
    pipeline(qwen2, tmp_path, "whole").train()
    for name in "ab":
        assert result(tmp_path / "run" / name) == result(tmp_path / "whole" / name)
    with pytest.raises(Killed):
        pipeline(qwen2, tmp_path, "run", overwrite=True, learning_rate=2e-3).train(killed_after(1))
    assert not any((tmp_path / "run" / place / name).exists() for place, name in (("pipeline", STATE), ("a", "last")))


# -- a disk that is full -----------------------------------------------------------------------------------------------

NEWEST = r"and the newest complete state is (\S+): make room for ([\d,]+) bytes there and go on with resume=True\."


def disk_options(place: Path, output: Path) -> dict[str, Any]:
    arguments = run_options(place, output=str(output))
    return {name: value for name, value in arguments.items() if name != "model"}


def later_best(path: Path, data: bytes = b"") -> bool:
    return path.name == "best" and (path.parent / "checkpoints" / "step-2").exists()


def fill_disk(monkeypatch: pytest.MonkeyPatch, full: Callable[[Path, bytes], bool], even_then: bool = False) -> None:
    """Writes for which `full` holds are refused: until the reserve is released, or `even_then`."""
    directory, write, line = PlainFiles.write_directory, PlainFiles.write, Log.write

    def refuse(path: Path, data: bytes = b"") -> None:
        reserved = any((parent / RESERVE).exists() for parent in path.parents)
        if full(path, data) and (reserved or even_then):
            raise OSError(errno.ENOSPC, "No space left on device")

    def write_line(log: Log, facts: dict[str, Any]) -> None:
        refuse(log.path, str(facts["step"]).encode())
        line(log, facts)

    def write_directory(own: PlainFiles, final: Path, files: Any) -> None:
        refuse(final)
        directory(own, final, files)

    def write_file(own: PlainFiles, path: Path, data: bytes | None) -> None:
        refuse(path)
        write(own, path, data)

    monkeypatch.setattr(PlainFiles, "write_directory", write_directory)
    monkeypatch.setattr(PlainFiles, "write", write_file)
    monkeypatch.setattr(Log, "write", write_line)


@pytest.mark.parametrize(
    ("full", "even_then", "newest"),
    sample(
        [
            (lambda path, data: path.name == "step-4", False, "checkpoints/step-4"),
            (lambda path, data: path.name == LOG and data == b"4", False, "checkpoints/step-4"),
            (later_best, False, "checkpoints/step-4"),
            (lambda path, data: path.name in ("step-4", "step-6"), True, "best"),
            (lambda path, data: path.name == "step-4" or later_best(path), True, "checkpoints/step-2"),
            (lambda path, data: path.name == "README.md", True, "checkpoints/step-7"),
        ],
        1 / 2,
    ),
)
def test_the_last_state_is_saved_and_goes_on(
    qwen2: LoadedModel,
    finished_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    full: Callable[[Path, bytes], bool],
    even_then: bool,
    newest: str,
) -> None:
    run = tmp_path / "run"
    with monkeypatch.context() as patched:
        fill_disk(patched, full, even_then)
        with pytest.raises(StorageError, match=NEWEST) as error:
            api.finetune(qwen2, **disk_options(finished_run, run))
    match = re.search(NEWEST, str(error.value))
    assert match[1] == str(run / newest)
    assert run_checkpoint.checkpoint_damage(run / newest) is None
    assert not list(run.rglob("*.tmp"))
    api.finetune(qwen2, resume=True, output=str(run))
    assert result(run) == result(finished_run / "run")


@pytest.mark.parametrize("number", [errno.EROFS, errno.EPERM, errno.ENOSPC, errno.EIO])
def test_a_disk_that_refuses_its_clean_up_too(
    qwen2: LoadedModel, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Mounted read-only, without inodes, or with immutable files: the first error is told, and how to go on."""
    run, write, unlink, refuses = tmp_path / "run", PlainFiles.write_directory, Path.unlink, list[bool]()

    def write_directory(own: PlainFiles, final: Path, files: Any) -> None:
        refuses.extend([True] * (final.name == "step-6"))
        if refuses:
            raise OSError(number, os.strerror(number), str(final))
        write(own, final, files)

    def refused_unlink(path: Path, missing_ok: bool = False) -> None:
        if refuses:
            raise OSError(number, os.strerror(number), str(path))
        unlink(path, missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(PlainFiles, "write_directory", write_directory)
        patched.setattr(Path, "unlink", refused_unlink)
        with pytest.raises(StorageError) as error:
            api.finetune(qwen2, **disk_options(finished_run, run))
    text = (
        f"Writing to {run}/checkpoints/step-6 failed ({os.strerror(number)}), and the newest complete state is {run}/"
    )
    assert str(error.value).startswith(text)
    assert str(error.value).endswith(" and go on with resume=True.")
    api.finetune(qwen2, resume=True, output=str(run))
    assert result(run) == result(finished_run / "run")


def test_results_that_fit_into_the_reserve_end_the_run_well(
    qwen2: LoadedModel, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill_disk(monkeypatch, lambda path, data: path.name in ("step-7", "adapter_model.safetensors"))
    record = api.finetune(qwen2, **disk_options(finished_run, tmp_path / "run"))
    assert record.outcome == "finished"
    assert result(tmp_path / "run") == result(finished_run / "run")


def test_a_run_without_any_state_can_begin_again(
    qwen2: LoadedModel, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        fill_disk(patched, lambda path, data: path.parent.name == "checkpoints" or path.name == "best", even_then=True)
        with pytest.raises(StorageError, match=r"there is no complete state yet: make room for .* and start again\."):
            api.finetune(qwen2, **disk_options(finished_run, tmp_path / "run"))
    api.finetune(qwen2, **disk_options(finished_run, tmp_path / "run"))
    assert result(tmp_path / "run") == result(finished_run / "run")


def test_a_part_of_a_line_does_not_stay_in_the_log(tmp_path: Path, small: Path) -> None:
    log = Log(small / LOG)
    log.write({"step": 1, "epoch": 0.5, "loss": 1.0})
    (small / "rest").write_bytes(bytes(shutil.disk_usage(small).free))
    with pytest.raises(OSError, match="No space left"):
        log.write({"step": 2, "loss": "2" * 8192})
    (small / "rest").unlink()
    log.write({"step": 2, "epoch": 1.0, "loss": 2.0})
    assert [line["step"] for line in read_log(small / LOG)] == [1, 2]


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    if (
        not shutil.which("mount")
        or subprocess.run(
            ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)], capture_output=True
        ).returncode
    ):
        pytest.skip("mounting is not permitted")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def filling(filler: Path) -> Callable[[StepResult], None]:
    """Fills the disk after the third step."""

    def fill(step: StepResult) -> None:
        if step.step == 3:
            filler.write_bytes(bytes(shutil.disk_usage(filler.parent).free))

    return fill


def required_bytes(place: Path, qwen2: LoadedModel, arguments: dict[str, Any]) -> int:
    """What a run that is refused says that it needs; the sentence names the path and the free bytes, too."""
    (place / "rest").write_bytes(bytes(shutil.disk_usage(place).free - (1 << 16)))
    with pytest.raises(StorageError) as refused:
        api.finetune(qwen2, **arguments)
    (place / "rest").unlink()
    match = re.fullmatch(
        r"The disk of (\S+) has ([\d,]+) bytes free, but a checkpoint and the results of the run need ([\d,]+) \(No "
        r"space left on device\): make room there, or choose another output\.",
        str(refused.value),
    )
    assert match[1] == arguments["output"]
    assert int(match[2].replace(",", "")) <= 1 << 16
    assert not (place / "run" / "checkpoints").exists()
    return int(match[3].replace(",", ""))


def test_a_disk_that_fills_during_a_run(qwen2: LoadedModel, finished_run: Path, small: Path) -> None:
    """A real one: refused before the first step; filled by others after the third; then with room again."""
    arguments = disk_options(finished_run, small / "run")
    room = required_bytes(small, qwen2, arguments)
    filler = small / "rest"
    with pytest.raises(StorageError, match=NEWEST) as error:
        api.finetune(qwen2, callback=filling(filler), **arguments)
    match = re.search(NEWEST, str(error.value))
    assert int(match[2].replace(",", "")) == room + GROWTH
    assert read_state(Path(match[1]))[0].step == 4
    with pytest.raises(StorageError, match="bytes free, but"):
        api.finetune(qwen2, resume=True, output=arguments["output"])
    filler.unlink()
    assert shutil.disk_usage(small).free >= room + GROWTH
    api.finetune(qwen2, resume=True, output=arguments["output"])
    assert result(small / "run") == result(finished_run / "run")


def test_a_pipeline_on_a_disk_that_fills(qwen2: LoadedModel, finished_run: Path, tmp_path: Path, small: Path) -> None:
    filler, arguments = small / "rest", disk_options(finished_run, small / "home")
    own = {name: arguments.pop(name) for name in ("data", "eval_data")}

    def pipeline(place: Path, **how: Any) -> MultiAdapterPipeline:
        tasks = [{**own, "checkpoint": str(place / name)} for name in "ab"]
        return MultiAdapterPipeline(tasks, qwen2, **arguments | {"output": str(place / "home"), **how})

    with pytest.raises(StorageError, match=rf"newest complete state is {small}/home/state\.json"):
        pipeline(small).train(filling(filler))
    filler.unlink()
    pipeline(small, resume=True).train()
    pipeline(tmp_path).train()
    for name in "ab":
        assert result(small / name) == result(tmp_path / name)
