"""Which layers the operations of a step belong to, and which hold the buffers of a peak."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.nn as nn
import numpy as np

from mlxstacks.guard.live import Peak
from mlxstacks.guard.step import StepGraph, decoder_layers

WEIGHTS, STATE, REST = "weights", "adapter and optimizer", "embedding, head and loss"
# Kinds that do not grow with the rows.
FIXED = (WEIGHTS, STATE)


Phase = tuple[bool, int, str]
"""Forward or not, the layer (-1: none), and the name of the operations."""


@dataclass(frozen=True)
class Layering:
    """To which layer the operations of a step belong, and its phases.

    of_operation: layer of each operation, -1 for none; of_leaf: of each array that is no weight and
    is there before the run. phases: all there are; phase_of: the place in it of each operation.
    """

    of_operation: list[int]
    of_leaf: dict[int, int]
    phases: list[Phase]
    phase_of: list[int]


def layering(graph: StepGraph) -> Layering:
    """Assign operations to layers.

    A forward operation belongs to the highest layer whose weights it depends on, a backward one to
    the lowest whose values it reads. That is off by one for some, the same ones at every length.
    """
    forward = graph.graph.needed_for([graph.loss]).tolist()
    of_operation, of_leaf = _layers(graph, forward)
    label, names = graph.graph.label, graph.graph.names
    above = np.array(of_operation) + 1
    shape = (2, int(above.max(initial=0)) + 1, len(names))
    key = np.ravel_multi_index((np.array(forward, np.int64), above, label), shape)
    found, phase_of = np.unique(key, return_inverse=True)
    phases = [
        (bool(ahead), layer - 1, names[name])
        for ahead, layer, name in np.transpose(np.unravel_index(found, shape)).tolist()
    ]
    return Layering(of_operation, of_leaf, phases, phase_of.tolist())


def buffers_by_kind(
    model: nn.Module, graph: StepGraph, layers: Layering, peak: Peak
) -> dict[str, int]:
    """Buffers alive at the peak by the kind of layer that they come from."""
    kinds = [layer_kind(layer) for layer in decoder_layers(model)]
    held, existing = set(graph.held), set(graph.existing)
    found: Counter[str] = Counter()
    for maker in peak.makers:
        if maker < 0 and -1 - maker in held:
            found[WEIGHTS] += 1
        elif maker < 0 and -1 - maker in existing:
            found[STATE] += 1
        else:
            made = layers.of_operation[maker] if maker >= 0 else layers.of_leaf.get(-1 - maker, -1)
            found[kinds[made] if made >= 0 else REST] += 1
    return dict(found.most_common())


def layer_kind(layer: nn.Module) -> str:
    """What a layer is called by what mixes its tokens: `linear_attn`, `self_attn`, or its class."""
    names = [str(name) for name in layer.children()]
    mixers = [name for name in names if name.endswith(("attn", "attention", "mixer"))]
    return mixers[0] if mixers else type(layer).__name__


def _layers(graph: StepGraph, forward: Sequence[bool]) -> tuple[list[int], dict[int, int]]:
    """Layer of each operation (-1: none), and of each leaf that is no weight."""
    inputs, outputs = graph.graph.inputs.tuples, graph.graph.outputs.tuples
    # What a checkpoint computes again starts with a Depends; its weights will tell the layer.
    skipped = [label == "Depends" for label in graph.graph.labels]
    of_array = [-1] * graph.graph.arrays
    for array, layer in graph.layers.items():
        of_array[array] = layer
    of_operation = [-1] * len(inputs)
    for operation in graph.order:
        layer = -1
        for array in inputs[operation]:
            known = of_array[array]
            if known > layer if forward[operation] else 0 <= known < layer or layer < 0:
                layer = known
        if layer < 0 or skipped[operation]:
            continue
        of_operation[operation] = layer
        for array in outputs[operation]:
            of_array[array] = layer
    return of_operation, _spread_to_makers(graph, of_operation, of_array)


def _spread_to_makers(
    graph: StepGraph, of_operation: list[int], of_array: list[int]
) -> dict[int, int]:
    """Give constants, and what is made of nothing else, to those that use them; the leaves."""
    of_leaf: dict[int, int] = {}
    inputs, outputs = graph.graph.inputs, graph.graph.outputs
    unknown = np.array(of_operation) < 0
    unknown[inputs.owners[np.array(of_array)[inputs.values] < 0]] = True
    order = np.array(graph.order, np.int64)
    for operation in order[unknown[order]][::-1].tolist():
        layer = of_operation[operation]
        if layer < 0:
            layer = max(of_array[array] for array in outputs[operation])
            of_operation[operation] = layer
        for array in inputs[operation]:
            if of_array[array] < 0:
                of_array[array] = of_leaf[array] = layer
    return of_leaf
