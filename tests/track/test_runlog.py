"""runs.jsonl: appended under a lock, mended, folded, and never rewritten."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from wgpu_lora.cli import console
from wgpu_lora.cli.app import main
from wgpu_lora.errors import TrackingWarning, UserError
from wgpu_lora.train.run.run_tracking import with_log
from wgpu_lora.train.track import run_log
from wgpu_lora.train.track.run_log import DataFile, Losses, Process, RunEntry, RunLog, facts_of, run_name
from wgpu_lora.train.track.run_log_tables import Filter, cells, compared, find, markdown, since
from wgpu_lora.train.track.run_recorder import Recording, note_failure, recorded, remarks
from wgpu_lora.train.track.secret_masking import MASK, masked

runs = import_module("wgpu_lora.cli.runs")  # the package has the command by this name


@pytest.fixture(autouse=True)
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunLog:
    monkeypatch.setenv("WGPU_LORA_DATA_DIR", str(tmp_path))
    monkeypatch.delenv("WGPU_LORA_NO_RUN_LOG", raising=False)
    return RunLog()


def entry(number: int = 0, **changes: object) -> RunEntry:
    values: dict[str, object] = {"id": f"2026-{number:02}aa", "date": f"2026-01-{number + 1:02}T00:00:00Z"}
    return RunEntry(**{**values, "kind": "finetune", "name": "nf4_lora_sft_f32", "objective": "sft", **changes})


def test_a_later_line_changes_a_run(log: RunLog) -> None:
    with recorded("finetune", "nf4_lora_sft_f32", goal="why", config={"lora_r": 4}) as record:
        (running,) = log.read().entries
        record["losses"] = Losses("training", 2.0, 0.5, 1.0)
    first = log.path.read_bytes().splitlines()[0]
    (entry,) = log.read().entries
    assert running.status == "running"
    assert (entry.status, entry.goal, entry.config, entry.improvement) == ("finished", "why", {"lora_r": 4}, 50.0)
    assert entry.ended
    assert entry.process == Process.current()
    assert json.loads(first)["recorded"] == "running"  # history stays


def test_how_a_run_ended(log: RunLog) -> None:
    for error in (UserError("no --token abcdefgh"), KeyboardInterrupt()):
        with pytest.raises(type(error)), recorded("bench", "x"):
            raise error
    with recorded("bench", "x") as record:
        note_failure(record, ["added_share is 0.3", "x"])
    ends = [(item.status, item.error) for item in log.read().entries]
    assert ends[::2] == [("failed", "no --token ***"), ("failed", "added_share is 0.3; x")]
    assert ends[1][0] == "interrupted"


@pytest.mark.parametrize(
    "torn", [b"", b'{"id": "20', b"\xff\xfe", b'{"id": 3}', b"[1]", '{"id": "\u00e4'.encode()[:-1]]
)
def test_a_torn_line_costs_only_itself(log: RunLog, torn: bytes) -> None:
    log.append(facts_of(entry(0)))
    before = log.path.read_bytes() + torn if torn else log.path.read_bytes().rstrip(b"\n")
    log.path.write_bytes(before)
    log.append(facts_of(entry(1)))
    assert log.path.read_bytes().startswith(before)  # never rewritten
    contents = log.read()
    assert [item.id for item in contents.entries] == [entry(0).id, entry(1).id]
    assert contents.damaged == bool(torn)


def test_written_by_many_at_once(log: RunLog) -> None:
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: RunLog().append(facts_of(entry(number))), range(24)))
    assert (len(log.read().entries), log.read().damaged) == (24, 0)


def test_a_full_disk_leaves_no_half_line(log: RunLog, monkeypatch: pytest.MonkeyPatch) -> None:
    log.append(facts_of(entry(0)))
    before = log.path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("wgpu_lora.train.track.run_log.os.fsync", full)
    with pytest.warns(TrackingWarning, match="No space left"):  # once, and the run goes on
        Recording(entry(1)).end("finished")
    assert log.path.read_bytes() == before


def test_a_killed_run_is_recognised(log: RunLog) -> None:
    code = "import os; from wgpu_lora.train.track.run_recorder import Recording as R; R.of('chat', 'x'); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    (killed,) = log.read().entries
    assert (killed.recorded, killed.status) == ("running", "killed")
    assert killed.process
    foreign_entry = replace(killed, process=replace(killed.process, host="another"))
    assert foreign_entry.status == "running"  # its processes cannot be seen from here


@pytest.mark.parametrize("how", ["option", "remark", "environment"])
def test_opting_out(log: RunLog, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    if how == "environment":
        monkeypatch.setenv("WGPU_LORA_NO_RUN_LOG", "1")
    with remarks(log=how != "remark"), recorded("bench", "x", requested=how != "option"):
        pass
    assert not log.path.exists()


def test_git_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def run(*command: str) -> str:
        names = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(["git", *names, *command], capture_output=True, text=True, check=True).stdout.strip()

    run("init")
    assert run_log.git_state() is None  # no commit yet
    run("commit", "--allow-empty", "-m", "x")
    commit = run_log.Git(run("rev-parse", "HEAD"))
    (tmp_path / "below").mkdir()
    run("worktree", "add", "-b", "other", "tree")
    run("worktree", "add", "--detach", "detached")
    for command in ([], ["pack-refs", "--all"]):
        run(*command or ["status"])
        assert [run_log.git_state(tmp_path / name) for name in ("", "below", "tree", "detached")] == [commit] * 4
    for head in ("ref: refs/heads/../../config", "x" * 10_000, "ref: refs/heads/none", ""):
        (tmp_path / ".git" / "HEAD").write_text(head)
        assert run_log.git_state() is None
    (tmp_path / ".git" / "HEAD").unlink()
    os.mkfifo(tmp_path / ".git" / "HEAD")
    assert run_log.git_state() is None


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((None, "nf4", True, False, "sft", "f32"), "demo_nf4_lora_sft_f32"),
        (("models/a.gguf", "bf16", True, True, "dpo", "bf16"), "a_bf16_rslora_dpo_bf16"),
        (("Org/Qwen3-0.6B", "nf4", False, False, "evaluate", "f32"), "Qwen3-0.6B_nf4_base_evaluate_f32"),
        (("shape tiny-qwen3", "nf4", True, False, "x", "f32"), "tiny-qwen3_nf4_lora_x_f32"),
    ],
)
def test_names_follow_the_convention(arguments: tuple, name: str) -> None:
    assert run_name(*arguments) == name


@pytest.mark.parametrize("held_out", [True, False])
def test_a_killed_run_has_the_losses_of_its_log(tmp_path: Path, held_out: bool) -> None:
    """If the directory still is that run's."""
    losses = {"eval_loss": 3.0} if held_out else {}
    lines = [{"step": 0, "epoch": 0.0, "eval_loss": 4.0, "seconds": 0.1, "elapsed_seconds": 0.0}] if held_out else []
    for step, loss in ((1, 2.0), (2, 1.0), (3, 1.5)):
        times = {"tokens_per_second": 1.0, "seconds": step + 0.5, "elapsed_seconds": float(step)}
        lines.append({"step": step, "epoch": 0.1, "loss": loss, "learning_rate": 1e-4, "tokens": 9, **times, **losses})
    (tmp_path / "log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "lo')
    dead = Process(Process.current().host, "another boot", 1, 1)
    dead_run = entry(0, process=dead, outputs=[str(tmp_path)])
    assert with_log(dead_run).losses == Losses()  # the directory has another run
    (tmp_path / "tracking.json").write_text(json.dumps({"id": dead_run.id}))
    log_entry = with_log(dead_run)
    assert log_entry.losses == (Losses("held-out", 4.0, 3.0, 3.0) if held_out else Losses("training", 2.0, 1.0, 1.5))
    assert (log_entry.steps, log_entry.tokens, log_entry.seconds) == (3, 9, 3.5)
    for other in (
        replace(dead_run, recorded="finished"),
        replace(dead_run, outputs=[]),
        replace(dead_run, outputs=["missing"]),
    ):
        assert with_log(other) == other


def test_the_list_fits_a_narrow_terminal(
    log: RunLog, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Lines of at most 60 columns instead of a table; without a terminal, a line per run, whatever its length."""
    entry_facts = {
        "name": run_name("HuggingFaceTB/SmolLM2-135M-Instruct", "nf4", True, False, "sft", "f32"),
        "config": {"model": "HuggingFaceTB/SmolLM2-135M-Instruct"},
        "data": DataFile("/somewhere/else/data/rows.jsonl"),
        "outputs": [str(tmp_path / "out" / "json-task")],
        "losses": Losses("held-out", 1.4257, 0.0042, 0.0042),
        "recorded": "finished",
        "goal": "a long goal " * 9,
    }
    log.append(facts_of(entry(0, **entry_facts)))
    monkeypatch.chdir(tmp_path)
    facts = ("SmolLM2-135M-Instruct", "data/rows.jsonl", "out/json-task", "1.4257 -> 0.0042", "finished")
    for width in (None, 60, 250):
        for module in (console, runs) if width else ():
            monkeypatch.setattr(module, "is_terminal", lambda stream: True)
        monkeypatch.setenv("COLUMNS", str(width))
        assert main(["runs"]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= width if width else len(lines) == 2
        assert all(fact in " ".join(" ".join(lines).split()) for fact in facts)
    assert sum("a long goal" in line for line in lines) > 1  # folded


FOUND = [
    entry(0, recorded="failed"),
    entry(1, recorded="finished", adapter="poet"),
    entry(2, kind="bench training"),
]


@pytest.mark.parametrize(
    ("conditions", "ids"),
    [
        ({"status": "failed"}, [0]),
        ({"kind": "bench"}, [2]),
        ({"name": "POE"}, [1]),
        ({"name": "nf4_*_f32"}, [0, 1, 2]),
        ({"objective": "dpo"}, []),
        ({"since": datetime(2026, 1, 2, tzinfo=UTC)}, [1, 2]),
    ],
)
def test_filters(conditions: dict[str, Any], ids: list[int]) -> None:
    assert [number for number, item in enumerate(FOUND) if Filter(**conditions).holds(item)] == ids


def test_ids_and_dates() -> None:
    assert (find(FOUND, "last"), find(FOUND, "01aa")) == (FOUND[2], FOUND[1])
    for name, error in (("2026", "stands for 3 runs"), ("nothing", "There is no run"), ("", "There is no run")):
        with pytest.raises(UserError, match=error):
            find(FOUND, name)
    at = datetime(2026, 1, 8, tzinfo=UTC)
    assert since("2d", at) == at - timedelta(days=2)
    for text in ("soon", "999999w", "2026-13-01"):
        with pytest.raises(UserError, match="since must be"):
            since(text)


def test_comparison_and_markdown() -> None:
    first = entry(0, config={"lora_r": 4, "seed": 1}, losses=Losses("held-out", 2.0, 1.0, 1.0))
    two = entry(1, config={"lora_r": 8, "seed": 1}, losses=Losses("held-out", 2.0, 0.5, 0.5), goal="a|b\nc")
    rows = {label: values for label, *values in compared(first, two)}
    assert rows["--lora-r"] == ["4", "8"]
    assert rows["held-out loss, final"] == ["1.0000", "0.5000"]
    assert rows["improvement"] == ["+50.00%", "+75.00%"]
    assert not {"--seed", "kind"} & rows.keys()
    table = markdown(("a", "b"), [(cells(two)[-1], "1")], ("a",))
    assert table.splitlines() == ["| a | b |", "| --- | ---: |", "| a\\|b c | 1 |"]


# -- secrets -----------------------------------------------------------------------------------------------------------


SECRET = "s3cr3t-Value_42"


@pytest.mark.parametrize(
    "value",
    [
        ["wgpu-lora", "push", "--token", SECRET],
        ["wgpu-lora", f"--hub-token={SECRET}"],
        f"wgpu-lora --api-key {SECRET} --max-steps 3",
        f"https://user:{SECRET}@host/path",
        f"https://{SECRET}@host/path",
        f"postgres://user:a@{SECRET}@host/base",
        f"https://host/file?access_token={SECRET}&x=1",
        f"https://bucket/file?X-Amz-Signature={SECRET}",
        f"WANDB_API_KEY={SECRET} wgpu-lora finetune",
        f'{{"password": "{SECRET} more"}}',
        {"api_key": SECRET, "nested": [{"HF_TOKEN": SECRET}]},
        f"Authorization: Bearer {SECRET}",
        "hf_" + SECRET.replace("-", ""),
        "ghp_" + SECRET.replace("-", ""),
        f"sk-{SECRET}",
        f"PGPASSWORD={SECRET} psql",
        f"mysql --pwd={SECRET}",
        f"accessToken: {SECRET}",
        f"wgpu-lora --password '{SECRET} more' --max-steps 3",
        "npm_" + SECRET.replace("-", "") * 2,
        f"-----BEGIN PRIVATE KEY-----\n{SECRET}\n-----END PRIVATE KEY-----",
    ],
)
def test_masked(value: object) -> None:
    shown = json.dumps(masked(value))
    assert MASK in shown
    assert SECRET not in shown
    assert SECRET.replace("-", "") not in shown
    assert " more" not in shown


def test_values_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SERVICE_TOKEN", SECRET)
    monkeypatch.setenv("SSH_AUTH_SOCK", "/tmp/socket")
    monkeypatch.setenv("AWS_SECRET", "wJalr/K7MDENG/bPx")
    values = [f"note {SECRET}!", "/tmp/socket", "x wJalr/K7MDENG/bPx", "not text: \udcff"]
    assert masked(values) == [f"note {MASK}!", "/tmp/socket", f"x {MASK}", "not text: \\udcff"]


def test_what_is_no_secret_stays() -> None:
    values = {
        "command": ["wgpu-lora", "finetune", "--batch-tokens", "512", "--max-length", "16", "--data", "tokens.jsonl"],
        "data": "https://huggingface.co/datasets/a/b",
        "notes": "512 tokens: fine; author: me; keys and tokens",
        "max_new_tokens": 4,
        "target_modules": "q_proj,k_proj",
    }
    assert masked(values) == values
