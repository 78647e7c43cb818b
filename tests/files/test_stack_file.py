"""Stack files: bit-exact, deterministic, believed only after every check.

pytest tests/files/test_stack_file.py
"""

import contextlib
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxstacks.errors import StoreError, TargetError
from mlxstacks.files.shards import read_header
from mlxstacks.files.stack_file import (
    METADATA_KEY,
    ProjectionShape,
    StackHeader,
    file_sha256,
    read_arrays,
    read_stack,
    read_stack_index,
    write_arrays,
    write_stack,
)
from tests.files.raw import file_bytes, small_disk, with_metadata
from tests.files.store_cases import header, tensors

SIZES = st.integers(1, 5)


@st.composite
def projections(draw: Any) -> ProjectionShape:
    form = draw(st.sampled_from(["linear", "shared", "per_expert"]))
    experts = draw(st.integers(1, 4))
    return ProjectionShape(
        form=form,
        num_experts=experts,
        rank=draw(SIZES),
        experts_per_token=draw(st.integers(1, experts)),
        scale=draw(st.floats(-1e6, 1e6)),
        input_dims=draw(SIZES),
        output_dims=draw(SIZES),
        base_experts=None if form == "linear" else draw(SIZES),
        latent_dim=None if form == "per_expert" else draw(st.none() | SIZES),
    )


@given(
    shapes=st.dictionaries(st.text("abc.", min_size=1, max_size=5), projections(), min_size=1,
                           max_size=3),
    storage=st.sampled_from(["float16", "bfloat16"]),
)  # fmt: skip
@settings(max_examples=settings().max_examples // 2)
def test_round_trip_is_bit_exact(
    tmp_path_factory: pytest.TempPathFactory, shapes: dict[str, ProjectionShape], storage: Any
) -> None:
    path = tmp_path_factory.mktemp("stack") / "a.safetensors"
    head = header(storage=storage, projections=shapes)
    made = tensors(head)
    sha256 = write_stack(path, made, head)
    found = read_stack(path, sha256)
    assert found.header == head == read_stack_index(path).header
    assert found.tensors.keys() == made.keys()
    for name, array in made.items():
        assert found.tensors[name].dtype == array.dtype
        assert mx.array_equal(found.tensors[name], array).item()
    assert StackHeader.from_json(json.loads(json.dumps(head.as_json()))) == head


def test_equal_stacks_are_equal_bytes(tmp_path: Path) -> None:
    head = header()
    made = tensors(head)
    first = write_stack(tmp_path / "a.safetensors", made, head)
    backwards = replace(head, projections=dict(reversed(head.projections.items())))
    second = write_stack(tmp_path / "b.safetensors", dict(reversed(made.items())), backwards)
    assert first == second == file_sha256(tmp_path / "b.safetensors")
    other = replace(head, round=2)
    assert write_stack(tmp_path / "c.safetensors", made, other) != first


def test_special_numbers_survive(tmp_path: Path) -> None:
    head = header(projections={"layers.0.q": ProjectionShape("linear", 1, 1, 1, 1.0, 4, 4)})
    odd = mx.array([[[-0.0, 6e-8, 65504.0, -6.1e-5]]], mx.float16)
    write_stack(
        tmp_path / "a.safetensors",
        {"layers.0.q.lora_a": odd, "layers.0.q.lora_b": odd.swapaxes(1, 2)},
        head,
    )
    back = read_stack(tmp_path / "a.safetensors").tensors["layers.0.q.lora_a"]
    assert np.array(back.view(mx.uint16)).tolist() == np.array(odd.view(mx.uint16)).tolist()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: t.pop("model.layers.0.self_attn.q_proj.router"), "router': missing"),
        (lambda t: t.update(extra=mx.zeros((1,))), "'extra': unexpected"),
        (
            lambda t: t.update({"model.layers.0.self_attn.q_proj.lora_a": mx.zeros((2, 3, 16))}),
            r"F32 \[2, 3, 16\], the header says F16",
        ),
        (
            lambda t: t.update(
                {"model.layers.0.self_attn.q_proj.lora_b": mx.zeros((2, 3, 24), mx.float16)}
            ),
            r"\[2, 3, 24\], the header says F16 \[2, 24, 3\]",
        ),
        (
            lambda t: t.update(
                {"model.layers.0.self_attn.q_proj.router": mx.full((2, 16), float("inf"))}
            ),
            r"router: NaN or Inf at index \[0, 0\]",
        ),
    ],
)
def test_what_does_not_fit_the_header_is_not_written(
    tmp_path: Path, spoil: Callable[[dict[str, mx.array]], Any], message: str
) -> None:
    head = header()
    made = tensors(head)
    spoil(made)
    with pytest.raises(ValueError, match=message):
        write_stack(tmp_path / "a.safetensors", made, head)
    assert list(tmp_path.iterdir()) == []


def test_full_disk_leaves_nothing(tmp_path: Path) -> None:
    head = header(projections={"layers.0.q": ProjectionShape("linear", 1, 64, 1, 1.0, 8192, 8192)})
    with small_disk(tmp_path / "disk") as place:
        with pytest.raises(TargetError, match="the disk is full"):
            write_stack(place / "a.safetensors", tensors(head), head)
        assert list(place.iterdir()) == []


# --- files that lie --------------------------------------------------------------------------


@pytest.fixture
def good(tmp_path: Path) -> Path:
    head = header()
    write_stack(tmp_path / "good.safetensors", tensors(head), head)
    return tmp_path / "good.safetensors"


