"""The report of finished runs: everything on one page, nothing invented, and charts that fit the data."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.cli import QWEN2, SMALL, Run, commands, flags
from support.rows.data import write_jsonl
from support.training.reports import copied, page_of, profile_of

from wgpu_lora.cli.app import main
from wgpu_lora.cli.report.finished_runs import read_runs
from wgpu_lora.cli.report.line_chart import Scale, Series, line_chart, short, smoothed, thinned
from wgpu_lora.cli.report.page import best_run_sentence, compare, costs, losses, table
from wgpu_lora.cli.report.run_charts import PLOTS, lengths_differ, plots
from wgpu_lora.files.locks import locked
from wgpu_lora.train.run.multi_adapter_state import (
    MultiAdapterState,
    read_multi_adapter_state,
    write_multi_adapter_state,
)
from wgpu_lora.train.time_estimate import HELDOUT, TRAINING, Projection


def test_two_runs_on_one_page(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "report"
    capsys.readouterr()
    assert main(["report", str(runs / "first"), str(runs / "second"), "--output", str(output)]) == 0
    first, second, where = capsys.readouterr().out.splitlines()
    assert first.startswith("- **first**: ")
    assert " processed tokens/s, " in first
    assert "held-out" not in first
    assert " before, best " in second
    assert where.split()[1] == str(output / "report.html")
    assert [path.name for path in output.iterdir()] == ["report.html"]
    page = page_of(output)
    assert page.fetched == []
    facts = json.loads((runs / "second" / "run.json").read_text())
    for key in ("first_eval_loss", "last_eval_loss"):
        assert f"{facts['state'][key]:.4f}" in page.text
    assert facts["adapter_sha256"] in page.text
    order = [page.text.index(text) for text in ("Differences", "--learning-rate", "Losses", "Loss", "Record")]
    assert order == sorted(order)
    plot_names = {*PLOTS} - {"Reward", "Entropy", "Length of completions"}  # of runs that sample
    assert {*plot_names, "not measured"} == set(page.text) & {*PLOTS, "not measured"}
    assert len(page.views) == len(plot_names) * 7  # four axes, of which three are logarithmic too
    assert len({view for view in page.views if "linear" in view}) == 4


def test_a_device_that_is_held_back_is_named(runs: Path) -> None:
    (run,) = read_runs([runs / "second"])

    def note(power: float, seconds: float) -> str:
        status = {"gpu_busy": 100.0, "gpu_power": power, "gpu_power_limit": 300.0}
        log = [line | status | {"seconds": seconds * number} for number, line in enumerate(run.log)]
        return next(plot.note for plot in plots([replace(run, log=log)]) if plot.title == "Power")

    assert "second took less than 30% of the limit at full use" in note(80.0, 20.0)
    assert "took" not in note(100.0, 20.0)
    assert "took" not in note(80.0, 2.0)


def test_what_differs_is_apart_from_what_does_not(runs: Path) -> None:
    run_records = read_runs([runs / "first", runs / "second"])
    differing, alike = map(dict, compare(run_records))
    assert differing["--learning-rate"] == ["0.0002", "0.001"]
    assert {"--eval-data", "held-out data, SHA-256"} <= set(differing)
    assert alike["--gradient-accumulation-steps"][0].isdecimal()
    assert {"--lora-r", "versions", "training data, SHA-256"} <= set(alike)
    assert not {"--output", "--resume"} & {*differing, *alike}
    differing, alike = map(dict, compare(run_records[1:]))
    assert {"--lora-r", "--learning-rate", "--model"} <= set(differing)
    assert "--lora-alpha" in alike


def test_losses_are_compared_where_they_can_be(runs: Path, tmp_path: Path) -> None:
    first, second = read_runs([runs / "first", runs / "second"])
    assert best_run_sentence([second]) == best_run_sentence([first, second]) == ""
    assert "No run has a held-out loss" in best_run_sentence([first, first])
    (other,) = read_runs([copied(runs, tmp_path / "other", {"state": {"last_eval_loss": 0.5}})])
    assert best_run_sentence([second, other]) == "other has the lowest held-out loss at the end, 0.5000."
    assert best_run_sentence([second, other, other]).startswith("other and other have the lowest held-out loss")
    (dpo,) = read_runs([copied(runs, tmp_path / "dpo", {"options": {"objective": "dpo"}})])
    sentence = "The held-out losses are of different objectives, so they cannot be compared."
    assert best_run_sentence([second, dpo]) == sentence
    (foreign_run,) = read_runs([copied(runs, tmp_path / "elsewhere", {"eval_data": {"digest": "another"}})])
    assert "cannot be compared" in best_run_sentence([second, foreign_run])


def test_a_fact_of_one_run_alone_moves_no_other(runs: Path, tmp_path: Path) -> None:
    rounded = copied(runs, tmp_path / "rounded", {"state": {"unrounded_eval_loss": 0.0}})
    first, second = read_runs([runs / "first", rounded])
    missing = {"held-out loss, before rounding": "not measured"}
    for order in ([first, second], [second, first]):
        head, rows = table(order, losses)
        losses_by_name = {row[0]: dict(zip(head, row, strict=True)) for row in rows}
        assert losses_by_name[second.name] == {"run": second.name, **losses(second)}
        assert losses_by_name[first.name] == {"run": first.name, **losses(first), **missing}


def test_a_run_of_an_earlier_version(runs: Path, tmp_path: Path) -> None:
    run = copied(runs, tmp_path / "run")
    facts = json.loads((run / "run.json").read_text())
    for key in ("first_eval_loss", "processed_tokens"):
        del facts["state"][key]
    (run / "run.json").write_text(json.dumps(facts))
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    log_lines = [{k: v for k, v in line.items() if "processed" not in k} for line in lines if line["step"]]
    (run / "log.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in log_lines))
    (record,) = read_runs([run])
    assert losses(record)["held-out loss, before"] == "not measured"
    assert costs(record)["processed tokens/s"] == "not logged"
    (run / "log.jsonl").unlink()
    assert main(["report", str(run), "--output", str(tmp_path / "out")]) == 0
    assert not page_of(tmp_path / "out").views


def test_what_was_profiled_is_said(runs: Path, tmp_path: Path) -> None:
    assert main(["report", str(runs / "second"), "--output", str(tmp_path)]) == 0
    words = "second: qwen2, 2 layers in nf4, 2 x 16 tokens, rank 4 on all-linear, activations in f32, on zork (1.0)"
    assert {words, "nf4_matmul", "<adamw>", "500.00 ms"} <= set(page_of(tmp_path).text)
    (run,) = read_runs([runs / "second"])
    assert run.kernels == {"nf4_matmul": 0.5, "<adamw>": 0.25}  # lines of one kernel add up


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"base_digest": "0", "model": "another"}, "is of another, 2 layers in nf4"),
        ({"base_dtype": "bf16", "compute_dtype": "f16"}, "2 layers in bf16, 2 x 16 tokens, rank 4 on all-linear, "),
        ({"base_dtype": "bf16", "compute_dtype": "f16"}, "activations in f16 (the run's in f32), on zork"),
        ({"layers": 1, "whole": False}, "its first layer only"),
        (None, "does not say what it is of"),
        ("", "cannot be read"),
    ],
)
def test_a_profile_of_something_else_is_not_drawn(runs: Path, tmp_path: Path, change: Any, why: str) -> None:
    run = copied(runs, tmp_path / "run")
    profile: dict[str, Any] = profile_of(run, **(change or {}))
    if change is None:
        del profile["work"]
    (run / "profile.json").write_text("" if change == "" else json.dumps(profile))
    assert main(["report", str(run), "--output", str(tmp_path)]) == 0
    (sentence,) = [text for text in page_of(tmp_path).text if "not drawn" in text]
    assert sentence.startswith("run: not drawn, because its ")
    assert why in sentence
    assert "profile --run RUN --json > RUN/profile.json" in sentence


def test_names_are_taken_as_they_are(runs: Path, tmp_path: Path) -> None:
    names = ["$a_{$run", "_under", "\"'><script>alert(1)", "<b>&", "{{ 7 * 7 }}", "\udcff", "\x1b[31m"]
    places = [str(copied(runs, tmp_path / name)) for name in names]
    assert main(["report", *places, "--output", str(tmp_path / "out")]) == 0
    page = page_of(tmp_path / "out")
    assert page.fetched == []
    assert {*names[:-2], "?", "\\x1b[31m"} <= set(page.text)


def test_points_by_every_axis(runs: Path) -> None:
    (run,) = read_runs([runs / "second"])
    assert [x for x, _ in run.points("loss", "step")] == [1, 2, 3, 4, 5, 6, 7]
    points = run.points("eval_loss", "step")
    assert [x for x, _ in points] == [0, 2, 4, 6, 7]
    assert run.points("eval_loss", "tokens")[0] == (0, points[0][1])
    assert [round(x) for x, _ in run.points("loss", "progress")] == [14, 29, 43, 57, 71, 86, 100]
    assert replace(run, log=[]).points("loss", "progress") == []  # of one that failed at its first step


def test_a_short_run_is_readable_beside_a_long_one(runs: Path) -> None:
    first, second = read_runs([runs / "first", runs / "second"])
    more = [second.log[-1] | {"step": step, "tokens": 9 * step, "seconds": float(step)} for step in range(8, 3000)]
    records = [first, replace(second, log=[*second.log, *more])]
    assert (lengths_differ(records), lengths_differ(records[:1])) == (True, False)
    loss = plots(records)[0]
    by_log = next(view.chart for view in loss.views if view.axis == "step" and view.log)
    short_one = next(line for line in by_log.lines if line.name == "first")
    assert len(short_one.dots) == 7  # each of a few points is marked
    xs = [float(point.split()[0]) for point in short_one.path[1:].split("L")]
    assert xs[-1] - xs[0] > 50 < xs[0]  # of 1000: 5% of the axis, not a thousandth
    assert "running mean" in loss.note


def test_charts_take_what_they_get() -> None:
    chart = line_chart([Series("a", [(1, math.nan), (2, 5.0)]), Series("b", [(3, math.inf)])], "x", "y")
    assert [line.name for line in chart.lines] == ["a"]
    assert not line_chart([], "x", "y").lines
    close = line_chart([Series("a", [(1, 1.7), (2, 1.5)])], "x", "y")
    assert "0" not in [text for _, text in close.y_ticks]  # else it would be one flat line
    far = [(0, -1e308), (1, 1e308), (2, 5e-324), (3, 1e-320)]
    assert line_chart([Series("a", far)], "x", "y", log=True).lines[0].path.count("L") == 1
    flat = line_chart([Series("a", [(0, 0.0), (5, 0.0)])], "x", "y")
    assert flat.lines[0].path == "M0 1000L1000 1000"
    spike = [(i / 10_000, 9.0 if i == 777 else 0.0) for i in range(10_000)]
    assert max(thinned(spike), key=lambda point: point[1]) == spike[777]
    assert len(thinned(spike)) < 2000
    assert smoothed([(0, 0.0), (1, 3.0), (2, 6.0)], 3) == [(0, 1.5), (1, 3.0), (2, 4.5)]


@pytest.mark.parametrize(
    ("values", "log", "ticks"),
    [
        ([3], False, ["0", "1", "2", "3"]),  # steps are whole
        ([0.3], False, ["0", "0.05", "0.1", "0.15", "0.2", "0.25", "0.3"]),
        ([1, 300], True, ["0", "1", "5", "10", "20", "50", "100", "200"]),
        ([1, 2_000_000], True, ["0", "10", "100", "1000", "10k", "100k", "1M"]),
        ([], True, ["0", "1"]),
    ],
)
def test_ticks_are_round_and_apart(values: list[float], log: bool, ticks: list[str]) -> None:
    marks = Scale.from_zero(values, log).ticks()
    assert [text for _, text in marks] == ticks
    assert all(0 <= place <= 1 for place, _ in marks)


def test_numbers_in_few_characters() -> None:
    assert [short(v) for v in (0, 0.00002, 0.1 + 0.2, 9999, 10_000, 2_500_000)] == [
        "0",
        "2e-05",
        "0.3",
        "9999",
        "10k",
        "2.5M",
    ]


# -- errors ------------------------------------------------------------------------------------------------------------


def test_a_pipelines_directory_stands_for_its_adapters(
    finished_multi_adapter_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(shutil.copytree(finished_multi_adapter_run / "run", tmp_path / "run"))
    state = json.dumps(vars(read_multi_adapter_state(Path("pipeline"))))  # which names the place of the training
    moved = state.replace(str(finished_multi_adapter_run / "run"), str(tmp_path / "run"))
    write_multi_adapter_state(Path("pipeline"), MultiAdapterState(**json.loads(moved)))
    assert main(["report", "pipeline"]) == 0
    out = capsys.readouterr().out
    assert [line.split("**")[1] for line in out.splitlines()[:3]] == ["a", "b", "c"]
    assert "not given" not in out
    assert main(["report", "a"]) == 0
    assert "trained together with these, but not given: b, c" in capsys.readouterr().out
    for arguments, message in (
        ("pipeline b", "b is given twice"),
        (".", "such as a b"),
        ("b/last", "holds a checkpoint"),
    ):
        assert main(["report", *arguments.split()]) == 2
        assert message in capsys.readouterr().err
    Path("b", "run.json").unlink()
    for arguments, message in (("b", "wait until it has ended"), ("pipeline", "trained an adapter in ")):
        assert main(["report", arguments]) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["memory.groups", "data.summary", "environment.versions", "adapter_sha256"])
def test_every_fact_is_read_before_anything_is_drawn(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], missing: str
) -> None:
    facts = json.loads((runs / "first" / "run.json").read_text())
    *groups, name = missing.split(".")
    del (facts[groups[0]] if groups else facts)[name]
    (tmp_path / "run.json").write_text(json.dumps(facts))
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    assert f"cannot be read: '{missing}' is missing" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_refusals(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text('{"state": 3}')
    (tmp_path / "file").write_text("")
    first, no_directory = runs / "first", f"{tmp_path / 'file'} is not a directory: choose another --output"
    for arguments, output, message in (
        ([first, runs / "second" / ".." / "first"], "out", "is given twice"),
        ([tmp_path / "none"], "out", "There is no directory"),
        ([tmp_path], "out", "cannot be read"),
        ([first], "file", no_directory),
        ([first], "file/below", no_directory),
    ):
        assert main(["report", *map(str, arguments), "--output", str(tmp_path / output)]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_fails_leaves_no_directory(tmp_path: Path) -> None:
    (tmp_path / "kept").mkdir()
    for place in ("a/b/page", "kept/c/page"):
        with pytest.raises(KeyboardInterrupt), locked(tmp_path / place, "--output"):
            raise KeyboardInterrupt
    assert list(tmp_path.rglob("*")) == [tmp_path / "kept"]


ENDED = """
import os, signal, sys
from wgpu_lora.files import atomic
write = os.fsync
def fsync(descriptor):
    write(descriptor)
    os.kill(os.getpid(), signal.SIGTERM)
