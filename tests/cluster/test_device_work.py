"""A unit on a device: what it reports, what its copies hold, and how it ends. Without Ray, and without a trainer.

tests/cluster/runs has those that train.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.units import FAKE, Site, driven, fake_task, newer, order

from wgpu_lora.cluster.facts import Answer, Order, Report
from wgpu_lora.cluster.node import publishing
from wgpu_lora.cluster.node import shelf as shelf_module
from wgpu_lora.cluster.node.lease import boot_time
from wgpu_lora.cluster.node.publishing import publish
from wgpu_lora.cluster.node.snapshot import MovedOn
from wgpu_lora.cluster.node.work import Work
from wgpu_lora.cluster.node.works import Works
from wgpu_lora.errors import UserError


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "hosts")


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.time = 1000.0

    def __call__(self) -> float:
        return self.time


def until(work: Work, true: Callable[[Report], Any], sent: Callable[[], float] = boot_time) -> Report:
    """Exchange reports until one is as wanted."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        report, now = work.report(), sent()
        work.answered(report, now, Answer())
        if true(report):
            return report
        time.sleep(0.02)
    raise AssertionError(report)


def test_a_unit_moves_and_goes_on_from_its_copy(site: Site, tmp_path: Path) -> None:
    given = order(fake_task("one", tmp_path, steps=9, leave=7), shelf="c")
    said = driven(site.work(given, "a", program=FAKE))
    assert (said[-1].ended, said[-1].outcomes) == ("failed", {})
    copy = site.shelf("c").held(given.unit)
    assert copy
    assert (copy.steps, copy.final) == ({"one": 6}, False)
    assert (own := site.shelf("a").held(given.unit))  # should c be lost before it is resumed
    assert own.digest == copy.digest
    assert {file.path for file in site.shelf("c").files(given.unit, copy.digest)} > {
        f"adapters/one/checkpoints/step-{step}/state.json" for step in (4, 6)
    }
    moved = newer(given, tasks=[fake_task("one", tmp_path, steps=9)], restore=copy.digest, restore_from="c")
    said = driven(site.work(moved, "b", program=FAKE))
    assert said[-1].ended == "done"
    steps = [report.progress["one"].step for report in said]
    assert steps == sorted(steps)
    copy = site.shelf("c").held(given.unit)
    assert copy
    assert (copy.steps, copy.final, copy.epoch) == ({"one": 9}, True, 2)
    log = site.shelf("c").read(given.unit, copy.digest, "adapters/one/log.jsonl", 0)
    assert [json.loads(line)["step"] for line in log.splitlines()][-3:] == [7, 8, 9]


def test_a_lease_that_ran_out_ends_the_process_and_its_copies(site: Site, tmp_path: Path) -> None:
    clock = Clock()
    given = order(fake_task("one", tmp_path, steps=10_000, pace=0.05))
    work = site.work(given, program=FAKE, now=clock)
    until(work, lambda report: report.copy, clock)
    process = work._worker.process if work._worker else None
    assert process
    clock.time += given.lease - 1
    assert not work.expired()
    clock.time += 2
    with suppress(MovedOn):  # one that was being made has ended then, with or without success
        assert not work.copies.copy()
    held = site.shelf("a").held(given.unit)
    assert held
    assert work.expired()
    assert work.join(20)
    assert process.poll() is not None
    assert work.report().ended == "killed"
    assert not work.copies.copy(ended=True)
    assert site.shelf("a").held(given.unit) == held
    assert not work.directory.exists()


def test_without_mirror_steps_only_results_are_copied(site: Site, tmp_path: Path) -> None:
    given = replace(order(fake_task("one", tmp_path, steps=9), shelf="c"), mirror_steps=0)
    copies = [report.copy for report in driven(site.work(given, "a", program=FAKE)) if report.copy]
    assert copies
    assert all(copy.final for copy in copies)


def test_copies_stay_on_the_host_while_the_other_one_is_away(site: Site, tmp_path: Path) -> None:
    site.away.add("b")
    said = driven(site.work(order(fake_task("one", tmp_path), shelf="b"), program=FAKE))
    copies = [report.copy for report in said if report.copy]
    assert said[-1].ended == "done"
    assert copies[-1].host == "a"
    assert "on its own host alone: b does not answer" in said[-1].said


def test_a_disk_that_refuses_does_not_stop_training(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shelf_module.shutil, "disk_usage", lambda place: SimpleNamespace(free=0))
    given = order(fake_task("one", tmp_path, pace=0.05))
    work = site.work(given, program=FAKE)
    report = until(work, lambda report: report.progress["one"].step == 6 and "copy needs" in report.said)
    assert report.ended is None  # the results wait for room
    monkeypatch.undo()
    assert driven(work)[-1].ended == "done"
    assert site.shelf("a").held(given.unit)


def test_a_cancelled_unit_leaves_what_it_can_be_resumed_from(site: Site, tmp_path: Path) -> None:
    given = order(fake_task("one", tmp_path, steps=10_000, pace=0.02))
    said = driven(site.work(given, program=FAKE), lambda r: Answer(cancel=r.progress["one"].step > 2))
    assert (said[-1].ended, said[-1].outcomes) == ("stopped", {})
    copy = site.shelf("a").held(given.unit)
    assert copy
    assert copy.final
    assert copy.steps["one"] == said[-1].progress["one"].step > 2


