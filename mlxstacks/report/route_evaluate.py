"""What an evaluation of routing says: every mode on every domain, gaps, routers, samples."""

from functools import partial

from mlxstacks.report.content import Block, Cell, Content, Mark, Plot, table
from mlxstacks.report.values import Value, estimate
from mlxstacks.study.render.drawings import Dot, draw_intervals
from mlxstacks.study.render.words import fixed, listed, number, short

ALL = "all domains"


def route_evaluate_content(document: Value, mark: Mark) -> Content:
    if document["status"].text == "planned":
        return Content("planned", document["verdict"].text or "")
    matrix, differences = document["matrix"], document["differences"]
    blocks: list[Block] = []
    if matrix:
        blocks.append(_mode_plot(matrix, mark("Loss in each mode, mean over domains")))
    groups = document["rows"].names()
    counts = {name: number(rows.number) for name, rows in document["rows"].items()}
    columns = ("mode", *(f"{name} ({counts[name]})" for name in groups), ALL)
    rows: list[list[Cell]] = [
        [mode, *(fixed(row[group]["value"].number) for group in (*groups, ALL))]
        for mode, row in matrix.items()
    ]
    blocks.append(table(mark("Loss, nats a token"), columns, rows, note="In brackets: rows."))
    for to, found in differences.items():
        title = mark(f"Difference to {to}, same tokens")
        if to == "base":
            blocks.insert(1, _difference_plot(found, title))
        cells: list[list[Cell]] = [
            [mode, *(estimate(row[g], "value", sign=True) for g in (*groups, ALL))]
            for mode, row in found.items()
        ]
        blocks.append(table(title, ("mode", *groups, ALL), cells, folded=to != "base",
                            note="Nats a token, 95% intervals over rows."))  # fmt: skip
    blocks += [_gaps(document, mark), _routers(document, mark), _panels(document, mark),
               _samples(document, mark)]  # fmt: skip
    routed = differences["base"]["routed"][ALL]
    outcome = f"routed less base {estimate(routed, 'value', sign=True) or 'not measured'}"
    return Content(outcome, document["verdict"].text or "", tuple(blocks))


def _dots(found: Value) -> list[Dot]:
    return [
        Dot(mode, row[ALL]["value"].number, row[ALL]["low"].number, row[ALL]["high"].number)
        for mode, row in found.items()
    ]


def _mode_plot(matrix: Value, title: str) -> Plot:
    dots = _dots(matrix)
    said = listed(f"{dot.label} {number(dot.value) or 'not measured'}" for dot in dots)
    draw = partial(draw_intervals, dots=dots, xlabel="loss, nats a token", title=title)
    return Plot("modes", title, f"{title}, nats a token: {said}.", draw)


def _difference_plot(found: Value, title: str) -> Plot:
    dots = _dots(found)
    said = listed(f"{dot.label} {number(dot.value) or 'not measured'}" for dot in dots)
    draw = partial(
        draw_intervals, dots=dots, xlabel="difference, nats a token (left is better)",
        title=title, references={"no difference": 0.0}, form="{:+.2f}",
    )  # fmt: skip
    return Plot("differences", title, f"{title}, mean over domains, nats a token: {said}.", draw)


def rate(found: Value) -> Cell:
    """`21 of 60, 35% (24 to 48)`, by `rate` or `share`."""
    if not found:
        return None
    key = "rate" if found["rate"] else "share"
    share = found[key].number
    if share is None:
        return f"{number(found['count'].number)} of {number(found['n'].number)}"
    bounds = found["interval"] if found["interval"] else found
    low, high = bounds["low"].number, bounds["high"].number
    around = "" if low is None or high is None else f" ({100 * low:.0f} to {100 * high:.0f})"
    counts = f"{number(found['count'].number)} of {number(found['n'].number)}"
    return f"{counts}, {100 * share:.0f}%{around}"


def _gaps(document: Value, mark: Mark) -> Block:
    rows: list[list[Cell]] = [
        [test, *(rate(rates[kind]) for kind in ("detection", "false_alarms", "others"))]
        for test, rates in document["gaps"].items()
    ]
    columns = ("test", "unseen domains seen", "false alarms on known ones", "other prompts")
    return table(mark("Gaps: prompts that no domain fits"), columns, rows)


def _routers(document: Value, mark: Mark) -> Block:
    rows: list[list[Cell]] = [
        [
            router["name"].text, rate(router["metrics"]["single_top1"]),
            rate(router["metrics"]["mixed_set"]), fixed(router["metrics"]["bce"].number),
            fixed(router["metrics"]["calibration_error"].number),
            fixed(router["losses"]["routed"][ALL].number),
        ]
        for router in document["routers"].each()
    ]  # fmt: skip
    columns = ("router", "right domain first", "both domains of mixed prompts", "cross entropy",
               "calibration error", "routed loss")  # fmt: skip
    return table(mark("Routers"), columns, rows)


def _panels(document: Value, mark: Mark) -> Block:
    rows: list[list[Cell]] = [
        [
            name, panel["mode"].text, fixed(panel["losses"][ALL].number),
            f"{number(panel['exactly_right'].number)} of {number(panel['samples'].number)}",
        ]
        for name, panel in document["panels"].items()
    ]  # fmt: skip
    return table(mark("Three panels"), ("panel", "mode", "loss", "answers exactly right"), rows)


def _samples(document: Value, mark: Mark) -> Block:
    samples = document["samples"].each()
    panels = list(dict.fromkeys(name for one in samples for name in one["answers"].names()))
    rows: list[list[Cell]] = [
        [
            _short(one["prompt"]), one["group"].text, _short(one["expected"]),
            *(_short(one["answers"][panel]["text"]) for panel in panels),
        ]
        for one in samples
    ]  # fmt: skip
    return table(mark("Samples"), ("prompt", "group", "expected", *panels), rows, folded=True)


def _short(value: Value) -> Cell:
    text = value.text
    return None if text is None else short(text, 200)
