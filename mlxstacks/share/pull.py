"""`mlxstacks pull`: the files of a thing from the hub, checked before they appear.

A repository is a stranger's. What it lists decides what is downloaded; only files of known names
are, none that is a pickle or code. They go through the hub's cache into a directory that becomes
the target once every one of them was checked.
"""

import hashlib
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from mlxstacks.command_line import command_line
from mlxstacks.errors import InputError
from mlxstacks.files.disk import user_path
from mlxstacks.files.manifest import Manifest, parse_manifest
from mlxstacks.files.outputs import listed_entries, staged_directory
from mlxstacks.files.side_files import clone_or_link
from mlxstacks.files.store_files import MANIFEST, own_entries
from mlxstacks.files.strict_json import MAX_JSON_BYTES
from mlxstacks.memory import bytes_in_words
from mlxstacks.share.settings import PullSettings
from mlxstacks.share.things import (
    MAX_FILES,
    Kind,
    asking,
    check_repo,
    check_thing,
    kind_of,
    own_files,
)
from mlxstacks.study.document import Table, counted
from mlxstacks.study.render.words import clean
from mlxstacks.study.result import Result

_MOST_LISTED = 20


def pull(
    settings: PullSettings, *, dry_run: bool = False, progress: Callable[..., None] | None = None
) -> Result:
    """Download what the repository is; in a dry run only say what that would be.

    Raises: InputError: no adapter, store or model in safetensors, a hostile name, too many bytes,
        a file that is not what hub or manifest say; or the hub is not reached. TargetError.
    """
    repo_id = check_repo(settings.repo_id)
    if settings.save_path is None:
        raise InputError("pull needs save_path")
    target = user_path(settings.save_path)
    if dry_run and constants.HF_HUB_OFFLINE:
        verdict = f"Would download {repo_id} to {target}; the hub was not asked: HF_HUB_OFFLINE."
        return _result(settings, verdict, {"writes": [str(target)]})
    with asking(repo_id) as api:
        about = api.model_info(repo_id, revision=settings.revision, files_metadata=True)
        commit = str(about.sha)
        listed = {file.rfilename: file for file in about.siblings or ()}
        _check_names(listed, repo_id)
        kind, manifest = kind_of(listed, repo_id), None
        if kind == "store":
            _size(listed[MANIFEST], MAX_JSON_BYTES)
            manifest = _manifest(api.hf_hub_download(repo_id, MANIFEST, revision=commit))
    files = own_files(kind, listed, manifest)
    if missing := [name for name in files if name not in listed]:
        raise InputError(f"{repo_id}: its manifest names {missing[0]}, which is not there")
    sizes = {name: _size(listed[name], settings.max_bytes) for name in files}
    total = sum(sizes.values())
    words = f"{counted(len(sizes), 'file')}, {bytes_in_words(total)}"
    if total > settings.max_bytes:
        most = f"allowed: {settings.max_bytes:,} bytes; raise --max-bytes"
        raise InputError(f"{repo_id}: {words}, {most}")
    others = [clean(name, 200) for name in listed if name not in sizes][:_MOST_LISTED]
    notes = (f"Not downloaded: {', '.join(others)}.",) if others else ()
    data: dict[str, Any] = {"repo_id": repo_id, "commit": commit, "kind": kind, "files": sizes}
    data["writes"] = [str(target)]
    if dry_run:
        verdict = f"Would download the {kind} {repo_id} to {target}: {words}."
        return _result(settings, verdict, data, notes)
    owned = own_entries if kind == "store" else listed_entries
    with staged_directory(target, force=settings.force, needed_bytes=total, owned=owned) as staged:
        done = 0
        for name in files:
            if progress is not None:
                progress(done, max(total, 1), f"{name}, of {words}")
            with asking(repo_id) as api:
                cached = Path(api.hf_hub_download(repo_id, name, revision=commit))
            _take(cached, staged / name, listed[name], link=kind == "model")
            done += sizes[name]
        check_thing(kind, staged, files)
    hashed = "every header and every hash of its manifest" if manifest else "every header"
    verdict = f"Downloaded the {kind} {repo_id} ({commit[:12]}) to {target}: {words}; {hashed} "
    return _result(settings, f"{verdict}was checked.", data, notes, kind)


def _check_names(listed: Mapping[str, Any], repo_id: str) -> None:
    """Raises: InputError for a path that could leave a directory, or hides what it is."""
    if len(listed) > MAX_FILES:
        raise InputError(f"{repo_id}: {len(listed):,} files, allowed: {MAX_FILES:,}")
    for name in listed:
        parts = name.split("/")
        if {"", ".", ".."} & {*parts} or "\\" in name or not name.isprintable():
            raise InputError(f"{repo_id}: names a file {name[:200]!a}; nothing was downloaded")
    folded = sorted(name.casefold() for name in listed)
    if twice := [a for a, b in pairwise(folded) if a == b]:
        raise InputError(f"{repo_id}: two files are {twice[0][:200]!a} where case does not count")


def _size(file: Any, most: int) -> int:
    """Bytes, as the hub lists them. Raises: InputError for none, or too many."""
    size = file.size
    if type(size) is not int or not 0 <= size <= most:
        raise InputError(f"{file.rfilename}: {size} bytes by the hub, allowed: {most:,}")
    return size


def _manifest(path: str) -> Manifest:
    try:
        with Path(path).open("rb") as file:
            return parse_manifest(file.read(MAX_JSON_BYTES + 1))
    except ValueError as error:
        raise InputError(f"{MANIFEST}: damaged: {error}") from None


def _take(cached: Path, staged: Path, listed: Any, link: bool) -> None:
    """A file of the hub's cache, if it is the one that the hub lists.

    Raises: InputError: it leads out of the cache, or has another size or hash.
    """
    name = listed.rfilename
    if not cached.resolve().is_relative_to(Path(constants.HF_HUB_CACHE).resolve()):
        raise InputError(f"{name}: leads out of the hub's cache; remove {cached} and pull again")
    staged.parent.mkdir(exist_ok=True)
    # Only models are linked to the cache: other programs go on training an adapter in its file.
    clone_or_link(cached, staged, link=link and name.endswith(".safetensors"))
    with staged.open("rb") as file:
        sha256 = None if listed.lfs is None else hashlib.file_digest(file, "sha256").hexdigest()
    if staged.stat().st_size != listed.size or (sha256 and sha256 != listed.lfs.sha256):
        raise InputError(f"{name}: is not what the hub lists, by size or hash; pull again")


def _result(
    settings: PullSettings, verdict: str, data: dict[str, Any],
    notes: tuple[str, ...] = (), kind: Kind | None = None,
) -> Result:  # fmt: skip
    """kind: of what was downloaded; None in a dry run."""
    target, steps = settings.save_path, {}
    if kind == "store":
        steps["See also"] = command_line("mlxstacks stacks list", target)
    elif kind is not None:
        option = {"model": target} if kind == "model" else {"model": "BASE", "adapter_path": target}
        steps["Try it"] = command_line("mlxstacks chat", **option)
    files = data.get("files", {})
    table = Table.of("files", "Files", {"file": "text", "size": "bytes"}, files.items())
    return Result(
        kind="pull", title="Download from the hub", status="done" if kind else "planned",
        outcome="downloaded" if kind else "planned", verdict=verdict, notes=notes, data=data,
        settings=settings.model_dump(mode="json"), blocks=(table,) if files else (),
        directory=target, next_steps=steps,
    )  # fmt: skip
