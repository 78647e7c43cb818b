"""From choices of every prompt to the tables of a profile, each beside what chance gives."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxstacks.studies.profile.null import (
    Null,
    adjusted_p_values,
    group_counts,
    p_value,
    random_sets_jaccard,
    shuffled,
    split_halves,
)
from mlxstacks.studies.profile.routing_profile import (
    MOST_TOP_LAYERS,
    Measures,
    chance_jaccard,
    mean_of_pairs,
    measure,
    membership,
    pairwise_divergence,
    set_jaccard,
    shares,
    top_layers,
)
from mlxstacks.studies.profile.settings import DIFFERENT_BELOW, HALVES_MARGIN, SHARED_ABOVE


@dataclass(frozen=True)
class Rule:
    """How a profile is judged; see ProfileSettings for what each is."""

    top_layers: int
    top_experts: int
    permutations: int
    halves: int
    alpha: float
    seed: int


@dataclass(frozen=True, eq=False)
class Choices:
    """documents (n, L, E), labels (n,) into `names`, tokens (n,); layers: numbers of the L."""

    documents: np.ndarray
    labels: np.ndarray
    tokens: np.ndarray
    names: tuple[str, ...]
    layers: tuple[int, ...]

    @property
    def counts(self) -> np.ndarray:
        """(S, L, E)."""
        return group_counts(self.documents, self.labels, len(self.names))


def analyse(
    choices: Choices, rule: Rule, tick: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """The tables as JSON values; layers by their numbers in the model.

    Raises: ValueError: no layer or expert to choose from, or k above the number of layers.
    """
    layers, groups = len(choices.layers), len(choices.names)
    if rule.top_layers > layers:
        raise ValueError(f"top_layers is {rule.top_layers}; {layers} layers have experts")
    ks = sorted({*range(1, min(MOST_TOP_LAYERS, layers) + 1), rule.top_layers})
    counts = choices.counts
    found = measure(counts, ks, rule.top_experts)
    null = shuffled(
        choices.documents, choices.tokens, groups, ks, rule.top_experts, rule.permutations,
        rule.seed, tick,
    )  # fmt: skip
    return {
        "divergence": _divergence(choices, found, null),
        "layers": _layers(choices, found, null),
        "pairwise_kl_nats": pairwise_divergence(shares(counts)).tolist(),
        "top_layers": _tops(choices, found, null, rule),
        "jaccard": {str(k): _jaccard(found, null, k, choices, rule) for k in ks},
        "jaccard_matrix": set_jaccard(membership(found.top[rule.top_layers], layers)).tolist(),
        "expert_overlap": _overlap(choices, found, null, rule),
    }


def _divergence(choices: Choices, found: Measures, null: Null) -> dict[str, Any]:
    by_group = dict(zip(choices.names, found.kl.tolist(), strict=True))
    return {
        "mean_kl_nats": found.mean_kl,
        "shuffled_mean_kl_nats": float(null.mean_kl.mean()),
        "excess_kl_nats": found.mean_kl - float(null.mean_kl.mean()),
        # Between the mean of chance and what only one shuffle in twenty passes.
        "least_visible_excess_nats": float(np.quantile(null.mean_kl, 0.95) - null.mean_kl.mean()),
        "p": p_value(found.mean_kl, null.mean_kl),
        "kl_nats": by_group,
        "shuffled_kl_nats": null.kl.mean(axis=0).tolist(),
    }


def _layers(choices: Choices, found: Measures, null: Null) -> list[dict[str, Any]]:
    """A row a layer. The mean over groups is the Jensen-Shannon divergence of all groups."""
    means = found.kl.mean(axis=0)
    ps = adjusted_p_values(means, null.layer_kl)
    overlap_ps = [_below(o, null.overlap[:, place]) for place, o in enumerate(found.overlap)]
    return [
        {
            "layer": layer,
            "jensen_shannon_nats": float(means[place]),
            "shuffled_nats": float(null.layer_kl[:, place].mean()),
            "p_adjusted": ps[place],
            "expert_overlap": float(found.overlap[place]),
            "shuffled_expert_overlap": float(null.overlap[:, place].mean()),
            "expert_overlap_p": overlap_ps[place],
        }
        for place, layer in enumerate(choices.layers)
    ]


def _below(found: float, null: np.ndarray) -> float:
    return p_value(-float(found), -null)


def _tops(choices: Choices, found: Measures, null: Null, rule: Rule) -> dict[str, Any]:
    """Sets of layers by group: by divergence, and by what of it exceeds shuffled labels."""
    k, numbers = rule.top_layers, np.array(choices.layers)
    excess = top_layers(found.kl - null.kl.mean(axis=0), k)
    counted = np.bincount(found.top[k].reshape(-1), minlength=len(numbers))
    halves = split_halves(
        choices.documents, choices.labels, len(choices.names), k, rule.halves, rule.seed
    )
    return {
        "k": k,
        "by_kl": _sets(choices.names, numbers[found.top[k]]),
        "by_excess": _sets(choices.names, numbers[excess]),
        "excess_jaccard": float(mean_of_pairs(set_jaccard(membership(excess, len(numbers))))),
        "groups_by_layer": {str(n): int(c) for n, c in zip(numbers, counted, strict=True) if c},
        "halves_of_one_group": halves.same_group,
        "halves_of_two_groups": halves.other_group,
    }


def _sets(names: Sequence[str], rows: np.ndarray) -> dict[str, list[int]]:
    return {name: [int(n) for n in row] for name, row in zip(names, rows, strict=True)}


def _jaccard(
    found: Measures, null: Null, k: int, choices: Choices, rule: Rule
) -> dict[str, float | None]:
    layers, value = len(choices.layers), found.jaccard[k]
    random = random_sets_jaccard(len(choices.names), k, layers, rule.seed)
    return {
        "mean": value,
        "chance": chance_jaccard(k, layers),
        "p_random_layers": p_value(value, random),
        "shuffled": float(null.jaccard[k].mean()),
        "p_shuffled": p_value(value, null.jaccard[k]),
    }


def _overlap(choices: Choices, found: Measures, null: Null, rule: Rule) -> dict[str, Any]:
    """At the layers that half of the groups or more have among their top; else at the k layers of
    highest divergence.
    """
    counted = np.bincount(found.top[rule.top_layers].reshape(-1), minlength=len(choices.layers))
    places = np.flatnonzero(2 * counted >= len(choices.names))
    shared = bool(len(places))
    if not shared:
        places = np.sort(top_layers(found.kl.mean(axis=0)[None], rule.top_layers)[0])
    value, chance = found.overlap[places].mean(), null.overlap[:, places].mean(axis=1)
    experts = choices.documents.shape[2]
    return {
        "layers": [choices.layers[place] for place in places],
        "layers_are_shared": shared,
        "top_experts": rule.top_experts,
        "mean": float(value),
        "shuffled": float(chance.mean()),
        "p": _below(float(value), chance),
        "chance_of_random_experts": chance_jaccard(rule.top_experts, experts),
    }


def verdict(tables: Mapping[str, Any], alpha: float) -> list[str]:
    """What the tables say, a sentence each; that nothing was found is said first."""
    kl, k = tables["divergence"], tables["top_layers"]["k"]
    groups = len(kl["kl_nats"])
    numbers = (
        f"mean divergence {kl['mean_kl_nats']:.3g} nats, {kl['shuffled_mean_kl_nats']:.3g} with "
        f"shuffled labels, p = {kl['p']:.3g}"
    )
    if kl["p"] >= alpha:
        no = (
            f"No: the {groups} groups are not told apart by their routing ({numbers}). An excess "
            f"below about {kl['least_visible_excess_nats']:.2g} nats cannot be seen with this many "
            "prompts. Which layers are on top is noise then, shared or not."
        )
        return [no]
    rows = tables["layers"]
    clear = sum(row["p_adjusted"] < alpha for row in rows)
    yes = (
        f"Yes: the {groups} groups route differently ({numbers}); {clear} of {len(rows)} layers "
        "stand out, adjusted for their number."
    )
    return [
        yes,
        *_about_depth(tables["jaccard"][str(k)], tables["top_layers"], alpha),
        _about_experts(tables["expert_overlap"], alpha),
    ]


def _about_depth(found: Mapping[str, Any], tops: Mapping[str, Any], alpha: float) -> list[str]:
    value, k = found["mean"], tops["k"]
    reading = "neither shared nor different layers by the announced thresholds"
    if value < DIFFERENT_BELOW:
        reading = "different layers by the announced threshold"
    elif value > SHARED_ABOVE:
        reading = "shared layers by the announced threshold"
    sets = (
        f"Top-{k} layers: mean Jaccard {value:.3f}, {reading} ({DIFFERENT_BELOW:g}, "
        f"{SHARED_ABOVE:g}); random layers give {found['chance']:.3f} (p = "
        f"{found['p_random_layers']:.3g}), shuffled labels {found['shuffled']:.3f} (p = "
        f"{found['p_shuffled']:.3g})."
    )
    said = [sets]
    if found["p_random_layers"] >= alpha:
        said.append("That is not distinguishable from random sets of layers.")
    elif found["p_shuffled"] >= alpha:
        said.append(
            "Groups made by chance share as much, so the depth belongs to the layers, not to the "
            "groups."
        )
    same, other = tops["halves_of_one_group"], tops["halves_of_two_groups"]
    repeat = "so differences between the groups' sets are not above sampling noise"
    if same > other + HALVES_MARGIN:
        repeat = "so sets differ between groups by more than sampling noise"
    said.append(
        f"Half a group's prompts name the other half's layers with Jaccard {same:.3f}, another "
        f"group's with {other:.3f}, {repeat}."
    )
    return said


def _about_experts(found: Mapping[str, Any], alpha: float) -> str:
    layers = ", ".join(map(str, found["layers"]))
    kind = "shared layers" if found["layers_are_shared"] else "layers of highest divergence"
    numbers = (
        f"mean Jaccard of the top {found['top_experts']} experts {found['mean']:.3f}, with "
        f"shuffled labels {found['shuffled']:.3f}, p = {found['p']:.3g}"
    )
    if found["p"] < alpha:
        return f"In the {kind} ({layers}) groups go to different experts ({numbers})."
    return f"In the {kind} ({layers}) groups have the same top experts, as far as seen ({numbers})."
