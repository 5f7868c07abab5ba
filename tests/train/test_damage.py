"""Damaged checkpoints, logs and base weights are refused or ignored, never trained on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from support import path_of
from support.events import hearing
from test_resume import job, options, train, weights

from wgpu_lora.errors import UserError
from wgpu_lora.gpu.device import Device
from wgpu_lora.train.run.run_checkpoint import FILES, MANIFEST, METADATA, OPTIMIZER, ORIGIN, write_manifest
from wgpu_lora.train.run.run_state import STATE
from wgpu_lora.train.run.training_log import LOG, read_log

STEPS = "checkpoints"


@pytest.fixture(scope="module")
def place(device: Device, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`whole`: a run of seven steps; `run`: the same, stopped after five, with checkpoints of steps 2, 4 and 5."""
    place = tmp_path_factory.mktemp("damage")
    train(device, options(place, "whole"))
    stopped = job(device, options(place))

    def stop(result: Any) -> None:
        if result.step == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        stopped.train(hearing(step=stop))
    return place


@pytest.fixture
def run(place: Path, tmp_path: Path) -> Path:
    """A copy of the stopped run, to be damaged; options(tmp_path, resume=True) continue it."""
    shutil.copy(place / "rows.jsonl", tmp_path)
    shutil.copytree(place / "run", tmp_path / "run")
    return tmp_path / "run"


def refused(device: Device, run: Path, *parts: str, offer: str = "resume from step-2, which is intact") -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with pytest.raises(UserError) as caught:
        train(device, options(run.parent, resume=True))
    message = str(caught.value)
    assert message.startswith(f"The checkpoint {run / STEPS / 'step-4'} is damaged: ")
    assert all(part in message for part in (*parts, offer)), message
    assert "\n" not in message
    after = {path: path.read_bytes() for path in run.rglob("*") if path.is_file() and path.name != ".lock"}
    assert after == {path: data for path, data in before.items() if path.name != ".lock"}


@pytest.mark.parametrize("name", [*FILES, MANIFEST])
def test_a_flipped_bit_is_found_wherever_it_is(device: Device, run: Path, name: str) -> None:
    path = run / STEPS / "step-4" / name
    good = path.read_bytes()
    for place in np.linspace(0, len(good) - 1, 4).astype(int):
        data = bytearray(good)
        data[place] ^= 1 << int(place) % 7
        path.write_bytes(data)
        refused(device, run, name)
    path.write_bytes(good[:-1])
    refused(device, run, name)
    path.unlink()
    refused(device, run, name, "is missing")
    path.mkdir()
    refused(device, run, name)


def test_what_is_said_helps(device: Device, place: Path, run: Path) -> None:
    """Without the damaged checkpoint, the older one leads to the same result."""
    (run / STEPS / "step-4" / OPTIMIZER).write_bytes(b"")
    refused(device, run, OPTIMIZER)
    shutil.rmtree(run / STEPS / "step-4")
    train(device, options(run.parent, resume=True))
    assert weights(run) == weights(place / "whole")


def test_where_no_other_is_whole_it_says_so(device: Device, run: Path) -> None:
    for step in ("step-2", "step-4"):
        (run / STEPS / step / STATE).write_text("{}")
    refused(device, run, STATE, offer="start again in another directory")
    shutil.copytree(run / STEPS / "step-4", run / "best")
    refused(device, run, STATE, offer="start again in another directory")
    shutil.rmtree(run / "best")
    (run / STEPS / "step-2").rename(run / "epoch-1")
    refused(device, run, STATE, offer="start again in another directory")


def test_a_checkpoint_of_another_run(device: Device, place: Path, run: Path) -> None:
    """It is whole, and of a run with the same options and rows."""
    copied = run / STEPS / "step-7"
    shutil.copytree(place / "whole" / STEPS / "step-7", copied)
    with pytest.raises(UserError, match=f"^The checkpoint {copied} is of another run than {run}: remove it"):
        train(device, options(run.parent, resume=True))
    shutil.rmtree(copied)
    train(device, options(run.parent, resume=True))
    assert weights(run) == weights(place / "whole")


def test_a_run_of_a_version_without_ids(device: Device, place: Path, run: Path) -> None:
    (run / ORIGIN).unlink()
    for step in (run / STEPS).iterdir():
        facts = json.loads((step / METADATA).read_text())
        assert facts.pop("run").keys() == {"id", "options_sha256"}
        (step / METADATA).write_text(json.dumps(facts))
        (step / MANIFEST).unlink()
        write_manifest(step)
    train(device, options(run.parent, resume=True))
    assert weights(run) == weights(place / "whole")


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_step(device: Device, run: Path, name: str) -> None:
    if (run / STEPS / "step-2" / name).read_bytes() != (run / STEPS / "step-4" / name).read_bytes():
        shutil.copy(run / STEPS / "step-2" / name, run / STEPS / "step-4" / name)
        refused(device, run, name)


