"""What `mlxstacks eval` says: figures of all tasks, the verdict, tables and plots."""

from collections.abc import Iterable, Mapping, Sequence
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
from mlxstacks.studies.benchmarks.items import AskedTask
from mlxstacks.studies.benchmarks.settings import NORMALISATIONS
from mlxstacks.studies.benchmarks.tasks import PUBLISHED_MODEL
from mlxstacks.study.document import Block, Cell, Column, Plot, Series, Standing, Table, Text
from mlxstacks.study.plan import Evidence, Plan, standing
from mlxstacks.study.power import POWER, least_effect_of_mcnemar

# Arms that choose among stacks.
CHOOSING = ("routed", "oracle", "random")
_MOSTLY = 0.5
# Differences of rates that only a broken arm has.
_LARGE = 0.2
_MOST_OPEN_ROWS = 40
_MOST_PAIRS_IN_WORDS = 3


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
        items = {arm: [o.item_id for o in of_arm] for arm, of_arm in outcomes[name].items()}
        held = standing(plan, Evidence(plan.sha256, items, data[name], (seed,)))
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
            "standing": held.model_dump(),
            "published": published
            and {**asdict(published), "of": PUBLISHED_MODEL, "measured_here": False},
            "marks": marks_of(task, scores[name]),
        }
    if part_of_harness:
        reasons.append("tasks of the lm-evaluation-harness: a subset of the planned items")
    overall = Standing.of(dict.fromkeys(reasons))
    differences = mean_differences(family, alpha)
    figures = {
        "tasks": tasks, "means": arm_means(scores), "mean_differences": differences,
        "tests": len(family), "standing": overall.model_dump(),
    }  # fmt: skip
    few = _too_few(tasks, plans, len(family))
    return figures, _verdict(tasks, family, differences, overall, few)


def marks_of(asked: AskedTask, arms: Mapping[str, Figures]) -> list[str]:
    """What makes a score say less than it seems to."""

    def counted(key: str, among: Iterable[str] = arms) -> list[str]:
        return [f"{name} {arms[name][key]}" for name in arms if arms[name][key] and name in among]

    boxes = asked.task.grader == "boxed"
    never_boxed = [name for name, s in arms.items() if boxes and s["boxed_rate"] == 0]
    graded = {name: s for name, s in arms.items() if s["score"] is not None}
    lists = {
        f"not told from guessing ({100 * (asked.guess_rate or 0):.1f}%)": [
            name for name, s in arms.items() if _guesses(s, asked.guess_rate)
        ],
        "never boxed an answer, so its score is 0 whatever it knows": never_boxed,
        "gave no answer that a rule finds to half of the items or more": [
            name for name, s in arms.items()
            if s["parse_failure_rate"] >= _MOSTLY and name not in never_boxed
        ],
        "not graded (programs of a model run with --allow-code only)": [
            name for name in arms if name not in graded
        ],
        "not graded in part": [name for name, s in graded.items() if s["n"] < s["items"]],
        "prompts cut from the left": counted("prompts_truncated"),
        "replies cut at max_tokens": counted("cut_at_max_tokens"),
        "answered by the base, no domain active": counted("answered_without_domains", CHOOSING),
        "ties, counted as wrong": counted("ties"),
    }  # fmt: skip
    return [*asked.notes, *(f"{words}: {', '.join(of)}" for words, of in lists.items() if of)]


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
            plan, share = plans[name], plans[name].expected_discordant
            alpha = plan.thresholds["alpha"] / tests
            least = least_effect_of_mcnemar(share, plan.n, POWER, alpha)
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
        sentences = [_one_arm(tasks)]
    else:
        # Of one task its own tests decide, not the interval of a mean of one.
        several = len(tasks) > 1
        sentences = [*map(_mean_in_words, differences)] if several else _pairs_in_words(family)
        count = sum(pair["label"] != EVEN for pair in family)
        sentences.append(
            f"{count} of {len(family)} tests show a difference (p adjusted by Holm's rule); no "
            "difference shown is not the same as equal."
        )
    guessing = [
        name
        for name, task in tasks.items()
        if (graded := [s for s in task["arms"].values() if s["score"] is not None])
        and all(_guesses(score, task["guess_rate"]) for score in graded)
    ]
    if guessing:
        sentences.append(
            f"On {', '.join(guessing)} no arm is told from guessing: equal scores there say "
            "nothing."
        )
    head = ["EXPLORATORY. No claim beyond the answers that were counted here."]
    return " ".join([*(head if overall.reasons else []), *sentences, *few, overall.in_words()])


