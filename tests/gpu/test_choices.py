"""Chosen tilings: their cache on disk, their keys, and the programs that are built in them."""

from __future__ import annotations

import json
import math
import multiprocessing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tuning import product

from wgpu_lora.gpu.device import Device
from wgpu_lora.gpu.program import Arena, allocate, release
from wgpu_lora.gpu.tiling import Tiling
from wgpu_lora.gpu.tuner import Tuner
from wgpu_lora.gpu.tuning_cache import SCHEMA, ChoiceFile, Entry, bucket, choice_key
from wgpu_lora.gpu.verdicts import verdicts_of
from wgpu_lora.ops.matmul import matmul_nt


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
    both = (0.5, Tiling()), (0.25, Tiling(rows=2))
    file.add({"old": Entry("matmul_nt", "then", Tiling(), both)}, {"matmul_nt": "then"})
    assert file.read({"matmul_nt": "then"})
    assert not file.read({"matmul_nt": "now"})
    file.add({"other": Entry("matmul_nn", "now", Tiling(), both)}, {"matmul_nn": "now"})
    new = Entry("matmul_nt", "now", Tiling(rows=2), both, 1.5)
    file.add({"new": new}, {"matmul_nt": "now"})
    digests = {"matmul_nt": "now", "matmul_nn": "now"}
    assert file.read(digests).keys() == {"other", "new"}  # of kernels not asked about, all stay
    assert file.read(digests)["new"] == new


def _add(path: Path, number: int, barrier: Any) -> None:
    file = ChoiceFile.__new__(ChoiceFile)
    file.path = path
    barrier.wait()
    for i in range(10):
        file.add({f"{number}.{i}": Entry("k", "d", Tiling(rows=i + 1), ((1.0, Tiling()), (2.0, Tiling())))}, {"k": "d"})


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
