"""The tuner: what it measures, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.events import hearing
from support.tuning import product, verdicts

from wgpu_lora.events import Tuning
from wgpu_lora.gpu import cuts
from wgpu_lora.gpu.choices import Entry, choice_key, nearest, same_shader
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.dispatch import Dispatch
from wgpu_lora.gpu.errors import ShaderError, WrongResults
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.tensor import persistent
from wgpu_lora.gpu.tiling import Capabilities, Tiling
from wgpu_lora.gpu.tuner import Tuner
from wgpu_lora.gpu.values import nmse
from wgpu_lora.ops.elementwise import fill
from wgpu_lora.ops.matmul import lora_nt


@pytest.fixture(autouse=True)
def own_verdicts(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What these tests make fail is forgotten after each."""
    monkeypatch.setattr(device, "verdicts", None)


def test_it_times_every_tiling_and_remembers_the_fastest(device: Device, tmp_path: Path) -> None:
    program, _ = product(device)
    (step,) = program.dispatches
    key = choice_key(step.kernel, step.present, step.constants)
    before = device.allocated
    choices = Tuner(device, directory=tmp_path).tune([program])
    assert device.allocated == before
    (file,) = tmp_path.glob("*.json")
    entry = json.loads(file.read_text())["entries"][key]
    seconds = [took for took, _ in entry["seconds"]]
    assert len(seconds) >= 2
    assert min(seconds) > 0
    assert choices == {key: Tiling.from_json(entry["tiling"])}
    fastest = min(entry["seconds"], key=lambda pair: pair[0])
    assert entry["tiling"] in (fastest[1], entry["seconds"][0][1])


