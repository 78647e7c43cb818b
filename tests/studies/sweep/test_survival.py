"""Survival measured without a fuse. Run: pytest tests/studies/sweep/test_survival.py"""

from pathlib import Path

import numpy as np
import pytest

from mlxstacks.errors import InputError
from mlxstacks.fuse.settings import PolicyName
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


def test_fp4_and_fp8_lose_less_the_finer_they_are(tmp_path: Path) -> None:
    """And the less the more a policy is free to change; figures of every mode are finite."""
    errors = []
    for mode in ("mxfp4", "nvfp4", "mxfp8"):
        model = write_qwen_moe(tmp_path / mode, hidden_size=64, mode=mode)
        keys = ["mlp.switch_mlp.down_proj", "self_attn.q_proj"]
        adapter = random_adapter(model, keys, std=0.02)
        policies: tuple[PolicyName, ...]
        policies = ("refit", "keep", "nearest", "stochastic", "promote", "dequantize")
        found = measure_survival(model, adapter, policies)
        figures = [x for f in found.values() for x in f.values() if not isinstance(x, str | dict)]
        assert np.isfinite(figures).all()
        refit, keep, nearest, stochastic, promote, plain = (f["error"] for f in found.values())
        assert plain < promote < nearest < min(refit, keep) < stochastic
        assert all(0.8 < f["survival"] < 1.05 for f in found.values())
        assert [f["extra_bytes"] > 0 for f in found.values()] == [False] * 4 + [True] * 2
        errors.append(nearest)
    assert errors == sorted(errors, reverse=True)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    adapter = random_adapter(write_qwen_moe(tmp_path / "moe"), ["mlp.switch_mlp.down_proj"])
    with pytest.raises(InputError):
        measure_survival(write_llama(tmp_path / "llama"), adapter, ("keep",))
