"""One training step, built and never run: the true graph, and a trace of it with sizes."""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten, tree_unflatten

from mlxstacks.guard.align import Sizes, sizes_of
from mlxstacks.guard.calls import (
    equal_experts,
    last_gradients,
    recorded_functions,
    recorded_layers,
    use_probes,
)
from mlxstacks.guard.graph import Graph, evaluation_order, export_graph
from mlxstacks.guard.live import Peak, simulate
from mlxstacks.guard.trace import Piece, trace
from mlxstacks.training.step import clip_by_global_norm

Loss = Callable[..., Any]
"""(model, *batch) -> a scalar loss, or a tuple that begins with it."""


@dataclass(frozen=True)
class Step:
    """What a training step does. Nothing in it needs real weights.

    batch: the arrays that the loss takes after the model; only shapes and dtypes count.
    compiled: by `mx.compile`: the whole step, as in mlx-lm's trainer, or, of this package's, loss
        and gradients.
    checkpointed: entered around each build, replaces layers by checkpointed ones.
    recorded: modules of this package that keep custom functions of their own.
    clip_norm: of this package's trainer: gradients are evaluated, then clipped and applied; None:
        all in one evaluation, as in mlx-lm's.
    held: arrays that stay alive next to those of the model: frozen stacks, stored grids.
    accumulated: of that trainer too: sums of the gradients of batches before, to be added to.
    """

    model: nn.Module
    optimizer: optim.Optimizer
    loss: Loss
    batch: tuple[mx.array, ...]
    compiled: bool = False
    checkpointed: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext
    recorded: tuple[Any, ...] = ()
    clip_norm: float | None = None
    held: tuple[mx.array, ...] = ()
    accumulated: tuple[mx.array, ...] = ()


@dataclass(frozen=True, slots=True)
class StepGraph:
    """The graph of a step.

    held: arrays that stay (frozen weights, batch); existing: the old adapter and optimizer state;
    results: what the step leaves behind, `loss` among them. known: bytes of held and existing
    arrays. layers: for a frozen or old array, the layer that it belongs to. begins: the places in
    the order where evaluations begin. built: the place in it up to which the step is only being
    built; building: arrays that live until then.
    """

    graph: Graph
    held: list[int]
    existing: list[int]
    results: list[int]
    loss: int
    known: dict[int, tuple[int, int]]
    layers: dict[int, int]
    order: list[int]
    begins: list[int]
    building: list[int]
    built: int


def mlx_lm_loss(model: nn.Module, tokens: mx.array, lengths: mx.array) -> tuple[mx.array, mx.array]:
    """The loss of mlx-lm's trainer: tokens (B, T + 1) int32, lengths (B, 2) int32."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    steps = mx.arange(1, targets.shape[1] + 1)
    mask = mx.logical_and(steps >= lengths[:, 0:1], steps <= lengths[:, 1:])
    count = mask.sum()
    losses = nn.losses.cross_entropy(model(inputs), targets) * mask
    return losses.astype(mx.float32).sum() / count, count


def batch_for(batch_size: int, tokens: int) -> tuple[mx.array, mx.array]:
    """A batch for `mlx_lm_loss` in which the model sees (batch_size, tokens)."""
    rows = mx.zeros((batch_size, tokens + 1), mx.int32)
    return rows, mx.broadcast_to(mx.array([0, tokens]), (batch_size, 2))


def micro_batch_for(batch_size: int, tokens: int) -> tuple[mx.array, ...]:
    """The same for this package's trainer: the fields of a `MicroBatch`, every token scored."""
    inputs, targets = (mx.zeros((batch_size, tokens), mx.int32) for _ in range(2))
    weights = mx.full((batch_size, tokens), 1 / (batch_size * tokens))
    return inputs, targets, weights, mx.array(1.0), mx.random.key(0)


def training_state(step: Step) -> list[mx.array]:
    """Adapter weights and optimizer state, in the order in which they are evaluated."""
    weights = [a for _, a in tree_flatten(step.model.trainable_parameters())]
    return weights + [a for _, a in tree_flatten(step.optimizer.state)]


def run_step(step: Step) -> list[list[mx.array]]:
    """Build one step: the arrays of each of its evaluations, and last those that stay without being
    asked for; together all that it leaves behind.

    Model and optimizer hold the new state.
    """
    return _built(step)[0]


def _built(step: Step) -> tuple[list[list[mx.array]], list[mx.array]]:
    """What `run_step` gives, and the gradients where the optimizer's graph is built onto theirs."""
    if step.clip_norm is not None:
        return _run_clipped(step), []
    made: list[mx.array] = []

    def once(*batch: mx.array) -> mx.array:
        value, gradients = nn.value_and_grad(step.model, step.loss)(step.model, *batch)
        step.optimizer.update(step.model, gradients)
        if not step.compiled:
            made.extend(_leaves(gradients))
        return _leaves(value)[0]

    if step.compiled:
        state = [step.model.state, step.optimizer.state, mx.random.state]
        once = mx.compile(once, inputs=state, outputs=state)
    loss = once(*step.batch)
    return [[*training_state(step), loss], []], made


