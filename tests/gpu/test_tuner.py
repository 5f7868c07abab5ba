"""The tuner, the cache of its choices, and the programs that are built in them."""

from __future__ import annotations

import json
import math
import multiprocessing
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.events import hearing
from support.training.tuning import product, verdicts

from wgpu_lora.events import Tuning
from wgpu_lora.gpu import tiling_check
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.device_errors import ShaderError, WrongResults
from wgpu_lora.gpu.program import Arena, Program, allocate, release
from wgpu_lora.gpu.reference_values import nmse
from wgpu_lora.gpu.tensor import persistent
from wgpu_lora.gpu.tiling import Tiling
from wgpu_lora.gpu.tuner import Tuner
from wgpu_lora.gpu.tuning_cache import SCHEMA, ChoiceFile, TuningEntry, bucket, choice_key
from wgpu_lora.gpu.verdicts import verdicts_of
from wgpu_lora.ops.elementwise import fill
from wgpu_lora.ops.matmul.matmul import matmul_nt


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
    (tiling,) = Tuner(device, directory=tmp_path).tune([program]).values()
    assert tiling != first
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


@pytest.mark.parametrize(("compile_seconds", "compared"), [(2.0, True), (7.0, True), (16.0, False)])
def test_sizes_are_compared_although_their_defaults_take_all_of_the_time(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compile_seconds: float, compared: bool
) -> None:
    """Half of the time is for other tilings. Where there is no time for a second one, the last event says so."""
    clock = 0.0

    def seconds(self: Tuner, call: Any, tiling: Any) -> float:
        nonlocal clock
        clock += compile_seconds
        return 1.0

    monkeypatch.setattr(time, "perf_counter", lambda: clock)
    monkeypatch.setattr(Tuner, "_verdict", verdicts())
    monkeypatch.setattr(Tuner, "_seconds", seconds)
    events: list[Tuning] = []
    programs = [product(device, n=20 * n)[0] for n in range(1, 20)]
    Tuner(device, directory=tmp_path).tune(programs, hearing(tuning=lambda tuning: events.append(replace(tuning))))
    assert (events[-1].sizes_done > 0, events[-1].over, events[-1].longest) == (compared, True, compile_seconds)
    assert events[-1].seconds <= max(compile_seconds, events[-1].limit)