def _one_arm(tasks: Mapping[str, Figures]) -> str:
    """Where no two arms have answers that were graded."""
    scores = [(name, arm, s) for name, task in tasks.items() for arm, s in task["arms"].items()]
    names = ", ".join(dict.fromkeys(arm for _, arm, _ in scores))
    if len(scores) == 1 and scores[0][2]["score"] is not None:
        [(task_name, arm, score)] = scores
        low, high = (100 * score["interval"][end] for end in ("low", "high"))
        return (
            f"{arm.capitalize()}: {score['right']} of {score['n']} right on {task_name}, "
            f"{score['score']:.1%} ({low:.1f} to {high:.1f}). One arm, so nothing is compared."
        )
    return f"One arm ({names}), or nothing graded: nothing is compared."


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
    even = [_points(c, f"{c['arm']} and {c['control']}") for c in family if c["label"] == EVEN]
    if len(even) > _MOST_PAIRS_IN_WORDS:
        of = "pairs" if len(even) == len(family) else "other pairs"
        return [*sentences, f"No difference shown: {len(even)} {of}, in the table of paired tests."]
    return [*sentences, f"No difference shown: {_and(even)}."] if even else sentences


def _points(pair: Figures, name: str) -> str:
    low, high = 100 * pair["interval"]["low"], 100 * pair["interval"]["high"]
    p, adjusted = pair["mcnemar"]["p_value"], pair["p_adjusted"]
    alone = f"; p {p:.2g} alone, {adjusted:.2g} by Holm's rule" if _starred(pair) else ""
    if _clear_of_zero(pair):
        alone = f"; p {p:.2g} by the exact test, which decides"
    return f"{name} ({100 * pair['difference']:+.1f} points, 95% {low:+.1f} to {high:+.1f}{alone})"


def _starred(pair: Figures) -> bool:
    """Whether the test, or the interval, alone would have said more."""
    return bool(pair["in_words"] != pair["label"])


def _clear_of_zero(pair: Figures) -> bool:
    """Whether the interval says more than the exact test, which decides and is stricter."""
    even = pair["label"] == EVEN and not _starred(pair)
    return even and pair["interval"]["low"] * pair["interval"]["high"] > 0


def _and(parts: Sequence[str]) -> str:
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _mean_in_words(mean: Figures) -> str:
    low, high = 100 * mean["interval"]["low"], 100 * mean["interval"]["high"]
    words = (
        f"{mean['arm'].capitalize()} - {mean['control']}: {100 * mean['mean']:+.1f} points in "
        f"the mean of {mean['tasks']} tasks (95% {low:+.1f} to {high:+.1f}), {mean['in_words']}"
    )
    on = [f"{name} on {', '.join(mean[name])}" for name in ("better", "worse") if mean[name]]
    return "; ".join([words, *on]) + "."


def outcome(figures: Figures) -> str:
    """A few words."""
    pairs = _pairs(figures["tasks"])
    count = sum(pair["label"] != EVEN for pair in pairs)
    words = f"{count} of {len(pairs)} differences shown"
    if not count:
        words = f"no difference shown, of {len(pairs)} tested" if pairs else "nothing compared"
    return f"exploratory: {words}" if figures["standing"]["reasons"] else words


