"""What hosts remove by themselves, and environments of actors."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from wgpu_lora.cluster.node.sent import Sent

from wgpu_lora.cluster.cluster_paths import Layout
from wgpu_lora.cluster.data_upload import parcel
from wgpu_lora.cluster.host_actor import KEEP_SECONDS, tidy


def _made(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    return path


def test_only_what_nobody_has_used_for_long_is_removed(tmp_path: Path) -> None:
    layout, later = Layout(tmp_path), time.time() + KEEP_SECONDS + 60
    old = [_made(layout.epoch("old/a", 1) / "run.json"), _made(layout.shelved("old/a") / "copy.json")]
    kept = [_made(layout.shelved("kept/a") / "copy.json"), _made(tmp_path / "coordinator" / "state.json")]
    for path in kept:
        os.utime(path, (later - 60, later - 60))
    rows = _made(tmp_path / "rows.jsonl")
    sent, told = Sent(layout.sent), parcel(str(rows))
    digests = sent.begin(told)
    sent.put(told.digest, *digests, 0, b"x")
    sent.commit(told)
    assert tidy(layout) == []
    os.utime(layout.sent / told.digest, (later, later))
    tidy(layout, later)
    assert not any(path.exists() for path in old)
    assert all(path.exists() for path in kept)
    assert sent.has(told.digest)  # which is a use of it
    tidy(layout, later + KEEP_SECONDS)
    assert list(layout.sent.glob("[!.]*")) == []


SAY = """
import os, sys
sys.path[:0] = sys.argv[1:]
os.environ["OMP_NUM_THREADS"] = os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as Ray does
from wgpu_lora.cluster.node.remote import own_environment
own_environment()
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
