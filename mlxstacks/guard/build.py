"""A model and its training step from a config alone. Weights are named, never made."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx.utils import tree_flatten, tree_map

from mlxstacks import base_model, memory
from mlxstacks.errors import CheckpointError, InputError
from mlxstacks.files.checkpoint import read_json_object
from mlxstacks.files.disk import user_path
from mlxstacks.files.hub import shipped_config, shipped_names
from mlxstacks.guard.settings import GuardSettings
from mlxstacks.guard.step import Loss, Step, batch_for, micro_batch_for, mlx_lm_loss
from mlxstacks.layers import gates
from mlxstacks.layers.adapted import adapted_layers
from mlxstacks.layers.attach import add_active, attach_lora, attach_stacks
from mlxstacks.layers.freezing import shape_of
from mlxstacks.layers.latent import LatentPair, input_group
from mlxstacks.layers.merge_ready import (
    GridLoRALinear,
    GridLoRASwitchLinear,
    merge_ready_layers,
    stored_grids,
)
from mlxstacks.layers.output_head import find_output_head
from mlxstacks.layers.packed import FrozenStack, Segment, lazy_segment
from mlxstacks.layers.selection import StackId
from mlxstacks.layers.settings import LoRASettings, StackSettings, TargetSettings, parse_layers
from mlxstacks.layers.stacked import StackedLayer, stacked_layers
from mlxstacks.layers.targets import Target, check_targets, find_targets
from mlxstacks.layers.working_as import working_as
from mlxstacks.ops import gated_delta
from mlxstacks.regular_files import check_hub_reference
from mlxstacks.training.boost import call_with_balance
from mlxstacks.training.checkpointing import checkpoint_layers
from mlxstacks.training.loop import new_state
from mlxstacks.training.modes import set_training_modes
from mlxstacks.training.settings import OptimizerSettings
from mlxstacks.training.step import MicroBatch, cross_entropy_loss

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
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    check_hub_reference(model, "models", CheckpointError)
    try:
        # of one file, it waits half a minute for a hub that is not reached
        path = Path(snapshot_download(model, allow_patterns="config.json")) / "config.json"
        if path.is_file():
            return path
        reason = "it has none"
    except (HFValidationError, LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if isinstance(error, LocalEntryNotFoundError):  # its text is three sentences
            reason = "it is not in the cache, and huggingface.co was not reached"
    raise CheckpointError(
        f"{model}: no such directory or file here, and no config.json from the Hugging Face hub: "
        f"{reason}. Give a model's directory or its config.json; these are known without a "
        f"network, each also as NAME-3bit and the like: {', '.join(shipped_names())}"
    )


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
        # Gemma 3's class has a head until a checkpoint without one is loaded; then it uses the
        # embedding. The config says which it will be.
        for module in (model, getattr(model, "language_model", model)):
            untied = getattr(module, "tie_word_embeddings", None) is False and "lm_head" in module
            if untied and config.get("tie_word_embeddings") is True:
                module.tie_word_embeddings = True
                module.pop("lm_head")
        base_model.cast(model, _dtype(config))
        _quantize(model, config)
    model.train()
    return _unset(model)


@contextmanager
def config_errors(config: dict[str, Any]) -> Iterator[None]:
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
            dtype = getattr(mx, named.removeprefix("torch."), None)
            if isinstance(dtype, mx.Dtype):
                return dtype
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


def adapted_model(
    config: dict[str, Any], settings: GuardSettings
) -> tuple[nn.Module, tuple[mx.array, ...]]:
    """`lazy_model` with what trains where the settings want it, and arrays that the run holds
    next to those of the model.

    Raises:
        InputError: a layer out of range, a name that matches nothing, a rank above what fits.
    """
    grids = {} if settings.merge_ready is None else stored_grids(lazy_model(config))
    config = copy.deepcopy(config)
    if settings.base == "float32":
        for key in ("quantization", "quantization_config"):
            config.pop(key, None)
        config["dtype"] = "float32"
    model = lazy_model(config)
    eager = settings.checkpointing == "none" and not settings.compile
    if settings.base == "float32" and memory.device().kind == "cpu" and eager:
        base_model.group_experts(model)  # as `training.modes.prepare_base`
    wanted = TargetSettings(layers=parse_layers(settings.layers), projections=settings.keys or None)
    held: tuple[mx.array, ...] = ()
    try:
        targets = find_targets(model, wanted)
        if settings.stack is not None:
            held = attach_lazy_stacks(model, targets, settings.stack, settings)
        elif settings.loss == "whole":
            check_targets(targets, settings.rank)
            paths = [target.path for target in targets]
            base_model.attach_lora(model, 0, settings.rank, 1.0, paths)
        else:
            lora = LoRASettings(
                rank=settings.rank, dropout=settings.dropout, shared_outer=settings.shared_outer
            )
            check_targets(targets, settings.rank)
            layer_of = merge_ready_layers(targets, grids, settings.merge_ready)
            attach_lora(model, targets, lora, mx.random.key(0), layer_of)
    except ValueError as error:
        raise InputError(str(error)) from None
    model.train()
    _unset(model)
    return model, (*held, *_grid_arrays(model))


def _grid_arrays(model: nn.Module) -> Iterator[mx.array]:
    """What layers of `merge_ready grid` hold of the stored base; not made either."""
    for _, layer in adapted_layers(model):
        if isinstance(layer, GridLoRALinear | GridLoRASwitchLinear):
            arrays = {"codes": mx.zeros(layer._grid.codes.shape, mx.uint8)}
            for name in ("scales", "biases"):
                stored = getattr(layer._grid, name)
                arrays[name] = layer.linear.get(name, mx.zeros(stored.shape, stored.dtype))
            layer._grid = replace(layer._grid, **arrays)
            yield from (a for name, a in arrays.items() if a is not layer.linear.get(name))


def training_step(config: dict[str, Any], settings: GuardSettings, tokens: int) -> Step:
    """A training step on rows of `tokens` tokens: this package's with a loss in pieces, else
    mlx-lm's, with the settings' choices.
    """
    model, held = adapted_model(config, settings)
    by_mlx_lm = settings.loss == "whole"
    optimizer = OPTIMIZERS[settings.optimizer]()
    if not by_mlx_lm:
        set_training_modes(model)
        if settings.optimizer == "adamw":
            optimizer = new_state(OptimizerSettings(steps=1, learning_rate=1e-5)).optimizer
    optimizer.init(model.trainable_parameters())
    trained = tree_flatten(model.trainable_parameters())
    several = settings.grad_accumulation_steps > 1
    return Step(
        model,
        optimizer,
        mlx_lm_loss if by_mlx_lm else _loss_in_pieces(model),
        batch_of(settings, tokens),
        compiled=settings.compile,
        checkpointed=_CHECKPOINTING[settings.checkpointing],
        recorded=(gated_delta, gates),
        clip_norm=None if by_mlx_lm else 1.0,
        held=held,
        accumulated=tuple(mx.zeros(a.shape) for _, a in trained) if several else (),
    )


def batch_of(settings: GuardSettings, tokens: int) -> tuple[mx.array, ...]:
    """Rows of `tokens` tokens, as the loss of the settings takes them."""
    build = micro_batch_for if settings.loss == "pieces" else batch_for
    return build(settings.batch_size, tokens)


def _loss_in_pieces(model: nn.Module) -> Loss:
    """That of training: in pieces where the model's head allows it."""
    loss = cross_entropy_loss(call_with_balance, 1.0, find_output_head(model, prove=False)[0])
    return lambda model, *batch: loss(model, MicroBatch(*batch))


