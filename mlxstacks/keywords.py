"""The keywords of the functions in api.py, made from the settings: types, help, and messages that
name them instead of the command line's options.
"""

import inspect
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from textwrap import fill
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, ForwardRef, Literal, Union, get_args, get_origin

from mlxstacks.recipe.resolve import models_in
from mlxstacks.recipe.table import COMMANDS, command_named, load

if TYPE_CHECKING:
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

    from mlxstacks.study.result import Result

# Of what `chat` takes: what is decided when a model is loaded, and with every answer.
LOADING = (
    "model", "store_path", "adapter_path", "router_path", "budget", "base", "hard", "gap_log",
    "peft_layout", "allow_base", "allow_special",
)  # fmt: skip
ANSWERING = (
    "routed", "ungated", "pin", "system_prompt", "thinking", "temp", "top_p", "min_p", "top_k",
    "max_tokens", "repetition_penalty", "json_schema", "seed",
)  # fmt: skip


class _AsWritten(str):
    """A type or a default in a signature, which stands there as it is."""

    def __repr__(self) -> str:
        return str(self)


_ROWS = "Rows in memory are taken too"
_NAMED_ROWS = "; for a directory of NAME.jsonl, {NAME: rows}"
ROWS_TOO = frozenset({"calibration", "judge"})  # files of rows, besides `data`
_TOO_LONG = _AsWritten("...")
_MOST_KEYS = 20  # of nested settings; those of a whole command have a function of their own


@dataclass(frozen=True, slots=True)
class Keyword:
    """kind: a type that type checkers and people read. flag: of the command line. is_list: where
    one value stands for a list of one. keys: of nested settings.
    """

    kind: Any
    default: Any
    meaning: str
    flag: str
    is_list: bool = False
    keys: Mapping[str, "Keyword"] = field(default_factory=dict)


def keywords_of(function: str) -> dict[str, Keyword]:
    """The settings that a function takes."""
    from mlxstacks.routing.settings import AnswerSettings

    chosen = {"load": LOADING, "generate": ANSWERING}.get(function)
    command = None if chosen else command_named(function.replace("_", " "))
    settings: type[BaseModel] = load(command.settings) if command else AnswerSettings
    paths = {*command.nano} if command else set()
    keywords = {}
    for key in chosen or settings.model_fields:
        field = settings.model_fields[key]
        is_path = key in {*paths, "model", "other", "runs", "data"} or key.endswith("_path")
        name = "store" if (function, key) == ("load", "store_path") else key
        keywords[name] = _keyword(key, field, is_path)
    for key in keywords.keys() & {"data", *ROWS_TOO}:
        if not (of_rows := keywords[key]).is_list:
            named = (Mapping[str, Any],) if key == "data" else ()
            kinds = (*named, Iterable[Mapping[str, Any]], ForwardRef("pandas.DataFrame"))
            meaning = f"{of_rows.meaning} {_ROWS}{_NAMED_ROWS if named else ''}."
            keywords[key] = replace(of_rows, kind=Union[(of_rows.kind, *kinds)], meaning=meaning)
    if function == "load":  # it notes no gaps unless it is asked to
        keywords["gap_log"] = replace(keywords["gap_log"], default="none")
    return keywords


def _keyword(key: str, field: "FieldInfo", is_path: bool) -> Keyword:
    kind = _plain(_written(field.metadata) or field.annotation, is_path)
    default = field.get_default(call_default_factory=True)
    if field.is_required():
        default = inspect.Parameter.empty
    extra = field.json_schema_extra if isinstance(field.json_schema_extra, dict) else {}
    return Keyword(
        kind,
        _TOO_LONG if hasattr(default, "model_dump") else _text_of_path(default),
        field.description or "",
        str(extra.get("cli_name", "--" + key.replace("_", "-"))),
        get_origin(field.annotation) is tuple,
        dict(_keys_of(field, default)),
    )


def _keys_of(field: "FieldInfo", default: Any) -> Iterator[tuple[str, Keyword]]:
    nested = next(models_in(field.annotation), None)
    for key, inner in nested.model_fields.items() if nested else ():
        keyword = _keyword(key, inner, key.endswith("path"))
        own = getattr(default, key, keyword.default)
        yield key, replace(keyword, default=_text_of_path(own))


def _text_of_path(default: Any) -> Any:
    return str(default) if isinstance(default, Path) else default


