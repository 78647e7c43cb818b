"""From recipe, `--set` pairs and options to a settings object, and to the call of its command.

defaults of the settings model < recipe < --set key=value < options given on the command line

Later wins. A command on nano alone may have a recipe of ours between the first two; see
`Command.nano_recipe`.
"""

import contextlib
import inspect
import json
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_origin

from mlxstacks.command_line import command_line
from mlxstacks.errors import InputError, SettingsError, TargetError
from mlxstacks.files.disk import user_path
from mlxstacks.files.outputs import PLACES, read_mark
from mlxstacks.recipe.file import Recipe, load_recipe, read_yaml
from mlxstacks.recipe.spellings import key_elsewhere
from mlxstacks.recipe.table import ALIASES, Command, command_named, load, nearest

if TYPE_CHECKING:
    from pydantic import BaseModel

OUT = Path("mlxstacks-out")
NANO_PATHS = "mlxstacks.nano.exports:nano_paths"
NANO_MODEL = "mlxstacks.nano.exports:nano_model"
_MOST_PROBLEMS = 10
_OF_THE_PERSONA = ("suite", "persona_data")


@dataclass(frozen=True, slots=True)
class Resolved:
    """A settings object, ready to run.

    target: the directory that will be written, or None.
    bare: nobody named the target; it is the default one of this command or recipe.
    forced: somebody asked for `force` (a bare run that may replace its own target did not).
    from_nano: keys that were filled in with the built-in model.
    nano_recipe: whose values are the defaults, since the model is nano.
    """

    settings: "BaseModel"
    target: Path | None = None
    bare: bool = False
    forced: bool = False
    from_nano: tuple[str, ...] = ()
    nano_recipe: str | None = None


def parse_sets(pairs: Sequence[str]) -> dict[str, Any]:
    """`["a=1", "b.c=x"]` -> `{"a": 1, "b": {"c": "x"}}`; values are read as YAML, later ones win.

    Raises: InputError for a pair without `=` or a value that is not YAML.
    """
    from mlxstacks.settings import merge  # with pydantic, which --help does without

    values: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not all(key.split(".")):
            raise InputError(f"--set takes key=value; got {pair!r}")
        # A module pattern like `*.q_proj=4` is text; YAML would take the star for an alias.
        plain = not text or text[0] in "*&!"
        try:
            value: Any = text if plain else read_yaml(text)
        except ValueError as error:
            raise InputError(f"--set {pair}: the value is not YAML: {error}") from None
        for part in reversed(key.split(".")):
            value = {part: value}
        values = merge(values, value)
    return values


