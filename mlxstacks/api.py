"""What `import mlxstacks as ms` offers: the commands as functions.

Arguments have the names of the command line's options, `max_seq_length=512` for `--max-seq-length
512`; a path may be text or a `Path`, and where an option may be repeated, a list. What is not given
has the command's default: the built-in model, and a target in ./mlxstacks-out. `documented` writes
all of them into the function's help and signature.

Every function raises InputError for what cannot be used, naming the argument, what was got and what
is allowed.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import fill
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, Literal, Union, get_args, get_origin

from mlxstacks.errors import InputError
from mlxstacks.recipe.file import load_recipe
from mlxstacks.recipe.resolve import (
    Resolved,
    call,
    finished,
    merge,
    plans_itself,
    resolve,
    validate,
)
from mlxstacks.recipe.table import command_named, nearest
from mlxstacks.recipe.table import load as load_name

if TYPE_CHECKING:
    import mlx.nn as nn
    from pydantic import BaseModel
    from pydantic.fields import FieldInfo

    from mlxstacks.routing.settings import AnswerSettings
    from mlxstacks.study.result import Result

# tqdm, which mlx-lm's loading imports, asks for widgets that no bar of ours needs.
warnings.filterwarnings("ignore", message="IProgress not found")

PathLike = str | Path
Progress = bool | Callable[..., None] | None
"""Of what takes long. None: a bar in a notebook and on a terminal, else nothing; a callable gets
(done, total) or (done, total, what)."""
# Of what `chat` and `generate` take: what is decided when a model is loaded.
_LOADING = (
    "model", "store_path", "adapter_path", "router_path", "budget", "base", "hard", "gap_log",
    "peft_layout", "allow_base", "allow_special",
)  # fmt: skip
_ANSWERING = (
    "routed", "ungated", "pin", "system_prompt", "thinking", "temp", "top_p", "min_p", "top_k",
    "max_tokens", "repetition_penalty", "seed",
)  # fmt: skip


def fuse(
    model: PathLike | None = None,
    adapter_path: PathLike | Sequence[PathLike] | None = None,
    save_path: PathLike | None = None,
    *,
    progress: Progress = None,
    dry_run: bool = False,
    **settings: Any,
) -> "Result":
    """Fuse adapters into a quantized model, and measure how much of them is in the result.

    The fused model is an ordinary mlx-lm model. The result says, module by module, how well the
    change of the weights matches what was trained (correlation, survival), and what the fuse does
    by itself.

    >>> import mlxstacks as ms
    >>> result = ms.fuse(save_path="fused")             # the built-in model and its adapter
    >>> print(result.verdict)
    >>> result.table("fidelity-1")                      # a pandas DataFrame, worst modules first
    >>> control = ms.fuse(save_path="control", zero_delta=True)     # what the fuse does by itself
    """
    given = {"model": model, "adapter_path": adapter_path, "save_path": save_path}
    return _command("fuse", given, settings, progress, dry_run)


def guard(model: PathLike | None = None, **settings: Any) -> "Result":
    """Predict the live buffers and bytes of a training run, from a model's config alone.

    >>> import mlxstacks as ms
    >>> print(ms.guard(max_seq_length=512, rank=8).verdict)
    """
    return _command("guard", {"model": model}, settings, False, False)


def train(
    model: PathLike | None = None,
    data: PathLike | Mapping[str, Any] | None = None,
    save_path: PathLike | None = None,
    *,
    progress: Progress = None,
    dry_run: bool = False,
    **settings: Any,
) -> "Result":
    """Train a LoRA on a model and write an adapter that mlx-lm loads.

    >>> import mlxstacks as ms
    >>> result = ms.train(save_path="adapters", iters=4)        # the built-in model and its data
    >>> result.table("validation")
    """
    given = {"model": model, "data": data, "save_path": save_path}
    return _command("train", given, settings, progress, dry_run)


def stack(
    model: PathLike | None = None,
    data: PathLike | Mapping[str, Any] | None = None,
    save_path: PathLike | None = None,
    *,
    progress: Progress = None,
    dry_run: bool = False,
    **settings: Any,
) -> "Result":
    """Train frozen stacks, domain after domain, into a store that loses none of them.

    >>> import mlxstacks as ms
    >>> print(ms.stack(save_path="stacks", dry_run=True))       # the plan; without dry_run minutes
    """
    given = {"model": model, "data": data, "save_path": save_path}
    return _command("stack", given, settings, progress, dry_run)


def run(
    recipe: PathLike | Mapping[str, Any],
    *,
    progress: Progress = None,
    dry_run: bool = False,
    **settings: Any,
) -> "Result":
    """Run any command by a recipe: what is done already with the same settings is read back.

    recipe: a YAML file, the name of a shipped recipe (`mlxstacks recipes` lists them), or a dict of
        settings with the key `command`.
    progress: None: a bar in a notebook and on a terminal; False: none; or a callable that gets
        (done, total, what).
    dry_run: what would be done, of commands that plan; the model has to be here.
    settings: those of the recipe's command, instead of what the recipe has.

    >>> import mlxstacks as ms
    >>> ms.run("adapter-show").table("modules")
    >>> ms.run({"command": "guard", "rank": 4}).verdict
    """
    from mlxstacks.study.result import Result

    if isinstance(recipe, Mapping):
        values = merge(recipe, settings)
        name = values.pop("command", None)
        if not isinstance(name, str):
            raise InputError(f"command: got {name!r}; give the name of one, as in 'stack compare'")
        resolved = resolve(name, values)
    else:
        loaded = load_recipe(str(recipe))
        name, resolved = loaded.command, resolve(loaded.command, settings, loaded)
    if not (dry_run or resolved.forced) and finished(name, resolved) is not None:
        assert resolved.target is not None
        return Result.open(resolved.target)
    return _called(name, resolved, progress, dry_run)


def _command(
    name: str,
    given: Mapping[str, Any],
    settings: Mapping[str, Any],
    progress: Progress,
    dry_run: bool,
) -> Any:
    values = {key: value for key, value in given.items() if value is not None}
    return _called(name, resolve(name, {**values, **settings}), progress, dry_run)


def _called(name: str, resolved: Resolved, progress: Progress, dry_run: bool) -> Any:
    from mlxstacks.study.render.progress import ProgressBar

    if dry_run and not plans_itself(name):
        raise InputError(f"dry_run: {name} has no plan of its own; leave it out")
    if callable(progress):
        # Not every command says what it is at.
        def report(done: float, total: float, what: str = "") -> None:
            progress(done, total, what)

        return call(name, resolved, dry_run=dry_run, progress=report)
    if progress is False:
        return call(name, resolved, dry_run=dry_run)
    with ProgressBar(name) as bar:
        return call(name, resolved, dry_run=dry_run, progress=bar)


def load(
    model: PathLike | None = None,
    *,
    store: PathLike | None = None,
    adapter_path: PathLike | Sequence[PathLike] = (),
    **settings: Any,
) -> "tuple[nn.Module, Any]":
    """mlx-lm's model and its tokenizer, with a store's stacks or with adapters next to it.

    The model is the base to all who call it; `generate` lets its stacks answer. Weights are read
    when they are first used, stacks when a prompt needs them. It answers in the thread that loaded
    it. mlx_lm.generate, stream_generate, batch_generate and mlx_lm.evaluate take both as they are.

    >>> import mlxstacks as ms
    >>> model, tokenizer = ms.load()                    # the built-in model with its stacks
    >>> import mlx_lm
    >>> mlx_lm.generate(model, tokenizer, "Who are you?", max_tokens=20)        # the base
    >>> ms.generate(model, tokenizer, "Who is king of Corva?", routed=True)     # and its stacks

    Raises: StoreError: the store is of another base, or damaged.
    """
    from mlxstacks.nano.exports import with_nano
    from mlxstacks.routing.engine import open_routed

    given = {"model": model, "store_path": store, "adapter_path": adapter_path}
    values = {key: value for key, value in given.items() if value is not None} | settings
    values.setdefault("gap_log", "none")
    engine = open_routed(with_nano(_answer_settings(values, _LOADING)))
    engine.model.routed_model = engine
    return engine.model, engine.tokenizer


def generate(model: "nn.Module", tokenizer: Any, prompt: str, **settings: Any) -> str:
    """The answer to a prompt, which goes through the chat template; without what was only thought.

    model, tokenizer: of `load`, or of mlx_lm.load. Without `routed`, `ungated` and `pin` the base
        answers.

    >>> import mlxstacks as ms
    >>> print(ms.generate(*ms.load(), "Who is king of Corva?", routed=True, max_tokens=40))

    Raises: RuntimeError in another thread than the one that loaded the model.
    """
    from mlxstacks.routing.conversation import Conversation
    from mlxstacks.routing.engine import RoutedModel, sampling_of

    if not isinstance(prompt, str):
        raise InputError(f"prompt: got {type(prompt).__name__}; give text")
    answering = _answer_settings(settings, _ANSWERING)
    engine = getattr(model, "routed_model", None) or RoutedModel(model, tokenizer)
    if engine.tokenizer is not tokenizer:
        raise InputError("tokenizer: give the one that load returned together with this model")
    if answering.wants_store and engine.resident is None:
        raise InputError("routed, ungated, pin: the model has no stacks; load it with store=...")
    conversation = Conversation(
        engine, sampling_of(answering), system_prompt=answering.system_prompt,
        thinking=answering.thinking, mode=answering.mode, pins=answering.pin,
    )  # fmt: skip
    for _ in (asked := conversation.ask(prompt)):
        pass
    return asked.turn.answer.text if asked.turn is not None else ""


def _answer_settings(values: Mapping[str, Any], known: Sequence[str]) -> "AnswerSettings":
    """Raises: InputError for a setting that is not known here, and for a bad value."""
    from mlxstacks.routing.settings import AnswerSettings

    for key in values:
        if key not in known:
            raise InputError(
                f"unknown key {key!r}{nearest(key, known)} (known: {', '.join(known)})"
            )
    # Both say how a router decides; whether it does is said to `generate`.
    routes = any(values.get(key) for key in ("router_path", "hard"))
    settings: Any = validate(AnswerSettings, {**values, "routed": True} if routes else values)
    return settings


# --- help -----------------------------------------------------------------------------------------

_OWN: Mapping[str, tuple[str, str]] = {
    "progress": (
        "None, bool or callable, default None",
        "A bar in a notebook and on a terminal; False: none; a callable gets (done, total, what).",
    ),
    "dry_run": ("bool, default False", "Only say what would be done."),
    "store": (
        "str or None",
        "Made by `mlxstacks stack` for this model. Default: with the built-in model its own.",
    ),
}


def documented(name: str) -> Any:
    """A function of this file, with every keyword in its help and its signature; they are those of
    the settings.
    """
    function: Any = globals()[name]
    if hasattr(function, "__signature__") or name == "run":
        return function
    fields = _fields(name)
    signature = inspect.signature(function)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    keywords = [
        inspect.Parameter(
            key, inspect.Parameter.KEYWORD_ONLY, default=_default(name, key, field),
            annotation=Any if "FieldInfo" in repr(field.annotation) else field.annotation,
        )
        for key, field in fields.items()
        if key not in signature.parameters
    ]  # fmt: skip
    parameters = sorted([*own, *keywords], key=lambda parameter: parameter.kind)
    function.__signature__ = signature.replace(parameters=parameters)
    lines = [
        f"    {key}: {kind}\n{_wrapped(text)}" for key, kind, text in _described(name, own, fields)
    ]
    doc = inspect.cleandoc(function.__doc__)
    function.__doc__ = "\n".join([
        doc, "", "Arguments:", *lines, "",
        "Returns: a Result: str(result) is what the command prints; result.verdict, .table(id), "
        "\n.plot(id) and .data hold the rest." if name not in ("load", "generate") else "",
    ]).rstrip()  # fmt: skip
    return function


def _fields(name: str) -> "dict[str, FieldInfo]":
    """The settings that a function takes."""
    known = {"load": _LOADING, "generate": _ANSWERING}.get(name)
    if known is None:
        settings: type[BaseModel] = load_name(command_named(name).settings)
        return dict(settings.model_fields)
    from mlxstacks.routing.settings import AnswerSettings

    return {key: AnswerSettings.model_fields[key] for key in known if key != "store_path"}


def _default(name: str, key: str, field: "FieldInfo") -> Any:
    """`load` notes no gaps unless it is asked to."""
    unless = "none" if (name, key) == ("load", "gap_log") else None
    return unless or field.get_default(call_default_factory=True)


def _described(
    name: str, own: Sequence[inspect.Parameter], fields: "Mapping[str, FieldInfo]"
) -> Iterator[tuple[str, str, str]]:
    """(name, type and default, what it means) of each argument, in the order of the signature."""
    first = [p.name for p in own if p.name in fields]
    for key in [*first, *(key for key in fields if key not in first)]:
        field = fields[key]
        kind = type_in_words(field.annotation)
        value = _default(name, key, field)
        plain = field.default is not None and not hasattr(value, "model_dump")
        default = f", default {value!r}" if plain and value not in ((), "") else ""
        yield key, f"{kind}{default}", field.description or ""
    for parameter in own:
        if parameter.name in _OWN:
            yield parameter.name, *_OWN[parameter.name]


def type_in_words(annotation: Any) -> str:
    """`str or None`, `'a' or 'b'`, `list of str`, `dict with rank, scale`."""
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(map(repr, parts))
    if origin in (Union, UnionType):
        some = [type_in_words(part) for part in parts if part is not NoneType]
        return " or ".join([*some, *(["None"] if NoneType in parts else [])])
    if origin in (tuple, list):
        one = type_in_words(parts[0])
        return f"{one} or list of {one}"
    if origin in (dict, Mapping):
        return "dict"
    if hasattr(annotation, "__metadata__"):  # Annotated
        return type_in_words(parts[0])
    if fields := getattr(annotation, "model_fields", None):
        return f"dict with {', '.join(fields)}"
    return getattr(annotation, "__name__", str(annotation))


def _wrapped(text: str) -> str:
    indent = " " * 8
    return fill(" ".join(text.split()), 88, initial_indent=indent, subsequent_indent=indent)
