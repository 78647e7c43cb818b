"""The grid of a packed weight: what mlx-lm loads, or an error; never what an adapter would like.

Parts and config that do not go together are refused, never read somehow.

Run: pytest tests/files/test_stored_weight.py
"""

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx import nn

from mlxstacks import base_model
from mlxstacks.errors import AdapterError, CheckpointError
from mlxstacks.files.adapters import match_adapter
from mlxstacks.files.checkpoint import Checkpoint, open_checkpoint
from mlxstacks.files.stored_weight import stored_weight
from mlxstacks.ops.affine import BITS, GROUP_SIZES
from tests.files.weight_cases import PATH, adapter_for, edited, one_module
from tests.tiny_models import llama_config, qwen_moe_config

# bits x group_size that only one affine grid has; the others are shared by two or three.
DECIDED_BY_SHAPE = {64, 96, 160, 320, 640, 768, 1024}


# --- a module that the config does not name -------------------------------------------------------


@pytest.mark.parametrize(("width", "other"), [(128, "2 bits, group_size 128"), (32, "8 bits, gro")])
def test_the_default_holds_where_it_fits_whatever_the_adapter(
    width: int, other: str, tmp_path: Path
) -> None:
    """4 bits in groups of 64: its shapes fit 2 bits and 128 inputs, 8 bits and 32 inputs too."""
    checkpoint = one_module(tmp_path, (96, 64), (4, 64), bits=4, group_size=64)
    (match,) = match_adapter(adapter_for(96, 64), checkpoint)
    assert (match.stored.bits, match.stored.group_size, match.stored.shape) == (4, 64, (96, 64))
    with pytest.raises(AdapterError) as caught:
        match_adapter(adapter_for(96, width), checkpoint)
    said = str(caught.value)
    assert f"{PATH}: lora_a [{width}, 2] and lora_b [2, 96] do not fit the weight [96, 64]" in said
    assert "(4 bits, group_size 64) in model.safetensors" in said
    assert "allowed: lora_a [64, r], lora_b [r, 96]" in said
    assert "does not name the module, so its default holds" in said
    assert other in said
    named = one_module(
        tmp_path, (96, 64), (4, 64), bits=4, group_size=64, **{PATH: {"bits": 4, "group_size": 64}}
    )
    with pytest.raises(AdapterError) as caught:
        match_adapter(adapter_for(96, width), named)
    assert "does not name" not in str(caught.value)


def test_experts_of_another_width_are_refused_too(tmp_path: Path) -> None:
    checkpoint = one_module(tmp_path, (3, 32, 64), (4, 64), bits=4, group_size=64)
    (match,) = match_adapter(adapter_for(3, 32, 64), checkpoint)
    assert match.kind == "switch"
    for shape in ((3, 32, 128), (3, 32, 32), (2, 32, 64), (3, 64, 64), (32, 64)):
        with pytest.raises(AdapterError, match=r"allowed: lora_a \[3, r, 64\], lora_b \[3, 32, r"):
            match_adapter(adapter_for(*shape), checkpoint)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group_size", GROUP_SIZES)
def test_an_unnamed_module_is_read_by_default_or_shape_else_refused(
    bits: int, group_size: int, tmp_path: Path
) -> None:
    def unnamed(**quantization: Any) -> Checkpoint:
        return one_module(tmp_path, (8, 256), (bits, group_size), **quantization)

    found = stored_weight(unnamed(bits=bits, group_size=group_size, mode="affine"), PATH)
    assert (found.bits, found.group_size, found.input_dims) == (bits, group_size, 256)
    # Defaults that do not fit: of another product, of another mode, and no numbers of a grid.
    elsewhere = 64 if bits * group_size == 1024 else 128
    for default in (
        {"bits": 8, "group_size": elsewhere} if bits * group_size != 8 * elsewhere else {"bits": 1},
        {"bits": bits, "group_size": group_size, "mode": "mxfp4"},
        {"bits": float(bits), "group_size": group_size},
        {},
    ):
        if bits * group_size in DECIDED_BY_SHAPE:
            found = stored_weight(unnamed(**default), PATH)
            assert (found.bits, found.group_size) == (bits, group_size)
            continue
        own = rf"{bits} bits, group_size {group_size} \(256 inputs\)"
        with pytest.raises(CheckpointError, match=rf"config has no entry.*{own}.*add the module"):
            stored_weight(unnamed(**default), PATH)


# --- the whole of what mlx-lm writes --------------------------------------------------------------


GRIDS = st.fixed_dictionaries(
    {"bits": st.sampled_from(BITS), "group_size": st.sampled_from(GROUP_SIZES)}
)
# What a predicate of mlx-lm may say of a module: as the default, plain, or a grid of its own.
CHOICES = st.one_of(st.just(True), st.just(False), GRIDS)


