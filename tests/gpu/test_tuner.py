"""The tuner: what it measures, and what it refuses."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.events import hearing
from support.tuning import product, verdicts

from wgpu_lora.events import Tuning
from wgpu_lora.gpu import tiling_check
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.device_errors import ShaderError, WrongResults
from wgpu_lora.gpu.program import Program
from wgpu_lora.gpu.reference_values import nmse
from wgpu_lora.gpu.tensor import persistent
from wgpu_lora.gpu.tiling import Tiling
from wgpu_lora.gpu.tuner import Tuner
from wgpu_lora.gpu.tuning_cache import choice_key
from wgpu_lora.ops.elementwise import fill


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
        patch.setattr(tiling_check, "nmse", lambda got, want: nmse(got, want) + 1.0)
        with pytest.raises(WrongResults, match=r"gets matmul_nt wrong in every tiling \(NMSE 1 against"):
            Tuner(device, directory=tmp_path).tune([program])
    assert not list(tmp_path.glob("*.json"))
    monkeypatch.setattr(Tuner, "_verdict", verdicts(lambda tiling: tiling != wrong))
    monkeypatch.setattr(Tuner, "_seconds", lambda _, __, tiling: 0.1 if tiling == wrong else 1.0)
    assert Tuner(device, directory=tmp_path).tune([program]) == {
        choice_key(step.kernel, step.present, step.constants): tilings[0]
    }


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
    assert Tuner(device, directory=tmp_path).estimate([product(device, m=400)[0]]).sizes == 1  # another size


@pytest.fixture
def no_measuring(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Fails where anything is measured."""
    monkeypatch.setattr(Tuner, "_seconds", lambda *_: pytest.fail("it was measured"))
    return monkeypatch


def test_every_size_is_timed_on_its_own(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is copied from another size. `retune` times all afresh, `thorough` what there was no time for."""
    timed: list[int] = []

    def seconds(self: Tuner, call: Any, tiling: Any) -> float:
        timed.append(call.constants["m"])
        return 0.1 if tiling == call.kernel.tilings(device.capabilities, call.constants)[1] else 1.0

    def sizes(seconds: float = 15, **options: bool) -> tuple[set[int], bool]:
        timed.clear()
        tuner = Tuner(device, seconds, tmp_path, **options)
        choices = tuner.tune(programs)
        assert len(choices) == len(programs)
        return set(timed), tuner.complete

    monkeypatch.setattr(Tuner, "_seconds", seconds)
    monkeypatch.setattr(Tuner, "_verdict", verdicts())
    programs = [product(device, m=m)[0] for m in (64, 128)]
    assert sizes() == ({64, 128}, True)
    programs.append(product(device, m=1024)[0])
    assert sizes(seconds=0) == (set(), False)  # no time
    assert sizes() == (set(), False)  # nor in later runs
    assert sizes(thorough=True) == ({1024}, True)
    assert sizes() == (set(), True)
    assert sizes(retune=True) == ({64, 128, 1024}, True)
    assert sizes(seconds=0, retune=True) == (set(), True)  # what was timed before is kept
    (file,) = tmp_path.glob("*.json")
    content = json.loads(file.read_text())
    assert not content["skipped"]
    assert all(len(entry["seconds"]) > 1 and "like" not in entry for entry in content["entries"].values())


@pytest.mark.parametrize(("each", "compared"), [(2.0, True), (7.0, True), (16.0, False)])
def test_sizes_are_compared_although_their_defaults_take_all_of_the_time(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, each: float, compared: bool
) -> None:
    """Half of the time is for other tilings. Where there is no time for a second one, the last event says so."""
    clock = 0.0

    def seconds(self: Tuner, call: Any, tiling: Any) -> float:
        nonlocal clock
        clock += each
        return 1.0

    monkeypatch.setattr(time, "perf_counter", lambda: clock)
    monkeypatch.setattr(Tuner, "_verdict", verdicts())
    monkeypatch.setattr(Tuner, "_seconds", seconds)
    seen: list[Tuning] = []
    programs = [product(device, n=20 * n)[0] for n in range(1, 20)]
    Tuner(device, directory=tmp_path).tune(programs, hearing(tuning=lambda tuning: seen.append(replace(tuning))))
    assert (seen[-1].sizes_done > 0, seen[-1].over, seen[-1].longest) == (compared, True, each)
    assert seen[-1].seconds <= max(each, seen[-1].limit)


def test_it_says_how_long_it_will_take(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing before anything was timed on the device, then from what a tiling took, up to the limit."""
    monkeypatch.setattr(Tuner, "_seconds", lambda *_: 1.0)
    monkeypatch.setattr(Tuner, "_verdict", verdicts())
    seen: list[Tuning] = []
    first, other = (product(device, n=n)[0] for n in (20, 600))
    assert Tuner(device, directory=tmp_path).estimate([first]).expected is None
    Tuner(device, directory=tmp_path).tune([first], hearing(tuning=lambda tuning: seen.append(replace(tuning))))
    assert [tuning.over for tuning in seen] == [*[False] * (len(seen) - 1), True]
    assert [tuning.tilings_done for tuning in seen] == [*range(len(seen) - 1), seen[-1].tilings]
    assert (seen[0].sizes, seen[-1].sizes_done, seen[0].kernel, seen[0].expected) == (1, 1, "matmul_nt", None)
    assert all(0 < tuning.expected <= tuning.limit for tuning in seen[1:])  # type: ignore[operator]
    estimate = Tuner(device, directory=tmp_path).estimate([other])
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


def test_light_kernels_are_left_alone(device: Device, tmp_path: Path) -> None:
    program = Program(device)
    program.dispatch(fill, persistent((64,), "f32", "workspace", "y"), size=64)
    assert Tuner(device, directory=tmp_path).tune([program]) == {}
    assert not list(tmp_path.iterdir())
