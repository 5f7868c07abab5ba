"""Read Parquet files and Arrow tables in batches of rows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wgpu_lora.data.compressed_files import Growth, opened
from wgpu_lora.data.json_rows import MAX_LINE, too_long
from wgpu_lora.data.json_values import dense
from wgpu_lora.data.row_formats import RowFormats
from wgpu_lora.data.source import NoRowsError, RowPosition, Rows
from wgpu_lora.errors import UserError
from wgpu_lora.files.installation import pip_line

BATCH = 64  # rows decoded together
MAX_BATCH = MAX_LINE  # bytes; rows of a larger batch are decoded one by one
ROW_BYTES, VALUE_BYTES = 64, 8  # that a row, and a value, count for at least


def read_parquet(path: Path, formats: RowFormats[Any]) -> Rows:
    """Yield the rows of a file; null fields, which Arrow adds, are left out.

    Raises:
        UserError: pyarrow is not installed, the file is damaged, or its columns fit no format.
    """
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError(f"{path}: reading Parquet needs pyarrow: {pip_line('data')}.") from None
    with opened(path, raw=True) as source:
        try:
            chunks = _checked_chunks(path, parquet.read_metadata(source))
            # Texts stay in their dictionaries until their size is known: a few kilobytes may decode to gigabytes.
            texts = sorted({chunk.path_in_schema for chunk in chunks if chunk.physical_type == "BYTE_ARRAY"})
            file = parquet.ParquetFile(source, read_dictionary=texts)
            check_columns(file.schema_arrow.names, str(path), formats)
            yield from rows_of(file.iter_batches(BATCH), Growth(path))
        except (pyarrow.ArrowException, OSError, ValueError, OverflowError, RecursionError) as error:
            raise UserError(f"{path} cannot be read as Parquet ({_first_line(error)}): write it again.") from error


def _checked_chunks(path: Path, metadata: Any) -> list[Any]:
    """The column chunks of a file. Raises UserError if it states more than a file of its size can hold."""
    groups = map(metadata.row_group, range(metadata.num_row_groups))
    chunks = [group.column(i) for group in groups for i in range(metadata.num_columns)]
    Growth(path).add(sum(max(chunk.total_uncompressed_size, VALUE_BYTES * chunk.num_values) for chunk in chunks))
    if not metadata.num_rows:
        raise NoRowsError(f"{path} is empty; at least one row is needed.")
    return chunks


def check_columns(names: list[str], where: str, formats: RowFormats[Any]) -> None:
    """Raise UserError if the columns of a table fit no format or are not unique."""
    try:
        formats.check_columns(names)
    except UserError as error:
        raise UserError(f"{where}: {error}") from error
    if len(set(names)) < len(names):
        raise UserError(f"{where}: two columns have the same name; rename one.")


def rows_of(batches: Iterator[Any], growth: Growth | None = None) -> Rows:
    """Yield the rows of Arrow tables or batches, which are validated first, since their bytes are untrusted.

    growth: of the Parquet file that they are of, whose reader checks all but texts; these are checked as they are used.
    """
    number = 0
    for batch in batches:
        batch.validate(full=growth is None)  # in full, a growing dictionary would be read again for every batch
        one_by_one = _decoded_bytes(batch) > MAX_BATCH
        for part in [batch.slice(i, 1) for i in range(batch.num_rows)] if one_by_one else [batch]:
            if _decoded_bytes(part) > MAX_BATCH:
                number += 1
                yield RowPosition("row", number), too_long()
                continue
            if growth:
                growth.add(max(_decoded_bytes(part), ROW_BYTES * part.num_rows))
            for row in part.to_pylist():
                number += 1
                yield RowPosition("row", number), {key: dense(value) for key, value in row.items()}


def _decoded_bytes(part: Any) -> int:
    """Bytes of an Arrow table, batch or array with every text as often as it occurs."""
    from pyarrow import compute, types

    if hasattr(part, "columns"):
        return sum(map(_decoded_bytes, part.columns))
    if hasattr(part, "chunks"):
        return sum(map(_decoded_bytes, part.chunks))
    if types.is_dictionary(part.type) and not types.is_primitive(part.type.value_type):
        value_counts = part.indices.drop_null().value_counts()
        lengths = compute.binary_length(part.dictionary.take(value_counts.field("values")))
        return int(compute.sum(compute.multiply(lengths.cast("int64"), value_counts.field("counts"))).as_py() or 0)
    if types.is_struct(part.type):
        return sum(map(_decoded_bytes, part.flatten()))
    if types.is_list(part.type) or types.is_large_list(part.type) or types.is_fixed_size_list(part.type):
        return _decoded_bytes(part.flatten())
    return int(part.nbytes)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