os.fsync = fsync
from wgpu_lora.cli.app import main
sys.exit(main(["report", *sys.argv[1:]]))
"""


@pytest.mark.skipif(os.name == "nt", reason="has no SIGTERM that is handled")
def test_a_signal_while_it_writes_leaves_nothing(runs: Path, tmp_path: Path) -> None:
    arguments = [str(runs / "first"), "--output", str(tmp_path / "out")]
    process = subprocess.run([sys.executable, "-c", ENDED, *arguments], capture_output=True, text=True)
    assert process.returncode == 128 + signal.SIGTERM, process.stderr
    assert list(tmp_path.iterdir()) == []


def test_odd_values_are_drawn(runs: Path, tmp_path: Path) -> None:
    run = copied(runs, tmp_path / "run", {"data": {"summary": "\x1b\u202e.jsonl: <1 row>"}})
    odd = [{"step": 4, "epoch": 1, "loss": 1e308, "tokens": -9, "seconds": -1e308}]
    odd += [{"step": 5, "epoch": 1, "loss": -1e308, "tokens": 5e-324, "seconds": 1e308}]
    (run / "log.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in odd))
    (run / "profile.json").write_text(json.dumps(profile_of(run) | {"kernels": [{"kernel": "k", "seconds": -1}]}))
    assert main(["report", str(run), "--output", str(tmp_path / "out")]) == 0
    assert any("-1.0 is not a valid amount" in text for text in page_of(tmp_path / "out").text)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory": {"peak": -1}}, "cannot be read"),
        ({"state": {"seconds": math.inf}}, "cannot be read"),
        ({"memory": {"groups": {"base": math.nan}}}, "'memory.groups.base' must be a whole number, not NaN"),
    ],
)
def test_odd_facts_are_named(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: dict[str, Any], message: str
) -> None:
    run = copied(runs, tmp_path / "run", changes)
    assert main(["report", str(run), "--output", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err


# -- the page of data stats --------------------------------------------------------------------------------------------


LENGTHS = [4] * 50 + [20] * 40 + [60] * 9 + [300]
ROWS: list[dict[str, Any]] = [
    {"input_ids": [n % 40 + 1] * length, "labels": [-100] * (length // 2) + [n % 40 + 1] * (length - length // 2)}
    for n, length in enumerate(LENGTHS)
]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    return commands(capsys)


def options(tmp_path: Path, **changes: Any) -> list[str]:
    data = write_jsonl(tmp_path / "rows.jsonl", *ROWS)
    defaults = {"model": QWEN2, "data": data, "max_length": 64, "tune": False, "lora_r": 4}
    return flags(**{name: value for name, value in {**defaults, **changes}.items() if value is not None})


def test_statistics_of_rows(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    arguments = [*options(tmp_path), "--no-measure", "--page", page]
    code, out, err = run("data", "stats", *arguments)
    assert code == 0, err
    assert "lengths   p50 4, p90 20, p99 60, max 300 tokens\n" in out
    assert "format    input_ids: 100 rows\n" in out
    assert f"trained   50% of {sum(LENGTHS):,} tokens\n" in out
    report = json.loads(run("data", "stats", *arguments, "--json").out)
    assert report["lengths"] == {"p50": 4, "p90": 20, "p99": 60, "max": 300}
    choices = {(choice["max_length"], choice["packing"]): choice for choice in report["choices"]}
    assert {length for length, _ in choices} == {64, 128}  # as far as the model's positions
    at = choices[64, True]
    assert (at["cut"], at["lost"], at["tokens"]) == (1, 1, sum(LENGTHS) - 300)  # 64 of 300 tokens are not trained on
    trained = sum(sum(label != -100 for label in row["labels"][1:]) for row in ROWS)
    assert at["trained"] == pytest.approx((trained - 150) / trained)
    assert choices[64, False]["steps"] == -(-99 // 2)
    assert at["positions"] >= at["tokens"]
    assert report["saved_by_packing"] == pytest.approx(1 - at["positions"] / choices[64, False]["positions"])
    text = page.read_text(encoding="utf-8")
    for words in ("Rows of rows.jsonl", '<th scope="row">4</th>', "Not measured.", "Steps an epoch"):
        assert words in text
    assert "<script" not in text


def test_steps_are_those_of_the_run(run: Run, tmp_path: Path) -> None:
    for more in ({}, {"packing": False, "per_device_train_batch_size": 3}, {"validation_split": 0.2}):
        arguments = options(tmp_path, **more)
        stats = json.loads(
            run("data", "stats", *arguments, "--no-measure", "--json", "--page", tmp_path / "a.html").out
        )
        plan = json.loads(run("plan", *arguments, "--num-train-epochs", 1, "--json").out)
        assert stats["this_run"]["steps"] == plan["steps"]
    assert stats["heldout"] == 20


def test_projected_time_and_cost(run: Run, tmp_path: Path) -> None:
    small = options(tmp_path, **SMALL | {"max_steps": 40, "eval_data": tmp_path / "rows.jsonl", "eval_steps": 10})
    code, out, err = run("plan", *small, "--measure", "--price-per-hour", 3600, "--json")
    assert code == 0, err
    projection = json.loads(out)["projection"]
    assert set(projection["stages"]) == {"loading and tuning", "compilation", TRAINING, HELDOUT}
    assert projection["seconds"] == pytest.approx(sum(projection["stages"].values())) == projection["cost"]
    assert projection["stages"][TRAINING] > 0 < projection["stages"][HELDOUT]
    page = tmp_path / "page.html"
    more = ["--price-per-hour", 2, "--project", "qwen2.5-0.5b", "--page", page]
    pairs = [{"prompt_ids": [1, n % 40 + 1], "chosen_ids": [2, 3], "rejected_ids": [4]} for n in range(10)]
    data = write_jsonl(tmp_path / "pairs.jsonl", *pairs)
    changes = SMALL | {"data": data, "objective": "dpo", "precompute_ref_log_probs": True, "validation_split": 2}
    code, stdout, err = run("data", "stats", *options(tmp_path, **changes), *more)
    assert code == 0, err
    assert "format    prompt_ids, chosen_ids, rejected_ids: 10 rows" in stdout
    assert "precomputed references" in stdout
    assert "from 5 measured steps; saving is not counted" in stdout
    code, out, err = run("plan", *small, "--target-seconds", 50, "--measure", "--json")
    assert code == 0, err
    timed = json.loads(out)["projection"]["stages"]  # held-out losses before and after it are not part of the time
    assert set(timed) == {"loading and tuning", TRAINING, HELDOUT}
    assert timed[TRAINING] == 50
    assert "projected qwen2.5-0.5b: " in stdout
    text = page.read_text(encoding="utf-8")
    assert "at 2 an hour" in text
    assert "qwen2.5-0.5b" in text
    assert not (tmp_path / "output").exists()


def test_a_projection_adds_its_stages_up() -> None:
    projection = Projection({"loading and tuning": 2.0, TRAINING: 3590.0, HELDOUT: 8.0}, 5, 2.0, 100, 10)
    assert (projection.total, projection.steps, projection.cost(1.5)) == (3600, 3598, 1.5)
    assert projection.rates() == {"tokens_per_second": 50, "samples_per_second": 5, "seconds": 3598}


def test_what_is_refused(run: Run, tmp_path: Path) -> None:
    arguments = options(tmp_path)
    rows = tmp_path / "rows.jsonl"
    before = rows.read_bytes()
    for command, words in (
        (["data", "stats", *arguments, "--page", rows], "exists already and is not a page: give --page another name"),
        (["data", "stats", *arguments, "--page", tmp_path], "is not a file"),
        (["data", "stats", *arguments, "--page", tmp_path / "no" / "page.html"], "no of --page does not exist"),
        (["data", "stats", *arguments, "--price-per-hour", "-1"], "--price-per-hour must be 0 or more, not -1"),
        (["data", "stats", *arguments, "--price-per-hour", "nan"], "--price-per-hour must be 0 or more, not nan"),
        (["data", "stats", *arguments, "--project", "qwen9"], "qwen9"),
        (["data", "stats", *arguments, "--no-measure", "--price-per-hour", "1"], "need measured steps"),
        (["plan", *arguments, "--price-per-hour", "1"], "--price-per-hour does nothing without --measure"),
        (["plan", *options(tmp_path, data=None), "--measure", "--adapters", f"{rows}:{tmp_path / 'a'}",
          "--adapters", f"{rows}:{tmp_path / 'b'}"], "Only the steps of a single adapter are measured"),
    ):  # fmt: skip
        code, _, err = run(*command)
        assert (code, words in err) == (2, True), err
    assert rows.read_bytes() == before
