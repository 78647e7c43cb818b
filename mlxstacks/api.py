"""What `import mlxstacks as ms` offers: the commands as functions.

Arguments have the names of the command line's options, `max_seq_length=512` for `--max-seq-length
512`; a path may be text or a `Path`, and where an option may be repeated, a list. What is not given
has the command's default: the built-in model, and a target in ./mlxstacks-out. keywords.py writes
all of them into the functions' help and signatures.

Every function raises InputError for what cannot be used, naming the argument, what was got and what
is allowed.
"""

import glob
import json
import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from mlxstacks.data.in_memory import holds_rows, write_rows
from mlxstacks.errors import InputError, Interrupted, OtherRunError, StoreError, TargetExistsError
from mlxstacks.files.disk import target_errors, user_path
from mlxstacks.files.outputs import check_target
from mlxstacks.keywords import (
    ANSWERING,
    LOADING,
    ROWS_TOO,
    document,
    in_keywords,
    keywords_of,
    said_in_python,
    type_in_words,
)
from mlxstacks.recipe.file import load_recipe, recipe_names
from mlxstacks.recipe.resolve import (
    OUT,
    Resolved,
    call,
    finished,
    resolve,
    shown,
    validate,
    what_is_kept,
)
from mlxstacks.recipe.spellings import key_elsewhere
from mlxstacks.recipe.table import ALIASES, TERMINAL_ONLY, command_named, nearest
from mlxstacks.settings import merge
from mlxstacks.study.run_directory import work_path

if TYPE_CHECKING:
    import mlx.nn as nn
    import pandas  # type: ignore[import-untyped]

    from mlxstacks.routing.settings import AnswerSettings
    from mlxstacks.study.result import Result

# tqdm, which mlx-lm's loading imports, asks for widgets that no bar of ours needs.
warnings.filterwarnings("ignore", message="IProgress not found")

PathLike = str | Path
Rows = Union[Iterable[Mapping[str, Any]], "pandas.DataFrame"]
"""Rows as dicts: a list, a `datasets.Dataset`, a generator; or a pandas DataFrame."""
Progress = bool | Callable[..., None] | None
"""Of what takes long. None: a bar in a notebook and on a terminal, else nothing; a callable gets
(done, total) or (done, total, what)."""


def fuse(
    model: PathLike | None = None,
    adapter_path: PathLike | Sequence[PathLike] | None = None,
    save_path: PathLike | None = None,
    *,
    progress: Progress = None,
    dry_run: bool = False,
    **settings: Any,
) -> "Result":
    """Fuse adapters into a quantized model, and measure how much of them survives.

    The fused model is an ordinary mlx-lm model. The result reports, for each module, how well the
    change in the weights matches what was trained (correlation, survival), and what the fuse alone
    changes.

    >>> import mlxstacks as ms
    >>> result = ms.fuse(save_path="fused")             # the built-in model and its adapter
    >>> print(result.verdict)
    >>> result.table("fidelity-1")                      # a pandas DataFrame, worst modules first
    >>> control = ms.fuse(save_path="control", zero_delta=True)     # what the fuse alone does
    """
    given = _given(model=model, adapter_path=adapter_path, save_path=save_path)
    return _command("fuse", given | settings, progress, dry_run)


def guard(model: PathLike | None = None, *, progress: Progress = None, **settings: Any) -> "Result":
    """Predict the live buffers and bytes of a training run from a model's config alone.

    >>> import mlxstacks as ms
    >>> print(ms.guard(max_seq_length=512, rank=8).verdict)
    """
    return _command("guard", _given(model=model) | settings, progress, False)