def test_it_says_how_long_it_will_take(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing before anything was timed on the device, then from what a tiling took, up to the limit."""
    monkeypatch.setattr(Tuner, "_seconds", lambda *_: 1.0)
    monkeypatch.setattr(Tuner, "_verdict", verdicts())
    events: list[Tuning] = []
    first, other = (product(device, n=n)[0] for n in (20, 600))
    assert Tuner(device, directory=tmp_path).estimate([first]).expected is None
    Tuner(device, directory=tmp_path).tune([first], hearing(tuning=lambda tuning: events.append(replace(tuning))))
    assert [tuning.over for tuning in events] == [*[False] * (len(events) - 1), True]
    assert [tuning.tilings_done for tuning in events] == [*range(len(events) - 1), events[-1].tilings]
    assert (events[0].sizes, events[-1].sizes_done, events[0].kernel, events[0].expected) == (1, 1, "matmul_nt", None)
    assert all(0 < tuning.expected <= tuning.limit for tuning in events[1:])  # type: ignore[operator]
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


def damaged(good: str) -> list[str]:
    (entry,) = json.loads(good)["entries"].values()
    odd = [{"x": 3}, {"x": entry, "[1]": entry, '["a", [], [], {}]': entry}, {"x": {**entry, "took": "long"}}]
    odd += [{"[" * 100_000: entry}, {"x": {**entry, "took": 10**400}}, {"x": {**entry, "took": math.inf}}]
    odd += [{"x": {**entry, "seconds": [[seconds, entry["tiling"]]]}} for seconds in (10**400, math.nan)]
    verdict = {"kernel": "x", "digest": "x", "right": True, "nmse": 10**400, "limit": 1.0}
    texts = ["{", "[]", '{"schema": 99, "entries": {}}', "[" * 100_000]
    texts += [json.dumps({"schema": SCHEMA, "entries": entries}) for entries in odd]
    return [*texts, json.dumps({"schema": SCHEMA, "verdicts": {"x": verdict}})]


def test_the_cache_is_used_again_and_survives_damage(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, _ = product(device)
    tuner = Tuner(device, directory=tmp_path)
    first = tuner.tune([program])
    with monkeypatch.context() as patch:
        patch.setattr(Tuner, "_seconds", lambda *_: pytest.fail("it was measured again"))
        assert Tuner(device, directory=tmp_path).tune([program]) == first
    monkeypatch.setattr(Tuner, "_seconds", lambda *_: 1.0)
    for damage in damaged(tuner.file.path.read_text()):
        tuner.file.path.write_text(damage)
        assert tuner.file.verdicts() == {}
        assert Tuner(device, directory=tmp_path).tune([program]).keys() == first.keys()
        assert json.loads(tuner.file.path.read_text())["schema"] == SCHEMA


def test_a_cache_that_cannot_be_written_leaves_nothing_behind(device: Device, tmp_path: Path) -> None:
    file = ChoiceFile(device, tmp_path)
    file.path.mkdir()
    file.add({}, {})
    assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".lock"}


def test_entries_of_another_shader_are_dropped(device: Device, tmp_path: Path) -> None:
    file = ChoiceFile(device, tmp_path)
    timings = (0.5, Tiling()), (0.25, Tiling(rows=2))
    file.add({"old": TuningEntry("matmul_nt", "then", Tiling(), timings)}, {"matmul_nt": "then"})
    assert file.read({"matmul_nt": "then"})
    assert not file.read({"matmul_nt": "now"})
    file.add({"other": TuningEntry("matmul_nn", "now", Tiling(), timings)}, {"matmul_nn": "now"})
    new = TuningEntry("matmul_nt", "now", Tiling(rows=2), timings, 1.5)
    file.add({"new": new}, {"matmul_nt": "now"})
    digests = {"matmul_nt": "now", "matmul_nn": "now"}
    assert file.read(digests).keys() == {"other", "new"}  # of kernels not asked about, all stay
    assert file.read(digests)["new"] == new


def _add(path: Path, number: int, barrier: Any) -> None:
    file = ChoiceFile.__new__(ChoiceFile)
    file.path = path
    barrier.wait()
    for i in range(10):
        file.add(
            {f"{number}.{i}": TuningEntry("k", "d", Tiling(rows=i + 1), ((1.0, Tiling()), (2.0, Tiling())))}, {"k": "d"}
        )


def test_two_processes_may_write_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    path = tmp_path / "cache.json"
    processes = [context.Process(target=_add, args=(path, number, barrier)) for number in (0, 1)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert len(json.loads(path.read_text())["entries"]) == 20


def test_devices_and_drivers_have_files_of_their_own(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ChoiceFile(device, tmp_path).path
    assert ChoiceFile(device, tmp_path).path == path
    monkeypatch.setattr(device, "info", replace(device.info, driver="another"))
    assert ChoiceFile(device, tmp_path).path != path


def test_sizes_share_a_bucket_by_ratio() -> None:
    assert [bucket(n) for n in (1, 2, 3, 5, 6, 90, 91, 1000)] == [1, 2, 4, 4, 8, 64, 128, 1024]
    near = choice_key(matmul_nt, ("a", "b", "y"), {**matmul_nt.defaults, "m": 500, "n": 512, "k": 512})
    assert near == choice_key(matmul_nt, ("a", "b", "y"), {**matmul_nt.defaults, "m": 512, "n": 512, "k": 512})
    assert near != choice_key(matmul_nt, ("a", "b", "y"), {**matmul_nt.defaults, "m": 512, "n": 512, "k": 510})


def test_a_program_is_built_in_the_chosen_tiling(device: Device, rng: np.random.Generator) -> None:
    program, y = product(device)
    (step,) = program.dispatches
    other = step.kernel.tilings(device.capabilities, step.constants)[-1]
    allocate(device, program.persistent_storages())
    program.build(Arena(device), {choice_key(step.kernel, step.present, step.constants): other})
    a, b = (rng.standard_normal(tensor.shape, np.float32) for tensor in step.tensors[:2])
    for tensor, value in zip(step.tensors, (a, b), strict=False):
        device.write(tensor.storage.buffer, value)
    program.run()
    (built,) = program.dispatches
    assert (built.tiling, built.groups) == (other, step.kernel.groups(step.constants, other))
    got = device.read(y.storage.buffer).view(np.float32).reshape(y.shape)
    np.testing.assert_allclose(got, a @ b.T, rtol=1e-4, atol=1e-4)
    program.build(Arena(device))
    assert program.dispatches == [step]  # what nothing chooses runs the default
    release(device, program.persistent_storages())


def test_a_tiling_of_another_device_is_not_used(device: Device) -> None:
    """As when a run is resumed elsewhere: another size of subgroup would compute nonsense."""
    program, _ = product(device)
    (step,) = program.dispatches
    key = choice_key(step.kernel, step.present, step.constants)
    for foreign in (replace(step.tiling, family="broadcast", lanes=128), Tiling()):
        assert verdicts_of(device).compiled(step, {key: foreign}) == step
