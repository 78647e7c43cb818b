"""The three panels: after one domain, all domains ungated, all domains routed.

Each has losses by group, out of the matrix, and greedy answers to a few held-out prompts. What was
published as pictures of one prompt each: an answer that was good after the first domain, broken
when all stacks are on, and good again when they are routed.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mlxstacks.routing.route import Route
from mlxstacks.studies.route.evaluate_matrix import Estimate
from mlxstacks.studies.route.evaluate_modes import fixed_weights
from mlxstacks.studies.route.evaluate_rows import EvaluatedRow
from mlxstacks.studies.route.evaluate_served import Served, weighted

# Panel -> mode of its losses and answers.
PANELS = {"after one domain": "prefix", "all, ungated": "ungated", "all, routed": "routed"}


def panels_json(
    matrix: Mapping[str, Mapping[str, Estimate]], samples: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Panel -> losses by group, and how many sample answers are exactly right."""
    found = {}
    for panel, mode in PANELS.items():
        right = [sample["answers"][panel]["right"] for sample in samples]
        found[panel] = {
            "mode": mode,
            "losses": {group: e.value for group, e in matrix[mode].items()},
            "exactly_right": sum(right),
            "samples": len(right),
        }
    return found


def answer_samples(
    served: Served,
    rows: Sequence[EvaluatedRow],
    routes: Sequence[Route],
    per_group: int,
    max_tokens: int,
) -> list[dict[str, Any]]:
    """The first rows of each group, answered greedily by the base and in every panel."""
    chosen: list[int] = []
    taken: dict[str, int] = {}
    for place, row in enumerate(rows):
        taken[row.group] = taken.get(row.group, 0) + 1
        if taken[row.group] <= per_group:
            chosen.append(place)
    samples = []
    for place in chosen:
        row, route = rows[place], routes[place]
        answers = {}
        for panel, mode in {"base": "base", **PANELS}.items():
            weights = (
                route.weights
                if mode == "routed"
                else fixed_weights(mode, row.example.label, served.domains)
            )
            text = served.answer(row.example.prompt, weighted(weights), max_tokens)
            right = row.example.answer is not None and _plain(text) == _plain(row.example.answer)
            answers[panel] = {"text": text, "right": right}
        samples.append({
            "group": row.group, "prompt": row.example.prompt, "expected": row.example.answer,
            "weights": dict(route.weights), "answers": answers,
        })  # fmt: skip
    return samples


def _plain(text: str) -> str:
    return " ".join(text.split())
