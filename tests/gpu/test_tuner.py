"""The tuner: what it measures, what it refuses, and its cache on disk."""

from __future__ import annotations

import json
import multiprocessing
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.events import hearing
from support.training import golden_arguments

from wgpu_lora.events import Tuning
from wgpu_lora.gpu import tuner as module
from wgpu_lora.gpu.choices import SCHEMA, ChoiceFile, Entry, bucket, choice_key, nearest, same_shader
from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.errors import ShaderError
from wgpu_lora.gpu.kernel import REGISTRY
from wgpu_lora.gpu.program import Arena, Program, allocate
from wgpu_lora.gpu.single import nmse
from wgpu_lora.gpu.tensor import Tensor, persistent
from wgpu_lora.gpu.tiling import Capabilities, Tiling
from wgpu_lora.gpu.tuner import Tuner
from wgpu_lora.models.loaded import open_model
from wgpu_lora.ops.attention import attention_forward
from wgpu_lora.ops.elementwise import fill
from wgpu_lora.ops.matmul import lora_nn, lora_nt, lora_tn, matmul_nn, matmul_nt
from wgpu_lora.ops.matmul_tuning import CHECKED
from wgpu_lora.train.finetune import prepare_job
from wgpu_lora.train.job import Job
from wgpu_lora.weights.nf4 import nf4_matmul, nf4_matmul_backward

SHAPE = {"m": 12, "n": 20, "k": 16}


def product(device: Device, **shape: int) -> tuple[Program, Tensor]:
    """A program of one product, and its result."""
    size = {**SHAPE, **shape}
    a = persistent((size["m"], size["k"]), "f32", "workspace", "a")
    b = persistent((size["n"], size["k"]), "f32", "workspace", "b")
    y = persistent((size["m"], size["n"]), "f32", "workspace", "y")
    program = Program(device)
    program.dispatch(matmul_nt, a, b, y, **size)
    return program, y


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