def recurrence(settings: GuardSettings) -> AbstractContextManager[Any]:
    """The recurrence of the settings, for the length of a block."""
    if settings.recurrence == "chunked":
        return base_model.gated_delta_installed()
    return nullcontext()


@contextmanager
def mlx_checkpointed(model: nn.Module) -> Iterator[None]:
    """Layers under `mx.checkpoint` as mlx-lm's trainer has them, for the length of a block."""
    with working_as((layer, _under_mlx_checkpoint(type(layer))) for layer in model.layers):
        yield


def _under_mlx_checkpoint(layer_class: type) -> type:
    def call(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        def inner(weights: Any, *args: Any, **kwargs: Any) -> Any:
            self.update(weights)
            return layer_class.__call__(self, *args, **kwargs)

        return mx.checkpoint(inner)(self.trainable_parameters(), *args, **kwargs)

    return type(layer_class.__name__, (layer_class,), {"__call__": call})


_CHECKPOINTING: dict[str, Callable[[nn.Module], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "layers": checkpoint_layers,
    "mlx": mlx_checkpointed,
}


def attach_lazy_stacks(
    model: nn.Module, targets: Sequence[Target], stack: StackSettings, settings: GuardSettings
) -> tuple[mx.array, ...]:
    """Put stacks on the targets as a run of `stack` has them; the arrays that are no parameters.

    Raises: ValueError as `check_targets`.
    """
    check_targets(targets, stack.latent_dim or stack.rank)
    attach_stacks(model, targets)
    pairs: dict[str, LatentPair] = {}
    if (latent := stack.latent_dim) is not None:  # as `layers.latent.latent_pairs`, of zeros
        dims = {target.path: target.dims for target in targets}
        d_in = {input_group(path): mx.zeros((latent, d.input_dims)) for path, d in dims.items()}
        pairs = {
            path: LatentPair(d_in[input_group(path)], mx.zeros((d.output_dims, latent)))
            for path, d in dims.items()
        }
    add_active(model, stack, mx.random.key(0), pairs)
    held = [array for pair in pairs.values() for array in (pair.d_in, pair.d_out)]
    for _, layer in stacked_layers(model):
        held += _frozen(layer, settings)
        if settings.directions:  # or all; `protect` would look at the numbers
            assert layer.active is not None
            width = layer.active.lora_b.shape[1]
            layer.active._null_vectors = mx.zeros((width, min(settings.directions, width)))
            held.append(layer.active._null_vectors)
    return tuple({id(array): array for array in held}.values())


def _frozen(layer: StackedLayer, settings: GuardSettings) -> Iterator[mx.array]:
    """Serve frozen stacks of the shape of the active one, as `PackedStacks` would; their memory."""
    delta = layer.active
    assert delta is not None
    if not settings.frozen_stacks:
        return
    half = mx.float16 if delta.settings.storage == "float16" else mx.bfloat16
    stack = FrozenStack(
        StackId("frozen", "frozen"),
        shape_of(delta),
        mx.zeros(delta.lora_a.shape, half),
        mx.zeros(delta.lora_b.shape, half),
        mx.zeros(delta.router.shape) if delta.has_router else None,
    )
    stored: Segment = lazy_segment([stack] * settings.frozen_stacks)
    yield from stored.buffers
    served = stored
    if settings.base == "float32":
        served = lazy_segment([stack] * settings.frozen_stacks, mx.float32)
        yield from served.buffers
    layer.install([served])
