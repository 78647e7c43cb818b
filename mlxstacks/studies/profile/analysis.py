"""From choices of every prompt to figures, tables and plots, each with what chance gives."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mlxstacks.studies.profile.measures import (
    MOST_TOP_LAYERS,
    Measures,
    Null,
    adjusted_p_values,
    chance_jaccard,
    comparable,
    excess_divergence,
    group_counts,
    length_strata,
    mean_of_pairs,
    measure,
    membership,
    p_value,
    pairwise_divergence,
    random_sets_jaccard,
    set_jaccard,
    shares,
    shuffle_within,
    shuffled,
    split_halves,
    top_layers,
    usual_top_experts,
)
from mlxstacks.studies.profile.settings import (
    DIFFERENT_BELOW,
    HALVES_MARGIN,
    SHARED_ABOVE,
    ProfileSettings,
)
from mlxstacks.study.document import Block, Plot, Series, Table

# More groups, or more layers with a map of their experts, make a plot that no reader takes in.
MOST_SHOWN, MOST_EXPERT_MAPS = 40, 4
# Deals of labels from which the excess of a router is reckoned, the same of every router.
_DEALS = 20
# KL is drawn in thousandths of a nat.
_SCALE = 1000.0


@dataclass(frozen=True, eq=False)
class Choices:
    """documents (n, L, E), labels (n,) into `names`, tokens (n,) that are counted; layers: numbers
    of the L.
    """

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
    choices: Choices, rule: ProfileSettings, tick: Callable[[int], None] | None = None
) -> dict[str, Any]:
    """The tables as JSON values; layers by their numbers in the model.

    rule: with its top_experts. Raises: ValueError: k above the number of layers.
    """
    names, numbers = choices.names, np.array(choices.layers)
    layers, groups, k = len(numbers), len(names), rule.top_layers
    if k > layers:
        raise ValueError(f"top_layers is {k}; {layers} layers have experts")
    ks = sorted({*range(1, min(MOST_TOP_LAYERS, layers) + 1), k})
    top_experts = int(rule.top_experts or usual_top_experts(choices.documents.shape[2]))
    measured = measure(choices.counts, ks, top_experts)
    strata = length_strata(choices.tokens)
    null = shuffled(
        choices.documents, choices.labels, strata, groups, ks, top_experts, rule.permutations,
        rule.seed, tick,
    )  # fmt: skip
    # The mean over groups is the Jensen-Shannon divergence of all groups.
    means, chance_means = measured.kl.mean(axis=0), null.layer_kl.mean(axis=0)
    adjusted = adjusted_p_values(means, null.layer_kl)
    excess = top_layers(measured.kl - null.kl.mean(axis=0), k)
    counted = np.bincount(measured.top[k].reshape(-1), minlength=layers)
    same_group, other_group = split_halves(
        choices.documents, choices.labels, groups, k, rule.halves, rule.seed
    )
    jaccard = {}
    for count in ks:
        value, random = (
            measured.jaccard[count],
            random_sets_jaccard(groups, count, layers, rule.seed),
        )
        jaccard[str(count)] = {
            "mean": value,
            "chance": chance_jaccard(count, layers),
            "p_random_layers": p_value(value, random),
            "shuffled": float(null.jaccard[count].mean()),
            "p_shuffled": p_value(value, null.jaccard[count]),
        }
    return {
        "divergence": {
            "mean_kl_nats": measured.mean_kl,
            "shuffled_mean_kl_nats": float(null.mean_kl.mean()),
            "excess_kl_nats": measured.mean_kl - float(null.mean_kl.mean()),
            # Between the mean of chance and what only one shuffle in twenty passes.
            "least_visible_excess_nats": float(
                np.quantile(null.mean_kl, 0.95) - null.mean_kl.mean()
            ),
            "p": p_value(measured.mean_kl, null.mean_kl),
            "comparable_prompts": comparable(strata, choices.labels),
            "kl_nats": dict(zip(names, measured.kl.tolist(), strict=True)),
            "shuffled_kl_nats": null.kl.mean(axis=0).tolist(),
        },
        "layers": [
            {
                "layer": layer,
                "jensen_shannon_nats": float(means[place]),
                "shuffled_nats": float(chance_means[place]),
                "p_adjusted": adjusted[place],
                "expert_overlap": float(measured.overlap[place]),
                "shuffled_expert_overlap": float(null.overlap[:, place].mean()),
                "expert_overlap_p": p_value(
                    -float(measured.overlap[place]), -null.overlap[:, place]
                ),
            }
            for place, layer in enumerate(choices.layers)
        ],
        "pairwise_kl_nats": pairwise_divergence(shares(choices.counts)).tolist(),
        "top_layers": {
            "k": k,
            "by_kl": dict(zip(names, numbers[measured.top[k]].tolist(), strict=True)),
            "by_excess": dict(zip(names, numbers[excess].tolist(), strict=True)),
            "excess_jaccard": float(mean_of_pairs(set_jaccard(membership(excess, layers)))),
            "groups_by_layer": {str(n): int(c) for n, c in zip(numbers, counted, strict=True) if c},
            "halves_of_one_group": same_group,
            "halves_of_two_groups": other_group,
        },
        "jaccard": jaccard,
        "jaccard_matrix": set_jaccard(membership(measured.top[k], layers)).tolist(),
        "expert_overlap": _overlap(choices, measured, null, k, top_experts),
    }


def _overlap(
    choices: Choices, measured: Measures, null: Null, k: int, top_experts: int
) -> dict[str, Any]:
    """At the layers that half of the groups or more have among their top; else at the k layers of
    highest divergence.
    """
    counted = np.bincount(measured.top[k].reshape(-1), minlength=len(choices.layers))
    places = np.flatnonzero(2 * counted >= len(choices.names))
    shared = bool(len(places))
    if not shared:
        places = np.sort(top_layers(measured.kl.mean(axis=0)[None], k)[0])
    value, chance = measured.overlap[places].mean(), null.overlap[:, places].mean(axis=1)
    return {
        "layers": [choices.layers[place] for place in places],
        "layers_are_shared": shared,
        "top_experts": top_experts,
        "mean": float(value),
        "shuffled": float(chance.mean()),
        "p": p_value(-float(value), -chance),
        "chance_of_random_experts": chance_jaccard(top_experts, choices.documents.shape[2]),
    }


def against_untrained(
    choices: Choices, untrained: Iterable[np.ndarray], seed: int
) -> dict[str, Any]:
    """Whether the model's routers tell the groups apart more than routers that nothing trained do,
    which saw the same tokens. untrained: their choices, each as `Choices.documents`.

    p: the rank of the model's own among them, exact where it is one more such draw.
    """
    rng, groups = np.random.default_rng([seed, 4]), len(choices.names)
    strata = length_strata(choices.tokens)
    deals = [choices.labels]
    deals += [shuffle_within(strata, choices.labels, rng) for _ in range(_DEALS)]
    own = excess_divergence(choices.documents, deals, groups)
    others = np.array([excess_divergence(documents, deals, groups) for documents in untrained])
    return {
        "excess_kl_nats": own,
        "untrained_excess_kl_nats": others.tolist(),
        "p": p_value(own, others),
    }


def outcome(tables: Mapping[str, Any], alpha: float) -> str:
    p, control = tables["divergence"]["p"], tables.get("untrained")
    if p >= alpha:
        return f"undecided, p = {p:.2g}"
    beyond = ""
    if control and control["p"] >= alpha:
        beyond = f", not shown beyond untrained routers, p = {control['p']:.2g}"
    return f"routing differs, p = {p:.2g}{beyond}"


def verdict(tables: Mapping[str, Any], alpha: float) -> str:
    """What the tables say; that nothing was found is said first."""
    kl, k = tables["divergence"], tables["top_layers"]["k"]
    groups, rows = len(kl["kl_nats"]), tables["layers"]
    numbers = (
        f"mean divergence {kl['mean_kl_nats']:.3g} nats, {kl['shuffled_mean_kl_nats']:.3g} with "
        f"shuffled labels, p = {kl['p']:.3g}"
    )
    if not kl["comparable_prompts"]:
        return (
            f"Undecided: no prompt is as long as one of another group, so what groups are about "
            f"cannot be told from how long their prompts are ({numbers}). Give groups whose "
            "prompts have like lengths."
        )
    if kl["p"] >= alpha:
        return (
            f"Undecided: the routing of the {groups} groups differs no more than by chance "
            f"({numbers}), but an excess below about {kl['least_visible_excess_nats']:.2g} nats "
            "cannot be seen with so few prompts. Which layers are on top is noise then, shared or "
            "not."
        )
    clear = sum(row["p_adjusted"] < alpha for row in rows)
    yes = (
        f"Yes: the {groups} groups route differently ({numbers}); {clear} of {len(rows)} layers "
        "stand out, adjusted for their number."
    )
    sentences = [yes, *_control_in_words(tables, alpha)]
    sets = tables["jaccard"][str(k)]
    reading = "neither shared nor different layers by the announced thresholds"
    if sets["mean"] < DIFFERENT_BELOW:
        reading = "different layers by the announced threshold"
    elif sets["mean"] > SHARED_ABOVE:
        reading = "shared layers by the announced threshold"
    sentences.append(
        f"Top-{k} layers: mean Jaccard {sets['mean']:.3f}, {reading} ({DIFFERENT_BELOW:g}, "
        f"{SHARED_ABOVE:g}); random layers give {sets['chance']:.3f} (p = "
        f"{sets['p_random_layers']:.3g}), shuffled labels {sets['shuffled']:.3f} (p = "
        f"{sets['p_shuffled']:.3g})."
    )
    if sets["p_random_layers"] >= alpha:
        sentences.append("Random sets of layers may share as much.")
    elif sets["p_shuffled"] >= alpha:
        sentences.append(
            "Groups made by chance share as much: that the top layers depend on the group is not "
            "shown."
        )
    tops = tables["top_layers"]
    same, other = tops["halves_of_one_group"], tops["halves_of_two_groups"]
    place = "beyond" if same > other + HALVES_MARGIN else "within"
    sentences.append(
        f"Half a group's prompts name the other half's layers with Jaccard {same:.3f}, another "
        f"group's with {other:.3f}: {place} the announced margin of {HALVES_MARGIN:g}, of one "
        "split, without a test."
    )
    experts = tables["expert_overlap"]
    where = f"In the {_kind_of(experts)} ({_listed(experts['layers'])})"
    numbers = (
        f"mean Jaccard of the top {experts['top_experts']} experts {experts['mean']:.3f}, with "
        f"shuffled labels {experts['shuffled']:.3f}, p = {experts['p']:.3g}"
    )
    differ = experts["p"] < alpha
    words = "groups go to different experts"
    if not differ:
        words = "it is not shown that groups go to different experts"
    return " ".join([*sentences, f"{where} {words} ({numbers})."])


def _control_in_words(tables: Mapping[str, Any], alpha: float) -> list[str]:
    control = tables.get("untrained")
    if not control:
        return []
    others = control["untrained_excess_kl_nats"]
    answer = "this model's differ more"
    if control["p"] >= alpha:
        answer = "that this model's differ more is not shown: no sign of anything learned"
    words = (
        f"Beyond chance that is {control['excess_kl_nats']:.3g} nats; {len(others)} untrained "
        f"routers, with weights drawn anew, give {np.mean(others):.3g} on the same tokens "
        f"({min(others):.3g} to {max(others):.3g}): {answer} (p = {control['p']:.2g})."
    )
    return [words]


def _kind_of(experts: Mapping[str, Any]) -> str:
    return (
        "layers most often on top"
        if experts["layers_are_shared"]
        else "layers of highest divergence"
    )


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))


# --- tables and plots -----------------------------------------------------------------------------


def plan_table(plan: Mapping[str, Any]) -> Table:
    """What is fixed before the first prompt."""
    facts = {
        "hypothesis": plan["hypothesis"],
        "model": f"{len(plan['layers'])} layers with {plan['experts']} experts each",
        "prompts": ", ".join(f"{name} {count}" for name, count in plan["prompts"].items()),
        "tokens": f"{plan['tokens_per_group']:,} of each group, those of content alone",
        "test": plan["test"],
        "smallest p": f"{plan['least_p']:.4f}",
        "bias": f"about {plan['expected_bias_nats']:.4f} nats at least, if nothing differs",
    }
    return Table.of_facts("plan", "The plan", facts)


def blocks(
    tables: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    about_layers: Sequence[Mapping[str, Any]],
    counts: np.ndarray,
) -> tuple[Block, ...]:
    """Plots, then tables. counts: choices (S, L, E) of the groups."""
    names = [group["name"] for group in groups][:MOST_SHOWN]
    return (*_plots(tables, names, counts), *_tables(tables, groups, about_layers))


def _plots(tables: Mapping[str, Any], names: list[str], counts: np.ndarray) -> Iterator[Plot]:
    kl, top = tables["divergence"]["kl_nats"], tables["top_layers"]["by_kl"]
    layers = [row["layer"] for row in tables["layers"]]
    highest = ", ".join(f"{name}: layers {_listed(top[name])}" for name in names)
    title = "Routing by group and layer: divergence from the pooled routing"
    yield Plot(
        id="divergence", title=title, kind="heat map",
        series=tuple(Series(label=n, y=tuple(_SCALE * value for value in kl[n])) for n in names),
        categories=tuple(map(str, layers)), x_label="layer", y_label="group",
        unit="KL, nats / 1000", form="{:.1f}", limits=(0.0, None),
        alt=f"{title}, {len(names)} groups by {len(layers)} layers. Highest in {highest}.",
    )  # fmt: skip
    lines = {
        label: [_SCALE * row[key] for row in tables["layers"]]
        for label, key in (("groups (mean)", "jensen_shannon_nats"),
                           ("shuffled labels", "shuffled_nats"))
    }  # fmt: skip
    spans = ", ".join(f"{label} {min(y):.3g} to {max(y):.3g}" for label, y in lines.items())
    title = "Divergence by layer, with that of shuffled labels"
    yield Plot(
        id="layers", title=title, kind="lines",
        series=tuple(Series(label=name, x=tuple(layers), y=tuple(y)) for name, y in lines.items()),
        x_label="layer", y_label="nats / 1000", alt=f"{title}, thousandths of a nat: {spans}.",
    )  # fmt: skip
    k = tables["top_layers"]["k"]
    jaccard = tables["jaccard"][str(k)]
    title = f"Do groups share their top {k} layers? Jaccard of the sets"
    rows = zip(names, tables["jaccard_matrix"], strict=False)
    yield Plot(
        id="jaccard", title=title, kind="heat map",
        series=tuple(Series(label=name, y=tuple(row[: len(names)])) for name, row in rows),
        categories=tuple(names), x_label="group", y_label="group", unit="Jaccard", form="{:.2f}",
        limits=(0.0, 1.0),
        alt=f"{title}. Mean {jaccard['mean']:.3f}, random layers {jaccard['chance']:.3f}, shuffled "
        f"labels {jaccard['shuffled']:.3f}.",
    )  # fmt: skip
    p = shares(counts)
    for layer in tables["expert_overlap"]["layers"][:MOST_EXPERT_MAPS]:
        p_layer = p[:, layers.index(layer)]  # (S, E)
        order = np.argsort(-p_layer.mean(axis=0), kind="stable")
        percent = 100 * p_layer[: len(names), order]
        title = f"Experts of layer {layer}, by their pooled share"
        yield Plot(
            id=f"experts-{layer}", title=title, kind="heat map",
            series=tuple(
                Series(label=name, y=tuple(row))
                for name, row in zip(names, percent.tolist(), strict=True)
            ),
            categories=tuple(map(str, order)), x_label="expert", y_label="group", unit="percent",
            form="{:.0f}", limits=(0.0, None),
            alt=f"{title}: the first is {order[0]}, with {percent[:, 0].mean():.1f} percent.",
        )  # fmt: skip


def _tables(
    tables: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    about_layers: Sequence[Mapping[str, Any]],
) -> Iterator[Table]:
    top, kl = tables["top_layers"], tables["divergence"]["kl_nats"]
    yield Table.of(
        "groups", "Groups",
        {
            "group": "text", "prompts": "count", "content tokens": "count",
            "mean KL, nats": ("number", 4),
            f"top {top['k']} layers": "text", f"top {top['k']} by excess": "text",
        },
        [
            (g["name"], g["prompts"], g["tokens"], float(np.mean(kl[g["name"]])),
             _listed(top["by_kl"][g["name"]]), _listed(top["by_excess"][g["name"]]))
            for g in groups
        ],
        caption="KL: how far a group's shares of the experts are from the mean of all groups; 0: "
        "the same. Top layers: where it is largest. By excess: where it exceeds that of shuffled "
        "labels most.",
    )  # fmt: skip
    keys: tuple[str, ...] = ("mean", "chance", "p_random_layers", "shuffled", "p_shuffled")
    yield Table.of(
        "jaccard-table", "Shared layers, by how many are taken",
        {
            "top layers": "text", "mean Jaccard": ("number", 4), "random layers": ("number", 4),
            "p, random": "p", "shuffled labels": ("number", 4), "p, shuffled": "p",
        },
        [(k, *(row[key] for key in keys)) for k, row in tables["jaccard"].items()],
        caption="Jaccard: layers that two groups both have on top, of those that either has; 1: "
        "the same, 0: none. p: how often chance gives as much or more.",
    )  # fmt: skip
    bits = [about["expert_bits"] or "float" for about in about_layers]
    columns: dict[str, Any] = {"layer": "count", "kind": "text", "bits of experts": "text"}
    if len(set(bits)) == 1:
        del columns["bits of experts"]
    keys = ("jensen_shannon_nats", "shuffled_nats", "p_adjusted", "expert_overlap",
            "shuffled_expert_overlap", "expert_overlap_p")  # fmt: skip
    yield Table.of(
        "layer-table", "Layers",
        columns | {
            "JS, nats": ("number", 4), "JS shuffled": ("number", 4), "adjusted p": "p",
            "Jaccard of top experts": ("number", 3), "Jaccard shuffled": ("number", 3),
            "Jaccard p": "p",
        },
        [
            ((row["layer"], about["attention"], width)[: len(columns)]
             + tuple(row[key] for key in keys))
            for row, about, width in zip(tables["layers"], about_layers, bits, strict=True)
        ],
        caption="Kind: of attention. JS: mean divergence of the groups at a layer; shuffled: the "
        "same when labels are shuffled among prompts of like length; adjusted p: how often chance "
        "gives as much, for so many layers. Jaccard of the groups' most chosen experts; its p: how "
        "often chance gives so little.",
    )  # fmt: skip
    experts = tables["expert_overlap"]
    facts = {
        f"in the {_kind_of(experts)}": _listed(experts["layers"]),
        "experts that are compared": str(experts["top_experts"]),
        "mean Jaccard of their sets": f"{experts['mean']:.3f}",
        "with shuffled labels": f"{experts['shuffled']:.3f}",
        "p": f"{experts['p']:.2g}",
        "of random experts": f"{experts['chance_of_random_experts']:.3f}",
    }
    table = Table.of_facts("experts", "Do groups use different experts?", facts)
    caption = "p: how often shuffled labels give so little in common."
    yield table.model_copy(update={"caption": caption})
    if control := tables.get("untrained"):
        others = control["untrained_excess_kl_nats"]
        facts = {
            "this model's routers, nats": f"{control['excess_kl_nats']:.4g}",
            "untrained routers, nats": f"{np.mean(others):.4g}",
            "from, to": f"{min(others):.4g}, {max(others):.4g}",
            "p": f"{control['p']:.2g}",
        }
        title = "Do the routers differ more than untrained ones?"
        caption = (
            f"Mean divergence less that of shuffled labels. Untrained: {len(others)} draws of "
            "weights as large as the routers' own, on the same tokens; p: how often they give as "
            "much."
        )
        table = Table.of_facts("untrained", title, facts)
        yield table.model_copy(update={"caption": caption})


def differing_bits(about_layers: Sequence[Mapping[str, Any]]) -> str | None:
    """A note where layers are not stored alike: a pattern of depth may then be one of bits."""
    for what, key in (("experts", "expert_bits"), ("routers", "router_bits")):
        by_bits: dict[Any, list[int]] = {}
        for about in about_layers:
            by_bits.setdefault(about[key], []).append(about["layer"])
        if len(by_bits) > 1:
            listed = "; ".join(f"{b or 'float'}: {_listed(n)}" for b, n in by_bits.items())
            return (
                f"The {what} have different bits in different layers ({listed}): a pattern over "
                "layers may come from that."
            )
    return None
