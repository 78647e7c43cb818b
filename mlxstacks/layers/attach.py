"""Putting adapters on a model, and taking them off again.

    targets = find_targets(model, TargetSettings(layers=(8, 14, 20), projections=("down_proj",)))
    attach_lora(model, targets, LoRASettings(rank=2), mx.random.key(0))     # mlx-lm's LoRA

    attach_stacks(model, find_targets(model))                               # places for stacks
    add_active(model, StackSettings(), mx.random.key(0))                    # one to train

What does not fit is found before the model is touched.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlxstacks.layers.adapted import AdaptedLayer, adapted_layers
from mlxstacks.layers.latent import LatentPair
from mlxstacks.layers.lora import for_experts, lora_layer
from mlxstacks.layers.row_order import stop_telling, tell_order
from mlxstacks.layers.settings import LoRASettings, StackSettings
from mlxstacks.layers.stacked import StackedLayer, stacked_layers
from mlxstacks.layers.targets import Target, check_targets, stack_size


def attach_lora(
    model: nn.Module,
    targets: Sequence[Target],
    settings: LoRASettings,
    key: mx.array,
    layer_of: Callable[[Target, LoRASettings, mx.array], AdaptedLayer] | None = None,
) -> None:
    """Wrap the targets with LoRA and freeze all else. A new adapter changes no output.

    layer_of: makes the layer of a target; None: `lora_layer`.
    Raises: ValueError as `check_targets`; the model then is as it was.
    """
    check_targets(targets, settings.rank)
    model.freeze()
    keys = mx.random.split(key, max(1, len(targets)))
    make = layer_of or (
        lambda target, settings, key: lora_layer(target.module, settings, key, target.path)
    )
    layers = [make(t, settings, k) for t, k in zip(targets, keys, strict=True)]
    _replace(model, {t.path: layer for t, layer in zip(targets, layers, strict=True)})


def lora_tensors(
    model: nn.Module, weights: Mapping[str, mx.array] | None = None
) -> dict[str, mx.array]:
    """The adapter's tensors under mlx-lm's names: what `adapters.safetensors` holds, with a copy of
    a shared half for every expert.

    weights: numbers by name to take instead of the model's own.
    """
    tensors = {}
    for path, layer in adapted_layers(model):
        for leaf in ("lora_a", "lora_b"):
            if leaf in layer:
                name = f"{path}.{leaf}"
                half = layer[leaf] if weights is None else weights[name]
                experts = layer.dims.base_experts
                alone = experts is not None and len(half) < experts
                tensors[name] = for_experts(half, experts or 1) if alone else half
    return tensors


def attach_stacks(model: nn.Module, targets: Sequence[Target]) -> None:
    """Make the targets places for stacks, without any yet, and freeze the model.

    Raises: ValueError as `check_targets`.
    """
    check_targets(targets, rank=1)
    model.freeze()
    _replace(model, {target.path: StackedLayer(target.module) for target in targets})
    modules = dict(model.named_modules())
    for target in targets:
        if target.dims.base_experts is not None:
            tell_order(modules[target.path.rpartition(".")[0]])


def add_active(
    model: nn.Module,
    settings: StackSettings,
    key: mx.array,
    latent: Mapping[str, LatentPair] | None = None,
) -> None:
    """A new stack to train on every place for stacks; it changes no output.

    latent: the shared projections by path (`latent_pairs`), with settings.latent_dim.
    Raises: ValueError when nothing is attached, a stack is in training already, the rank does not
        fit (every such projection is listed), or latent pairs are missing.
    """
    layers = list(stacked_layers(model))
    if not layers:
        raise ValueError("the model has no places for stacks; call attach_stacks first")
    busy = [path for path, layer in layers if layer.active is not None]
    if busy:
        raise ValueError(f"a stack is in training at {busy[0]} and {len(busy) - 1} more places")
    places = [Target(path, -1, path, layer.linear, layer.dims) for path, layer in layers]
    check_targets([] if settings.latent_dim else places, settings.rank)
    pairs: Mapping[str, Any] = latent or {}
    missing = [p for p, _ in layers if settings.latent_dim is not None and p not in pairs]
    if missing:
        raise ValueError(f"no latent projections for {', '.join(missing)}; see latent_pairs")
    for (path, layer), place_key in zip(layers, mx.random.split(key, len(layers)), strict=True):
        layer.add_active(settings, place_key, pairs.get(path))


def check_per_expert(
    targets: Sequence[Target], settings: StackSettings, layers_were_named: bool
) -> None:
    """A pair for each of hundreds of experts is asked for, never met by default.

    For commands, which know whether the layers were named; they print `stack_size` first.
    Raises: ValueError with parameters and bytes when switch_form is per_expert and the layers or
        the rank were left to their defaults.
    """
    if settings.switch_form != "per_expert":
        return
    named = {"layers": layers_were_named, "rank": "rank" in settings.model_fields_set}
    missing = [name for name, given in named.items() if not given]
    if missing:
        size = stack_size(targets, settings)
        raise ValueError(
            f"switch_form per_expert needs {' and '.join(missing)} by name: as it stands a stack "
            f"has {size.parameters / 1e6:.1f} M parameters, {size.trained_bytes / 1e9:.2f} GB in "
            f"training without optimizer and {size.frozen_bytes / 1e9:.2f} GB frozen"
        )


def detach(model: nn.Module) -> int:
    """Put every base back where it was; returns how many. Outputs and paths are as before."""
    layers = dict(adapted_layers(model))
    modules = dict(model.named_modules())
    _replace(model, {path: layer.linear for path, layer in layers.items()})
    for parent in {path.rpartition(".")[0] for path in layers}:
        stop_telling(modules[parent])
    return len(layers)


def _replace(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    training = model.training
    model.update_modules(tree_unflatten(list(modules.items())))
    for module in modules.values():
        if isinstance(module, AdaptedLayer):
            module.train(training)