def _written(metadata: Sequence[Any]) -> Any:
    """The type of what may be given, where a validator makes the setting of it; else None."""
    kinds = (getattr(part, "json_schema_input_type", None) for part in metadata)
    return next((kind for kind in kinds if get_origin(kind) or isinstance(kind, type)), None)


def _plain(annotation: Any, is_path: bool) -> Any:
    """A type of what may be given: a path as text or Path, a list as one value, a nested model as
    a mapping.
    """
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin in (Union, UnionType):
        return Union[tuple(_plain(part, is_path) for part in parts)]  # noqa: UP007
    if hasattr(annotation, "__metadata__"):  # Annotated
        return _plain(_written(annotation.__metadata__) or parts[0], is_path)
    if origin in (tuple, list):
        item: Any = _plain(parts[0], is_path)
        return Union[item, Sequence[item]]  # noqa: UP007
    if origin in (dict, Mapping) or hasattr(annotation, "model_fields"):
        return Mapping[str, Any]
    return str | Path if annotation is Path or (annotation is str and is_path) else annotation


# --- help -----------------------------------------------------------------------------------------

# What the functions have beside the settings.
_OWN = {
    "progress": Keyword(
        None, None, "A bar in notebooks and terminals by default; False: none; or a function "
        "that is called with (done, total, what).", "",
    ),
    "dry_run": Keyword(None, False, "Only report what would be done.", "--dry-run"),
}  # fmt: skip
_RETURNS = """
Returns:
    A Result. str(result) is what the command prints; a notebook shows it as a page. Its parts are
    .verdict, .table(id) (a pandas DataFrame), .plot(id) and .data.
"""
_RAISES = """
Raises:
    InputError: an argument cannot be used; the message says which, and what to do."""
_VARIABLE = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
# What the command line calls otherwise.
_IN_PYTHON = {
    "Repeatable": "May be a list",
    "Repeat it": "Give a list",
    "Exit with 3": "Set failed_gate of the result",
    "Exit with 0": "Leave failed_gate of the result None",
    "Print only the settings that fit, as a recipe.": "Of the command line; result.data['apply'] "
    "has them.",
}


def document(function: Any, name: str, positions: Sequence[str] = ()) -> None:
    """Give a function its whole signature, and a page of help that has every keyword.

    positions: keywords that may be given by position.
    """
    keywords = keywords_of(name)
    written = inspect.signature(function)
    fixed = [p for p in written.parameters.values() if p.kind not in _VARIABLE]
    own = [p for p in fixed if p.name not in _OWN]
    last = [p for p in fixed if p.name in _OWN]
    named = {p.name for p in (*own, *last)} | set(positions)
    by_position = inspect.Parameter.POSITIONAL_OR_KEYWORD
    own += [_parameter(key, keywords[key], by_position) for key in positions]
    rest = [_parameter(key, keyword) for key, keyword in keywords.items() if key not in named]
    parameters = [*own, *rest, *last]
    described = {**keywords, **_OWN}
    lines = [
        line
        for parameter in parameters
        if parameter.name in described
        for line in _described(parameter, described[parameter.name], keywords)
    ]
    text, _, raises = inspect.cleandoc(function.__doc__).partition("\n\nRaises: ")
    returns = _RETURNS if written.return_annotation == "Result" else ""
    parts = [text, "\nArguments:", *lines, returns.rstrip(), _RAISES, raises and f"    {raises}"]
    function.__doc__ = "\n".join(filter(None, parts))
    shown = [p.replace(annotation=_AsWritten(type_text(p.annotation))) for p in parameters]
    result = _AsWritten(type_text(written.return_annotation))
    function.__signature__ = written.replace(parameters=shown, return_annotation=result)


def _parameter(
    key: str, keyword: Keyword, kind: Any = inspect.Parameter.KEYWORD_ONLY
) -> inspect.Parameter:
    return inspect.Parameter(key, kind, default=keyword.default, annotation=keyword.kind)


