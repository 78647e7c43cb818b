"""What the seeds of `mlxstacks psn blocks` say together: conditions, verdict, tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from mlxstacks.stats import mean_interval, share
from mlxstacks.study.document import Block, Columns, Plot, Series, Table, cell_of, counted

LEAST_GAIN, MOST_INSIDE, LEAST_SINGLE, LEAST_MIXED = 0.5, 1e-5, 0.95, 0.90
"""Nats that a block takes off its own domain's loss; share of its last weights inside protected
directions; shares of held-out prompts that the router gets right."""

Cells = Sequence[Mapping[str, Any]]


def concluded(cells: Cells) -> dict[str, Any]:
    """Fields of the result."""
    domains, control = cells[0]["domains"], cells[0]["control"]

    def gains(arm: str, domain: str) -> list[float]:
        return [c["losses"]["base"][domain] - c["losses"][arm][domain] for c in cells]

    least = min(min(gains(name, name)) for name in domains)
    exact = all(c["identical_at_0"] and c["story_loss"] == c["story_loss_at_0"] for c in cells)
    measured = [m for c in cells for m in c["orthogonality"].values()]
    inside = max(m["folded"] for m in measured)
    single = _pooled(cells, "single_right", "single")
    mixed = _pooled(cells, "mixed_right", "mixed")
    structure = _structure(cells)
    effects = {domain: arms["routed"][1] > arms["base"][2] for domain, arms in structure.items()}
    shuffled = f"{control}-shuffled"
    conditions: dict[str, tuple[str, bool | None]] = {
        f"(a) own loss lower by {LEAST_GAIN} nat or more": (
            f"at least {least:.2f} nats", least >= LEAST_GAIN
        ),
        "(a) base bit for bit at weight 0": ("every seed" if exact else "not every seed", exact),
        f"(b) folded orthogonality below {MOST_INSIDE:g}": (
            f"at most {inside:.1e}", inside < MOST_INSIDE
        ),
        f"(c) router right on {LEAST_SINGLE:.0%} of single prompts": (
            _percent(single), single[0] >= LEAST_SINGLE
        ),
        f"(c) set match on {LEAST_MIXED:.0%} of mixed prompts": (
            _percent(mixed), mixed[0] >= LEAST_MIXED
        ),
    }  # fmt: skip
    for domain, arms in structure.items():
        conditions[f"(d) {domain} format: routed above base"] = (
            f"{_percent(arms['routed'])} against {_percent(arms['base'])}", effects[domain]
        )  # fmt: skip
    if shuffled in structure.get(control, {}):
        arms = structure[control]
        # where the block itself shows none, there is nothing to control
        none = arms[shuffled][1] <= arms["base"][2] if effects[control] else None
        conditions["(e) shuffled block shows no such effect"] = (_percent(arms[shuffled]), none)
    asked = {name: holds for name, (_, holds) in conditions.items() if holds is not None}
    failed = [name for name, holds in asked.items() if not holds]
    met = f"{len(asked) - len(failed)} of {len(asked)} conditions hold"
    verdict = f"{met} over {counted(len(cells), 'seed')}"
    verdict += f"; not {', '.join(failed)}." if failed else "."
    slices = [
        mean_interval([c["losses"][f"{d}-slice"][d] - c["losses"][d][d] for c in cells]).as_json()
        for d in domains
    ]
    return {
        "verdict": verdict, "outcome": met,
        "data": {
            "cells": list(cells), "structure": structure, "single": single, "mixed": mixed,
            "slice_less_block": dict(zip(domains, slices, strict=True)),
            "conditions": {n: {"measured": m, "holds": h} for n, (m, h) in conditions.items()},
        },
        "blocks": _blocks(cells, conditions, structure),
    }  # fmt: skip


def _pooled(cells: Cells, right: str, of: str) -> tuple[float, float, float]:
    counts = [sum(c["router"][key] for c in cells) for key in (right, of)]
    return share(counts[0], counts[1])


def _structure(cells: Cells) -> dict[str, dict[str, tuple[float, float, float]]]:
    """Domain -> arm -> share of answers in the format with its interval, over all seeds."""
    return {
        domain: {
            arm: share(
                sum(c["structure"][domain][arm]["in_format"] for c in cells),
                sum(c["structure"][domain][arm]["answers"] for c in cells),
            )
            for arm in arms
        }
        for domain, arms in cells[0]["structure"].items()
    }


def _percent(value: tuple[float, float, float]) -> str:
    return f"{value[0]:.0%} ({value[1]:.0%} to {value[2]:.0%})"


def _blocks(
    cells: Cells,
    conditions: Mapping[str, tuple[str, bool | None]],
    structure: Mapping[str, Mapping[str, tuple[float, float, float]]],
) -> tuple[Block, ...]:
    domains = cells[0]["domains"]

    def interval(values: Sequence[float]) -> Any:
        return cell_of(mean_interval(list(values)).as_json())

    columns: Columns = {"blocks": "text", **dict.fromkeys((*domains, "stories"), ("number", 3))}
    losses = [
        (arm, *(interval([c["losses"][arm][d] for c in cells]) for d in (*domains, "stories")))
        for arm in cells[0]["losses"]
    ]
    of_basis: Columns = {
        "block": "text", "directions": "count", "captured energy": ("number", 3),
        "folded inside": ("number", 9), "output inside": ("number", 9),
    }  # fmt: skip
    bases = [
        (
            name, m["directions"],
            None if m["captured_energy"] is None
            else interval([c["orthogonality"][name]["captured_energy"] for c in cells]),
            max(c["orthogonality"][name]["folded"] for c in cells),
            max(c["orthogonality"][name]["output"] for c in cells),
        )
        for name, m in cells[0]["orthogonality"].items()
    ]  # fmt: skip
    confusion = [
        (a, *(sum(c["router"]["confusion"][a][b] for c in cells) for b in domains)) for a in domains
    ]
    outcomes: dict[tuple[str, str], int] = {}
    for cell in cells:
        for label, found in cell["router"]["outcomes"].items():
            for best, count in found.items():
                outcomes[label, best] = outcomes.get((label, best), 0) + count
    arms = list(dict.fromkeys(arm for of in structure.values() for arm in of))
    shares = [(arm, *(of.get(arm) for of in structure.values())) for arm in arms]
    blocks: list[Block] = [
        Table.of("conditions", "Conditions", {"condition": "text", "measured": "text",
                 "holds": "text"},
                 [(n, m, "not asked" if h is None else "yes" if h else "no")
                  for n, (m, h) in conditions.items()]),
        Table.of("losses", "Loss on held-out rows", columns, losses,
                 caption="Nats per token, means over seeds with 95% intervals. base: no block; "
                 "NAME: that block alone; ungated: a block of each domain; -slice: may write into "
                 "its own slice of the residual stream alone."),
        Table.of("directions", "Protected directions", of_basis, bases,
                 caption="inside: the largest share of the folded weights, and of outputs, in "
                 "protected directions, over seeds."),
        Table.of("confusion", "Router on held-out prompts of one domain",
                 {"prompts of": "text", **dict.fromkeys(domains, "count")}, confusion),
        Table.of("outcomes", "Best sets of blocks", {"prompts of": "text", "best": "text",
                 "prompts": "count"},
                 [(a, b, n) for (a, b), n in sorted(outcomes.items())], folded=True),
    ]  # fmt: skip
    if structure:
        blocks += [
            Table.of("structure", "Answers in the format of their domain",
                     {"blocks": "text", **dict.fromkeys(structure, "share")}, shares,
                     caption="Greedy answers to held-out prompts, with Wilson's 95% intervals over "
                     "all seeds."),
            Plot(id="structure-plot", title="Answers in the format", kind="intervals",
                 series=tuple(Series.of_intervals(domain, [of.get(a) for a in arms], scale=100)
                              for domain, of in structure.items()),
                 categories=tuple(arms), x_label="percent of answers",
                 alt="Share of answers in the format of their domain by arm, with intervals."),
        ]  # fmt: skip
    return tuple(blocks)
