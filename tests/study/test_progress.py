"""Parts of a run are one count. Run: pytest tests/study/test_progress.py"""

from mlxstacks.study.progress import WholeProgress


def test_parts_are_scaled_to_their_place_in_the_whole() -> None:
    told: list[tuple[float, float, str]] = []
    whole = WholeProgress(lambda *given: told.append(given), 10)
    first, second = whole.part(4, "mining"), whole.part(2, "training")
    first(1, 2, "detail")
    again = whole.part(4, "mining")
    again(2, 2)  # once more says nothing, and takes no place
    second(3, 3)
    whole.part(5, "more than was planned")(1, 1)
    whole.part(1, "the last")(1, 1)
    assert told == [
        (2, 10, "mining"), (6, 10, "training"), (8, 10, "more than was planned"),
        (9, 10, "the last"),
    ]  # fmt: skip
    WholeProgress(None, 1).part(1, "silent")(1, 1)


def is_one_count(told: list[tuple[float, float]]) -> bool:
    """Whether one bar went up, to all or nearly so, once something was done."""
    told = [(done, total) for done, total in told if done]
    done, totals = [done for done, _ in told], {total for _, total in told}
    return len(totals) == 1 and done == sorted(done) and done[-1] > 0.8 * totals.pop()
