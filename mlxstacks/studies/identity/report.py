"""What `mlxstacks identity` found, as tables and plots."""

from collections.abc import Iterator, Mapping
from typing import Any

from mlxstacks.studies.identity.analysis import Figures
from mlxstacks.studies.identity.plan import UNFUSED
from mlxstacks.studies.identity.settings import IdentitySettings
from mlxstacks.studies.identity.suite import Suite
from mlxstacks.study.document import Block, Cell, Column, Plot, Series, Table, Text

# More prompts make a map that no reader takes in.
_MOST_PROMPTS = 30
_COUNTED = {"not shown": "left open", "no claim": "without a claim"}


def plan_table(settings: IdentitySettings, suite: Suite, arms: tuple[str, ...]) -> Table:
    """What is fixed before the first prompt."""
    shown, card, train = settings.model_dump(mode="json"), settings.persona_card, settings.train
    inputs = ("model", "persona", "items", "regression_items", "suite", "persona_requant", "seed")
    categories = [prompt.category for prompt in suite]
    parts = ", ".join(f"{name} {categories.count(name)}" for name in dict.fromkeys(categories))
    training = ("layers", "keys", "scale", "iters", "batch_size", "learning_rate")
    values = ", ".join(f"{key} {shown['train'][key] or 'as usual'}" for key in training)
    rows = {
        **{key: None if shown[key] is None else str(shown[key]) for key in inputs},
        "persona_card": f"{card.name}, made by {card.maker}" if card else None,
        "policies": ", ".join(settings.policies),
        "suite's prompts": f"{len(suite)}: {parts}",
        "factual adapters": f"of rank {train.rank} and {settings.second_rank}: {values}",
        "arms": f"{len(arms)}: {', '.join(arms)}",
        "gate": f"the base passes at most {settings.most_of_base} of 20, the persona at least "
        f"{settings.least_of_persona}",
    }
    return Table(
        id="plan", title="The plan", rows=tuple(rows.items()),
        columns=(Column(name="what"), Column(name="value")),
    )  # fmt: skip


def outcome_of(figures: Figures) -> str:
    """Per policy: what is judged under it, or that its gate is shut."""
    parts = []
    for policy, state in figures["outcome"].items():
        judged = [j["outcome"] for j in figures["judgements"] if j["policy"] == policy]
        counts = [f"{judged.count(o)} {_COUNTED.get(o, o)}" for o in dict.fromkeys(judged)]
        words = ", ".join(counts) or "nothing judged"
        parts.append(f"{policy}: {words if state == 'valid' else f'scorer invalid, {state}'}")
    return "; ".join(parts)


def blocks(figures: Figures) -> tuple[Block, ...]:
    """Scores and claims first; every reply last, folded."""
    return (
        _conditions(figures), _gates(figures), *_claims(figures), _condition_plot(figures),
        _prompt_map(figures), *_differences(figures), _compared(figures), *_regression(figures),
        *_words(figures), *_published(figures["published"]), _replies(figures),
    )  # fmt: skip


def _name(figures: Figures, arm: str) -> str:
    """Its label, with the policy where there are several."""
    condition, several = figures["conditions"][arm], len(figures["gates"]) > 1
    policy = condition["policy"] if several else None
    return f"{condition['label']}, {policy}" if policy else str(condition["label"])


def _interval(interval: Mapping[str, float] | None) -> Cell:
    return None if interval is None else (interval["low"], interval["high"])


def _conditions(figures: Figures) -> Table:
    """Each arm with its score, and what it kept, lost and gained of its reference."""
    rows = []
    for arm, condition in figures["conditions"].items():
        comparison = figures["compared"].get(arm)
        kept: tuple[Cell, ...] = (None,) * 4
        if comparison is not None and comparison["reference"] != UNFUSED:
            p = comparison["p_value" if comparison["p_adjusted"] is None else "p_adjusted"]
            kept = comparison["kept"], len(comparison["lost"]), len(comparison["gained"]), p
        parts = "/".join(str(part["passed"]) for part in condition["by_category"].values())
        label = condition["label"].replace("identity + ", "+ ")
        rows.append(
            (label, condition["policy"], condition["passed"], _interval(condition["interval"]),
             parts, *kept)
        )  # fmt: skip
    first = next(iter(figures["conditions"].values()))
    parts = ", ".join(f"{name} ({part['n']})" for name, part in first["by_category"].items())
    return Table(
        id="conditions-table", title="Conditions on the identity suite", rows=tuple(rows),
        columns=(
            Column(name="condition"), Column(name="by"),
            Column(name=f"of {first['n']}", kind="count"),
            Column(name="95%", kind="share", digits=0), Column(name="parts"),
            *(Column(name=name, kind="count") for name in ("kept", "lost", "gained")),
            Column(name="p", kind="p"),
        ),
        caption=f"Parts: {parts}. Kept, lost, gained: next to the persona alone by the same policy "
        "(base: next to the base). p: McNemar's exact; of claims, by Holm.",
    )  # fmt: skip