def test_a_checkpoint_under_another_name(device: Device, run: Path) -> None:
    shutil.rmtree(run / STEPS / "step-4")
    shutil.copytree(run / STEPS / "step-2", run / STEPS / "step-4")
    refused(device, run, "state.json says step 2")


DEEP = json.loads("[" * 500 + "]" * 500)
FIELDS: list[tuple[str, Any]] = [
    *[("step", value) for value in (7, 2, 6.5, None, "4", True, -4, 1 << 60, [4], {})],
    *[("epoch", value) for value in (-1, 0, 7, 1.0, None, "1")],
    *[("index", value) for value in (-1, 0, 2, 1e9, None)],
    *[("total_steps", value) for value in (0, 6, 8, 7.0, None, 1 << 70)],
    *[("pending", value) for value in ({}, "x", None, [None], ["1"], [1e400], [True], [0.5] * 99)],
    *[("tiles", value) for value in ([], {"k": 1}, {"k": {"rows": -1}}, {"k": {"rows": "8"}})],
    ("calibrated", 1), ("ending", None), ("elapsed_seconds", -1), ("warmed_seconds", "0"),
    ("tokens", 1.5), ("seconds", -1), ("seconds", float("nan")), ("best_eval_loss", "0.1"),
    ("last_loss", float("inf")), ("pending_tokens", None), ("unknown", 0),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), FIELDS, ids=lambda value: str(value)[:20])
def test_a_state_that_no_run_has(device: Device, run: Path, name: str, value: Any) -> None:
    """The fields' values are checked, too: here, the manifest matches."""
    resigned(run, lambda facts: facts["state"].update({name: value}))
    refused(device, run, STATE)


@pytest.mark.parametrize("facts", [{}, {"state": None}, {"state": {}, "identity": {}}, {"state": DEEP}])
def test_a_state_of_another_shape(device: Device, run: Path, facts: dict[str, Any]) -> None:
    resigned(run, lambda found: (found.clear(), found.update(facts)))
    refused(device, run, STATE)


@pytest.mark.parametrize("identity", [[], None, {}, {"options": []}, {"options": {}, "data": 1, "base": "x"}])
def test_an_identity_of_another_shape(device: Device, run: Path, identity: Any) -> None:
    resigned(run, lambda facts: facts.update(identity=identity))
    refused(device, run, STATE)


def resigned(run: Path, change: Callable[[dict[str, Any]], object]) -> None:
    directory = run / STEPS / "step-4"
    facts = json.loads((directory / STATE).read_text())
    change(facts)
    (directory / STATE).write_text(json.dumps(facts))
    sign(directory)


def sign(directory: Path) -> None:
    (directory / MANIFEST).unlink()
    write_manifest(directory)


def test_json_that_python_does_not_survive(device: Device, run: Path) -> None:
    directory = run / STEPS / "step-4"
    for text in (b"[" * 100_000, b'{"state":' * 50_000, b"1" * 5000, b'{"a":1,"a":2}', b"\xed\xa0\x80"):
        (directory / STATE).write_bytes(text)
        sign(directory)
        refused(device, run, STATE)


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"sha256": []}', '{"sha256": {}}', '{"sha256": {"../x": "0"}}', "[" * 100_000, "\x00"],
    ids=range(8),
)
def test_a_manifest_of_another_shape(device: Device, run: Path, text: str) -> None:
    (run / STEPS / "step-4" / MANIFEST).write_text(text)
    refused(device, run, MANIFEST)


def test_a_damaged_checkpoint_is_no_adapter_to_begin_with(device: Device, run: Path) -> None:
    start = run / STEPS / "step-2"
    begin = {"init_adapter": str(start), "max_steps": 1}
    train(device, options(run.parent, "one", **begin))
    path = start / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(UserError, match=f"The adapter {start} is damaged: adapter_model"):
        train(device, options(run.parent, "two", **begin))
    (start / MANIFEST).unlink()
    train(device, options(run.parent, "three", **begin))


def test_a_manifest_does_not_lead_out(device: Device, run: Path) -> None:
    path = run / STEPS / "step-4" / MANIFEST
    facts = json.loads(path.read_text())
    facts["sha256"]["../../run.json"] = "0" * 64
    path.write_text(json.dumps(facts))
    refused(device, run, MANIFEST)


def with_moment(change: Callable[[np.ndarray], np.ndarray | None]) -> Callable[[dict[str, np.ndarray]], None]:
    def apply(tensors: dict[str, np.ndarray]) -> None:
        name = f"{path_of(1, 'q_proj')}.B.second_moment"
        changed = change(tensors.pop(name))
        if changed is not None:
            tensors[name] = changed

    return apply


MOMENTS = {
    "float64": lambda m: m.astype(np.float64),
    "float16": lambda m: m.astype(np.float16),
    "bfloat16": lambda m: m.astype(ml_dtypes.bfloat16),
    "transposed": lambda m: np.ascontiguousarray(m.T),
    "flat": lambda m: m.reshape(-1),
    "fewer": lambda m: np.ascontiguousarray(m[:-1]),
    "nan": lambda m: np.where(m == m.max(), np.float32("nan"), m),
    "negative": lambda m: m - np.float32(1),
    "gone": lambda m: None,
}