def resolve(
    name: str, options: Mapping[str, Any], recipe: Recipe | None = None, sets: Sequence[str] = ()
) -> Resolved:
    """The settings of a command from its recipe, its `--set` pairs and its options.

    A target that nobody names is `mlxstacks-out/` and the recipe's or the command's name. A bare
    run may replace what a bare run wrote, which the mark inside tells.

    Raises: InputError listing unknown keys with the nearest known ones, and bad values.
    """
    from mlxstacks.settings import merge

    name = ALIASES.get(name, name)
    row = command_named(name)
    if recipe is not None and name != recipe.command:
        run = command_line("mlxstacks run", recipe.path)
        raise InputError(
            f"recipe {recipe.path}: is for `{recipe.command}`, not for `{name}`; `{run}` runs it"
        )
    pairs = parse_sets(sets)
    for key, value in options.items():
        if isinstance(pairs.get(key), dict) and not isinstance(value, dict):
            raise InputError(
                f"--set {key}.{next(iter(pairs[key]))} is overridden by --{key.replace('_', '-')}; "
                f"give all of {key} with --set"
            )
    values = merge(merge(recipe.values if recipe else {}, pairs), options)
    # The recipe goes with the model, and with nano's data: items and adapters may be one's own.
    inputs = {"model", "data", "store_path", row.alone} & {*row.nano, row.alone}
    nano_recipe = None
    if recipe is None and not any(values.get(key) for key in inputs if key):
        nano_recipe = row.nano_recipe
        values = merge(load_recipe(nano_recipe).values if nano_recipe else {}, values)
    settings_class = load(row.settings)
    writes = "save_path" in settings_class.model_fields
    bare = writes and values.get("save_path") is None
    if bare:
        # a quick look has a directory of its own, so that it never stands in the whole run's way
        cut = values.get("limit") or values.get("max_prompts")
        part = f".limit-{cut}" if cut else ""
        title = recipe.name if recipe else name.replace(" ", "-")
        values["save_path"] = str(OUT / (title + part))
    written = set(recipe.values) - set(pairs) - set(options) if recipe else ()
    where = f"recipe {recipe.path}: " if recipe else ""
    # A fault of several keys may be of what was given beside the recipe.
    places = {**dict.fromkeys(written, where), "": "" if {*pairs, *options} - PLACES else where}
    settings = validate(settings_class, values, places, name)
    missing = [key for key in row.needs if getattr(settings, key) is None]
    if missing:
        keys = ", ".join(f"{row.arguments[key]} (--{key.replace('_', '-')})" for key in missing)
        given = list(row.arguments)
        last = max(given.index(key) for key in row.needs)
        usage = " ".join(["mlxstacks", name, *(row.arguments[key] for key in given[: last + 1])])
        raise InputError(f"{where}{name} needs {keys}: {usage}")
    target = None
    if writes:
        try:
            target = user_path(settings.save_path)  # type: ignore[attr-defined]
        except InputError as error:
            raise InputError(f"{where if 'save_path' in written else ''}{error}") from None
    forced = bool(getattr(settings, "force", False))
    may_replace = bare and target is not None and not row.extends and _is_of_bare_run(target)
    settings, from_nano = _with_nano(name, row, settings)
    # What was made from inputs of somebody's own is theirs: it gets no marker.
    bare = bare and (not row.nano or bool(from_nano))
    resolved = Resolved(settings, target, bare, forced, from_nano, nano_recipe)
    if may_replace and not _other_settings(name, resolved):
        return replace(resolved, settings=settings.model_copy(update={"force": True}))
    return resolved


def _other_settings(name: str, resolved: Resolved) -> list[str]:
    """Settings that differ from those of the result in the target; none where none is."""
    from mlxstacks.study.run_directory import what_differs

    report, _ = _report_in(name, resolved)
    if not report:
        return []
    now = resolved.settings.model_dump(mode="json")
    # what a run found by itself, as the base of a store, is nobody's setting
    found = {key for key, value in now.items() if value in (None, [])}
    old, new = (
        {key: value for key, value in settings.items() if key not in PLACES | found}
        for settings in (report["settings"], now)
    )
    return what_differs(old, new)


def _is_of_bare_run(target: Path) -> bool:
    return (read_mark(target) or {}).get("bare_run") is True


def validate(
    settings_class: "type[BaseModel]",
    values: Mapping[str, Any],
    places: Mapping[str, str] = {},
    command: str = "",
) -> "BaseModel":
    """Build a settings object.

    A nested model that is given in part keeps the defaults of its field for the rest.
    places: key -> what a message about it begins with; under "" that of a fault of several keys.
    command: whose settings these are; other tools' names of them are then answered.

    Raises: SettingsError, one line a problem, of many the first.
    """
    from pydantic import BaseModel, ValidationError

    from mlxstacks.settings import merge

    for key, value in values.items():
        if fault := _unusable(value):
            raise InputError(f"{places.get(key, '')}{key}: holds {fault}")
    known = settings_class.model_fields
    defaults = {
        key: known[key].default.model_dump()
        for key, value in values.items()
        if isinstance(value, Mapping) and key in known and isinstance(known[key].default, BaseModel)
    }
    try:
        return settings_class.model_validate(merge(defaults, values))
    except ValidationError as error:
        problems = []
        for detail in error.errors():
            if detail["loc"][-1:] == ("str",) and isinstance(detail["input"], dict):
                continue
            if detail["type"] == "too_short" and detail["input"]:  # each item's fault is told
                continue
            location = [part for part in detail["loc"] if not _FORM.fullmatch(str(part))]
            place = places.get(str(location[0]) if location else "", "")
            problems.append(place + _explain(settings_class, dict(detail), location, command))
        lines, more = list(dict.fromkeys(problems)), len({*problems}) - _MOST_PROBLEMS
        if more > 0:
            lines[_MOST_PROBLEMS:] = [f"and {more} more"]
        raise SettingsError("\n".join(lines)) from None


