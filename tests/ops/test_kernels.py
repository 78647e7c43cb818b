"""The door to kernels: who may run one, what is said about it, and which maker builds it.

Run: pytest tests/ops/test_kernels.py
"""

from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import pytest

from mlxstacks.ops import kernels


@pytest.fixture
def device() -> Iterator[None]:
    """Something that could run kernels."""
    with kernels.substitute("device", _never):
        yield


def _never(**_: Any) -> Callable[..., list[mx.array]]:
    raise AssertionError("no kernel should be built")


def test_a_reason_is_logged_once_for_each_operator(
    device: None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "mlxstacks")
    for _ in range(3):
        for operator, refusal in (("one", "too wide"), ("two", "too wide"), ("one", "too long")):
            assert not kernels.use_kernel(None, operator, refusal)
    assert caplog.messages == [
        "one runs as MLX operations: too wide",
        "two runs as MLX operations: too wide",
        "one runs as MLX operations: too long",
    ]


@pytest.mark.parametrize(("wanted", "taken"), [(None, True), (1, True), (True, True), (0, False)])
def test_numbers_mean_what_the_truth_values_mean(device: None, wanted: Any, taken: bool) -> None:
    assert kernels.use_kernel(wanted, "one", None) is taken
    if wanted:
        with pytest.raises(ValueError, match="use_kernel=True, but too wide"):
            kernels.use_kernel(wanted, "one", "too wide")
    else:
        assert not kernels.use_kernel(wanted, "one", "too wide")


def test_name_and_maker_are_of_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A substitution that ends once somebody has looked at it, as another thread may end it."""

    class Ending(tuple):
        def __getitem__(self, index: Any) -> Any:
            monkeypatch.setattr(kernels, "_substitute", None)
            return super().__getitem__(index)

    def maker(**made: Any) -> Callable[..., list[mx.array]]:
        return lambda **_: [mx.array([len(made["source"])])]

    monkeypatch.setattr(kernels, "_substitute", Ending(("ending", maker)))
    built = kernels.kernel("dequant", ("old_codes",), ("words",))
    assert built()[0].item() > 0