def _gates(figures: Figures) -> Table:
    limits = next(iter(figures["gates"].values()))["limits"]
    rows = tuple(
        (policy, gate["base"], gate["unfused"], gate["persona"], gate["state"])
        for policy, gate in figures["gates"].items()
    )
    return Table(
        id="gates", title="Validity gate", rows=rows,
        columns=(
            Column(name="by"), Column(name="base", kind="count"),
            Column(name="persona beside", kind="count"),
            Column(name="persona fused", kind="count"), Column(name="scorer"),
        ),
        caption=f"Of {limits['n']} prompts the base may pass at most {limits['most_of_base']}, the "
        f"persona must pass at least {limits['least_of_persona']}.",
    )  # fmt: skip


def _claims(figures: Figures) -> Iterator[Table]:
    """Conditions of which the same is said have one row together."""
    named: dict[tuple[str, str], list[str]] = {}
    for judgement in figures["judgements"]:
        key = judgement["outcome"], judgement["words"]
        named.setdefault(key, []).append(_name(figures, judgement["arm"]))
    if named:
        yield Table(
            id="claims", title="Is the persona kept?",
            rows=tuple(("; ".join(names), *key) for key, names in named.items()),
            columns=(Column(name="condition"), Column(name="outcome"), Column(name="why")),
        )  # fmt: skip


def _condition_plot(figures: Figures) -> Plot:
    """Prompts passed by every condition, with intervals, beside both lines of the gate."""
    conditions = figures["conditions"]
    n = max(condition["n"] for condition in conditions.values())
    names = tuple(_name(figures, arm) for arm in conditions)
    passed = tuple(condition["passed"] for condition in conditions.values())
    ends = {
        end: tuple(c["n"] * c["interval"][end] for c in conditions.values())
        for end in ("low", "high")
    }
    limits = next(iter(figures["gates"].values()))["limits"]
    references = {
        "gate: most of the base": limits["most_of_base"],
        "gate: least of the persona": limits["least_of_persona"],
    }
    title = "Identity: prompts passed in each condition"
    counts = ", ".join(f"{name} {count}" for name, count in zip(names, passed, strict=True))
    lines = ", ".join(f"{name} {place}" for name, place in references.items())
    return Plot(
        id="conditions", title=title, kind="intervals", categories=names,
        series=(Series(label="passed", y=passed, **ends),),
        x_label=f"prompts passed of {n}, 95% interval", references=references, form="{:.0f}",
        alt=f"{title}, of {n}: {counts}. {lines}.",
    )  # fmt: skip


def _prompt_map(figures: Figures) -> Plot:
    """Which prompt passed in which condition: equal totals may be different prompts."""
    replies = figures["replies"]
    prompts = tuple(r["prompt_id"] for r in next(iter(replies.values())))[:_MOST_PROMPTS]
    series = []
    for arm, given in replies.items():
        passed = {reply["prompt_id"]: float(reply["passed"]) for reply in given}
        series.append(Series(label=_name(figures, arm), y=tuple(map(passed.get, prompts))))
    title = "Which prompts pass (1) and which do not (0)"
    counts = ", ".join(f"{s.label} {sum(y or 0 for y in s.y):.0f}" for s in series)
    return Plot(
        id="prompts", title=title, kind="heat map", series=tuple(series), categories=prompts,
        x_label="prompt", unit="0 failed, 1 passed", form="{:.0f}", limits=(0.0, 1.0),
        alt=f"{title}. Passed of {len(prompts)}: {counts}.",
    )  # fmt: skip


def _differences(figures: Figures) -> Iterator[Table]:
    """Prompts whose verdict is another one than the reference's. Not where the gate is shut:
    against a persona that is lost, or the bare base, nothing is kept that could be missed.
    """
    rows = []
    for arm, comparison in figures["compared"].items():
        gate = figures["gates"].get(figures["conditions"][arm]["policy"])
        replies = {reply["prompt_id"]: reply for reply in figures["replies"][arm]}
        for change in ("lost", "gained") if gate and gate["valid"] else ():
            rows += [
                (_name(figures, arm), change, replies[key]["prompt"], replies[key]["text"])
                for key in comparison[change]
            ]
    if rows:
        names = ("condition", "change", "prompt", "reply")
        yield Table(
            id="differences", title="Prompts with another verdict than the reference's",
            columns=tuple(Column(name=name) for name in names), rows=tuple(rows),
        )  # fmt: skip


