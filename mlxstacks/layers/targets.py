"""Which projections of a model can carry an adapter, found by name inside its decoder layers.

Vision towers, embeddings, lm_head, norms, MoE routers and convolutions are never among them: only
modules below `model.layers` count, and of those only linear and switch projections.
"""

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.nn as nn

from mlxstacks.errors import in_lines
from mlxstacks.layers.adapted import AdaptedLayer, Dims, check_rank, projection_dims
from mlxstacks.layers.latent import shared_parameters
from mlxstacks.layers.moe_lora import form_of
from mlxstacks.layers.settings import StackSettings, TargetSettings

USUAL = (
    *(f"{name}_proj" for name in ("q", "k", "v", "qkv", "o", "gate", "up", "gate_up", "down")),
    *(f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_qkvz", "out_proj")),
)
SMALL = tuple(f"linear_attn.{name}" for name in ("in_proj_a", "in_proj_b", "in_proj_ba"))
ROUTERS = re.compile(r"(^|\.)(gate|shared_expert_gate|router)$")
_MOST_LAYERS = 8  # that are named one by one


@dataclass(frozen=True, eq=False)
class Target:
    """A projection to adapt. name: its path inside decoder layer `layer`."""

    path: str
    layer: int
    name: str
    module: nn.Module
    dims: Dims


def find_targets(model: nn.Module, settings: TargetSettings | None = None) -> list[Target]:
    """The projections that the settings name, by path.

    A name matches whole components at the end of a path inside a layer: `down_proj` is every one of
    them, `switch_mlp.down_proj` those of the routed experts.
    Raises: ValueError listing every layer that is out of range and every name that matches
        nothing, each with the closest there are.
    """
    settings = settings or TargetSettings()
    layers = _decoder_layers(model)
    problems = _wrong_layers(settings.layers, len(layers))
    everything = [target for index in layers for target in _projections(layers[index], index)]
    wanted = everything if settings.layers is None else [
        target for target in everything if target.layer in settings.layers
    ]  # fmt: skip
    names = settings.projections
    if names is None:
        names = (*USUAL, *(SMALL if settings.small_projections else ()))
    else:
        problems += [
            line
            for name in dict.fromkeys(names)
            # where no layer is there, it is told of a name only whether any layer has it
            if (line := _unmatched(name, wanted or everything, everything))
        ]
    found = [target for target in wanted if any(_ends_with(target.name, n) for n in names)]
    if not found and not problems:
        there = ", ".join(sorted({t.name for t in wanted})) or "no projections at all"
        problems.append(f"no projection has a usual name; the layers have {there}")
    if problems:
        raise ValueError(in_lines("cannot choose the projections to adapt:", problems))
    return found


def left_out_notes(model: nn.Module, targets: Sequence[Target]) -> list[str]:
    """For targets that nobody named: which other projections their layers have, SMALL apart."""
    layers, taken = _decoder_layers(model), {target.path for target in targets}
    names = {
        projection.name
        for index in {target.layer for target in targets}
        for projection in _projections(layers[index], index)
        if projection.path not in taken and not any(_ends_with(projection.name, n) for n in SMALL)
    }
    listed = ", ".join(sorted(names))
    return [f"Not trained by default: {listed}; --keys names what is."] if names else []


def _decoder_layers(model: nn.Module) -> dict[int, tuple[str, nn.Module]]:
    """Index -> (path, layer) of the language model, as mlx-lm's `model.layers` has them."""
    layers = getattr(model, "layers", None)
    if not isinstance(layers, list):
        raise ValueError(f"{type(model).__name__} has no list `layers`; it is no mlx-lm model")
    places = {id(module): path for path, module in model.named_modules()}
    return {index: (places[id(layer)], layer) for index, layer in enumerate(layers)}


def _projections(place: tuple[str, nn.Module], index: int) -> list[Target]:
    path, layer = place
    found = []
    # Below an adapted projection lies its base, which is not there to be adapted again.
    taken = {id(m.linear) for m in layer.modules() if isinstance(m, AdaptedLayer)}
    for name, module in sorted(layer.named_modules(), key=lambda item: item[0]):
        if not name or ROUTERS.search(name) or id(module) in taken:
            continue
        base = module.linear if isinstance(module, AdaptedLayer) else module
        dims = projection_dims(base)
        if dims is not None:
            found.append(Target(f"{path}.{name}", index, name, module, dims))
    return found


def _ends_with(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _wrong_layers(wanted: Sequence[int] | None, count: int) -> list[str]:
    wrong = [index for index in wanted or () if not 0 <= index < count]
    if len(wrong) > _MOST_LAYERS:
        named = f"layers {wrong[0]} to {wrong[-1]}, {len(wrong)} in all"
        return [f"{named}: the model has layers 0 to {count - 1}"]
    return [f"layer {index}: the model has layers 0 to {count - 1}" for index in wrong]


def _unmatched(name: str, wanted: list[Target], everything: list[Target]) -> str | None:
    """Why a name matches nothing, with near misses; None when it matches."""
    if any(_ends_with(target.name, name) for target in wanted):
        return None
    if ROUTERS.search(name):
        return f"{name!r}: the router of a mixture of experts is never adapted"
    elsewhere = sorted({t.layer for t in everything if _ends_with(t.name, name)})
    if elsewhere:
        return f"{name!r}: only in layers {', '.join(map(str, elsewhere))}"
    known = {t.name for t in everything} | {t.name.rpartition(".")[2] for t in everything}
    close = difflib.get_close_matches(name, sorted(known), n=3)
    there = f"close: {', '.join(close)}" if close else f"there are {', '.join(sorted(known))}"
    there = "give each name by itself" if "," in name else there
    return f"{name!r} matches no projection; {there}"


def check_targets(targets: Sequence[Target], rank: int) -> None:
    """Raises: ValueError listing projections that are adapted already or smaller than the rank."""
    problems = []
    for target in targets:
        if isinstance(target.module, AdaptedLayer):
            problems.append(f"{target.path}: has an adapter; detach it first")
        try:
            check_rank(rank, target.dims, target.path)
        except ValueError as error:
            problems.append(str(error))
    if problems:
        raise ValueError(in_lines("cannot put adapters here:", problems))


@dataclass(frozen=True)
class StackSize:
    """What one stack takes: parameters in training (float32, router and noise included), bytes once
    it is frozen, and bytes of the latent projections that all stacks share.
    """

    parameters: int
    trained_bytes: int
    frozen_bytes: int
    shared_bytes: int


def stack_size(targets: Sequence[Target], settings: StackSettings) -> StackSize:
    """The size of one stack on these projections, from shapes alone."""
    E, R = settings.num_experts, settings.rank
    parameters = frozen_bytes = 0
    for target in targets:
        dims = target.dims
        if settings.latent_dim is not None:
            dims = Dims(settings.latent_dim, settings.latent_dim, dims.base_experts)
        per_expert = form_of(dims, settings) == "per_expert"
        copies = dims.base_experts or 1 if per_expert else 1
        pairs = copies * E * R * (dims.input_dims + dims.output_dims)
        router = E * dims.input_dims if E > 1 else 0
        parameters += pairs + 2 * router
        frozen_bytes += 2 * pairs + 4 * router  # half precision, routers float32
    shared = 0
    if settings.latent_dim is not None:
        shared = shared_parameters({t.path: t.dims for t in targets}, settings.latent_dim)
    return StackSize(parameters, 4 * parameters, frozen_bytes, 4 * shared)
