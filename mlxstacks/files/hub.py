"""Finds a model by path or hub id."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

from mlxstacks.command_line import command_line
from mlxstacks.errors import CheckpointError
from mlxstacks.files.disk import user_path
from mlxstacks.regular_files import check_hub_reference

# what mlx-lm downloads, without code
ALLOW_PATTERNS = [
    "*.json",
    "model*.safetensors",
    "tokenizer.model",
    "*.tiktoken",
    "tiktoken.model",
    "*.txt",
    "*.jsonl",
    "*.jinja",
]
# The rest of what public repositories keep in safetensors: heads, vision towers, drafters. Not the
# same weights a second time, as Mistral and OpenAI ship them.
_SIDECARS = "*.safetensors"
_TWICE = ["consolidated*", "original/*"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")


def resolve_model(path_or_hub_id: str | Path, sidecars: bool = False) -> Path:
    """The directory of a model: a local directory, else the hub cache, else a download.

    sidecars: with the weights that mlx-lm does not read, for who writes the model anew. What is in
    the cache gets those of its own revision, where the hub answers.

    Raises:
        CheckpointError: neither a directory nor a hub id, or not in the cache and not to be had.
    """
    text = str(path_or_hub_id)
    path = user_path(text, CheckpointError)
    try:
        if text and path.is_dir():
            return path
        if text and path.suffix == ".gguf" and path.is_file():
            command = command_line("mlxstacks convert", path, save_path=path.with_suffix(""))
            raise CheckpointError(f"{path}: a GGUF file; convert it first: `{command}`")
        if text and path.exists():
            raise CheckpointError(f"{path}: is a file; give the model's directory")
    except OSError as error:
        raise CheckpointError(f"{text[:200]!a}: cannot be opened: {error.strerror}") from None
    if isinstance(path_or_hub_id, Path) or not _HUB_ID.fullmatch(text):
        raise CheckpointError(f"{text!r}: no such directory, and not a hub id like owner/name")
    return _snapshot(text, sidecars)


def may_be_hub_id(text: str) -> bool:
    """Whether it has the form of one; that the hub has it is not asked."""
    return _HUB_ID.fullmatch(text) is not None


def in_hub_cache(model: str) -> bool:
    """Whether a hub id was downloaded before; asks nobody."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    check_hub_reference(model, "models", CheckpointError)
    try:
        return isinstance(try_to_load_from_cache(model, "config.json"), str)
    except HFValidationError:
        return False


def _snapshot(hub_id: str, sidecars: bool) -> Path:
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    # the HTTP library differs between versions of the hub client; its base error is here in all
    http_error: type[BaseException] = HfHubHTTPError.__bases__[0]
    wanted: dict[str, Any] = {"allow_patterns": ALLOW_PATTERNS}
    if sidecars:
        wanted = {"allow_patterns": [*ALLOW_PATTERNS, _SIDECARS], "ignore_patterns": _TWICE}
    check_hub_reference(hub_id, "models", CheckpointError)
    try:
        cached = Path(snapshot_download(hub_id, **wanted, local_files_only=True))
        if sidecars and not constants.HF_HUB_OFFLINE:
            with contextlib.suppress(http_error, OSError):
                snapshot_download(hub_id, **wanted, revision=cached.name)
        return cached
    except LocalEntryNotFoundError:
        reason = "HF_HUB_OFFLINE is set"
    except HFValidationError as error:
        raise CheckpointError(f"{hub_id}: no such directory, and no hub id: {error}") from None
    if not constants.HF_HUB_OFFLINE:
        try:
            return Path(snapshot_download(hub_id, **wanted))
        except (http_error, OSError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0]
    raise CheckpointError(
        f"{hub_id}: no such directory, not in the hub cache, and not downloaded: {reason}; "
        "download it first or give a directory"
    )
