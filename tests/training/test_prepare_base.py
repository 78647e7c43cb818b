"""A base prepared to compute on a CPU. Run: pytest tests/training/test_prepare_base.py"""

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.switch_layers import SwitchGLU, SwitchLinear

from mlxstacks import base_model
from mlxstacks.training.modes import prepare_base
from tests.layers.build import assert_close


def rows(dims: int) -> tuple[mx.array, mx.array]:
    """(x (1, 40, dims), indices (1, 40, 2)): enough to be sorted by expert; expert 3 gets none."""
    key = mx.random.key(0)
    return mx.random.normal((1, 40, dims), key=key), mx.random.randint(0, 3, (1, 40, 2), key=key)


@pytest.mark.parametrize("transform", [lambda f: f, mx.grad, mx.compile])
def test_grouped_experts_answer_as_gather_mm_does(transform: Callable[..., Callable]) -> None:
    mixture = SwitchGLU(512, 512, 4, bias=False)
    x, indices = rows(512)

    def function(x: mx.array) -> mx.array:
        return mx.sum(mixture(x, indices) ** 2)

    before = transform(function)(x)
    mx.eval(before)
    base_model.group_experts(mixture)
    assert type(mixture.up_proj) is not SwitchLinear
    assert_close(transform(function)(x), before)


def test_grouped_experts_are_not_copied() -> None:
    mixture = SwitchGLU(512, 512, 4, bias=False)
    mixture.freeze()
    base_model.group_experts(mixture)
    x, indices = rows(512)
    mx.eval(mixture.parameters(), x, indices)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    mx.eval(mx.grad(lambda x: mx.sum(mixture(x, indices) ** 2))(x))
    weights = sum(value.nbytes for _, value in tree_flatten(mixture.parameters()))
    assert mx.get_peak_memory() - before < weights / 2


def test_small_experts_and_those_of_other_classes_stay() -> None:
    model = nn.Module()
    model.small, model.plain = SwitchGLU(64, 64, 4), nn.Linear(1024, 1024)
    base_model.group_experts(model)
    assert type(model.small.up_proj) is SwitchLinear
    assert type(model.plain) is nn.Linear


@pytest.mark.parametrize("checkpointed", [False, True])
def test_experts_of_checkpointed_layers_are_not_grouped(checkpointed: bool) -> None:
    model = nn.Module()
    model.mixture = SwitchGLU(512, 512, 2)
    prepare_base(model, "float32", [], checkpointed=checkpointed)
    on_cpu = mx.default_device().type == mx.DeviceType.cpu
    assert (type(model.mixture.up_proj) is not SwitchLinear) == (on_cpu and not checkpointed)


@pytest.mark.parametrize(("base", "said"), [("auto", True), ("float32", False), (None, False)])
def test_who_did_not_ask_for_float32_is_told_how_mlx_lm_computes(
    base: str | None, said: bool
) -> None:
    notes: list[str] = []
    if prepare_base(nn.Linear(4, 4), base, notes):
        assert ("--base stored rounds as mlx-lm does" in notes[0]) == said
