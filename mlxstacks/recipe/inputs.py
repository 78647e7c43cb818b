"""What a command reads, by its settings: which of it is on this machine. Imports no mlx."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxstacks.errors import InputError
from mlxstacks.files.disk import user_path
from mlxstacks.files.hub import in_hub_cache

if TYPE_CHECKING:
    from pydantic import BaseModel

    from mlxstacks.data.settings import TrainDataSettings

# Settings that name what is read. `save_path` of `stack` is read too, where it is there.
KEYS = (
    "model", "adapter_path", "store_path", "other_path", "router_path", "routers", "targets",
    "data", "log_path", "prompts", "counting_library",
)  # fmt: skip
# Of these commands too; elsewhere the names mean other things.
_MORE_KEYS = {"confound": ("persona", "items"), "identity": ("persona", "items", "suite")}
# Made from the settings, not read.
_MADE = {("suite", "default")}
# A new store is made by the command itself; a log that is not there has no events.
_NEED_NOT_BE = {("stacks import", "store_path"), ("route gaps", "log_path")}
# Files of a data directory, and whether a run needs them.
_ROWS = {"train.jsonl": True, "valid.jsonl": False}


@dataclass(frozen=True, slots=True)
class Input:
    """Something that is read. rows: lines of a JSONL file; None for what is no such file."""

    key: str
    path: str
    here: bool
    rows: int | None = None
    needed: bool = True

    @property
    def words(self) -> str:
        """What a plan says of it."""
        if self.rows is not None:
            return f"{self.path}: {self.rows:,} rows"
        if self.here:
            return f"{self.path}: here"
        of_rows = "rows unknown: " if self.path.endswith((".jsonl", ".json", ".parquet")) else ""
        return f"{of_rows}{self.path} is not here" + ("" if self.needed else " (not needed)")


def inputs_of(name: str, settings: "BaseModel") -> list[Input]:
    """All that a command reads, in the order of KEYS; directories of rows by their files."""
    found: list[Input] = []
    for key in (*KEYS, *_MORE_KEYS.get(name, ())):
        value = getattr(settings, key, None)
        if value is None or (name, key) in _NEED_NOT_BE or (key, value) in _MADE:
            continue
        if key == "data" and name in ("train", "sweep"):
            found += _rows_of(value)
        elif not (key == "data" and _domains(name, settings)):
            paths = value if isinstance(value, tuple) else (value,)
            # `prompts` is a file, a number of prompts or the prompts themselves, by the command.
            found += [_input(key, path) for path in paths if isinstance(path, str)]
    found += [_input("data", path) for path in dict.fromkeys(_sources(name, settings))]
    return [*found, *_benchmarks(settings)] if name == "eval" else found


def absent(inputs: list[Input]) -> list[Input]:
    """Those that a run could not do without."""
    return [one for one in inputs if one.needed and not one.here]


def check_inputs(name: str, settings: "BaseModel") -> None:
    """For a plan without a recipe, of paths that were typed. A model may be downloaded by the run.

    Raises: InputError naming each input that is not here.
    """
    missing = [one for one in absent(inputs_of(name, settings)) if one.key != "model"]
    if missing:
        listed = ", ".join(f"{one.key} {one.path}" for one in missing)
        raise InputError(f"{name}: not here: {listed}; give a path that is there")


def _domains(name: str, settings: Any) -> Sequence[Any]:
    """The domains of a stack run, by whose names the files in `data` are known."""
    if name not in ("stack", "stack compare"):
        return ()
    domains: Sequence[Any] = (settings.run if name == "stack compare" else settings).domains
    return domains


def _rows_of(data: "str | TrainDataSettings") -> Iterator[Input]:
    from mlxstacks.data.sources import SUFFIXES, train_data_settings

    for source in train_data_settings(data).sources:
        path = user_path(source.path or "")
        if source.dataset:
            here = _is_data_set_here(source.dataset, source.name, source.split)
            yield Input("data", source.label, here)
        elif path.suffix in SUFFIXES or (path.exists() and not (path / "train.jsonl").exists()):
            yield _input("data", source.label)
        else:
            for name, needed in _ROWS.items():
                yield _input("data", str(Path(source.label) / name), needed)


def _input(key: str, text: str, needed: bool = True) -> Input:
    from mlxstacks.data.json_rows import count_rows

    path = user_path(text)
    here = path.exists()
    if not here and key == "model":
        here = in_hub_cache(text)
    if not here and key == "items":
        here = _is_data_set_here(text)
    rows = count_rows(path) if here and path.suffix == ".jsonl" and path.is_file() else None
    return Input(key, text, here, rows, needed)


def _is_data_set_here(dataset: str, name: str | None = None, split: str = "test") -> bool:
    """Whether a data set is in the Hugging Face cache and can be opened; asks nobody."""
    from mlxstacks.data.settings import SourceSettings
    from mlxstacks.data.sources import open_source

    try:
        open_source(SourceSettings(dataset=dataset, name=name, split=split), Path.cwd())
    except ValueError:  # InputError; or of the settings, for what is no id at all
        return False
    return True


def _benchmarks(settings: Any) -> Iterator[Input]:
    """Data sets of the tasks, where `data` names none of one's own and answers are to be made.

    Tasks may share one, as a part of it each: it is here where the parts of all of them are.
    """
    from mlxstacks.studies.benchmarks.tasks import task_named

    if settings.data is not None or settings.regrade is not None:
        return
    here: dict[str, bool] = {}
    for sources in (task_named(task).sources for task in settings.own_tasks):
        if sources:
            found = any(_is_data_set_here(one.dataset, one.name, one.split) for one in sources)
            here[sources[0].dataset] = here.get(sources[0].dataset, True) and found
    for dataset, all_here in here.items():
        yield Input("data", dataset, all_here)


def _sources(name: str, settings: Any) -> Iterator[str]:
    """Files of the domains, labels and unseen data that settings list."""
    data = getattr(settings, "data", None)
    root = Path(data if isinstance(data, str) else ".")
    for domain in _domains(name, settings):
        if domain.data is None:
            yield str(root / f"{domain.name}.jsonl")
        else:
            yield from (str(root / s.path) for s in domain.data.sources if s.path)
    for labelled in getattr(settings, "sources", ()):
        yield from (str(root / source.path) for source in labelled.data.sources if source.path)
    for source in getattr(settings, "unseen", ()) or ():
        path = source if isinstance(source, str) else getattr(source, "path", None)
        if path:
            yield str(root / path)
