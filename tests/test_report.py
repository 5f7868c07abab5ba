"""The report of finished runs: everything on one page, nothing invented."""

from __future__ import annotations

import html.parser
import json
from pathlib import Path

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
    kernels = [{"kernel": "nf4_matmul", "seconds": 0.5}, {"kernel": "<adamw>", "seconds": 0.25}]
    (root / "second" / "profile.json").write_text(json.dumps({"kernels": kernels}))
    return root


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
    assert run.series("loss")[0] == [1, 2, 3]
    assert len(run.series("eval_loss")[1]) >= 1


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