def _unusable(value: Any) -> str | None:
    """What no setting can be, at any depth; YAML's aliases make circles."""
    left, seen = [value], set()
    while left:
        value = left.pop()
        if isinstance(value, str) and "\0" in value:
            return "a NUL character; take it out"
        if isinstance(value, int) and value.bit_length() > 64:
            return f"a number of {value.bit_length():,} bits; at most 64 are allowed"
        if isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            left += [*value, *value.values()] if isinstance(value, dict) else value
    return None


# Where `data` is a text or a mapping, pydantic puts which of them it tried into the location.
_FORM = re.compile(r"str|function-after\[.*\]")


def _explain(
    settings_class: "type[BaseModel]",
    detail: Mapping[str, Any],
    location: Sequence[int | str],
    command: str,
) -> str:
    """One problem of pydantic in the words of DESIGN: what came, what is allowed, what to do."""
    key = ".".join(map(str, location))
    if detail["type"] == "extra_forbidden":
        known = _keys_at(settings_class, location[:-1])
        if len(location) == 1 and (instead := key_elsewhere(command, key, known)):
            return f"unknown key {key!r}: {instead}"
        outer, dot, last = key.rpartition(".")
        if len(location) == 1 and (inner := nested_key(settings_class, last)):
            below = f"in a recipe below {inner.partition('.')[0]}"
            return f"unknown key {key!r}: here it is --set {inner}=..., {below}"
        hint = nearest(last, known, outer + dot)
        return f"unknown key {key!r}{hint} (known: {', '.join(known)})"
    if detail["type"] == "missing":
        # a nested setting has no option of its own
        option = "" if "." in key else f"--{key.replace('_', '-')}, "
        return f"{key} is missing; give {option}--set {key}=... or a recipe"
    if detail["type"] == "model_type":
        keys = ", ".join(_keys_at(settings_class, location))
        return f"{key}: got {shown(detail['input'])}; give keys with values (known: {keys})"
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    message = message.replace("a valid tuple", "a list").replace("a valid string", "text")
    if not key:
        return message
    if detail["type"] == "literal_error":
        allowed = re.findall(r"'([^']*)'", detail["ctx"]["expected"])
        got = detail["input"]
        hint = nearest(got, allowed) if isinstance(got, str) else ""
        return f"{key}: got {shown(got)}, allowed: {message}{hint}"
    about = settings_class.model_fields.get(str(location[0]))
    if callable(detail["input"]) and about and "FILE.py:FUNCTION" in (about.description or ""):
        return f"{key}: a function is given as 'FILE.py:FUNCTION'; write it to a file"
    if message.startswith("got "):  # a check of ours, which says itself what came
        return f"{key}: {message}"
    wanted = "must be " if detail["msg"].startswith("Input should be ") else ""
    return f"{key}: got {shown(detail['input'])}; {wanted}{message}"


def shown(value: Any) -> str:
    """A value as a message can carry it: YAML aliases make small files into endless lists, and
    what is no value (a model, an array) has a name but may not have a short text.
    """
    if type(value).__module__ != "builtins" and not isinstance(value, Path):  # a Module is a dict
        return f"a {type(value).__module__.partition('.')[0]} {type(value).__qualname__}"
    short = reprlib.Repr()
    short.maxlevel, short.maxstring, short.maxother = 2, 200, 200
    return short.repr(value)


def _keys_at(settings_class: "type[BaseModel]", location: Sequence[int | str]) -> list[str]:
    """Known keys of a nested settings model, or of one that is an item of a list."""
    current: Any = settings_class
    for part in location:
        if isinstance(part, str):
            known = getattr(current, "model_fields", {}).get(part)
            current = next(models_in(known.annotation), None) if known else None
    return list(getattr(current, "model_fields", ()))


def models_in(annotation: Any) -> "Iterator[type[BaseModel]]":
    if hasattr(annotation, "model_fields"):
        yield annotation
    for part in get_args(annotation):
        yield from models_in(part)


