"""The report of finished runs: everything on one page, nothing invented."""

from __future__ import annotations

import html.parser
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
from support.training import model_dir, random_rows

from wgpu_lora.cli import main
from wgpu_lora.pages.chart import Line, line_chart, smoothed, thinned
from wgpu_lora.pages.scale import Scale, short
from wgpu_lora.report.compare import compare, verdict
from wgpu_lora.report.facts import costs, losses, span
from wgpu_lora.report.page import made
from wgpu_lora.report.plots import PLOTS, plots, unlike
from wgpu_lora.report.runs import read_runs


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two finished runs, the second with held-out data and a profile."""
    root = tmp_path_factory.mktemp("runs")
    rows = str(random_rows(root / "rows.jsonl", 6, 301))
    common = ["--model", str(model_dir("qwen2")), "--data", rows, "--max-length", "16", "--no-packing", "--lora-r", "4"]
    common += ["--max-steps", "3", "--logging-steps", "1"]
    for name, more in (("first", []), ("second", ["--eval-data", rows, "--learning-rate", "1e-3"])):
        assert main(["finetune", *common, "--output", str(root / name), *more]) == 0
    (root / "second" / "profile.json").write_text(json.dumps(profile_of(root / "second")))
    return root


def profile_of(run: Path, **work: Any) -> dict[str, Any]:
    """A profile.json of the run's own model, but for what `work` says."""
    facts = json.loads((run / "run.json").read_text())
    own = {"model": "qwen2", "base_digest": facts["base_digest"], "base_dtype": "nf4", "layers": 2, "whole": True}
    own |= {"batch": 2, "tokens": 16, "rank": 4, "gradient_checkpointing": False, "compute_dtype": "f32"}
    own |= {"target_modules": "all-linear"}
    kernels = [{"kernel": name, "seconds": 0.25} for name in ("nf4_matmul", "<adamw>", "nf4_matmul")]
    return {"work": own | work, "device": {"name": "zork", "driver": "1.0"}, "kernels": kernels}


def copied(runs: Path, place: Path) -> Path:
    return shutil.copytree(runs / "second", place)


class Page(html.parser.HTMLParser):
    """Checks that tags nest, and collects what a reader sees and what a browser would fetch."""

    VOID = ("meta", "input")

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.fetched: list[str] = []
        self.views: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        named = dict(attributes)
        self.fetched += [tag] if tag in ("script", "link", "img", "iframe") or {"src", "href"} & set(named) else []
        self.views += [named["class"]] if "view" in (named.get("class") or "").split() else []

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        pass  # an SVG shape

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def page_of(output: Path) -> Page:
    return Page((output / "report.html").read_text())


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
    order = [page.text.index(text) for text in ("What differs", "--learning-rate", "Losses", "Loss", "Record")]
    assert order == sorted(order)
    assert set(PLOTS) <= set(page.text)
    assert len(page.views) == len(PLOTS) * 7  # four axes, of which three are logarithmic too
    assert len({view for view in page.views if "linear" in view}) == 4


def test_what_differs_is_apart_from_what_does_not(runs: Path) -> None:
    both = read_runs([runs / "first", runs / "second"])
    differing, alike = map(dict, compare(both))
    assert differing["--learning-rate"] == ["0.0002", "0.001"]
    assert {"--eval-data", "held-out data, SHA-256"} <= set(differing)
    assert alike["--gradient-accumulation-steps"][0].isdecimal()
    assert {"--lora-r", "versions", "training data, SHA-256"} <= set(alike)
    assert not {"--output", "--resume"} & {*differing, *alike}
    differing, alike = map(dict, compare(both[1:]))
    assert {"--lora-r", "--learning-rate", "--model"} <= set(differing)
    assert "--lora-alpha" in alike


