"""What the benchmarks say: every arm on every task with intervals, paired tests, means."""

from functools import partial

from mlxstacks.report.content import Block, Cell, Content, Mark, Plot, Words, table
from mlxstacks.report.plots import draw_intervals, percent_dot
from mlxstacks.report.values import Value
from mlxstacks.report.words import bounds, listed, number, p_value, percent, plain, points


def eval_content(document: Value, mark: Mark) -> Content:
    tasks = document["tasks"]
    if not tasks:
        return Content("planned", document["verdict"].text or "planned only; nothing was run.")
    blocks: list[Block] = []
    if len(document["means"].names()) > 0 and len(tasks.names()) > 1:
        blocks.append(_mean_plot(document, mark))
    if any(True for _, task in tasks.items() for _ in task["comparisons"].each()):
        blocks.append(_difference_plot(document, mark))
    blocks += [_score_table(document, mark), _difference_table(document, mark),
               _mean_table(document, mark)]  # fmt: skip
    blocks += [_task_plot(name, task, mark) for name, task in tasks.items()]
    marks = [f"{name}: {said}" for name, task in tasks.items() for said in task["marks"].texts()]
    if marks:
        blocks.append(Words("What a reader of the scores must know", tuple(marks)))
    blocks.append(_how_table(document, mark))
    if any(task["published"] for _, task in tasks.items()):
        blocks.append(_published_table(document))
    if document["harness"]:
        blocks.append(_harness_table(document, mark))
    return Content(_outcome(document), document["verdict"].text or "", tuple(blocks))


def _outcome(document: Value) -> str:
    found = [one for _, task in document["tasks"].items() for one in task["comparisons"].each()]
    if not found:
        return "nothing compared"
    told = sum(one["label"].text in ("better", "worse") for one in found)
    if not told:
        return f"no difference shown, of {len(found)} tested"
    return f"{told} of {len(found)} differences shown"


def _bounds(one: Value) -> tuple[float | None, float | None]:
    return one["interval"]["low"].number, one["interval"]["high"].number


def _task_plot(name: str, task: Value, mark: Mark) -> Plot:
    dots = [
        percent_dot(arm, one["score"].number, *_bounds(one))
        for arm, one in task["arms"].items()
    ]  # fmt: skip
    guess = task["guess_rate"].number
    references = {} if guess is None else {"guessing": 100 * guess}
    title = mark(f"{task['title'].text or name}, {number(task['n'].number) or '?'} items")
    said = listed(f"{dot.label} {number(dot.value, 3) or 'not measured'}%" for dot in dots)
    metric = task["metric"].text or "score"
    draw = partial(
        draw_intervals, dots=dots, xlabel=f"{metric}, %, 95% interval", title=title,
        references=references, form="{:.1f}",
    )  # fmt: skip
    guessing = "" if guess is None else f" Guessing: {percent(guess)}."
    return Plot(f"task-{name}", title, f"{title}, {metric}: {said}.{guessing}", draw)


def _mean_plot(document: Value, mark: Mark) -> Plot:
    dots = [
        percent_dot(arm, one["mean"].number, *_bounds(one))
        for arm, one in document["means"].items()
    ]  # fmt: skip
    count = max((one["tasks"].count or 0 for _, one in document["means"].items()), default=0)
    title = mark(f"Mean score over {count} tasks")
    said = listed(f"{dot.label} {number(dot.value, 3) or 'not measured'}%" for dot in dots)
    draw = partial(draw_intervals, dots=dots, xlabel="mean score, %, 95% interval", title=title,
                   form="{:.1f}")  # fmt: skip
    return Plot("means", title, f"{title}: {said}.", draw)


def _difference_plot(document: Value, mark: Mark) -> Plot:
    """Every test, marked by whether it counts in the family of all."""
    dots = [
        percent_dot(
            f"{one['arm'].text} - {one['control'].text}, {name}", one["difference"].number,
            *_bounds(one), one["label"].text or "not judged",
        )
        for name, task in document["tasks"].items()
        for one in task["comparisons"].each()
    ]  # fmt: skip
    title = mark("Differences between modes, task by task")
    said = listed(f"{d.label} {number(d.value, 3) or 'not measured'} ({d.group})" for d in dots)
    draw = partial(
        draw_intervals, dots=dots, xlabel="percentage points, 95% interval", title=title,
        references={"no difference": 0.0}, form="{:+.1f}",
    )  # fmt: skip
    return Plot("differences", title, f"{title}, percentage points: {said}.", draw)


