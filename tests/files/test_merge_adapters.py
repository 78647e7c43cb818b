"""Merging adapters: laws, PEFT's own results, the command.

Run: pytest tests/files/test_merge_adapters.py
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from mlxstacks.errors import AdapterError
from mlxstacks.files.adapters import read_adapter, write_adapter
from mlxstacks.files.lora_modules import FINGERPRINT_KEY, Adapter, LoraModule, mlx_config
from mlxstacks.files.merge_adapters import Method, Space, merge_adapters
from tests.cli.conftest import Run, command

__all__ = ["command"]
RANKS, ALPHAS, WEIGHTS, DENSITY = (4, 3, 2), (8, 3, 1), (1.0, 0.5, -0.25), 0.4  # as in the script
PARITY = load_file(Path(__file__).parent.parent / "fixtures" / "merge.safetensors")
METHODS: tuple[Method, ...] = ("svd", "ties", "dare")
SPACES: tuple[Space, ...] = ("weights", "core")


def adapter_of(*modules: LoraModule) -> Adapter:
    config = mlx_config({module.path: module for module in modules})
    return Adapter(Path("made"), config, {module.path: module for module in modules}, {})


def module_of(
    rank: int, scale: float, seed: int, *, experts: int = 0, path: str = "layers.0.up_proj"
) -> LoraModule:
    """(24, 16), or experts of (12, 16)."""
    random = np.random.default_rng(seed)
    a_shape, b_shape = ((experts, rank, 16), (experts, 12, rank)) if experts else (
        (16, rank), (rank, 24)
    )  # fmt: skip
    a, b = (random.standard_normal(shape).astype(np.float32) for shape in (a_shape, b_shape))
    return LoraModule(path, a, b, "F32", scale)


def delta(module: LoraModule) -> np.ndarray:
    a, b = module.lora_a.astype(np.float64), module.lora_b.astype(np.float64)
    whole: np.ndarray = module.scale * (b @ a if module.is_switch else (a @ b).T)
    return whole


@given(
    st.lists(
        st.tuples(st.integers(1, 5), st.sampled_from([0.5, 2.0, 3.7])), min_size=1, max_size=3
    ),
    st.sampled_from([0, 2]),
    st.integers(0, 99),
)
def test_concat_is_the_sum_and_svd_the_nearest_of_its_rank(
    shapes: list[tuple[int, float]], experts: int, seed: int
) -> None:
    modules = [
        module_of(rank, scale, seed + number, experts=experts)
        for number, (rank, scale) in enumerate(shapes)
    ]
    weights = [1.0, -0.5, 0.25][: len(modules)]
    aim = sum(w * delta(m) for m, w in zip(modules, weights, strict=True))
    size = float(np.linalg.norm(aim))
    merged, rows = merge_adapters([adapter_of(m) for m in modules], weights)
    (module,) = merged.modules.values()
    assert module.rank == sum(rank for rank, _ in shapes)
    assert np.linalg.norm(delta(module) - aim) <= 1e-6 * sum(
        np.linalg.norm(delta(m)) for m in modules
    )
    assert rows[0].error is None

    merged, rows = merge_adapters([adapter_of(m) for m in modules], weights, "svd", rank=2)
    (module,) = merged.modules.values()
    singular = np.linalg.svd(aim, compute_uv=False).reshape(max(experts, 1), -1)
    lost = float(np.sqrt((singular[:, 2:] ** 2).sum()))
    assert np.linalg.norm(delta(module) - aim) == pytest.approx(lost, rel=1e-4, abs=1e-5 * size)
    assert rows[0].error == pytest.approx(lost / size, rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("experts", [0, 2])
def test_one_adapter_at_full_density_is_itself(method: Method, space: Space, experts: int) -> None:
    module = module_of(3, 1.5, 0, experts=experts)
    merged, rows = merge_adapters([adapter_of(module)], [2.0], method, density=1.0, space=space)
    (found,) = merged.modules.values()
    assert delta(found) == pytest.approx(2 * delta(module), abs=1e-5)
    assert (found.rank, rows[0].ranks) == (3, (3,))
    assert rows[0].error == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("experts", [0, 2])
def test_dare_at_full_density_and_rank_is_the_sum(space: Space, experts: int) -> None:
    modules = [module_of(3, 1.5, 0, experts=experts), module_of(4, 0.5, 1, experts=experts)]
    adapters, aim = [*map(adapter_of, modules)], delta(modules[0]) - 0.5 * delta(modules[1])
    options: dict[str, Any] = {"density": 1.0, "space": space}
    merged, (row,) = merge_adapters(adapters, [1.0, -0.5], "dare", rank=7, **options)
    (found,) = merged.modules.values()
    assert delta(found) == pytest.approx(aim, abs=1e-5)
    assert (found.rank, row.ranks) == (7, (3, 4))
    assert row.error == pytest.approx(0, abs=1e-6)
    assert row.norm == pytest.approx(np.linalg.norm(aim))
    merged, _ = merge_adapters(adapters, [1.0, -0.5], "dare", rank=2, **options)
    nearest, _ = merge_adapters(adapters, [1.0, -0.5], "svd", rank=2)
    assert delta(merged.modules[found.path]) == pytest.approx(
        delta(nearest.modules[found.path]), abs=1e-5
    )


def test_as_peft_merges() -> None:
    modules = [
        LoraModule("layer", PARITY[f"adapter{n}.lora_a"], PARITY[f"adapter{n}.lora_b"], "F32",
                   alpha / rank)
        for n, (rank, alpha) in enumerate(zip(RANKS, ALPHAS, strict=True))
    ]  # fmt: skip
    adapters = [adapter_of(module) for module in modules]
    ours: dict[str, dict[str, Any]] = {
        "cat": {"method": "concat"}, "svd": {"method": "svd", "rank": 4},
        "ties_svd": {"method": "ties", "rank": 4, "density": DENSITY},
    }  # fmt: skip
    for theirs, options in ours.items():
        merged, _ = merge_adapters(adapters, WEIGHTS, **options)
        assert delta(merged.modules["layer"]) == pytest.approx(PARITY[theirs], abs=2e-4), theirs


def test_dare_keeps_its_share_and_its_mean() -> None:
    module = module_of(16, 1.0, 0)
    means = []
    for seed in range(40):
        merged, _ = merge_adapters([adapter_of(module)], [1.0], "dare", density=0.25, seed=seed)
        means.append(delta(merged.modules[module.path]))
    assert (np.abs(means[0]) < 1e-6).mean() == pytest.approx(0.75, abs=0.1)
    # 40 draws of a value kept with chance 1/4 and multiplied by 4: standard error sqrt(3 / 40).
    errors = (np.mean(means, axis=0) - delta(module)) / np.abs(delta(module))
    assert np.sqrt((errors**2).mean()) == pytest.approx((3 / 40) ** 0.5, rel=0.15)
    again, _ = merge_adapters([adapter_of(module)], [1.0], "dare", density=0.25, seed=39)
    assert np.array_equal(delta(again.modules[module.path]), means[-1])


def test_modules_of_one_adapter_stay_and_shapes_must_fit() -> None:
    first, second = module_of(2, 1.0, 0), module_of(4, 2.0, 1, path="layers.1.up_proj")
    merged, rows = merge_adapters([adapter_of(first), adapter_of(second)], [1.0, 0.5])
    assert delta(merged.modules[first.path]) == pytest.approx(delta(first))
    assert delta(merged.modules[second.path]) == pytest.approx(0.5 * delta(second), rel=1e-6)
    assert [row.ranks for row in rows] == [(2,), (4,)]
    narrow = LoraModule(first.path, first.lora_a[:8], first.lora_b, "F32", 1.0)
    with pytest.raises(
        AdapterError, match=r"layers.0.up_proj: weights of shapes \[\[24, 8\], \[24"
    ):
        merge_adapters([adapter_of(first), adapter_of(narrow)], [1.0, 1.0])


def test_the_command_writes_an_adapter_and_refuses_other_bases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    for number in range(2):
        module = module_of(2, 1.0, number)
        adapter = adapter_of(module)
        adapter.config[FINGERPRINT_KEY] = f"sha256:{number}"
        write_adapter(adapter, tmp_path / f"a{number}")
    given = ("adapter", "merge", "a0", "a1", "--save-path", "both")
    code, _, err = command(*given)
    assert code == 2
    assert "different bases" in err
    assert "--allow-base" in err
    weights = ("--weights", "1", "--weights", "0.5")
    code, out, err = command(*given, *weights, "--allow-base", "--json")
    assert code == 0, err
    assert json.loads(out)["outcome"] == "exact"
    both = read_adapter(tmp_path / "both")
    expected = delta(module_of(2, 1.0, 0)) + 0.5 * delta(module_of(2, 1.0, 1))
    assert delta(both.modules["layers.0.up_proj"]) == pytest.approx(expected, abs=1e-6)
    assert both.base_fingerprint == "sha256:0"
    code, out, err = command(*given, "--method", "ties", "--allow-base", "--force")
    assert code == 0, err
    assert "is lost to the rank, most in layers.0.up_proj" in " ".join(out.split())
    for options, message in (
        (("--weights", "1"), "weights is 1.0 for 2 adapters ("),
        (("--rank", "2"), "rank goes with svd, ties and dare"),
        (("--density", "0"), "density"),
    ):
        code, _, err = command(*given, *options, "--force")
        assert code == 2
        assert message in err


def test_adapters_with_no_module_in_common_need_a_base_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    modules = [module_of(2, 1.0, 0), module_of(2, 1.0, 1, path="layers.1.up_proj")]
    for name, module, base in (
        ("first", modules[0], "sha256:0"), ("same", modules[1], "sha256:0"),
        ("unknown", modules[1], None),
    ):  # fmt: skip
        adapter = adapter_of(module)
        if base:
            adapter.config[FINGERPRINT_KEY] = base
        write_adapter(adapter, tmp_path / name)
    apart = ("adapter", "merge", "first", "unknown", "--save-path", "both")
    code, _, err = command(*apart)
    assert code == 2
    assert "have no module in common, and unknown does not record its base" in " ".join(err.split())
    assert "--allow-base" in err
    assert not Path("both").exists()
    for arguments in ((*apart, "--allow-base"), (*apart[:3], "same", *apart[4:], "--force")):
        code, _, err = command(*arguments)
        assert code == 0, err
        both = read_adapter(tmp_path / "both").modules
        assert [*both] == [module.path for module in modules]
        for module in modules:
            assert delta(both[module.path]) == pytest.approx(delta(module))