def nested_key(settings_class: "type[BaseModel]", key: str) -> str | None:
    """`train.rank` for `rank`, where settings that are nested in these have that key, but for those
    that the outer command sets itself; None also where a key of their own is all but this one.
    """
    own = list(settings_class.model_fields)
    if key in {"model", "data", *PLACES} or get_close_matches(key, own, 1, cutoff=0.85):
        return None
    outer = (
        name
        for name, field in settings_class.model_fields.items()
        if get_origin(field.annotation) is not tuple and key in _keys_at(settings_class, [name])
    )
    return next((f"{name}.{key}" for name in outer), None)


def _with_nano(
    name: str, row: Command, settings: "BaseModel"
) -> tuple["BaseModel", tuple[str, ...]]:
    """Fill in the built-in model where nothing was given; also returns the keys that were filled.

    Raises: InputError when a model of the user's own needs something that only nano has.
    """
    if row.alone and getattr(settings, row.alone) is not None:
        return settings, ()
    # An empty text is no omission but an unset variable of a shell: it must not become nano.
    empty = tuple(key for key in row.nano if getattr(settings, key) in (None, ()))
    if "persona" in row.nano and "persona" not in empty:  # nano's rows and prompts are of nano's
        empty = tuple(key for key in empty if key not in _OF_THE_PERSONA)
    domains = getattr(getattr(settings, "run", settings), "domains", ())
    own_model = "model" in row.nano and "model" not in empty
    # a comparison's domains may be of nano's data in parts
    if domains and all(getattr(domain, "data", None) for domain in domains):
        of_whole_files = own_model or name in ("stack", "psn blocks", "psn stacks")
        empty = tuple(key for key in empty if key != "data" or not of_whole_files)
    if not empty:
        return settings, ()
    if own_model:
        needed = [f"--{key.replace('_', '-')}" for key in empty if key not in row.optional]
        model = user_path(str(settings.model))  # type: ignore[attr-defined]
        if (model / "adapter_config.json").is_file() and not (model / "config.json").is_file():
            taken = {"adapter_path", "resume_adapter_file"} & type(settings).model_fields.keys()
            options = "".join(f", and it with --{key.replace('_', '-')}" for key in taken)
            raise InputError(
                f"{name}: {model} is an adapter, not a model; give its base with --model{options}"
            )
        if needed:
            raise InputError(f"{name}: a model of your own needs {', '.join(needed)} too")
        return settings, ()
    store = None if "store_path" in empty else getattr(settings, "store_path", None)
    if "model" in empty and store and load(NANO_MODEL)(store) is None:
        return settings, ()  # the store names its base
    paths = load(NANO_PATHS)()
    filled: dict[str, Any] = {}
    for key in empty:
        value = str(getattr(paths, row.nano[key]))
        filled[key] = (value,) if isinstance(getattr(settings, key), tuple) else value
    return settings.model_copy(update=filled), empty


def finished(name: str, resolved: Resolved) -> dict[str, Any] | None:
    """The report in the target, if the same settings made it and no input is newer; else None."""
    report, written = _report_in(name, resolved)
    if not report or not _made_by(report, resolved):
        return None
    settings = resolved.settings.model_dump(mode="json")
    for text in _paths([settings[key] for key in command_named(name).nano]):
        path = user_path(text)
        files = path.iterdir() if path.is_dir() else [path]
        if any(file.exists() and file.stat().st_mtime > written for file in files):
            return None
    return report


def _report_in(name: str, resolved: Resolved) -> tuple[dict[str, Any], float]:
    """The report with its settings in the target, and when it was written; {} where none is."""
    file = command_named(name).report
    if file is None or resolved.target is None:
        return {}, 0.0
    try:
        path = resolved.target / file
        report, written = json.loads(path.read_text(encoding="utf-8")), path.stat().st_mtime
    except (OSError, ValueError):
        return {}, 0.0
    has_settings = isinstance(report, dict) and isinstance(report.get("settings"), dict)
    return (report, written) if has_settings else ({}, 0.0)


