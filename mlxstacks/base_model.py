"""The only door to mlx_lm: build, load, quantize, save. It is imported inside functions."""

import copy
import functools
import glob
import importlib.util
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_map_with_path, tree_unflatten

from mlxstacks.data.chat import prompt_tokens
from mlxstacks.data.special_text import bind_vocabulary
from mlxstacks.data.text_settings import PLAIN, Rendering
from mlxstacks.errors import CheckpointError, InputError, NonFiniteModelError
from mlxstacks.ops import gated_delta
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
        named = str(links.enter_context(_plain_name(path)))
        adapter = adapter_path and str(links.enter_context(_plain_name(Path(adapter_path))))
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
def _plain_name(directory: Path) -> Iterator[Path]:
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
    with _plain_name(path.parent) as directory:
        arrays, metadata = mx.load(
            str(directory / path.name), format="safetensors", return_metadata=True
        )
    return arrays, metadata


def save_arrays(
    path: Path, arrays: Mapping[str, mx.array], metadata: Mapping[str, str] | None = None
) -> None:
    """Write a safetensors file; the name must end in that. Raises: as `mx.save_safetensors`."""
    with _plain_name(path.parent) as directory:
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

    with _load_errors(model_path), _plain_name(model_path) as named:
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


def quantize(
    model: nn.Module,
    config: dict[str, Any],
    bits: int | None,
    group_size: int = 64,
    module_bits: Mapping[str, int | None] | None = None,
) -> dict[str, Any]:
    """Quantize `model` in place as `mlx_lm.convert` would; return the config that says so.

    bits: None leaves every module that `module_bits` does not name in floats.
    module_bits: module path -> bits, None for floats; goes before the model's own
        `quant_predicate`, by which router gates keep 8 bits.
    """
    overrides = module_bits or {}
    default = bits or next(filter(None, overrides.values()), None)
    quantization: dict[str, Any] = {"group_size": group_size, "bits": default, "mode": "affine"}
    standard = dict(quantization)
    own_choice = getattr(model, "quant_predicate", None)

    def predicate(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized") or module.weight.shape[-1] % group_size:
            return False
        width = overrides.get(path, bits)
        choice: bool | dict[str, Any]
        if path in overrides or own_choice is None or width is None:
            choice = standard | {"bits": width} if width and width != default else bool(width)
        else:
            choice = own_choice(path, module)
            if isinstance(choice, dict) and module.weight.shape[-1] % choice.get("group_size", 1):
                choice = choice | {"group_size": group_size}
        if isinstance(choice, dict):
            quantization[path] = choice
        return choice

    nn.quantize(model, group_size, default, class_predicate=predicate)
    return config | {"quantization": quantization, "quantization_config": quantization}


def dequantize(model: nn.Module) -> None:
    """Replace quantized modules of `model`, in place, by plain ones with the stored values."""
    from mlx_lm.utils import dequantize_model

    dequantize_model(model)


# Below, setting up a product for each expert costs more than it saves.
LEAST_EXPERT_BYTES = 1 << 20


def rows_of_experts(indices: mx.array, num_experts: int) -> np.ndarray | None:
    """How many rows each expert gets, for indices (N,): evaluates what they are made of. None
    inside `mx.compile`, where no number is known.
    """
    try:
        return np.bincount(np.array(indices), minlength=num_experts)
    except ValueError:
        return None


def group_experts(model: nn.Module) -> None:
    """Let large plain experts, in place, take all their rows in one product on a CPU.

    There `mx.gather_mm` multiplies row after row, each reading its expert's weights again.
    Law: the outputs and gradients of `gather_mm`, to the order of sums.
    """
    from mlx_lm.models.switch_layers import SwitchLinear

    class GroupedSwitchLinear(SwitchLinear):
        def __call__(
            self, x: mx.array, indices: mx.array, sorted_indices: bool = False
        ) -> mx.array:
            """x (N, 1, K) and indices (N,) where rows are sorted by expert, as in a prompt."""
            grouped = sorted_indices and "bias" not in self
            counts = rows_of_experts(indices, self.num_experts) if grouped else None
            if counts is None:
                return super().__call__(x, indices, sorted_indices)
            parts = mx.split(x.squeeze(1), np.cumsum(counts)[:-1].tolist())
            weights = self.weight  # weights[e] would be a copy, a slice is none
            products = [
                part @ weights[e : e + 1].squeeze(0).T for e, part in enumerate(parts) if part.size
            ]
            return mx.expand_dims(mx.concatenate(products), 1)

    for _, module in model.named_modules():
        if type(module) is SwitchLinear and module.weight[0].nbytes >= LEAST_EXPERT_BYTES:
            module.__class__ = GroupedSwitchLinear


def count_parameters(model: nn.Module) -> int:
    """Numbers in a model, those of packed weights counted one by one."""
    from mlx_lm.utils import get_total_parameters

    return int(get_total_parameters(model))


def cast(model: nn.Module, dtype: mx.Dtype) -> None:
    """Cast floating-point parameters in place, but those the model keeps (`A_log` in float32)."""
    wanted = getattr(model, "cast_predicate", lambda _: True)

    def change(path: str, value: mx.array) -> mx.array:
        floating = mx.issubdtype(value.dtype, mx.floating)
        return value.astype(dtype) if floating and wanted(path) else value

    model.update(tree_map_with_path(change, model.parameters()))


def save_model(directory: Path, model: nn.Module, config: dict[str, Any]) -> None:
    """Write weights, index and `config.json` into an existing or new directory."""
    from mlx_lm.utils import save_config
    from mlx_lm.utils import save_model as save_weights

    directory.mkdir(parents=True, exist_ok=True)
    with _plain_name(directory) as named:
        save_weights(named, model)
    save_config(copy.deepcopy(config), directory / "config.json")


def attach_lora(
    model: nn.Module, num_layers: int, rank: int, scale: float, keys: list[str] | None
) -> None:
    """Put mlx-lm's LoRA on modules named `keys` of the last `num_layers`; freeze the rest.

    keys: None for every kind that mlx-lm can adapt.
    """
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model.freeze()
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0, "keys": keys}
    linear_to_lora_layers(model, num_layers, parameters)


