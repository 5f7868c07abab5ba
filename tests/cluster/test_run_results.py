"""Results on the driver's machine: whole and right, or not there."""

from __future__ import annotations

from pathlib import Path

import pytest
from filelock import FileLock
from support.cluster.fake_cluster import UNIT, FakeCluster, stored

from wgpu_lora.cluster import checkpoint_store
from wgpu_lora.cluster.cluster_connection import ClusterGone
from wgpu_lora.cluster.run_status import fetch_results
from wgpu_lora.cluster.task_outputs import fetch
from wgpu_lora.errors import UserError
from wgpu_lora.files.json_files import to_json
from wgpu_lora.train.track.run_log import RunLog, now

FILES = {"adapter_model.safetensors": bytes(range(256)) * 10, "checkpoints/step-1/state.json": b"{}", "empty": b""}


@pytest.fixture(autouse=True)
def pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_store, "PIECE", 1000)


def cluster(**more: object) -> FakeCluster:
    return FakeCluster(files={"a": dict(FILES)}, **more)  # type: ignore[arg-type]


def brought(source: FakeCluster, output: Path) -> bool:
    return fetch([source.store("id-h")], UNIT, "a", stored(FILES), output)


def results(source: FakeCluster, outputs: dict[str, Path]) -> dict[str, str | None]:
    return fetch_results(source, "r", {task: str(path) for task, path in outputs.items()}, lambda task: None)  # type: ignore[arg-type]


def content(directory: Path) -> dict[str, bytes]:
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_a_result_arrives_in_pieces(tmp_path: Path) -> None:
    source = cluster()
    assert brought(source, tmp_path / "new/out")
    assert content(tmp_path / "new/out") == FILES
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["out"]  # nothing hidden is left
    assert [call[4] for call in source.calls[:4]] == [0, 1000, 2000, 2560]


def test_an_interrupted_one_is_brought_again(tmp_path: Path) -> None:
    with pytest.raises(ClusterGone):
        brought(cluster(breaks_after=3), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert brought(cluster(), tmp_path / "out")
    assert content(tmp_path / "out") == FILES
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("fault", "message"), [("damaged", "it has another digest"), ("absent", "is missing")], ids=["damaged", "absent"]
)
def test_an_incomplete_result_is_refused(tmp_path: Path, fault: str, message: str) -> None:
    source = cluster(**{fault: {"adapter_model.safetensors"}})
    with pytest.raises(
        UserError, match=rf"result of a came incompletely .*adapter_model\.safetensors .*{message}.*: attach"
    ):
        brought(source, tmp_path / "out")
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_what_is_there_is_kept(tmp_path: Path) -> None:
    output = tmp_path / "out"
    assert brought(cluster(), output)
    once = cluster()
    assert brought(once, output)
    assert not once.calls  # the same result
    (output / "empty").write_text("changed")
    with pytest.raises(UserError, match="holds something else than the result of a"):
        brought(cluster(), output)
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
        brought(cluster(), output)
    assert not list((tmp_path / "elsewhere").iterdir())


def test_an_empty_directory_may_be_there(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    assert brought(cluster(), tmp_path / "out")
    assert content(tmp_path / "out") == FILES


def test_two_drivers_do_not_write_at_once(tmp_path: Path) -> None:
    with FileLock(tmp_path / ".out.lock"):
        assert not brought(cluster(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("path", ["../a", "/etc/passwd", "a/../../b", "a//b", "", "a\\..\\b", "C:a"])
def test_names_do_not_lead_out(tmp_path: Path, path: str) -> None:
    source = FakeCluster(files={"a": {path: b"x"}})
    with pytest.raises(UserError, match="which leads elsewhere"):
        fetch([source.store("id-h")], UNIT, "a", stored({path: b"x"}), tmp_path / "in/out")
    assert not source.calls
    assert not [*tmp_path.rglob("*")]


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"The result of a cannot be written to .*: mend that, and attach again"):
        brought(cluster(), tmp_path / "file/out")


def test_the_controller_is_told_what_is_here(tmp_path: Path) -> None:
    fake = FakeCluster(files={"a": dict(FILES), "b": {"x": b"1"}})
    (tmp_path / "b").write_text("in the way")
    outcomes = results(fake, {"a": tmp_path / "a", "b": tmp_path / "b"})
    assert fake.fetched == {"a"}
    assert outcomes["a"] is None
    assert "holds something else" in str(outcomes["b"])


def test_the_run_log_says_where_a_result_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WGPU_LORA_DATA_DIR", str(tmp_path / "log"))
    monkeypatch.delenv("WGPU_LORA_NO_RUN_LOG", raising=False)
    log = RunLog()
    log.append({"id": "20261123-a", "date": now(), "kind": "finetune", "name": "n", "outputs": ["/cluster/epoch-1"]})
    files = {"a": "20261123-a", "b": "another machine's", "c": "20261123-a\n"}
    fake = FakeCluster(files={task: {"tracking.json": to_json({"id": name}).encode()} for task, name in files.items()})
    assert set(results(fake, {task: tmp_path / task for task in files}).values()) == {None}
    (entry,) = log.read().entries
    assert entry.outputs == [str(tmp_path / "a")]
    assert len(log.path.read_text().splitlines()) == 2
