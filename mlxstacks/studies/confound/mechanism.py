"""Whom a fuse of zeros moves: answers by how close they were before, and by width of the codes.

Of the run's own fuses this follows from answers that are there anyway; `widths` adds refits of
zeros of plain weights that were quantized at each width.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from mlxstacks.settings import Normalisation
from mlxstacks.stats import mcnemar_of_pairs, share
from mlxstacks.studies.confound.plan import PERSONA, SECOND, arm, width_arms
from mlxstacks.study.answers import Answer
from mlxstacks.study.document import Block, Columns, Plot, Series, Table

# Of a margin: its unit, and where bins end.
UNITS: dict[Normalisation, tuple[str, tuple[float, ...]]] = {
    "sum": ("nats", (0.25, 0.5, 1.0, 2.0, 4.0)),
    "token": ("nats per token", (0.05, 0.1, 0.2, 0.4, 0.8)),
    "character": ("nats per character", (0.01, 0.02, 0.04, 0.08, 0.16)),
}
Parts = Mapping[str, Mapping[str, Sequence[Answer]]]


class Pair(NamedTuple):
    """An item before and after. scores: of its options, before. hard: base and persona both got it
    wrong when Set G was mined; the others both right.
    """

    before: Answer
    after: Answer
    scores: Sequence[float]
    hard: bool

    @property
    def moved(self) -> bool:
        return self.before.pick != self.after.pick

    @property
    def first(self) -> int:
        """The answer before; of a tie, or where none was found, the likeliest option."""
        if self.before.pick is not None:
            return self.before.pick
        return max(range(len(self.scores)), key=self.scores.__getitem__)

    @property
    def second(self) -> int:
        others = (place for place in range(len(self.scores)) if place != self.first)
        return max(others, key=self.scores.__getitem__)

    @property
    def margin(self) -> float:
        """Score of the first choice less that of the second; below 0 where another option is
        likelier than the answer, which is generated.
        """
        return self.scores[self.first] - self.scores[self.second]


def mechanism(
    answers: Parts,
    ways: Sequence[str],
    widths: Sequence[int],
    codes: Mapping[str, Any],
    normalisation: Normalisation = "sum",
) -> dict[str, Any]:
    """answers: part -> arm -> answers. codes: row -> share of the codes that its fuse changes.
    normalisation: of the scores.

    fuses: row -> figures, of each policy and each width. growth: whether fewer bits move more.
    """
    rows = {
        way: _pairs(answers, PERSONA, arm("a0", way), ("test", "right"))
        for way in ways
        if way != "unfused"
    }
    of_widths = {
        f"{bits} bits": _pairs(answers, *width_arms(bits), ("hard", "easy"))
        for bits in sorted(widths, reverse=True)
    }
    unit, edges = UNITS[normalisation]
    figures = {name: _figures(pairs, edges) for name, pairs in (rows | of_widths).items() if pairs}
    return {
        "margins": {"unit": unit, "edges": [*edges]},
        "fuses": {name: row | {"codes_changed": codes.get(name)} for name, row in figures.items()},
        "growth": _growth(of_widths) if len(widths) > 1 else None,
    }


def _pairs(answers: Parts, before: str, after: str, parts: tuple[str, str]) -> list[Pair]:
    """parts: the one of hard items, and the one of easy ones."""
    pairs = []
    for part in parts:
        given = answers.get(part, {})
        if not given.get(before) or not given.get(after):
            continue
        # Generated answers have no scores; the persona's second choices, which have, are of all
        # options.
        scored = given.get(SECOND, given[before]) if before == PERSONA else given[before]
        for first, then, scores in zip(given[before], given[after], scored, strict=True):
            if scores.scores:
                pairs.append(Pair(first, then, scores.scores, part == parts[0]))
    return pairs


def _figures(pairs: Sequence[Pair], edges: Sequence[float]) -> dict[str, Any]:
    """Each [count, of how many]."""

    def counted(of: Sequence[Pair], test: Any = lambda pair: pair.moved) -> list[int]:
        return [sum(map(bool, map(test, of))), len(of)]

    by_margin: list[list[Pair]] = [[] for _ in range(len(edges) + 1)]
    for pair in pairs:
        by_margin[sum(pair.margin >= edge for edge in edges)].append(pair)
    wrong = [pair for pair in pairs if not pair.before.correct]
    return {
        "moved": counted(pairs),
        "moved_by_margin": [counted(of_bin) for of_bin in by_margin],
        "moved_of_hard": counted([pair for pair in pairs if pair.hard]),
        "moved_of_easy": counted([pair for pair in pairs if not pair.hard]),
        "to_second_choice": counted(
            [pair for pair in pairs if pair.moved], lambda pair: pair.after.pick == pair.second
        ),
        "wrong_corrected": counted(wrong, lambda pair: pair.after.correct),
        "wrong_second_choice_right": counted(wrong, lambda p: p.second == p.before.gold),
        "right_broken": counted(
            [pair for pair in pairs if pair.before.correct], lambda pair: not pair.after.correct
        ),
    }  # fmt: skip


def _growth(of_widths: Mapping[str, Sequence[Pair]]) -> dict[str, Any]:
    """Answers moved, from the widest codes to the narrowest; p: McNemar's exact test of these two
    on the same items.
    """
    moved = {name: [pair.moved for pair in pairs] for name, pairs in of_widths.items()}
    widest, *_, narrowest = moved.values()
    return {
        "moved": {name: sum(of_width) for name, of_width in moved.items()},
        "n": len(widest),
        "p": mcnemar_of_pairs(widest, narrowest).p_value,
    }


def growth_in_words(figures: Mapping[str, Any], alpha: float) -> str:
    """Whether the artifact grows as bits get fewer, as the paper says."""
    growth = figures["growth"]
    counts, n = growth["moved"], growth["n"]
    listed = ", ".join(f"{name} {count / n:.1%}" for name, count in counts.items())
    widest, *_, narrowest = counts
    more = counts[narrowest] - counts[widest]
    if growth["p"] >= alpha:
        answer = f"no growth from {widest} to {narrowest} is shown"
    else:
        answer = f"{'more' if more > 0 else 'fewer'} at {narrowest} than at {widest}"
        if more > 0:
            answer += ", as the paper says"
            if [*counts.values()] != sorted(counts.values()):
                answer += ", but not at each step"
    return (
        f"A refit of zeros moves, of {n} answers at each width, {listed}: {answer} (McNemar p = "
        f"{growth['p']:.2g})."
    )


def mechanism_blocks(figures: Mapping[str, Any]) -> Iterator[Block]:
    """Nothing where no arm has scores."""
    fuses = figures["fuses"]
    if not fuses:
        return
    by_margin = {name: fuse["moved_by_margin"] for name, fuse in fuses.items()}
    title = "Answers that a fuse of zeros moves, by their margin before"
    unit, edges = figures["margins"]["unit"], figures["margins"]["edges"]
    bins = (*(f"to {edge:g}" for edge in edges), f"over {edges[-1]:g}")
    moved = ", ".join("{} {} of {}".format(name, *fuse["moved"]) for name, fuse in fuses.items())
    yield Plot(
        id="margins", title=title, kind="heat map", categories=bins, x_label=f"margin, {unit}",
        y_label="fuse of zeros", unit="percent moved", form="{:.0f}", limits=(0.0, None),
        series=tuple(
            Series(label=name, y=tuple(100 * k / n if n else None for k, n in counts))
            for name, counts in by_margin.items()
        ),
        alt=f"{title}. Moved of all: {moved}.",
    )  # fmt: skip
    shares = {
        "moved (95%)": "moved", "of both wrong": "moved_of_hard", "of both right": "moved_of_easy",
        "to second choice": "to_second_choice", "wrong, corrected": "wrong_corrected",
        "second choice right": "wrong_second_choice_right", "right, broken": "right_broken",
    }  # fmt: skip
    columns: Columns = {
        "fuse of zeros": "text", "items": "count", **dict.fromkeys(shares, "share"),
        "codes changed": ("share", 2),
    }  # fmt: skip
    yield Table.of(
        "mechanism", "Whom a fuse of zeros moves", columns,
        [
            (name, fuse["moved"][1], *(share(*fuse[key]) if fuse[key][1] else None
             for key in shares.values()), fuse["codes_changed"])
            for name, fuse in fuses.items()
        ],
        folded=not figures["growth"],
        caption="Of all answers, moved ones; of items that base and persona both got wrong, and "
        "both right; of moved answers, those that went to the second choice; of answers that were "
        "wrong before, those corrected, and those whose second choice is right, which a blind move "
        "corrects; of right ones, those broken. N bits: plain weights, quantized to so many.",
    )  # fmt: skip
    yield Table.of(
        "margins-table", "Moved, by margin before",
        {f"margin, {unit}": "text"} | dict.fromkeys(fuses, "text"),
        [
            (name, *("{} of {}".format(*counts[place]) for counts in by_margin.values()))
            for place, name in enumerate(bins)
        ],
        folded=True, caption="Margin: score of the first choice less that of the second.",
    )  # fmt: skip
