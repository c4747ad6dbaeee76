"""The column of text of tables: .parquet files and saved datasets, both by way of Arrow."""

from collections.abc import Iterator, Sequence
from typing import Any

from shardlm.data.errors import DataError
from shardlm.data.inputs import Input
from shardlm.data.opening import opened, reported, require

Column = tuple[int, int, list[bytes | None]]
"""Number of the first row from 1, share of the input's size, and the text of each row."""


def columns(found: Input, field: str, target_bytes: int) -> Iterator[Column]:
    """One column of a table, in pieces of about `target_bytes`; no other column is read.

    Texts are bytes, since Arrow does not check that they are UTF-8.

    Raises:
      DataError: it cannot be read, has no such column or several, or one without text.
    """
    if found.kind == "parquet":
        yield from _of_parquet(found, field, target_bytes)
    else:
        yield from _of_dataset(found, field, target_bytes)


def _of_parquet(found: Input, field: str, target_bytes: int) -> Iterator[Column]:
    arrow = _arrow(found.path)
    with opened(found.path) as file, reported(found.path, "write the file again"):
        table = arrow.parquet.ParquetFile(file)
        path = _path(table.schema_arrow, field, found.path)
        name = ".".join(path)
        groups = [table.metadata.row_group(i) for i in range(table.num_row_groups)]
        # Also columns of which it is only the beginning: an estimate.
        size = sum(
            group.column(i).total_uncompressed_size
            for group in groups
            for i in range(group.num_columns)
            if group.column(i).path_in_schema == name
        )
        rows = table.metadata.num_rows
        each = _rows(rows, size, target_bytes)
        first = 0
        for batch in table.iter_batches(each, columns=[name]):
            yield _column(found, first, rows, arrow.Table.from_batches([batch]), path)
            first += len(batch)


def _of_dataset(found: Input, field: str, target_bytes: int) -> Iterator[Column]:
    datasets = require("datasets", "hf", f"data.sources: {found.path}")
    with reported(found.path, "save the dataset again"):
        dataset = datasets.load_from_disk(found.path).with_format("arrow")
        path = _path(dataset.features.arrow_schema, field, found.path)
        dataset = dataset.select_columns(path[:1])
        rows = len(dataset)
        each = _rows(rows, found.size, target_bytes)
        for first in range(0, rows, each):
            yield _column(found, first, rows, dataset[first : first + each], path)


def _arrow(path: str) -> Any:
    for part in ("parquet", "compute"):
        require(f"pyarrow.{part}", "parquet", f"data.sources: {path}")
    return require("pyarrow", "parquet", f"data.sources: {path}")


def _rows(rows: int, size: int, target_bytes: int) -> int:
    """How many to read at once. Short texts may take less of the file than of the memory."""
    return min(max(1, rows * target_bytes // max(size, 1)), 1 << 15)


def _column(found: Input, first: int, rows: int, table: Any, path: Sequence[str]) -> Column:
    arrow = _arrow(found.path)
    column = table.column(path[0])
    if path[1:]:
        column = arrow.compute.struct_field(column, list(path[1:]))
    if arrow.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    if column.type in (arrow.string(), arrow.large_string(), arrow.string_view()):
        column = column.cast(arrow.large_binary())
    stop = first + len(column)
    share = found.size * stop // rows - found.size * first // rows
    return first + 1, share, column.to_pylist()


def _path(schema: Any, field: str, name: str) -> list[str]:
    """Names that lead to the column, which has text."""
    arrow = _arrow(name)
    path = [field] if field in schema.names else field.split(".")
    there = schema
    for part in path:
        nested = isinstance(there, arrow.StructType | arrow.Schema)
        names = list(there.names) if nested else []
        if part not in names:
            raise DataError(
                f"data.sources: {name} has no column {part!r} (it has {', '.join(names) or 'none'})"
                ": set data.field to the column with the text"
            )
        if names.count(part) > 1:
            raise DataError(
                f"data.sources: {name} has {names.count(part)} columns {part!r}: leave one of "
                "them, or give the others other names"
            )
        there = there.field(part).type
    kind = there.value_type if arrow.types.is_dictionary(there) else there
    if str(kind).removeprefix("large_").removesuffix("_view") not in ("string", "binary", "null"):
        raise DataError(
            f"data.sources: {name} has {there} in the column {field!r}, where text belongs: set "
            "data.field to the column with the text"
        )
    return path
