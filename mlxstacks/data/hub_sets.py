"""Data sets of the Hugging Face hub: how many rows one has, by its card; its files, one at a time.

`datasets` says which files a configuration and a split have. It tries for half a minute where the
hub is not reached, so the card is asked for first: one request of at most SECONDS.
"""

from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from mlxstacks.errors import InputError

SECONDS = 5.0


class NotReachedError(InputError):
    """The hub did not answer, or nobody may ask it."""


def card_of(dataset: str) -> dict[str, Any]:
    """The metadata of a data set's card.

    Raises: NotReachedError; InputError: the hub has no such data set for this user.
    """
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RepositoryNotFoundError

    # the HTTP library differs between versions of the hub client; its base error is here in all
    http_error: type[BaseException] = HfHubHTTPError.__bases__[0]
    if constants.HF_HUB_OFFLINE:
        raise NotReachedError(f"{dataset}: the hub is not asked, because HF_HUB_OFFLINE is set")
    try:
        card = HfApi().dataset_info(dataset, timeout=SECONDS).card_data
        return card.to_dict() if card else {}
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise InputError(f"{dataset}: the hub has no such data set: {_line(error)}") from None
    except (http_error, OSError) as error:
        raise NotReachedError(f"{dataset}: the hub is not reachable: {_line(error)}") from None


def rows_by_card(card: Mapping[str, Any], name: str | None, split: str) -> int | None:
    """Rows of a split, where the card has them; a card may hold anything."""
    described: Any = card.get("dataset_info")
    infos = described if isinstance(described, list) else [described]
    try:
        configs = {info.get("config_name", "default"): info["splits"] for info in infos}
        only = "default" if len(configs) > 1 else "".join(configs)
        splits = configs[name or only]
        return {part["name"]: int(part["num_examples"]) for part in splits}[split]
    except (TypeError, ValueError, LookupError, AttributeError):
        return None


def split_files(repository: str, name: str | None, split: str, files: str | None) -> list[str]:
    """Where the files of a split are, in their order: `hf://` with the revision, or a path here.

    repository: an id, or the directory of a data set here. files: a pattern instead of the split's.
    Raises: InputError: not reachable, not allowed, or no such configuration, split or file.
    """
    import datasets

    if not Path(repository).is_dir():
        card_of(repository)
    try:
        with TemporaryDirectory() as scratch:
            builder = datasets.load_dataset_builder(
                repository, name, data_files={split: files} if files else None, cache_dir=scratch
            )
    except (OSError, ValueError, RuntimeError) as error:
        raise _refused(repository, error) from error
    data_files = builder.config.data_files or {}
    if split not in data_files:
        raise InputError(
            f"{repository}: no split {split!r}; it has {', '.join(map(str, data_files))}"
        )
    return [str(file) for file in data_files[split]]


def fetch(url: str) -> Path:
    """A file here; one of the hub is downloaded once, into its cache. Raises: InputError."""
    from datasets.utils.file_utils import cached_path
    from huggingface_hub.errors import HfHubHTTPError

    http_error: type[BaseException] = HfHubHTTPError.__bases__[0]
    try:
        return Path(cached_path(url))
    except (http_error, OSError, ValueError) as error:
        raise _refused(url, error) from error


def name_of(url: str) -> str:
    """The name of a file within its data set."""
    return url.partition("@")[2].partition("/")[2] or Path(url).name


def _refused(what: str, error: BaseException) -> InputError:
    return InputError(
        f"{what}: cannot be downloaded: {_line(error)}; if it has terms, accept them on its page "
        "and run `hf auth login`; or give the path of a file or directory that is there"
    )


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
