"""Where the base of a store is: remembered beside the manifest, looked for, told by fingerprint.

The manifest names the base (hub id, or the directory's name) and holds its fingerprint. Its place
is a matter of this machine, so it stands in a file of its own, `base.json`: equal runs still write
equal manifests, and whoever hands a store on may leave it out. Of a path inside the home directory
it holds what follows `~`; a path from the store to the base is left out where it would lead into
the home directory from above. No export holds either. Nothing reads the file but `find_base`.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from mlxstacks.errors import InputError
from mlxstacks.files.checkpoint import Checkpoint, fingerprint, open_checkpoint, read_json_object
from mlxstacks.files.disk import user_path
from mlxstacks.files.hub import in_hub_cache, may_be_hub_id, resolve_model
from mlxstacks.files.outputs import write_json
from mlxstacks.files.store import Store
from mlxstacks.files.store_files import LOCATION


def base_name(model: str | Path) -> str:
    """The name of a base without where it is: a hub id, or the last part of a directory's path.

    A directory inside the hub cache has the name of its repository.
    """
    path = user_path(model)
    if not path.is_dir():
        return str(model)
    directory = path.resolve()
    repository = directory.parent.parent.name
    if directory.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1)
    return directory.name


def remember_base(store: Store, model: str) -> None:
    """Write where the base is, from the store and on this machine, if it is a directory: what has a
    hub id is found by that. Raises: TargetError.
    """
    directory, home = user_path(model).resolve(), Path.home().resolve()
    if not directory.is_dir():
        return
    inside = directory.is_relative_to(home)
    path = Path("~") / directory.relative_to(home) if inside else directory
    location = {"path": str(path)}
    common = Path(os.path.commonpath([directory, store.path]))
    if common == home or not home.is_relative_to(common):
        location["relative_path"] = os.path.relpath(directory, store.path)
    write_json(store.path / LOCATION, location, sort_keys=True)


def find_base(store: Store, model: str | None, notes: list[str] | None = None) -> Checkpoint:
    """The base of a store, its fingerprint compared.

    model: a directory or hub id that somebody gave; nothing else is tried then. None: beside the
        store, where it was when the store was made (seen from the store, then on this machine),
        where the manifest's name leads from here, the hub by its id.
    notes: gets a line on where it was, if nobody gave it.
    Raises: InputError: no such model; in none of these places, each with what is there instead.
        StoreError: the model that was given is another one.
    """
    if model is not None:
        checkpoint = open_checkpoint(resolve_model(model))
        store.check_base(fingerprint(checkpoint))
        return checkpoint
    manifest, problems = store.manifest, []
    for place in _places(store):
        try:
            checkpoint = open_checkpoint(resolve_model(place))
            found = fingerprint(checkpoint)
        except InputError as error:
            missing = isinstance(place, Path) and not os.path.isdir(place)
            problems.append(f"{place}: not there" if missing else str(error))
            continue
        if found == manifest.base_fingerprint:
            if notes is not None:
                notes.append(f"The base of the store is {checkpoint.directory}.")
            return checkpoint
        problems.append(f"{place}: another model, with fingerprint {found[:12]}")
    listed = "".join(f"\n  {problem}" for problem in problems)
    raise InputError(
        f"{store.path}: its base {manifest.base_model} (fingerprint "
        f"{manifest.base_fingerprint[:12]}) is not found here; looked at:{listed}\n"
        "give its directory or hub id with --model"
    )


def _places(store: Store) -> Iterator[Path | str]:
    """Directories, then a hub id, each once."""
    name = store.manifest.base_model
    try:
        location = read_json_object(store.path / LOCATION)
    except InputError:  # an older store, or one that was handed on
        location = {}
    relative, path = location.get("relative_path"), location.get("path")
    places = [store.path.parent / Path(name).name]
    places += [store.path / relative] if isinstance(relative, str) else []
    places += [Path(os.path.expanduser(path))] if isinstance(path, str) else []
    places.append(Path(os.path.expanduser(name)))
    yield from dict.fromkeys(Path(os.path.abspath(place)) for place in places)
    if may_be_hub_id(name) and ("/" in name or in_hub_cache(name)):
        yield name
