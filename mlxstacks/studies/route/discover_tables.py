"""Figures of a discovery and its tables: which sets win for which label, greedy's gap, controls."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import comb
from typing import Any

from mlxstacks.routing.outcome_files import Outcome, RouterExample, config_text
from mlxstacks.routing.outcomes import Rules, improves, replay
from mlxstacks.routing.random_stack import random_name
from mlxstacks.stats import mean_interval, wilson_interval
from mlxstacks.studies.route.cells import RATE, Head, cell, interval_plot, rate_row, table
from mlxstacks.study.document import Block, Table

# Keys of `Outcome.control`: chat at its floor alone; the best set and the random stack of a domain.
FLOOR, WITH_BEST = "floor", "best+"
NO_LABEL = "others"
_MOST_SETS = 4
_RATE_AND_NATS: tuple[Head, ...] = ("what", *RATE, ("nats", "change", 3))


def label_text(label: Sequence[str]) -> str:
    return config_text(label) or NO_LABEL


def rate(count: int, n: int) -> dict[str, Any]:
    """A share with its Wilson interval; no share of nothing."""
    if n == 0:
        return {"count": count, "n": 0, "share": None, "interval": None}
    interval = wilson_interval(count, n).as_json()
    return {"count": count, "n": n, "share": count / n, "interval": interval}


def counts_of(
    examples: Sequence[RouterExample],
    samples: Sequence[RouterExample],
    dropped: int,
    rules: Rules,
    random_control: bool = False,
) -> dict[str, Any]:
    """Examples and samples by label; rows that stacks were trained on; forward passes.

    passes_expected: with one addition a pair, each domain then tried with a random stack where
    that control is asked for. passes_at_most: the most that search and control take.
    """
    labels = {
        label_text(label): {
            "examples": sum(one.label == label for one in examples),
            "trained_on": sum(one.trained_on for one in examples if one.label == label),
            "samples": sum(one.label == label for one in samples),
            "samples_trained_on": sum(one.trained_on for one in samples if one.label == label),
        }
        for label in dict.fromkeys(one.label for one in examples)
    }
    n = len(rules.domains)
    greedy = (1 + n + comb(n, 2) + len(rules.soft), 2 * n)
    most, usual = (2**n, 2**n) if rules.search == "exhaustive" else greedy
    control = random_control * (2 * n + bool(rules.floor_alone()))
    return {
        "examples": len(examples),
        "trained_on": sum(one.trained_on for one in examples),
        "samples": len(samples),
        "samples_trained_on": sum(one.trained_on for one in samples),
        "discovered_share": len(samples) / len(examples),
        "without_answer": sum(one.answer is None for one in examples),
        "dropped_without_answer_tokens": dropped,
        "passes_expected": (usual + control) * len(samples),
        "passes_at_most": (most + control) * len(samples),
        "labels": labels,
    }


def oracle_table(rules: Rules, outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """For each label: which sets were best how often, which domains were in them, what they gained.

    own: the best set is the label itself. nothing: no set beats the base. own_gain: base loss minus
    the loss with the label's domains alone; None where the search did not ask for it in every pair,
    as greedy for mixed prompts: it asks where the way there looked good.
    """
    rows = []
    for label in dict.fromkeys(outcome.label for outcome in outcomes):
        of_label = [outcome for outcome in outcomes if outcome.label == label]
        n, own = len(of_label), config_text(label)
        sets = Counter(config_text(outcome.best) for outcome in of_label)
        alone = [o.base_loss - o.losses[own] for o in of_label if own in o.losses]
        rows.append({
            "label": label_text(label),
            "n": n,
            "trained_on": sum(outcome.trained_on for outcome in of_label),
            "sets": [{"set": name, **rate(count, n)} for name, count in sets.most_common()],
            "domains": {d: rate(sum(d in o.best for o in of_label), n) for d in rules.domains},
            "own": rate(sets[own], n),
            "label_in_set": rate(sum({*o.label} <= {*o.best} for o in of_label), n),
            "nothing": rate(sets[""], n),
            "base_loss": sum(o.base_loss for o in of_label) / n,
            "best_loss": sum(o.best_loss for o in of_label) / n,
            "gain": mean_interval([o.gain for o in of_label]).as_json(),
            "own_gain": mean_interval(alone).as_json() if label and len(alone) == n else None,
        })  # fmt: skip
    return rows


def greedy_gap(rules: Rules, outcomes: Sequence[Outcome]) -> dict[str, Any] | None:
    """How far greedy is from the best of all sets: how often it finds it, and nats it leaves.

    outcomes: of exhaustive searches, which know the loss of every set. Without the soft boost,
    which is no search for the best set.
    """
    if not outcomes:
        return None
    greedy = replace(rules, search="greedy", soft=())
    found = [
        replay(greedy, {frozenset(filter(None, on.split("+"))): x for on, x in o.losses.items()})
        for o in outcomes
    ]
    left = [search.best_loss - o.best_loss for search, o in zip(found, outcomes, strict=True)]
    same = sum(search.best == {*o.best} for search, o in zip(found, outcomes, strict=True))
    return {
        "same_set": rate(same, len(outcomes)),
        "nats": mean_interval(left).as_json(),
        "largest_nats": max(left),
        "beyond_threshold": rate(sum(x > rules.threshold for x in left), len(left)),
    }


def control_table(rules: Rules, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Random stacks of equal norm beside the real ones.

    chosen: the lowest single loss is a random domain's, and below the base's. helps: some random
    domain is below the base. added: some random domain lowers the best set's loss by more than the
    threshold. real_helps: some real domain alone is below the base. By domain: nats that its random
    twin and it itself take off the base's loss, over all pairs and over those of its label.
    """
    n = len(outcomes)
    twins = [random_name(d) for d in rules.domains]
    best_twin = [min(o.control[twin] for twin in twins) for o in outcomes]
    best_real = [min(o.losses[d] for d in rules.domains) for o in outcomes]
    pairs = list(zip(outcomes, best_twin, best_real, strict=True))
    with_best = [o for o in outcomes if o.best]
    added = sum(
        any(improves(o.control[f"{WITH_BEST}{t}"], o.best_loss, rules.threshold) for t in twins)
        for o in with_best
    )
    floors = [o.base_loss - o.control[FLOOR] for o in outcomes if FLOOR in o.control]
    return {
        "chosen": rate(sum(twin < real and twin < o.base_loss for o, twin, real in pairs), n),
        "helps": rate(sum(twin < o.base_loss for o, twin, _ in pairs), n),
        "real_helps": rate(sum(real < o.base_loss for o, _, real in pairs), n),
        "added": rate(added, len(with_best)),
        "gain": mean_interval([o.base_loss - min(o.base_loss, t) for o, t, _ in pairs]).as_json(),
        "real_gain": mean_interval(
            [o.base_loss - min(o.base_loss, real) for o, _, real in pairs]
        ).as_json(),
        "floor_gain": mean_interval(floors).as_json() if floors else None,
        "domains": {d: _twin_gains(d, outcomes) for d in rules.domains},
    }


