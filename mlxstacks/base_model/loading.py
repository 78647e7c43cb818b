"""Models, tokenizers and arrays from files."""

import copy
import glob
import importlib.util
import json
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxstacks.data.special_text import bind_vocabulary
from mlxstacks.errors import CheckpointError
from mlxstacks.regular_files import check_regular

# Of what a config counts: the most that is built (the deepest public models have some 130 layers),
# a billion would fill the memory before anything can be said of them.
_LAYER_COUNTS = ("num_hidden_layers", "num_layers", "n_layers", "n_layer")
_LARGEST = {
    **dict.fromkeys(_LAYER_COUNTS, 1000),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 1 << 16),
    **dict.fromkeys(("num_experts_per_tok", "num_attention_heads", "num_key_value_heads"), 1 << 16),
    **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 1 << 24),
    **dict.fromkeys(("head_dim", "vocab_size"), 1 << 24),
}
_NEVER_ZERO = (*_LAYER_COUNTS, "hidden_size", "vocab_size")

_MOST_TOKEN_ID, _LONG_NUMBER = 10_000_000, re.compile(rb":\s*\d{8}")

_VOCABULARIES = ("tokenizer.json", "*.model", "*.tiktoken", "vocab*", "merges.txt", "tekken.json")


def check_counts(config: dict[str, Any]) -> None:
    """What the config, or its text part, counts: whole numbers that a model can have. Absent ones,
    null and lists (a number for each layer) are for the model's class to judge.

    Raises: CheckpointError naming key and value.
    """
    for part in (config, config.get("text_config")):
        if not isinstance(part, dict):
            continue
        for name in _LARGEST:
            count, least = part.get(name), int(name in _NEVER_ZERO)
            if count is None or isinstance(count, list):
                continue
            if type(count) is not int or not least <= count <= _LARGEST[name]:
                shown = f"{count:,}" if type(count) in (int, float) else f"{count!r:.50}"
                raise CheckpointError(
                    f"{name} is {shown} in the config; a whole number from {least} to "
                    f"{_LARGEST[name]:,} is allowed"
                )


def build_model(config: dict[str, Any]) -> nn.Module:
    """A model of `config` with mlx-lm's classes and unset (random) weights.

    Raises: CheckpointError: mlx-lm has no class for `model_type`, or it counts what cannot be.
    """
    from mlx_lm.utils import _get_classes

    check_counts(config)
    try:
        model_class, args_class = _get_classes(config)
    except ValueError as error:
        raise CheckpointError(
            f"model_type {config.get('model_type')!r} is not known to mlx-lm"
        ) from error
    return model_class(args_class.from_dict(copy.deepcopy(config)))


def loading_gaps(directory: Path, config: dict[str, Any]) -> list[str]:
    """What keeps mlx-lm from loading a directory of good weights: it lacks the class, the directory
    the vocabulary, or the config counts what cannot be.
    """
    gaps = [] if _has_class(config) else [f"it has no class for {config.get('model_type')!r:.60}"]
    if not _has_vocabulary(directory):
        gaps.append(f"{directory} has no tokenizer.json or other vocabulary")
    try:
        check_counts(config)
    except CheckpointError as error:
        gaps.append(str(error))
    return gaps


def _has_class(config: dict[str, Any]) -> bool:
    package = importlib.util.find_spec("mlx_lm")
    places = package.submodule_search_locations if package else None
    file = f"{config.get('model_type')}.py"
    if any(os.path.isfile(os.path.join(place, "models", file)) for place in places or ()):
        return True
    # For types that it renames; to import it takes longer than to fuse a small model.
    from mlx_lm.utils import _get_classes

    try:
        _get_classes(config)
    except (ValueError, KeyError, TypeError):
        return False
    return True


def _has_vocabulary(directory: Path) -> bool:
    # From its config alone transformers makes a tokenizer without a vocabulary, and says nothing.
    return any(next(directory.glob(pattern), None) for pattern in _VOCABULARIES)