def quantized(config: dict[str, Any], directory: Path, default: dict[str, int], how: Any) -> Path:
    """A model that mlx-lm quantized and saved. how: a recipe's name, None, or a predicate."""
    from mlx_lm.convert import mixed_quant_predicate_builder
    from mlx_lm.utils import quantize_model, save_config, save_model

    model = base_model.build_model(config)
    if isinstance(how, str):
        how = mixed_quant_predicate_builder(how, model, default["group_size"])
    model, config = quantize_model(model, config, **default, quant_predicate=how)
    save_model(directory, model)
    save_config(config, directory / "config.json")
    return directory


def loaded_grids(directory: Path) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    """Path, (bits, group_size) or None, and the widths of every linear that mlx-lm loads."""
    from mlx_lm.utils import load_model

    model, config = load_model(directory, lazy=True)
    plain = base_model.build_model({k: v for k, v in config.items() if "quantization" not in k})
    wide = {path: m["weight"].shape for path, m in plain.named_modules() if "weight" in m}
    for path, module in model.named_modules():
        if "weight" in module and len(wide[path]) > 1 and not isinstance(module, nn.Conv1d):
            grid = (module.bits, module.group_size) if "scales" in module else None
            yield path, grid, tuple(wide[path])


def assert_reads_as_mlx_lm(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    rows = list(loaded_grids(directory))
    assert rows
    for path, grid, shape in rows:
        stored = stored_weight(checkpoint, path)
        assert stored.shape == shape, path
        assert (None if stored.bits is None else (stored.bits, stored.group_size)) == grid, path
        for wrong in _other_widths(shape):
            with pytest.raises(AdapterError, match="do not fit the weight"):
                match_adapter(adapter_for(*wrong, path=path), checkpoint)
        (match,) = match_adapter(adapter_for(*shape, path=path), checkpoint)
        assert match.stored == stored


def _other_widths(shape: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Every width that the packed shapes could stand for in another grid, and plain misfits."""
    *leading, width = shape
    for times, over in ((2, 1), (4, 1), (1, 2), (1, 4), (3, 2), (2, 3), (3, 1)):
        if width * times // over not in (0, width):
            yield (*leading, width * times // over)
    yield (*leading, width + 1)
    yield (*leading[:-1], leading[-1] + 32, width)


@settings(max_examples=settings().max_examples // 2)
@given(default=GRIDS, choices=st.lists(CHOICES, min_size=1, max_size=9))
def test_grids_of_a_drawn_predicate_are_those_that_mlx_lm_loads(
    default: dict[str, int], choices: list[Any]
) -> None:
    numbers = iter(range(1000))

    def predicate(path: str, module: nn.Module) -> Any:
        choice = choices[next(numbers) % len(choices)]
        return dict(choice) if isinstance(choice, dict) else choice

    with tempfile.TemporaryDirectory() as folder:
        directory = quantized(llama_config(), Path(folder), default, predicate)
        assert_reads_as_mlx_lm(directory)
        _assert_unnamed_is_default_or_right(directory)


@pytest.mark.parametrize(
    ("recipe", "group_size"),
    [("mixed_2_6", 32), ("mixed_3_4", 64), ("mixed_3_6", 128), ("mixed_4_6", 64)],
)
def test_grids_of_mlx_lms_recipes(recipe: str, group_size: int, tmp_path: Path) -> None:
    default = {"bits": 4, "group_size": group_size}
    assert_reads_as_mlx_lm(quantized(llama_config(), tmp_path, default, recipe))


@pytest.mark.parametrize("bits", [2, 4, 6])
def test_grids_of_experts_and_of_the_models_own_predicate(bits: int, tmp_path: Path) -> None:
    """Router gates of this family stay at 8 bits, each with an entry in the config."""
    config = qwen_moe_config(moe_intermediate_size=128)
    size = GROUP_SIZES[bits % 3]
    directory = quantized(config, tmp_path, {"bits": bits, "group_size": size}, None)
    assert_reads_as_mlx_lm(directory)


def _assert_unnamed_is_default_or_right(directory: Path) -> None:
    """Without the entries: the default where it fits, else mlx-lm's own grid."""
    config = json.loads((directory / "config.json").read_text())
    default = config["quantization"]["bits"], config["quantization"]["group_size"]
    for key in ("quantization", "quantization_config"):
        config[key] = {k: v for k, v in config[key].items() if not isinstance(v, dict)}
    (directory / "config.json").write_text(json.dumps(config))
    checkpoint = open_checkpoint(directory)
    for path, grid, _ in loaded_grids(directory):
        if grid is None:
            assert stored_weight(checkpoint, path).bits is None
        elif np.prod(grid) == np.prod(default):
            stored = stored_weight(checkpoint, path)
            assert (stored.bits, stored.group_size) == default
        else:
            stored = stored_weight(checkpoint, path)
            assert (stored.bits, stored.group_size) == grid


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
