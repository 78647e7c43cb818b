"""Router files: bit-exact, deterministic, believed only after every check.

pytest tests/files/test_router_file.py
"""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxstacks.errors import StoreError
from mlxstacks.files.router_file import (
    METADATA_KEY,
    RouterHeader,
    read_router,
    router_shapes,
    write_router,
)
from mlxstacks.files.shards import read_header
from mlxstacks.files.stack_file import hash_file, read_stack, write_stack
from tests.files.raw import with_metadata
from tests.files.router_cases import router_header, router_tensors
from tests.files.store_cases import header as stack_header
from tests.files.store_cases import tensors as stack_tensors

NAMES = st.lists(st.from_regex(r"[a-z][a-z0-9_.-]{0,7}", fullmatch=True), min_size=1, max_size=5,
                 unique=True)  # fmt: skip


@given(
    names=NAMES,
    dims=st.tuples(st.integers(1, 9), st.integers(1, 5)),
    floats=st.tuples(st.floats(0, 1), st.floats(0, 1), st.floats(-10, 10)),
    chat=st.booleans(),
)
@settings(max_examples=settings().max_examples // 2)
def test_round_trip_is_bit_exact(
    tmp_path_factory: pytest.TempPathFactory,
    names: list[str],
    dims: tuple[int, int],
    floats: tuple[float, float, float],
    chat: bool,
) -> None:
    path = tmp_path_factory.mktemp("router") / "a.safetensors"
    head = router_header(
        domains=tuple(names), stacks=dict.fromkeys(names, ("a" * 64,)), input_dims=dims[0],
        hidden_dims=dims[1], chat_domain=names[-1] if chat else None, chat_floor=floats[0],
        threshold=floats[1], mid_weight=floats[2],
    )  # fmt: skip
    made = router_tensors(head)
    sha256 = write_router(path, made, head)
    found = read_router(path, sha256)
    assert found.header == head
    assert found.tensors.keys() == made.keys()
    for name, array in made.items():
        assert found.tensors[name].dtype == mx.float32
        assert mx.array_equal(found.tensors[name], array).item()
    assert RouterHeader.from_json(json.loads(json.dumps(head.as_json()))) == head


def test_parameters_are_those_of_the_published_count() -> None:
    for input_dims, domains, count in ((3840, 5, 2_761_730), (2048, 4, 1_843_714)):
        shapes = router_shapes(input_dims, domains)
        assert sum(math.prod(shape) for shape in shapes.values()) == count
        assert count == 512 * input_dims + 512 * domains + 793_090


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        (mx.zeros((3, 4)), r"F32 \[3, 4\], the header says F32 \[2, 4\]"),
        (mx.zeros((2, 4), mx.float16), "F16 .*the header says F32"),
    ],
)
def test_what_does_not_fit_the_header_is_not_written(
    tmp_path: Path, tensor: mx.array, message: str
) -> None:
    """What else a header refuses is of all files of a store: test_stack_file.py."""
    head = router_header()
    with pytest.raises(ValueError, match=f"router cannot be written.*\n.*{message}"):
        write_router(tmp_path / "a", router_tensors(head) | {"domain_queries": tensor}, head)
    assert list(tmp_path.iterdir()) == []


def test_a_header_that_contradicts_itself_is_not_written(tmp_path: Path) -> None:
    for changes, message in (
        ({"chat_domain": "law"}, "chat_domain law is none of the domains"),
        ({"domains": ("chat",)}, "stacks and domains differ in code"),
        ({"domains": ("chat", "Chat", "code")}, "chat is named twice"),
        ({"threshold": 1.5}, "threshold"),
        ({"base_fingerprint": "nonsense"}, "base_fingerprint"),
    ):
        head = router_header(**changes)
        with pytest.raises(ValueError, match=message):
            write_router(tmp_path / "a.safetensors", router_tensors(head), head)
    assert list(tmp_path.iterdir()) == []


# --- files that lie --------------------------------------------------------------------------


@pytest.fixture
def good(tmp_path: Path) -> Path:
    head = router_header()
    write_router(tmp_path / "good.safetensors", router_tensors(head), head)
    return tmp_path / "good.safetensors"


def set_in(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda router: router.update({key: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (set_in("domains", []), "domains"),
        (set_in("domains", "chat"), "domains"),
        (set_in("domains", ["chat", "../../etc/passwd"]), "domains.1: String should match"),
        (set_in("domains", ["chat", "chat"]), "chat is named twice"),
        (set_in("domains", ["code"]), "stacks and domains differ in chat"),
        (set_in("domains", [f"d{i}" for i in range(2000)]), "domains"),
        (set_in("stacks", {"chat": ["a" * 64], "code": ["short"]}), "stacks.code.0"),
        (set_in("format_version", 2), "format_version is 2, this version reads 1"),
        (set_in("input_dims", 0), "input_dims"),
        (set_in("input_dims", 7), "the header says F32"),
        (set_in("threshold", -0.1), "threshold"),
        (set_in("chat_domain", "law"), "chat_domain law is none of the domains"),
        (set_in("max_tokens", 0), "max_tokens"),
    ],
)
def test_a_lying_header_is_refused(
    good: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    bad = with_metadata(good, METADATA_KEY, change)
    with pytest.raises(StoreError, match=message) as caught:
        read_router(bad)
    assert str(bad) in str(caught.value)
    assert "route train" in str(caught.value)


def test_a_stack_is_no_router_and_the_other_way_round(good: Path, tmp_path: Path) -> None:
    head = stack_header()
    write_stack(tmp_path / "stack.safetensors", stack_tensors(head), head)
    with pytest.raises(StoreError, match="no router: its metadata has no key mlxstacks-router"):
        read_router(tmp_path / "stack.safetensors")
    with pytest.raises(StoreError, match="no stack: its metadata has no key mlxstacks"):
        read_stack(good)
    with pytest.raises(StoreError, match="no such file"):
        read_router(tmp_path / "gone.safetensors")


def test_a_changed_file_is_refused_by_its_hash_or_its_numbers(good: Path) -> None:
    data = bytearray(good.read_bytes())
    sha256 = hash_file(good, "")
    info = read_header(good).tensors["token.weight"]
    data[info.start + 4 : info.start + 8] = np.float32("inf").tobytes()
    good.write_bytes(data)
    with pytest.raises(StoreError, match=f"{good}: its bytes changed"):
        read_router(good, sha256)
    with pytest.raises(StoreError, match=r"token.weight: NaN or Inf at index \[0, 1\]"):
        read_router(good)
