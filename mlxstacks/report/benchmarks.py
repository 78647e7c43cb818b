"""What the benchmarks say: every arm on every task with intervals, paired tests, means."""

from functools import partial

from mlxstacks.report.content import Block, Cell, Content, Mark, Plot, Words, table
from mlxstacks.report.values import Value, bounds, plain
from mlxstacks.study.render.drawings import draw_intervals, percent_dot
from mlxstacks.study.render.words import listed, number, p_value, percent, points

# Of a label, where a column has little room.
_SHORT = {"not distinguishable": "not told apart"}


def eval_content(document: Value, mark: Mark) -> Content:
    tasks = document["tasks"]
    if not tasks:
        return Content("planned", document["verdict"].text or "planned only; nothing was run.")
    blocks: list[Block] = []
    if len(document["means"].names()) > 0 and len(tasks.names()) > 1:
        blocks.append(_mean_plot(document, mark))
    if any(True for _, task in tasks.items() for _ in task["comparisons"].each()):
        blocks.append(_difference_plot(document, mark))
    blocks += [_score_table(document, mark), _difference_table(document, mark)]
    if len(tasks.names()) > 1:
        blocks.append(_mean_table(document, mark))
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
    """A row a task; of one task a row an arm, which a phone is wide enough for."""
    tasks = list(document["tasks"].items())
    if len(tasks) == 1:
        return _arm_table(*tasks[0], mark)
    arms = _arms(document)
    rows: list[list[Cell]] = [
        [
            task["title"].text or name, number(task["n"].number),
            percent(task["guess_rate"].number) or "none",
            *(_score(task["arms"][arm]) for arm in arms),
        ]
        for name, task in tasks
    ]  # fmt: skip
    return table(mark("Scores, with 95% intervals"), ("task", "items", "guessing", *arms), rows)


def _arm_table(name: str, task: Value, mark: Mark) -> Block:
    rows: list[list[Cell]] = [
        [
            arm,
            number(one["right"].number),
            percent(one["score"].number) or "not graded",
            bounds(one["interval"], 1, scale=100),
        ]
        for arm, one in task["arms"].items()
    ]
    guess = percent(task["guess_rate"].number)
    note = f"Guessing gives {guess}." if guess else ""
    title = f"Scores, {task['title'].text or name}, {number(task['n'].number) or '?'} items"
    return table(mark(title), ("arm", "right", "share", "95% interval"), rows, note=note)


def _outcome_of(one: Value, alone: bool) -> Cell:
    """Few words, which a phone has room for; a star where the test alone says more."""
    label = one["label"].text
    found = _SHORT.get(label, label) if label else None
    return f"{found}*" if found and alone and label not in ("better", "worse") else found


def _pair(one: Value) -> str:
    return f"{one['arm'].text} - {one['control'].text}"


def _difference_table(document: Value, mark: Mark) -> Block:
    alpha = document["settings"]["alpha"].number
    several = len(document["tasks"].names()) > 1
    rows: list[list[Cell]] = []
    for name, task in document["tasks"].items():
        for one in task["comparisons"].each():
            p = one["mcnemar"]["p_value"].number
            alone = p is not None and alpha is not None and p < alpha
            rows.append([
                *([name] if several else []), _pair(one), _outcome_of(one, alone),
                points(one["difference"].number),
                bounds(one["interval"], 1, scale=100, sign=True), p_value(p),
                p_value(one["p_adjusted"].number),
            ])  # fmt: skip
    columns = ("pair", "outcome", "points", "95%", "p (McNemar)", "p (Holm)")
    tests = number(document["tests"].number) or "an unknown number of"
    note = f"{tests} test{'' if tests == '1' else 's'}; p (Holm) is adjusted for all of them."
    if _any_star(rows, 1 + several):
        note += f" *: its own p, without Holm's rule, is below {alpha:g}."
    return table(mark("Paired tests"), ("task", *columns) if several else columns, rows, note=note)


def _any_star(rows: list[list[Cell]], column: int) -> bool:
    return any(str(row[column]).endswith("*") for row in rows)


def _mean_table(document: Value, mark: Mark) -> Block:
    rows: list[list[Cell]] = []
    for one in document["mean_differences"].each():
        low, high = _bounds(one)
        alone = low is not None and high is not None and not low <= 0 <= high
        rows.append([
            _pair(one), _outcome_of(one, alone), points(one["mean"].number),
            bounds(one["interval"], 1, scale=100, sign=True), number(one["tasks"].number),
            listed(one["better"].texts()) or "none", listed(one["worse"].texts()) or "none",
        ])  # fmt: skip
    columns = ("pair", "outcome", "points", "95%", "tasks", "better on", "worse on")
    note = ""
    if _any_star(rows, 1):
        note = "*: its 95% interval is clear of 0, but not the wider one that so many pairs need."
    return table(mark("Differences, mean over tasks"), columns, rows, note=note)


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