@pytest.mark.filterwarnings("ignore::wgpu_lora.errors.DeviceWarning")
def test_a_wrong_tiling_is_never_chosen(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, _ = product(device)
    (step,) = program.dispatches
    tilings = step.kernel.tilings(device.capabilities, step.constants)
    wrong = tilings[1]
    with monkeypatch.context() as patch:
        patch.setattr(cuts, "nmse", lambda got, want: nmse(got, want) + 1.0)
        with pytest.raises(WrongResults, match=r"gets matmul_nt wrong in every tiling \(NMSE 1 against"):
            Tuner(device, directory=tmp_path).tune([program])
    assert not list(tmp_path.glob("*.json"))
    monkeypatch.setattr(Tuner, "_verdict", verdicts(lambda tiling: tiling != wrong))
    monkeypatch.setattr(Tuner, "_seconds", lambda _, __, tiling: 0.1 if tiling == wrong else 1.0)
    assert Tuner(device, directory=tmp_path).tune([program]) == {
        choice_key(step.kernel, step.present, step.constants): tilings[0]
    }


def test_a_family_without_subgroups_is_timed_on_a_cpu(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """All but `plain`, of which it is known to be slow."""
    (step,) = product(device)[0].dispatches
    other = Tiling("workgroup", rows=8)
    kernel = replace(step.kernel, variants=lambda *_: [step.tiling, other, Tiling()])
    monkeypatch.setattr(device, "capabilities", Capabilities(8, software=True))
    assert Tuner(device)._tilings(replace(step, kernel=kernel)) == [step.tiling, other]


@pytest.mark.filterwarnings("ignore::wgpu_lora.errors.DeviceWarning")
def test_a_tiling_that_the_driver_cannot_compile_is_left_out(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, _ = product(device)
    (step,) = program.dispatches
    first, before, compile = step.tiling, device.allocated, Device.compute_pipeline

    def compute_pipeline(self: Device, key: Any, source: Any) -> Any:
        if key[-1] == first:
            raise ShaderError(key[0], "the compiler gave up")
        return compile(self, key, source)

    monkeypatch.setattr(Device, "compute_pipeline", compute_pipeline)
    (chosen,) = Tuner(device, directory=tmp_path).tune([program]).values()
    assert chosen != first
    assert device.allocated == before


def test_what_there_is_no_time_for_keeps_the_default_for_good(
    device: Device, tmp_path: Path, no_measuring: Any
) -> None:
    """Otherwise every run of a model with many sizes would begin with tuning."""
    program, _ = product(device)
    (step,) = program.dispatches
    default = {choice_key(step.kernel, step.present, step.constants): step.tiling}
    assert Tuner(device, seconds=0, directory=tmp_path).tune([program]) == default
    assert Tuner(device, directory=tmp_path).estimate([program]).sizes == 0
    assert Tuner(device, directory=tmp_path).tune([program]) == default
    assert Tuner(device, directory=tmp_path).estimate([product(device, m=40)[0]]).sizes == 0  # nor at another batch


@pytest.fixture
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Fails where anything is measured."""
    monkeypatch.setattr(Tuner, "_seconds", lambda *_: pytest.fail("it was measured"))
    return monkeypatch


def test_another_batch_of_the_model_is_not_timed(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another length or batch takes over what was found for the nearest, in one program too."""
    tuner = Tuner(device, directory=tmp_path)
    timed: list[tuple[int, Any]] = []

    def seconds(self: Tuner, call: Any, tiling: Any) -> float:
        timed.append((call.constants["m"], tiling))
        return 0.1 if tiling == call.kernel.tilings(device.capabilities, call.constants)[1] else 1.0

    monkeypatch.setattr(Tuner, "_seconds", seconds)
    monkeypatch.setattr(Tuner, "_verdict", verdicts())
    programs = [product(device, m=m)[0] for m in (64, 128, 256)]
    assert tuner.estimate(programs).sizes == 1
    choices = tuner.tune(programs)
    assert {m for m, _ in timed} == {256}  # of the most work
    second = programs[0].dispatches[0].kernel.tilings(device.capabilities, programs[2].dispatches[0].constants)[1]
    assert list(choices.values()) == [second] * 3
    timed.clear()
    assert Tuner(device, directory=tmp_path).tune([product(device, m=1000)[0]]).popitem()[1] == second
    assert not timed
    assert tuner.estimate([product(device, m=5000)[0]]).sizes == 1  # too far from what was timed
    assert tuner.estimate([product(device, m=256, n=64)[0]]).sizes == 1  # another matrix
    few = product(device, m=4)[0]  # products of few rows have tilings of their own
    assert len(Tuner(device, directory=tmp_path).tune([few])) == 1
    assert {m for m, _ in timed} == {4}


def lora_call(slots: int, rows: int = 1000) -> Any:
    constants = {**lora_nt.defaults, "m": rows, "n": 16, "k": 896, "slots": slots, "stride": 896 * 16}
    return lora_nt, ("a", "b", "y", "ranges"), constants


def test_what_is_taken_over_by_another_shader_is_checked(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, present, _ = lora_call(1)
    one, three, small = (choice_key(*lora_call(slots)) for slots in (1, 3, 1))
    assert small == one != three

    def entry(*seconds: float, like: str | None = None) -> Entry:
        return Entry(kernel.name, "", Tiling(), tuple((taken, Tiling()) for taken in seconds), like=like)

    assert nearest(kernel, three, {one: entry(1.0)}) == one
    assert nearest(kernel, three, {one: entry(like="x")}) is None
    assert nearest(kernel, three, {"damaged": entry(1.0), "[1]": entry(1.0), '["a", [], [], {}]': entry(1.0)}) is None
    near = choice_key(*lora_call(3, 500))
    assert nearest(kernel, three, {one: entry(1.0), near: entry(1.0)}) == one  # as many rows
    assert nearest(kernel, three, {one: entry(), near: entry(1.0)}) == near  # rather what was timed
    assert same_shader(three, near)
    assert not same_shader(three, one)
    tuner, checked = Tuner(device, directory=tmp_path), []
    call = Dispatch(kernel, (), present, lora_call(3)[2], Tiling(), (1, 1, 1))
    tiling = kernel.tilings(device.capabilities, call.constants)[1]
    known = {one: replace(entry(1.0), tiling=tiling)}
    for right in (True, False):
        monkeypatch.setattr(Tuner, "_verdict", verdicts(lambda tiling, right=right: checked.append(tiling) or right))
        assert (tuner._taken_over(three, call, known) is not None) == right
    assert checked == [tiling, tiling]
    assert tuner._taken_over(three, call, {one: entry(1.0)}) is None  # no tiling of this device


def test_it_says_how_long_it_will_take(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing before anything was timed on the device, then from what a tiling took, up to the limit."""
    monkeypatch.setattr(Tuner, "_seconds", lambda *_: 1.0)
    monkeypatch.setattr(Tuner, "_verdict", verdicts())
    seen: list[Tuning] = []
    first, other = (product(device, n=n)[0] for n in (20, 600))
    assert Tuner(device, directory=tmp_path).estimate([first]).expected is None
    Tuner(device, directory=tmp_path).tune([first], hearing(tuning=lambda tuning: seen.append(replace(tuning))))
    count = len(first.dispatches[0].kernel.tilings(device.capabilities, first.dispatches[0].constants))
    assert [tuning.over for tuning in seen] == [*[False] * (len(seen) - 1), True]
    assert [tuning.tilings_done for tuning in seen] == [*range(len(seen) - 1), seen[-1].tilings]
    assert 2 <= seen[-1].tilings <= count
    assert (seen[0].sizes, seen[-1].sizes_done, seen[0].kernel) == (1, 1, "matmul_nt")
    assert seen[0].expected is None
    assert all(0 < tuning.expected <= tuning.limit for tuning in seen[1:])  # type: ignore[operator]
    estimate = Tuner(device, directory=tmp_path).estimate([other])
    assert estimate.expected
    assert estimate.expected == pytest.approx(estimate.tilings * estimate.each)  # type: ignore[operator]
    assert Tuner(device, seconds=1e-9, directory=tmp_path).estimate([other]).expected == 1e-9


def test_what_was_found_before_an_interrupt_is_kept(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tuner, "_verdict", verdicts())

    def seconds(self: Tuner, call: Any, tiling: Any) -> float:
        if call.constants["n"] == 20 and tiling != call.tiling:
            raise KeyboardInterrupt
        return 1.0 if call.constants["n"] == 20 else 1000.0

    monkeypatch.setattr(Tuner, "_seconds", seconds)
    small, large = (product(device, n=n)[0] for n in (20, 600))
    with pytest.raises(KeyboardInterrupt):
        Tuner(device, directory=tmp_path).tune([small, large])
    assert Tuner(device, directory=tmp_path).estimate([small, large]).sizes == 1


def test_the_time_goes_to_calls_by_their_share_of_a_step(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it was measured, not by multiply-adds alone; every call is timed in its default first."""
    monkeypatch.setattr(Tuner, "_verdict", verdicts())
    order: list[tuple[int, bool]] = []

    def seconds(self: Tuner, call: Any, tiling: Any) -> float:
        order.append((call.constants["n"], tiling == call.tiling))
        return {20: 30.0, 600: 1.0, 300: 2.0}[call.constants["n"]]

    monkeypatch.setattr(Tuner, "_seconds", seconds)
    programs = [product(device, n=n)[0] for n in (20, 600, 300)]
    programs[1].dispatches *= 4  # of a step
    Tuner(device, directory=tmp_path).tune(programs)
    assert order[:3] == [(600, True), (300, True), (20, True)]
    count = len(programs[0].dispatches[0].kernel.tilings(device.capabilities, programs[0].dispatches[0].constants))
    rest = [n for n, _ in order[3:]]
    assert rest[: count - 2] == [20] * (count - 2)  # 30 s against 4 and 2
    assert rest.index(600) < rest.index(300)


def test_light_kernels_are_left_alone(device: Device, tmp_path: Path) -> None:
    program = Program(device)
    program.dispatch(fill, persistent((64,), "f32", "workspace", "y"), size=64)
    assert Tuner(device, directory=tmp_path).tune([program]) == {}
    assert not list(tmp_path.iterdir())
