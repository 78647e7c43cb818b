"""KL of single modules from gradients, beside KL measured.

Run: pytest tests/studies/agreement/test_sensitivity.py
"""

from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxstacks import base_model
from mlxstacks.agreement import Passage, agree, refer
from mlxstacks.files.checkpoint import open_checkpoint
from mlxstacks.fuse.module import gather_modules
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.studies.agreement import allocate as module_under_test
from mlxstacks.studies.agreement.allocate import Maker, gradients, sensitivity, swap_in
from mlxstacks.studies.agreement.run import load
from mlxstacks.training.modes import evaluating
from tests.fuse.test_in_memory import raw
from tests.tiny_models import random_adapter, write_llama

KEYS = ("self_attn.q_proj", "mlp.down_proj", "model.embed_tokens")
PASSAGES = [
    Passage(tuple(np.random.default_rng(seed).integers(0, 256, 40).tolist()), 10, "text")
    for seed in (0, 1)
]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """A dense model with tied embeddings and an unfused adapter, and its modules."""
    mx.set_default_device(mx.cpu)
    directory = tmp_path_factory.mktemp("dense")
    path = write_llama(directory / "model", bits=3, group_size=32, hidden_size=64, tied=True)
    adapter = random_adapter(path, list(KEYS), directory=directory / "adapter", std=0.02)
    settings = FuseSettings(model=str(path), adapter_path=(str(adapter),), target_kl=1.0)
    model, _, _ = load(path, (str(adapter),))
    modules, _ = gather_modules(open_checkpoint(path), settings)
    assert len(modules) == 5
    return model, (modules, settings)


def measured(model: Any, reference: Any) -> float:
    return float(agree(model, reference).kl.mean(dtype="float64"))


def test_gradients_find_what_measuring_finds(
    loaded: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone and together; 96 draws, so that each is known to a tenth. The embedding is called
    twice a passage: it is the output's weight too."""
    model, (modules, settings) = loaded
    monkeypatch.setattr(module_under_test, "_DRAWS", 96)
    before, reference = raw(model), refer(model, PASSAGES)
    with ThreadPoolExecutor(1) as pool:
        make, swap = Maker(settings, pool), swap_in(model)
        options_of = sensitivity(model, modules, PASSAGES, make)
        assert raw(model) == before
        narrowest = {}
        for module in modules:
            options = options_of(module)
            assert [option.decision.bits for option in options] == [3, 4, 5, 6, 8]
            narrowest[module.path] = options[0]
            for option in (options[0], options[2]):
                with swap(module, make(module, option.decision)):
                    assert option.kl == pytest.approx(measured(model, reference), rel=0.3)
        with ExitStack() as stack:
            for module in modules:
                made = make(module, narrowest[module.path].decision)
                stack.enter_context(swap(module, made))
            together = measured(model, reference)
    terms = sum((np.array(option.terms) for option in narrowest.values()), np.zeros(()))
    assert 0.5 * float(terms @ terms) == pytest.approx(together, rel=0.3)
    assert raw(model) == before


def test_gradients_are_those_of_finite_differences(loaded: tuple[Any, Any]) -> None:
    """<g, dy> of a layer's output, beside what v^T logits changes by when dy is added to it."""
    model, _ = loaded
    layer = dict(model.named_modules())["model.layers.0.mlp.down_proj"]
    passage = PASSAGES[0]
    with evaluating(model, for_gradients=True), base_model.gated_delta_installed():
        [[call]] = gradients(model, [layer], passage, draws=1, seed=3)
        y = call.output(layer)
        dy = 1e-3 * mx.random.normal(y.shape, key=mx.random.key(1))

        def logits(change: mx.array) -> mx.array:
            own = type(layer)
            layer.__class__ = type(
                own.__name__, (own,), {"__call__": lambda m, *a: own.__call__(m, *a) + change}
            )
            try:
                return model(mx.array([passage.tokens[:-1]]))[0, passage.start - 1 :]
            finally:
                layer.__class__ = own

        plain = logits(mx.zeros_like(y))
        p = mx.softmax(plain, axis=-1)
        z = mx.sqrt(p) * mx.random.normal(p.shape, key=mx.random.split(mx.random.key(3), 1)[0])
        v = z - p * z.sum(axis=-1, keepdims=True)
        moved = ((logits(dy) - logits(-dy)) * v).sum().item() / 2
    assert call.products(dy).item() == pytest.approx(moved, rel=0.02)