def _table(
    id: str, title: str, columns: str, rows: Sequence[Sequence[Cell]], caption: str = ""
) -> Table:
    """columns: names with their kinds, `name: kind | name`; without a kind they are text."""
    names = [column.partition(": ") for column in columns.split(" | ")]
    return Table(
        id=id, title=title, rows=tuple(map(tuple, rows)), caption=caption,
        columns=tuple(Column(name=name, kind=kind or "text") for name, _, kind in names),
        folded=len(rows) > _MOST_OPEN_ROWS,
    )  # fmt: skip


def plan_blocks(settings: Mapping[str, Any], tasks: Mapping[str, Figures]) -> tuple[Block, ...]:
    """What a run would ask. tasks: name -> `AskedTask.as_json`."""
    keys = ("model", "adapter_path", "store_path", "data", "items_per_task", "limit", "sample",
            "normalisation")  # fmt: skip
    asked = [[key, None if settings[key] is None else str(settings[key])] for key in keys]
    rows = [
        [name, task["kind"], task["n"], task["available"], ", ".join(task["arms"])]
        for name, task in tasks.items()
    ]
    notes = tuple(f"{name}: {note}" for name, task in tasks.items() for note in task["notes"])
    parts: list[Block] = [_table("settings", "What would be asked", "setting | value", asked)]
    if rows:
        columns = "task | kind | items: count | available: count | arms"
        parts.append(_table("tasks", "Tasks", columns, rows))
    return (*parts, *([Text(title="On the data", paragraphs=notes)] if notes else []))


def blocks(figures: Figures, harness: Figures, settings: Mapping[str, Any]) -> tuple[Block, ...]:
    """Plots, then tables: scores, pairs, means, what the scores do not say, how they came."""
    tasks: dict[str, Figures] = figures["tasks"]
    parts = _plots(figures)
    if tasks:
        parts.append(_score_table(tasks, settings["normalisation"]))
        parts += _pair_tables("pairs", "Paired tests", _pairs(tasks), len(tasks) > 1)
        if len(tasks) > 1:
            parts += _mean_tables(figures)
        marks = tuple(f"{name}: {mark}" for name, task in tasks.items() for mark in task["marks"])
        if marks:
            parts.append(Text(title="Notes on the scores", paragraphs=marks))
        parts += [*_how_tables(tasks), *_published_tables(tasks)]
    for number, (name, task) in enumerate(harness.get("tasks", {}).items(), 1):
        parts += _harness_tables(f"harness-{number}", name, task)
    return tuple(parts)


def _pairs(tasks: Mapping[str, Figures]) -> list[Figures]:
    return [pair for task in tasks.values() for pair in task["comparisons"]]


def _rate(score: Figures | None) -> Cell:
    """A share with its interval; None for an arm that was not asked."""
    if score is None or score["score"] is None:
        return None if score is None else "not graded"
    return _interval(score["score"], score)


def _share(score: Figures | None) -> Cell:
    return None if score is None else score["score"]


def _interval(value: float, figures: Figures) -> Cell:
    return value, figures["interval"]["low"], figures["interval"]["high"]


def _score_table(tasks: Mapping[str, Figures], normalisation: str) -> Table:
    """A row a task; of one task a row an arm, which a phone is wide enough for."""
    by = f", by {normalisation}" if any(t["kind"] == "likelihood" for t in tasks.values()) else ""
    if len(tasks) > 1:
        arms = list(dict.fromkeys(arm for task in tasks.values() for arm in task["arms"]))
        rows = [
            [task["title"], task["n"], task["available"], task["guess_rate"],
             *(_rate(task["arms"].get(arm)) for arm in arms)]
            for task in tasks.values()
        ]  # fmt: skip
        of_arms = "".join(f" | {arm}: share" for arm in arms)
        columns = f"task | items: count | available: count | guessing: share{of_arms}"
        return _table("scores", f"Scores, with 95% intervals{by}", columns, rows)
    (task,) = tasks.values()
    guess = (
        "" if task["guess_rate"] is None else f"Guessing gives {100 * task['guess_rate']:.1f}%; "
    )
    return _table(
        "scores", f"{task['title']}, {task['n']:,} of {task['available']:,} items{by}",
        "arm | right: count | score (95%): share",
        [[arm, score.get("right"), _rate(score)] for arm, score in task["arms"].items()],
        f"{guess}{share_note(task['n'])}.",
    )  # fmt: skip


