"""The commands of a cluster where they refuse: one sentence, exit code 2, before anything is started."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.cluster.fake_cluster import device_facts, node_facts, snapshot, task_view

from wgpu_lora.cli.app import main
from wgpu_lora.cli.cluster.run_table import show_status
from wgpu_lora.cluster.launch import local_ray
from wgpu_lora.cluster.run_status import as_json


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(local_ray.DIRECTORY, str(tmp_path / "state"))
    monkeypatch.setenv("WGPU_LORA_CLUSTER_DIR", str(tmp_path / "cluster"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run --adapters rows.jsonl:out/a", "No cluster is named: give --address or -f cluster.toml, or --local"),
        ("run --local", "There is nothing to train"),
        ("run --local --address auto --adapters rows.jsonl:out/a", "name different clusters"),
        ("run --local --adapters rows.jsonl:out --adapters rows.jsonl:out/../out", "give each its own"),
        ("run --local --data rows.jsonl --output rows.jsonl", "is a file: choose another"),
        ("run --local --data rows.jsonl --output o --lora-r 0", "--lora-r"),
        ("run --local --data rows.jsonl --output o --join sometimes", "--join must be one of"),
        ("run --local --data rows.jsonl --output o --mirror-steps -1", "--mirror-steps"),
        ("run --local --data rows.jsonl --output o --device 1", "the cluster chooses the devices"),
        ("run --local --data rows.jsonl --output o --name ../x", "--name must be up to 64 letters"),
        ("run -f none.toml --data rows.jsonl --output o", "none.toml cannot be read"),
        ("run --address http://x --data rows.jsonl --output o", "must be auto, HOST:PORT or ray://HOST:PORT"),
        ("run --address 127.0.0.1:1 --dashboard --data rows.jsonl --output o", "--dashboard is for --local"),
        ("run --address 127.0.0.1:1 --data rows.jsonl --output o", "Nothing can be reached at 127.0.0.1:1"),
        ("attach", "No cluster is named"),
        ("attach --local", "Ray does not run on this machine"),
        ("status --address ray://127.0.0.1:1", "Nothing can be reached at ray://127.0.0.1:1"),
        ("cancel", "RUN"),
        ("cancel run --local", "Ray does not run on this machine"),
        ("release alpha:0 --local", "Ray does not run on this machine"),
        ("down", "Give either -f cluster.toml or --local"),
    ],
)
def test_refusals(words: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", *words.split()]) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert len(err.splitlines()) == 1
    assert "Traceback" not in out + err
    assert local_ray.running_ray() is None


def test_without_ray(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from wgpu_lora.cluster import cluster_connection

    monkeypatch.setattr(cluster_connection, "find_spec", lambda name: None)
    for command in ("run --local --data rows.jsonl --output o", "status", "attach", "cancel r", "release d"):
        assert main(["cluster", *command.split()]) == 2
        assert "needs Ray, which is not installed" in capsys.readouterr().err


def test_nothing_to_end(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "down", "--local"]) == 0
    assert "nothing: Ray does not run on this machine" in capsys.readouterr().out


def test_help_names_what_a_run_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cluster", "run", "--help"]) == 0
    output = capsys.readouterr().out
    for option in ("--local", "--adapters", "--eval-device", "--data-parallel", "--detach", "--help-all"):
        assert option in output
    assert main(["cluster", "run", "--help-all"]) == 0
    assert "--jobs-per-device" in capsys.readouterr().out


def test_status_shows_devices_and_runs(capsys: pytest.CaptureFixture[str]) -> None:
    facts = device_facts("10.0.0.4", free=3 << 29, leases=["5 bytes by pid 7 (finetune /x)"], speed=1234.5)
    node = node_facts("beta", facts)
    state = snapshot(task_view("a", tokens_per_second=10.0), task_view("b", "finished", fetched=True), nodes=(node,))
    state.devices[0] = type(state.devices[0])(facts, "quarantined", failures=2)
    show_status(state)
    output = capsys.readouterr().out
    assert "beta:0" in output
    assert "1.5 GiB" in output
    assert "1,234" in output
    assert "5 bytes by pid 7" in output
    assert "1 running, 1 finished" in output
    assert "cluster release beta:0' uses it again" in output
    report = json.loads(json.dumps(as_json(state)))
    assert report["devices"][0]["place"] == "beta:0"
    assert report["devices"][0]["id"] == facts.id


def test_options_without_effect_are_said(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--data none.jsonl --output o --lr-scheduler-type constant --warmup-ratio 0.1"
    for command in ("run --local", "sweep --local --param lora_r=1,2"):
        assert main(["cluster", *command.split(), *words.split()]) == 2
        output = capsys.readouterr().err
        assert "note: --warmup-ratio does nothing" in output
        assert "none.jsonl" in output
