"""Paths as nodes have them, and data that are sent."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from wgpu_lora.cluster.checkpoint_store import DamagedCheckpoint, FolderStore
from wgpu_lora.cluster.cluster_paths import NODE_PATHS, ROOT, node_paths, on_node, sent_directory
from wgpu_lora.cluster.data_upload import parcel, place_parcel, send_data
from wgpu_lora.cluster.messages import Parcel, Task, from_plain
from wgpu_lora.errors import UserError


def test_folders_that_a_node_has_elsewhere() -> None:
    paths = node_paths({NODE_PATHS: json.dumps({"/mnt": "/m", "/mnt/lab": "/data"})})
    options = {"data": "/mnt/lab/a.jsonl", "model": "Qwen/Qwen3-0.6B", "eval_data": "/mnt/labs/v", "lora_r": 3}
    actual = on_node({**options, "init_adapter": None}, paths, Path("/sent"))
    assert actual == {**options, "data": "/data/a.jsonl", "eval_data": "/m/labs/v", "init_adapter": None}
    assert node_paths({}) == {}
    for wrong in ("[]", "{", '{"a": 3}', "[" * 100_000):
        with pytest.raises(UserError, match="must be a JSON object"):
            node_paths({NODE_PATHS: wrong})


def test_data_are_sent_by_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROOT, str(tmp_path / "host"))
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "train.jsonl").write_text("a\n")
    (folder / "valid.jsonl").write_text("b\n")
    (tmp_path / "one.jsonl").write_text("a\n")
    whole, single = parcel(str(folder)), parcel(str(tmp_path / "one.jsonl"))
    assert [file.path for file in whole.files] == ["rows/train.jsonl", "rows/valid.jsonl"]
    assert whole.files[0].digest == single.files[0].digest
    assert from_plain(Parcel, json.loads(json.dumps(asdict(whole)))) == whole
    assert parcel(str(folder)) == whole
    tasks = [Task("a", {"data": str(folder), "model": str(folder), "lora_r": 1}, "/o/a")]
    host = FolderStore(tmp_path / "host/checkpoints")
    (sent,), parcels = send_data([(host, "h")], tasks, [str(folder), "/elsewhere"])
    assert parcels == {str(folder): whole}
    assert sent.options["model"] == str(folder)  # only data are sent
    there = on_node(sent.options, {}, sent_directory())["data"]
    for _ in range(2):  # what is there stays
        assert str(place_parcel([host], whole)) == there
    assert [(Path(there) / file).read_text() for file in ("train.jsonl", "valid.jsonl")] == ["a\n", "b\n"]
    with pytest.raises(DamagedCheckpoint, match=r"one\.jsonl cannot be read"):
        place_parcel([], single)
    assert not (sent_directory() / single.digest).exists()
    (folder / "train.jsonl").write_text("c\n")
    assert parcel(str(folder)).digest != whole.digest


def test_what_is_not_sent(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="has no files to send"):
        parcel(str(tmp_path))
    with pytest.raises(UserError, match="cannot be read"):
        parcel(str(tmp_path / "none"))
    (tmp_path / "a").write_text("abc")
    for name, target, what in (("folder", tmp_path.parent, "a link to a folder"), ("gone", "nowhere", "no file")):
        (tmp_path / name).symlink_to(target)
        with pytest.raises(UserError, match=f"{name} is {what}.*, which is not sent: "):
            parcel(str(tmp_path))
        (tmp_path / name).unlink()
    (tmp_path / "link").symlink_to("a")
    assert [file.digest for file in parcel(str(tmp_path)).files] == [parcel(str(tmp_path / "a")).files[0].digest] * 2
    for names in (("odd\\name",), ("x", "X")):
        folder = tmp_path / f"{len(names)}"
        folder.mkdir()
        for name in names:
            (folder / name).touch()
        with pytest.raises(UserError, match="cannot be sent: names of files must be plain"):
            parcel(folder)
    with pytest.raises(UserError, match="has 3 bytes in 1 files, too much to send"):
        parcel(str(tmp_path / "a"), max_bytes=2)


@pytest.mark.parametrize("value", ["sent:xyz/a", f"sent:{'0' * 64}/..", f"sent:{'0' * 64}/a/b", f"sent:{'0' * 64}/"])
def test_wrong_names_of_what_was_sent_stay_texts(value: str) -> None:
    assert on_node({"data": value}, {}, Path("/sent")) == {"data": value}
