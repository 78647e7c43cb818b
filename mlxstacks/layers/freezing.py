"""Freezing the stack in training, and moving frozen stacks in and out of a model.

Freezing folds protected directions into lora_b, casts the pairs to half precision and packs. The
output changes by nothing but that cast. Routers stay float32: a router cast to half sends tokens
near a tie to other experts, which is no rounding any more (half a delta, measured), and it is some
3% of a stack. Noise weights are not kept: a frozen stack never draws.
"""

from collections.abc import Iterable, Mapping

import mlx.core as mx
import mlx.nn as nn

from mlxstacks.layers.moe_lora import MoELoRADelta
from mlxstacks.layers.nullspace import fold_into
from mlxstacks.layers.packed import FrozenStack, StackShape
from mlxstacks.layers.selection import StackId
from mlxstacks.layers.settings import StackSettings
from mlxstacks.layers.stacked import stacked_layers


def shape_of(delta: MoELoRADelta) -> StackShape:
    """What a stack of this delta shares with those it can be packed with."""
    s: StackSettings = delta.settings
    return StackShape(delta.form, s.num_experts, s.rank, s.top_k, s.scale, delta.latent)


def frozen_stack(delta: MoELoRADelta, stack_id: StackId, dtype: mx.Dtype) -> FrozenStack:
    """The delta as a frozen stack, its pairs at `dtype`, protected directions folded in.

    Law: the frozen delta is the trained one in evaluation mode, but for the cast; every row goes to
    the same experts with the same gates. With
    projector_mode=train_only nothing is folded, as nothing is removed in evaluation.
    Raises: ValueError naming the tensors that `dtype` cannot hold.
    """
    tensors = {"lora_a": delta.lora_a, "lora_b": delta.lora_b}
    if delta.has_router:
        tensors["router"] = delta.router
    if delta.null_vectors is not None and delta.settings.projector_mode == "folded":
        tensors["lora_b"] = fold_into(delta.lora_b, delta.null_vectors)
    cast = {
        name: mx.contiguous(value.astype(mx.float32 if name == "router" else dtype))
        for name, value in tensors.items()
    }
    problems = [_overflow(name, tensors[name], value) for name, value in cast.items()]
    if found := [problem for problem in problems if problem]:
        raise ValueError("; ".join(found))
    return FrozenStack(
        stack_id, shape_of(delta), cast["lora_a"], cast["lora_b"], cast.get("router")
    )


def _overflow(name: str, before: mx.array, after: mx.array) -> str | None:
    if mx.all(mx.isfinite(after)).item():
        return None
    if not mx.all(mx.isfinite(before)).item():
        return f"{name} holds NaN or Inf before it is frozen: the training went wrong"
    largest = mx.max(mx.abs(before)).item()
    return f"{name} reaches {largest:.3g}, too large for {after.dtype}; store it as bfloat16"


def freeze_active(
    model: nn.Module, name: str, domain: str, dtype: mx.Dtype = mx.float16
) -> dict[str, FrozenStack]:
    """Turn the stack in training into the frozen stack `name`; returns its parts by path.

    Either all projections change or none. Raises: ValueError when there is nothing to freeze, the
    name is taken, or a tensor does not fit `dtype` (every such tensor is listed).
    """
    stack_id = StackId(name, domain)
    layers = {path: layer for path, layer in stacked_layers(model) if layer.active is not None}
    if not layers:
        raise ValueError("no stack is in training; add one first")
    if any(name in [i.name for i in layer.stacks.ids] for _, layer in stacked_layers(model)):
        raise ValueError(f"a stack named {name} is there already; names must differ")
    parts, problems = {}, []
    for path, layer in layers.items():
        assert layer.active is not None
        try:
            parts[path] = frozen_stack(layer.active, stack_id, dtype)
        except ValueError as error:
            problems.append(f"{path}: {error}")
    if problems:
        raise ValueError("\n  ".join([f"stack {name} cannot be frozen:", *problems]))
    for path, layer in layers.items():
        layer.drop_active()
        layer.set_stacks([*layer.stacks.stacks(), parts[path]])
    return parts


def frozen_parts(model: nn.Module, name: str) -> dict[str, FrozenStack]:
    """The parts of a frozen stack by path. Raises: ValueError when there is none of that name."""
    parts = {
        path: stack
        for path, layer in stacked_layers(model)
        for stack in layer.stacks.stacks()
        if stack.id.name == name
    }
    if not parts:
        raise ValueError(f"no frozen stack is named {name}")
    return parts


def add_frozen(model: nn.Module, parts: Mapping[str, FrozenStack]) -> None:
    """Serve one more frozen stack, its parts by path. Law: the inverse of `remove_frozen`.

    Raises: ValueError listing paths without a stacked projection and parts that do not fit theirs.
    """
    layers = dict(stacked_layers(model))
    problems = [f"{path}: no projection with stacks" for path in parts if path not in layers]
    for path, part in parts.items():
        if path in layers:
            problems += _misfit(path, part, layers[path].input_dims, layers[path].output_dims)
    if problems:
        raise ValueError("\n  ".join(["the stack does not fit this model:", *problems]))
    for path, part in parts.items():
        layers[path].set_stacks([*layers[path].stacks.stacks(), part])


def _misfit(path: str, part: FrozenStack, input_dims: int, output_dims: int) -> Iterable[str]:
    latent = part.shape.latent
    wanted = (input_dims, output_dims) if latent is None else (latent.dim, latent.dim)
    found = (part.lora_a.shape[-1], part.lora_b.shape[1])
    if found != wanted:
        yield f"{path}: the stack maps {found[0]} to {found[1]} dims, here it is {wanted}"


def remove_frozen(model: nn.Module, name: str) -> dict[str, FrozenStack]:
    """Take a frozen stack out; returns its parts by path. Raises: as `frozen_parts`."""
    parts = frozen_parts(model, name)
    layers = dict(stacked_layers(model))
    for path in parts:
        kept = [stack for stack in layers[path].stacks.stacks() if stack.id.name != name]
        layers[path].set_stacks(kept)
    return parts


def stack_tensors(parts: Mapping[str, FrozenStack]) -> dict[str, mx.array]:
    """`<path>.lora_a`, `.lora_b`, `.router` -> array at storage dtype, as a file holds a stack."""
    return {
        f"{path}.{leaf}": mx.contiguous(array)
        for path, part in parts.items()
        for leaf, array in part.tensors().items()
    }


def stack_from_tensors(
    tensors: Mapping[str, mx.array], stack_id: StackId, shapes: Mapping[str, StackShape]
) -> dict[str, FrozenStack]:
    """The inverse of `stack_tensors`, bit for bit. shapes: the stack's shape at each path.

    Raises: ValueError listing tensors that are missing or belong to no path.
    """
    wanted = {
        f"{path}.{leaf}"
        for path, shape in shapes.items()
        for leaf in ("lora_a", "lora_b", *(["router"] if shape.num_experts > 1 else []))
    }
    problems = [f"{name}: missing" for name in sorted(wanted - tensors.keys())]
    problems += [f"{name}: unexpected" for name in sorted(tensors.keys() - wanted)]
    if problems:
        raise ValueError("\n  ".join([f"stack {stack_id.name}:", *problems]))
    return {
        path: FrozenStack(stack_id, shape, tensors[f"{path}.lora_a"], tensors[f"{path}.lora_b"],
                          tensors.get(f"{path}.router"))
        for path, shape in shapes.items()
    }  # fmt: skip