def _made_by(report: Mapping[str, Any], resolved: Resolved) -> bool:
    """Whether the settings made it, but for what says where a run writes and how it resumes."""
    both = (report["settings"], resolved.settings.model_dump(mode="json"))
    first, second = ({k: v for k, v in settings.items() if k not in PLACES} for settings in both)
    return bool(first == second)


def _paths(value: Any) -> Iterator[str]:
    """Of a setting as JSON: a path, several, or data with its sources."""
    if isinstance(value, str) and value:
        yield value
    elif isinstance(value, list):
        for item in value:
            yield from _paths(item)
    elif isinstance(value, dict):
        yield from _paths([value.get("path"), value.get("sources")])


# --- running --------------------------------------------------------------------------------------


def call(
    name: str,
    resolved: Resolved,
    *,
    dry_run: bool = False,
    progress: Callable[..., None] | None = None,
) -> Any:
    """What the function of a command returns.

    dry_run: only for functions that take it; see `plans_itself`.
    Raises: TargetError when the target cannot be written, before anything else is done.
    """
    from mlxstacks.files.outputs import mark_bare

    row = command_named(name)
    check_output(name, resolved)
    function = load(row.function)
    accepted = inspect.signature(function).parameters
    settings: Any = resolved.settings
    options: dict[str, Any] = {}
    with naming_nano(name, resolved):
        if row.prepare is not None:
            settings, options = load(row.prepare)(settings, dry_run)
        if dry_run:
            options["dry_run"] = True
        if progress is not None and "progress" in accepted:
            options["progress"] = progress
        result = function(settings, **options)
    # A run that could only plan leaves no target.
    target = resolved.target if resolved.bare and not (dry_run or row.extends) else None
    if target is not None and target.is_dir():
        mark_bare(target)
    return result


def what_is_kept(resolved: Resolved) -> str:
    """Where an interrupted run kept what it had done, or that none of it is left."""
    from mlxstacks.files.outputs import MARK
    from mlxstacks.study.run_directory import IDENTITY, LOG, work_path

    if resolved.target is None:
        return ""
    if "resume" not in type(resolved.settings).model_fields:
        if not resolved.target.exists():
            return f"nothing was written to {resolved.target}: the same command begins again"
        replaces = getattr(resolved.settings, "force", False)
        return f"the directory {resolved.target} is whole: as it was, or new" * replaces
    # a part of a study has a directory of its own
    part = getattr(resolved.settings, "max_prompts", None)
    named = [f"{resolved.target}.limit-{part}"] * (part is not None) + [str(resolved.target)]
    work = next((w for name in named if (w := work_path(Path(name))).is_dir()), None)
    if work is None:
        return ""
    begun = {IDENTITY, LOG, MARK}  # what is there before the first state
    if {path.name for path in work.iterdir()} <= begun:
        return "nothing was saved yet: the same command begins again"
    again = "the same command resumes; with --no-resume it starts again"
    return f"what was saved is kept in {work}: {again}"


@contextlib.contextmanager
def naming_nano(name: str, resolved: Resolved) -> Iterator[None]:
    """What is wrong with an input of somebody's own may be that the model is missing: adds that."""
    try:
        yield
    except InputError as error:
        of_others = set(command_named(name).nano) - set(resolved.from_nano)
        if "model" not in resolved.from_nano or not of_others:
            raise
        remedy = "With no --model given, the model is nano, the built-in one."
        error.args = (f"{error}\n{remedy}",)
        raise


def plans_itself(name: str) -> bool:
    """Whether a command's function can plan without running."""
    return "dry_run" in inspect.signature(load(command_named(name).function)).parameters


def check_output(name: str, resolved: Resolved) -> None:
    """Raises: TargetError when the target cannot be written: before hours of work, not after."""
    from mlxstacks.files.outputs import check_target

    if resolved.target is None or command_named(name).extends:
        return
    same_kind = resolved.bare or _report_in(name, resolved)[0].get("kind") == name
    if same_kind and not resolved.forced and (lines := _other_settings(name, resolved)):
        differing = "\n  ".join([f"{resolved.target}: holds the result of other settings", *lines])
        raise TargetError(
            f"{differing}\nchoose another target with --save-path, or --force to replace it"
        )
    check_target(resolved.target, force=bool(getattr(resolved.settings, "force", False)))
