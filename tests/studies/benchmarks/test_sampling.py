"""Laws of the sample. Run: pytest tests/studies/benchmarks/test_sampling.py"""

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.errors import InputError
from mlxstacks.studies.benchmarks.items import sample_items
from mlxstacks.studies.benchmarks.tasks import BenchItem


def items_of(counts: Mapping[str, int]) -> list[BenchItem]:
    """In the order of their strata, as MMLU's are."""
    return [
        BenchItem(f"{name}/{index}", "prompt", 0, (" a", " b"), stratum=name)
        for name, count in counts.items()
        for index in range(count)
    ]


COUNTS = st.dictionaries(st.sampled_from("uvwxyz"), st.integers(1, 30), min_size=1)


@given(COUNTS, st.integers(1, 60), st.integers(0, 99), st.randoms(use_true_random=False))
def test_the_sample_hangs_on_the_seed_and_not_on_the_order(
    counts: dict[str, int], limit: int, seed: int, rng: "object"
) -> None:
    items = items_of(counts)
    drawn = sample_items(items, limit, seed)
    assert sample_items(items, limit, seed) == drawn
    moved = list(items)
    rng.shuffle(moved)  # type: ignore[attr-defined]
    again = sample_items(moved, limit, seed)
    assert {item.item_id for item in again} == {item.item_id for item in drawn}


def test_another_seed_gives_another_sample() -> None:
    items = items_of({"a": 50, "b": 50})
    samples = {tuple(i.item_id for i in sample_items(items, 20, seed)) for seed in range(10)}
    assert len(samples) == 10


def test_a_larger_sample_of_a_stratum_holds_the_smaller() -> None:
    items = items_of({"": 100})
    small, large = ({i.item_id for i in sample_items(items, n, 0)} for n in (10, 40))
    assert small < large


def test_the_first_rows_are_of_the_first_strata() -> None:
    """What the published run took of MMLU: two subjects of 57."""
    items = items_of({f"subject {place:02d}": 120 for place in range(57)})
    first = sample_items(items, 200, 0, first=True)
    assert first == items[:200]
    assert len({item.stratum for item in first}) == 2
    assert len({item.stratum for item in sample_items(items, 200, 0)}) == 57
    assert sample_items(items, None, 0, first=True) == items == sample_items(items, None, 0)


def test_what_cannot_be_sampled() -> None:
    with pytest.raises(InputError, match="no items to sample"):
        sample_items([], 5, 0)