@pytest.mark.parametrize("kind", MOMENTS)
def test_moments_that_are_not_the_runs(device: Device, run: Path, kind: str) -> None:
    replaced(run, OPTIMIZER, with_moment(MOMENTS[kind]))
    refused(device, run, OPTIMIZER)


def test_one_moment_too_many(device: Device, run: Path) -> None:
    replaced(run, OPTIMIZER, lambda tensors: tensors.update({"9.q_proj.A.first_moment": np.zeros((4, 52), np.float32)}))
    refused(device, run, OPTIMIZER)


def test_an_adapter_of_another_type(device: Device, run: Path) -> None:
    def halve(tensors: dict[str, np.ndarray]) -> None:
        tensors.update({name: values.astype(ml_dtypes.bfloat16) for name, values in tensors.items()})

    replaced(run, "adapter_model.safetensors", halve)
    refused(device, run, "adapter_model.safetensors")


def replaced(run: Path, name: str, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    directory = run / STEPS / "step-4"
    tensors = dict(load_file(directory / name))
    change(tensors)
    save_file(tensors, directory / name)
    sign(directory)


# -- the log ---------------------------------------------------------------------------------------------------------

LINES = [b"\xff", b"[" * 100_000, b'{"step":"a"}', b'{"step":1.5,"epoch":1,"loss":1}', b"{}", b"[]", b"null", b"NaN",
         b'{"step":1,"epoch":1,"loss":NaN}', b'{"step":1,"epoch":{},"loss":1}', b'{"step":1e999,"epoch":1,"loss":1}',
         b'{"step":' + b"9" * 5000 + b"}", b"\x00" * 50, b'{"step":true,"epoch":1,"loss":1}']  # fmt: skip


def test_a_damaged_line_of_the_log_costs_that_line(device: Device, place: Path, run: Path) -> None:
    good = (run / LOG).read_bytes().splitlines(keepends=True)
    (run / LOG).write_bytes(b"".join([good[0], *(line + b"\n" for line in LINES), *good[2:]]))
    assert [line["step"] for line in read_log(run / LOG)] == [1, 3, 4, 5]
    record = train(device, options(run.parent, resume=True))
    assert record.damaged_log_lines == len(LINES)
    assert [line["step"] for line in read_log(run / LOG)] == [1, 3, 4, 5, 6, 7]
    assert weights(run) == weights(place / "whole")


# -- what kills leave ------------------------------------------------------------------------------------------------


def test_leftovers_of_killed_processes_are_swept(device: Device, place: Path, run: Path) -> None:
    for name in (".step-6.tmp", ".step-2.old", "..step-6.tmp.ab12_x9z.tmp"):
        (run / STEPS / name).mkdir()
        (run / STEPS / name / "file").write_text("x")
    for name in (".best.tmp", "..best.tmp.ab12_x9z.tmp", ".epoch-1.previous"):
        (run / name).mkdir()
    for name in (".log.jsonl.ab12_x9z.tmp", ".adapter_model.safetensors.ab12_x9z.tmp", ".README.md.ab12_x9z.tmp"):
        (run / name).write_text("x")
    (run / "epoch-1").mkdir()
    own = (".mine.tmp", ".notes.md.ab12_x9z.tmp", ".hidden", "x.tmp", STEPS + "/.mine.old", ".train.jsonl.old",
           ".notes.json.tmp", ".plot.png.old", ".best.old", ".README.md.old", ".data.json.previous")  # fmt: skip
    theirs = [run / name for name in own]
    for path in theirs:
        path.write_text("kept")
    train(device, options(run.parent, resume=True, save_total_limit=1))
    hidden = {path.relative_to(run).as_posix() for path in run.rglob(".*")} - {".lock", ".run.json"}
    assert hidden == {*own} - {"x.tmp"}
    assert all(path.read_text() == "kept" for path in theirs)
    assert [path.name for path in (run / STEPS).glob("step-*")] == ["step-7"]
    assert weights(run) == weights(place / "whole")


def test_what_had_stepped_aside_is_put_back(device: Device, run: Path) -> None:
    (run / "best").mkdir()
    (run / "best" / "mark").write_text("x")
    (run / "best").rename(run / ".best.previous")
    with pytest.raises(UserError, match="needs the same options"):
        train(device, options(run.parent, resume=True, learning_rate=1.0))
    assert (run / "best" / "mark").read_text() == "x"


def test_more_checkpoints_than_the_limit_are_removed_on_resuming(device: Device, run: Path) -> None:
    train(device, options(run.parent, resume=True, save_total_limit=1, save_steps=0, max_steps=7))
    assert [path.name for path in (run / STEPS).glob("step-*")] == ["step-7"]