def test_losses_are_compared_where_they_can_be(runs: Path, tmp_path: Path) -> None:
    first, second = read_runs([runs / "first", runs / "second"])
    assert verdict([second]) == verdict([first, second]) == ""
    assert "No run has a held-out loss" in verdict([first, first])
    other = copied(runs, tmp_path / "other")
    facts = json.loads((other / "run.json").read_text())
    facts["state"]["last_eval_loss"] = 0.5
    (other / "run.json").write_text(json.dumps(facts))
    assert verdict([second, *read_runs([other])]) == "The lowest held-out loss at the end is 0.5000, of other."
    facts["eval_data"]["digest"] = "another"
    (other / "run.json").write_text(json.dumps(facts))
    assert "cannot be compared" in verdict([second, *read_runs([other])])


def test_what_was_not_measured_is_said(runs: Path, tmp_path: Path) -> None:
    assert main(["report", str(runs / "first"), "--output", str(tmp_path)]) == 0
    page = page_of(tmp_path)
    assert any("wgpu-lora profile" in text for text in page.text)
    assert "not measured" in page.text  # the held-out loss


def test_a_run_of_an_earlier_version(runs: Path, tmp_path: Path) -> None:
    run = copied(runs, tmp_path / "run")
    facts = json.loads((run / "run.json").read_text())
    for key in ("first_eval_loss", "processed_tokens"):
        del facts["state"][key]
    (run / "run.json").write_text(json.dumps(facts))
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    kept = [{k: v for k, v in line.items() if "processed" not in k} for line in lines if line["step"]]
    (run / "log.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in kept))
    (found,) = read_runs([run])
    assert losses(found)["held-out loss, before"] == "not measured"
    assert costs(found)["processed tokens/s"] == "not logged"
    (run / "log.jsonl").unlink()
    assert main(["report", str(run), "--output", str(tmp_path / "out")]) == 0
    assert not page_of(tmp_path / "out").views


def test_points_by_every_axis(runs: Path) -> None:
    (run,) = read_runs([runs / "second"])
    assert [x for x, _ in run.points("loss", "step")] == [1, 2, 3]
    held = run.points("eval_loss", "step")
    assert [x for x, _ in held] == [0, 3]
    assert run.points("eval_loss", "tokens")[0] == (0, held[0][1])
    assert run.points("eval_loss", "seconds")[0][0] > 0
    assert [round(x) for x, _ in run.points("loss", "progress")] == [33, 67, 100]
    assert replace(run, log=[]).points("loss", "progress") == []  # of one that failed at its first step


def test_a_short_run_is_readable_beside_a_long_one(runs: Path, tmp_path: Path) -> None:
    run = copied(runs, tmp_path / "long")
    lines = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    more = [lines[-1] | {"step": step, "tokens": 9 * step, "seconds": float(step)} for step in range(4, 3000)]
    (run / "log.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in (*lines, *more)))
    both = read_runs([runs / "first", run])
    assert unlike(both)
    assert not unlike(both[:1])
    loss = plots(both)[0]
    by_log = next(view.chart for view in loss.views if view.axis == "step" and view.log)
    short_one = next(line for line in by_log.lines if line.name == "first")
    assert len(short_one.dots) == 3  # each of a few points is marked
    xs = [float(point.split()[0]) for point in short_one.path[1:].split("L")]
    assert xs[0] > 50
    assert xs[-1] - xs[0] > 50  # of 1000: 5% of the axis, not a thousandth
    assert any("hours" in view.chart.x_label or "minutes" in view.chart.x_label for view in loss.views)
    assert "running mean" in loss.note
    assert main(["report", str(runs / "first"), str(run), "--output", str(tmp_path / "out")]) == 0
    text = (tmp_path / "out" / "report.html").read_text()
    assert len(text) < 500_000
    assert 'id="log-scale" checked' in text


def test_charts_take_what_they_get() -> None:
    chart = line_chart([Line("a", [(1, math.nan), (2, 5.0)]), Line("b", [(3, math.inf)])], "x", "y")
    assert [line.name for line in chart.lines] == ["a"]
    assert not line_chart([], "x", "y").lines
    close = line_chart([Line("a", [(1, 1.7), (2, 1.5)])], "x", "y")
    assert "0" not in [text for _, text in close.y_ticks]  # else it would be one flat line
    far = [(0, -1e308), (1, 1e308), (2, 5e-324), (3, 1e-320)]
    assert line_chart([Line("a", far)], "x", "y", log=True).lines[0].path.count("L") == 1
    flat = line_chart([Line("a", [(0, 0.0), (5, 0.0)])], "x", "y")
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
    found = Scale.from_zero(values, log).ticks()
    assert [text for _, text in found] == ticks
    assert all(0 <= place <= 1 for place, _ in found)


def test_numbers_in_few_characters() -> None:
    assert [short(v) for v in (0, 0.00002, 0.1 + 0.2, 9999, 10_000, 2_500_000)] == [
        "0",
        "2e-05",
        "0.3",
        "9999",
        "10k",
        "2.5M",
    ]
    assert [span(v) for v in (9.74, 725, 11_520)] == ["9.7 s", "12 min 05 s", "3 h 12 min"]


def test_what_was_profiled_is_said(runs: Path, tmp_path: Path) -> None:
    assert main(["report", str(runs / "second"), "--output", str(tmp_path)]) == 0
    said = "second: qwen2, 2 layers in nf4, 2 x 16 tokens, rank 4 on all-linear, activations in f32, on zork (1.0)"
    assert {said, "nf4_matmul", "<adamw>", "500.00 ms"} <= set(page_of(tmp_path).text)
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
    found: dict[str, Any] = profile_of(run, **(change or {}))
    if change is None:
        del found["work"]
    (run / "profile.json").write_text("" if change == "" else json.dumps(found))
    (found_run,) = read_runs([run])
    assert found_run.kernels is None
    assert found_run.profiled.startswith("run: not drawn, since ")
    assert why in found_run.profiled
    assert "profile --run RUN --json > RUN/profile.json" in found_run.profiled


def test_the_page_says_what_is_not_drawn(runs: Path, tmp_path: Path) -> None:
    run = copied(runs, tmp_path / "run")
    (run / "profile.json").write_text(json.dumps(profile_of(run, base_digest="0", model="another")))
    assert main(["report", str(run), "--output", str(tmp_path)]) == 0
    (said,) = [text for text in page_of(tmp_path).text if "not drawn" in text]
    assert "is of another" in said


def test_names_are_taken_as_they_are(runs: Path, tmp_path: Path) -> None:
    names = ["$a_{$run", "_under", "\"'><script>alert(1)", "<b>&", "{{ 7 * 7 }}", "\udcff", "\x1b[31m"]
    places = [str(copied(runs, tmp_path / name)) for name in names]
    assert main(["report", *places, "--output", str(tmp_path / "out")]) == 0
    page = page_of(tmp_path / "out")
    assert page.fetched == []
    assert {*names[:-2], "?", "\\x1b[31m"} <= set(page.text)


def test_a_pipelines_directory_stands_for_its_adapters(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = str(runs / "rows.jsonl")
    adapters = [f"--adapters={rows}:{name}" for name in ("one", "two")]
    common = ["--model", str(model_dir("qwen2")), "--max-length", "16", "--lora-r", "4", "--max-steps", "1"]
    assert main(["finetune", *common, *adapters, "--output", "both"]) == 0
    capsys.readouterr()
    assert main(["report", "both"]) == 0
    out = capsys.readouterr().out
    assert [line.split("**")[1] for line in out.splitlines()[:2]] == ["one", "two"]
    assert "not given" not in out
    assert main(["report", "one"]) == 0
    assert "trained together with these, but not given: two" in capsys.readouterr().out
    assert main(["report", "both", "two"]) == 2
    assert "two is given twice" in capsys.readouterr().err
    assert main(["report", "."]) == 2
    assert "such as one two." in capsys.readouterr().err
    assert main(["report", "two/last"]) == 2
    assert "holds a checkpoint" in capsys.readouterr().err
    (tmp_path / "two" / "run.json").unlink()
    assert main(["report", "two"]) == 2
    assert "wait until it has ended" in capsys.readouterr().err
    assert main(["report", "both"]) == 2
    assert "trained an adapter in two" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("damage", "missing"),
    [
        (lambda facts: facts["memory"].pop("groups"), "groups"),
        (lambda facts: facts["data"].pop("summary"), "summary"),
        (lambda facts: facts["environment"].pop("versions"), "versions"),
        (lambda facts: facts.pop("adapter_sha256"), "adapter_sha256"),
    ],
)
def test_every_fact_is_read_before_anything_is_drawn(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Any, missing: str
) -> None:
    facts = json.loads((runs / "first" / "run.json").read_text())
    damage(facts)
    (tmp_path / "run.json").write_text(json.dumps(facts))
    capsys.readouterr()
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    assert f"cannot be read: '{missing}' is missing" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_run_is_given_once(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(runs / "first"), str(runs / "second" / ".." / "first")]) == 2
    assert "is given twice" in capsys.readouterr().err


def test_refusals(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "There is no directory" in capsys.readouterr().err
    (tmp_path / "run.json").write_text('{"state": 3}')
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    for output in ("file", "file/below"):
        assert main(["report", str(runs / "first"), "--output", str(tmp_path / output)]) == 2
        assert "cannot be written" in capsys.readouterr().err


def test_what_fails_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), made(tmp_path / "a" / "b"):
        raise KeyboardInterrupt
    assert not (tmp_path / "a").exists()
    (tmp_path / "kept").mkdir()
    with pytest.raises(KeyboardInterrupt), made(tmp_path / "kept" / "c"):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == [tmp_path / "kept"]
    assert list((tmp_path / "kept").iterdir()) == []


ENDED = """
import os, signal, sys
from wgpu_lora import atomic
write = os.fsync
def fsync(descriptor):
    write(descriptor)
    os.kill(os.getpid(), signal.SIGTERM)
os.fsync = fsync
from wgpu_lora.cli import main
sys.exit(main(["report", *sys.argv[1:]]))
"""


@pytest.mark.skipif(os.name == "nt", reason="has no SIGTERM that is handled")
def test_a_signal_while_it_writes_leaves_nothing(runs: Path, tmp_path: Path) -> None:
    arguments = [str(runs / "first"), "--output", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", ENDED, *arguments], capture_output=True, text=True)
    assert done.returncode == 128 + signal.SIGTERM, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_odd_values_are_drawn_or_named(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = copied(runs, tmp_path / "run")
    facts = json.loads((run / "run.json").read_text())
    facts["data"]["summary"] = "\ud800.jsonl: <1 row>"
    (run / "run.json").write_text(json.dumps(facts))
    odd = [{"step": 4, "epoch": 1, "loss": 1e308, "tokens": -9, "seconds": -1e308}]
    odd += [{"step": 5, "epoch": 1, "loss": -1e308, "tokens": 5e-324, "seconds": 1e308}]
    (run / "log.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in odd))
    (run / "profile.json").write_text(json.dumps(profile_of(run) | {"kernels": [{"kernel": "k", "seconds": -1}]}))
    assert main(["report", str(run), "--output", str(tmp_path / "out")]) == 0
    assert any("-1.0 is no amount" in text for text in page_of(tmp_path / "out").text)
    for group, name, value in (("memory", "peak", -1), ("state", "seconds", math.inf)):
        odd_facts = facts | {group: facts[group] | {name: value}}
        (run / "run.json").write_text(json.dumps(odd_facts))
        capsys.readouterr()
        assert main(["report", str(run), "--output", str(tmp_path / "out")]) == 2
        assert "cannot be read" in capsys.readouterr().err
    facts["memory"]["groups"]["base"] = math.nan
    (run / "run.json").write_text(json.dumps(facts))
    capsys.readouterr()
    assert main(["report", str(run), "--output", str(tmp_path / "out")]) == 2
    assert "base is nan" in capsys.readouterr().err
