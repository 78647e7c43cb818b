"""Tables of a discovery: counts, which sets win for which label, greedy's gap, random stacks."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import comb
from typing import Any

from mlxstacks.routing.outcome_files import Outcome, RouterExample, config_text
from mlxstacks.routing.outcomes import Found, Rules, improves, replay
from mlxstacks.routing.random_stack import random_name
from mlxstacks.stats import mean_interval, wilson_interval
from mlxstacks.studies.route.discover_control import FLOOR, WITH_BEST

NO_LABEL = "others"


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


def greedy_gap(rules: Rules, found: Sequence[Found]) -> dict[str, Any] | None:
    """How far greedy is from the best of all sets: how often it finds it, and nats it leaves.

    found: of exhaustive searches, which know the loss of every set. Without the soft boost, which
    is no search for the best set.
    """
    if not found:
        return None
    greedy = [replay(replace(rules, search="greedy", soft=()), one.losses) for one in found]
    left = [one.best_loss - all_.best_loss for one, all_ in zip(greedy, found, strict=True)]
    same = sum(one.best == all_.best for one, all_ in zip(greedy, found, strict=True))
    return {
        "same_set": rate(same, len(found)),
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
    of_label = [o for o in outcomes if o.label == (domain,)]
    found: dict[str, Any] = {}
    for name, chosen in (("all", outcomes), ("own", of_label)):
        twin = [o.base_loss - o.control[random_name(domain)] for o in chosen]
        real = [o.base_loss - o.losses[domain] for o in chosen]
        found |= {
            f"random_gain_{name}": mean_interval(twin).as_json() if twin else None,
            f"gain_{name}": mean_interval(real).as_json() if real else None,
        }
    return found


def verdict(
    counts: dict[str, Any],
    outcomes: Sequence[Outcome],
    gap: dict[str, Any] | None,
    control: dict[str, Any] | None,
) -> str:
    """What was found, in words."""
    share = f"{100 * counts['discovered_share']:.0f}%"
    said = [f"{counts['samples']:,} of {counts['examples']:,} targets discovered ({share})."]
    if not outcomes:
        return f"{said[0]} The rest are plain labels."
    labelled = [o for o in outcomes if o.label]
    if labelled:
        own = rate(sum(o.best == o.label for o in labelled), len(labelled))
        inside = rate(sum({*o.label} <= {*o.best} for o in labelled), len(labelled))
        said.append(
            f"The best set is the label itself in {_percent(own)}, and holds it in "
            f"{_percent(inside)}."
        )
    gain = mean_interval([o.gain for o in outcomes])
    said.append(f"Mean gain {_nats(gain.as_json())}.")
    if gap:
        said.append(
            f"Greedy finds the best of all sets in {_percent(gap['same_set'])} and leaves "
            f"{_nats(gap['nats'])}."
        )
    if control:
        said.append(
            f"Of random stacks of equal norm one would be chosen in {_percent(control['chosen'])}; "
            f"their mean gain is {_nats(control['gain'])}."
        )
        if control["floor_gain"]:
            said.append(
                "Chat at its floor, which is on beside every stack, real or random, gains "
                f"{_nats(control['floor_gain'])} alone."
            )
    if counts["samples_trained_on"]:
        said.append(f"A stack was trained on {counts['samples_trained_on']:,} of the rows.")
    return " ".join(said)


def _percent(found: dict[str, Any]) -> str:
    if found["share"] is None:
        return "none of 0"
    low, high = (100 * found["interval"][key] for key in ("low", "high"))
    return f"{100 * found['share']:.0f}% ({low:.0f} to {high:.0f})"


def _nats(found: dict[str, Any]) -> str:
    if found["low"] is None:
        return f"{found['mean']:.3f} nats"
    return f"{found['mean']:.3f} nats ({found['low']:.3f} to {found['high']:.3f})"
