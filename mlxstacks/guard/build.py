"""A model and its training step from a config alone. Weights are named, never made."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_map

from mlxstacks import base_model
from mlxstacks.errors import CheckpointError, InputError
from mlxstacks.files.checkpoint import read_json_object
from mlxstacks.files.disk import user_path
from mlxstacks.files.shipped_configs import shipped_config, shipped_names
from mlxstacks.guard.settings import GuardSettings
from mlxstacks.guard.step import Loss, Step, batch_for, loss_in_pieces, mlx_lm_loss
from mlxstacks.layers.output_head import find_output_head
from mlxstacks.layers.settings import TargetSettings, parse_layers
from mlxstacks.layers.targets import check_targets, find_targets
from mlxstacks.ops import gated_delta
from mlxstacks.regular_files import check_hub_reference
from mlxstacks.training.checkpointing import checkpoint_layers

if TYPE_CHECKING:
    from collections.abc import Iterator

OPTIMIZERS: dict[str, Callable[[], optim.Optimizer]] = {
    "adam": lambda: optim.Adam(1e-5),
    "adamw": lambda: optim.AdamW(1e-5),
    "lion": lambda: optim.Lion(1e-5),
    "sgd": lambda: optim.SGD(1e-5),
}
# A config that a model class cannot be made of, or no step be traced with, ends in one of these.
_BAD_CONFIG = (
    TypeError, KeyError, AttributeError, ValueError, ArithmeticError, IndexError, AssertionError,
)  # fmt: skip


def read_config(model: str) -> tuple[dict[str, Any], str]:
    """The config of a model directory, of a file, or of a hub id, and where it was.

    A model of the recipes that is neither here nor to be had from the hub: its shipped config.
    Raises:
        CheckpointError: no such thing, or not JSON.
    """
    path = user_path(model, CheckpointError)
    if path.is_dir():
        path = path / "config.json"
        if not path.is_file():
            raise CheckpointError(f"{path.parent}: no config.json; give a model directory")
    elif not path.is_file():
        shipped = shipped_config(model)
        if shipped is not None and "/" not in model:
            return shipped.config, shipped.words
        try:
            path = _from_hub(model)
        except CheckpointError:
            if shipped is None:
                raise
            return shipped.config, shipped.words
    return read_json_object(path, unique_keys=False), str(path)


def _from_hub(model: str) -> Path:
    """The config of a hub id: one small file, not the model."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    check_hub_reference(model, "models", CheckpointError)
    try:
        return Path(hf_hub_download(model, "config.json"))
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{model}: no such directory or file, and no config.json from the hub: {reason}; known "
            f"by name, with -3bit and the like or without: {', '.join(shipped_names())}"
        ) from None


def lazy_model(config: dict[str, Any]) -> nn.Module:
    """The model of `config`, quantized as it says, in training mode; nothing is evaluated.

    Raises:
        CheckpointError: mlx-lm has no such model, or the config lacks what it needs.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise CheckpointError("the config has no model_type; give the config.json of a model")
    with config_errors(config):
        model = base_model.build_model(config)
        _tie(model, config)
        base_model.cast(model, _dtype(config))
        _quantize(model, config)
    model.train()
    return _unset(model)


@contextmanager
def config_errors(config: dict[str, Any]) -> "Iterator[None]":
    """Raises: CheckpointError for what mlx-lm's class raises over a config that it cannot use."""
    try:
        yield
    except InputError:
        raise
    except _BAD_CONFIG as error:
        first = next(iter(str(error).splitlines()), "")
        raise CheckpointError(
            f"the config does not describe a {config.get('model_type')}: "
            f"{type(error).__name__}: {first:.300}"
        ) from error


def _tie(model: nn.Module, config: dict[str, Any]) -> None:
    """Gemma 3's class has a head until a checkpoint without one is loaded; then it uses the
    embedding. The config says which it will be.
    """
    if config.get("tie_word_embeddings") is not True:
        return
    for module in (model, getattr(model, "language_model", model)):
        if getattr(module, "tie_word_embeddings", None) is False and "lm_head" in module:
            module.tie_word_embeddings = True
            module.pop("lm_head")


