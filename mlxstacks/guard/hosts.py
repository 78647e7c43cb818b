"""`guard --hosts`: generating text on several machines, on paper.

The messages of a token are counted in the graph of the model as `layers.sharded` splits it, from
the config alone. How long they take follows from the speeds that the settings assume.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from mlxstacks.base_model import make_prompt_cache
from mlxstacks.errors import InputError
from mlxstacks.guard.build import adapted_model
from mlxstacks.guard.settings import GuardSettings
from mlxstacks.layers.attach import detach
from mlxstacks.layers.sharded import shard
from mlxstacks.study.document import Columns, Table


@dataclass
class Messages:
    """What a process of `size` sends: those of sums, of gathers, in a ring.

    sums, gathers: bytes of each array. The members `size` and `rank` make it stand in for a group.
    """

    processes: int
    sums: list[int] = field(default_factory=list)
    gathers: list[int] = field(default_factory=list)

    def __hash__(self) -> int:
        return id(self)

    def size(self) -> int:
        return self.processes

    def rank(self) -> int:
        return 0

    @property
    def count(self) -> int:
        return len(self.sums) + len(self.gathers)

    @property
    def ring_bytes(self) -> int:
        """A sum goes round twice in parts, a gather once whole."""
        n = self.processes
        parts = sum(2 * -(-nbytes // n) for nbytes in self.sums)
        return (n - 1) * (parts + sum(self.gathers))

    @property
    def ring_hops(self) -> int:
        """Messages that wait for each other."""
        return (self.processes - 1) * (2 * len(self.sums) + len(self.gathers))

    @property
    def mesh_bytes(self) -> int:
        """Each sends all that it has to each other one, at once."""
        return (self.processes - 1) * (sum(self.sums) + sum(self.gathers))


@contextmanager
def counting(messages: Messages) -> Iterator[None]:
    """Messages of graphs that are built inside are counted, in place of being sent."""

    def all_sum(x: mx.array, **_: Any) -> mx.array:
        messages.sums.append(x.nbytes)
        return x

    def all_gather(x: mx.array, **_: Any) -> mx.array:
        messages.gathers.append(x.nbytes)
        return mx.concatenate([x] * messages.processes)

    real = mx.distributed.all_sum, mx.distributed.all_gather
    mx.distributed.all_sum, mx.distributed.all_gather = all_sum, all_gather
    try:
        yield
    finally:
        mx.distributed.all_sum, mx.distributed.all_gather = real


def count_token(model: nn.Module, processes: int) -> Messages:
    """Split a model whose weights are not made, in place; the messages of one token that it says.

    Raises: InputError: it cannot be split in so many parts.
    """
    messages = Messages(processes)
    if processes > 1:
        with counting(Messages(processes)):  # the splitting builds a graph too
            shard(model, messages)
    with counting(messages):
        model(mx.zeros((1, 1), mx.int32), cache=make_prompt_cache(model))
    return messages


@dataclass(frozen=True)
class HostPlan:
    """Generating on so many hosts. weights_bytes: that each holds; read_bytes: of them for a token;
    messages: of a token, adapter_messages of them for what stands beside the base; ring_bytes,
    mesh_bytes: that each sends for a token, in either topology. problem: why it cannot be.
    """

    hosts: int
    weights_bytes: int = 0
    read_bytes: int = 0
    messages: int = 0
    adapter_messages: int = 0
    ring_bytes: int = 0
    mesh_bytes: int = 0
    ring_tokens_per_second: float = 0.0
    mesh_tokens_per_second: float = 0.0
    problem: str | None = None


def plan_hosts(config: dict[str, Any], settings: GuardSettings) -> list[HostPlan]:
    """For 1, 2, 4, ... hosts, up to those asked for.

    Raises: InputError: one host was measured to be faster than its memory.
    """
    most, plans = settings.hosts or 0, []
    counts = [1 << n for n in range(most.bit_length())]
    computing = _computing_seconds(config, settings) if most else 0.0
    for hosts in dict.fromkeys([*counts, *([most] if most else [])]):
        try:
            plans.append(_plan(config, settings, hosts, computing))
        except InputError as error:
            plans.append(HostPlan(hosts, problem=str(error)))
    return plans


def _computing_seconds(config: dict[str, Any], settings: GuardSettings) -> float:
    """Of a token on one host, beside reading its weights."""
    if settings.tokens_per_second is None:
        return 0.0
    read = _read_bytes(adapted_model(config, settings)[0])
    seconds = 1 / settings.tokens_per_second - read / (settings.memory_gbps * 1e9)
    if seconds < 0:
        raise InputError(
            f"tokens_per_second {settings.tokens_per_second:g}: a token reads {read / 1e9:.3g} GB, "
            f"so memory_gbps {settings.memory_gbps:g} allows at most "
            f"{settings.memory_gbps * 1e9 / read:.4g}; one of the two is wrong"
        )
    return seconds


def _plan(
    config: dict[str, Any], settings: GuardSettings, hosts: int, computing: float
) -> HostPlan:
    model, held = adapted_model(config, settings)
    messages = count_token(model, hosts)
    base, _ = adapted_model(config, settings)
    detach(base)
    alone = count_token(base, hosts).count
    weights = sum(a.nbytes for m in model.modules() for a in _own(m)) + sum(a.nbytes for a in held)
    read = _read_bytes(model)

    def tokens_per_second(hops: int, sent_bytes: int) -> float:
        seconds = computing + read / (settings.memory_gbps * 1e9)
        seconds += hops * settings.link_latency_us * 1e-6
        return 1 / (seconds + 8 * sent_bytes / (settings.link_gbps * 1e9))

    return HostPlan(
        hosts, weights, read, messages.count, messages.count - alone, messages.ring_bytes,
        messages.mesh_bytes, tokens_per_second(messages.ring_hops, messages.ring_bytes),
        tokens_per_second(messages.count * (hosts > 1), messages.mesh_bytes),
    )  # fmt: skip


def _own(module: nn.Module) -> list[mx.array]:
    return [value for value in module.values() if isinstance(value, mx.array)]


def _read_bytes(model: nn.Module) -> int:
    """Weights that one token meets; of experts those chosen, of an embedding nothing but where it
    is the head too.
    """
    text = getattr(model, "language_model", model)
    chosen = getattr(getattr(text, "args", None), "num_experts_per_tok", None) or 1
    tied, total = "lm_head" not in text, 0.0
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.QuantizedEmbedding) and not tied:
            continue
        for array in _own(module):
            is_switch = array.ndim == 3 and hasattr(module, "num_experts")
            total += array.nbytes * (min(1.0, chosen / len(array)) if is_switch else 1.0)
    return round(total)


def hosts_table(plans: list[HostPlan], settings: GuardSettings) -> Table:
    columns: Columns = {
        "hosts": "count", "weights a host": "bytes", "read a token": "bytes",
        "messages a token": "count", "for adapters": "count", "sent in a ring": "bytes",
        "sent in a mesh": "bytes", "tokens a second, ring": ("number", 1),
        "tokens a second, mesh": ("number", 1), "": "text",
    }  # fmt: skip
    rows = [
        tuple(asdict(p).values()) if p.problem is None else (p.hosts, *[None] * 8, p.problem)
        for p in plans
    ]
    measured = settings.tokens_per_second
    caption = (
        "Counted from the config: bytes and messages of each host, of a token with a short context "
        "(no cache to read). Assumed, not measured, and all that tokens a second follow from: "
        f"{settings.memory_gbps:g} GB/s of memory, {settings.link_gbps:g} Gbit/s and "
        f"{settings.link_latency_us:g} microseconds a message on the link; "
        + (
            "computing is free. "
            if measured is None
            else f"on every host the computing that {measured:g} tokens a second on one leave. "
        )
        + "ring: MLX's ring and jaccl-ring, whose messages wait for each other; mesh: jaccl."
    )
    return Table.of("hosts", "Generating on several hosts", columns, rows, caption=caption)
