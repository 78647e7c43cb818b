"""The buffers and bytes of a training step on long rows, and of generating text.

Which moment of a step is the fullest changes with the length of the rows. So each phase of a step
(a layer's multiplications on the way back, say) has a line of its own through two short lengths,
and the highest of these lines at the wanted length is the prediction.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten
from numpy.typing import NDArray

from mlxstacks import base_model
from mlxstacks.guard.cache_bytes import CacheBytes
from mlxstacks.guard.graph import evaluation_order, export_graph
from mlxstacks.guard.live import Peak, simulate
from mlxstacks.guard.step import (
    Step,
    StepGraph,
    decoder_layers,
    no_collection,
    simulate_step,
    step_graph,
    step_sizes,
)
from mlxstacks.layers.output_head import eval_mode
from mlxstacks.training.grpo import drawn_tokens

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
    of_operation, of_array = _layers(graph, forward)
    of_leaf = _spread_to_makers(graph, of_operation, of_array)
    label, names = graph.graph.label, graph.graph.names
    above = np.array(of_operation) + 1
    shape = (2, int(above.max(initial=0)) + 1, len(names))
    key = np.ravel_multi_index((np.array(forward, np.int64), above, label), shape)
    keys, phase_of = np.unique(key, return_inverse=True)
    phases = [
        (bool(ahead), layer - 1, names[name])
        for ahead, layer, name in np.transpose(np.unravel_index(keys, shape)).tolist()
    ]
    return Layering(of_operation, of_leaf, phases, phase_of.tolist())


def buffers_by_kind(
    model: nn.Module, graph: StepGraph, layers: Layering, peak: Peak
) -> dict[str, int]:
    """Buffers alive at the peak by the kind of layer that they come from."""
    kinds = [layer_kind(layer) for layer in decoder_layers(model)]
    held, existing = set(graph.held), set(graph.existing)
    counts: Counter[str] = Counter()
    for maker in peak.makers:
        if maker < 0 and -1 - maker in held:
            counts[WEIGHTS] += 1
        elif maker < 0 and -1 - maker in existing:
            counts[STATE] += 1
        else:
            layer = layers.of_operation[maker] if maker >= 0 else layers.of_leaf.get(-1 - maker, -1)
            counts[kinds[layer] if layer >= 0 else REST] += 1
    return dict(counts.most_common())


def layer_kind(layer: nn.Module) -> str:
    """What a layer is called by what mixes its tokens: `linear_attn`, `self_attn`, or its class."""
    names = [str(name) for name in layer.children()]
    mixers = [name for name in names if name.endswith(("attn", "attention", "mixer"))]
    return mixers[0] if mixers else type(layer).__name__


def _layers(graph: StepGraph, forward: Sequence[bool]) -> tuple[list[int], list[int]]:
    """Layer of each operation and of each array, -1: none."""
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
    return of_operation, of_array


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


Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Point:
    """A step on rows of `tokens` tokens, simulated.

    phases: the most buffers and bytes while each phase ran; without them the whole step is one.
    """

    tokens: int
    buffers: int
    nbytes: int | None
    kinds: dict[str, int]
    phases: dict[Phase, tuple[int, int]]


@dataclass(frozen=True)
class Prediction:
    """The peak of a training step.

    points: what was simulated: `tokens` itself, or two shorter rows.
    note: why bytes are missing, or empty.
    held: buffers and bytes that the run keeps next to the step.
    """

    tokens: int
    points: tuple[Point, ...]
    note: str = ""
    held: tuple[int, int] = (0, 0)

    @property
    def extrapolated(self) -> bool:
        return len(self.points) > 1

    def buffers_at(self, tokens: int) -> int:
        """Buffers alive at the peak of a step on rows of `tokens` tokens."""
        return round(self._highest_line(0, tokens)[0]) + self.held[0]

    def bytes_at(self, tokens: int) -> int | None:
        """Bytes at the peak."""
        if any(point.nbytes is None for point in self.points):
            return None
        return round(self._highest_line(1, tokens)[0]) + self.held[1]

    @property
    def buffers(self) -> int:
        return self.buffers_at(self.tokens)

    @property
    def nbytes(self) -> int | None:
        return self.bytes_at(self.tokens)

    @property
    def buffers_per_token(self) -> float:
        """The slope of the line; with a single length, the average."""
        return self._highest_line(0, self.tokens)[1]

    @property
    def kinds(self) -> dict[str, int]:
        """Buffers by kind of layer, most first: those of the longest simulated rows.

        Weights, adapter and optimizer are what they are; the rest is scaled to the wanted length.
        """
        last = self.points[-1]
        fixed = sum(count for name, count in last.kinds.items() if name in FIXED)
        share = (self.buffers - self.held[0] - fixed) / max(last.buffers - fixed, 1)
        counts = {
            name: count if name in FIXED else round(share * count)
            for name, count in last.kinds.items()
        }
        if self.held[0]:
            counts[STATE] = counts.get(STATE, 0) + self.held[0]
        # What rounding left over belongs to the largest.
        counts[max(counts, key=lambda name: counts[name])] += self.buffers - sum(counts.values())
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    def _highest_line(self, which: int, tokens: int) -> tuple[float, float]:
        """Value and slope at `tokens` of the phase that is highest there."""
        if not self.extrapolated:
            last = self.points[-1]
            whole = (last.buffers, last.nbytes or 0)[which]
            return whole * max(tokens / last.tokens, 1.0), whole / last.tokens
        ends, slopes = (column[which] for column in self._lines)
        values = ends + slopes * (tokens - self.points[-1].tokens)
        highest = values.max()
        return float(highest), float(slopes[values == highest].max())

    @cached_property
    def _lines(self) -> tuple[Floats, Floats]:
        """Of each phase, and of the whole step: where its lines end, and their slopes.

        Both (2, phases + 1): buffers, then bytes.
        """
        first, last = self.points[-2:]
        pairs = [(first.phases[p], both) for p, both in last.phases.items() if p in first.phases]
        pairs.append(((first.buffers, first.nbytes or 0), (last.buffers, last.nbytes or 0)))
        before, after = np.array(pairs, np.float64).transpose(1, 2, 0)
        return after, (after - before) / (last.tokens - first.tokens)


def simulate_at(step: Step, tokens: int, with_bytes: bool = True) -> tuple[Point, str]:
    """One simulated step, and why its bytes are not known (or nothing)."""
    sizes, note = None, ""
    with no_collection():
        graph = step_graph(step)
        if with_bytes:
            try:
                sizes = step_sizes(step, graph)
            except ValueError as error:
                if "export_function" not in str(error):
                    raise
                note = f"Bytes are not predicted: {error}"
        layers = layering(graph)
        peak = simulate_step(graph, sizes, layers.phase_of)
        kinds = buffers_by_kind(step.model, graph, layers, peak)
    nbytes = None if sizes is None else peak.nbytes
    phases = {layers.phases[number]: both for number, both in peak.phases.items()}
    return Point(tokens, peak.buffers, nbytes, kinds, phases), note


def predict(
    step_at: Callable[[int], Step],
    tokens: int,
    lengths: tuple[int, int],
    direct_up_to: int,
    with_bytes: bool = True,
) -> Prediction:
    """The peak at `tokens` tokens: simulated up to `direct_up_to`, beyond on lines.

    lengths: of the two rows to draw lines through.
    """
    points, note = [], ""
    for length in (tokens,) if tokens <= direct_up_to else lengths:
        point, note = simulate_at(step_at(length), length, with_bytes)
        points.append(point)
    return Prediction(tokens, tuple(points), note)


# Tokens in the cache when a step is simulated; caches grow in place, so the count is that of any.
_PROMPT_TOKENS = 4


@dataclass(frozen=True)
class DecodePrediction:
    """Buffers of generating `tokens` tokens.

    first_buffers: at the peak of the first step; leaked_per_token: what each step leaves behind.
    cache_bytes: of the caches of all rows, at the end.
    """

    tokens: int
    first_buffers: int
    leaked_per_token: int
    cache_bytes: int = 0

    def buffers_at(self, tokens: int) -> int:
        return self.first_buffers + self.leaked_per_token * tokens

    @property
    def buffers(self) -> int:
        return self.buffers_at(self.tokens)

    def tokens_until(self, buffers: int) -> int | None:
        """Tokens after which `buffers` are alive; None where that never happens."""
        if self.leaked_per_token == 0:
            return None
        return max(0, buffers - self.first_buffers) // self.leaked_per_token


def predict_decode(
    model: nn.Module, tokens: int, batch: int, batched: bool, held: Sequence[mx.array] = ()
) -> DecodePrediction:
    """Buffers of generating `tokens` tokens with mlx-lm. held: arrays of the model beside its
    parameters.

    batched: with its BatchGenerator, which in 0.32.2 counts padding in one array a linear-attention
        layer and reads only the first: of the others one operation a token is never run, and its
        constant stays. (It stops counting where prompts of unequal length were padded; what is
        given here is the worse case.) `stream_generate` has no padding to count.
    """
    with eval_mode(model):
        first, counting = _one_step(model, batch, batched, held)
        cache_bytes = CacheBytes.of(model).of_batch([tokens] * batch)
    leaked = max(0, counting - 1) if batched else 0
    return DecodePrediction(tokens, first, leaked, cache_bytes)


def predict_drawing(
    model: nn.Module, tokens: int, count: int, held: Sequence[mx.array] = ()
) -> DecodePrediction:
    """Buffers of drawing `count` answers together, as `training.grpo.sample_answers` does."""
    with eval_mode(model):
        first, _ = _one_step(model, count, False, held, drawn=True)
        cache_bytes = CacheBytes.of(model).of_batch([tokens] * count)
    return DecodePrediction(tokens, first, 0, cache_bytes)


def _one_step(
    model: nn.Module,
    batch: int,
    batched: bool,
    also_held: Sequence[mx.array],
    drawn: bool = False,
) -> tuple[int, int]:
    """Buffers at the peak of one step, and how many caches count padding.

    mlx-lm builds a step while the one before still runs. So two are gone through, and the peak of
    the second is taken: what the first left in flight is there. Drawing ends each step before the
    next, so its peak is that of one.
    """
    caches = base_model.make_prompt_cache(model)
    if batched:  # in which each row has padding of its own
        caches = [c.merge([c] * batch) if type(c).__name__ == "KVCache" else c for c in caches]
    token = mx.argmax(model(mx.zeros((batch, _PROMPT_TOKENS), mx.int32), cache=caches)[:, -1], -1)
    kept = [*(a for _, a in tree_flatten(model.parameters())), *also_held]

    def mark(*arrays: mx.array) -> mx.array:
        """In the graph, with the arrays of the caches as they are now: they write into theirs."""
        states = [a for _, a in tree_flatten([c.state for c in caches]) if isinstance(a, mx.array)]
        return mx.depends([mx.array(0)], [*arrays, *states])[0]

    moments = [mark(token)]
    for _ in range(2):
        logits = model(token[:, None], cache=caches)[:, -1, :]
        if drawn:
            keys = mx.random.split(mx.random.split(mx.random.key(0), 2)[0], batch)
            moments.append(mark(*drawn_tokens(logits, keys, range(batch))))
            break
        scores = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        token = mx.argmax(scores, axis=-1)
        moments.append(mark(token, scores))
    graph, numbers = export_graph([*kept, *moments])
    held = numbers[: len(kept)]
    # Behind the zero that each of these passes on.
    noted = [graph.inputs[graph.producer[number]][1:] for number in numbers[len(kept) :]]
    existing, first = noted[:2]
    graph.cut_at([*held, *existing])
    order = evaluation_order(graph, first)
    counting = sum(1 for cache in caches if hasattr(cache, "advance"))
    if drawn:
        return simulate(graph, order, held, existing, first).buffers, counting
    second, start = noted[2], len(order)
    producers = graph.producer.copy()
    graph.cut_at(first)
    order += evaluation_order(graph, second)
    graph.producer[:] = producers
    results = [*first[:2], *second]
    peak = simulate(graph, order, held, existing, results, measured_from=start)
    return peak.buffers, counting
