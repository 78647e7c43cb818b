"""What `mlxstacks identity` found, as tables and plots."""

from collections.abc import Iterator, Mapping
from typing import Any

from mlxstacks.arms.suite import Suite
from mlxstacks.studies.identity.analysis import SHUT, Figures
from mlxstacks.studies.identity.plan import UNFUSED
from mlxstacks.studies.identity.settings import IdentitySettings
from mlxstacks.study.document import Block, Cell, Columns, Plot, Series, Table, Text

# More prompts make a map that no reader takes in.
_MOST_PROMPTS = 30


def plan_table(settings: IdentitySettings, suite: Suite, arms: tuple[str, ...]) -> Table:
    """What is fixed before the first prompt."""
    shown, card, train = settings.model_dump(mode="json"), settings.persona_card, settings.train
    inputs = (
        "model", "persona", "persona_data", "items", "regression_items", "narrow_items", "suite",
        "persona_requant", "seed",
    )  # fmt: skip
    categories = [prompt.category for prompt in suite]
    parts = ", ".join(f"{name} {categories.count(name)}" for name in dict.fromkeys(categories))
    keys = ("layers", "keys", "scale", "iters", "batch_size", "learning_rate")
    values, again = (
        ", ".join(f"{key} {shown[train][key] or 'as usual'}" for key in keys)
        for train in ("train", "persona_train")
    )
    stress = (
        f" and {settings.stress_rank} (iters {settings.stress_iters:,})"
        if (settings.stress_rank and settings.stress_iters)
        else ""
    )
    rows = {
        **{key: None if shown[key] is None else str(shown[key]) for key in inputs},
        "persona_card": f"{card.name}, made by {card.maker}" if card else None,
        "policies": ", ".join(settings.policies),
        "suite's prompts": f"{len(suite)}: {parts}",
        "factual adapters": f"of rank {train.rank}, {settings.second_rank}{stress}: {values}",
        "second persona adapter": f"of rank {settings.persona_train.rank}: {again}"
        if settings.persona_data
        else "the persona's own, once more",
        "arms": f"{len(arms)}: {', '.join(arms)}",
        "gate": f"the base passes at most {settings.most_of_base} of 20, the persona at least "
        f"{settings.least_of_persona}",
    }
    return Table.of_facts("plan", "The plan", rows)


def outcome_of(figures: Figures) -> str:
    """Per policy: what is judged under it, or that its gate is shut."""
    parts = []
    for policy, state in figures["outcome"].items():
        judged = [j["outcome"] for j in figures["judgements"] if j["policy"] == policy]
        counts = [f"{judged.count(o)} {o}" for o in dict.fromkeys(judged)]
        words = ", ".join(counts) or "nothing judged"
        parts.append(f"{policy}: {words if state == 'valid' else SHUT[state]}")
    return "; ".join(parts)


def blocks(figures: Figures) -> tuple[Block, ...]:
    """Scores and claims first; every reply last, folded."""
    return (
        _conditions(figures), _gates(figures), *_claims(figures), _condition_plot(figures),
        _prompt_map(figures), *_differences(figures), _compared(figures),
        *_regression(figures, "regression", "Broad regression: right answers gained and lost"),
        *_regression(figures, "narrow", "Narrow items: right answers gained and lost"),
        *_words(figures), *_published(figures["published"]), _replies(figures),
    )  # fmt: skip


def _name(figures: Figures, arm: str) -> str:
    """Its label, as in the table of conditions, with the policy where there are several."""
    condition, several = figures["conditions"][arm], len(figures["gates"]) > 1
    policy, label = condition["policy"] if several else None, _label(condition)
    return f"{label}, {policy}" if policy else label


def _label(condition: Mapping[str, str]) -> str:
    return condition["label"].replace("identity + ", "+ ")


def _interval(interval: Mapping[str, float] | None) -> Cell:
    return None if interval is None else (interval["low"], interval["high"])


def _conditions(figures: Figures) -> Table:
    """Each arm with its score, and what it kept, lost and gained of its reference."""
    rows = []
    for arm, condition in figures["conditions"].items():
        comparison = figures["compared"].get(arm)
        kept: tuple[Cell, ...] = (None,) * 5
        if comparison is not None and comparison["reference"] != UNFUSED:
            counts = comparison["kept"], len(comparison["lost"]), len(comparison["gained"])
            kept = (*counts, comparison["p_value"], comparison["p_adjusted"])
        parts = "/".join(str(part["passed"]) for part in condition["by_category"].values())
        rows.append(
            (_label(condition), condition["policy"], condition["passed"],
             _interval(condition["interval"]), parts, *kept)
        )  # fmt: skip
    first = next(iter(figures["conditions"].values()))
    parts = ", ".join(f"{name} ({part['n']})" for name, part in first["by_category"].items())
    columns: Columns = {
        "condition": "text", "policy": "text", f"passed of {first['n']}": "count",
        "95% interval": ("share", 0), "by category": "text", "kept": "count", "lost": "count",
        "gained": "count", "p": "p", "p (Holm)": "p",
    }  # fmt: skip
    return Table.of(
        "conditions-table", "Conditions on the identity suite", columns, rows,
        caption=f"Categories: {parts}. Kept, lost, gained: prompts, compared with the persona "
        "alone by the same policy (base + factual: with the base). p: McNemar's exact; Holm: of "
        "claims, that of a loss.",
    )  # fmt: skip


