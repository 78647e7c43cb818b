"""What `import mlxstacks as ms` offers: the commands as functions.

Arguments have the names of the command line's options, `max_seq_length=512` for `--max-seq-length
512`; a path may be text or a `Path`, and where an option may be repeated, a list. What is not given
has the command's default: the built-in model, and a target in ./mlxstacks-out.

Every function raises InputError for what cannot be used, naming the argument, what was got and what
is allowed.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from mlxstacks.recipe.table import nearest

if TYPE_CHECKING:
    import mlx.nn as nn

    from mlxstacks.routing.settings import AnswerSettings
    from mlxstacks.study.result import Result

PathLike = str | Path
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
    **settings: Any,
) -> "Result":
    """Fuse adapters into a quantized model and say what survived.

    settings: those of `mlxstacks fuse`: requant, zero_delta, target_correlation, ...
    """
    given = {"model": model, "adapter_path": adapter_path, "save_path": save_path}
    return _command("fuse", given, settings)


def guard(model: PathLike | None = None, **settings: Any) -> "Result":
    """Predict live buffers and bytes of a run from a config alone.

    settings: those of `mlxstacks guard`: max_seq_length, rank, layers, ...
    """
    return _command("guard", {"model": model}, settings)


def train(
    model: PathLike | None = None,
    data: PathLike | Mapping[str, Any] | None = None,
    save_path: PathLike | None = None,
    **settings: Any,
) -> "Result":
    """Train a LoRA on a model and write an adapter that mlx-lm loads.

    settings: those of `mlxstacks train`: rank, layers, iters, learning_rate, ...
    """
    return _command("train", {"model": model, "data": data, "save_path": save_path}, settings)


def stack(
    model: PathLike | None = None,
    data: PathLike | Mapping[str, Any] | None = None,
    save_path: PathLike | None = None,
    **settings: Any,
) -> "Result":
    """Train frozen stacks, domain after domain, into a store that loses none of them.

    settings: those of `mlxstacks stack`: domains, rounds, stack={"rank": 8}, ...
    """
    return _command("stack", {"model": model, "data": data, "save_path": save_path}, settings)


def run(
    recipe: PathLike | Mapping[str, Any], *, dry_run: bool = False, **settings: Any
) -> "Result":
    """Run any command by a recipe: what is done already with the same settings is read back.

    recipe: a YAML file, the name of a shipped recipe, or a dict of settings with the key `command`.
    settings: go before those of the recipe. dry_run: what would be done, of commands that plan; the
        model has to be here.
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
    return _called(name, resolved, dry_run)


def _command(name: str, given: Mapping[str, Any], settings: Mapping[str, Any]) -> Any:
    values = {key: value for key, value in given.items() if value is not None}
    values |= settings
    dry_run = bool(values.pop("dry_run", False))
    return _called(name, resolve(name, values), dry_run)


def _called(name: str, resolved: Resolved, dry_run: bool) -> Any:
    if dry_run and not plans_itself(name):
        raise InputError(f"dry_run: {name} has no plan of its own; leave it out")
    return call(name, resolved, dry_run=dry_run)


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
    it.
    store: a store that `mlxstacks stack` made for this model; None without model and adapter_path:
        the built-in model and its store. settings: router_path, budget, base, gap_log, ...
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

    model, tokenizer: of `load`, or of mlx_lm.load. settings: routed=True: a router decides which
    stacks answer; ungated=True: all of them; pin=["code"]: these; without: the base. And
    max_tokens, temp, top_p, seed, system_prompt, thinking, ...
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
