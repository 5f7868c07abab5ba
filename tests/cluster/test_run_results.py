"""Results on the driver's machine: whole and right, or not there."""

from __future__ import annotations

from pathlib import Path

import pytest
from filelock import FileLock
from support.fake_cluster import DIGEST, UNIT, FakeCluster, listing
from wgpu_lora.cluster.client import fetch as module

from wgpu_lora.cluster.cluster_connection import ClusterGone
from wgpu_lora.cluster.run_results import fetch, fetch_ended, result_of
from wgpu_lora.errors import UserError
from wgpu_lora.strict_json import to_json
from wgpu_lora.track.run_log import RunLog, now

FILES = {"adapter_model.safetensors": bytes(range(256)) * 10, "checkpoints/step-1/state.json": b"{}", "empty": b""}


@pytest.fixture(autouse=True)
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 1000)


def cluster(**more: object) -> FakeCluster:
    return FakeCluster(files={"a": dict(FILES)}, **more)  # type: ignore[arg-type]


def result(files: dict[str, bytes] = FILES) -> module.Result:
    return result_of({"task": "a", "unit": UNIT, "digest": DIGEST, "host": "h", "files": listing(files)})


def content(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_a_result_arrives_in_pieces(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    assert fetch(cluster(), result(), str(tmp_path / "new/out"), lambda *at: told.append(at))
    assert content(tmp_path / "new/out") == FILES
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]  # nothing hidden is left
    total = sum(map(len, FILES.values()))
    assert told[0] == (1000, total)
    assert told[-1] == (total, total)


def test_an_interrupted_one_goes_on(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with pytest.raises(ClusterGone):
        fetch(cluster(breaks_after=3), result(), str(output))
    assert not output.exists()
    again = cluster()
    hidden = tmp_path / ".out.fetching"
    (hidden / "left").mkdir()
    (hidden / "left/over").write_text("of another attempt")
    assert fetch(again, result(), str(output))
    assert content(output) == FILES
    read = [call[4] for call in again.calls if call[1] == "read"]
    assert read == ["adapters/a/checkpoints/step-1/state.json"]  # the large file was complete


def test_a_file_with_other_bytes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"adapter_model.safetensors of a came with another digest"):
        fetch(cluster(damaged={"adapter_model.safetensors"}), result(), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_what_is_there_is_kept(tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert fetch(cluster(), result(), str(output))
    once = cluster()
    assert fetch(once, result(), str(output))
    assert not once.calls  # the same result
    (output / "empty").write_text("changed")
    with pytest.raises(UserError, match="holds something else than the result of a"):
        fetch(cluster(), result(), str(output))
    assert (output / "empty").read_text() == "changed"


@pytest.mark.parametrize("kind", ["file", "link"])
def test_nothing_else_is_replaced(tmp_path: Path, kind: str) -> None:
    output = tmp_path / "out"
    (tmp_path / "elsewhere").mkdir()
    if kind == "file":
        output.write_text("mine")
    else:
        output.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="holds something else"):
        fetch(cluster(), result(), str(output))
    assert not list((tmp_path / "elsewhere").iterdir())


def test_an_empty_directory_may_be_there(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert fetch(cluster(), result(), str(tmp_path / "out"))
    assert content(tmp_path / "out") == FILES


def test_two_drivers_do_not_write_at_once(tmp_path: Path) -> None:
    with FileLock(tmp_path / ".out.fetching.lock"):
        assert not fetch(cluster(), result(), str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", ["../a", "/etc/passwd", "a/../../b", "a//b", ""])
def test_names_do_not_lead_out(path: str) -> None:
    with pytest.raises(UserError):
        result({path: b"x"})


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"The result of a cannot be written to .*: mend that, and attach again"):
        fetch(cluster(), result(), str(tmp_path / "file/out"))


def test_the_coordinator_hears_what_is_here(tmp_path: Path) -> None:
    both = FakeCluster(files={"a": dict(FILES), "b": {"x": b"1"}})
    (tmp_path / "b").write_text("in the way")
    found = fetch_ended(both, "r", {"a": str(tmp_path / "a"), "b": str(tmp_path / "b")})
    assert found.done == both.fetched == {"a"}
    assert "holds something else" in found.wrong["b"]


def test_the_run_log_says_where_a_result_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WGPU_LORA_DATA_DIR", str(tmp_path / "log"))
    monkeypatch.delenv("WGPU_LORA_NO_RUN_LOG", raising=False)
    log = RunLog()
    log.append({"id": "20261123-a", "date": now(), "kind": "finetune", "name": "n", "outputs": ["/cluster/epoch-1"]})
    files = {"a": "20261123-a", "b": "another machine's", "c": "20261123-a\n"}
    found = FakeCluster(files={task: {"tracking.json": to_json({"id": name}).encode()} for task, name in files.items()})
    assert not fetch_ended(found, "r", {task: str(tmp_path / task) for task in files}).wrong
    (entry,) = log.read().entries
    assert entry.outputs == [str(tmp_path / "a")]
    assert len(log.path.read_text().splitlines()) == 2
