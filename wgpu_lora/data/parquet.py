"""Reading Parquet, some rows at a time, and what Arrow's tables have in common with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wgpu_lora.data.formats import COLUMNS, Check, check_columns
from wgpu_lora.data.jsonl import MAX_LINE, too_long
from wgpu_lora.data.source import Place, Rows, dense
from wgpu_lora.errors import UserError
from wgpu_lora.installed import pip_line

BATCH = 64  # rows that are decoded together
MAX_BATCH = MAX_LINE  # bytes; of more than that, each row is decoded alone
MAX_ROWS_A_BYTE = 64  # that a file may claim: many alike take next to nothing, but something


def read_parquet(path: Path, check: Check = check_columns) -> Rows:
    """The rows of a file, of the columns that formats have; null fields within a row are left out, as Arrow adds them.

    Args:
        check: raises UserError where columns of these names are not what is wanted.

    Raises:
        UserError: pyarrow is not installed, the file is damaged, or its columns fit no format.
    """
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError(f"{path}: reading Parquet needs pyarrow: {pip_line('data')}.") from None
    try:
        with parquet.ParquetFile(path) as file:
            rows, size = file.metadata.num_rows, path.stat().st_size
            if rows > MAX_ROWS_A_BYTE * size:
                raise UserError(f"{path} claims {rows:,} rows in {size:,} bytes: it is damaged; write it again.")
            if not rows:
                raise UserError(f"{path} is empty; at least one row is needed.")
            names = known_columns(file.schema_arrow.names, str(path), check)
            yield from rows_of(file.iter_batches(BATCH, columns=names))
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as Parquet ({_first_line(error)}): write it again.") from error


def known_columns(names: list[str], where: str, check: Check = check_columns) -> list[str]:
    """Those of a table's columns that formats have. Raises UserError where they fit no format, or one stands twice."""
    try:
        check(names)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    known = [name for name in names if name in COLUMNS]
    if len(set(known)) < len(known):
        raise UserError(f"{where}: two columns have the same name; rename one.")
    return known


def rows_of(batches: Iterator[Any]) -> Rows:
    """The rows of Arrow's tables or batches, which are validated first: their bytes may be anything."""
    number = 0
    for batch in batches:
        batch.validate(full=True)
        one_by_one = batch.nbytes > MAX_BATCH
        for part in [batch.slice(i, 1) for i in range(batch.num_rows)] if one_by_one else [batch]:
            if part.nbytes > MAX_BATCH:
                number += 1
                yield Place("row", number), too_long()
                continue
            for row in part.to_pylist():
                number += 1
                yield Place("row", number), {key: dense(value) for key, value in row.items()}


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
