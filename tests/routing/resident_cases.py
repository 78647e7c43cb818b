"""A small llama, a store of stacks for it, and a model that holds all of them, to compare with."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from mlxstacks import base_model
from mlxstacks.files.manifest import DomainRecord
from mlxstacks.files.stack_file import ProjectionShape
from mlxstacks.files.store import Store
from mlxstacks.layers.adapted import projection_dims
from mlxstacks.layers.selection import routed
from mlxstacks.layers.stack_files import serve
from mlxstacks.layers.stacked import set_mode
from tests.files.store_cases import BASE, header, tensors

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 64,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
PATHS = [f"model.layers.{i}.{name}" for i in (0, 1) for name in ("self_attn.q_proj", "mlp.up_proj")]
TOKENS = mx.array([[1, 5, 9, 33, 7]])


def small_model() -> nn.Module:
    """The same numbers each time."""
    mx.random.seed(3)
    model = base_model.build_model(CONFIG)
    model.eval()
    mx.eval(model.parameters())
    return model


def shapes_of(
    model: nn.Module, paths: Sequence[str], rank: int = 3, experts: int = 2
) -> dict[str, ProjectionShape]:
    modules = dict(model.named_modules())
    shapes = {}
    for path in paths:
        dims = projection_dims(modules[path])
        assert dims is not None
        top = min(2, experts)
        shapes[path] = ProjectionShape(
            "linear", experts, rank, top, 2.0, dims.input_dims, dims.output_dims
        )
    return shapes


def add_domain(
    store: Store, name: str, shapes: Mapping[str, ProjectionShape], rounds: int = 1, seed: int = 0
) -> None:
    with store.change("train", domain=name) as change:
        records = []
        for number in range(1, rounds + 1):
            head = header(name, number, projections=dict(shapes))
            values = {k: 0.2 * v for k, v in tensors(head, 100 * seed + number).items()}
            records.append(change.add_stack(values, head))
        change.manifest = change.manifest.with_domain(DomainRecord(name, True, tuple(records)))


def small_store(
    path: Path, domains: Sequence[str] = ("a", "b", "c", "d"), rounds: int = 1
) -> Store:
    """Domains alternate between two shapes, so that a set has segments."""
    store = Store.create(path, "tiny", BASE)
    model = small_model()
    for index, name in enumerate(domains):
        shapes = shapes_of(model, PATHS, rank=3 + index % 2)
        add_domain(store, name, shapes, rounds, seed=index + 1)
    return store


def answer(model: nn.Module) -> mx.array:
    """Logits (1, T, vocab)."""
    logits: mx.array = model(TOKENS)
    mx.eval(logits)
    return logits


class FullyResident:
    """A model that holds every stack of a store at once."""

    def __init__(self, store: Store, dtype: mx.Dtype | None = None) -> None:
        self.model = small_model()
        self.dtype = dtype
        serve(self.model, store)

    def answer(self, weights: Mapping[str, float]) -> mx.array:
        """Logits with these domains."""
        set_mode(self.model, routed(list(weights), list(weights.values())), self.dtype)
        return answer(self.model)
