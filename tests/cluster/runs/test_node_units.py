"""Units that train, without Ray: results are those of a run alone, wherever and however often it was interrupted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.units import Site, driven, newer, order, task

from wgpu_lora.cluster.facts import Answer, Order, Report
from wgpu_lora.cluster.node.publishing import publish
from wgpu_lora.train.run.records import RunRecord
from wgpu_lora.worker.worker import Worker


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "hosts")


def published(site: Site, node: str, unit: str, name: str, target: Path) -> RunRecord:

    shelf = site.shelf(node)
    copy = shelf.held(unit)
    assert copy
    assert copy.final
    publish(shelf, unit, copy.digest, name, str(target))
    return RunRecord.read(target)


def test_a_task_trains_and_its_results_are_in_the_shelf(site: Site, tmp_path: Path) -> None:
    given = order(task("one", tmp_path, max_steps=4), shelf="b")
    work = site.work(given)
    said = driven(work)
    assert said[0].ended is None
    assert said[-1].ended == "done"
    assert said[-1].outcomes == {"one": "finished"}
    assert said[-1].progress["one"].step == said[-1].progress["one"].total_steps == 4
    assert said[-1].progress["one"].tokens_per_second
    assert {report.progress["one"].doing for report in said} > {"waiting", "starting"}
    copies = [report.copy for report in said if report.copy]
    assert copies[-1].final
    assert copies[-1].host == "b"
    assert copies[-1].steps == {"one": 4}
    record = published(site, "b", given.unit, "one", tmp_path / "shared" / "one")
    assert record.outcome == "finished"
    assert not work.directory.exists()  # the shelf has it
    alone = {**given.tasks[0].options, "output": str(tmp_path / "alone")}
    with Worker("finetune", alone, place=tmp_path) as worker:
        worker.wait()
    assert RunRecord.read(tmp_path / "alone").adapter_sha256 == record.adapter_sha256
    files = {path.relative_to(tmp_path / "alone") for path in (tmp_path / "alone").rglob("*") if path.is_file()}
    ours = {
        path.relative_to(tmp_path / "shared/one") for path in (tmp_path / "shared/one").rglob("*") if path.is_file()
    }
    assert files - ours == {Path(".lock")}
    assert all(path.parts[0] == "checkpoints" for path in ours - files)  # more of them


def test_nothing_runs_before_the_coordinator_has_answered(site: Site, tmp_path: Path) -> None:
    given = order(task("one", tmp_path))
    work = site.work(given)
    assert driven(work, lambda report: Answer(go_on=False))[-1].ended is None
    assert not site.layout("a").unit(given.unit).exists()
    assert not work.lease.begun


def adapters(site: Site, node: str, given: Order, target: Path) -> dict[str, str]:
    """The digests of the adapters in the final copy."""
    names = [one.name for one in given.tasks]
    return {name: published(site, node, given.unit, name, target / name).adapter_sha256 for name in names}


def test_a_pipeline_that_was_killed_and_moved_ends_as_if_it_had_not_been(site: Site, tmp_path: Path) -> None:
    tasks = task("one", tmp_path, max_steps=6), task("two", tmp_path, max_steps=8, learning_rate=1e-3)
    given = order(*tasks, shelf="b")
    work = site.work(given)

    def killing(report: Report) -> Answer:
        if report.copy and work._worker:
            work._worker.process.kill()
        return Answer()

    assert driven(work, killing)[-1].ended == "killed"
    copy = site.shelf("b").held(given.unit)
    assert copy
    assert copy.steps["one"] == copy.steps["two"] < 6
    last = driven(site.work(newer(given, restore=copy.digest, restore_from="b"), "c"))[-1]
    assert last.outcomes == {"one": "finished", "two": "finished"}
    found = adapters(site, "b", given, tmp_path / "moved")
    calm = replace(given, run="calm", unit="calm/one", shelf="")
    assert driven(site.work(calm, "d"))[-1].ended == "done"
    assert adapters(site, "d", calm, tmp_path / "calm") == found
    extended = {"resume": True, "output": str(tmp_path / "moved" / "one"), "max_steps": 8, "run_log": False}
    with Worker("finetune", extended, place=tmp_path) as worker:
        assert worker.wait() == 0, worker.last
    assert RunRecord.read(tmp_path / "moved" / "one").steps == 8
