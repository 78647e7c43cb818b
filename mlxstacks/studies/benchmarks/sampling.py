"""Which items of a benchmark are asked: the same for every mode, by seed and subject."""

from collections.abc import Sequence

from mlxstacks.errors import InputError
from mlxstacks.studies.benchmarks.types import BenchItem
from mlxstacks.study.items import Item, stratified_sample


def sample_items(
    items: Sequence[BenchItem], limit: int | None, seed: int, *, first: bool = False
) -> list[BenchItem]:
    """At most `limit` items in the order of the source, each stratum in proportion to its share.

    first: the first rows instead, as published; MMLU is in the order of its subjects, so that these
    are of one or two of them.

    Laws: strata differ from their exact share by less than one item; the same seed gives the same
    items; whether an item is drawn does not hang on the order of the others.

    Raises: InputError where there are no items, or the limit is below 1.
    """
    if not items:
        raise InputError("no items to sample; the data holds none, or a filter left none")
    if limit is not None and limit < 1:
        raise InputError(f"got limit {limit}; give 1 or more, or none for all items")
    if first:
        return list(items[:limit])
    by_id = {item.item_id: item for item in items}
    if len(by_id) < len(items):
        raise ValueError(f"{len(items)} items have {len(by_id)} ids; each needs one of its own")
    drawn = stratified_sample(
        [Item(item.item_id, item.stratum, "", (), 0) for item in items], limit, seed
    )
    return [by_id[item.item_id] for item in drawn]