def _described(
    parameter: inspect.Parameter, keyword: Keyword, keywords: Mapping[str, Keyword]
) -> Iterator[str]:
    default = _default_text(parameter.default)
    yield f"    {parameter.name}: {type_in_words(parameter.annotation)}{default}"
    meaning = in_keywords(" ".join(keyword.meaning.split()), keywords)
    for typed, meant in _IN_PYTHON.items():
        meaning = meaning.replace(typed, meant)
    indent = " " * 8
    yield fill(meaning, 88, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
    for key, inner in keyword.keys.items() if len(keyword.keys) <= _MOST_KEYS else ():
        line = f"{key}: {type_in_words(inner.kind)}{_default_text(inner.default)}"
        yield fill(line, 88, initial_indent=" " * 12, subsequent_indent=" " * 16)


def _default_text(default: Any) -> str:
    return f", default {default!r}" if default not in (_TOO_LONG, inspect.Parameter.empty) else ""


def type_text(kind: Any) -> str:
    """A type as it is written in Python 3.11: `str | Path | None`."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return " | ".join(map(type_text, _in_order(parts)))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, parts))}]"
    if kind is ...:
        return "..."
    if isinstance(kind, str | ForwardRef):
        return kind if isinstance(kind, str) else kind.__forward_arg__
    name = "None" if kind in (None, NoneType) else getattr(origin or kind, "__name__", str(kind))
    return f"{name}[{', '.join(map(type_text, parts))}]" if parts else name


def _in_order(parts: Sequence[Any]) -> list[Any]:
    """Of a union: plain types, then literals and those of several values, None last. typing keeps
    equal unions as whichever was written first.
    """

    def place(part: Any) -> tuple[int, int]:
        plain = [str, Path, int, float, bool]
        if part in (None, NoneType):
            return 3, 0
        if get_origin(part) is None:
            return 0, plain.index(part) if part in plain else len(plain)
        return (1, 0) if get_origin(part) is Literal else (2, get_origin(part) is not Mapping)

    return sorted(parts, key=place)


def type_in_words(kind: Any) -> str:
    """`str, Path or None`, `'a' or 'b'`, `int or list of int`."""
    parts = [kind] if get_origin(kind) not in (Union, UnionType) else _in_order(get_args(kind))
    words = []
    for part in parts:
        origin, inner = get_origin(part), get_args(part)
        if origin is Literal:
            words += [repr(value) for value in inner]
        elif origin is Mapping or part is Mapping:
            words.append("dict")
        elif origin in (Sequence, Iterable, list, tuple):
            several = "iterable" if origin is Iterable else "list"
            words.append(f"{several} of {type_in_words(inner[0])}")
        elif origin is None:
            words.append("None" if part in (None, NoneType) else type_text(part))
        else:
            words.append("function")
    *most, last = dict.fromkeys(words)
    return f"{', '.join(most)} or {last}" if most else last


# --- messages -------------------------------------------------------------------------------------

# A command: in backticks, or to the end of its line.
_COMMAND = r"`[^`]*`|\b(?:mlxstacks|hf|pip|python) [a-z-][^;\n]*"
_SET = r"--set (?P<set>[\w.]+)=(?P<to>\S*[^\s.,;:)])"
_OPTION = r"(?P<flag>--[a-z][a-z-]*)(?:[ =](?P<value>[\w./]*\w))?"
_WRITTEN = re.compile(rf"{_COMMAND}|{_SET}|{_OPTION}")


def in_keywords(message: str, keywords: Mapping[str, Keyword]) -> str:
    """A message with keywords for the options of these settings, and calls for our commands:
    `--force` is `force=True`, `mlxstacks stack --save-path STORE` is `ms.stack(save_path=STORE)`.
    """
    by_flag = _by_flag({**keywords, **_OWN})

    def replaced(match: re.Match[str]) -> str:
        text = match[0]
        if match["set"]:
            keys = match["set"].split(".")
            return _assigned(keys, _as_code(match["to"])) if keys[0] in keywords else text
        if match["flag"] is None:
            return _as_call(text) or text
        flag, value = match["flag"], match["value"]
        after = "" if value is None else text[len(flag) :]
        negated = by_flag.get("--" + flag.removeprefix("--no-"))
        if flag not in by_flag and negated is not None:
            return _assigned(negated[0], "False") + after
        if flag not in by_flag:
            return text
        keys, kind = by_flag[flag]
        if kind in (bool, None):
            return _assigned(keys, "True") + after
        choices = [part for part in (kind, *get_args(kind)) if get_origin(part) is Literal]
        allowed = {str(choice) for part in choices for choice in get_args(part)}
        is_code = value and (value.isupper() or value[0].isdigit() or {*value} & {*"._/"})
        is_value = is_code or value in allowed or after[:1] == "="
        return _assigned(keys, _as_code(value)) if is_value else _assigned(keys, "...") + after

    # "--key, --set key=..." says one thing twice
    message = re.sub(r"--[a-z-]+, (--set \w+=\.\.\.)", r"\1", message)
    return _WRITTEN.sub(replaced, message).replace("--set ", "")


def _by_flag(
    keywords: Mapping[str, Keyword], outer: tuple[str, ...] = ()
) -> dict[str, tuple[tuple[str, ...], Any]]:
    """Flag -> the keys that lead to its value, and its type; of two the one that lies less deep."""
    inner = dict[str, tuple[tuple[str, ...], Any]]()
    for key, keyword in keywords.items():
        if not keyword.is_list:
            inner |= _by_flag(keyword.keys, (*outer, key))
    return inner | {k.flag: ((*outer, key), k.kind) for key, k in keywords.items() if k.flag}


def _assigned(keys: Sequence[str], value: str) -> str:
    """`train={"iters": 5}` of train, iters and 5."""
    for key in reversed(keys[1:]):
        value = f'{{"{key}": {value}}}'
    return f"{keys[0]}={value}"


def said_in_python(result: "Result", name: str | None = None) -> "Result":
    """A result that names keywords and calls; of a study of one's own it is left as it is. Its
    files, and so its seal, have the words of the command line. name: of the command, default: kind.
    """
    from mlxstacks.study.render.words import capital

    name = name or result.kind
    if name not in COMMANDS:
        return result
    keywords = keywords_of(name)

    def said(text: str | None) -> Any:
        return text and in_keywords(text, keywords)

    blocks = list[Any]()
    for block in result.blocks:
        changed: dict[str, Any] = {}
        if block.block == "table":
            changed = {"caption": said(block.caption)}
        elif block.block == "text":
            changed = {"paragraphs": tuple(map(said, block.paragraphs))}
        blocks.append(block.model_copy(update=changed))
    return result.model_copy(
        update={
            "verdict": result.verdict and capital(said(result.verdict)),
            "blocks": tuple(blocks),
            "notes": tuple(map(said, result.notes)),
            "failed_gate": said(result.failed_gate),
            "failure": said(result.failure),
            "next_steps": {step: said(call) for step, call in result.next_steps.items()},
        }
    )


def _as_call(command: str) -> str | None:
    """A command of ours as a call; None of another program's, of what is no function, and where a
    word is left over.
    """
    quote = "`" * command.startswith("`")
    line = command.strip("`") if quote else command.rstrip(".,:)")
    after = command.strip("`")[len(line) :]
    words = shlex.split(line) if line.count("'") % 2 == 0 else []
    if not words or words.pop(0) != "mlxstacks":
        return None
    if words == ["recipes"]:
        return f"{quote}ms.recipes(){quote}{after}"
    named = (" ".join(words[:count]) for count in (2, 1))
    name = next((name for name in named if name in COMMANDS), "")
    if name in ("", "generate", "serve"):
        return None
    functions = ("load", "generate") if name == "chat" else (name,)
    flags = {k.flag: (f, key, k.kind) for f in functions for key, k in keywords_of(f).items()}
    given: dict[str, list[str]] = {function: [] for function in functions}
    words, free = words[len(name.split()) :], list(COMMANDS[name].arguments)
    while words:
        word = words.pop(0)
        function, key, kind = flags.get(word, (name, "", None))
        if key and kind is bool:
            given[function].append(f"{key}=True")
        elif key and words:
            given[function].append(f"{key}={_as_code(words.pop(0))}")
        elif not word.startswith("--") and free and name != "chat":
            given[name].append(f"{free.pop(0)}={_as_code(word)}")
        else:
            return None
    if name == "chat":
        answering = ", ".join(['"Who are you?"', *given["generate"]])
        call = f"generate(*ms.load({', '.join(given['load'])}), {answering})"
    else:
        call = f"{name.replace(' ', '_')}({', '.join(given[name])})"
    return f"{quote}ms.{call}{quote}{after}"


def _as_code(text: str) -> str:
    plain = text.isupper() or text[0].isdigit() or text in ("...", "True", "False", "None")
    return text if plain else repr(text)
