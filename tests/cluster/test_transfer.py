"""Copies between machines: snapshots beside a trainer, pieces with digests, results in shared folders, sent data."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from support.units import Distant, Site, write_checkpoint

from wgpu_lora.cluster.node.listing import FileFacts, plain_listing, results_of
from wgpu_lora.cluster.node.options import options_here, parcels_of
from wgpu_lora.cluster.node.publishing import ROOTS, allowed_roots, publish, unreadable
from wgpu_lora.cluster.node.sent import Sent
from wgpu_lora.cluster.node.shelf import PIECE
from wgpu_lora.cluster.node.snapshot import MovedOn, Snapshots
from wgpu_lora.cluster.node.transfer import Unreachable, copy_of, fetch, same_files, send
from wgpu_lora.cluster.spec.sending import Parcel, parcel
from wgpu_lora.errors import UserError
from wgpu_lora.train.run.pipeline_state import PipelineState, write_pipeline_state

UNIT = "run/one"
REQUEST: dict[str, Any] = {"options": {}, "schedule": "", "batch_tokens": 1, "directory": "", "adapters": []}


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "hosts")


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """A unit with a task that has written four checkpoints and its best adapter."""
    run = tmp_path / "unit" / "adapters" / "one"
    for step in (1, 2, 3, 4):
        write_checkpoint(run / "checkpoints" / f"step-{step}", step, b"%d" % step)
    write_checkpoint(run / "best", 3, b"3")
    (run / "log.jsonl").write_text("{}\n")
    (run / ".lock").touch()
    (run / ".run.json.abcdefgh.tmp").touch()
    (run / "elsewhere").symlink_to("/etc/passwd")
    return tmp_path / "unit"


def paths(files: list[FileFacts]) -> set[str]:
    return {file.path for file in files}


def moved(site: Site, directory: Path, final: bool = False) -> tuple[Any, list[FileFacts]]:
    """A snapshot of a directory, sent from the host a to the shelf of b in pieces."""
    place = directory.with_name("copy")
    files, steps = Snapshots(directory).take(place, ended=final)
    copy = send(Distant(site, "b"), copy_of(UNIT, 1, files, steps, final=final, host="b"), files, place, lambda: True)
    assert copy
    return copy, files


def test_a_snapshot_has_what_a_resumed_run_needs(single: Path, tmp_path: Path) -> None:
    snapshots = Snapshots(single)
    files, steps = snapshots.take(tmp_path / "copy")
    assert steps == {"one": 4}
    assert {path.split("/")[3] for path in paths(files) if "checkpoints" in path} == {"step-3", "step-4"}
    assert {path for path in paths(files) if path.count("/") == 2} == {"adapters/one/log.jsonl"}
    assert same_files(tmp_path / "copy", files)
    assert snapshots.take(tmp_path / "copy") == (files, steps)
    every, _ = snapshots.take(tmp_path / "copy", ended=True)
    assert {path.split("/")[3] for path in paths(every) if "checkpoints" in path} == {f"step-{n}" for n in (1, 2, 3, 4)}
    with (single / "adapters/one/log.jsonl").open("a") as log:  # is written in place, so the copy must not be it
        log.write("{}\n")
    assert (tmp_path / "copy/adapters/one/log.jsonl").read_text() == "{}\n"


@pytest.mark.parametrize("name", ["checkpoints/step-4/optimizer.safetensors", "best/state.json"])
def test_a_checkpoint_that_is_not_whole_is_not_copied(single: Path, tmp_path: Path, name: str) -> None:
    (single / "adapters/one" / name).write_bytes(b"?")
    with pytest.raises(MovedOn):
        Snapshots(single).take(tmp_path / "copy")


def test_a_checkpoint_that_is_removed_meanwhile(single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = Snapshots._copy

    def removing(self: Snapshots, source: Path, target: Path) -> None:
        shutil.rmtree(single / "adapters/one/best", ignore_errors=True)
        copy(self, source, target)

    monkeypatch.setattr(Snapshots, "_copy", removing)
    with pytest.raises(MovedOn):
        Snapshots(single).take(tmp_path / "copy")


def pipeline(directory: Path, state: int, last: tuple[int, int], following: tuple[int, ...] = ()) -> Path:
    """A unit of two tasks: the steps in the state, of `last`, and of `.next`."""
    for name, step in zip(("one", "two"), last, strict=True):
        write_checkpoint(directory / "adapters" / name / "last", step)
    for name, step in zip(("one", "two"), following, strict=False):
        write_checkpoint(directory / "adapters" / name / ".next", step)
    (directory / "pipeline").mkdir()
    steps = {"one": state, "two": state}
    write_pipeline_state(directory / "pipeline", PipelineState(request=REQUEST, step=state, steps=steps))
    return directory


@pytest.mark.parametrize(
    ("state", "last", "following"),
    [(2, (2, 2), ()), (2, (2, 2), (4, 4)), (2, (2, 2), (4,)), (4, (2, 2), (4, 4)), (4, (4, 2), (0, 4))],
)
def test_a_pipeline_is_copied_at_one_step(
    tmp_path: Path, state: int, last: tuple[int, int], following: tuple[int, ...]
) -> None:
    unit = pipeline(tmp_path / "unit", state, last, following)
    files, steps = Snapshots(unit).take(tmp_path / "copy")
    assert steps == {"one": state, "two": state}
    assert {"pipeline/state.json", "adapters/two/last/state.json"} < paths(files)


def test_a_pipeline_that_moves_on_is_left_for_the_next_time(tmp_path: Path) -> None:
    unit = pipeline(tmp_path / "unit", 4, (2, 2), (4,))
    with pytest.raises(MovedOn, match="two has no checkpoint of step 4"):
        Snapshots(unit).take(tmp_path / "copy")


def test_a_unit_arrives_as_it_was_sent(site: Site, single: Path, tmp_path: Path) -> None:
    large = bytes(range(256)) * (PIECE // 256) + b"end"
    (single / "adapters/one/adapter_model.safetensors").write_bytes(large)
    copy, files = moved(site, single)
    assert copy == site.shelf("b").held(UNIT)
    shelf, calls = Distant(site, "b"), 0

    def read(file: FileFacts, offset: int) -> bytes:
        nonlocal calls
        calls += 1
        return bytes(shelf.read(UNIT, copy.digest, file.path, offset))

    fetch(files, tmp_path / "there", read)
    assert same_files(tmp_path / "there", files)
    assert calls == len(files) + 1
    assert not list(tmp_path.glob(".there*"))


def test_nothing_is_left_of_what_did_not_arrive(site: Site, single: Path, tmp_path: Path) -> None:
    copy, files = moved(site, single)

    def damaged(file: FileFacts, offset: int) -> bytes:
        return b"?" * file.size

    with pytest.raises(UserError, match=r"has changed on its way \(its SHA-256 differs\)"):
        fetch(files, tmp_path / "there", damaged)
    with pytest.raises(UserError, match="has another size than its list says"):
        fetch(files, tmp_path / "there", lambda file, offset: b"")
    site.away.add("b")
    with pytest.raises(Unreachable):
        fetch(files, tmp_path / "there", lambda file, offset: Distant(site, "b").read(UNIT, copy.digest, file.path, 0))
    assert not list(tmp_path.glob("*there*"))


def test_sending_that_is_given_up_leaves_the_older_copy(site: Site, single: Path, tmp_path: Path) -> None:
    files, steps = Snapshots(single).take(tmp_path / "copy")
    asked: list[bool] = []

    def going() -> bool:
        asked.append(True)
        return len(asked) < 5

    copy = copy_of(UNIT, 1, files, steps, final=False, host="b")
    assert send(Distant(site, "b"), copy, files, tmp_path / "copy", going) is None
    assert site.shelf("b").held(UNIT) is None


def test_results_are_published_whole_and_once(site: Site, single: Path, tmp_path: Path) -> None:
    copy, files = moved(site, single, final=True)
    shelf, target = site.shelf("b"), tmp_path / "shared" / "one"
    target.mkdir(parents=True)  # empty
    assert publish(shelf, UNIT, copy.digest, "one", str(target)) == results_of(files, "one")
    assert same_files(target, results_of(files, "one"))
    before = (target / "log.jsonl").stat()
    publish(shelf, UNIT, copy.digest, "one", str(target))
    assert (target / "log.jsonl").stat() == before
    (target / "log.jsonl").write_text("mine")
    with pytest.raises(UserError, match="exists already, with other files: move it away"):
        publish(shelf, UNIT, copy.digest, "one", str(target))
    assert (target / "log.jsonl").read_text() == "mine"
    with pytest.raises(UserError, match="has no files of two"):
        publish(shelf, UNIT, copy.digest, "two", str(tmp_path / "two"))
    gone = tmp_path / "gone"
    with pytest.raises(UserError, match="this host has no shared folder"):
        publish(shelf, UNIT, copy.digest, "one", str(gone / "one"), str(gone))
    assert not gone.exists()


def test_paths_are_confined_where_a_host_says_so(
    site: Site, single: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    inside.mkdir()
    outside.write_text("")
    (inside / "link").symlink_to(outside)
    assert unreadable(str(outside), allowed_roots()) is None
    assert unreadable(str(tmp_path / "none"), ()) == "does not exist"
    assert unreadable("relative", ()) == "is not an absolute path"
    monkeypatch.setenv(ROOTS, str(inside))
    copy, _ = moved(site, single, final=True)
    for path in (outside, inside / "link", inside / ".." / "outside"):
        assert "which WGPU_LORA_CLUSTER_ROOTS allows" in str(unreadable(str(path), allowed_roots()))
        with pytest.raises(UserError, match=r"data .* is outside"):
            options_here({"data": str(path)}, site.layout("a"))
        with pytest.raises(UserError, match="The result of one cannot be written"):
            publish(site.shelf("b"), UNIT, copy.digest, "one", str(path))
    publish(site.shelf("b"), UNIT, copy.digest, "one", str(inside / "one"))
    given = {"data": str(inside / "rows.jsonl"), "model": "owner/name", "lora_r": 4}
    assert options_here(given, site.layout("a")) == given
    for value in ("none/../../outside", "rows.jsonl"):  # of whatever directory the process is in
        with pytest.raises(UserError, match="is not an absolute path: use a path that this host allows"):
            options_here({"model": value}, site.layout("a"))


@pytest.mark.parametrize("roots", ["", "/tmp"])
def test_home_directories_are_not_looked_into(site: Site, monkeypatch: pytest.MonkeyPatch, roots: str) -> None:
    monkeypatch.setenv(ROOTS, roots)
    for name, value in (("model", "~/x"), ("teacher", "~root/x"), ("data", "~")):
        with pytest.raises(UserError, match=f"{name} {value} begins with '~'"):
            options_here({name: value}, site.layout("a"))


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    folder = tmp_path / "rows"
    (folder / "deep").mkdir(parents=True)
    (folder / "train.jsonl").write_bytes(b"row\n" * (PIECE // 4 + 1))
    (folder / "deep" / "test.jsonl").write_bytes(b"")
    return folder


def put(sent: Sent, what: Parcel, folder: Path, most: int = 99) -> None:
    """Send pieces of what is missing, at most so many."""
    files = {file.digest: file for file in what.files}
    for digest, have in sent.begin(what).items():
        data = (folder.parent / files[digest].path).read_bytes()
        for offset in range(have, max(len(data), 1), PIECE):
            if not most:
                return
            sent.put(what.digest, digest, offset, data[offset : offset + PIECE])
            most -= 1


def test_data_that_only_the_driver_has(site: Site, rows: Path) -> None:
    sent, what = Sent(site.layout("a").sent), parcel(str(rows))
    put(sent, what, rows, most=2)
    with pytest.raises(UserError, match="has not arrived as it was sent: send it again"):
        sent.commit(what)
    assert not sent.has(what.digest)
    put(sent, what, rows)
    place = sent.commit(what)
    assert sorted(path.read_bytes() for path in place.rglob("*.jsonl")) == [b"", (rows / "train.jsonl").read_bytes()]
    assert sent.begin(what) == {}
    assert sent.commit(what) == place
    assert sent.parcel(what.digest) == what
    assert parcels_of({"data": what.value, "lora_r": 4}) == [what.digest]
    assert options_here({"data": what.value}, site.layout("a")) == {"data": str(place)}
    assert sent.read(what.digest, "rows/train.jsonl", PIECE) == b"row\n"
    with pytest.raises(UserError, match=r"have no file '../x': ask for one of their list"):
        sent.read(what.digest, "../x", 0)
    for digest in ("0" * 64, "../" + "0" * 61):
        with pytest.raises(UserError):
            sent.parcel(digest)
    with pytest.raises(UserError):
        sent.begin(Parcel("0" * 64, what.name, what.files))
    assert plain_listing([]) == []