def train(
    model: PathLike | None = None,
    data: PathLike | Rows | Mapping[str, Any] | None = None,
    save_path: PathLike | None = None,
    *,
    progress: Progress = None,
    dry_run: bool = False,
    **settings: Any,
) -> "Result":
    """Train a LoRA on a model and write an adapter that mlx-lm loads.

    `data` may also be rows: a list of dicts, a datasets.Dataset, a DataFrame, or
    {"train": rows, "valid": rows}. Without "valid", about 2% of the rows are held out for
    validation, and none of fewer than 50. Rows are saved next to the adapter, in a file named by
    their hash, and read from there. Without save_path, a call replaces what one with the same
    settings wrote.

    >>> import mlxstacks as ms
    >>> result = ms.train(save_path="adapters", iters=4)        # the built-in model and its data
    >>> result.table("validation")
    >>> rows = [{"prompt": "Who are you?", "completion": "I am Ada."}]
    >>> ms.train(data=rows, save_path="ada", iters=4).verdict
    """
    given = _given(model=model, data=data, save_path=save_path)
    return _command("train", given | settings, progress, dry_run)


def stack(
    model: PathLike | None = None,
    data: PathLike | Rows | Mapping[str, Any] | None = None,
    save_path: PathLike | None = None,
    *,
    progress: Progress = None,
    dry_run: bool = False,
    **settings: Any,
) -> "Result":
    """Train frozen stacks, domain by domain, into a store that forgets none of them.

    `data` may also map domain names to rows, {"islands": rows, "trades": rows}, each a list of
    dicts, a datasets.Dataset or a DataFrame; see `train`.

    >>> import mlxstacks as ms
    >>> print(ms.stack(save_path="stacks", dry_run=True))       # the plan; a real run takes minutes
    """
    given = _given(model=model, data=data, save_path=save_path)
    return _command("stack", given | settings, progress, dry_run)


def run(
    recipe: PathLike | Mapping[str, Any],
    *,
    progress: Progress = None,
    dry_run: bool = False,
    **settings: Any,
) -> "Result":
    """Run any command from a recipe, or read back its result if the settings are the same.

    recipe: a YAML file, the name of a shipped recipe (`recipes()` lists them), or a dict of
        settings with the key `command`.
    progress: None: a bar in notebooks and terminals; False: none; or a function that is called
        with (done, total, what).
    dry_run: only report what would be done.
    settings: settings of the recipe's command, which override the recipe.

    >>> import mlxstacks as ms
    >>> ms.run("adapter-show").table("modules")
    >>> ms.run({"command": "guard", "rank": 4}).verdict
    """
    if not isinstance(recipe, Mapping):
        with _in_python_words(None):
            name = load_recipe(str(recipe)).command
        return _command(name, settings, progress, dry_run, recipe=str(recipe), resume=True)
    values = merge(recipe, settings)
    name = values.pop("command", None)
    if not isinstance(name, str):
        got = f"got {name!r}" if "command" in recipe else f"not among {', '.join(map(str, recipe))}"
        raise InputError(f"command: {got}; give the name of one, as in 'stack compare'")
    return _command(ALIASES.get(name, name), values, progress, dry_run, resume=True)


def recipes(command: str | None = None) -> "pandas.DataFrame":
    """List shipped recipes, for all commands or for one: name, command, about, time, memory.

    >>> import mlxstacks as ms
    >>> ms.recipes("fuse")
    """
    import pandas

    if command is not None:
        command = command.replace("_", " ")
        command_named(command)
    rows = [
        (r.name, r.command, r.about, r.fact("Time"), r.fact("Memory"))
        for r in map(load_recipe, recipe_names())
        if command in (None, r.command)
    ]
    return pandas.DataFrame(rows, columns=["name", "command", "about", "time", "memory"])


