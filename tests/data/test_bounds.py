"""What small files may cost: time and memory are bounded by what they state, and long reading is shown."""

from __future__ import annotations

import gzip
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from support.data import write_jsonl
from support.hostile import memory_below
from support.sources import prepared, refused

from wgpu_lora.cli import console
from wgpu_lora.data import json_rows
from wgpu_lora.data.compressed_files import opened
from wgpu_lora.data.example_formats import EXAMPLES
from wgpu_lora.data.parquet import read_parquet
from wgpu_lora.infer import prompt_file
from wgpu_lora.infer.prompt_file import FORMATS, read_requests

ROW = {"text": "the sky is blue"}


def test_a_text_that_parquet_repeats_is_not_decoded_as_often(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    big, path = "a" * (12 << 20), tmp_path / "a.parquet"
    turns = [[{"role": "user", "content": big}, {"role": "assistant", "content": big}]] * 8
    for columns in ({"text": [big] * 64}, {"messages": turns}, {"text": ["b", big, "b"]}):
        parquet.write_table(
            pyarrow.table(columns), path, compression="zstd", dictionary_pagesize_limit=1 << 30, use_dictionary=True
        )
        assert path.stat().st_size < 1 << 16
        before, count = pyarrow.total_allocated_bytes(), 0
        with memory_below(96 << 20):
            for _, row in read_parquet(path, FORMATS if "messages" in columns else EXAMPLES):
                count += 1
                assert isinstance(row, dict) or ("reason" in vars(row)) is ("messages" in columns)
                assert pyarrow.total_allocated_bytes() - before < 96 << 20
        assert count == len(next(iter(columns.values())))


def test_parquet_that_states_more_than_it_can_hold(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"input_ids": [[0] * 1_000_000]}), path)
    assert "claims 1,000,000 values in " in refused(path)
    texts = ["a" * 1000 + str(n) for n in range(80_000)]
    parquet.write_table(pyarrow.table({"text": texts}), path, compression="zstd", use_dictionary=False)
    assert "expands to more than 200 times its size" in refused(path)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.csv.gz"])
def test_blank_lines_end_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    path = tmp_path / name
    begin = b"text\na\n" if "csv" in name else b'{"text": "a"}\n'
    path.write_bytes(gzip.compress(begin + b"\n" * (json_rows.MAX_BLANK + 10) + b"x"))
    assert "have more than 1,048,576 blank lines up to line 1,048," in refused(path)
    path.write_bytes(gzip.compress(begin + b"\n" * 1000 + begin.removeprefix(b"text\n")))
    assert len(prepared(path).rows) == 2


def test_blank_lines_of_prompts_take_no_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_file, "MAX_TEXT_BYTES", 9 << 20)
    path = tmp_path / "prompts.txt"
    path.write_bytes(b"w1\n" + b"\n" * (8 << 20) + b"w2\n")
    with memory_below(48 << 20):
        assert [request.prompt for request in read_requests(path)] == ["w1", "w2"]


def test_many_bad_rows_end_reading_and_say_how_many_were_read(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ROW, *[{"x": 1}] * 5000)
    assert refused(path).startswith(
        f"{path} has 1,023 rows among the first 1,024 that cannot be used; fix them, or skip"
    )
    assert len(prepared(path, skip_bad_rows=True).account.bad) == 5000
    few = write_jsonl(tmp_path / "b.jsonl", ROW, *[{"x": 1}] * 20)
    assert refused(few).startswith(f"{few} has 20 rows that cannot be used; ")


def test_rows_that_do_not_fit_into_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=200_000))
    path = write_jsonl(tmp_path / "a.jsonl", *[ROW] * 100)
    assert len(prepared(path).rows) == 100
    path = write_jsonl(tmp_path / "a.jsonl", *[ROW] * 1000)
    assert "does not fit in memory: 256 rows of it take more than 0.0 GiB, half of this machine's memory;" in refused(
        path
    )


def test_long_reading_is_shown_in_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(console, "TICK", 0.01)
    monkeypatch.setattr(console, "SOON", 0.05)
    path = write_jsonl(tmp_path / "a.jsonl", *[ROW] * 10)

    def read(seconds: float) -> str:
        with console.long_work_shown(), opened(path) as file:
            file.read(path.stat().st_size // 2)
            time.sleep(seconds)
        return capsys.readouterr().err

    assert read(0.0) == ""
    monkeypatch.setattr(console, "OFTEN", 0.0)
    assert "reading a.jsonl: 50 of 100% after" in read(0.5)
    with console.Bar("other", 3) as bar:
        bar.advance()
        capsys.readouterr()
        assert "reading" not in read(0.3), "another bar is shown"
    assert not sys.stdout.closed
