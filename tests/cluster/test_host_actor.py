"""What hosts remove by themselves, and the environment of actors."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from wgpu_lora.cluster.actors.host_actor import KEEP_SECONDS, remove_old_files
from wgpu_lora.cluster.checkpoint_store import FolderStore, store_files
from wgpu_lora.cluster.cluster_paths import ROOT, checkpoints_directory, cluster_root, sent_directory, unit_directory
from wgpu_lora.cluster.data_upload import parcel, place_parcel


def _create(path: Path, changed: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    os.utime(path, (changed, changed))
    os.utime(path.parent, (changed, changed))
    return path


def test_only_what_nobody_has_used_for_long_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ROOT, str(tmp_path / "host"))
    now = time.time()
    long_ago, store = now - KEEP_SECONDS - 60, FolderStore(checkpoints_directory())
    rows = _create(tmp_path / "rows.jsonl", now)
    sent = parcel(rows)
    store_files([store], sent.unit, tmp_path, sent.files)
    old = [
        _create(unit_directory("old/a") / "generation-1/run.json", long_ago),
        _create(Path(store.path("old/a", "0" * 64)), long_ago),
        _create(sent_directory() / "unused" / "rows.jsonl", long_ago),
    ]
    for path in old[:2]:
        os.utime(path.parents[1], (long_ago, long_ago))
    os.utime(unit_directory("old/a").parent, (long_ago, long_ago))
    paths = [
        _create(unit_directory("kept/a") / "generation-1/run.json", now),
        _create(cluster_root() / "controller/state.json", long_ago),
        place_parcel([store], sent),
    ]
    os.utime(paths[-1].parent, (long_ago, long_ago))
    assert place_parcel([], sent) == paths[-1]  # which is a use of it
    removed = remove_old_files(now)
    assert not any(path.exists() for path in old)
    assert all(path.exists() for path in paths)
    assert len(removed) == len(old)
    remove_old_files(now + 2 * KEEP_SECONDS)
    assert [path.exists() for path in paths] == [False, True, False]


SAY = """
import os, sys
sys.path[:0] = sys.argv[1:]
os.environ["OMP_NUM_THREADS"] = os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as Ray does
from wgpu_lora.cluster.actors.host_actor import reset_environment
reset_environment()
print(os.environ.get("OMP_NUM_THREADS"), os.environ.get("CUDA_VISIBLE_DEVICES"))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the environment of its parent")
def test_actors_have_the_environment_of_who_started_ray() -> None:
    pytest.importorskip("ray")
    parent = "import subprocess, sys; sys.exit(subprocess.run([sys.executable, '-c', *sys.argv[1:]]).returncode)"
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    env.pop("CUDA_VISIBLE_DEVICES", None)
    argv = [sys.executable, "-c", parent, SAY, *sys.path]
    assert subprocess.run(argv, env=env, capture_output=True, text=True, check=True).stdout.split() == ["1", "None"]