def _pair_tables(
    id: str, title: str, pairs: Sequence[Figures], several: bool = False
) -> list[Table]:
    if not pairs:
        return []
    rows = [
        [*[pair["task"]][:several], _name(pair), _outcome_of(pair), pair["difference"],
         (pair["interval"]["low"], pair["interval"]["high"]), pair["mcnemar"]["gained"],
         pair["mcnemar"]["lost"], pair["mcnemar"]["p_value"], pair["p_adjusted"]]
        for pair in pairs
    ]  # fmt: skip
    caption = f"{len(pairs)} test{'s' * (len(pairs) > 1)}; p (Holm) is adjusted for all of them. "
    caption += "fixed: items that only the first arm gets right; broken: only the second."
    if any(map(_starred, pairs)):
        caption += " *: p is below alpha, p (Holm) is not: of so many tests one may well have such "
        caption += "a p by chance."
    if any(map(_clear_of_zero, pairs)):
        caption += " †: the interval is clear of 0, but the exact test, which is stricter, decides."
    columns = "pair | outcome | points: points | 95%: points | fixed: count | broken: count"
    columns += " | p (McNemar): p | p (Holm): p"
    return [_table(id, title, f"{'task | ' * several}{columns}", rows, caption)]


def _name(pair: Figures) -> str:
    return f"{pair['arm']} - {pair['control']}"


def _outcome_of(pair: Figures) -> str:
    """Few words, which a phone has room for; a mark where test or interval alone says more."""
    label: str = pair["label"]
    return label + "*" * _starred(pair) + "†" * _clear_of_zero(pair)


def _mean_tables(figures: Figures) -> list[Table]:
    means, differences = figures["means"], figures["mean_differences"]
    tables = []
    if means:
        rows = [[arm, _interval(mean["mean"], mean), mean["tasks"]] for arm, mean in means.items()]
        columns = "arm | mean score, with its 95% interval: share | tasks: count"
        title = "Mean over tasks, each the same weight"
        tables.append(_table("arm-means", title, columns, rows))
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
        columns = "pair | outcome | points, with their 95% interval: points | tasks: count"
        columns += " | better on | worse on"
        title = "Differences, mean over tasks"
        tables.append(_table("mean-differences-table", title, columns, rows, caption))
    return tables


def _how_tables(tasks: Mapping[str, Figures]) -> list[Table]:
    """By the other normalisations, by letters and the old rule; where replies had their answers;
    and what it took.
    """
    scores = [
        (task["kind"], name, arm, score)
        for name, task in tasks.items()
        for arm, score in task["arms"].items()
    ]
    likelihood = [row[1:] for row in scores if row[0] == "likelihood"]
    replies = [row[1:] for row in scores if row[0] == "generate"]
    keys = {"letters": "letters", "old rule": "reference_offset"}
    keys = {name: key for name, key in keys.items() if any(s[key] for *_, s in likelihood)}
    tables = []
    if likelihood:
        names = "".join(f" | {name}: share" for name in (*NORMALISATIONS, *keys))
        rows = [
            [task, arm, *(_share(s["normalisations"].get(name)) for name in NORMALISATIONS),
             *(_share(s[key]) for key in keys.values()), s["ties"]]
            for task, arm, s in likelihood
        ]  # fmt: skip
        title, columns = "Likelihoods, by every normalisation", f"task | arm{names} | ties: count"
        tables.append(_table("normalisations", title, columns, rows, _fewest(likelihood)))
    if replies:
        rows = [
            [task, arm, s["parse_failure_rate"], s["boxed_rate"], s["cut_at_max_tokens"],
             ", ".join(f"{rule} {count}" for rule, count in s["rules"].items())]
            for task, arm, s in replies
        ]  # fmt: skip
        columns = "task | arm | no answer: share | boxed: share | cut: count | answer taken by"
        tables.append(_table("replies", "Replies", columns, rows, _fewest(replies)))
    rows = [
        [task, arm, s["mean_active_domains"], s["prompts_truncated"], s["seconds"]]
        for _, task, arm, s in scores
    ]
    columns = "task | arm | active domains, mean: number | prompts cut: count | seconds: seconds"
    return [*tables, _table("cost", "What it took", columns, rows)]


