"""Devices whose drivers get kernels wrong: reported, worked around, and never silent."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.cli import QWEN2, SMALL, commands, flags, write_rows
from support.events import hearing
from support.processes.broken import Break
from support.training.tuning import product

from wgpu_lora.errors import DeviceWarning
from wgpu_lora.events import WrongKernel
from wgpu_lora.gpu import first_run
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.device_errors import WrongResults
from wgpu_lora.gpu.program import Arena, Program, allocate, release
from wgpu_lora.gpu.tensor import persistent
from wgpu_lora.gpu.tiling_check import check_tilings
from wgpu_lora.gpu.tuner import Tuner
from wgpu_lora.gpu.verdicts import Verdicts, verdicts_of
from wgpu_lora.ops.elementwise import add_forward
from wgpu_lora.ops.loss.loss import sum_by_slot


@pytest.fixture
def fresh(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], Verdicts]:
    """Begins a process: all that is known is in the cache."""
    monkeypatch.delenv("WGPU_LORA_NO_CHECK")

    def begin() -> Verdicts:
        verdicts = Verdicts(device, tmp_path)
        monkeypatch.setattr(device, "verdicts", verdicts)
        return verdicts

    begin()
    return begin


def sums(device: Device) -> Program:
    """A built program that sums 1 .. 8 twice."""
    program = Program(device, "sums")
    values, ranges, total = (
        persistent(shape, dtype, "workspace", name)
        for shape, dtype, name in (((8,), "f32", "values"), ((1, 2), "u32", "ranges"), ((1,), "f32", "total"))
    )
    for _ in range(2):
        program.dispatch(sum_by_slot, values, ranges, total, slots=1)
    allocate(device, program.persistent_storages())
    device.write(values.storage.buffer, np.arange(1, 9, dtype=np.float32))
    device.write(ranges.storage.buffer, np.array([0, 8], np.uint32))
    program.build(Arena(device))
    return program


def total(device: Device, program: Program) -> float:
    program.run()
    return float(device.read(program.dispatches[0].tensors[2].storage.buffer).view(np.float32)[0])


def test_a_wrong_default_is_reported_and_another_tiling_used(
    device: Device, fresh: Callable[[], Verdicts], broken: Break, tmp_path: Path
) -> None:
    """Without tuning too, and in the next process by what the cache knows."""
    program, _ = product(device)
    (step,) = program.dispatches
    first, second, *_ = step.kernel.tilings(device.capabilities, step.constants)
    broken("matmul_nt", lambda tiling: tiling == first)
    for _ in range(2):
        reports: list[WrongKernel] = []
        with fresh().reported_to(hearing(miscompiled=reports.append)), pytest.warns(DeviceWarning) as warned:
            check_tilings(device, [program, program])
        (report,) = reports
        assert warned[0].filename == __file__  # the call, wherever in the package it is found
        assert (report.device, report.driver, report.kernel) == (device.info.name, device.info.driver, "matmul_nt")
        assert report.nmse == pytest.approx(2, abs=1)  # random values instead of the product
        assert f"gets matmul_nt wrong in the tiling {first.family} {first.rows}x" in str(warned[0].message)
        assert verdicts_of(device).choose(step, {}) == second
    allocate(device, program.persistent_storages())
    program.build(Arena(device))
    assert program.dispatches[0].tiling == second
    release(device, program.persistent_storages())
    (file,) = tmp_path.glob("*.json")
    contents = json.loads(file.read_text())
    assert [verdict["right"] for verdict in contents["verdicts"].values()] == [True]  # wrong ones are checked again
    choices = Tuner(device, directory=tmp_path / "tuned").tune([product(device, k=24)[0]])
    assert first not in choices.values()


@pytest.mark.parametrize("in_time", [True, False])
@pytest.mark.parametrize("checks", ["", "1"])
@pytest.mark.filterwarnings("ignore::wgpu_lora.errors.DeviceWarning")
def test_tuning_takes_a_tiling_that_it_would_not_time_if_all_others_are_wrong(
    device: Device,
    fresh: Callable[[], Verdicts],
    broken: Break,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    checks: str,
    in_time: bool,
) -> None:
    """Whether or not programs are checked before they are built, and where time ran out among wrong ones."""
    if not device.capabilities.subgroup_size or not device.capabilities.software:
        pytest.skip("the device has no tilings that are not worth timing")
    monkeypatch.setenv("WGPU_LORA_NO_CHECK", checks)
    fresh()
    programs = [product(device, m=m)[0] for m in (64, 128)]
    monkeypatch.setattr(Tuner, "_seconds", lambda *_: pytest.fail("it was timed"))
    if not in_time:
        monkeypatch.setattr(Tuner, "_time", lambda self, trials, *_: [self._try_next(trial) for trial in trials])
    broken("matmul_nt", lambda tiling: tiling.family != "plain")
    choices = Tuner(device, directory=tmp_path).tune(programs)
    assert {tiling.family for tiling in choices.values()} == {"plain"}
    assert len(choices) == 2
    assert Tuner(device, directory=tmp_path).tune(programs) == choices
    check_tilings(device, programs, choices)
    assert verdicts_of(device).choose(programs[0].dispatches[0], choices).family == "plain"
    fresh().file.clear()
    broken("matmul_nt")
    fresh()
    with pytest.raises(WrongResults, match="gets matmul_nt wrong in every tiling"):
        Tuner(device, directory=tmp_path).tune(programs)


def test_no_right_tiling_is_an_error(device: Device, fresh: Callable[[], Verdicts], broken: Break) -> None:
    program, _ = product(device)
    broken("matmul_nt", compiles=False)
    for _ in range(2):
        fresh()
        with (
            pytest.warns(DeviceWarning),
            pytest.raises(
                WrongResults,
                match=r"\) does not compile matmul_nt \(register allocation failed\): update the driver, or",
            ),
        ):
            check_tilings(device, [program])


@pytest.mark.parametrize("checks", ["", "1"])
def test_kernels_that_are_not_tuned_are_built_in_a_tiling_that_compiles(
    device: Device, fresh: Callable[[], Verdicts], broken: Break, monkeypatch: pytest.MonkeyPatch, checks: str
) -> None:
    monkeypatch.setenv("WGPU_LORA_NO_CHECK", checks)
    first, *alternatives = sum_by_slot.tilings(device.capabilities, {"slots": 1})
    if not alternatives:
        pytest.skip("the device has no subgroups")
    fresh()
    broken("sum_by_slot", lambda tiling: tiling == first, compiles=False)
    with pytest.warns(
        DeviceWarning, match=r"does not compile sum_by_slot in the tiling .*: register allocation failed"
    ):
        program = sums(device)
    assert {step.tiling for step in program.dispatches} == {alternatives[0]}
    assert total(device, program) == 72
    release(device, program.persistent_storages())
    broken("sum_by_slot", compiles=False)
    with pytest.warns(DeviceWarning), pytest.raises(WrongResults) as refused:
        sums(device)
    assert str(refused.value) == (
        f"{device.info.name} ({device.info.driver}) does not compile sum_by_slot (register allocation failed): update "
        "the driver, or choose another device with device."
    )


def test_kernels_that_are_not_tuned_are_checked_in_their_first_run(
    device: Device, fresh: Callable[[], Verdicts], broken: Break
) -> None:
    program = sums(device)
    first, *alternatives = sum_by_slot.tilings(device.capabilities, program.dispatches[0].constants)
    if not alternatives:
        pytest.skip("the device has no subgroups")
    assert total(device, program) == 72
    assert verdicts_of(device).of(program.dispatches[0], first)
    fresh().file.path.unlink()
    broken("sum_by_slot", lambda tiling: tiling == first)
    again = sums(device)
    with pytest.warns(DeviceWarning, match="gets sum_by_slot wrong"):
        assert total(device, again) == 72
    assert {step.tiling for step in again.dispatches} == {alternatives[0]}
    fresh().file.path.unlink()
    broken("sum_by_slot")
    never = sums(device)
    with pytest.warns(DeviceWarning), pytest.raises(WrongResults, match="gets sum_by_slot wrong in every"):
        never.run()
    for recording in (program, again, never):
        release(device, recording.persistent_storages())


def test_the_command_line_warns_or_refuses(
    device: Device,
    fresh: Callable[[], Verdicts],
    broken: Break,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = flags(**SMALL, model=QWEN2, base_dtype="f32", data=write_rows(tmp_path / "rows.jsonl"))
    run, name = commands(capsys, "finetune", "--no-tune", *options), f"{device.info.name} ({device.info.driver})"
    default = sum_by_slot.tilings(device.capabilities, {"slots": 1})[0]
    broken("sum_by_slot", lambda tiling: tiling == default)
    warned = run("--output", tmp_path / "warned")
    assert warned.code == 0
    (line,) = [line for line in warned.err.splitlines() if "wrong" in line]
    assert line.startswith(f"wgpu-lora: warning: {name} gets sum_by_slot wrong in the ")
    record = json.loads((tmp_path / "warned" / "run.json").read_text())
    assert record["environment"]["device"]["miscompiled"] == [line.removeprefix("wgpu-lora: warning: ")]
    fresh().file.path.unlink()
    broken("sum_by_slot")
    refused = run("--output", tmp_path / "refused")
    monkeypatch.setenv("WGPU_LORA_NO_CHECK", "1")
    fresh()
    broken("add_forward", compiles=False)  # it has no other tiling
    uncompiled = run("--output", tmp_path / "uncompiled")
    for result, message in (
        (refused, "gets sum_by_slot wrong in every tiling"),
        (uncompiled, f"{name} does not compile add_forward (reg"),
    ):
        assert (result.code, "Traceback" in result.err) == (2, False)
        assert message in result.err.splitlines()[-1]
        assert "--device" in result.err.splitlines()[-1]
    assert not list(tmp_path.glob("refused/**/*.safetensors"))


@pytest.mark.parametrize(
    ("a", "b", "before", "after", "says"),
    [
        (1.0, 1.0, 3.0, 2.0 + 1e-7, True),
        (20.0, -20.0 + 1e-4, 3.0, 1e-4 + 2e-6, None),  # what rounding leaves where terms cancel out
        (20.0, -20.0 + 1e-4, 3.0, 2e-4, False),
        (0.0, 0.0, 3.0, 0.0, None),  # a kernel that writes zeros
        (1.0, 1.0, 2.0, 2.0, None),  # one that should change nothing
        # Outputs may hold what other tensors of the arena left: NaN, or so much that all errors would be small beside.
        *((1.0, 1.0, stale, y, y == 2.0) for stale in (np.nan, 1e30, 1e12) for y in (2.0, 2.1)),
    ],
)
def test_what_values_of_a_first_run_say(a: float, b: float, before: float, after: float, says: bool | None) -> None:
    arrays = {name: np.full(8, value, np.float64) for name, value in (("a", a), ("b", b), ("y", before))}
    worst = first_run._worst(add_forward, {"size": 8}, arrays, {**arrays, "y": np.full(8, after)})
    assert (None if worst is None else worst[0] <= worst[1]) is says
