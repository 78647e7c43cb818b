"""Parquet files and data sets of the package `datasets` (extra `data`), imported only when met.

Only what is on this machine is read: `datasets` is asked for its cache, never for the network, and
versions that could run a data set's own code are refused.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mlxstacks.errors import InputError

Rows = Iterator[tuple[str, dict[str, Any]]]
ROWS_AT_ONCE = 256
INSTALL = "pip install 'mlxstacks[data]'"


def is_saved_set(path: Path) -> bool:
    """Whether `save_to_disk` wrote this directory."""
    one = (path / "state.json").is_file() and (path / "dataset_info.json").is_file()
    return one or (path / "dataset_dict.json").is_file()


def saved_set(path: Path, split: str) -> tuple[Rows, list[Path]]:
    """Rows and files of a directory by `save_to_disk`; of several splits, the one asked for."""
    datasets = _datasets(str(path))
    try:
        found = datasets.load_from_disk(str(path))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}: cannot be read as a saved data set: {error}") from error
    if isinstance(found, datasets.DatasetDict):
        if split not in found:
            raise InputError(f"{path}: no split {split!r}; it has {', '.join(sorted(found))}")
        found = found[split]
    return _set_rows(str(path), found), _files_of(found)


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
    short = dataset.rpartition("/")[2]
    options = {"config_name": name, "version": "auto", "hash": "auto"}
    try:
        builder = Cache(dataset_name=short, repo_id=dataset, **options)
        found = builder.as_dataset(split=split)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{dataset}: the cached data set cannot be read: {error}") from error
    return _set_rows(dataset, found), _files_of(found)


def hub_snapshot(dataset: str) -> Path | None:
    """The directory of a data set in the hub cache, if it is there."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(dataset, repo_type="dataset", local_files_only=True))
    except (LocalEntryNotFoundError, HFValidationError):
        return None


def parquet_rows(path: Path) -> Rows:
    """Rows of a parquet file, some hundreds in memory at a time."""
    if _missing("pyarrow"):
        raise InputError(f"{path}: parquet needs the package pyarrow: {INSTALL}")
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=ROWS_AT_ONCE):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path}, row {number}", row
    except (OSError, pyarrow.ArrowException) as error:
        raise InputError(f"{path}: cannot be read as parquet: {error}") from error
    if not number:
        raise InputError(f"{path}: no rows")


def arrow_rows(files: Sequence[Path]) -> Rows:
    """Rows of Arrow files as `datasets` writes them."""
    datasets = _datasets(str(files[0]))
    for file in files:
        yield from _set_rows(str(file), datasets.Dataset.from_file(str(file)))


def _set_rows(label: str, found: Any) -> Rows:
    number = 0
    for number, row in enumerate(found, start=1):
        yield f"{label}, row {number}", row
    if not number:
        raise InputError(f"{label}: no rows")


def _files_of(found: Any) -> list[Path]:
    return sorted({Path(file["filename"]) for file in found.cache_files})


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