def _fewest(rows: Sequence[tuple[Any, ...]]) -> str:
    return f"At the fewest, {share_note(min(score['items'] for *_, score in rows))}."


def _published_tables(tasks: Mapping[str, Figures]) -> list[Table]:
    """Scores of the paper, where the model is its own: beside, never compared."""
    arms, rows, counts = ("base", "routed"), [], []
    for task in tasks.values():
        if published := task["published"]:
            scores = [task["arms"].get(arm) for arm in arms]
            rows.append([
                task["title"], *(published[arm] for arm in arms), *map(_share, scores),
                *(_share(score and score["reference_offset"]) for score in scores),
            ])  # fmt: skip
            counts += [published["n"], *(score["items"] for score in task["arms"].values())]
    forms = ("published {}", "{}", "{}, old rule")
    columns = " | ".join(["task", *(f"{form.format(a)}: share" for form in forms for a in arms)])
    title = f"Published, not measured here: {PUBLISHED_MODEL}, old rule"
    caption = f"At the fewest, {share_note(min(counts))}." if counts else ""
    return [_table("published", title, columns, rows, caption)] if rows else []


def _harness_tables(id: str, name: str, task: Figures) -> list[Table]:
    rows = []
    for arm, score in task["arms"].items():
        metrics = ", ".join(
            f"{key.removesuffix(',none')} {value:.3f}"
            for key, value in score["metrics"].items()
            if key != "sample_len"
        )
        tested = _rate(score) if "score" in score else None
        rows.append([arm, metrics, tested, score["ties"], score["seconds"]])
    columns = "arm | metrics | tested, with its 95% interval: share | ties: count"
    title = f"lm-evaluation-harness, by its own scoring: {name}"
    scores = f"{title}, tested: {task['metric']}"
    return [
        _table(id, scores, f"{columns} | seconds: seconds", rows),
        *_pair_tables(f"{id}-pairs", f"{title}, paired tests", task["comparisons"]),
    ]


def _plots(figures: Figures) -> list[Block]:
    """Means of several tasks and their differences; every pair; every task."""
    tasks, means = figures["tasks"], figures["means"]
    plots: list[Block] = []
    if len(tasks) > 1 and means:
        count = max(mean["tasks"] for mean in means.values())
        rows = [(arm, mean["mean"], mean, "") for arm, mean in means.items()]
        plots.append(_intervals("means", f"Mean score over {count} tasks", rows, "mean score, %"))
    both = {
        "mean-differences": ("Differences, mean over tasks", [
            (_name(mean), mean["mean"], mean, mean["label"])
            for mean in figures["mean_differences"] if len(tasks) > 1
        ]),
        "differences": ("Differences between modes, task by task", [
            (f"{_name(pair)}, {pair['task']}", pair["difference"], pair, pair["label"])
            for pair in _pairs(tasks)
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
    series = [
        Series.of_intervals(
            group,
            [
                _interval(v, of) if v is not None and own == group else None
                for _, v, of, own in rows
            ],
            scale=100,
        )
        for group in dict.fromkeys(group for *_, group in rows)
    ]
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
