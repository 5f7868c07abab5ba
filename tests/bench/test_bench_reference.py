"""What stands around the comparison with PyTorch and around bench-gpu: processes that answer, or do not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from scripts.bench import gpu_report, reference
from scripts.bench.reference import compared
from wgpu_lora.cluster.worker.worker import Worker, WorkerFailed

ECHO = """
import json, sys
log, job = open(sys.argv[2], "a"), json.load(open(sys.argv[3]))
def tell(event, **facts):
    print(json.dumps({"event": event, **facts}), flush=True)
tell("begin", job=job["job"])
for line in sys.stdin:
    request = json.loads(line)
    log.write(sys.argv[1] + " " + request["request"] + "\\n"); log.flush()
    if sys.argv[1] == "bad" and request["request"] == "steps":
        print("out of memory", file=sys.stderr); sys.exit(3)
    tell("answer", **({"seconds": [0.5] * request["count"]} if "count" in request else {"about": sys.argv[1]}))
tell("result", code=0, said="", result={})
"""


@pytest.fixture
def sides(tmp_path: Path) -> Iterator[dict[str, Worker]]:
    program = [sys.executable, "-c", ECHO]
    names = ("good", "bad", "other")
    log = str(tmp_path / "log")
    workers = {name: Worker("turns", {}, name=name, program=[*program, name, log], interactive=True) for name in names}
    yield workers
    for side in workers.values():
        side.close()


def test_sides_take_turns_and_one_that_ends_is_told(sides: dict[str, Worker], tmp_path: Path):
    results = reference.take_turns(sides, rounds=2, steps=3)
    assert results["good"] == {"about": "good", "seconds": [0.5] * 6}
    assert results["bad"] == {"not_run": "bad ended with exit code 3: out of memory"}
    requests = (tmp_path / "log").read_text().splitlines()
    assert [line.split()[0] for line in requests if line.endswith("steps")] == ["good", "bad", "other", "good", "other"]


def test_the_energy_of_the_processor_is_that_of_all_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(reference, "POWERCAP", tmp_path)
    assert reference.processor_joules() is None
    for name, microjoules in (("intel-rapl:0", 1_500_000), ("intel-rapl:1", 500_000), ("intel-rapl:0:0", 7)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{microjoules}\n")
    assert reference.processor_joules() == 2.0
    (row,) = compared({"torch": {"seconds": [1.0, 1.0], "joules": 40.0}}, 100, "torch")
    assert row["joules_per_token"] == 0.2


def test_speeds_are_held_against_the_reference():
    timings = {"ours": {"seconds": [2.0, 1.0, 4.0]}, "torch": {"seconds": [1.0]}, "bad": {"not_run": "why"}}
    ours, torch, bad = compared(timings, 100, "torch")
    assert (ours["step_seconds"], ours["tokens_per_second"], ours["ratio"]) == (2.0, 50.0, 0.5)
    assert torch["ratio"] == 1.0
    assert bad == {"side": "bad", "not_run": "why"}
    (alone, _) = compared({"ours": timings["ours"], "torch": timings["bad"]}, 100, "torch")
    assert alone["ratio"] is None


@pytest.mark.parametrize(
    ("installed", "arguments", "message"),
    [
        (False, [], "torch, transformers, peft cannot be imported"),
        (True, ["--rounds", "0"], "--rounds must be at least 1, not 0."),
        (True, ["--rows", "1,0"], "--rows must be at least 1, not 0."),
        (True, ["--ours", "q4_2"], "--ours has 'q4_2', which is not one of nf4, bf16, f16, f32, "),
        (True, ["--torch", "f32,zork"], "--torch has 'zork', which is not one of f32, bf16, nf4."),
        (True, ["--torch-device", "cuda"], "--torch-device cuda is not possible: PyTorch finds no such device."),
        (True, ["--json", "/nowhere/x.json"], "The directory /nowhere of --json does not exist"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_it_runs(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    installed: bool,
    arguments: list[str],
    message: str,
):
    monkeypatch.setattr(reference.importlib.util, "find_spec", lambda name: name if installed else None)
    monkeypatch.setattr(reference, "HAS_CUDA", "import sys; sys.exit(1)")
    monkeypatch.setattr(sys, "argv", ["reference", *arguments])
    assert reference.main() == 2
    assert message in capsys.readouterr().err


def test_our_side_takes_steps():
    side = reference.OurSide(reference.ReferenceWork("tiny-qwen3", 1, 1, 16, 8, "nf4"))
    assert side.prepare()["first_loss"] > 0
    assert len(side.steps(2)["seconds"]) == 2
    assert side.memory()["planned"] > 0


def test_our_side_answers():
    work = {"shape": "tiny-qwen3", "rows": 1, "tokens": 16, "rank": 4, "base_dtype": "nf4", "layers": 99}
    refusal = pytest.raises(WorkerFailed, match=r'ours ended with exit code 2: .*"layers": 99 is not possible')
    with Worker("step", work, name="ours", program=reference.PROGRAM, interactive=True) as side, refusal:
        side.ask("prepare")


def test_parts_that_cannot_run_are_recorded():
    failed = gpu_report.run(gpu_report.Part("zork", "zork"), 60)
    assert (failed["status"], failed["exit_code"]) == ("not run", 2)
    assert "has an unknown kind 'zork': choose one of finetune, " in failed["reason"]
    slow = gpu_report.run(gpu_report.Part("slow", "bench", {"bricks": ["load"]}), 0.01)
    assert slow["reason"] == "it took more than 0 s"