def attach_pair(
    model: nn.Module,
    path: str,
    kind: Literal["linear", "switch", "embedding"],
    pair: tuple[mx.array, mx.array],
    scale: float,
    magnitude: mx.array | None = None,
) -> None:
    """Put mlx-lm's LoRA layer with this pair over the module at `path`, over LoRA layers that are
    there already; with a magnitude its DoRA layer.

    pair: lora_a, lora_b in mlx-lm's axis order (see `files.lora_modules`).
    Raises: InputError: DoRA over another adapter, or on an embedding, which mlx-lm has not.
    """
    from mlx_lm.tuner import dora, lora

    if magnitude is not None:
        base = dict(model.named_modules())[path]
        if kind != "linear" or "lora_a" in base:
            raise InputError(
                f"{path}: unfused, DoRA is for linear modules without another adapter; fuse it"
            )
        over = dora.DoRALinear.from_base(base, r=pair[1].shape[0])
        over.scale, over.m = scale, magnitude
        over.lora_a, over.lora_b = pair
        model.update_modules(tree_unflatten([(path, over)]))
        return
    layers = {
        "linear": lora.LoRALinear,
        "switch": lora.LoRASwitchLinear,
        "embedding": lora.LoRAEmbedding,
    }
    inner = "embedding" if kind == "embedding" else "linear"
    present = base = dict(model.named_modules())[path]
    while "lora_a" in base:
        base = base[inner]
    layer = layers[kind].from_base(base, r=pair[1].shape[-1 if kind == "switch" else 0])
    setattr(layer, inner, present)
    layer.scale = scale
    layer.lora_a, layer.lora_b = pair
    model.update_modules(tree_unflatten([(path, layer)]))