def load(
    model_path: Path, adapter_path: Path | None = None, lazy: bool = False
) -> tuple[nn.Module, Any, dict[str, Any]]:
    """A local model as mlx-lm loads it, adapter layers attached: (model, tokenizer, config).

    lazy: read no weight before it is used.
    Raises: CheckpointError: files are missing, or config, weights and tokenizer do not go together.
    """
    from mlx_lm import load as load_with_tokenizer

    path = Path(model_path)
    if not (path / "config.json").is_file():
        if (path / "adapter_config.json").is_file():
            raise CheckpointError(f"{path}: an adapter, not a model; give its base as the model")
        raise CheckpointError(f"{path}: no config.json; give a directory with an mlx model")
    if not _has_vocabulary(path):
        raise CheckpointError(f"{path}: no tokenizer.json or other vocabulary; download it too")
    if adapter_path is not None:
        check_regular(Path(adapter_path), kind=CheckpointError)
    with _load_errors(path), ExitStack() as links:
        _check_token_ids(path / "tokenizer.json")
        named = str(links.enter_context(plain_name(path)))
        adapter = adapter_path and str(links.enter_context(plain_name(Path(adapter_path))))
        model, tokenizer, config = load_with_tokenizer(
            named, adapter_path=adapter, return_config=True, lazy=lazy
        )
        check_forward(model)
        longest = getattr(tokenizer, "model_max_length", 1)
        if not isinstance(longest, int | float):
            raise CheckpointError(
                f"model_max_length is {longest!r:.50} in tokenizer_config.json, not a number"
            )
    if rows := _embedding_rows(model):
        bind_vocabulary(tokenizer, rows)
    return model, tokenizer, config


def load_tokenizer(directory: Path) -> Any:
    """The tokenizer of a directory as mlx-lm loads it. Raises: CheckpointError: it cannot be."""
    from mlx_lm.utils import load_tokenizer

    _check_token_ids(directory / "tokenizer.json")
    try:
        return load_tokenizer(directory)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{directory}: its tokenizer cannot be loaded: {error}") from error


def copy_tokenizer(tokenizer: Any, model: nn.Module) -> Any:
    """One of the same model for another thread: a tokenizer is of one thread at a time."""
    copied = copy.deepcopy(tokenizer)
    if rows := _embedding_rows(model):
        bind_vocabulary(copied, rows)
    return copied


def check_forward(model: nn.Module) -> None:
    """Build the graph of one token, so that what a config says and no layer takes (a `rope_theta`
    of text) is met here. Nothing is evaluated, but where a class itself does so while it builds
    (dbrx: the choice of experts). Raises: whatever the model's class raises.
    """
    with suppress(RuntimeError):  # of a kernel that this device has not
        model(mx.zeros((1, 1), mx.int32))


def _embedding_rows(model: nn.Module) -> int | None:
    """Of the table of tokens; of the largest one where none has a name for that."""
    kinds = nn.Embedding | nn.QuantizedEmbedding
    rows = {path: m["weight"].shape[0] for path, m in model.named_modules() if isinstance(m, kinds)}
    of_tokens = [n for path, n in rows.items() if path.endswith(("embed_tokens", "wte"))]
    return max(of_tokens or rows.values(), default=None)


@contextmanager
def plain_name(directory: Path) -> Iterator[Path]:
    """The directory by a name that mlx-lm, which takes it for a pattern, and MLX, which takes
    UTF-8 alone, can read; where its own is none, by that of a link, which goes at the end.
    """
    name = str(directory)
    try:
        is_plain = glob.escape(name) == name and bool(name.encode())
    except UnicodeEncodeError:
        is_plain = False
    if is_plain:
        yield directory
        return
    with tempfile.TemporaryDirectory() as place:
        link = Path(place, "model")
        link.symlink_to(directory.resolve())
        try:
            yield link
        except OSError as error:  # mlx-lm names where it looked
            raise type(error)(str(error).replace(str(link), name)) from error


def load_arrays(path: Path) -> tuple[dict[str, mx.array], dict[str, str]]:
    """The tensors, lazy, and the metadata of a safetensors file. Raises: as `mx.load`."""
    with plain_name(path.parent) as directory:
        arrays, metadata = mx.load(
            str(directory / path.name), format="safetensors", return_metadata=True
        )
    return arrays, metadata