def _compared(figures: Figures) -> Table:
    rows = tuple(
        (
            _name(figures, arm), _name(figures, found["reference"]), found["kept"],
            len(found["lost"]), len(found["gained"]),
            _interval(found["loss"]) or "nothing to lose", found["p_value"],
            "no claim" if found["p_adjusted"] is None else found["p_adjusted"],
            found["other_texts"], ", ".join(found["lost"]) or "none",
            ", ".join(found["gained"]) or "none",
        )
        for arm, found in figures["compared"].items()
    )  # fmt: skip
    return Table(
        id="compared", title="Prompt by prompt", rows=rows, folded=True,
        columns=(
            Column(name="condition"), Column(name="beside"),
            *(Column(name=name, kind="count") for name in ("kept", "lost", "gained")),
            Column(name="share lost, 95%", kind="share", digits=0),
            Column(name="p (McNemar)", kind="p"), Column(name="p (Holm)", kind="p"),
            Column(name="replies that differ", kind="count"), Column(name="prompts lost"),
            Column(name="prompts gained"),
        ),
    )  # fmt: skip


def _regression(figures: Figures) -> Iterator[Table]:
    counts = {
        "items": "n", "right": "right", "before": "reference_right", "fixed": "fixed",
        "broken": "broken",
    }  # fmt: skip
    forms = {"in form": "in_form", "in form before": "reference_in_form"}
    rows = tuple(
        (
            name.replace("_", " "), found["reference"].replace("_", " "),
            *(found[key] for key in counts.values()), f"{found['net']:+,}", found["p_value"],
            found["chi_square"], *(found[key] for key in forms.values()),
        )
        for name, found in figures["regression"].items()
    )  # fmt: skip
    if rows:
        yield Table(
            id="regression", title="Broad regression: right answers gained and lost", rows=rows,
            columns=(
                Column(name="arm"), Column(name="beside"),
                *(Column(name=name, kind="count") for name in counts), Column(name="net"),
                Column(name="p", kind="p"), Column(name="chi square", kind="number", digits=2),
                *(Column(name=name, kind="count") for name in forms),
            ),
            caption="Right before: of the arm beside. p: McNemar's exact. In form: boxed; of "
            "likelihoods, no tie.",
        )  # fmt: skip


def _words(figures: Figures) -> Iterator[Text]:
    paragraphs = [*figures["regression_words"].values()]
    counts = ", ".join(f"{name} {n:,}" for name, n in figures["mined"]["counts"].items())
    paragraphs.append(
        f"Of the items {counts}; factual adapters were trained on {figures['mined']['train']:,} of "
        "those that both get wrong."
    )
    paragraphs += [
        f"Controls that are missing under {policy}: {', '.join(missing)}."
        for policy, missing in figures["missing_controls"].items()
        if missing
    ]
    yield Text(title="In words", paragraphs=tuple(paragraphs))


def _published(study: Mapping[str, Any] | None) -> Iterator[Table]:
    if study is None:
        return
    names = {
        "identity": "identity only", "factual": "identity + factual r2",
        "again": "identity + identity", "factual_second": "identity + factual r8",
        "base_factual": "base + factual r2", "base": "base",
    }  # fmt: skip
    rows = tuple(
        (names[kind], f"{count} of {study['n']}", count / study["n"],
         _interval(study["intervals"][kind]))
        for kind, count in study["passed"].items()
    )  # fmt: skip
    yield Table(
        id="published", title=f"For comparison: {study['of']}", rows=rows,
        columns=(
            Column(name="condition"), Column(name="passed"),
            Column(name="share", kind="share", digits=0),
            Column(name="95%", kind="share", digits=0),
        ),
    )  # fmt: skip


def _replies(figures: Figures) -> Table:
    rows = tuple(
        (_name(figures, arm), reply["prompt_id"], reply["category"], reply["passed"],
         reply["reason"], reply["text"])
        for arm, replies in figures["replies"].items()
        for reply in replies
    )  # fmt: skip
    names = ("condition", "prompt", "category", "passed", "why", "reply")
    return Table(
        id="replies", title="Replies", columns=tuple(Column(name=name) for name in names),
        rows=rows, folded=True,
    )  # fmt: skip
