"""Bits by measured KL: the search, and a fuse that reaches its target.

Run: pytest tests/studies/agreement/test_allocate.py
"""

import json
from collections.abc import Mapping
from itertools import pairwise, product
from pathlib import Path

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.agreement import read_passages, refer
from mlxstacks.fuse.blocks import Decision
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.nano.exports import nano_paths
from mlxstacks.studies.agreement import allocate as allocation_module
from mlxstacks.studies.agreement.allocate import (
    Maker,
    Option,
    _choices,
    _search,
    allocate,
    swap_in,
)
from mlxstacks.studies.agreement.run import load
from tests.cli.conftest import Run, command
from tests.fuse.test_in_memory import raw
from tests.studies.agreement.test_run import rows

__all__ = ["command", "rows"]


def option(bits: int, nbytes: int, kl: float) -> Option:
    return Option(Decision("promote", bits), nbytes, kl)


sizes = st.dictionaries(st.integers(1, 50), st.floats(0, 1), min_size=1, max_size=4)
tables = st.dictionaries(
    st.sampled_from("abcde"),
    sizes.map(lambda kls: [option(4, nbytes, kl) for nbytes, kl in kls.items()]),
    min_size=1,
)


def total(choice: Mapping[str, Option]) -> tuple[int, float]:
    return sum(o.nbytes for o in choice.values()), sum(o.kl for o in choice.values())


@given(tables)
def test_each_choice_costs_more_and_loses_less(table: dict[str, list[Option]]) -> None:
    sums = [total(choice) for choice in _choices(table)]
    for (old, old_kl), (new, new_kl) in pairwise(sums):
        assert new > old
        assert new_kl < old_kl
    slopes = [(a[1] - b[1]) / (b[0] - a[0]) for a, b in pairwise(sums)]
    assert all(first >= second - 1e-9 for first, second in pairwise(slopes))


@given(tables)
def test_no_combination_is_below_the_line_through_the_choices(
    table: dict[str, list[Option]],
) -> None:
    """All combinations, tried: the choices are the corners of their lower convex hull."""
    sums = [total(choice) for choice in _choices(table)]
    for combination in product(*table.values()):
        nbytes, kl = total(dict(zip(table, combination, strict=True)))
        for (left, left_kl), (right, right_kl) in pairwise(sums):
            if left <= nbytes <= right:
                share = (nbytes - left) / (right - left)
                assert kl >= left_kl + share * (right_kl - left_kl) - 1e-9


@given(tables, st.floats(0.01, 2), st.floats(0.2, 5))
def test_what_is_taken_was_measured_to_reach_the_target_or_is_the_widest(
    table: dict[str, list[Option]], target: float, factor: float
) -> None:
    """Where measured KL is a multiple of the estimate, as where errors are not independent."""
    found = _search(table, target, lambda choice: factor * total(choice)[1])
    widest = total(list(_choices(table))[-1])
    assert len(found.rounds) <= allocation_module._MOST_ROUNDS + 1
    if found.measured > target:
        assert total(found.options) == widest
    cheapest = next((s for s in found.path if factor * s[1] <= target), widest)
    if found.measured <= target:  # as cheap as can be, or next to the target
        near = found.measured >= allocation_module._GOOD_ENOUGH * target
        assert near or total(found.options) == cheapest
    assert found.measured == factor * total(found.options)[1]


def test_the_model_is_as_before_and_the_widest_is_told(rows: Path) -> None:
    paths = nano_paths()
    model, tokenizer, _ = load(paths.model_path, (str(paths.adapter_path),))
    before = raw(model)
    records = [json.loads(line) for line in rows.read_text().splitlines()]
    passages = read_passages(records, model, tokenizer, answer_tokens=8, most_tokens=32)
    reference = refer(model, passages)
    settings = FuseSettings(
        model=str(paths.model_path), adapter_path=(str(paths.adapter_path),), target_kl=1e-9
    )
    found = allocate(model, reference, settings)
    assert raw(model) == before
    assert {o.decision.bits for o in found.options.values()} == {8}
    assert found.measured > 1e-9
    text = allocation_module.note(found, 1e-9)
    assert text is not None
    assert "out of reach: the widest, 8 bits, reach" in text
    loose = allocate(model, reference, settings.model_copy(update={"target_kl": 10.0}))
    assert {o.decision.bits for o in loose.options.values()} == {3}
    assert loose.bits()[0].endswith("down_proj=3")


def test_a_fuse_reaches_its_target_for_fewer_bytes_than_the_rule(rows: Path, command: Run) -> None:
    given = ("--judge", str(rows), "--json")
    code, out, err = command("fuse", "--save-path", "ruled", *given)
    assert code == 0, err
    by_rule = json.loads(out)["data"]["extra_bytes"]
    code, out, err = command("fuse", "--save-path", "fused", "--target-kl", "0.1", *given)
    assert code == 0, err
    document = json.loads(out)
    target = document["data"]["target_kl"]
    measured = document["data"]["behaviour"]["this fuse"]["all"]["kl_nats"]
    assert measured == pytest.approx(target["measured_kl_nats"], rel=1e-3)
    assert measured <= 0.1
    assert document["data"]["extra_bytes"] < by_rule
    assert [block.get("id") for block in document["blocks"][:4]] == [
        "behaviour", "target-kl", "target-kl-tries", "kl-by-bytes"
    ]  # fmt: skip
    assert document["settings"]["target_kl"] == 0.1
    assert "below the target of 0.98" not in document["verdict"]
    code, out, err = command("fuse", "--save-path", "plan", "--target-kl", "0.1", "--dry-run")
    assert code == 0, err
    assert "Bits for a KL of 0.1" in out
    assert not Path("plan").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--requant", "refit"), "leave requant refit"),
        (("--judge", "none"), "judge none out"),
        (("--bits", "*=8"), "leave --bits out"),
    ],
)
def test_what_contradicts_a_target_is_refused(
    options: tuple[str, ...], said: str, rows: Path, command: Run
) -> None:
    code, _, err = command("fuse", "--save-path", "fused", "--target-kl", "0.1", *options)
    assert code == 2
    assert said in err


def test_measuring_a_module_sets_no_arrays_of_another(rows: Path) -> None:
    """One module at a time is fused: all others keep their unfused adapter."""
    paths = nano_paths()
    model, _, _ = load(paths.model_path, (str(paths.adapter_path),))
    settings = FuseSettings(model=str(paths.model_path), adapter_path=(str(paths.adapter_path),))
    checkpoint = allocation_module.open_checkpoint(paths.model_path)
    modules, _ = allocation_module.gather_modules(checkpoint, settings)
    before = raw(model)
    swap = swap_in(model)
    with allocation_module.ThreadPoolExecutor(1) as pool:
        make = Maker(settings, pool)
        with swap(modules[0], make(modules[0], Decision("nearest", 3))):
            inside = raw(model)
    changed = {
        name for name in before.keys() | inside.keys() if before.get(name) != inside.get(name)
    }
    assert changed
    assert all(name.startswith(modules[0].path) for name in changed)
    assert raw(model) == before
    mx.eval(model.parameters())
