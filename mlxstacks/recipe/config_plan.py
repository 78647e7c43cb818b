"""What a command would read, write and train, without running it; of its config where that is all.

`mlxstacks run RECIPE --dry-run` on a laptop says what the run would be on the machine that has the
model: sizes of model, adapters and stacks, the guard's verdict at the longest row that the settings
allow, and each file that is not here. Nothing is evaluated and nothing is written.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxstacks.errors import InputError, TargetError
from mlxstacks.files.disk import user_path
from mlxstacks.files.hub import in_hub_cache, shipped_config
from mlxstacks.memory import bytes_in_words
from mlxstacks.recipe.resolve import call, check_output, naming_nano, plans_itself
from mlxstacks.routing.settings import NO_GAP_LOG
from mlxstacks.study.document import Block, Table, Text, counted
from mlxstacks.study.render.console import byte_parts, cell_text, setting
from mlxstacks.study.result import Result

if TYPE_CHECKING:
    from pydantic import BaseModel

    from mlxstacks.data.settings import SourceSettings, TrainDataSettings
    from mlxstacks.recipe.resolve import Resolved

# Settings that name what is read. `save_path` of `stack` is read too, where it is there.
KEYS = (
    "model", "adapter_path", "store_path", "other_path", "router_path", "routers", "targets",
    "resume_adapter_file",
    "data", "log_path", "prompts", "json_schema", "calibration",
)  # fmt: skip
# Of these commands too; elsewhere the names mean other things.
_MORE_KEYS = {
    "confound": ("persona", "items", "suite"),
    "identity": ("persona", "persona_data", "items", "narrow_items", "suite"),
}
# Made from the settings, not read.
_MADE = (("suite", "default"), ("narrow_items", "default"))
# A new store is made by the command itself; a log that is not there has no events.
_NEED_NOT_BE = {("stacks import", "store_path"), ("route gaps", "log_path")}
# Files of a data directory, and whether a run needs them.
_ROWS = {"train.jsonl": True, "valid.jsonl": False}


@dataclass(frozen=True, slots=True)
class Input:
    """Something that is read. rows: lines of a JSONL file, or of a data set by its card on the hub.
    download: what a run would do, or why it cannot, where a data set is not here.
    """

    key: str
    path: str
    here: bool
    rows: int | None = None
    needed: bool = True
    download: str = ""

    @property
    def words(self) -> str:
        """What a plan says of it."""
        if self.download:
            rows = "rows unknown" if self.rows is None else counted(self.rows, "row")
            return f"{self.path}: {rows}; {self.download}"
        if self.rows is not None:
            return f"{self.path}: {counted(self.rows, 'row')}"
        if self.here:
            return f"{self.path}: here"
        of_rows = "rows unknown: " if self.path.endswith((".jsonl", ".json", ".parquet")) else ""
        return f"{of_rows}{self.path} is not here" + ("" if self.needed else " (not needed)")


def inputs_of(name: str, settings: "BaseModel") -> list[Input]:
    """All that a command reads, in the order of KEYS; directories of rows by their files."""
    from mlxstacks.study.items import item_sources

    inputs: list[Input] = []
    for key in (*KEYS, *_MORE_KEYS.get(name, ())):
        value = getattr(settings, key, None)
        if value is None or (name, key) in _NEED_NOT_BE or (key, value) in _MADE:
            continue
        if key == "data" and name in ("train", "align", "sweep"):
            inputs += _rows_of(value)
        elif not (key == "data" and _domains(name, settings)):
            paths = value if isinstance(value, tuple) else (value,)
            # `prompts` is a file, a number of prompts or the prompts themselves, by the command.
            for path in (path for path in paths if isinstance(path, str)):
                items = item_sources(path) if key in ("items", "narrow_items") else ()
                sets = [source for source in items if source.dataset]
                inputs += _data_sets(key, sets) if sets else [_input(key, path)]
    sources = list(_sources(name, settings))
    data = getattr(settings, "data", None)
    root = Path(data if isinstance(data, str) else ".")
    files = dict.fromkeys(str(root / source.path) for source in sources if source.path)
    inputs += [_input("data", file) for file in files]
    inputs += _data_sets("data", [source for source in sources if source.dataset])
    return [*inputs, *_benchmarks(settings)] if name == "eval" else inputs


def absent(inputs: list[Input]) -> list[Input]:
    """Those that a run could not do without."""
    return [item for item in inputs if item.needed and not item.here]


def check_inputs(name: str, settings: "BaseModel") -> None:
    """For a plan without a recipe, of paths that were typed; what a run may download needs not be.

    Raises: InputError naming each input that is not here.
    """
    missing = [
        item
        for item in absent(inputs_of(name, settings))
        if item.key != "model" and not item.download
    ]
    if missing:
        listed = ", ".join(f"{item.key} {item.path}" for item in missing)
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
            yield from _data_sets("data", [source])
        elif path.suffix in SUFFIXES or (path.exists() and not (path / "train.jsonl").exists()):
            yield _input("data", source.label)
        else:
            for name, needed in _ROWS.items():
                yield _input("data", str(Path(source.label) / name), needed)


def _input(key: str, text: str, needed: bool = True) -> Input:
    from mlxstacks.data.json_rows import count_rows

    path = user_path(text)
    here = path.exists() or (key == "model" and in_hub_cache(text))
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


def _data_sets(key: str, sources: "Iterable[SourceSettings]") -> Iterator[Input]:
    """Data sets of the hub; of those that a run would download, rows as their cards say. Each card
    is asked for once, and none after the hub was not reached.
    """
    from mlxstacks.data.hub_sets import NotReachedError, card_of, rows_by_card

    cards: dict[str, Mapping[str, Any]] = {}
    unreached = ""
    for source in sources:
        dataset = str(source.dataset)
        here = _is_data_set_here(dataset, source.name, source.split)
        if here or not source.download:
            yield Input(key, source.label, here)
            continue
        rows, why = None, unreached
        if not unreached:
            try:
                if dataset not in cards:
                    cards[dataset] = card_of(dataset)
                if not source.files:
                    rows = rows_by_card(cards[dataset], source.name, source.split)
            except NotReachedError as error:
                why, unreached = str(error).partition(": ")[2], "the hub is not reachable"
            except InputError as error:
                why = str(error).partition(": ")[2]
        what = why or "downloaded by the run"
        if source.cap and not why:
            what += f", as far as its first {2 * source.cap:,}, of which {source.cap:,} are drawn"
        yield Input(
            key, f"{source.label} ({source.files or source.split})", False, rows, True, what
        )


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
            dataset = sources[0].dataset
            part = any(_is_data_set_here(s.dataset, s.name, s.split) for s in sources)
            here[dataset] = here.get(dataset, True) and part
    for dataset, all_here in here.items():
        fetch = f"not in the cache; `hf download --repo-type dataset {dataset}` fetches it"
        yield Input("data", dataset, all_here, download="" if all_here else fetch)


def _sources(name: str, settings: Any) -> "Iterator[SourceSettings]":
    """What the domains, labels and unseen data that settings list are read from."""
    from mlxstacks.data.settings import SourceSettings

    for domain in _domains(name, settings):
        if domain.data is None:
            yield SourceSettings(path=f"{domain.name}.jsonl")
        else:
            yield from domain.data.sources
    for labelled in getattr(settings, "sources", ()):
        yield from labelled.data.sources
    for source in getattr(settings, "unseen", ()) or ():
        yield SourceSettings(path=source) if isinstance(source, str) else source


# --- plans ----------------------------------------------------------------------------------------

# These plan by themselves what they can without their model.
PLAN_THEMSELVES = ("confound", "identity", "eval", "report")
# These change the store that they are given.
_IN_PLACE = (
    "stacks remove", "stacks disable", "stacks enable", "stacks undo", "stacks retrain",
    "stacks gc", "stacks import",
)  # fmt: skip
# Without a config there is no plan of these.
TRAIN = ("train", "align", "stack", "stack compare", "sweep", "sweep buffers")


def plan(
    name: str,
    resolved: "Resolved",
    from_recipe: bool,
    progress: Callable[..., None] | None = None,
) -> Any:
    """What a dry run of any command says; that only --force would replace the target, as a note.

    Raises: InputError: an input that was typed, not read from a recipe, is not here; the target is
        never replaced.
    """
    forced, refused = resolved, ""
    try:
        check_output(name, resolved)
    except TargetError as error:
        if resolved.forced or "force" not in type(resolved.settings).model_fields:
            raise
        settings = resolved.settings.model_copy(update={"force": True})
        forced = replace(resolved, settings=settings, forced=True)
        check_output(name, forced)
        refused = f"A run would refuse: {error}"
    with naming_nano(name, resolved):
        result = plan_from_config(name, resolved, from_recipe)
        if result is None and not plans_itself(name):
            check_inputs(name, resolved.settings)
            result = plan_of_settings(name, resolved)
    if result is None:
        result = call(name, forced, dry_run=True, progress=progress)
        # The guard reads nothing but a config, shipped or not.
        if name != "guard" and (missing := absent(inputs_of(name, resolved.settings))):
            if not from_recipe:
                check_inputs(name, resolved.settings)
            result = with_missing(result, missing)
    if refused:
        shown = {key: key != "force" and value for key, value in result.settings.items()}
        update = {"notes": (*result.notes, refused), "settings": shown}
        result = result.model_copy(update=update)
    return result


def plan_from_config(name: str, resolved: "Resolved", from_recipe: bool) -> Result | None:
    """The plan where an input is not here; None where the command can plan by itself.

    What a recipe names need not be here, but for the model of a training, which has to be known by
    its name. Without a recipe only such a model may be absent.
    Raises: InputError for layers, projections or a rank that the model does not have.
    """
    settings: Any = resolved.settings
    if name in PLAN_THEMSELVES:
        return None
    inputs = inputs_of(name, settings)
    missing = absent(inputs)
    models = []
    if model := getattr(settings, "model", None):
        # a sweep's model may hold {bits}, a width each
        bits = getattr(settings, "bits", None)
        widths = bits if isinstance(bits, tuple) and bits else (None,)
        models = [model.replace("{bits}", str(width)) for width in widths]
    model_is_missing = any(item.key == "model" for item in missing)
    known = all(shipped_config(model) is not None for model in models)
    if not missing or name == "guard":  # which reads nothing but a config, shipped or not
        return None
    downloads = any(item.download for item in missing)  # which no plan may begin
    if not (from_recipe or downloads or (model_is_missing and known)):
        return None
    if model_is_missing and not known:
        if name in TRAIN:
            return None  # whose error says what is wrong
        models = []
    source, facts = _facts(models[0]) if models else (None, {})
    training: list[dict[str, Any]] = []
    if models and name in TRAIN:
        from mlxstacks.recipe.training_plan import trainings_of

        training = list(trainings_of(name, settings))
    changed = settings.model_dump(mode="json", exclude_defaults=True)
    writes = _writes(name, resolved)
    data = {
        "changed": changed, "source": source, "model": facts, "training": training,
        "inputs": [asdict(item) for item in inputs], "writes": writes,
    }  # fmt: skip
    blocks: list[Block] = [_settings_table(changed)]
    if facts:
        words = f"{facts['model_type']}: {facts['parameters']:,} parameters, "
        words += f"{bytes_in_words(facts['weights_bytes'])} of weights, {facts['layers']} layers"
        if facts["experts"]:
            words += f", {facts['experts_per_token']} of {facts['experts']} experts a token"
        blocks.append(Text(title=f"Planned from {source}", paragraphs=(words,)))
    blocks += map(_training_table, count(1), training)
    blocks.append(Text(title="Reads", paragraphs=tuple(f"{i.key}: {i.words}" for i in inputs)))
    plan = _planned(name, settings, writes, data, blocks)
    if training:
        note = "Row lengths are unknown: the guard took the longest that the settings allow."
        plan = plan.model_copy(update={"notes": (note,)})
    return with_missing(plan, missing)


def plan_of_settings(name: str, resolved: "Resolved") -> Result:
    """The plan of a command whose function has none of its own: its settings, what it writes."""
    settings, writes = resolved.settings, [str(resolved.target)] if resolved.target else []
    table = _settings_table(settings.model_dump(mode="json"))
    return _planned(name, settings, writes, {"writes": writes}, [table])


def _planned(
    name: str, settings: Any, writes: list[str], data: dict[str, Any], blocks: Sequence[Block]
) -> Result:
    words = f"{name} would write {', '.join(writes)}." if writes else f"{name} writes no directory."
    return Result(
        kind=name, title=f"Plan of {name}", status="planned", outcome="planned",
        settings=settings.model_dump(mode="json"), data=data,
        blocks=(*blocks, Text(title="Writes", paragraphs=(words,))),
    )  # fmt: skip


def _settings_table(values: Mapping[str, Any]) -> Table:
    rows = [(key, cell_text(setting(value))) for key, value in values.items()]
    return Table.of("settings", "Settings", {"setting": "text", "value": "text"}, rows)


def with_missing(plan: Result, missing: Sequence[Input]) -> Result:
    """A plan that ends with what the run would need that is not here."""
    keys = ", ".join(dict.fromkeys(item.key for item in missing))
    verdict = f"{plan.verdict} The run itself needs what is not here: {keys}.".strip()
    data = plan.data | {"not_here": [item.path for item in missing]}
    return plan.model_copy(update={"verdict": verdict, "data": data})


def _training_table(place: int, training: Mapping[str, Any]) -> Table:
    kinds = ", ".join(
        f"{name} x{times}" if times > 1 else name for name, times in training["projections"].items()
    )
    layers = training["layers"]
    many = len(layers) > 8
    where = f"{len(layers)} layers" if many else f"layers {', '.join(map(str, layers))}"
    size = f"{training['trained_parameters']:,} parameters; in training "
    size += f"{bytes_in_words(training['adapter_bytes'])}, its optimizer "
    size += bytes_in_words(training["optimizer_bytes"])
    if training["frozen_bytes"] is not None:
        size += f"; frozen {bytes_in_words(training['frozen_bytes'])}"
    number = training["batches"]
    batches = "the data once" if number is None else f"{number:,} batches"
    runs = f"{training['runs']} runs, each " if training["runs"] > 1 else ""
    guard = training["guard"]
    rows = {
        "projections": f"{where}: {kinds}",
        "size": size,
        "batches": f"{runs}{batches}, rows of at most {training['longest_row_tokens']:,} tokens",
    }
    if guard is not None:
        rows["memory"] = byte_parts(guard["parts_bytes"])
    rows["guard"] = "not asked" if guard is None else guard["verdict"]
    return Table.of_facts(f"training-{place}", f"Trains {training['name']}", rows)


def _writes(name: str, resolved: "Resolved") -> list[str]:
    settings: Any = resolved.settings
    paths = [str(resolved.target)] if resolved.target is not None else []
    aligned = name == "align" and settings.store_path is not None
    if name in _IN_PLACE or aligned or (name == "route train" and settings.install):
        paths.append(str(settings.store_path))
    if getattr(settings, "routed", False) and settings.gap_log != NO_GAP_LOG:
        paths.append(settings.gap_log)
    return paths


def _facts(model: str) -> tuple[str, dict[str, Any]]:
    """Where the config is, and what it says; nothing of the weights is made."""
    from mlx.utils import tree_flatten

    from mlxstacks.guard.build import lazy_model, read_config

    config, source = read_config(model)
    built = lazy_model(config)
    plain = {k: v for k, v in config.items() if k not in ("quantization", "quantization_config")}
    full, text = lazy_model(plain), config.get("text_config") or config
    return source, {
        "model_type": config["model_type"],
        "parameters": sum(math.prod(a.shape) for _, a in tree_flatten(full.parameters())),
        "weights_bytes": sum(array.nbytes for _, array in tree_flatten(built.parameters())),
        "layers": text.get("num_hidden_layers"),
        "experts": text.get("num_experts"),
        "experts_per_token": text.get("num_experts_per_tok"),
        "quantization": config.get("quantization"),
    }