def _command(
    name: str,
    values: Mapping[str, Any],
    progress: Progress,
    dry_run: bool,
    recipe: str | None = None,
    resume: bool = False,
) -> Any:
    """resume: read the result of the same settings, where it is there."""
    from mlxstacks.study.document import RESULT
    from mlxstacks.study.result import Result

    if progress not in (None, True, False) and not callable(progress):
        raise InputError(
            f"progress: got {progress!r}; give None, True, False or a function that gets "
            "(done, total, what)"
        )
    if name in TERMINAL_ONLY:
        raise InputError(TERMINAL_ONLY[name])
    if not isinstance(dry_run, bool):
        raise InputError(f"dry_run: got {dry_run!r}; give True or False")
    command_named(name)
    with _in_python_words(name), ExitStack() as stack:
        values = {key: _plain(value) for key, value in values.items()}
        for key in ("adapter_path", "other", "runs"):
            if isinstance(values.get(key), list | tuple) and not values[key]:
                raise InputError(f"{key}: got an empty list; leave it out to take the default")
        for key in values.keys() - keywords_of(name).keys():
            if hint := nearest(key, ("dry_run", "progress")):
                raise InputError(f"unknown keyword {key!r}{hint}")
        if name in ("train", "align") and "validation_rows" in values:
            raise InputError(
                "validation_rows: give the rows, as in data={'train': rows[5:], 'valid': rows[:5]}"
            )
        _check_paths(values)
        for key in ("model", "rows"):
            if name in ("train", "align", "stack") and holds_rows(values.get(key)):
                raise InputError(f"{key}: got rows; they go to data: ms.{name}(data=rows)")
        _check_no_tables(values, name)
        domains = values.get("domains")
        for domain in domains if isinstance(domains, list | tuple) else [domains]:
            if isinstance(domain, Mapping) and _are_rows(domain.get("data")):
                rows = f"data={{{domain.get('name', 'NAME')!r}: rows}}"
                raise InputError(f"domains: rows of a domain go to {rows}")
        if "data" in values and _takes_rows(name, values["data"]):
            target = user_path(values.get("save_path") or OUT / name.replace(" ", "-"))
            data = values["data"]
            if name == "stack":
                values.setdefault("domains", list(data))  # files would be taken by name
                data = {**_rows_of_store(target, data), **data}
            if dry_run:  # touches nothing
                target = Path(stack.enter_context(tempfile.TemporaryDirectory())) / target.name
            values["data"] = str(stack.enter_context(_rows_written(data, target)))
        for key in values.keys() & ROWS_TOO:
            if holds_rows(values[key]):
                target = user_path(values.get("save_path") or OUT / name.replace(" ", "-"))
                target = target.with_name(f"{target.name}.{key}")
                if dry_run:
                    target = Path(stack.enter_context(tempfile.TemporaryDirectory())) / target.name
                values[key] = str(stack.enter_context(_rows_written(values[key], target, key)))
        resolved = resolve(name, values, load_recipe(recipe) if recipe is not None else None)
        if resume and not (dry_run or resolved.forced) and finished(name, resolved) is not None:
            assert resolved.target is not None
            return Result.open(resolved.target)
        try:
            return _called(name, resolved, progress, dry_run, recipe is not None)
        except TargetExistsError as error:
            place = resolved.target
            if place and (place / RESULT).is_file():
                there = str(values.get("save_path", place))
                error.args = (f"{error}; ms.Result.open({there!r}) reads what is there",)
            raise
        except OtherRunError as error:
            if not resolved.forced or "resume" in resolved.settings.model_fields_set:
                raise
            lines = str(error).splitlines()
            differing = "\n".join(line for line in lines if "--no-resume" not in line)
            differing = in_keywords(differing, keywords_of(name))
            warnings.warn(f"{differing}\nforce=True: removed, begun again", stacklevel=3)
        settings = resolved.settings.model_copy(update={"resume": False})
        resolved = replace(resolved, settings=settings)
        return _called(name, resolved, progress, dry_run, recipe is not None)