def test_the_cache_is_used_again_and_survives_damage(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program, _ = product(device)
    tuner = Tuner(device, directory=tmp_path)
    first = tuner.tune([program])
    with monkeypatch.context() as patch:
        patch.setattr(Tuner, "_measure", lambda *_: pytest.fail("it was measured again"))
        assert Tuner(device, directory=tmp_path).tune([program]) == first
    good = tuner.file.path.read_text()
    (entry,) = json.loads(good)["entries"].values()
    odd = [{"x": 3}, {"x": entry, "[1]": entry, '["a", [], [], {}]': entry}, {"x": {**entry, "took": "long"}}]
    damaged = [json.dumps({"schema": SCHEMA, "entries": entries}) for entries in odd]
    for damage in ("{", "[]", '{"schema": 99, "entries": {}}', *damaged):
        tuner.file.path.write_text(damage)
        assert Tuner(device, directory=tmp_path).tune([program]).keys() == first.keys()
    assert json.loads(tuner.file.path.read_text())["schema"] == SCHEMA


def test_entries_of_another_shader_are_dropped(device: Device, tmp_path: Path) -> None:
    file = ChoiceFile(device, tmp_path)
    file.add({"old": Entry("matmul_nt", "then", Tiling())}, {"matmul_nt": "then"})
    assert file.read({"matmul_nt": "then"})
    assert not file.read({"matmul_nt": "now"})
    file.add({"other": Entry("matmul_nn", "now", Tiling())}, {"matmul_nn": "now"})
    new = Entry("matmul_nt", "now", Tiling(rows=2), ((0.5, Tiling()), (0.25, Tiling(rows=2))), 1.5, "old")
    file.add({"new": new}, {"matmul_nt": "now"})
    digests = {"matmul_nt": "now", "matmul_nn": "now"}
    assert file.read(digests).keys() == {"other", "new"}  # of kernels not asked about, all stay
    assert file.read(digests)["new"] == new


def _add(path: Path, number: int, barrier: Any) -> None:
    file = ChoiceFile.__new__(ChoiceFile)
    file.path = path
    barrier.wait()
    for i in range(10):
        file.add({f"{number}.{i}": Entry("k", "d", Tiling(rows=i + 1))}, {"k": "d"})


def test_two_processes_may_write_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(2)
    path = tmp_path / "cache.json"
    both = [context.Process(target=_add, args=(path, number, barrier)) for number in (0, 1)]
    for process in both:
        process.start()
    for process in both:
        process.join(60)
        assert process.exitcode == 0
    assert len(json.loads(path.read_text())["entries"]) == 20


def test_a_wrong_tiling_is_never_chosen(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, _ = product(device)
    (step,) = program.dispatches
    tilings = step.kernel.tilings(device.capabilities, step.constants)
    wrong = tilings[1]
    monkeypatch.setattr(module, "nmse", lambda got, want: nmse(got, want) + 1.0)
    assert Tuner(device, directory=tmp_path).tune([program]) == {}
    monkeypatch.setattr(module, "nmse", nmse)
    monkeypatch.setattr(Tuner, "_is_right", lambda _, __, tiling: tiling != wrong)
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
    assert Tuner(device, directory=tmp_path).outlook([program]).sizes == 0
    assert Tuner(device, directory=tmp_path).tune([program]) == default
    assert Tuner(device, directory=tmp_path).outlook([product(device, m=40)[0]]).sizes == 0  # nor at another batch


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
    monkeypatch.setattr(Tuner, "_is_right", lambda *_: True)
    programs = [product(device, m=m)[0] for m in (64, 128, 256)]
    assert tuner.outlook(programs).sizes == 1
    choices = tuner.tune(programs)
    assert {m for m, _ in timed} == {256}  # of the most work
    second = programs[0].dispatches[0].kernel.tilings(device.capabilities, programs[2].dispatches[0].constants)[1]
    assert list(choices.values()) == [second] * 3
    timed.clear()
    assert Tuner(device, directory=tmp_path).tune([product(device, m=1000)[0]]).popitem()[1] == second
    assert not timed
    assert tuner.outlook([product(device, m=5000)[0]]).sizes == 1  # too far from what was timed
    assert tuner.outlook([product(device, m=256, n=64)[0]]).sizes == 1  # another matrix
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
    call = module.Dispatch(kernel, (), present, lora_call(3)[2], Tiling(), (1, 1, 1))
    tiling = kernel.tilings(device.capabilities, call.constants)[1]
    known = {one: replace(entry(1.0), tiling=tiling)}
    for right in (True, False):
        monkeypatch.setattr(Tuner, "_is_right", lambda _, call, tiling, right=right: checked.append(tiling) or right)
        assert (tuner._taken_over(three, call, known) is not None) == right
    assert checked == [tiling, tiling]
    assert tuner._taken_over(three, call, {one: entry(1.0)}) is None  # no tiling of this device


def test_it_says_how_long_it_will_take(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing before anything was timed on the device, then from what a tiling took, up to the limit."""
    monkeypatch.setattr(Tuner, "_seconds", lambda *_: 1.0)
    monkeypatch.setattr(Tuner, "_is_right", lambda *_: True)
    seen: list[Tuning] = []
    first, other = (product(device, n=n)[0] for n in (20, 600))
    assert Tuner(device, directory=tmp_path).outlook([first]).expected is None
    Tuner(device, directory=tmp_path).tune([first], hearing(tuning=lambda tuning: seen.append(replace(tuning))))
    count = len(first.dispatches[0].kernel.tilings(device.capabilities, first.dispatches[0].constants))
    assert [tuning.over for tuning in seen] == [*[False] * (len(seen) - 1), True]
    assert [tuning.tilings_done for tuning in seen] == [*range(len(seen) - 1), seen[-1].tilings]
    assert 2 <= seen[-1].tilings <= count
    assert (seen[0].sizes, seen[-1].sizes_done, seen[0].kernel) == (1, 1, "matmul_nt")
    assert seen[0].expected is None
    assert all(0 < tuning.expected <= tuning.limit for tuning in seen[1:])  # type: ignore[operator]
    outlook = Tuner(device, directory=tmp_path).outlook([other])
    assert outlook.expected
    assert outlook.expected == pytest.approx(outlook.tilings * outlook.each)  # type: ignore[operator]
    assert Tuner(device, seconds=1e-9, directory=tmp_path).outlook([other]).expected == 1e-9


def test_what_was_found_before_an_interrupt_is_kept(
    device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tuner, "_is_right", lambda *_: True)

    def seconds(self: Tuner, call: Any, tiling: Any) -> float:
        if call.constants["n"] == 20:
            raise KeyboardInterrupt
        return 1.0

    monkeypatch.setattr(Tuner, "_seconds", seconds)
    small, large = (product(device, n=n)[0] for n in (20, 600))
    with pytest.raises(KeyboardInterrupt):
        Tuner(device, directory=tmp_path).tune([small, large])
    assert Tuner(device, directory=tmp_path).outlook([small, large]).sizes == 1


def test_a_program_is_built_in_the_chosen_tiling(device: Device, rng: np.random.Generator) -> None:
    program, y = product(device)
    (step,) = program.dispatches
    other = step.kernel.tilings(device.capabilities, step.constants)[-1]
    choices = {choice_key(step.kernel, step.present, step.constants): other}
    try:
        allocate(device, program.persistent_storages())
        program.build(Arena(device), choices)
        a, b, _ = step.tensors
        values = [rng.standard_normal(t.shape, np.float32) for t in (a, b)]
        for tensor, value in zip((a, b), values, strict=True):
            device.write(tensor.storage.buffer, value)
        program.run()
        assert program.dispatches[0].tiling == other
        assert program.dispatches[0].groups == step.kernel.groups(step.constants, other)
        got = device.read(y.storage.buffer).view(np.float32).reshape(y.shape)
        np.testing.assert_allclose(got, values[0] @ values[1].T, rtol=1e-4, atol=1e-4)
        program.build(Arena(device))
        assert program.dispatches == [step]  # what nothing chooses runs the default
    finally:
        for storage in program.persistent_storages():
            device.free(storage.buffer)


def test_a_tiling_of_another_device_is_not_used(device: Device) -> None:
    """As when a run is resumed elsewhere: another size of subgroup would compute nonsense."""
    program, _ = product(device)
    (step,) = program.dispatches
    key = choice_key(step.kernel, step.present, step.constants)
    for foreign in (replace(step.tiling, family="broadcast", lanes=128), Tiling()):
        assert program._tiled(step, {key: foreign}) == step


def test_sizes_share_a_bucket_by_ratio() -> None:
    assert [bucket(n) for n in (1, 2, 3, 5, 6, 90, 91, 1000)] == [1, 2, 4, 4, 8, 64, 128, 1024]
    near = choice_key(matmul_nt, ("a", "b", "y"), {**matmul_nt.defaults, "m": 500, "n": 512, "k": 512})
    assert near == choice_key(matmul_nt, ("a", "b", "y"), {**matmul_nt.defaults, "m": 512, "n": 512, "k": 512})
    assert near != choice_key(matmul_nt, ("a", "b", "y"), {**matmul_nt.defaults, "m": 512, "n": 512, "k": 510})


WHOLE = {"m": 1000, "n": 4864, "k": 896}
SLOTS = {"slots": 2, "stride": 896 * 16 + 64, "first_row": 5}
CALLS = [
    (matmul_nt, {**WHOLE, "b_type": "bf16", "y_skip": 6, "y_first": 5}),
    (matmul_nn, {**WHOLE, "b_type": "f16", "a_type": "bf16", "a_skip": 8, "a_first": 4}),
    (nf4_matmul, {**WHOLE, "k": 900}),
    (nf4_matmul_backward, {**WHOLE, "n": 904, "k": 4863}),
    (lora_nt, {"m": 1000, "n": 16, "k": 896, **SLOTS}),
    (lora_nn, {"m": 1000, "n": 896, "k": 16, **SLOTS}),
    (lora_tn, {"m": 896, "n": 16, "k": 1000, **SLOTS}),
]


@pytest.mark.parametrize(("kernel", "constants"), CALLS, ids=[kernel.name for kernel, _ in CALLS])
def test_a_check_is_small_and_compiles_the_same_shader(kernel: Any, constants: dict[str, Any]) -> None:
    full = {**kernel.defaults, **constants}
    small = kernel.tuning.cut(full)
    assert kernel.compiled_in(small) == kernel.compiled_in(full)
    assert max(small[name] for name in "mnk") < 4 * CHECKED
    assert kernel.tuning.work(small) < kernel.tuning.work(full)


def test_every_heavy_kernel_is_right_on_its_own_sample(device: Device, tmp_path: Path) -> None:
    """Each sample makes inputs that the kernel's reference and shader agree on: otherwise nothing would be chosen."""
    attention = {"rows": 20, "kv_heads": 2, "group": 2, "dim": 8, "scale": 0.35}
    heavy = {kernel.name: kernel for kernel in REGISTRY.values() if kernel.tuning}
    given = {kernel.name: {**kernel.defaults, **constants} for kernel, constants in CALLS}
    for name in heavy.keys() - given.keys():
        keys = {"keys": 20} if "keys" in heavy[name].constants else {}
        given[name] = {**attention, **keys}
    assert given.keys() == heavy.keys()
    assert attention_forward.name in heavy
    tuner = Tuner(device, directory=tmp_path)
    for name, kernel in heavy.items():
        present = tuple(n for n in kernel.bindings if n not in ("row_scale", "a_scale", "count"))
        call = module.Dispatch(kernel, (), present, given[name], Tiling(), (1, 1, 1))
        assert tuner._is_right(call, kernel.tilings(device.capabilities, given[name])[0]), name


def test_light_kernels_are_left_alone(device: Device, tmp_path: Path) -> None:
    program = Program(device)
    program.dispatch(fill, persistent((64,), "f32", "workspace", "y"), size=64)
    assert Tuner(device, directory=tmp_path).tune([program]) == {}
    assert not list(tmp_path.iterdir())


def test_devices_and_drivers_have_files_of_their_own(device: Device, tmp_path: Path) -> None:
    path = ChoiceFile(device, tmp_path).path
    info = device.info
    try:
        device.info = replace(info, driver="another")
        assert ChoiceFile(device, tmp_path).path != path
    finally:
        device.info = info
    assert ChoiceFile(device, tmp_path).path == path


def test_a_resumed_run_keeps_its_tilings(device: Device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the cache says by then: another tiling rounds differently. The device's next job has its own."""
    monkeypatch.delenv("WGPU_LORA_NO_TUNE")
    monkeypatch.setenv("WGPU_LORA_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(Tuner, "_is_right", lambda *_: True)
    monkeypatch.setattr(Tuner, "_seconds", lambda _, call, tiling: float(tiling == tilings_of(device, call)[0]))
    args = golden_arguments(tmp_path, "qwen3", max_steps=2, save_steps=1)
    model = open_model(args.model, device, "f32")
    job = prepare_job(args, model)
    assert job.tuner()
    job.train()
    first = job.run.state.tiles
    assert all(step.tiling == tilings_of(device, step)[1] for step in heavy(job))
    assert {step.tiling for step in heavy(job)} <= set(first.values())
    shutil.rmtree(tmp_path / "cache")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-2")
    monkeypatch.setattr(Tuner, "_measure", lambda *_: pytest.fail("it was tuned again"))
    again = prepare_job(replace(args, resume=True), model)
    again.train()
    assert again.run.state.tiles == first
    assert [step.tiling for step in heavy(again)] == [step.tiling for step in heavy(job)]
    (tmp_path / "other").mkdir()
    other = prepare_job(golden_arguments(tmp_path / "other", "qwen3", max_steps=1, tune=False), model)
    other.train()
    assert other.run.state.tiles == {}
    assert all(step.tiling == tilings_of(device, step)[0] for step in heavy(other))


def tilings_of(device: Device, call: module.Dispatch) -> Sequence[Tiling]:
    return call.kernel.tilings(device.capabilities, call.constants)


def heavy(job: Job) -> list[module.Dispatch]:
    """The dispatches of a job's only training program that are tuned."""
    (bucket,) = job.session.built
    return [step for step in job.session.steps[bucket].program.dispatches if step.kernel.tuning]
