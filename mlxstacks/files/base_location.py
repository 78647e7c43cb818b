"""Where the base and the data of a store are: remembered beside the manifest, looked for, checked.

The manifest names the base (hub id, or the directory's name) and holds its fingerprint; the paths
of its data begin in a directory that it does not name. Both places are a matter of this machine, so
they stand in a file of their own, `base.json`: equal runs still write equal manifests, and whoever
hands a store on may leave it out. Of a path inside the home directory it holds what follows `~`; a
path from the store to the base is left out where it would lead into the home directory from above.
No export holds either. Nothing reads the file but `find_base` and `data_directories`.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlxstacks.errors import InputError
from mlxstacks.files.checkpoint import Checkpoint, fingerprint, open_checkpoint, read_json_object
from mlxstacks.files.disk import user_path
from mlxstacks.files.hub import in_hub_cache, may_be_hub_id, resolve_model
from mlxstacks.files.manifest import binding_notes
from mlxstacks.files.outputs import write_json
from mlxstacks.files.store import Store
from mlxstacks.files.store_files import LOCATION

_PACKAGE = Path(__file__).resolve().parents[1]


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


def remember_places(store: Store, model: str, data: Path | None = None) -> None:
    """Write where the base is, from the store and on this machine, if it is a directory: what has a
    hub id is found by that. And where the paths of a domain's data begin. Raises: TargetError.
    """
    location = _base_location(store, user_path(model).resolve())
    data_places = _strings(_location(store).get("data"))
    if data is not None:
        data_places.append(_below_home(data.resolve()))
    if data_places:
        location["data"] = list(dict.fromkeys(data_places))
    if location:
        write_json(store.path / LOCATION, location, sort_keys=True)


def _base_location(store: Store, directory: Path) -> dict[str, Any]:
    if not directory.is_dir():
        return {}
    location = {"path": _below_home(directory)}
    common, home = Path(os.path.commonpath([directory, store.path])), Path.home().resolve()
    if common == home or not home.is_relative_to(common):
        location["relative_path"] = os.path.relpath(directory, store.path)
    return location


def _below_home(path: Path) -> str:
    home = Path.home().resolve()
    return str(Path("~") / path.relative_to(home) if path.is_relative_to(home) else path)


def data_directories(store: Store) -> list[Path]:
    """Where relative paths of its domains' data began when they were trained, on this machine."""
    return [Path(os.path.expanduser(place)) for place in _strings(_location(store).get("data"))]


def _location(store: Store) -> dict[str, Any]:
    try:
        return read_json_object(store.path / LOCATION)
    except InputError:  # an older store, or one that was handed on
        return {}


def _strings(value: Any) -> list[str]:
    return [item for item in value if isinstance(item, str)] if isinstance(value, list) else []


def find_base(store: Store, model: str | None, notes: list[str] | None = None) -> Checkpoint:
    """The base of a store, its fingerprint compared.

    model: a directory or hub id that somebody gave; nothing else is tried then. None: beside the
        store, where it was when the store was made (seen from the store, then on this machine),
        where the manifest's name leads from here, the hub by its id.
    notes: gets a line on where it was, if nobody gave it, and one on a weak bond.
    Raises: InputError: no such model; in none of these places, each with what is there instead.
        StoreError: the model that was given is another one.
    """
    manifest = store.manifest
    # nano's store and model come together, so what binds them is of no use to its users
    if notes is not None and not store.path.is_relative_to(_PACKAGE):
        notes += [f"{store.path}: {note}" for note in binding_notes(manifest.base_fingerprint)]
    if model is not None:
        checkpoint = open_checkpoint(resolve_model(model))
        store.check_base(fingerprint(checkpoint, manifest.base_fingerprint))
        return checkpoint
    problems = []
    for place in _places(store):
        try:
            checkpoint = open_checkpoint(resolve_model(place))
            found = fingerprint(checkpoint, manifest.base_fingerprint)
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
    location = _location(store)
    relative, path = location.get("relative_path"), location.get("path")
    places = [store.path.parent / Path(name).name]
    places += [store.path / relative] if isinstance(relative, str) else []
    places += [Path(os.path.expanduser(path))] if isinstance(path, str) else []
    places.append(Path(os.path.expanduser(name)))
    yield from dict.fromkeys(Path(os.path.abspath(place)) for place in places)
    if may_be_hub_id(name) and ("/" in name or in_hub_cache(name)):
        yield name
