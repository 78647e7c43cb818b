"""`mlxstacks push`: a thing's own files and a card, in a folder first, then on the hub."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mlxstacks.command_line import command_line
from mlxstacks.errors import InputError
from mlxstacks.files.checkpoint import read_json_object
from mlxstacks.files.disk import user_path
from mlxstacks.files.manifest import FOLDERS, Manifest
from mlxstacks.files.outputs import mark_bare, staged_directory, write_json
from mlxstacks.files.side_files import clone_or_link
from mlxstacks.files.store_commands import part_of
from mlxstacks.files.store_files import MANIFEST, read_manifest
from mlxstacks.memory import bytes_in_words
from mlxstacks.share.card import write_card
from mlxstacks.share.settings import PushSettings
from mlxstacks.share.things import (
    CARD,
    VOCABULARY,
    Kind,
    asking,
    check_plain,
    check_repo,
    check_thing,
    kind_of,
    own_files,
    refuse_places,
    without_paths,
)
from mlxstacks.study.document import Table, counted
from mlxstacks.study.result import Result


def push(
    settings: PushSettings, *, dry_run: bool = False, progress: Callable[..., None] | None = None
) -> Result:
    """Write the folder, check it, and upload it; in a dry run it is only written.

    Raises: InputError: what is there is no adapter, store or model, is damaged, or holds a path of
        this machine where it cannot be taken out; or the hub refuses. TargetError.
    """
    repo_id = check_repo(settings.repo_id)
    if settings.target is None or settings.save_path is None:
        raise InputError("push needs target and save_path")
    source, target = user_path(settings.target), user_path(settings.save_path)
    if not source.is_dir():
        raise InputError(f"{source}: no such directory; give an adapter, a store or a model")
    names = [path.name for path in source.iterdir()]
    kind = kind_of(names, str(source))
    if settings.domains and kind != "store":
        raise InputError(f"{source}: domains are of a store, this is one {kind}")
    manifest = None
    if kind == "store":
        whole = read_manifest(source)
        manifest = part_of(whole, settings.domains or [d.name for d in whole.domains])
    files = [name for name in own_files(kind, names, manifest) if name != CARD]
    check_plain(source, files)
    needed = sum((source / name).stat().st_size for name in files if (source / name).exists())
    with staged_directory(
        target, force=settings.force, inputs=[source], needed_bytes=needed
    ) as staged:
        changed, knows_base = _copy(kind, source, staged, files, manifest), True
        if settings.card:
            files.append(CARD)
            knows_base = write_card(kind, source, staged, manifest, settings)
        check_thing(kind, staged, files)
        refuse_places(staged, files, source)
        sizes = {name: (staged / name).stat().st_size for name in sorted(files)}
    mark_bare(target)  # nothing is in it that is not elsewhere too
    words = f"{counted(len(sizes), 'file')}, {bytes_in_words(sum(sizes.values()))}"
    data: dict[str, Any] = {
        "repo_id": repo_id, "kind": kind, "save_path": str(target), "files": sizes,
        "paths_to_names": changed, "commit": None,
    }  # fmt: skip
    notes = [f"Absolute paths became names in {', '.join(changed)}."] if changed else []
    if not knows_base:
        notes.append("The hub id of the base is not known: --base-model puts it on the card.")
    verdict = f"Nothing was uploaded. The {kind} for {repo_id} is in {target}: {words}."
    if not dry_run:
        if progress is not None:
            progress(0, 1, f"uploading {words}")
        data["commit"] = commit = _upload(settings, repo_id, kind, target, [*sizes])
        verdict = f"Uploaded the {kind} to {repo_id} ({commit[:12]}): {words}."
    return Result(
        kind="push", title="Upload to the hub", status="planned" if dry_run else "done",
        outcome="planned" if dry_run else "uploaded", verdict=verdict, data=data,
        settings=settings.model_dump(mode="json"), notes=tuple(notes),
        directory=None if dry_run else str(target),
        blocks=(Table.of("files", "Files", {"file": "text", "size": "bytes"}, sizes.items()),),
        next_steps={} if dry_run else {"Get it": command_line("mlxstacks pull", repo_id)},
    )  # fmt: skip


def _copy(
    kind: Kind, source: Path, staged: Path, files: Sequence[str], manifest: Manifest | None
) -> list[str]:
    """The thing's files, JSON without absolute paths; names the files where there were some."""
    changed = []
    for name in files:
        (staged / name).parent.mkdir(exist_ok=True)
        # a store's other JSON is bound by its hash, and names rows by hashes
        is_ours = name.endswith(".json") and (manifest is None or name == MANIFEST)
        if not is_ours or name in VOCABULARY:
            clone_or_link(source / name, staged / name)
            continue
        path = source / name
        value = manifest.as_json() if manifest else read_json_object(path, unique_keys=False)
        public = without_paths(value)
        changed += [name] if public != value else []
        if manifest is not None:
            public = Manifest.from_json(public).document()
        write_json(staged / name, public, sort_keys=manifest is not None, allow_nan=True)
    return changed


def _upload(
    settings: PushSettings, repo_id: str, kind: Kind, folder: Path, files: Sequence[str]
) -> str:
    """Returns the id of the commit. Files of a store that the manifest no longer names go."""
    with asking(repo_id) as api:
        api.create_repo(repo_id, private=settings.private or None, exist_ok=True)
        if settings.private and not api.model_info(repo_id).private:
            raise InputError(
                f"{repo_id}: is public, and --private was asked for; nothing was uploaded. Change "
                "it on its page, or choose another repository"
            )
        if settings.revision:
            api.create_branch(repo_id, branch=settings.revision, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id, folder_path=folder, allow_patterns=list(files),
            delete_patterns=[f"{name}/*" for name in FOLDERS] if kind == "store" else None,
            revision=settings.revision, commit_message=f"Upload {kind} with mlxstacks",
        )  # fmt: skip
    return str(commit.oid)
