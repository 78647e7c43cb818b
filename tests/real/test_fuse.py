"""What a fuse does to the weights of a real model. Run: make test-real"""

from pathlib import Path

import pytest

from mlxstacks.fuse.fidelity import Fidelity
from mlxstacks.fuse.run import run as fuse
from mlxstacks.fuse.settings import FuseSettings
from tests.tiny_models import random_adapter


@pytest.fixture(scope="module")
def adapter(real_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As small beside the grid as a persona: 0.03 of a step, on `down_proj` of ten layers."""
    return random_adapter(
        real_model / "dense", ["mlp.down_proj"], rank=8, std=0.0018, num_layers=10,
        directory=tmp_path_factory.mktemp("adapter"),
    )  # fmt: skip


def figures(
    real_model: Path, adapter: Path, save_path: Path, requant: str, *, zero_delta: bool = False
) -> Fidelity:
    settings = FuseSettings(
        model=str(real_model / "dense"), adapter_path=(str(adapter),), save_path=str(save_path),
        requant=requant, zero_delta=zero_delta,
    )  # fmt: skip
    total = fuse(settings).stages[0].total
    assert total is not None
    return total


def test_a_refit_of_nothing_draws_most_codes_anew(
    real_model: Path, adapter: Path, tmp_path: Path
) -> None:
    """On llama.cpp's grid, whose steps are not those that MLX would choose."""
    refit = figures(real_model, adapter, tmp_path / "refit", "refit", zero_delta=True)
    assert refit.codes_changed == pytest.approx(0.548, abs=0.02)
    auto = figures(real_model, adapter, tmp_path / "auto", "auto", zero_delta=True)
    assert (auto.codes_changed, auto.artifact) == (0, 0)


def test_auto_has_the_delta_that_a_refit_drowns(
    real_model: Path, adapter: Path, tmp_path: Path
) -> None:
    refit = figures(real_model, adapter, tmp_path / "refit", "refit")
    auto = figures(real_model, adapter, tmp_path / "auto", "auto")
    assert refit.delta_over_step == pytest.approx(0.033, abs=0.01)
    assert refit.correlation is not None
    assert auto.correlation is not None
    assert refit.correlation < 0.2 < 0.8 < auto.correlation