def _gates(figures: Figures) -> Table:
    limits = next(iter(figures["gates"].values()))["limits"]
    columns: Columns = {
        "policy": "text", "base": "count", "persona unfused": "count", "persona fused": "count",
        "scorer": "text",
    }  # fmt: skip
    names = ("policy", "base", "unfused", "persona", "state")
    return Table.of(
        "gates", "Validity gate", columns,
        [[gate[name] for name in names] for gate in figures["gates"].values()],
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
        columns: Columns = {"condition": "text", "outcome": "text", "why": "text"}
        rows = [("; ".join(names), *key) for key, names in named.items()]
        yield Table.of("claims", "Is the persona kept?", columns, rows)


def _condition_plot(figures: Figures) -> Plot:
    """Prompts passed by every condition, with intervals, with both lines of the gate."""
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
        columns: Columns = {
            "condition": "text", "change": "text", "prompt": "text", "reply": "text"
        }  # fmt: skip
        yield Table.of("differences", "Prompts that pass in one of the two only", columns, rows)


def _compared(figures: Figures) -> Table:
    columns: Columns = {
        "condition": "text", "compared with": "text", "kept": "count", "lost": "count",
        "gained": "count", "share lost, 95%": ("share", 0), "p (McNemar)": "p", "p (Holm)": "p",
        "p kept (Holm)": "p",
        "replies that differ": "count", "prompts lost": "text", "prompts gained": "text",
    }  # fmt: skip
    adjusted = ("adjusted", "kept_adjusted")
    rows = [
        (
            _name(figures, arm), _name(figures, row["reference"]), row["kept"],
            len(row["lost"]), len(row["gained"]),
            _interval(row["loss"]) or "nothing to lose", row["p_value"],
            *("no claim" if row[f"p_{key}"] is None else row[f"p_{key}"] for key in adjusted),
            row["other_texts"], ", ".join(row["lost"]) or "none",
            ", ".join(row["gained"]) or "none",
        )
        for arm, row in figures["compared"].items()
    ]  # fmt: skip
    return Table.of("compared", "Prompt by prompt", columns, rows, folded=True)


def _regression(figures: Figures, of: str, title: str) -> Iterator[Table]:
    columns: Columns = {
        "arm": "text", "compared with": "text", "items": "count", "right": "count",
        "right there": "count", "fixed": "count", "broken": "count", "net": ("change", 0),
        "net share, points": ("points", 1),
        "p": "p", "chi square": ("number", 2), "in form": "count", "in form there": "count",
    }  # fmt: skip
    keys = ("n", "right", "reference_right", "fixed", "broken", "net")
    more = ("p_value", "chi_square", "in_form", "reference_in_form")
    rows = [
        (
            name.replace("_", " "),
            row["reference"].replace("_", " "),
            *(row[k] for k in keys),
            row["net"] / row["n"],
            *(row[k] for k in more),
        )
        for name, row in figures[of].items()
    ]
    if rows:
        yield Table.of(
            of, title, columns, rows,
            caption="There: of the arm compared with. p: McNemar's exact. In form: boxed; of "
            "likelihoods, no tie.",
        )  # fmt: skip


def _words(figures: Figures) -> Iterator[Text]:
    paragraphs = [
        *figures["regression_words"].values(),
        *(f"Of the narrow items: {words}" for words in figures["narrow_words"].values()),
    ]
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
    n, intervals = study["n"], study["intervals"]
    columns: Columns = {
        "condition": "text", "passed": "text", "share": ("share", 0), "95%": ("share", 0)
    }  # fmt: skip
    rows = [
        (names[kind], f"{count} of {n}", count / n, _interval(intervals[kind]))
        for kind, count in study["passed"].items()
    ]
    yield Table.of("published", f"For comparison: {study['of']}", columns, rows)


def _replies(figures: Figures) -> Table:
    keys = {"prompt": "prompt_id", "category": "category", "passed": "passed", "why": "reason",
            "reply": "text"}  # fmt: skip
    rows = [
        (_name(figures, arm), *(reply[key] for key in keys.values()))
        for arm, replies in figures["replies"].items()
        for reply in replies
    ]
    columns: Columns = dict.fromkeys(("condition", *keys), "text")
    return Table.of("replies", "Replies", columns, rows, folded=True)
