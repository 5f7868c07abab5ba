"""Rows in files of every format, and what becomes of them."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

from support.rows.data import small_tokenizer
from wgpu_lora.data import Source, TokenizedData, tokenize_source
from wgpu_lora.errors import UserError

ROWS = [{"prompt": f"What is {i}?", "completion": f'A "number",\nor ö {i}'} for i in range(5)]


def write_source(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    """The rows in the format of the path's suffix."""
    text = io.StringIO(newline="")
    bare = path.with_suffix("") if path.suffix == ".gz" else path
    if bare.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        import pyarrow.parquet as parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return path
    if bare.suffix in (".csv", ".tsv"):
        writer = csv.DictWriter(text, list(rows[0]), delimiter="\t" if bare.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)
    elif bare.suffix == ".json":
        json.dump(rows, text, indent=2)
    else:
        text.writelines(json.dumps(row) + "\n" for row in rows)
    data = text.getvalue().encode()
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)
    return path


def ids_of(prepared: TokenizedData) -> list[list[int]]:
    return [row.input_ids.tolist() for row in prepared.rows]


def prepared(source: Source | Path, **options: Any) -> TokenizedData:
    return tokenize_source(source, small_tokenizer(options.pop("template", "chatml")), **{"max_length": 64, **options})


def refused(source: Source | Path, **options: Any) -> str:
    with pytest.raises(UserError) as raised:
        prepared(source, **options)
    return str(raised.value)
