"""Parts and config of a packed weight that do not go together are refused, never read somehow.

Run: pytest tests/files/test_stored_parts.py
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.errors import AdapterError, CheckpointError
from mlxstacks.files.adapters import match_adapter
from mlxstacks.files.checkpoint import Checkpoint, open_checkpoint
from mlxstacks.files.stored_weight import stored_weight
from mlxstacks.ops.affine import BITS, GROUP_SIZES
from tests.files.weight_cases import PATH, adapter_for, edited, one_module


@pytest.mark.parametrize("entry", [None, {}, 0, ""])
def test_an_empty_entry_means_not_quantized_as_in_mlx_lm(entry: Any, tmp_path: Path) -> None:
    checkpoint = one_module(tmp_path, (8, 64), (4, 64), bits=4, group_size=64, **{PATH: entry})
    with pytest.raises(CheckpointError, match=r"says it is not quantized.*q_proj\.scales is there"):
        stored_weight(checkpoint, PATH)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        (4, "quantization is '4'; true, false or an object"),
        (["bits"], "true, false or an object"),
        ({"bits": 4.0}, "says 4.0 bits"),
        ({"bits": 4, "group_size": True}, "group_size True"),
        ({"bits": None}, "says None bits"),
        ({"bits": {"a": 1}}, "contradict"),
        ({"bits": 2, "group_size": 64}, "says 2 bits, group_size 64.*contradict"),
    ],
)
def test_an_entry_that_is_no_grid_is_refused(entry: Any, said: str, tmp_path: Path) -> None:
    checkpoint = one_module(tmp_path, (8, 64), (4, 64), bits=4, group_size=64, **{PATH: entry})
    with pytest.raises(CheckpointError, match=said):
        stored_weight(checkpoint, PATH)


SHAPES: list[tuple[str, dict[str, Any], str]] = [
    ("weight", {"shape": ()}, "single number"),
    ("weight", {"shape": (0,)}, "differ in rows"),
    ("weight", {"shape": (8, 0)}, "fit no affine grid"),
    ("weight", {"shape": (8, 9)}, "fit no affine grid"),
    ("weight", {"shape": (4, 8)}, "differ in rows"),
    ("scales", {"shape": ()}, "must be alike"),
    ("scales", {"shape": (8, 0)}, "must be alike"),
    ("scales", {"shape": (), "dtype": "U8"}, "mxfp4 or mxfp8 or nvfp4"),
    ("scales", {"shape": (8, 0), "dtype": "U8"}, "mxfp4 or mxfp8 or nvfp4"),
    ("scales", {"shape": (8, 2)}, "must be alike"),
    ("biases", {"shape": (8, 2)}, "must be alike"),
    ("biases", {"shape": (1, 8)}, "must be alike"),
]


@pytest.mark.parametrize(("leaf", "changes", "said"), SHAPES)
def test_parts_of_other_shapes_are_refused(
    leaf: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    checkpoint = one_module(tmp_path, (8, 64), (4, 64), bits=4, group_size=64)
    checkpoint = edited(checkpoint, f"{PATH}.{leaf}", **changes)
    with pytest.raises(AdapterError, match=said):
        match_adapter(adapter_for(8, 64), checkpoint)


@pytest.mark.parametrize("shape", [(), (8, 0), (8, 3), (4, 1), (8,), (1, 8, 1)])
def test_scales_and_biases_that_agree_on_a_wrong_shape_are_refused(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    checkpoint = one_module(tmp_path, (8, 64), (4, 64), bits=4, group_size=64)
    for leaf in ("scales", "biases"):
        checkpoint = edited(checkpoint, f"{PATH}.{leaf}", shape=shape)
    with pytest.raises(AdapterError, match=r"differ in rows|fit no affine grid"):
        match_adapter(adapter_for(8, 64), checkpoint)


def test_a_plain_weight_with_biases_of_a_packed_one_is_refused(tmp_path: Path) -> None:
    tensors = {f"{PATH}.weight": mx.zeros((8, 64)), f"{PATH}.biases": mx.zeros((8, 1))}
    mx.save_safetensors(str(tmp_path / "model.safetensors"), tensors)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"q_proj\.biases is there, .*scales is missing"):
        stored_weight(open_checkpoint(tmp_path), PATH)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("experts", [(), (3,)])
def test_a_bias_of_another_shape_or_dtype_is_refused(
    packed: bool, experts: tuple[int, ...], tmp_path: Path
) -> None:
    shape = (*experts, 8, 64)
    weight = mx.random.normal(shape)
    parts = mx.quantize(weight, group_size=64, bits=4) if packed else (weight,)
    tensors = {
        f"{PATH}.{n}": a for n, a in zip(("weight", "scales", "biases"), parts, strict=False)
    }
    quantization = {"quantization": {"bits": 4, "group_size": 64}} if packed else {}
    (tmp_path / "config.json").write_text(json.dumps(quantization))

    def with_bias(bias: mx.array) -> Checkpoint:
        file = tmp_path / "model.safetensors"
        mx.save_safetensors(str(file), {**tensors, f"{PATH}.bias": bias})
        return open_checkpoint(tmp_path)

    right = (*experts, 8)
    match_adapter(adapter_for(*shape), with_bias(mx.zeros(right)))
    for bias in (mx.zeros((*experts, 7)), mx.zeros((*right, 1)), mx.zeros(right, dtype=mx.int32)):
        with pytest.raises(AdapterError, match=r"q_proj\.bias: .*has to be \[") as caught:
            match_adapter(adapter_for(*shape), with_bias(bias))
        assert str(list(bias.shape)) in str(caught.value)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return one_module(tmp_path_factory.mktemp("small"), (8, 64), (4, 64), bits=4, group_size=64)


ANY_SHAPE = st.lists(st.sampled_from((0, 1, 2, 8, 16)), max_size=4).map(tuple)
DTYPES = st.sampled_from(["U32", "BF16", "F16", "U8"])
NUMBERS: st.SearchStrategy[Any] = st.sampled_from(
    [*BITS, *GROUP_SIZES, 0, -1, 4.0, True, None, "4", [], 2**70]
)
ANY_GRID = st.fixed_dictionaries(
    {}, optional={"bits": NUMBERS, "group_size": NUMBERS, "mode": st.sampled_from(["affine", "x"])}
)
# Where and how a right checkpoint is made wrong.
DAMAGE = st.one_of(
    st.tuples(st.sampled_from(["weight", "scales", "biases"]), ANY_SHAPE | DTYPES),
    st.tuples(st.just("both"), ANY_SHAPE),  # scales and biases
    st.tuples(st.just("default"), ANY_GRID),
    st.tuples(st.just("entry"), NUMBERS | ANY_GRID),
)


@given(
    grid=st.tuples(st.sampled_from(BITS), st.sampled_from(GROUP_SIZES)),
    leading=st.sampled_from([(8,), (2, 8)]),
    groups=st.sampled_from([1, 2, 3]),
    damage=st.lists(DAMAGE, max_size=2),
)
def test_any_parts_and_config_are_a_whole_weight_or_refused(
    small: Checkpoint,
    grid: tuple[int, int],
    leading: tuple[int, ...],
    groups: int,
    damage: list[tuple[str, Any]],
) -> None:
    bits, size = grid
    packed, alike = (*leading, groups * size * bits // 32), (*leading, groups)
    parts = {"weight": (packed, "U32"), "scales": (alike, "F16"), "biases": (alike, "F16")}
    config: dict[str, Any] = {"bits": bits, "group_size": size}
    for where, what in damage:
        if where == "default":
            config = what | {k: v for k, v in config.items() if k == PATH}
        elif where == "entry":
            config = config | {PATH: what}
        for leaf in ("scales", "biases") if where == "both" else (where,) if where in parts else ():
            shape, dtype = parts[leaf]
            parts[leaf] = (shape, what) if isinstance(what, str) else (what, dtype)
    checkpoint = replace(small, config={"quantization": config})
    for leaf, (shape, dtype) in parts.items():
        checkpoint = edited(checkpoint, f"{PATH}.{leaf}", shape=shape, dtype=dtype)
    try:
        found = stored_weight(checkpoint, PATH)
    except CheckpointError:
        assert damage, "what is right was refused"
        return
    if not damage:
        assert (found.bits, found.group_size, found.shape) == (*grid, (*leading, groups * size))
    assert type(found.bits) is int
    assert type(found.group_size) is int
    weight, scales, biases = (parts[leaf][0] for leaf in ("weight", "scales", "biases"))
    assert scales == biases
    assert weight[:-1] == scales[:-1]
    assert found.input_dims == scales[-1] * found.group_size > 0
    assert found.input_dims * found.bits == weight[-1] * 32