def _twin_gains(domain: str, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    gains: dict[str, Any] = {}
    of_label = [o for o in outcomes if o.label == (domain,)]
    for name, chosen in (("all", outcomes), ("own", of_label)):
        twin = [o.base_loss - o.control[random_name(domain)] for o in chosen]
        real = [o.base_loss - o.losses[domain] for o in chosen]
        gains[f"random_gain_{name}"] = mean_interval(twin).as_json() if twin else None
        gains[f"gain_{name}"] = mean_interval(real).as_json() if real else None
    return gains


# --- for people -----------------------------------------------------------------------------------


def count_table(counts: Mapping[str, Any]) -> Table:
    keys = ("examples", "trained_on", "samples", "samples_trained_on")
    rows = ((name, *(row[key] for key in keys)) for name, row in counts["labels"].items())
    return table("counts", "Prompts by label", (
        "label", ("examples", "count"), ("trained on", "count"), ("searched", "count"),
        ("of them trained on", "count"),
    ), rows)  # fmt: skip


def blocks(data: Mapping[str, Any]) -> tuple[Block, ...]:
    """Labels first; then the controls."""
    return (
        *(_label_blocks(data["oracle"]) if data["oracle"] else ()),
        *(_control_tables(data["control"]) if data["control"] else ()),
        *(_gap_tables(data["greedy_gap"]) if data["greedy_gap"] else ()),
        count_table(data["counts"]),
    )


def _label_blocks(oracle: Sequence[Mapping[str, Any]]) -> Iterator[Block]:
    shares, gains = ("own", "label_in_set", "nothing"), ("gain", "own_gain")
    yield table("labels", "Which stacks help, by label", (
        "label", ("pairs", "count"), ("best set is the label", "share", 0),
        ("holds it", "share", 0), ("no set helps", "share", 0), ("gain, nats", "change", 3),
        ("gain of the label alone", "change", 3),
    ), (
        (row["label"], row["n"], *(cell(row[key]) for key in (*shares, *gains))) for row in oracle
    ))  # fmt: skip
    yield table("sets", "Which set lowers the answer's loss most", ("label", "best set", *RATE), (
        (row["label"], best["set"] or "(base)", *rate_row(best))
        for row in oracle for best in row["sets"][:_MOST_SETS]
    ), caption=f"Of each label the {_MOST_SETS} most frequent ones.")  # fmt: skip
    yield interval_plot(
        "gains", "What the best set of stacks takes off the loss",
        {row["label"]: row["gain"] for row in oracle}, "gain, nats a token (right is better)",
        references={"no gain": 0.0},
    )  # fmt: skip


def _control_tables(control: Mapping[str, Any]) -> Iterator[Table]:
    rates = {
        "a random stack would be chosen": "chosen", "some random stack helps": "helps",
        "some real stack helps": "real_helps",
        "a random stack on top of the best set helps": "added",
    }  # fmt: skip
    gains = {
        "mean gain of random stacks": "gain", "mean gain of real stacks": "real_gain",
        "gain of chat at its floor alone": "floor_gain",
    }  # fmt: skip
    yield table("control", "Control: random stacks of equal norm", _RATE_AND_NATS, (
        *((name, *rate_row(control[key]), None) for name, key in rates.items()),
        *((name, None, None, None, cell(control[key])) for name, key in gains.items()),
    ))  # fmt: skip
    keys = ("gain_all", "random_gain_all", "gain_own", "random_gain_own")
    yield table("twins", "Nats gained by one domain alone, and by its random twin", (
        "domain", ("all prompts", "change", 3), ("random", "change", 3),
        ("its own prompts", "change", 3), ("random, its own", "change", 3),
    ), (
        (name, *(cell(row[key]) for key in keys)) for name, row in control["domains"].items()
    ))  # fmt: skip


def _gap_tables(gap: Mapping[str, Any]) -> Iterator[Table]:
    yield table("greedy", "Greedy search against all sets", _RATE_AND_NATS, (
        ("finds the best set", *rate_row(gap["same_set"]), None),
        ("leaves more than the threshold", *rate_row(gap["beyond_threshold"]), None),
        ("nats it leaves", None, None, None, cell(gap["nats"])),
        ("most nats it leaves", None, None, None, gap["largest_nats"]),
    ))  # fmt: skip


def verdict(data: Mapping[str, Any], outcomes: Sequence[Outcome]) -> str:
    counts, gap, control = data["counts"], data["greedy_gap"], data["control"]
    share = f"{100 * counts['discovered_share']:.0f}%"
    parts = [f"{counts['samples']:,} of {counts['examples']:,} targets discovered ({share})."]
    if not outcomes:
        return f"{parts[0]} The rest are plain labels."
    labelled = [o for o in outcomes if o.label]
    if labelled:
        own = rate(sum(o.best == o.label for o in labelled), len(labelled))
        inside = rate(sum({*o.label} <= {*o.best} for o in labelled), len(labelled))
        parts.append(
            f"The best set is the label itself in {_percent(own)}, and holds it in "
            f"{_percent(inside)}."
        )
    parts.append(f"Mean gain {_nats(mean_interval([o.gain for o in outcomes]).as_json())}.")
    if gap:
        parts.append(
            f"Greedy finds the best of all sets in {_percent(gap['same_set'])} and leaves "
            f"{_nats(gap['nats'])}."
        )
    if control:
        parts.append(
            f"Of random stacks of equal norm one would be chosen in {_percent(control['chosen'])}; "
            f"their mean gain is {_nats(control['gain'])}."
        )
        if control["floor_gain"]:
            parts.append(
                "Chat at its floor, which is on beside every stack, real or random, gains "
                f"{_nats(control['floor_gain'])} alone."
            )
    if counts["samples_trained_on"]:
        parts.append(f"A stack was trained on {counts['samples_trained_on']:,} of the rows.")
    return " ".join(parts)


def _percent(rate: Mapping[str, Any]) -> str:
    if rate["share"] is None:
        return "none of 0"
    low, high = (100 * rate["interval"][key] for key in ("low", "high"))
    return f"{100 * rate['share']:.0f}% ({low:.0f} to {high:.0f})"


def _nats(mean: Mapping[str, Any]) -> str:
    if mean["low"] is None:
        return f"{mean['mean']:.3f} nats"
    return f"{mean['mean']:.3f} nats ({mean['low']:.3f} to {mean['high']:.3f})"