def save_arrays(
    path: Path, arrays: Mapping[str, mx.array], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file; the name must end in that. Raises: as `mx.save_safetensors`."""
    with plain_name(path.parent) as directory:
        mx.save_safetensors(str(directory / path.name), dict(arrays), metadata and dict(metadata))


def _check_token_ids(path: Path) -> None:
    """Loaders make tables as long as the largest id. Raises: CheckpointError for one beyond all."""
    # a second parsing takes as long as the first: only for numbers that no honest vocabulary has
    if not path.is_file() or not _LONG_NUMBER.search(text := path.read_bytes()):
        return
    value = json.loads(text)
    vocabulary = value["model"]["vocab"]
    ids = [token["id"] for token in value.get("added_tokens") or ()]
    ids += vocabulary.values() if isinstance(vocabulary, dict) else ()
    if max(ids, default=0) > _MOST_TOKEN_ID:
        raise CheckpointError(
            f"{path.name}: a token has the id {max(ids):,}; at most {_MOST_TOKEN_ID:,} is allowed"
        )


@contextmanager
def _load_errors(path: Path) -> Iterator[None]:
    """Raises: CheckpointError for whatever mlx-lm raises over a model that it cannot load."""
    check_regular(path, kind=CheckpointError)
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        if not isinstance(config.get("model_type"), str):
            raise CheckpointError("config.json has no model_type; give a model that mlx-lm knows")
        check_counts(config)
        yield
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except PermissionError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    except ModuleNotFoundError as error:
        if not str(error.name).startswith("mlx_lm."):
            raise CheckpointError(
                f"{path}: to load it the package {error.name} is needed: pip install {error.name}"
            ) from None
        raise CheckpointError(
            f"{path}: mlx-lm has no {error.name}; mend chat_template_type or tool_parser_type in "
            "tokenizer_config.json, or upgrade mlx-lm"
        ) from None
    except BaseException as error:
        # over a file that it cannot read the tokenizers library panics, in Rust: no Exception
        is_theirs = isinstance(error, Exception) or type(error).__name__ == "PanicException"
        if not is_theirs or isinstance(error, MemoryError) or "malloc" in str(error):
            raise
        lines = str(error).splitlines()
        shown = " ".join(line.strip() for line in lines[:4]) + (" ..." if len(lines) > 4 else "")
        raise CheckpointError(
            f"{path}: mlx-lm cannot load it: {type(error).__name__}: {shown}; its config, weights "
            "and tokenizer have to be of one model"
        ) from error


@dataclass(frozen=True, slots=True)
class LoadedWeight:
    """The weight of a module as mlx-lm loads it.

    tensor: name of the stored tensor that is the weight, None where mlx-lm computes the weight
    from other tensors. shape: (N, K) or (E, N, K), unpacked. bits, group_size: None where it is
    not quantized.
    """

    tensor: str | None
    shape: tuple[int, ...]
    bits: int | None
    group_size: int | None


def load_stored(
    model_path: Path,
) -> tuple[nn.Module, dict[str, Any], dict[str, mx.array]]:
    """A model as mlx-lm loads it, its config, and the tensors of its files by their names there.

    Nothing but file headers is read: every array is lazy.
    Raises: CheckpointError: mlx-lm cannot load the model.
    """
    stored: dict[str, mx.array] = {}

    def recording_classes(config: dict[str, Any]) -> tuple[type[nn.Module], Any]:
        from mlx_lm.utils import _get_classes

        model_class, args_class = _get_classes(config)

        class Recording(model_class):  # type: ignore[misc, valid-type]
            def sanitize(self, weights: dict[str, mx.array]) -> dict[str, mx.array]:
                stored.update(weights)
                # A model without a `sanitize` of its own takes the weights as they are.
                own = getattr(super(), "sanitize", None)
                return weights if own is None else own(weights)

        return Recording, args_class

    with _load_errors(model_path), plain_name(model_path) as named:
        from mlx_lm.utils import load_model

        model, config = load_model(named, lazy=True, get_model_classes=recording_classes)
        check_forward(model)
    tensors = dict(stored)
    stored.clear()  # the class that holds it is part of a circle, and lives on for a while
    return model, config, tensors


def loaded_weights(model_path: Path) -> dict[str, LoadedWeight]:
    """Every module with a weight by its path in the model; the file headers alone are read.

    Raises: CheckpointError: mlx-lm cannot load the model.
    """
    model, _, stored = load_stored(Path(model_path))
    names = {id(array): name for name, array in stored.items()}
    weights = {}
    for path, module in model.named_modules():
        if "weight" in module:
            *leading, width = module["weight"].shape
            bits, group_size = (
                (module.bits, module.group_size) if "scales" in module else (None, None)
            )
            shape = (*leading, width * 32 // bits if bits else width)
            weights[path] = LoadedWeight(names.get(id(module["weight"])), shape, bits, group_size)
    return weights