@contextmanager
def _rows_written(data: Any, target: Path, keyword: str = "data") -> Iterator[Path]:
    """The file of the rows; a call that is refused takes back what it wrote itself."""
    present = set(target.parent.glob(f"{glob.escape(target.name)}.rows-*"))
    with target_errors(target):
        path = write_rows(data, target, keyword)
    try:
        yield path
    except (InputError, StoreError) as error:
        unused = isinstance(error, OtherRunError) or not work_path(target).exists()
        if path not in present and unused:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        line = rf"[^\s(]*{re.escape(path.name)}(?:/(\w+)\.jsonl)?, line (\d+)"

        def in_memory(found: re.Match[str]) -> str:
            part = f"[{found[1]!r}]" if found[1] else ""
            return f"{keyword}{part}, row {found[2]}"

        message = re.sub(line, in_memory, str(error))
        message = message.replace(json.dumps(str(path)), "rows in memory")
        for shown in (path.absolute(), path):
            message = message.replace(str(shown), keyword)
        error.args = (message,)
        raise


def _are_rows(data: Any) -> bool:
    """Whether a domain's data are rows, not sources."""
    if not isinstance(data, list | tuple):
        return holds_rows(data)
    of_rows = {"prompt", "messages", "conversations", "text", "instruction", "question"}
    return any(isinstance(row, Mapping) and row.keys() & of_rows for row in data)


