"""What `mlxstacks eval` says: figures of all tasks, the verdict, tables and plots."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from mlxstacks.stats import share_note
from mlxstacks.studies.benchmarks.analysis import (
    EVEN,
    Figures,
    Outcomes,
    arm_means,
    arm_score,
    claims_of,
    compare,
    mean_differences,
)
from mlxstacks.studies.benchmarks.asked import AskedTask
from mlxstacks.studies.benchmarks.plan import evidence_of, least_effect
from mlxstacks.studies.benchmarks.tasks import PUBLISHED_MODEL
from mlxstacks.study.document import Block, Cell, Column, Kind, Plot, Series, Table, Text
from mlxstacks.study.plan import Plan, Standing, standing

# Arms that choose among stacks.
CHOOSING = ("routed", "oracle", "random")
_MOSTLY = 0.5
# Differences of rates that only a broken arm has.
_LARGE = 0.2
# Of a column with little room.
_SHORT = {EVEN: "not told apart"}
_MOST_OPEN_ROWS = 40
_Columns = Sequence[tuple[str, Kind]]
_TASK: _Columns = [("task", "text")]


def find(
    asked: Sequence[AskedTask],
    outcomes: Mapping[str, Outcomes],
    plans: Mapping[str, Plan],
    data: Mapping[str, Mapping[str, str]],
    *,
    alpha: float,
    seed: int,
    part_of_harness: bool = False,
    is_published_model: bool = False,
) -> tuple[Figures, str]:
    """(tasks, means, mean_differences, tests and standing, all of outcomes; the verdict).

    outcomes: task -> arm -> items. data: task -> hashes as they are now. part_of_harness: the
    lm-evaluation-harness was given fewer items than planned. is_published_model: the model is the
    paper's, whose scores then stand beside.

    Raises: ValueError where two arms answered different items.
    """
    scores = {
        task.name: {
            arm: arm_score(arm, outcomes[task.name][arm])
            for arm in task.arms
            if outcomes[task.name].get(arm)
        }
        for task in asked
    }
    family = compare(outcomes, {task.name: claims_of(task.arms) for task in asked}, alpha)
    tasks: dict[str, Figures] = {}
    reasons: list[str] = []
    for task in asked:
        name, plan = task.name, plans[task.name]
        held = standing(plan, evidence_of(plan, outcomes[name], data[name], seed))
        reasons += held.reasons
        published = task.task.published if is_published_model else None
        tasks[name] = {
            "title": task.task.title,
            "kind": task.task.kind,
            "metric": task.task.metric,
            "n": len(task.items),
            "available": task.available,
            "guess_rate": task.guess_rate,
            "arms": scores[name],
            "comparisons": [pair for pair in family if pair["task"] == name],
            "standing": held.as_json(),
            "published": published
            and {**asdict(published), "of": PUBLISHED_MODEL, "measured_here": False},
            "marks": marks_of(task, scores[name]),
        }
    if part_of_harness:
        reasons.append("tasks of the lm-evaluation-harness: a subset of the planned items")
    overall = Standing(tuple(dict.fromkeys(reasons)))
    differences = mean_differences(family, alpha)
    figures = {
        "tasks": tasks, "means": arm_means(scores), "mean_differences": differences,
        "tests": len(family), "standing": overall.as_json(),
    }  # fmt: skip
    few = _too_few(tasks, plans, len(family))
    return figures, _verdict(tasks, family, differences, overall, few)


# --- in words -------------------------------------------------------------------------------------


def marks_of(asked: AskedTask, arms: Mapping[str, Figures]) -> list[str]:
    """What makes a score say less than it seems to."""
    marks = list(asked.notes)
    at_guess = [name for name, score in arms.items() if _guesses(score, asked.guess_rate)]
    if at_guess:
        guess = 100 * (asked.guess_rate or 0)
        marks.append(f"at the level of guessing ({guess:.1f}%): {', '.join(at_guess)}")
    never_boxed = [
        name
        for name, score in arms.items()
        if asked.task.grader == "boxed" and score["boxed_rate"] == 0
    ]
    lists = {
        "never boxed an answer, so its score is 0 whatever it knows": never_boxed,
        "gave no answer that a rule finds to half of the items or more": [
            name
            for name, score in arms.items()
            if score["parse_failure_rate"] >= _MOSTLY and name not in never_boxed
        ],
        "not graded (programs of a model run with --allow-code only)": [
            name for name, score in arms.items() if score["score"] is None
        ],
        "not graded in part": [
            name
            for name, score in arms.items()
            if score["score"] is not None and score["n"] < score["items"]
        ],
    }
    marks += [f"{words}: {', '.join(names)}" for words, names in lists.items() if names]
    counts = {
        "prompts cut from the left": "prompts_truncated",
        "replies cut at max_tokens": "cut_at_max_tokens",
        "answered by the base, no domain active": "answered_without_domains",
        "ties, counted as wrong": "ties",
    }
    for words, key in counts.items():
        listed = [
            f"{name} {score[key]}"
            for name, score in arms.items()
            if score[key] and (key != "answered_without_domains" or name in CHOOSING)
        ]
        if listed:
            marks.append(f"{words}: {', '.join(listed)}")
    return marks


def _guesses(score: Figures, guess: float | None) -> bool:
    if guess is None or score["score"] is None:
        return False
    return bool(score["interval"]["low"] <= guess <= score["interval"]["high"])


def _too_few(tasks: Mapping[str, Figures], plans: Mapping[str, Plan], tests: int) -> list[str]:
    """Sentences on tasks of so few items that little or nothing can be shown; a task with a
    difference that counts is no such one.
    """
    names: dict[str, list[str]] = {}
    for name, task in tasks.items():
        if task["comparisons"] and all(c["label"] == EVEN for c in task["comparisons"]):
            least, share = least_effect(plans[name], tests), plans[name].expected_discordant
            if least is None:
                words = f"can show no difference at all, if {share:.0%} of pairs differ"
            elif least > _LARGE:
                words = f"show only differences above {100 * least:.0f} points"
            else:
                continue
            names.setdefault(words, []).append(name)
    return [
        f"So few items {words}{'' if len(tasks) == 1 else f' ({_and(of)})'}."
        for words, of in names.items()
    ]


def _verdict(
    tasks: Mapping[str, Figures],
    family: Sequence[Figures],
    differences: Sequence[Figures],
    overall: Standing,
    few: Sequence[str],
) -> str:
    """Sentences: each pair of arms, how many tests count, what else bears on it."""
    if not tasks:
        sentences = ["No tasks but the harness's; their tests are in its own section."]
    elif not family:
        names = ", ".join(dict.fromkeys(arm for task in tasks.values() for arm in task["arms"]))
        sentences = [f"One arm ({names}), or nothing graded: nothing is compared."]
    else:
        # Of one task its own tests decide, not the interval of a mean of one.
        several = len(tasks) > 1
        sentences = [*map(_mean_in_words, differences)] if several else _pairs_in_words(family)
        sentences.append(
            f"{_count_told_apart(family)} of {len(family)} tests count as differences at "
            "Holm-adjusted p; the rest are not distinguishable, which is not the same as equal."
        )
    guessing = [
        name
        for name, task in tasks.items()
        if (graded := [s for s in task["arms"].values() if s["score"] is not None])
        and all(_guesses(score, task["guess_rate"]) for score in graded)
    ]
    if guessing:
        sentences.append(
            f"On {', '.join(guessing)} every arm is at the level of guessing: equal scores there "
            "say nothing."
        )
    return " ".join([*sentences, *few, overall.in_words()])


def _count_told_apart(pairs: Sequence[Figures]) -> int:
    return sum(pair["label"] != EVEN for pair in pairs)


def _pairs_in_words(family: Sequence[Figures]) -> list[str]:
    """Of one task: what is better, what is worse, what is neither."""
    sentences = []
    for label in ("better", "worse"):
        controls: dict[str, list[str]] = {}
        for pair in family:
            if pair["label"] == label:
                controls.setdefault(pair["arm"], []).append(_points(pair, pair["control"]))
        sentences += [
            f"{arm.capitalize()} is {label} than {_and(parts)}." for arm, parts in controls.items()
        ]
    even = [_points(c, f"{c['arm']} from {c['control']}") for c in family if c["label"] == EVEN]
    return [*sentences, f"Not distinguishable: {_and(even)}."] if even else sentences


def _points(pair: Figures, name: str) -> str:
    low, high = 100 * pair["interval"]["low"], 100 * pair["interval"]["high"]
    p, adjusted = pair["mcnemar"]["p_value"], pair["p_adjusted"]
    alone = f"; p {p:.2g} alone, {adjusted:.2g} by Holm's rule" if _starred(pair) else ""
    return f"{name} ({100 * pair['difference']:+.1f} points, 95% {low:+.1f} to {high:+.1f}{alone})"


def _starred(pair: Figures) -> bool:
    """Whether the test, or the interval, alone would have said more."""
    return bool(pair["in_words"] != pair["label"])


def _and(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _mean_in_words(mean: Figures) -> str:
    low, high = 100 * mean["interval"]["low"], 100 * mean["interval"]["high"]
    words = (
        f"{mean['arm'].capitalize()} less {mean['control']}: {100 * mean['mean']:+.1f} points in "
        f"the mean of {mean['tasks']} tasks (95% {low:+.1f} to {high:+.1f}), {mean['in_words']}"
    )
    on = [f"{name} on {', '.join(mean[name])}" for name in ("better", "worse") if mean[name]]
    return "; ".join([words, *on]) + "."


def outcome(figures: Figures) -> str:
    """A few words."""
    pairs = [pair for task in figures["tasks"].values() for pair in task["comparisons"]]
    if not pairs:
        return "nothing compared"
    count = _count_told_apart(pairs)
    if not count:
        return f"no difference shown, of {len(pairs)} tested"
    return f"{count} of {len(pairs)} differences shown"


# --- tables ---------------------------------------------------------------------------------------


def plan_blocks(settings: Mapping[str, Any], tasks: Mapping[str, Figures]) -> tuple[Block, ...]:
    """What a run would ask. tasks: name -> `AskedTask.as_json`."""
    keys = ("model", "adapter_path", "store_path", "data", "items_per_task", "limit", "sample",
            "normalisation")  # fmt: skip
    rows: list[list[Cell]] = [
        [name, task["kind"], task["n"], task["available"], ", ".join(task["arms"])]
        for name, task in tasks.items()
    ]
    columns: _Columns = [("task", "text"), ("kind", "text"), ("items", "count"), ("of", "count"),
                         ("arms", "text")]  # fmt: skip
    asked = _table(
        "settings",
        "What would be asked",
        [("setting", "text"), ("value", "text")],
        [[key, None if settings[key] is None else str(settings[key])] for key in keys],
    )
    notes = [f"{name}: {note}" for name, task in tasks.items() for note in task["notes"]]
    return (
        asked,
        *([_table("tasks", "Tasks", columns, rows)] if rows else []),
        *([Text(title="On the data", paragraphs=tuple(notes))] if notes else []),
    )


def blocks(figures: Figures, harness: Figures, settings: Mapping[str, Any]) -> tuple[Block, ...]:
    """Plots, then tables: scores, pairs, means, what the scores do not say, how they came."""
    tasks: dict[str, Figures] = figures["tasks"]
    parts = _plots(figures)
    if tasks:
        pairs = [pair for task in tasks.values() for pair in task["comparisons"]]
        parts.append(_score_table(tasks, settings["normalisation"]))
        if pairs:
            parts.append(_pair_table("pairs", "Paired tests", pairs, len(tasks) > 1))
        if len(tasks) > 1 and figures["means"]:
            parts += _mean_tables(figures)
        marks = [f"{name}: {mark}" for name, task in tasks.items() for mark in task["marks"]]
        if marks:
            parts.append(
                Text(title="What a reader of the scores must know", paragraphs=tuple(marks))
            )
        parts += _how_tables(tasks)
        published = {name: task for name, task in tasks.items() if task["published"]}
        if published:
            parts.append(_published_table(published))
    for number, (name, task) in enumerate(harness.get("tasks", {}).items(), 1):
        parts += _harness_tables(number, name, task)
    return tuple(parts)


def _table(id: str, title: str, columns: _Columns, rows: Sequence[Sequence[Cell]],
           caption: str = "") -> Table:  # fmt: skip
    return Table(
        id=id, title=title, columns=tuple(Column(name=name, kind=kind) for name, kind in columns),
        rows=tuple(map(tuple, rows)), caption=caption, folded=len(rows) > _MOST_OPEN_ROWS,
    )  # fmt: skip


def _rate(score: Figures | None) -> Cell:
    """A share with its interval; None for an arm that was not asked."""
    if score is None or score.get("score") is None:
        return None if score is None else "not graded"
    return score["score"], score["interval"]["low"], score["interval"]["high"]


def _share(score: Figures | None) -> Cell:
    return None if score is None else score["score"]


def _interval(value: float, figures: Figures) -> Cell:
    return value, figures["interval"]["low"], figures["interval"]["high"]


def _arms(tasks: Mapping[str, Figures]) -> list[str]:
    return list(dict.fromkeys(arm for task in tasks.values() for arm in task["arms"]))


def _score_table(tasks: Mapping[str, Figures], normalisation: str) -> Table:
    """A row a task; of one task a row an arm, which a phone is wide enough for."""
    by = f", by {normalisation}"
    any_by = by if any(task["kind"] == "likelihood" for task in tasks.values()) else ""
    if len(tasks) > 1:
        arms = _arms(tasks)
        rows: list[list[Cell]] = [
            [task["title"], task["n"], task["available"], task["guess_rate"],
             *(_rate(task["arms"].get(arm)) for arm in arms)]
            for task in tasks.values()
        ]  # fmt: skip
        columns: _Columns = [("task", "text"), ("items", "count"), ("of", "count"),
                             ("guessing", "share"), *((arm, "share") for arm in arms)]  # fmt: skip
        title = f"Scores, with 95% intervals{any_by}"
        return _table("scores", title, columns, rows)
    (task,) = tasks.values()
    title = f"{task['title']}, {task['n']:,} of {task['available']:,} items{any_by}"
    guess = task["guess_rate"]
    caption = "" if guess is None else f"Guessing gives {100 * guess:.1f}%; "
    columns = [("arm", "text"), ("right", "count"), ("share, with its 95% interval", "share")]
    return _table(
        "scores", title, columns,
        [[arm, score.get("right"), _rate(score)] for arm, score in task["arms"].items()],
        f"{caption}{share_note(task['n'])}.",
    )  # fmt: skip


def _pair_table(id: str, title: str, pairs: Sequence[Figures], several: bool) -> Table:
    rows = [
        [*([pair["task"]] if several else []), _name(pair), _outcome_of(pair),
         pair["difference"], (pair["interval"]["low"], pair["interval"]["high"]),
         pair["mcnemar"]["p_value"], pair["p_adjusted"]]
        for pair in pairs
    ]  # fmt: skip
    caption = f"{len(pairs)} test{'s' * (len(pairs) > 1)}; p (Holm) is adjusted for all of them."
    if any(map(_starred, pairs)):
        caption += " *: p is below alpha, p (Holm) is not: of so many tests one may well have such "
        caption += "a p by chance."
    columns: _Columns = [
        *_TASK[:several], ("pair", "text"), ("outcome", "text"),
        ("points", "points"), ("95%", "points"),
        ("p (McNemar)", "p"), ("p (Holm)", "p"),
    ]  # fmt: skip
    return _table(id, title, columns, rows, caption)


def _name(pair: Figures) -> str:
    return f"{pair['arm']} - {pair['control']}"


def _outcome_of(pair: Figures) -> str:
    """Few words, which a phone has room for; a star where the test alone says more."""
    label: str = pair["label"]
    return _SHORT.get(label, label) + "*" * _starred(pair)


def _mean_tables(figures: Figures) -> list[Block]:
    means, differences = figures["means"], figures["mean_differences"]
    found: list[Block] = [
        _table(
            "arm-means", "Mean over tasks, each the same weight",
            [("arm", "text"), ("mean score, with its 95% interval", "share"), ("tasks", "count")],
            [[arm, _interval(mean["mean"], mean), mean["tasks"]] for arm, mean in means.items()],
        )
    ]  # fmt: skip
    if differences:
        caption = ""
        if any(map(_starred, differences)):
            caption = "*: its 95% interval is clear of 0, but not the wider one that so many pairs "
            caption += "need."
        rows = [
            [_name(mean), _outcome_of(mean), _interval(mean["mean"], mean), mean["tasks"],
             ", ".join(mean["better"]) or "none", ", ".join(mean["worse"]) or "none"]
            for mean in differences
        ]  # fmt: skip
        columns: _Columns = [
            ("pair", "text"), ("outcome", "text"), ("points, with their 95% interval", "points"),
            ("tasks", "count"), ("better on", "text"), ("worse on", "text"),
        ]  # fmt: skip
        title = "Differences, mean over tasks"
        found.append(_table("mean-differences-table", title, columns, rows, caption))
    return found


def _how_tables(tasks: Mapping[str, Figures]) -> list[Block]:
    """By the other normalisations, by letters and the old rule; and what it took."""
    found: list[Block] = []
    likelihood = _rows_of(tasks, "likelihood")
    if likelihood:
        kinds = list(next(iter(likelihood))[2]["normalisations"])
        extra = {"letters": "letters", "old rule": "reference_offset"}
        extra = {name: key for name, key in extra.items() if any(s[key] for *_, s in likelihood)}
        found.append(
            _table(
                "normalisations", "Likelihoods, by every normalisation",
                [("task", "text"), ("arm", "text"), *((name, "share") for name in (*kinds, *extra)),
                 ("ties", "count")],
                [
                    [task, arm, *(_share(score["normalisations"].get(kind)) for kind in kinds),
                     *(_share(score[key]) for key in extra.values()), score["ties"]]
                    for task, arm, score in likelihood
                ],
                f"At the fewest, {share_note(min(s['items'] for *_, s in likelihood))}.",
            )
        )  # fmt: skip
    replies = _rows_of(tasks, "generate")
    if replies:
        counts = {"no answer": "parse_failure_rate", "boxed": "boxed_rate"}
        found.append(
            _table(
                "replies", "Replies",
                [("task", "text"), ("arm", "text"), *((name, "share") for name in counts),
                 ("cut", "count"), ("answer taken by", "text")],
                [
                    [task, arm, *(score[key] for key in counts.values()),
                     score["cut_at_max_tokens"], _listed(score["rules"])]
                    for task, arm, score in replies
                ],
                f"At the fewest, {share_note(min(s['items'] for *_, s in replies))}.",
            )
        )  # fmt: skip
    every = [*likelihood, *replies]
    found.append(
        _table(
            "cost", "What it took",
            [("task", "text"), ("arm", "text"), ("active domains, mean", "number"),
             ("prompts cut", "count"), ("seconds", "seconds")],
            [
                [task, arm, score["mean_active_domains"], score["prompts_truncated"],
                 score["seconds"]]
                for task, arm, score in every
            ],
        )
    )  # fmt: skip
    return found


def _rows_of(tasks: Mapping[str, Figures], kind: str) -> list[tuple[str, str, Figures]]:
    return [
        (name, arm, score)
        for name, task in tasks.items()
        if task["kind"] == kind
        for arm, score in task["arms"].items()
    ]


def _listed(counts: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _published_table(tasks: Mapping[str, Figures]) -> Table:
    """Scores of the paper, where the model is its own: beside, never compared."""
    ours = ("base", "routed")
    rows: list[list[Cell]] = []
    for task in tasks.values():
        scores = [task["arms"].get(arm) for arm in ours]
        rows.append([
            task["title"], *(task["published"][arm] for arm in ours),
            *map(_share, scores), *(_share(s and s["reference_offset"]) for s in scores),
        ])  # fmt: skip
    names = [form.format(arm) for form in ("published {}", "{}", "{}, old rule") for arm in ours]
    title = f"Published, not measured here: {PUBLISHED_MODEL}, old rule"
    columns: _Columns = [("task", "text"), *((name, "share") for name in names)]
    n = min([task["published"]["n"], *(s["items"] for s in task["arms"].values())]) if rows else 1
    return _table("published", title, columns, rows, f"At the fewest, {share_note(n)}.")


def _harness_tables(number: int, name: str, task: Figures) -> list[Block]:
    rows: list[list[Cell]] = []
    for arm, score in task["arms"].items():
        metrics = ", ".join(
            f"{key.removesuffix(',none')} {value:.3f}"
            for key, value in score["metrics"].items()
            if key != "sample_len"
        )
        rows.append([arm, metrics, _rate(score) if "score" in score else None, score["ties"],
                     score["seconds"]])  # fmt: skip
    columns: _Columns = [
        ("arm", "text"), ("metrics", "text"), ("tested, with its 95% interval", "share"),
        ("ties", "count"), ("seconds", "seconds"),
    ]  # fmt: skip
    title = f"lm-evaluation-harness, by its own scoring: {name}"
    found: list[Block] = [
        _table(f"harness-{number}", f"{title}, tested: {task['metric']}", columns, rows)
    ]
    if task["comparisons"]:
        id, title = f"harness-{number}-pairs", f"{title}, paired tests"
        found.append(_pair_table(id, title, task["comparisons"], False))
    return found


# --- plots ----------------------------------------------------------------------------------------


def _plots(figures: Figures) -> list[Block]:
    """Means of several tasks and their differences; every pair; every task."""
    tasks, means = figures["tasks"], figures["means"]
    plots: list[Block] = []
    if len(tasks) > 1 and means:
        count = max(mean["tasks"] for mean in means.values())
        rows = [(arm, mean["mean"], mean, "") for arm, mean in means.items()]
        plots.append(_intervals("means", f"Mean score over {count} tasks", rows, "mean score, %"))
    pairs = [pair for task in tasks.values() for pair in task["comparisons"]]
    both = {
        "mean-differences": ("Differences, mean over tasks", [
            (_name(mean), mean["mean"], mean, mean["label"])
            for mean in figures["mean_differences"] if len(tasks) > 1
        ]),
        "differences": ("Differences between modes, task by task", [
            (f"{_name(pair)}, {pair['task']}", pair["difference"], pair, pair["label"])
            for pair in pairs
        ]),
    }  # fmt: skip
    plots += [
        _intervals(id, title, rows, "percentage points", {"no difference": 0.0})
        for id, (title, rows) in both.items()
        if rows
    ]
    for name, task in tasks.items():
        guess = task["guess_rate"]
        plots.append(
            _intervals(
                f"task-{name.replace('_', '-')}", f"{task['title']}, {task['n']:,} items",
                [(arm, score["score"], score, "") for arm, score in task["arms"].items()],
                f"{task['metric']}, %", {} if guess is None else {"guessing": 100 * guess},
            )
        )  # fmt: skip
    return plots


def _intervals(
    id: str,
    title: str,
    rows: Sequence[tuple[str, float | None, Figures, str]],
    x_label: str,
    references: dict[str, float] | None = None,
) -> Plot:
    """rows: name, share or difference, figures with its interval, and group: what its colour and
    marker mean.
    """
    series = []
    for group in dict.fromkeys(group for *_, group in rows):
        values = [
            (100 * value, 100 * of["interval"]["low"], 100 * of["interval"]["high"])
            if value is not None and own == group
            else (None, None, None)
            for _, value, of, own in rows
        ]
        y, low, high = zip(*values, strict=True)
        series.append(Series(label=group, y=y, low=low, high=high))
    words = ", ".join(
        f"{name} {'not measured' if value is None else f'{100 * value:.3g}'}"
        f"{f' ({group})' if group else ''}"
        for name, value, _, group in rows
    )
    return Plot(
        id=id, title=title, kind="intervals", categories=tuple(name for name, *_ in rows),
        series=tuple(series), x_label=f"{x_label}, 95% interval", form="{:.1f}",
        references=references or {}, alt=f"{title}, {x_label}: {words}.",
    )  # fmt: skip
