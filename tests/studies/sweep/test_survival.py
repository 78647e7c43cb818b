"""Survival measured without a fuse. Run: pytest tests/studies/sweep/test_survival.py"""

from pathlib import Path

import pytest

from mlxstacks.errors import InputError
from mlxstacks.studies.sweep.worker import measure_survival
from tests.tiny_models import random_adapter, write_llama, write_qwen_moe


def test_a_plain_base_keeps_the_delta_and_has_no_steps(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "plain", bits=None, dtype="float32")
    adapter = random_adapter(model, ["mlp.down_proj"])
    for found in measure_survival(model, adapter, ("refit", "keep")).values():
        assert found["delta_over_step"] is None
        assert found["survival"] == pytest.approx(1.0, abs=1e-6)
        assert found["extra_bytes"] == 0


def test_a_zero_delta_has_no_survival(tmp_path: Path) -> None:
    model = write_qwen_moe(tmp_path / "moe", bits=3)
    adapter = random_adapter(model, ["mlp.switch_mlp.down_proj"], std=0.0)
    keep, promote = measure_survival(model, adapter, ("keep", "promote")).values()
    assert keep["survival"] is promote["survival"] is None
    assert keep["artifact"] == 0


def test_total_is_a_ratio_of_sums_over_modules(tmp_path: Path) -> None:
    """Not a mean of ratios: the larger module counts more."""
    model = write_qwen_moe(tmp_path / "moe", bits=4)
    adapter = random_adapter(model, ["mlp.switch_mlp.down_proj", "linear_attn.out_proj"], std=0.02)
    [found] = measure_survival(model, adapter, ("promote",)).values()
    assert len(found["modules"]) == 3
    assert found["weights"] == sum(module["weights"] for module in found["modules"].values())
    shares = [module["survival"] or 0.0 for module in found["modules"].values()]
    assert min(shares) <= (found["survival"] or 0.0) <= max(shares)
    assert found["extra_bytes"] > 0


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    adapter = random_adapter(write_qwen_moe(tmp_path / "moe"), ["mlp.switch_mlp.down_proj"])
    with pytest.raises(InputError):
        measure_survival(write_llama(tmp_path / "llama"), adapter, ("keep",))