def test_a_task_that_is_asked_to_end_has_results(site: Site, tmp_path: Path) -> None:
    given = order(fake_task("one", tmp_path, steps=10_000, pace=0.02))
    said = driven(site.work(given, program=FAKE), lambda r: Answer(end=["one"] if r.progress["one"].step > 2 else []))
    assert (said[-1].ended, said[-1].outcomes) == ("done", {"one": "stopped"})


@pytest.mark.parametrize(
    ("kind", "ended"),
    [("UserError", "refused"), ("OutOfDeviceMemory", "no room"), ("DeviceLost", "failed"), ("StorageError", "failed")],
)
def test_errors_that_another_device_may_mend(site: Site, tmp_path: Path, kind: str, ended: str) -> None:
    last = driven(site.work(order(fake_task("one", tmp_path, error=kind)), program=FAKE))[-1]
    assert (last.ended, last.said) == (ended, "It is as it is.")


def test_a_device_that_is_not_there_any_more(site: Site, tmp_path: Path) -> None:
    work = site.work(order(fake_task("one", tmp_path)), program=FAKE)
    work._index = lambda: None
    assert driven(work)[-1].said == "The device is not there any more."


def test_a_newer_epoch_ends_the_older_one_on_the_same_device(site: Site, tmp_path: Path) -> None:
    made: list[Work] = []

    def make(given: Order) -> Work:
        made.append(site.work(given, program=FAKE))
        return made[-1]

    works = Works(make, lambda report: Answer())
    given = order(fake_task("one", tmp_path, steps=10_000, pace=0.02))
    try:
        works.start(given)
        end = time.monotonic() + 30
        while not (held := site.shelf("a").held(given.unit)) and time.monotonic() < end:
            time.sleep(0.05)
        assert held
        works.start(given)  # the same again
        assert len(made) == 1
        works.start(newer(given, restore=held.digest))
        assert made[0].join(0)
        with pytest.raises(UserError, match="has been placed again since epoch 1: that order is void"):
            works.start(given)
        assert works.units() == {given.unit: 2}
    finally:
        works.close()
    assert all(work.join(10) for work in made)
    assert works.units() == {}


def test_a_copy_that_is_out_of_reach_is_no_fault_of_the_device(site: Site, tmp_path: Path) -> None:
    site.away.add("b")
    given = order(fake_task("one", tmp_path), restore="0" * 64, restore_from="b")
    last = driven(site.work(given, program=FAKE))[-1]
    assert (last.ended, last.said) == ("killed", "What the job needs is on a host that is away: b does not answer.")


@pytest.mark.parametrize("damage", ["missing", "changed", "forgotten"])
def test_a_damaged_copy_is_no_fault_of_the_device(site: Site, tmp_path: Path, damage: str) -> None:
    given = order(fake_task("one", tmp_path), shelf="b")
    driven(site.work(given, program=FAKE))
    copy = site.shelf("b").held(given.unit)
    assert copy
    place = site.layout("b").shelved(given.unit)
    weights = max((place / "blobs").iterdir(), key=lambda path: path.stat().st_size)
    if damage == "missing":
        weights.unlink()
    elif damage == "changed":
        weights.write_bytes(bytes(weights.stat().st_size))
    else:
        site.shelf("b").forget("run")
    again = newer(given, restore=copy.digest, restore_from="b")
    for node in ("a", "b"):  # from another host, and from the same
        last = driven(site.work(again, node, program=FAKE))[-1]
        assert last.ended == "no copy", last


def test_copies_stay_on_the_host_while_the_other_ones_disk_is_full(site: Site, tmp_path: Path) -> None:
    full = site.layout("b").shelved("run/one")
    full.parent.mkdir(parents=True)
    full.write_text("no directory")
    last = driven(site.work(order(fake_task("one", tmp_path), shelf="b"), program=FAKE))[-1]
    assert last.ended == "done"
    assert last.said.startswith("max steps The checkpoint was copied on its own host alone: ")
    assert site.shelf("a").held("run/one")


def test_the_last_copy_is_where_results_belong(site: Site, tmp_path: Path) -> None:
    given = order(fake_task("one", tmp_path), shelf="b", results="a")
    said = driven(site.work(given, program=FAKE))
    hosts = [report.copy.host for report in said if report.copy]
    assert hosts[-1] == "a"
    assert site.shelf("a").held(given.unit) == next(report.copy for report in reversed(said) if report.copy)


def test_a_result_that_is_published_twice_at_once_is_whole(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = order(fake_task("one", tmp_path))
    driven(site.work(given, program=FAKE))
    shelf = site.shelf("a")
    copy = shelf.held(given.unit)
    assert copy
    running: list[int] = []
    fetch = publishing.fetch

    def slow(*arguments: Any, **named: Any) -> None:
        running.append(1)
        assert len(running) == 1
        time.sleep(0.1)
        fetch(*arguments, **named)
        running.pop()

    monkeypatch.setattr(publishing, "fetch", slow)
    with ThreadPoolExecutor(3) as pool:  # a coordinator that was killed meanwhile, and the next one
        asked = [pool.submit(publish, shelf, given.unit, copy.digest, "one", str(tmp_path / "out")) for _ in range(3)]
        assert len({len(one.result()) for one in asked}) == 1
    assert (tmp_path / "out" / "log.jsonl").is_file()
