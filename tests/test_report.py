"""The report of finished runs: everything on one page, nothing invented."""

from __future__ import annotations

import html.parser
import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from training_helpers import model_dir, random_rows

from wgpu_lora.cli import main
from wgpu_lora.report.plots import PLOTS
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
    """Checks that tags nest, and collects what a reader sees."""

    VOID = ("meta", "img")

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.sources: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)
        self.sources += [value or "" for name, value in attributes if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def test_two_runs_on_one_page(runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "report"
    capsys.readouterr()
    assert main(["report", str(runs / "first"), str(runs / "second"), "--output", str(output)]) == 0
    first, second, where = capsys.readouterr().out.splitlines()
    assert first.startswith("- **first**: ")
    assert "held-out" not in first
    assert "held-out" in second
    assert where.split()[1] == str(output / "report.html")
    page = Page((output / "report.html").read_text())
    assert len(page.sources) == len(PLOTS)
    assert "td, th + th { min-width: 7rem; overflow-wrap: anywhere; }" in (output / "report.html").read_text()  # SHAs
    assert all(source.startswith("data:image/png;base64,") for source in page.sources)  # nothing is fetched
    facts = json.loads((runs / "second" / "run.json").read_text())
    assert f"{facts['state']['last_eval_loss']:.4f}" in page.text
    assert facts["adapter_sha256"] in page.text
    assert {path.stem for path in output.glob("*.png")} == set(PLOTS)


def test_what_was_not_measured_is_said(runs: Path, tmp_path: Path) -> None:
    assert main(["report", str(runs / "first"), "--output", str(tmp_path)]) == 0
    page = Page((tmp_path / "report.html").read_text())
    assert len(page.sources) == len(PLOTS) - 1
    assert any("wgpu-lora profile" in text for text in page.text)
    assert not (tmp_path / "kernels.png").exists()
    assert "not measured" in page.text  # the held-out loss


def test_series_are_the_logs(runs: Path) -> None:
    (run,) = read_runs([runs / "second"])
    assert run.series["loss"][0] == [1, 2, 3]
    assert len(run.series["eval_loss"][1]) >= 1


def test_what_was_profiled_is_said(runs: Path, tmp_path: Path) -> None:
    assert main(["report", str(runs / "second"), "--output", str(tmp_path)]) == 0
    said = "second: qwen2, 2 layers in nf4, 2 x 16 tokens, rank 4 on all-linear, activations in f32, on zork (1.0)"
    assert said in Page((tmp_path / "report.html").read_text()).text
    (run,) = read_runs([runs / "second"])
    assert run.kernels == {"nf4_matmul": 0.5, "<adamw>": 0.25}  # lines of one kernel add up


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"base_digest": "0", "model": "another"}, "is of another, 2 layers in nf4"),
        ({"base_dtype": "bf16", "compute_dtype": "f16"}, "2 layers in bf16, 2 x 16 tokens, rank 4 on all-linear, "),
        ({"base_dtype": "bf16", "compute_dtype": "f16"}, "activations in f16 (the run's in f32), on zork"),
        ({"layers": 1, "whole": False}, "its first 1 layers alone"),
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
    assert not (tmp_path / "kernels.png").exists()
    (said,) = [text for text in Page((tmp_path / "report.html").read_text()).text if "not drawn" in text]
    assert "is of another" in said


def test_names_are_taken_as_they_are(runs: Path, tmp_path: Path) -> None:
    names = ["$a_{$run", "_under", r"\$\frac{", "<b>&", "\udcff"]
    places = [str(copied(runs, tmp_path / name)) for name in names]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert main(["report", *places, "--output", str(tmp_path / "out")]) == 0
    shown = [*names[:-1], "?"]  # the last is no text
    assert f"Report of {', '.join(shown)}" in Page((tmp_path / "out" / "report.html").read_text()).text
    from matplotlib.figure import Figure

    figure = Figure()
    axes = figure.subplots()
    PLOTS["learning-rate"](axes, read_runs([Path(place) for place in places]))
    assert [text.get_text().strip() for text in figure.legend().get_texts()] == shown


def test_an_earlier_reports_pictures_go(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.png").write_text("")
    for name in ("second", "first"):
        assert main(["report", str(runs / name), "--output", str(tmp_path)]) == 0
    assert {path.stem for path in tmp_path.glob("*.png")} == {*PLOTS, "mine"} - {"kernels"}


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
    assert "holds no finished run" in capsys.readouterr().err
    (tmp_path / "run.json").write_text('{"state": 3}')
    assert main(["report", str(tmp_path), "--output", str(tmp_path / "out")]) == 2
    assert "cannot be read" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    assert main(["report", str(runs / "first"), "--output", str(tmp_path / "file")]) == 2
    assert "cannot be written" in capsys.readouterr().err
