"""Checkpoints by content: whole and right on each kind of store, or an error and nothing changed."""

from __future__ import annotations

import hashlib
import sys
import uuid
from pathlib import Path
from typing import Any

import fsspec
import pytest
from support.cluster.fake_cluster import stored

from wgpu_lora.cluster import checkpoint_store
from wgpu_lora.cluster.checkpoint_store import (
    DamagedCheckpoint,
    FolderStore,
    HostStore,
    Store,
    restore_files,
    store_files,
)
from wgpu_lora.cluster.messages import StoredFile
from wgpu_lora.errors import StorageError

UNIT = "run/task"
FILES = {"adapters/task/a.bin": bytes(range(256)) * 9, "pipeline/state.json": b"{}", "copy.bin": b"{}", "empty": b""}
LISTED = stored(FILES)
DIGESTS = {file.digest for file in LISTED}


def on_disk(files: dict[str, bytes], directory: Path) -> Path:
    for path, data in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_bytes(data)
    return directory


def content(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def host_store(folder: FolderStore) -> HostStore:
    """The store of a host, with an actor's calls as plain ones."""

    def call(method: str, *arguments: Any) -> Any:
        more = [checkpoint_store.PIECE] if method == "piece" else []
        return getattr(folder, method)(*arguments, *more)

    return HostStore(call)


@pytest.fixture(params=["folder", "memory", "host"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(checkpoint_store, "PIECE", 1000)
    return str(request.param)


@pytest.fixture
def folder(kind: str, tmp_path: Path) -> FolderStore:
    """Where the files of `store` are."""
    return FolderStore(f"memory://{uuid.uuid4()}" if kind == "memory" else tmp_path / "store")


@pytest.fixture
def store(kind: str, folder: FolderStore) -> Store:
    return host_store(folder) if kind == "host" else folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return on_disk(FILES, tmp_path / "source")


def test_files_come_back_and_equal_ones_are_kept_once(
    store: Store, folder: FolderStore, source: Path, tmp_path: Path
) -> None:
    assert store.listed(UNIT) == set()
    assert store_files([store], UNIT, source, LISTED) == ([0], {0: set()})
    assert store.listed(UNIT) == DIGESTS
    assert len(DIGESTS) == len(FILES) - 1
    (source / "copy.bin").unlink()  # what is stored is not read again
    assert store_files([store], UNIT, source, LISTED) == ([0], {0: DIGESTS})
    on_disk({"old": b"other"}, tmp_path / "target")
    restore_files([store], UNIT, LISTED, tmp_path / "target")
    assert content(tmp_path / "target") == FILES
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_remove_and_forget(store: Store, source: Path) -> None:
    for unit in (UNIT, "run/other", "run-2/task"):
        store_files([store], unit, source, LISTED)
    removed = {LISTED[0].digest}
    store.remove(UNIT, removed)
    assert store.listed(UNIT) == DIGESTS - removed
    assert store.listed("run/other") == DIGESTS
    store.forget("run")
    assert store.listed(UNIT) == store.listed("run/other") == set()
    assert store.listed("run-2/task") == DIGESTS
    store.remove("never/there", removed)
    store.forget("never")


@pytest.mark.parametrize("fault", ["missing", "truncated", "other bytes"])
def test_a_damaged_file_is_taken_from_another_store_or_nothing_is_restored(
    store: Store, folder: FolderStore, source: Path, tmp_path: Path, fault: str
) -> None:
    store_files([store], UNIT, source, LISTED)
    path, (file, *_) = folder.path(UNIT, LISTED[0].digest), LISTED
    if fault == "missing":
        folder._files.rm_file(path)
    else:
        data = FILES[file.path]
        folder._files.pipe_file(path, data[:-1] if fault == "truncated" else b"x" + data[1:])
    target = on_disk({"old": b"other"}, tmp_path / "target")
    why = f"{file.path} cannot be read .*{'is missing' if fault == 'missing' else 'another digest'}"
    with pytest.raises(DamagedCheckpoint, match=why):
        restore_files([store], UNIT, LISTED, target)
    assert content(target) == {"old": b"other"}
    away = HostStore(lambda *call: (_ for _ in ()).throw(ConnectionError("it is away")))
    whole = FolderStore(tmp_path / "whole")
    store_files([whole], UNIT, source, LISTED)
    restore_files([away, store, whole], UNIT, LISTED, target)
    assert content(target) == FILES
    assert not list(tmp_path.glob(".target*"))


def test_a_path_that_leads_out_is_refused(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "store")
    data = on_disk({"x": b"x"}, tmp_path / "source")
    for path in ("../x", "/x", "a/../../x", "", "a\\..\\x", "C:x"):
        files = [StoredFile(path, hashlib.sha256(b"x").hexdigest(), 1)]
        store.write(UNIT, files[0].digest, data / "x")
        with pytest.raises(DamagedCheckpoint, match="leads elsewhere"):
            restore_files([store], UNIT, files, tmp_path / "target")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["source", "store"]


def test_pieces_that_are_not_of_the_file(tmp_path: Path) -> None:
    store, digest = FolderStore(tmp_path), LISTED[0].digest
    with pytest.raises(DamagedCheckpoint, match="came with another digest"):
        store.append(UNIT, digest, 0, b"other", 5)
    store.append(UNIT, digest, 0, b"begun by an actor that was killed", 1 << 20)
    assert digest not in store.listed(UNIT)
    data = FILES[LISTED[0].path]
    store.append(UNIT, digest, 0, data[:7], len(data))
    store.append(UNIT, digest, 7, bytes(9000), 1 << 20)  # a piece that is written again may be shorter
    store.append(UNIT, digest, 7, data[7:], len(data))
    assert Path(store.path(UNIT, digest)).read_bytes() == data
    with pytest.raises(DamagedCheckpoint, match="is missing"):
        store.piece(UNIT, "0" * 64, 0)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="writes to /dev/full")
@pytest.mark.parametrize("through_host", [False, True])
def test_a_full_disk_is_a_sentence_and_another_store_suffices(tmp_path: Path, source: Path, through_host: bool) -> None:
    folder, file = FolderStore(tmp_path / "full"), LISTED[0]
    full = host_store(folder) if through_host else folder
    part = Path(f"{folder.path(UNIT, file.digest)}.part")
    part.parent.mkdir(parents=True)
    part.symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"cannot be written to .*full.* \(No space left on device\): "):
        store_files([full], UNIT, source, [file])
    assert file.digest not in full.listed(UNIT)
    assert store_files([full, FolderStore(tmp_path / "other")], UNIT, source, [file]) == ([1], {1: set()})


def test_a_bucket_that_refuses_is_a_sentence(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **options: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(fsspec.filesystem("memory"), "put_file", refuse)
    with pytest.raises(StorageError, match=r"cannot be written to /bucket \(Permission denied\)"):
        store_files([FolderStore("memory://bucket")], UNIT, source, LISTED)