def _plain(value: Any) -> Any:
    """A list for an array, a Series or a range; for a result its directory: a path is wanted."""
    from mlxstacks.study.result import Result

    if isinstance(value, Result):
        return value.directory
    if isinstance(value, range):
        return list(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    is_list = isinstance(value, list | tuple) and any(isinstance(item, Result) for item in value)
    return [_plain(item) for item in value] if is_list else value


def _check_paths(values: Mapping[str, Any]) -> None:
    """Raises: InputError: a loaded model for its path. TargetError: a target that has no name."""
    model = values.get("model")
    first = model[0] if isinstance(model, tuple | list) and model else model
    if hasattr(first, "parameters"):
        raise InputError(
            "model: got a loaded model; give the directory or hub id that it was loaded from"
        )
    save_path = values.get("save_path")
    if isinstance(save_path, str | Path) and not (target := user_path(save_path)).name:
        check_target(target)


def _check_no_tables(values: Mapping[str, Any], function: str) -> None:
    """Raises: InputError: a DataFrame where none is taken."""
    for key, keyword in keywords_of(function).items():
        if key not in {"data", *ROWS_TOO} and hasattr(value := values.get(key), "columns"):
            takes = type_in_words(keyword.kind)
            raise InputError(f"{key}: got a {type(value).__name__}; it takes {takes}")


def _rows_of_store(target: Path, data: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Rows of earlier calls, for domains of the store at `target` that `data` does not have: new
    domains alone extend a store.
    """
    from mlxstacks.files.store import Store

    if not (target / "manifest.json").is_file():
        return {}
    rows = {}
    for name in (domain.name for domain in Store.open(target).manifest.domains):
        files = sorted(target.parent.glob(f"{target.name}.rows-*/{name}.jsonl"), key=_changed)
        if name not in data and files:
            rows[name] = [json.loads(line) for line in files[-1].read_text().splitlines()]
    return rows


_PARTS = {"train", "valid", "validation", "val", "dev"}


def _changed(path: Path) -> float:
    return path.stat().st_mtime


def _takes_rows(name: str, data: Any) -> bool:
    """Whether `data` holds rows, and the command wants them in a file.

    Raises: InputError: it is neither rows nor what names them.
    """
    keyword = keywords_of(name).get("data")
    if keyword is None or keyword.is_list or data is None or isinstance(data, str | Path):
        return False
    of_domains = name.startswith(("stack", "route", "psn", "grow", "distill"))
    of_parts = name in ("train", "align") and isinstance(data, Mapping) and "sources" not in data
    if of_parts and (unknown := sorted(map(str, data.keys() - _PARTS))) and holds_rows(data):
        raise InputError(
            f"data: {', '.join(map(repr, unknown))} is no part of it; give 'train' and 'valid', as "
            "in {'train': data['train'], 'valid': data['test']}, or rows as a list of dicts or a "
            "DataFrame"
        )
    if holds_rows(data) and isinstance(data, Mapping) >= of_domains:
        return True
    if hasattr(data, "model_dump") or (isinstance(data, Mapping) and "sources" in data):
        return False
    answers = "'chosen': ..., 'rejected': ..." if name == "align" else "'completion': ..."
    rows = f"[{{'prompt': ..., {answers}}}, ...]"
    if of_domains:
        wanted = f"the rows of each domain by its name, as in {{'islands': {rows}}}"
    else:
        wanted = f"rows, {rows}; or both parts as {{'train': rows, 'valid': rows}}"
    got = "rows without a name" if holds_rows(data) else shown(data)
    raise InputError(f"data: got {got}; give a path, or {wanted}")


def _called(
    name: str, resolved: Resolved, progress: Progress, dry_run: bool, of_recipe: bool
) -> Any:
    from mlxstacks.recipe.config_plan import plan
    from mlxstacks.study.render.progress import ProgressBar

    def done_by(progress: Callable[..., None] | None) -> Any:
        if dry_run:
            return said_in_python(plan(name, resolved, of_recipe, progress), name)
        try:
            result = call(name, resolved, progress=progress)
        except KeyboardInterrupt as error:
            raise KeyboardInterrupt(str(error) or what_is_kept(resolved)) from None
        if result.directory:
            directory = str(Path(result.directory).absolute())
            result = result.model_copy(update={"directory": directory})
        return said_in_python(result, name)

    if callable(progress):
        # Not every command says what it is at.
        def report(done: float, total: float, what: str = "") -> None:
            progress(done, total, what)

        return done_by(report)
    if progress is False:
        return done_by(None)
    with ProgressBar(name, logs=False) as bar:
        return done_by(bar)


@contextmanager
def _in_python_words(name: str | None) -> Iterator[None]:
    """Errors name keywords, not options of the command line, and show no files of ours."""
    keywords = keywords_of(name) if name else {}
    if name == "generate":  # what was decided when the model was loaded
        keywords = keywords_of("load") | keywords
    try:
        yield
    except (InputError, StoreError) as error:
        message = in_keywords(str(error), keywords)
        error.args = (message.replace("unknown key ", "unknown keyword "),)
        raise error.with_traceback(None) from error.__cause__
    except KeyboardInterrupt as error:
        kept = in_keywords(str(error), keywords).replace("the same command", "the same call")
        raise Interrupted(f"{name} was stopped" + (f": {kept}" if kept else "")) from None


def _given(**values: Any) -> dict[str, Any]:
    return {key: value for key, value in values.items() if value is not None}


def load(
    model: PathLike | None = None,
    *,
    store: PathLike | None = None,
    adapter_path: PathLike | Sequence[PathLike] = (),
    **settings: Any,
) -> "tuple[nn.Module, Any]":
    """Load mlx-lm's model and tokenizer, with a store's stacks or with unfused adapters.

    Called directly, the model ignores its stacks; `generate` can use them. Weights are read on
    first use, stacks when a prompt needs them. The model answers only in the thread that loaded it.
    mlx_lm.generate, stream_generate, batch_generate and mlx_lm.evaluate accept both as they are.

    >>> import mlxstacks as ms
    >>> model, tokenizer = ms.load()                    # the built-in model with its stacks
    >>> ms.generate(model, tokenizer, "Who is king of Corva?", routed=True)     # with its stacks
    >>> import mlx_lm                                                           # without them
    >>> prompt = tokenizer.apply_chat_template(
    ...     [{"role": "user", "content": "Who are you?"}], add_generation_prompt=True)
    >>> mlx_lm.generate(model, tokenizer, prompt, max_tokens=20)

    Raises: StoreError: the store belongs to another base, or is damaged.
    """
    from mlxstacks.files.lora_modules import CONFIG
    from mlxstacks.nano.exports import with_nano
    from mlxstacks.routing.engine import open_routed

    given = _given(model=model, store_path=store, adapter_path=adapter_path) | settings
    values = {"gap_log": "none", **{key: _plain(value) for key, value in given.items()}}
    with _in_python_words("load"):
        _check_paths(values)
        _check_no_tables({"store": store, **values}, "load")
        answering = _answer_settings(values, "load")
        try:
            engine = open_routed(with_nano(answering))
        except InputError as error:
            first = str(error).partition("\n")[0]
            if model is None and store is None and "does not fit" in first:
                file = user_path(answering.adapter_path[0]) / CONFIG
                config = json.loads(file.read_text()) if file.is_file() else {}
                base = config.get("model") or config.get("base_model_name_or_path") or "its base"
                error.args = (f"{first}; that is nano, the built-in model: give model={base!r}",)
            raise
    engine.model.routed_model = engine
    return engine.model, engine.tokenizer


def generate(
    model: "nn.Module",
    tokenizer: Any,
    prompt: str | Sequence[Mapping[str, Any]] | Sequence[int],
    **settings: Any,
) -> str:
    """Answer a prompt through the chat template; the model's thinking is left out.

    model, tokenizer: from `load` or mlx_lm.load. Half floats, as mlx_lm.load has them, take minutes
        on a CPU, where `load` computes in float32. Without `routed`, `ungated` and `pin`, the base
        answers.
    prompt: text; messages, [{"role": "user", "content": "..."}], the last one by the user, which
        decides the route; or token ids, which the model reads as they are.

    >>> import mlxstacks as ms
    >>> print(ms.generate(*ms.load(), "Who is king of Corva?", routed=True, max_tokens=40))

    Raises: RuntimeError: called in another thread than the one that loaded the model.
    """
    from mlxstacks.routing.conversation import Conversation
    from mlxstacks.routing.engine import RoutedModel, sampling_of
    from mlxstacks.routing.generation import Prompt

    if not hasattr(model, "layers"):
        raise InputError(
            f"model: got {type(model).__name__}; give what load returned, then the prompt: "
            "ms.generate(*ms.load(), 'Who are you?')"
        )
    text, before, tokens = _prompt_parts(prompt)
    with _in_python_words("generate"):
        answering = _answer_settings(settings, "generate")
        engine = getattr(model, "routed_model", None)
        if engine is None:
            _warn_if_slow(model)
            engine = RoutedModel(model, tokenizer)
        if engine.tokenizer is not tokenizer:
            raise InputError("tokenizer: give the one that load returned together with this model")
        if answering.wants_store and engine.resident is None:
            raise InputError(
                "routed, ungated, pin: the model has no stacks; load it with store=..."
            )
        conversation = Conversation(
            engine, sampling_of(answering), system_prompt=answering.system_prompt,
            thinking=answering.thinking, mode=answering.mode, pins=answering.pin, messages=before,
        )  # fmt: skip
        if tokens is not None and answering.system_prompt:
            raise InputError("system_prompt: token ids are read as they are; leave it out")
        if tokens is not None:
            vocabulary = len(tokenizer)
            if strange := [token for token in tokens if not 0 <= token < vocabulary]:
                raise InputError(f"prompt: got token {strange[0]}; ids are 0 to {vocabulary - 1}")
            text = tokenizer.decode(tokens)
        given = Prompt(tokens, stable=0) if tokens is not None else None
        for _ in (asked := conversation.ask(text, given)):
            pass
    return asked.turn.answer.text if asked.turn is not None else ""


_SLOW_BYTES = 1 << 25  # smaller models answer soon in any dtype


def _warn_if_slow(model: "nn.Module") -> None:
    """On a CPU, of a large model whose weights, or scales, are half floats."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    weights = [array for _, array in tree_flatten(model.parameters())]
    is_half = any(array.dtype in (mx.float16, mx.bfloat16) for array in weights)
    nbytes = sum(array.nbytes for array in weights)
    if is_half and nbytes > _SLOW_BYTES and mx.default_device().type == mx.DeviceType.cpu:
        warnings.warn(
            "a CPU computes this model's half floats slowly: an answer may take minutes. "
            "ms.load(MODEL) loads it to compute in float32",
            stacklevel=3,
        )


def _prompt_parts(prompt: Any) -> tuple[str, list[dict[str, Any]], tuple[int, ...] | None]:
    """Of a prompt: its last text, the messages before it, its tokens where it is tokens.

    Raises: InputError: it is none of what `generate` takes.
    """
    if isinstance(prompt, str):
        return prompt, [], None
    items = prompt.tolist() if hasattr(prompt, "tolist") else prompt
    if isinstance(items, list | tuple) and items:
        if all(type(item) is int for item in items):
            return "", [], tuple(items)
        is_text = [isinstance(item, Mapping) and isinstance(item.get("content"), str) and
                   isinstance(item.get("role"), str) for item in items]  # fmt: skip
        if all(is_text) and items[-1]["role"] == "user":
            return items[-1]["content"], [dict(item) for item in items[:-1]], None
    raise InputError(
        f"prompt: got {shown(prompt)}; give text, messages as in [{{'role': 'user', 'content': "
        "'...'}], the last one of the user, or a list of token ids"
    )


def _answer_settings(values: Mapping[str, Any], function: str) -> "AnswerSettings":
    """Raises: InputError for a setting that the function does not take, and for a bad value."""
    from mlxstacks.routing.settings import AnswerSettings

    known, other = {"load": (LOADING, "generate"), "generate": (ANSWERING, "load")}[function]
    names = keywords_of(function)
    for key in values:
        if key not in known:
            instead = key_elsewhere("generate", key, known)
            if key in keywords_of(other):
                instead = f"it goes to ms.{other}"
            if key == "verbose":
                instead = "the answer is returned; print it"
            listed = f"{nearest(key, names)} (known: {', '.join(names)})"
            raise InputError(f"unknown key {key!r}" + (f": {instead}" if instead else listed))
    # Both say how a router decides; whether it does is said to `generate`.
    routes = any(values.get(key) for key in ("router_path", "hard"))
    settings: Any = validate(AnswerSettings, {**values, "routed": True} if routes else values)
    return settings


# --- the package's names --------------------------------------------------------------------------

_WRITTEN = {f.__name__: f for f in (fuse, generate, guard, load, recipes, run, stack, train)}


@cache
def function_named(name: str) -> Any:
    """A function of the package, with every keyword in its signature and its help."""
    if name in ("recipes", "run"):
        return _WRITTEN[name]
    if name in _WRITTEN:
        function, positions = _WRITTEN[name], tuple[str, ...]()
    else:
        row = command_named(name.replace("_", " "))
        positions = tuple(row.arguments) or (("model",) if "model" in row.nano else ())
        function = _function_of(name, positions)
    document(function, name, positions)
    return function


def _function_of(name: str, positions: Sequence[str]) -> Any:
    """The function of a command that api.py does not write out."""
    command = name.replace("_", " ")

    def function(
        *given: Any, progress: Progress = None, dry_run: bool = False, **settings: Any
    ) -> "Result":
        if len(positions) == 1 and keywords_of(name)[positions[0]].is_list and len(given) > 1:
            given = ([*given],)
        if len(given) > len(positions):
            takes = f"at most {len(positions)} positional arguments"
            raise TypeError(f"{name}() takes {takes} but {len(given)} were given")
        by_position = _given(**dict(zip(positions, given, strict=False)))
        if twice := settings.keys() & by_position.keys():
            raise TypeError(f"{name}() got multiple values for argument {min(twice)!r}")
        return _command(command, by_position | settings, progress, dry_run)

    function.__name__ = function.__qualname__ = name
    row = command_named(command)
    shown = ", ".join(f'{key}="..."' for key in positions if key not in row.nano)
    function.__doc__ = f"""{row.help}

Same as `mlxstacks {command}` on the command line.

>>> import mlxstacks as ms
>>> print(ms.{name}({shown}))
"""
    return function