def _run_clipped(step: Step) -> list[list[mx.array]]:
    """As `training.step.GradientStep` and the loop around it do."""
    weights = step.model.trainable_parameters()

    def at(weights: Any, *batch: mx.array) -> Any:
        step.model.update(weights)
        return step.loss(step.model, *batch)

    function: Callable[..., Any] = mx.value_and_grad(at)
    if step.compiled:
        function = mx.compile(function)
    value, gradients = function(weights, *step.batch)
    step.model.update(weights)  # tracing put placeholders in their place
    return _evaluations(step, value, gradients)


def _evaluations(step: Step, value: Any, gradients: Any) -> list[list[mx.array]]:
    """Update model and optimizer; what `run_step` gives. The loss comes first where gradients are
    clipped, else last.
    """
    if step.clip_norm is None:
        step.optimizer.update(step.model, gradients)
        return [[*training_state(step), _leaves(value)[0]], []]
    if step.accumulated:
        pairs = zip(step.accumulated, tree_flatten(gradients), strict=True)
        gradients = tree_unflatten(
            [(name, before + gradient) for before, (name, gradient) in pairs]
        )
    clipped, norm = clip_by_global_norm(gradients, step.clip_norm)
    step.optimizer.update(step.model, clipped)
    first = [*_leaves(value), *_leaves(gradients)]
    return [first, [norm], training_state(step), _leaves(clipped)]


def _leaves(tree: Any) -> list[mx.array]:
    return [array for _, array in tree_flatten(tree)]


@contextmanager
def unchanged(step: Step) -> Iterator[None]:
    """Put model weights and optimizer state back afterwards."""
    weights = tree_flatten(step.model.trainable_parameters())
    state = tree_flatten(step.optimizer.state)
    try:
        yield
    finally:
        step.model.update(tree_unflatten(weights))
        step.optimizer.state = tree_unflatten(state)


@contextmanager
def no_collection() -> Iterator[None]:
    """No garbage collection inside: graphs are millions of small lists, none of them garbage."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def step_graph(step: Step) -> StepGraph:
    """The graph that one step evaluates, in the order in which it does."""
    layer_of = _layer_numbers(step.model)
    with unchanged(step):
        old = [*training_state(step), *step.accumulated]
        ours = {id(array) for array in old}
        named = [(n, a) for n, a in tree_flatten(step.model.parameters()) if id(a) not in ours]
        kept = [a for _, a in named] + [*step.batch, *step.held]
        with (
            step.checkpointed(step.model),
            equal_experts() as counted,
            last_gradients(step.recorded) as last,
        ):
            evaluations, gradients = _built(step)
        if step.compiled:  # it was built in an earlier step
            last.clear()
        early = list({id(array): array for array in counted}.values())
        results = [array for evaluation in evaluations for array in evaluation]
        sizes = [(a.nbytes, a.itemsize) for a in kept + old]
        graph, numbers = export_graph([*kept, *old, *results, *early, *gradients, *last])
    number = iter(numbers)
    held, existing, produced, counts, updating, noted = (
        list(islice(number, len(part))) for part in (kept, old, results, early, gradients, last)
    )
    graph.cut_at([*held, *existing])
    known = dict(zip([*held, *existing], sizes, strict=True))
    layers = {array: layer_of(name) for array, (name, _) in zip(held, named, strict=False)}
    result = iter(produced)
    asked = [[count] for count in counts] + [list(islice(result, len(e))) for e in evaluations]
    order, begins = _in_turn(graph, asked)
    built = begins[len(counts)] if counts else 0
    roots = [*existing, *held[len(named) :]]
    dropped = _dropped(graph, produced, noted)
    if updating:  # gone before the optimizer's constants are made, which are numbers too
        without_optimizer = [produced[-1], *updating]
        dropped = dropped[_leaf_count(graph, produced) - _leaf_count(graph, without_optimizer) :]
    building = [*dropped, *_traced(graph, order[:built], roots)]
    if step.compiled:
        # The compiled function, the first evaluation, keeps the numbers written in the code.
        first = order[: (*begins, len(order))[1]]
        read = dict.fromkeys(array for operation in first for array in graph.inputs[operation])
        held = [*held, *(a for a in read if graph.producer[a] < 0 and a not in known)]
    loss = produced[-1 if step.clip_norm is None else 0]
    return StepGraph(
        graph, held, existing, produced, loss, known, layers, order, begins, building, built
    )


def _in_turn(graph: Graph, evaluations: list[list[int]]) -> tuple[list[int], list[int]]:
    """The order of one evaluation after the other, and where each begins; what one has made is
    there for the next.
    """
    order: list[int] = []
    begins: list[int] = []
    left = replace(graph, producer=graph.producer.copy())
    for evaluation in evaluations[:-1]:
        begins.append(len(order))
        added = evaluation_order(left, evaluation)
        order += added
        left.cut_at(graph.outputs.take(np.array(added, np.int64)).values.tolist())
    return order, begins


def _dropped(graph: Graph, results: Sequence[int], gradients: Sequence[int]) -> list[int]:
    """Constants of gradients that no result needs, such as that of a checkpointed layer's input
    where nothing below it trains: built, then dropped.
    """
    needed = graph.needed_for(results)
    dropped = graph.needed_for(gradients) & ~needed
    asked, other = (
        graph.inputs.take(np.flatnonzero(operations)).values for operations in (needed, dropped)
    )
    other = np.setdiff1d(other, asked)
    return other[graph.producer[other] < 0].tolist()


def _leaf_count(graph: Graph, results: Sequence[int]) -> int:
    read = graph.inputs.take(np.flatnonzero(graph.needed_for(results))).values
    return int((graph.producer[np.unique(read)] < 0).sum())


def _traced(graph: Graph, order: Sequence[int], roots: Sequence[int]) -> list[int]:
    """Arrays of operations that come after `roots`, the arguments of the function that a gradient
    is taken of: what MLX keeps of an evaluation while it builds that gradient.
    """
    traced = set(roots)
    kept: dict[int, None] = {}
    for operation in order:
        inputs, outputs = graph.inputs[operation], graph.outputs[operation]
        if any(array in traced for array in inputs):
            traced.update(outputs)
            kept.update(dict.fromkeys((*inputs, *outputs)))
    return list(kept)


def _layer_numbers(model: nn.Module) -> Callable[[str], int]:
    """Name of a weight -> number of its layer, -1 for those outside of layers."""
    paths = {id(module): path for path, module in model.named_modules()}
    prefixes = {
        paths[id(layer)] + ".": i
        for i, layer in enumerate(decoder_layers(model))
        if id(layer) in paths
    }
    depth = {prefix.count(".") for prefix in prefixes}

    def number(name: str) -> int:
        parts = name.split(".")
        return max((prefixes.get(".".join(parts[:d]) + ".", -1) for d in depth), default=-1)

    return number


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    """The decoder layers of an mlx-lm model; empty where it has none by that name."""
    return list(getattr(model, "layers", []))


def step_sizes(step: Step, graph: StepGraph) -> Sizes:
    """Bytes of all arrays of a step's graph."""
    with unchanged(step):
        traced = _trace_step(step)
    return sizes_of(graph.graph, graph.order, graph.results, traced, graph.known)


