"""Blocks of Parquet files (row groups) and of Hugging Face datasets on disk (Arrow record batches).

pyarrow is imported only when there is such a file. A table without the text column is refused before anything is read.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.data.read import Item, checked_text
from fivefold.errors import UserError


@dataclass(frozen=True)
class ParquetGroup:
    """One row group of a Parquet file."""

    path: str
    group: int
    first_row: int
    size: int

    def documents(self, text_key: str) -> Iterator[Item]:
        import pyarrow.parquet as pq

        row = self.first_row
        try:
            with pq.ParquetFile(self.path) as file:
                for batch in file.iter_batches(batch_size=1024, row_groups=[self.group], columns=[text_key]):
                    yield from column_documents(batch.column(0), self.path, row, text_key)
                    row += batch.num_rows
        except (OSError, ValueError) as error:
            raise UserError(f"{self.path}, row group {self.group}: cannot be read: {error}") from None


@dataclass(frozen=True)
class ArrowBatch:
    """One record batch of a Hugging Face dataset on disk: the text column, as an Arrow stream."""

    path: str
    first_row: int
    data: bytes
    size: int

    def documents(self, text_key: str) -> Iterator[Item]:
        import pyarrow as pa

        row = self.first_row
        for batch in pa.ipc.open_stream(self.data):
            yield from column_documents(batch.column(0), self.path, row, text_key)
            row += batch.num_rows


def column_documents(column: Any, path: str, first_row: int, text_key: str) -> Iterator[Item]:
    """The texts of a column; a null is an empty document."""
    for row, value in enumerate(column, start=first_row):
        where = f"{path}, row {row}"
        try:
            yield checked_text(value.as_py(), where, text_key, [])
        except UnicodeDecodeError as error:
            raise UserError(f"{where}: byte {error.start} of the text is no UTF-8") from None


def check_column(schema: Any, path: str, text_key: str) -> None:
    """Refuse a table without a text column of that name, with the columns it has."""
    import pyarrow as pa

    names = schema.names
    if text_key not in names:
        raise UserError(
            f"{path} has no column {text_key!r}; its columns are {', '.join(names)}; name one with --text-key"
        )
    kind = schema.field(text_key).type
    text = kind.value_type if pa.types.is_dictionary(kind) else kind
    if not (
        pa.types.is_string(text)
        or pa.types.is_large_string(text)
        or pa.types.is_string_view(text)
        or pa.types.is_null(text)
    ):
        raise UserError(f"{path}: column {text_key!r} holds {kind}, not text")


def parquet_blocks(path: str, text_key: str) -> Iterator[ParquetGroup]:
    """The row groups of a Parquet file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            metadata, schema = file.metadata, file.schema_arrow
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(f"{path} cannot be read as Parquet ({error}): it is cut short or something else") from None
    check_column(schema, path, text_key)
    row, groups = 0, max(1, metadata.num_row_groups)
    for group in range(metadata.num_row_groups):
        yield ParquetGroup(path, group, row, Path(path).stat().st_size // groups)
        row += metadata.row_group(group).num_rows


def arrow_blocks(path: str, text_key: str) -> Iterator[ArrowBatch]:
    """The record batches of an Arrow stream file, mapped: one is in memory at a time."""
    import pyarrow as pa

    try:
        with pa.memory_map(path) as file, pa.ipc.open_stream(file) as stream:
            check_column(stream.schema, path, text_key)
            row, counted = 0, 0
            for batch in stream:
                column = pa.record_batch([batch.column(text_key)], names=[text_key])
                sink = io.BytesIO()
                with pa.ipc.new_stream(sink, column.schema) as writer:
                    writer.write_batch(column)
                yield ArrowBatch(path, row, sink.getvalue(), file.tell() - counted)
                row, counted = row + batch.num_rows, file.tell()
    except (OSError, pa.ArrowInvalid) as error:
        raise UserError(
            f"{path} cannot be read as an Arrow stream ({error}): it is cut short or something else"
        ) from None
