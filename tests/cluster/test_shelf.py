"""A host's shelf: copies that are complete or not there, fenced by epochs, from machines that may send anything."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wgpu_lora.cluster.facts import Copy
from wgpu_lora.cluster.node import shelf as shelf_module
from wgpu_lora.cluster.node.layout import Layout, checked_part, unit_parts
from wgpu_lora.cluster.node.listing import FileFacts, checked_listing, listing_digest, results_of
from wgpu_lora.cluster.node.shelf import PIECE, Fenced, Shelf
from wgpu_lora.cluster.node.transfer import copy_of
from wgpu_lora.errors import UserError

UNIT = "run/one"


def facts(path: str, data: bytes) -> FileFacts:
    return FileFacts(path, hashlib.sha256(data).hexdigest(), len(data))


FILES = {"adapters/one/a.safetensors": b"weights" * 999, "adapters/one/log.jsonl": b"", "pipeline/state.json": b"{}"}
LISTING = [facts(path, data) for path, data in FILES.items()]


@pytest.fixture
def shelf(tmp_path: Path) -> Shelf:
    return Shelf(Layout(tmp_path))


def fill(shelf: Shelf, files: dict[str, bytes], epoch: int = 1, step: int = 1) -> Copy:
    """Send files and commit them."""
    listing = [facts(path, data) for path, data in files.items()]
    missing, by_digest = shelf.begin(UNIT, epoch, listing), {file.digest: file for file in listing}
    for digest, have in missing.items():
        shelf.put(UNIT, epoch, by_digest[digest], have, files[by_digest[digest].path][have:])
    return shelf.commit(copy_of(UNIT, epoch, listing, {"one": step}, final=False, host="n"), listing)


def content(shelf: Shelf, copy: Copy) -> dict[str, bytes]:
    return {file.path: shelf.read(UNIT, copy.digest, file.path, 0) for file in shelf.files(UNIT, copy.digest)}


def test_a_copy_is_what_was_sent(shelf: Shelf) -> None:
    copy = fill(shelf, FILES)
    assert Shelf(shelf.layout).held(UNIT) == copy
    assert content(shelf, copy) == FILES
    assert copy.bytes == sum(map(len, FILES.values()))
    assert shelf.begin(UNIT, 1, LISTING) == {}  # all is there


def test_the_newest_copy_replaces_the_older_one_and_its_files(shelf: Shelf) -> None:
    before = fill(shelf, FILES)
    changed = {**FILES, "adapters/one/log.jsonl": b"more"}
    missing = shelf.begin(UNIT, 1, [facts(*item) for item in changed.items()])
    assert list(missing) == [hashlib.sha256(b"more").hexdigest()]
    assert shelf.held(UNIT) == before  # until the commit
    copy = fill(shelf, changed, step=2)
    assert content(shelf, copy) == changed
    with pytest.raises(UserError, match=r"has no copy .* of run/one any more: use a newer one"):
        shelf.files(UNIT, before.digest)
    assert len(list((shelf.layout.shelved(UNIT) / "blobs").iterdir())) == len(FILES)


def test_an_interrupted_copy_leaves_the_old_one_and_goes_on(shelf: Shelf) -> None:
    before, data = fill(shelf, FILES), os.urandom(PIECE + 5)
    file = facts("adapters/one/b.safetensors", data)
    shelf.begin(UNIT, 1, [*LISTING, file])
    shelf.put(UNIT, 1, file, 0, data[:PIECE])
    assert Shelf(shelf.layout).held(UNIT) == before
    assert shelf.begin(UNIT, 2, [*LISTING, file]) == {file.digest: PIECE}
    shelf.put(UNIT, 2, file, PIECE, data[PIECE:])
    listing = [*LISTING, file]
    copy = shelf.commit(copy_of(UNIT, 2, listing, {"one": 2}, final=True, host="n"), listing)
    assert shelf.read(UNIT, copy.digest, file.path, PIECE) == data[PIECE:]


def test_older_epochs_are_refused_for_ever(shelf: Shelf) -> None:
    copy = fill(shelf, FILES, epoch=2)
    assert shelf.fence(UNIT, 3) == 3
    assert shelf.fence(UNIT, 1) == 3
    for again in (shelf, Shelf(shelf.layout)):
        with pytest.raises(Fenced, match="has been placed again since epoch 2"):
            again.begin(UNIT, 2, LISTING)
        with pytest.raises(Fenced):
            again.put(UNIT, 2, LISTING[0], 0, b"x")
        with pytest.raises(Fenced):
            again.commit(copy, LISTING)
    assert fill(shelf, FILES, epoch=4).epoch == 4  # which is a fence, too
    with pytest.raises(Fenced):
        shelf.begin(UNIT, 3, LISTING)


@pytest.mark.parametrize(
    ("offset", "data", "said"),
    [
        (1, b"eights", "does not continue what"),
        (0, b"weights", "does not continue what"),  # longer than announced
        (0, b"heavy!", r"has changed on its way to .* \(its SHA-256 differs\)"),
    ],
)
def test_pieces_that_are_not_the_file(shelf: Shelf, offset: int, data: bytes, said: str) -> None:
    file = facts("a", b"weight")
    shelf.begin(UNIT, 1, [file])
    with pytest.raises(UserError, match=said):
        shelf.put(UNIT, 1, file, offset, data)
    copy = copy_of(UNIT, 1, [file], {}, final=False, host="n")
    with pytest.raises(UserError, match="a of run/one has not arrived on"):
        shelf.commit(copy, [file])
    shelf.put(UNIT, 1, file, 0, b"weight")
    with pytest.raises(UserError, match="has another list of files than announced"):
        shelf.commit(copy, [*LISTING, file])
    assert shelf.commit(copy, [file]) == shelf.held(UNIT)


@pytest.mark.parametrize(
    "path", ["../a", "/a", "a//b", "a/../b", "", ".", "a\\b", "a/\0", "a\nb", "x" * 3000, "a/" + "y" * 256]
)
def test_paths_that_lead_elsewhere(shelf: Shelf, path: str) -> None:
    with pytest.raises(UserError, match="cannot be the path of a copied file"):
        shelf.begin(UNIT, 1, [FileFacts(path, "0" * 64, 1)])


@pytest.mark.parametrize(
    "value",
    [
        None, {}, [1], [{"path": "a"}], [{"path": "a", "digest": "0" * 63, "size": 1}],
        [{"path": "a", "digest": "../" * 21 + "0", "size": 1}], [{"path": "a", "digest": "0" * 64, "size": -1}],
        [{"path": "a", "digest": "0" * 64, "size": 1 << 60}], [{"path": "a", "digest": "0" * 64, "size": True}],
        [{"path": "a", "digest": "0" * 64, "size": 1}] * 2,
        [{"path": "a", "digest": "0" * 64, "size": 1}, {"path": "a/b", "digest": "0" * 64, "size": 1}],
    ],
)  # fmt: skip
def test_listings_that_are_none(value: Any) -> None:
    with pytest.raises(UserError):
        checked_listing(value)


@pytest.mark.parametrize("unit", ["run", "../x/one", "run/..", "run/a/b", "/one", "run/", ".hidden/one", 7])
def test_units_that_are_none(unit: Any) -> None:
    with pytest.raises(UserError, match="cannot be the name of a"):
        unit_parts(unit)
    with pytest.raises(UserError):
        checked_part("a/b")


def test_a_damaged_copy_is_not_offered(shelf: Shelf) -> None:
    copy = fill(shelf, FILES)
    blob = shelf.layout.shelved(UNIT) / "blobs" / LISTING[0].digest
    blob.write_bytes(b"w" * LISTING[0].size)
    assert shelf.held(UNIT) == copy  # read once by this process
    assert Shelf(shelf.layout).held(UNIT) is None
    (shelf.layout.shelved(UNIT) / "copy.json").write_text("{")
    assert shelf.held(UNIT) is None
    assert fill(shelf, FILES, epoch=2).epoch == 2


def test_a_run_is_forgotten(shelf: Shelf) -> None:
    fill(shelf, FILES)
    shelf.layout.epoch(UNIT, 1).mkdir(parents=True)
    with pytest.raises(UserError):
        shelf.forget("../run")
    shelf.forget("run")
    assert shelf.held(UNIT) is None
    assert not list(shelf.layout.root.rglob("*one*"))


def test_results_of_a_task(shelf: Shelf) -> None:
    member = facts("adapters/one/member.json", b"{}")
    found = results_of([*LISTING, member, facts("adapters/two/log.jsonl", b"")], "one")
    assert [file.path for file in found] == ["a.safetensors", "log.jsonl"]


def test_the_digest_of_a_listing_is_of_its_content() -> None:
    assert listing_digest(LISTING) == listing_digest(LISTING[::-1])
    assert listing_digest(LISTING) != listing_digest([*LISTING[1:], facts("x", FILES["adapters/one/a.safetensors"])])


class Killed(BaseException):
    """The process ends here."""


class Steps:
    """Ends a process at the step with this number, of those that change the disk."""

    def __init__(self, last: int):
        self.left = last

    def counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            if not self.left:
                raise Killed
            self.left -= 1
            return real(*arguments, **named)

        return call


def killed(shelf: Shelf, files: dict[str, bytes], last: int) -> bool:
    """Whether sending a second copy is cut off at this step."""
    steps = Steps(last)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("write_bytes_atomic", "sync_directory", "file_digest"):
            patch.setattr(shelf_module, name, steps.counted(getattr(shelf_module, name)))
        patch.setattr(shelf_module.os, "fsync", steps.counted(os.fsync))
        patch.setattr(Path, "replace", steps.counted(Path.replace))
        patch.setattr(Path, "open", steps.counted(Path.open))
        try:
            fill(Shelf(shelf.layout), files, epoch=2, step=2)
        except Killed:
            return True
        return False


def test_a_copy_that_is_cut_off_anywhere_leaves_the_old_one_or_the_new_one(shelf: Shelf) -> None:
    before, cut = fill(shelf, FILES), 0
    changed = {**FILES, "adapters/one/log.jsonl": b"more", "new": b"new"}
    while killed(shelf, changed, cut):
        cut += 1
        found = Shelf(shelf.layout).held(UNIT)
        assert found
        assert content(shelf, found) == (FILES if found == before else changed)
        assert cut < 100
    assert cut > 5
    last = Shelf(shelf.layout).held(UNIT)
    assert last
    assert content(shelf, last) == changed


SOME = st.dictionaries(st.sampled_from("abcd"), st.binary(max_size=6), max_size=4)


@settings(max_examples=12, deadline=None)
@given(copies=st.lists(st.tuples(SOME, st.integers(1, 3)), min_size=1, max_size=6))
def test_any_order_of_copies_and_epochs(tmp_path_factory: Any, copies: Iterable[tuple[dict[str, bytes], int]]) -> None:
    shelf = Shelf(Layout(tmp_path_factory.mktemp("shelf")))
    newest, fence = None, 0
    for files, epoch in copies:
        if epoch < fence:
            with pytest.raises(Fenced):
                fill(shelf, files, epoch)
            continue
        fence, newest = epoch, (fill(shelf, files, epoch), files)
    assert newest
    held = Shelf(shelf.layout).held(UNIT)
    assert held == newest[0]
    assert content(shelf, newest[0]) == newest[1]