def _trace_step(step: Step) -> Piece:
    """A trace of the step without checkpointing or fusing, layers and custom functions apart."""
    weights = tree_flatten(step.model.trainable_parameters())
    state = tree_flatten(step.optimizer.state)
    names = [name for name, _ in weights]

    def function(
        given: list[mx.array], probes: list[mx.array]
    ) -> tuple[list[mx.array], list[mx.array]]:
        values, batch = given[: len(weights)], given[len(weights) + len(state) :]
        stored = given[len(weights) : len(weights) + len(state)]
        step.optimizer.state = tree_unflatten(
            [(name, a) for (name, _), a in zip(state, stored, strict=True)]
        )

        def value(values: list[mx.array], probes: list[mx.array]) -> Any:
            use_probes(probes)
            step.model.update(tree_unflatten(list(zip(names, values, strict=True))))
            return step.loss(step.model, *batch)

        output, (gradients, of_probes) = mx.value_and_grad(value, argnums=(0, 1))(values, probes)
        step.model.update(tree_unflatten(list(zip(names, values, strict=True))))
        named = tree_unflatten(list(zip(names, gradients, strict=True)))
        evaluations = _evaluations(step, output, named)
        return [array for evaluation in evaluations for array in evaluation], of_probes

    arguments = [*(a for _, a in weights), *(a for _, a in state), *step.batch]
    arguments = [mx.zeros(a.shape, a.dtype) for a in arguments]
    layers = recorded_layers(decoder_layers(step.model))
    with recorded_functions(step.recorded), layers, equal_experts():
        return trace(function, arguments)


def simulate_step(
    graph: StepGraph,
    sizes: Sizes | None = None,
    phase_of: Sequence[int] | None = None,
) -> Peak:
    """The fullest moments of a step."""
    nbytes = None if sizes is None else sizes.nbytes
    itemsize = None if sizes is None else sizes.itemsize
    return simulate(
        graph.graph,
        graph.order,
        graph.held,
        graph.existing,
        graph.results,
        nbytes,
        itemsize,
        phase_of=phase_of,
        begins=graph.begins,
        kept=graph.building,
        until=graph.built,
    )
