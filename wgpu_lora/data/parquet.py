"""Read Parquet files and Arrow tables in batches of rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wgpu_lora.data.columns import RowFormats
from wgpu_lora.data.jsonl import MAX_LINE, too_long
from wgpu_lora.data.source import NoRowsError, Place, Rows
from wgpu_lora.data.values import dense
from wgpu_lora.errors import UserError
from wgpu_lora.installed import pip_line

BATCH = 64  # rows decoded together
MAX_BATCH = MAX_LINE  # bytes; rows of a larger batch are decoded one by one
MAX_ROWS_A_BYTE = 64  # that a file may claim; equal rows compress well, but not without limit


def read_parquet(path: Path, formats: RowFormats[Any]) -> Rows:
    """Yield the rows of a file, with the columns that the formats use; null fields, which Arrow adds, are left out.

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
                raise UserError(f"{path} claims {rows:,} rows in {size:,} bytes, so it is damaged: write it again.")
            if not rows:
                raise NoRowsError(f"{path} is empty; at least one row is needed.")
            names = known_columns(file.schema_arrow.names, str(path), formats)
            yield from rows_of(file.iter_batches(BATCH, columns=names))
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as Parquet ({_first_line(error)}): write it again.") from error


def known_columns(names: list[str], where: str, formats: RowFormats[Any]) -> list[str]:
    """The columns of a table to read. Raises UserError if they fit no format or are not unique."""
    try:
        formats.check_columns(names)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    known = [name for name in names if formats.every or name in formats.columns]
    if len(set(known)) < len(known):
        raise UserError(f"{where}: two columns have the same name; rename one.")
    return known


def rows_of(batches: Iterator[Any]) -> Rows:
    """Yield the rows of Arrow tables or batches, which are validated first, since their bytes are untrusted."""
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
