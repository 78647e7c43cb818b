"""Parquet files and data sets of the package `datasets` (extra `data`), imported only when met.

Only what is on this machine is read: `datasets` is asked for its cache, never for the network, and
versions that could run a data set's own code are refused. Rows are those of the Arrow tables: what
a column of images, audio or video refers to is neither decoded nor opened.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mlxstacks.errors import InputError
from mlxstacks.regular_files import check_hub_reference, check_regular

Rows = Iterator[tuple[str, dict[str, Any]]]
ROWS_AT_ONCE = 256
INSTALL = "pip install 'mlxstacks[data]'"


def is_saved_set(path: Path) -> bool:
    """Whether `save_to_disk` wrote this directory."""
    one = (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    return one or (path / "dataset_dict.json").is_file()


def saved_set(path: Path, split: str) -> tuple[Rows, list[Path]]:
    """Rows and files of a directory by `save_to_disk`; of several splits, the one asked for.

    Raises:
        InputError: no such split, or a directory that is damaged or names files outside it.
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
    """Rows and files of a data set that `datasets.load_dataset` once prepared; None if it did not,
    or if the package is missing.

    Raises:
        InputError: several configurations are in the cache, or none with this name or split.
    """
    if _missing("datasets"):
        return None
    datasets = _datasets(dataset)
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
        found = builder.as_dataset(split=split)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{dataset}: the cached data set cannot be read: {error}") from error
    tables = found.with_format("arrow").iter(ROWS_AT_ONCE)
    files = sorted({Path(file["filename"]) for file in found.cache_files})
    return _rows(dataset, tables, "arrow"), files


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
    _need_pyarrow(path)
    from pyarrow import parquet

    def batches() -> Iterator[Any]:
        with parquet.ParquetFile(path) as file:
            yield from file.iter_batches(batch_size=ROWS_AT_ONCE)

    return _rows(str(path), batches(), "parquet")


def arrow_rows(files: Iterable[Path], label: str) -> Rows:
    """Rows of Arrow files as `datasets` writes them, numbered through."""
    _need_pyarrow(label)
    import pyarrow

    def batches() -> Iterator[Any]:
        for file in files:
            check_regular(file)
            with pyarrow.memory_map(str(file)) as source, pyarrow.ipc.open_stream(source) as stream:
                for batch in stream:
                    for start in range(0, batch.num_rows, ROWS_AT_ONCE):
                        yield batch.slice(start, ROWS_AT_ONCE)

    return _rows(label, batches(), "arrow")


def _rows(label: str, batches: Iterable[Any], kind: str) -> Rows:
    """(place, row) of each row of batches or tables of Arrow.

    Raises: InputError: the file is damaged, holds no rows, or has a value that Python cannot hold.
    """
    import pyarrow

    number = 0
    try:
        for batch in batches:
            names = batch.schema.names
            columns = [
                _values(label, number, name, batch.column(i)) for i, name in enumerate(names)
            ]
            for values in zip(*columns, strict=True):
                number += 1
                yield f"{label}, row {number}", dict(zip(names, values, strict=True))
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"{label}: cannot be read as {kind}: {error}") from error
    if not number:
        raise InputError(f"{label}: no rows")


def _values(label: str, before: int, name: str, column: Any) -> list[Any]:
    try:
        column.validate(full=True)  # a damaged offset leads anywhere in memory
        values: list[Any] = column.to_pylist()
    # text that is not UTF-8, dates after the year 9999, time zones that are not known here
    except (ValueError, ArithmeticError, LookupError) as error:
        raise InputError(
            f"{label}, rows {before + 1} to {before + len(column)}: column {name!a:.100}: "
            f"{error or type(error).__name__}; mend or drop the column"
        ) from None
    return values


def _need_pyarrow(what: object) -> None:
    if _missing("pyarrow"):
        raise InputError(f"{what}: reading this needs the package pyarrow: {INSTALL}")


def _missing(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is None


def _datasets(what: str) -> Any:
    if _missing("datasets"):
        raise InputError(f"{what}: reading this needs the package datasets: {INSTALL}")
    import datasets

    # Version 4 can no longer run a loading script that a data set brings along.
    if int(datasets.__version__.split(".")[0]) < 4:
        raise InputError(f"{what}: needs datasets 4 or newer, have {datasets.__version__}")
    return datasets
