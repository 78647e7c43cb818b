"""Which experts the routers of a mixture of experts choose, heard while the model runs.

Every mixture of mlx-lm hands its choice to a switch layer, `switch(x, indices)`. Inside `hearing`
the switch layers tell that choice before they do what they always do: no operation of the model is
another one, so no output bit changes. Whether tokens are sorted by expert is decided behind this
door and cannot be seen here.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxstacks.base_model import named_switches
from mlxstacks.layers.working_as import working_as

# (place among the switch layers, input (..., K), indices (..., top_k) int)
Hear = Callable[[int, mx.array, mx.array], None]

# Blocks of mlx-lm whose router is softmax(gate(x)), then the top k; read in its models qwen3_next
# (also Qwen3.5), qwen3_moe, qwen2_moe and olmoe.
SOFTMAX_BLOCKS = (
    "Qwen3NextSparseMoeBlock", "Qwen3MoeSparseMoeBlock", "Qwen2MoeSparseMoeBlock",
    "OlmoeSparseMoeBlock",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class SwitchLayer:
    """The routed experts of decoder layer `layer`. block: the module that holds the switch."""

    path: str
    layer: int
    module: nn.Module
    block: nn.Module
    num_experts: int


def find_switches(model: nn.Module) -> list[SwitchLayer]:
    """The switch layers below `model.layers`, by layer.

    Raises: ValueError: a dense model, two mixtures in one layer, or experts that are not computed.
    """
    layers = getattr(model, "layers", None)
    if not isinstance(layers, list):
        raise ValueError(f"{type(model).__name__} has no list `layers`; it is no mlx-lm model")
    modules = dict(model.named_modules())
    places = {id(module): path for path, module in modules.items()}
    below = {f"{places[id(layer)]}.": index for index, layer in enumerate(layers)}
    found = []
    for path, switch in named_switches(model):
        index = next((below[start] for start in below if path.startswith(start)), None)
        if index is not None:
            block = modules[path.rpartition(".")[0]]
            found.append(SwitchLayer(path, index, switch, block, _num_experts(switch)))
    found.sort(key=lambda switch: switch.layer)
    _check(type(model).__name__, found)
    return found


def _num_experts(switch: nn.Module) -> int:
    counts = {m.num_experts for m in switch.children().values() if hasattr(m, "num_experts")}
    return int(counts.pop())


def _check(name: str, found: Sequence[SwitchLayer]) -> None:
    if not found:
        raise ValueError(f"{name} has no mixture of experts: every token takes the same way")
    if len({switch.layer for switch in found}) < len(found):
        raise ValueError(f"{name} has several mixtures in one layer: {[s.path for s in found]}")
    if len({switch.num_experts for switch in found}) > 1:
        counts = {switch.layer: switch.num_experts for switch in found}
        raise ValueError(f"layers of {name} differ in their number of experts: {counts}")
    # LongCat's router also chooses experts that do nothing; its switch is told expert 0 instead.
    idle = [s.path for s in found if getattr(s.block, "zero_expert_num", 0)]
    if idle:
        raise ValueError(f"{idle[0]}: some experts are not computed, so choices cannot be heard")


@contextmanager
def hearing(switches: Sequence[SwitchLayer], hear: Hear) -> Iterator[None]:
    """Each switch layer calls `hear` with its place, input and indices, not evaluated, when it is
    called; afterwards all is as it was.
    """

    def telling(own: type, place: int) -> type:
        def call(module: nn.Module, x: mx.array, indices: mx.array) -> mx.array:
            hear(place, x, indices)
            return own.__call__(module, x, indices)

        return type(own.__name__, (own,), {"__call__": call})

    modules = [switch.module for switch in switches]
    with working_as((m, telling(type(m), place)) for place, m in enumerate(modules)):
        yield


def chosen_weights(
    switch: SwitchLayer, x: mx.array, indices: mx.array, logits: mx.array | None = None
) -> mx.array:
    """The router's weights of the chosen experts, (..., top_k) float32; normalised where the block
    does that.

    x: what the switch was called with; in these blocks the router sees the same. logits: of another
    router in its place.
    Raises: ValueError for a block whose router is computed in another way.
    """
    block: Any = switch.block
    if type(block).__name__ not in SOFTMAX_BLOCKS:
        raise ValueError(
            f"{switch.path}: weights of a {type(block).__name__} are not known here (known: "
            f"{', '.join(SOFTMAX_BLOCKS)}); count choices instead"
        )
    logits = block.gate(x) if logits is None else logits
    gates = mx.softmax(logits.astype(mx.float32), axis=-1, precise=True)
    weights = mx.take_along_axis(gates, indices, axis=-1)
    if getattr(block, "norm_topk_prob", False):
        weights = weights / weights.sum(axis=-1, keepdims=True)
    return weights


def untrained_routers(switch: SwitchLayer, width: int, count: int, seed: int) -> mx.array:
    """Weights of `count` routers that were never trained, (K, count * E) float32: normal, as large
    as those of the block's own router where it is a linear `gate`, else of size 1: for choices no
    size matters. width: K, of the input.
    """
    gate, size = switch.block.get("gate"), mx.array(1.0)
    if isinstance(gate, nn.Linear | nn.QuantizedLinear):
        weight = gate(mx.eye(width)) - gate(
            mx.zeros((1, width))
        )  # (K, E), whatever it is stored as
        size = mx.std(weight.astype(mx.float32))
    key = mx.random.split(mx.random.key(seed), switch.layer + 1)[-1]
    return size * mx.random.normal((width, count * switch.num_experts), key=key)