def types_that_shard() -> list[str]:
    """Model types of mlx-lm that can be split over processes."""
    package = importlib.util.find_spec("mlx_lm.models")
    files = (
        [
            file
            for place in package.submodule_search_locations or ()
            for file in Path(place).glob("*.py")
        ]
        if package
        else []
    )
    return sorted(file.stem for file in files if "def shard(" in file.read_text(encoding="utf-8"))


def save_adapter(
    directory: Path,
    weights: dict[str, mx.array],
    num_layers: int,
    rank: int,
    scale: float,
    keys: list[str],
) -> None:
    """Write an adapter in mlx-lm's format: `adapters.safetensors` and `adapter_config.json`."""
    directory.mkdir(parents=True, exist_ok=True)
    save_arrays(directory / "adapters.safetensors", weights)
    config = {
        "fine_tune_type": "lora",
        "num_layers": num_layers,
        "lora_parameters": {"rank": rank, "scale": scale, "dropout": 0.0, "keys": keys},
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def fused_layer(layer: nn.Module, dequantize: bool) -> nn.Module:
    """mlx-lm's fuse of a layer that has what its LoRALinear (or LoRASwitchLinear, for a base with
    `num_experts`) has: linear, lora_a, lora_b, scale. As theirs, rounded again at the base's bits.
    """
    from mlx_lm.tuner import lora

    is_switch = hasattr(layer.linear, "num_experts")
    return (lora.LoRASwitchLinear if is_switch else lora.LoRALinear).fuse(layer, dequantize)


def fuse_lora(model: nn.Module) -> None:
    """Fuse LoRA layers of `model` in place by mlx-lm's own rule: at the same bits, rounded anew."""
    fused = [
        (path, module.fuse()) for path, module in model.named_modules() if hasattr(module, "fuse")
    ]
    model.update_modules(tree_unflatten(fused))
    model.eval()


def named_quantizable(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of every module that mlx-lm quantizes or has quantized."""
    for path, module in model.named_modules():
        if hasattr(module, "to_quantized") or (hasattr(module, "bits") and "scales" in module):
            yield path, module


def named_switches(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(path, module) of what runs the chosen experts of each mixture: mlx-lm's two classes.

    Every mixture of mlx-lm calls one of them as `switch(x, indices)`, indices (..., top_k).
    """
    from mlx_lm.models.switch_layers import SwitchGLU, SwitchMLP

    for path, module in model.named_modules():
        if isinstance(module, SwitchGLU | SwitchMLP):
            yield path, module


# Answers whose tokens are computed together.
GENERATED_AT_ONCE = 8


def generate(
    model: nn.Module,
    tokenizer: Any,
    messages: list[dict[str, str]],
    max_tokens: int = 32,
    rendering: Rendering = PLAIN,
) -> str:
    """The greedy reply to a chat, without the end mark. Raises: NonFiniteModelError."""
    prompt = prompt_tokens(messages, tokenizer, rendering)
    return "".join(step.text for step in _stream(model, tokenizer, prompt, max_tokens=max_tokens))


def generate_all(
    model: nn.Module,
    tokenizer: Any,
    chats: Sequence[list[dict[str, str]]],
    max_tokens: int = 32,
    rendering: Rendering = PLAIN,
) -> list[str]:
    """`generate` of each chat, several at once. Raises: NonFiniteModelError.

    Law: the same texts, but where rounding decides between two next tokens.
    """
    from mlx_lm import batch_generate

    prompts = [list(prompt_tokens(chat, tokenizer, rendering)) for chat in chats]
    replies = batch_generate(
        model, tokenizer, prompts, max_tokens=max_tokens, return_logprobs=True,
        completion_batch_size=GENERATED_AT_ONCE, prefill_batch_size=GENERATED_AT_ONCE,
    )  # fmt: skip
    for log_p in replies.logprobs:
        if not np.isfinite(log_p).all():
            raise NonFiniteModelError("the log probability of a token")
    texts: list[str] = replies.texts
    return texts


def greedy_tokens(
    model: nn.Module, tokenizer: Any, prompt: Sequence[int], max_tokens: int
) -> list[int]:
    """The greedy reply to a prompt, with its end mark. Raises: NonFiniteModelError."""
    steps = _stream(model, tokenizer, mx.array(prompt), max_tokens=max_tokens)
    return [int(step.token) for step in steps]


def make_prompt_cache(model: nn.Module) -> list[Any]:
    """An empty cache of mlx-lm for one sequence: an entry a layer, of the kind the layer needs."""
    from mlx_lm.models.cache import make_prompt_cache as make

    return make(model)


def stream_tokens(
    model: nn.Module,
    tokenizer: Any,
    last_token: int,
    cache: list[Any],
    max_tokens: int,
    sampler: Callable[[mx.array], mx.array],
    processors: Sequence[Callable[[mx.array, mx.array], mx.array]] = (),
) -> Generator[tuple[str, int, str | None], None, None]:
    """What a model says after `cache` and `last_token`: (text, token, reason) a token.

    sampler: log probabilities (1, V) -> token (1,). processors: (tokens since and with last_token,
        logits (1, V)) -> logits. reason: "stop" at an end mark (whose text is empty), "length" at
        max_tokens, None before.
    Law: at each yield the cache holds last_token and every token yielded so far, this one included;
        so mlx-lm's `generate_step` has it, which is a step ahead.
    Raises: NonFiniteModelError.
    """
    # The default stream: mlx-lm's own one is a second thread on a CPU, and nothing else runs here.
    steps = _stream(
        model, tokenizer, mx.array([last_token]), max_tokens=max_tokens,
        stream=mx.default_stream(mx.default_device()), sampler=sampler,
        logits_processors=list(processors), prompt_cache=cache,
    )  # fmt: skip
    for step in steps:
        yield step.text, int(step.token), step.finish_reason


def _stream(model: nn.Module, tokenizer: Any, prompt: Any, **options: Any) -> Iterator[Any]:
    """mlx-lm's `stream_generate`. Raises: NonFiniteModelError."""
    from mlx_lm import stream_generate

    number, is_nan = 0, mx.array(False)
    for step in stream_generate(model, tokenizer, prompt, **options):
        # Of the token before: to wait for this one's would be to wait for mlx-lm's next step, too.
        _refuse_nan(number, is_nan)
        number, is_nan = step.generation_tokens, mx.isnan(step.logprobs[step.token])
        mx.async_eval(is_nan)
        yield step
    _refuse_nan(number, is_nan)


def _refuse_nan(number: int, is_nan: mx.array) -> None:
    """NaN among the logits makes every log probability NaN, Inf its own, which is then chosen."""
    if is_nan.item():
        raise NonFiniteModelError(f"the log probability of token {number}")


def batch_generator(
    model: Callable[..., mx.array], end_tokens: Sequence[int], rows: int, prefill_tokens: int
) -> Any:
    """mlx-lm's `BatchGenerator`, of at most so many rows at once, each greedy unless it has its own
    sampler.

    model: called as `model(tokens (B, T), cache=entries)`, the entries those that rows came with,
        batched. prefill_tokens: of a prompt, between two tokens of the others.
    """
    from mlx_lm.generate import BatchGenerator

    # The default stream, as in `stream_tokens`.
    return BatchGenerator(
        model, stop_tokens=[[token] for token in end_tokens], completion_batch_size=rows,
        prefill_batch_size=min(8, rows), prefill_step_size=prefill_tokens,
        stream=mx.default_stream(mx.default_device()),
    )  # fmt: skip


def prefix_cache(sequences: int) -> Any:
    """mlx-lm's `LRUPromptCache`: caches of prompts by (key, tokens), for prompts that go on."""
    from mlx_lm.models.cache import LRUPromptCache

    return LRUPromptCache(max_size=sequences)


def prefix_entries(cache: Any) -> list[tuple[Any, Sequence[int], list[Any], str]]:
    """What a `prefix_cache` holds: (key, tokens, caches, kind)."""
    return [
        (key, tokens, cache._trie.get(key, tokens).prompt_cache, kind)
        for kind, used in cache._lru._lrus.items()
        for key, tokens in used
    ]


def save_prompt_cache(path: Path, entries: list[Any], about: str) -> None:
    """Write caches of a prompt, with a text about them. Raises: RuntimeError: MLX cannot."""
    from mlx_lm.models.cache import save_prompt_cache

    save_prompt_cache(str(path), entries, {"about": about})


def load_prompt_cache(path: Path) -> tuple[list[Any], str]:
    """What `save_prompt_cache` wrote, evaluated.

    Raises: RuntimeError, ValueError, LookupError or TypeError: it is something else, or damaged.
    """
    from mlx_lm.models.cache import load_prompt_cache

    entries, metadata = load_prompt_cache(str(path), return_metadata=True)
    mx.eval([entry.state for entry in entries])
    return entries, metadata["about"]


def text_machine(tokenizer: Any) -> Any:
    """mlx-lm's `TextStateMachine`: text of an answer by state: normal, reasoning or tool."""
    from mlx_lm.generate import make_text_state_machine

    return make_text_state_machine(tokenizer)


def penalties(
    repetition: float, presence: float, frequency: float
) -> list[Callable[[mx.array, mx.array], mx.array]]:
    """mlx-lm's processors over the last 20 tokens: (tokens so far, logits (1, V)) -> logits. None
    for a repetition of 1 and for zeros.
    """
    from mlx_lm.sample_utils import make_logits_processors

    processors: list[Callable[[mx.array, mx.array], mx.array]] = make_logits_processors(
        repetition_penalty=repetition if repetition != 1 else None, presence_penalty=presence,
        frequency_penalty=frequency,
    )  # fmt: skip
    return processors


def repetition_penalty(
    penalty: float, tokens: int = 20
) -> Callable[[mx.array, mx.array], mx.array]:
    """mlx-lm's processor: logits of the last so many tokens are divided by the penalty (multiplied
    where negative).
    """
    from mlx_lm.sample_utils import make_repetition_penalty

    return make_repetition_penalty(penalty, tokens)


# mlx-lm's function and the one in its place, for each remover not called yet.
_installs: dict[object, tuple[Callable[..., Any], Callable[..., Any]]] = {}


def install_gated_delta() -> Callable[[], None]:
    """Train every mlx-lm model with the chunked recurrence; returns the function that undoes it.

    mlx-lm's models bind `gated_delta_update` by name when they are imported. So it is rebound in
    each module of mlx_lm that holds it, and in the defining module, where models imported later
    find it. A call with use_kernel=False, as every model makes in training, goes to
    `ops.gated_delta`; any other to mlx-lm's own function. Installs nest: the originals return with
    the last removal, and calling one remover twice does no harm.
    """
    from mlx_lm.models import gated_delta as theirs

    original = theirs.gated_delta_update

    @functools.wraps(original)
    def gated_delta_update(*arrays: Any, use_kernel: bool = True, **options: Any) -> Any:
        if use_kernel:
            return original(*arrays, use_kernel=True, **options)
        return gated_delta.gated_delta_update(*arrays, use_kernel=False, **options)

    pair = next(iter(_installs.values()), None) or (original, gated_delta_update)
    _rebind(*pair)
    token = object()
    _installs[token] = pair

    def remove() -> None:
        if _installs.pop(token, None) and not _installs:
            _rebind(*reversed(pair))

    return remove


@contextmanager
def gated_delta_installed() -> Iterator[None]:
    """`install_gated_delta` for the length of a `with` block."""
    remove = install_gated_delta()
    try:
        yield
    finally:
        remove()


def _rebind(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Put `new` under every name that stands for `old` in the imported modules of mlx_lm."""
    modules = list(sys.modules.items())  # at once: another thread may be importing
    for module in [module for name, module in modules if name.startswith("mlx_lm.")]:
        for name in [name for name, value in vars(module).items() if value is old]:
            setattr(module, name, new)