def set_in(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda stack: stack.update({key: value})


def first_projection(**values: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda stack: stack["projections"]["model.layers.0.self_attn.q_proj"].update(values)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_in("name", "../../etc/passwd"), "name: String should match"),
        (set_in("name", 3), "name: Input should be a valid string"),
        (set_in("format_version", 2), "format_version is 2, this version reads 1"),
        (set_in("format_version", "1"), "format_version"),
        (set_in("round", True), "round: Input should be a valid integer"),
        (set_in("round", 10**30), "round"),
        (set_in("base_fingerprint", "B" * 64), "base_fingerprint"),
        (set_in("alpha", "16"), "alpha: Input should be a valid number"),
        (set_in("surprise", 1), "surprise: Unexpected keyword"),
        (set_in("projections", {}), "a stack has at least one"),
        (set_in("projections", []), "projections"),
        (set_in("data_sha256", {"x": {"y": []}}), "data_sha256"),
        (lambda stack: stack.pop("domain") and None, "domain: Field required"),
        (first_projection(rank=10**9), "rank"),
        (first_projection(rank=4), "the header says F16"),
        (first_projection(input_dims=-1), "input_dims"),
        (first_projection(num_experts=1), "router': unexpected|the header says"),
        (first_projection(experts_per_token=3), "3 experts per token of 2"),
        (first_projection(base_experts=2), "form linear with base_experts 2"),
        (lambda stack: [stack], "JSON must be an object"),
    ],
)
def test_a_lying_header_is_refused(
    good: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    bad = with_metadata(good, METADATA_KEY, change)
    for read in (read_stack, read_stack_index):
        with pytest.raises(StoreError, match=message) as caught:
            read(bad)
        assert str(bad) in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"a":' * 60 + "1" + "}" * 60,
        '{"a": 1, "a": 2}',
        '{"alpha": NaN}',
        '{"alpha": ' + "9" * 5000 + "}",
        "nonsense",
    ],
)
def test_hostile_metadata_is_refused(tmp_path: Path, text: str) -> None:
    bad = tmp_path / "bad.safetensors"
    bad.write_bytes(file_bytes({"__metadata__": {METADATA_KEY: text}}))
    with pytest.raises(StoreError, match="header: "):
        read_stack(bad)


def test_an_adapter_is_no_stack(tmp_path: Path) -> None:
    mx.save_safetensors(str(tmp_path / "a.safetensors"), {"x": mx.zeros((2,))})
    with pytest.raises(StoreError, match="no stack: its metadata has no key mlxstacks"):
        read_stack(tmp_path / "a.safetensors")
    with pytest.raises(StoreError, match="no such file"):
        read_stack(tmp_path / "gone.safetensors")


def test_nan_in_a_file_is_named(good: Path) -> None:
    data = bytearray(good.read_bytes())
    info = read_header(good).tensors["model.layers.0.self_attn.q_proj.lora_a"]
    data[info.start + 2 : info.start + 4] = np.float16("nan").tobytes()
    good.write_bytes(data)
    with pytest.raises(StoreError, match=r"q_proj.lora_a: NaN or Inf at index \[0, 0, 1\]"):
        read_stack(good)
    assert read_stack(good, known=read_stack_index(good)).header == header()


def test_a_file_that_is_another_than_its_index_says_is_refused(good: Path, tmp_path: Path) -> None:
    """Replaced between the check and the reading: by a stack of other shapes, or by nothing."""
    index = read_stack_index(good)
    shape = next(iter(header().projections.values()))
    head = header(projections={"model.layers.0.self_attn.q_proj": replace(shape, rank=5)})
    write_stack(tmp_path / "other", tensors(head), head)
    (tmp_path / "other").replace(good)
    with pytest.raises(StoreError, match="changed while it was read"):
        read_stack(good, known=index)
    good.unlink()
    with pytest.raises(StoreError, match="cannot be read"):
        read_stack(good, known=index)


def test_no_damage_passes_the_hash(good: Path, campaign: Callable[[int], range]) -> None:
    """Every truncation and bit flip is a StoreError with the hash; without it, never a crash."""
    whole = good.read_bytes()
    sha256 = file_sha256(good)
    chance = random.Random(1)
    for _ in campaign(1000):
        data = bytearray(whole)
        if chance.random() < 0.3:
            data = data[: chance.randrange(len(data))]
        else:
            # the header is a small part of the file and the part that is parsed
            end = 1500 if chance.random() < 0.7 else len(data)
            data[chance.randrange(end)] ^= 1 << chance.randrange(8)
        good.write_bytes(data)
        with pytest.raises(StoreError, match=str(good)):
            read_stack(good, sha256)
        with contextlib.suppress(StoreError):  # any other error is a defect
            read_stack(good)


def test_shared_arrays_round_trip(tmp_path: Path) -> None:
    arrays = {"b": mx.arange(6.0).reshape(2, 3), "a": mx.ones((1,))}
    sha256 = write_arrays(tmp_path / "a.safetensors", arrays)
    found = read_arrays(tmp_path / "a.safetensors", sha256)
    assert all(mx.array_equal(found[name], arrays[name]).item() for name in arrays)
    with pytest.raises(StoreError, match="its bytes changed"):
        read_arrays(tmp_path / "a.safetensors", "0" * 64)
    for bad in ({"x": mx.zeros((1,), mx.float16)}, {"x": mx.array([float("nan")])}):
        with pytest.raises(ValueError, match="cannot be written"):
            write_arrays(tmp_path / "b.safetensors", bad)
    head = header()
    write_stack(tmp_path / "c.safetensors", tensors(head), head)
    with pytest.raises(StoreError, match="is not float32"):
        read_arrays(tmp_path / "c.safetensors")
