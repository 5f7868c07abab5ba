"""A disk that is full: known before the first step if it can be, and the last state is saved in a reserve."""

from __future__ import annotations

import errno
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.shared_runs import result, run_options

from wgpu_lora import api
from wgpu_lora.api.multi_adapter import MultiAdapterPipeline
from wgpu_lora.errors import StorageError
from wgpu_lora.events import StepResult
from wgpu_lora.models.loaded_model import LoadedModel
from wgpu_lora.train.run import run_checkpoint
from wgpu_lora.train.run.checkpoint_store import PlainFiles
from wgpu_lora.train.run.disk_space import GROWTH
from wgpu_lora.train.run.run_checkpoint import RESERVE
from wgpu_lora.train.run.run_state import read_state
from wgpu_lora.train.run.training_log import LOG, Log, read_log

STATE = r"and the newest complete state is (\S+): make room for ([\d,]+) bytes there and go on with resume=True\."


def options(place: Path, output: Path) -> dict[str, Any]:
    given = run_options(place, output=str(output))
    return {name: value for name, value in given.items() if name != "model"}


def later_best(path: Path, data: bytes = b"") -> bool:
    return path.name == "best" and (path.parent / "checkpoints" / "step-2").exists()


def fill(monkeypatch: pytest.MonkeyPatch, full: Callable[[Path, bytes], bool], even_then: bool = False) -> None:
    """Writes for which `full` holds are refused: until the reserve is released, or `even_then`."""
    directory, write, line = PlainFiles.write_directory, PlainFiles.write, Log.write

    def refuse(path: Path, data: bytes = b"") -> None:
        reserved = any((parent / RESERVE).exists() for parent in path.parents)
        if full(path, data) and (reserved or even_then):
            raise OSError(errno.ENOSPC, "No space left on device")

    def write_line(log: Log, said: dict[str, Any]) -> None:
        refuse(log.path, str(said["step"]).encode())
        line(log, said)

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
    [
        (lambda path, data: path.name == "step-4", False, "checkpoints/step-4"),
        (lambda path, data: path.name == LOG and data == b"4", False, "checkpoints/step-4"),
        (later_best, False, "checkpoints/step-4"),
        (lambda path, data: path.name in ("step-4", "step-6"), True, "best"),
        (lambda path, data: path.name == "step-4" or later_best(path), True, "checkpoints/step-2"),
        (lambda path, data: path.name == "README.md", True, "checkpoints/step-7"),
    ],
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
        fill(patched, full, even_then)
        with pytest.raises(StorageError, match=STATE) as error:
            api.finetune(qwen2, **options(finished_run, run))
    found = re.search(STATE, str(error.value))
    assert found
    assert found[1] == str(run / newest)
    assert run_checkpoint.checkpoint_damage(run / newest) is None
    assert not list(run.rglob("*.tmp"))
    api.finetune(qwen2, resume=True, output=str(run))
    assert result(run) == result(finished_run / "run")


def test_results_that_fit_into_the_reserve_end_the_run_well(
    qwen2: LoadedModel, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(monkeypatch, lambda path, data: path.name in ("step-7", "adapter_model.safetensors"))
    record = api.finetune(qwen2, **options(finished_run, tmp_path / "run"))
    assert record.outcome == "finished"
    assert result(tmp_path / "run") == result(finished_run / "run")


def test_a_run_without_any_state_can_begin_again(
    qwen2: LoadedModel, finished_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        fill(patched, lambda path, data: path.parent.name == "checkpoints" or path.name == "best", even_then=True)
        with pytest.raises(StorageError, match=r"there is no complete state yet: make room for .* and start again\."):
            api.finetune(qwen2, **options(finished_run, tmp_path / "run"))
    api.finetune(qwen2, **options(finished_run, tmp_path / "run"))
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


def filling(rest: Path) -> Callable[[StepResult], None]:
    """Fills the disk after the third step."""

    def others(step: StepResult) -> None:
        if step.step == 3:
            rest.write_bytes(bytes(shutil.disk_usage(rest.parent).free))

    return others


def needed(place: Path, qwen2: LoadedModel, given: dict[str, Any]) -> int:
    """What a run that is refused says that it needs; the sentence names the path and the free bytes, too."""
    (place / "rest").write_bytes(bytes(shutil.disk_usage(place).free - (1 << 16)))
    with pytest.raises(StorageError) as refused:
        api.finetune(qwen2, **given)
    (place / "rest").unlink()
    said = re.fullmatch(
        r"The disk of (\S+) has ([\d,]+) bytes free, but a checkpoint and the results of the run need ([\d,]+) \(No "
        r"space left on device\): make room there, or choose another output\.",
        str(refused.value),
    )
    assert said
    assert said[1] == given["output"]
    assert int(said[2].replace(",", "")) <= 1 << 16
    assert not (place / "run" / "checkpoints").exists()
    return int(said[3].replace(",", ""))


def test_a_disk_that_fills_during_a_run(qwen2: LoadedModel, finished_run: Path, small: Path) -> None:
    """A real one: refused before the first step; filled by others after the third; then with room again."""
    given = options(finished_run, small / "run")
    room = needed(small, qwen2, given)
    rest = small / "rest"
    with pytest.raises(StorageError, match=STATE) as error:
        api.finetune(qwen2, callback=filling(rest), **given)
    found = re.search(STATE, str(error.value))
    assert found
    assert int(found[2].replace(",", "")) == room + GROWTH
    assert read_state(Path(found[1]))[0].step == 4
    with pytest.raises(StorageError, match="bytes free, but"):
        api.finetune(qwen2, resume=True, output=given["output"])
    rest.unlink()
    assert shutil.disk_usage(small).free >= room + GROWTH
    api.finetune(qwen2, resume=True, output=given["output"])
    assert result(small / "run") == result(finished_run / "run")


def test_a_pipeline_on_a_disk_that_fills(qwen2: LoadedModel, finished_run: Path, tmp_path: Path, small: Path) -> None:
    rest, given = small / "rest", options(finished_run, small / "home")
    own = {name: given.pop(name) for name in ("data", "eval_data")}

    def pipeline(place: Path, **how: Any) -> MultiAdapterPipeline:
        tasks = [{**own, "checkpoint": str(place / name)} for name in "ab"]
        return MultiAdapterPipeline(tasks, qwen2, **given | {"output": str(place / "home"), **how})

    with pytest.raises(StorageError, match=rf"newest complete state is {small}/home/state\.json"):
        pipeline(small).train(filling(rest))
    rest.unlink()
    pipeline(small, resume=True).train()
    pipeline(tmp_path).train()
    for name in "ab":
        assert result(small / name) == result(tmp_path / name)
