"""Parquet files and data sets of the package `datasets`, imported only when met.

Only what is on this machine is read: `datasets` is asked for its cache, never for the network, and
versions that could run a data set's own code are refused. Rows are those of the Arrow tables: what
a column of images, audio or video refers to is neither decoded nor opened.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mlxstacks.errors import InputError
from mlxstacks.regular_files import check_hub_reference, check_regular

Rows = Iterator[tuple[str, dict[str, Any]]]
ROWS_AT_ONCE = 256
# A few bytes of a compressed file can stand for gigabytes: what its rows may hold, in bytes and as
# a multiple of the file's own size, and in values at once.
_MOST_BYTES, _MOST_TIMES, _MOST_VALUES, _MOST_ROW_VALUES = 1 << 28, 1000, 1 << 20, 1 << 22
_BYTES_OF_A_VALUE = 32


def is_saved_set(path: Path) -> bool:
    """Whether `save_to_disk` wrote this directory."""
    is_single = (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    return is_single or (path / "dataset_dict.json").is_file()


def saved_set(path: Path, split: str) -> tuple[Rows, list[Path]]:
    """Rows and files of a directory by `save_to_disk`; of several splits, the one asked for.

    Raises: InputError: no such split, or a directory that is damaged or names files outside it.
    """
    if (path / "dataset_dict.json").is_file():
        splits = _json_at(path / "dataset_dict.json", "splits")
        if split not in splits:
            known = ", ".join(sorted(map(str, splits)))
            raise InputError(f"{path}: no split {split!r}; it has {known}")
        path = _inside(path, split)
    try:
        names = [entry["filename"] for entry in _json_at(path / "state.json", "_data_files")]
    except (KeyError, TypeError) as error:
        raise _not_saved(path, error) from None
    files = [_inside(path, name) for name in names]
    return arrow_rows(files, str(path)), sorted(files)


def _json_at(path: Path, key: str) -> Any:
    """The list under a key of one of the JSON files of a saved data set."""
    check_regular(path)
    try:
        value = json.loads(path.read_bytes())[key]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _not_saved(path, error) from None
    if not isinstance(value, list):
        raise _not_saved(path, f"{key} is no list")
    return value


def _inside(directory: Path, name: object) -> Path:
    if not isinstance(name, str) or Path(name).name != name or name in ("", ".."):
        raise _not_saved(directory, f"{name!a:.100} is no name of a file in it")
    return directory / name


def _not_saved(path: Path, reason: object) -> InputError:
    return InputError(
        f"{path}: cannot be read as a saved data set: {reason}; save it again with save_to_disk"
    )


def cached_set(dataset: str, name: str | None, split: str) -> tuple[Rows, list[Path]] | None:
    """Rows and files of a data set that `datasets.load_dataset` once prepared; None if it did not.

    Raises: InputError: several configurations are in the cache, or none with this name or split.
    """
    import datasets
    from datasets.packaged_modules.cache.cache import Cache

    prepared = Path(datasets.config.HF_DATASETS_CACHE).expanduser()
    folder = dataset.split("/")
    folder[-1] = datasets.naming.camelcase_to_snakecase(folder[-1])
    if not any((prepared / "___".join(folder)).glob("*/*/*/dataset_info.json")):
        return None
    check_regular(*(prepared / "___".join(folder)).glob("*/*/*/*"))
    short = dataset.rpartition("/")[2]
    options = {"config_name": name, "version": "auto", "hash": "auto"}
    try:
        builder = Cache(dataset_name=short, repo_id=dataset, **options)
        data = builder.as_dataset(split=split)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{dataset}: the cached data set cannot be read: {error}") from error
    tables = data.with_format("arrow").iter(ROWS_AT_ONCE)
    files = sorted({Path(file["filename"]) for file in data.cache_files})
    return _rows(dataset, tables, "arrow", _most_bytes(files)), files


def hub_snapshot(dataset: str) -> Path | None:
    """The directory of a data set in the hub cache, if it is there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    check_hub_reference(dataset, "datasets")
    try:
        return Path(snapshot_download(dataset, repo_type="dataset", local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def parquet_rows(path: Path) -> Rows:
    """Rows of a parquet file, some hundreds in memory at a time."""
    from pyarrow import parquet

    def batches() -> Iterator[Any]:
        with parquet.ParquetFile(path) as file:
            groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
            for chunk in (group.column(i) for group in groups for i in range(group.num_columns)):
                if chunk.total_uncompressed_size > most_bytes:  # what it becomes in memory
                    raise _too_large(f"{path}: column {chunk.path_in_schema!a:.100}", most_bytes)
            yield from file.iter_batches(batch_size=ROWS_AT_ONCE)

    most_bytes = _most_bytes([path])
    return _rows(str(path), batches(), "parquet", most_bytes)


def _most_bytes(files: Iterable[Path]) -> int:
    return max(_MOST_BYTES, _MOST_TIMES * sum(file.stat().st_size for file in files))


def _too_large(what: str, most_bytes: int) -> InputError:
    return InputError(
        f"{what}: becomes more than {most_bytes:,} bytes, {_MOST_TIMES:,} times its file; drop the "
        "column, or write the data as JSONL"
    )


def arrow_rows(files: Sequence[Path], label: str) -> Rows:
    """Rows of Arrow files as `datasets` writes them, numbered through."""
    import pyarrow

    def batches() -> Iterator[Any]:
        for file in files:
            check_regular(file)
            with pyarrow.memory_map(str(file)) as source, pyarrow.ipc.open_stream(source) as stream:
                for batch in stream:
                    for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                        yield batch.slice(start, ROWS_AT_ONCE)

    present = [file for file in files if file.is_file()]  # who is absent is told as it is opened
    return _rows(label, batches(), "arrow", _most_bytes(present))


def _rows(label: str, batches: Iterable[Any], kind: str, most_bytes: int) -> Rows:
    """(place, row) of each row of batches or tables of Arrow.

    Raises: InputError: the file is damaged, holds no rows, or has a value that Python cannot hold;
        or all that were read together have more than `most_bytes`.
    """
    import pyarrow

    number = nbytes = 0
    try:
        for batch in _pieces(label, batches):
            columns = {name: batch.column(i) for i, name in enumerate(batch.schema.names)}
            for name, column in columns.items():
                with _named(label, number, name, column):
                    count, column_bytes = _extent(column)
                    if count > _MOST_ROW_VALUES:
                        raise ValueError(f"more than {_MOST_ROW_VALUES:,} values in a row")
                nbytes += column_bytes + _BYTES_OF_A_VALUE * count
            if nbytes > most_bytes:
                raise _too_large(label, most_bytes)
            values = []
            for name, column in columns.items():
                with _named(label, number, name, column):
                    values.append(column.to_pylist())
            for row in zip(*values, strict=True):
                number += 1
                yield f"{label}, row {number}", dict(zip(columns, row, strict=True))
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"{label}: cannot be read as {kind}: {error}") from error
    if not number:
        raise InputError(f"{label}: no rows")


def _pieces(label: str, batches: Iterable[Any]) -> Iterator[Any]:
    """Batches or tables in parts of no more values than may be there at once, or of one row."""
    before = 0
    for batch in batches:
        for i, name in enumerate(batch.schema.names):
            with _named(label, before, name, batch.column(i)):
                batch.column(i).validate(full=True)  # a damaged offset leads anywhere in memory
        before += batch.num_rows
        yield from _halved(batch)


def _halved(batch: Any) -> Iterator[Any]:
    count, columns = batch.num_rows, (batch.column(i) for i in range(batch.num_columns))
    if count > 1 and any(_extent(column)[0] > _MOST_VALUES for column in columns):
        yield from _halved(batch.slice(0, count // 2))
        yield from _halved(batch.slice(count // 2))
    else:
        yield batch


@contextmanager
def _named(label: str, before: int, name: str, column: Any) -> Iterator[None]:
    """Raises: InputError naming rows and column for what a column cannot be read as."""
    try:
        yield
    # text that is not UTF-8, dates after the year 9999, time zones that are not known here
    except (ValueError, ArithmeticError, LookupError) as error:
        raise InputError(
            f"{label}, rows {before + 1} to {before + len(column)}: column {name!a:.100}: "
            f"{error or type(error).__name__}; mend or drop the column"
        ) from None


def _extent(column: Any) -> tuple[int, int]:
    """(values at any depth, bytes at most) of a column as Python objects."""
    from pyarrow import types

    if hasattr(column, "chunks"):
        return _summed(column.chunks)
    column = getattr(column, "storage", column)  # of an extension type
    if types.is_dictionary(column.type):
        return _extent_of_kept(column.dictionary, len(column), column.indices)
    if types.is_run_end_encoded(column.type):
        return _extent_of_kept(column.values, len(column), None)
    if types.is_struct(column.type):
        return _summed(column.flatten())
    if types.is_nested(column.type) and hasattr(column, "flatten"):
        values, nbytes = _extent(column.flatten())
        return len(column) + values, nbytes
    return len(column), column.nbytes


def _extent_of_kept(kept: Any, rows: int, indices: Any) -> tuple[int, int]:
    """Of rows that refer to values which are kept once; indices None: whichever they refer to."""
    from pyarrow import compute, types

    kind = kept.type
    if types.is_nested(kind):
        values, nbytes = _extent(kept)
        return rows * max(1, values), rows * nbytes
    if not (types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind)):
        return rows, 8 * rows
    lengths = compute.binary_length(kept)
    if indices is None:
        return rows, rows * (compute.max(lengths).as_py() or 0)
    return rows, compute.sum(lengths.take(indices)).as_py() or 0


def _summed(columns: Iterable[Any]) -> tuple[int, int]:
    values, nbytes = zip((0, 0), *map(_extent, columns), strict=True)
    return sum(values), sum(nbytes)