def _score(one: Value) -> Cell:
    share = percent(one["score"].number)
    if share is None:
        return "not graded" if one else None
    around = bounds(one["interval"], 1, scale=100)
    return f"{share} ({around})" if around else share


def _arms(document: Value) -> list[str]:
    return list(
        dict.fromkeys(arm for _, task in document["tasks"].items() for arm in task["arms"].names())
    )


def _score_table(document: Value, mark: Mark) -> Block:
    arms = _arms(document)
    rows: list[list[Cell]] = [
        [
            task["title"].text or name, number(task["n"].number),
            percent(task["guess_rate"].number) or "none",
            *(_score(task["arms"][arm]) for arm in arms),
        ]
        for name, task in document["tasks"].items()
    ]  # fmt: skip
    return table(mark("Scores, with 95% intervals"), ("task", "items", "guessing", *arms), rows)


def _difference_table(document: Value, mark: Mark) -> Block:
    rows: list[list[Cell]] = [
        [
            name, one["arm"].text, one["control"].text, points(one["difference"].number),
            bounds(one["interval"], 1, scale=100, sign=True),
            p_value(one["mcnemar"]["p_value"].number), p_value(one["p_adjusted"].number),
            one["in_words"].text or one["label"].text,
        ]
        for name, task in document["tasks"].items()
        for one in task["comparisons"].each()
    ]  # fmt: skip
    columns = ("task", "arm", "less", "points", "95%", "p (McNemar)", "p (Holm)", "finding")
    tests = number(document["tests"].number) or "an unknown number of"
    note = f"{tests} test{'' if tests == '1' else 's'}; p (Holm) is adjusted for all of them."
    return table(mark("Paired tests"), columns, rows, note=note)


def _mean_table(document: Value, mark: Mark) -> Block:
    rows: list[list[Cell]] = [
        [
            one["arm"].text, one["control"].text, number(one["tasks"].number),
            points(one["mean"].number), bounds(one["interval"], 1, scale=100, sign=True),
            one["in_words"].text or one["label"].text, listed(one["better"].texts()) or "none",
            listed(one["worse"].texts()) or "none",
        ]
        for one in document["mean_differences"].each()
    ]  # fmt: skip
    columns = ("arm", "less", "tasks", "points", "95%", "finding", "better on", "worse on")
    return table(mark("Differences, mean over tasks"), columns, rows)


def _how_table(document: Value, mark: Mark) -> Block:
    keys = ("ties", "unparsed", "prompts_truncated", "cut_at_max_tokens", "mean_active_domains")
    rows: list[list[Cell]] = [
        [
            name, arm, *(number(one[key].number, 3) for key in keys),
            plain(one["rules"]), number(one["seconds"].number, 3),
        ]
        for name, task in document["tasks"].items()
        for arm, one in task["arms"].items()
    ]  # fmt: skip
    columns = ("task", "arm", "ties", "no answer found", "prompts cut", "replies cut",
               "active domains, mean", "answer taken by", "seconds")  # fmt: skip
    return table(mark("How the answers came"), columns, rows, folded=True)


def _published_table(document: Value) -> Block:
    rows: list[list[Cell]] = []
    for name, task in document["tasks"].items():
        found = task["published"]
        for key, value in found.items():
            if key not in ("of", "measured_here"):
                rows.append([name, key.replace("_", " "), plain(value), found["of"].text])
    return table("Published scores, not measured here", ("task", "what", "value", "of"), rows,
                 folded=True)  # fmt: skip


def _harness_table(document: Value, mark: Mark) -> Block:
    rows: list[list[Cell]] = [
        [task, arm, plain(found)]
        for task, arms in document["harness"].items()
        if arms.is_mapping
        for arm, found in arms.items()
    ]
    title = mark("As lm-evaluation-harness scores them")
    return table(title, ("task", "arm", "metrics"), rows, folded=True)