def _unset(model: nn.Module) -> nn.Module:
    """Zeros, not made either, for the random start values of a model.

    Each of those hangs on all draws before it: a chain of thousands of operations, which grows with
    every model and which MLX goes down by recursion.
    """
    model.update(tree_map(lambda a: mx.zeros(a.shape, a.dtype), model.parameters()))
    mx.eval(mx.random.state[0])
    return model


def _dtype(config: dict[str, Any]) -> mx.Dtype:
    for part in (config, config.get("text_config") or {}):
        named = part.get("dtype") or part.get("torch_dtype")
        if isinstance(named, str):
            found = getattr(mx, named.removeprefix("torch."), None)
            if isinstance(found, mx.Dtype):
                return found
    return mx.bfloat16


def _quantize(model: nn.Module, config: dict[str, Any]) -> None:
    """Quantize as mlx-lm's loader does; a module named in the config has its own settings."""
    quantization = config.get("quantization")
    if not quantization:
        return
    group_size, bits = quantization["group_size"], quantization["bits"]
    own_choice = getattr(model, "quant_predicate", None)

    def choice(path: str, module: nn.Module) -> bool | dict[str, Any]:
        if not hasattr(module, "to_quantized"):
            return False
        if path in quantization:
            return quantization[path]
        if module.weight.shape[-1] % group_size:
            return False
        return True if own_choice is None else own_choice(path, module)

    mode = quantization.get("mode", "affine")
    nn.quantize(model, group_size, bits, mode=mode, class_predicate=choice)


def adapted_model(config: dict[str, Any], settings: GuardSettings) -> nn.Module:
    """`lazy_model` with LoRA where the settings want it.

    Raises:
        InputError: a layer out of range, a name that matches nothing, a rank above what fits.
    """
    model = lazy_model(config)
    wanted = TargetSettings(layers=parse_layers(settings.layers), projections=settings.keys or None)
    try:
        targets = find_targets(model, wanted)
        check_targets(targets, settings.rank)
    except ValueError as error:
        raise InputError(str(error)) from None
    base_model.attach_lora(model, 0, settings.rank, 1.0, [target.path for target in targets])
    model.train()
    return _unset(model)


def training_step(config: dict[str, Any], settings: GuardSettings, tokens: int) -> Step:
    """A training step on rows of `tokens` tokens: mlx-lm's trainer with the settings' choices."""
    model = adapted_model(copy.deepcopy(config), settings)
    optimizer = OPTIMIZERS[settings.optimizer]()
    optimizer.init(model.trainable_parameters())
    return Step(
        model,
        optimizer,
        _loss(model, settings),
        batch_for(settings.batch_size, tokens),
        compiled=settings.compile,
        checkpointed=_CHECKPOINTING[settings.checkpointing],
        recorded=(gated_delta,),
    )


def _loss(model: nn.Module, settings: GuardSettings) -> Loss:
    """In pieces where the settings say so and the model's head allows it, as in training."""
    head = None
    if settings.loss == "pieces":
        head, _ = find_output_head(model, prove=False)
    return mlx_lm_loss if head is None else loss_in_pieces(head)


def recurrence(settings: GuardSettings) -> AbstractContextManager[Any]:
    """The recurrence of the settings, for the length of a block."""
    if settings.recurrence == "chunked":
        return base_model.gated_delta_installed()
    return nullcontext()


@contextmanager
def mlx_checkpointed(model: nn.Module) -> "Iterator[None]":
    """Layers under `mx.checkpoint` as mlx-lm's trainer has them, for the length of a block."""
    layers = list(model.layers)
    before = [type(layer) for layer in layers]
    classes = {own: _under_mlx_checkpoint(own) for own in dict.fromkeys(before)}
    for layer in layers:
        layer.__class__ = classes[type(layer)]
    try:
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            layer.__class__ = own


def _under_mlx_checkpoint(own: type) -> type:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        def inner(weights: Any, *args: Any, **kwargs: Any) -> Any:
            self.update(weights)
            return own.__call__(self, *args, **kwargs)

        return mx.checkpoint(inner)(self.trainable_parameters(), *args, **kwargs)

    return type(own.__name__, (own,), {"__call__": call})


_CHECKPOINTING: dict[str, Callable[[nn.Module], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "layers": checkpoint_layers,
    "mlx": mlx_checkpointed,
}
