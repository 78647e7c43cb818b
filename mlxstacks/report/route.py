"""What the discovery of outcomes, the training of a router and a check of prompts say."""

from functools import partial

from mlxstacks.report.content import Block, Cell, Content, Mark, Plot, table
from mlxstacks.report.route_evaluate import rate
from mlxstacks.report.train import curve, loss_plot
from mlxstacks.report.values import Value, estimate
from mlxstacks.stats import wilson_interval
from mlxstacks.study.render.drawings import Dot, draw_intervals, percent_dot
from mlxstacks.study.render.words import fixed, listed, number, percent, short


def discover_content(document: Value, mark: Mark) -> Content:
    oracle = document["oracle"].each()
    blocks: list[Block] = []
    if oracle:
        blocks.append(_gain_plot(oracle, mark("What the best set of stacks takes off the loss")))
    rows: list[list[Cell]] = [
        [
            row["label"].text, number(row["n"].number), rate(row["own"]), rate(row["label_in_set"]),
            rate(row["nothing"]), estimate(row["gain"]), estimate(row["own_gain"]),
        ]
        for row in oracle
    ]  # fmt: skip
    columns = ("label", "pairs", "best set is the label", "holds it", "no set helps", "gain, nats",
               "gain of the label alone")  # fmt: skip
    blocks.append(table(mark("Which stacks help, by label"), columns, rows))
    control = document["control"]
    controls: list[list[Cell]] = [
        ["random stacks would be chosen", rate(control["chosen"])],
        ["some random stack helps", rate(control["helps"])],
        ["some real stack helps", rate(control["real_helps"])],
        ["mean gain of random stacks, nats", estimate(control["gain"])],
        ["mean gain of real stacks, nats", estimate(control["real_gain"])],
    ]
    blocks.append(table(mark("Control: random stacks of equal norm"), ("what", "value"), controls))
    gap = document["greedy_gap"]
    search: list[list[Cell]] = [
        ["greedy finds the best set", rate(gap["same_set"])],
        ["nats it leaves", estimate(gap["nats"])],
    ]
    blocks.append(table(mark("Greedy search against all sets"), ("what", "value"), search))
    share = percent(document["counts"]["discovered_share"].number, 0)
    outcome = f"{share or 'no share'} of targets discovered"
    return Content(outcome, document["verdict"].text or "", tuple(blocks))


def _gain_plot(oracle: list[Value], title: str) -> Plot:
    dots = [
        Dot(row["label"].text or "?", row["gain"]["mean"].number, row["gain"]["low"].number,
            row["gain"]["high"].number)
        for row in oracle
    ]  # fmt: skip
    said = listed(f"{dot.label} {number(dot.value) or 'not measured'}" for dot in dots)
    draw = partial(
        draw_intervals, dots=dots, xlabel="gain, nats a token (right is better)", title=title,
        references={"no gain": 0.0},
    )  # fmt: skip
    return Plot("gains", title, f"{title}, by label, nats a token: {said}.", draw)


def route_train_content(document: Value, mark: Mark) -> Content:
    metrics, history = document["metrics"], document["history"]
    keys = ("train_loss", "loss", "validation_loss", "bce")
    curves = {key: _by_epoch(history, key) for key in keys}
    curves = {key: found for key, found in curves.items() if found}
    blocks: list[Block] = []
    if curves:
        blocks.append(loss_plot("losses", mark("Losses of the router by epoch"), curves))
    rows: list[list[Cell]] = [
        ["right domain first, single prompts", _hits(metrics, "single_top1", "single")],
        ["both domains, mixed prompts", _hits(metrics, "mixed_set", "mixed")],
        ["calibration error", fixed(metrics["calibration"]["expected_calibration_error"].number)],
        ["best epoch", number(document["best_epoch"].number)],
        ["parameters", number(document["parameters"].number)],
        ["domains", listed(document["domains"].texts())],
        ["examples", number(document["examples"]["all"].number)],
        ["of them with discovered targets", number(document["examples"]["discovered"].number)],
        ["router in the store", document["installed"].text or "not put there"],
    ]
    blocks.append(table(mark("On prompts that were held out"), ("what", "value"), rows))
    hits = _hits(metrics, "single_top1", "single")
    outcome = f"right domain first: {hits or 'not measured'}"
    return Content(outcome, document["verdict"].text or "", tuple(blocks))


def _hits(metrics: Value, share: str, kind: str) -> str | None:
    """A share of held-out prompts of a kind, with its n and interval."""
    value, n = metrics[share].number, metrics["examples"][kind].count
    if value is None or not n or not 0 <= value <= 1:
        return None
    interval = wilson_interval(round(value * n), n)
    low, high = 100 * interval.low, 100 * interval.high
    return f"{percent(value)} of {n:,} ({low:.0f} to {high:.0f})"


def _by_epoch(history: Value, key: str) -> list[tuple[float, float]]:
    found = curve(history, key)
    if found:
        return found
    return [
        (epoch, value)
        for record in history.each()
        if (epoch := record["epoch"].number) is not None
        and (value := record[key].number) is not None
    ]


def route_check_content(document: Value, mark: Mark) -> Content:
    summary = document["summary"]
    dots: list[Dot] = []
    rows: list[list[Cell]] = []
    for mode, found in summary["answers"].items():
        rows.append([f"answers that hold, {mode}", rate(found)])
        dots.append(_rate_dot(f"answers hold, {mode}", found))
    for key in ("expected_domains_active", "more_than_one_active"):
        rows.append([key.replace("_", " "), rate(summary[key])])
        if summary[key]:
            dots.append(_rate_dot(key.replace("_", " "), summary[key]))
    blocks: list[Block] = []
    if dots:
        title = mark("Answers and routes that hold")
        said = listed(f"{dot.label} {number(dot.value) or 'not measured'}%" for dot in dots)
        draw = partial(draw_intervals, dots=dots, xlabel="% of prompts, 95% interval", title=title,
                       limits=(-5.0, 105.0), form="{:.0f}%")  # fmt: skip
        blocks.append(Plot("rates", title, f"{title}: {said}.", draw))
    blocks.append(table(mark("Rates"), ("what", "rate"), rows))
    prompts: list[list[Cell]] = []
    for one in document["prompts"].each():
        failed = [
            f"{mode}: {', '.join(found['failed'].texts())}"
            for mode, found in one["answers"].items()
            if found["failed"]
        ]
        weights = listed(f"{name} {fixed(w.number, 2)}" for name, w in one["weights"].items())
        missing = listed(one["missing_domains"].texts())
        prompts.append([
            one["name"].text, short(one["prompt"].text or "", 160), weights or "base",
            missing or "none", "; ".join(failed) or "none",
        ])  # fmt: skip
    columns = ("prompt", "text", "active domains", "missing domains", "rules that failed")
    blocks.append(table(mark("Prompts"), columns, prompts, folded=True))
    routes = rate(summary["expected_domains_active"])
    outcome = f"expected domains: {routes or 'not measured'}"
    return Content(outcome, document["verdict"].text or "", tuple(blocks))


def _rate_dot(label: str, found: Value) -> Dot:
    return percent_dot(label, found["rate"].number, found["low"].number, found["high"].number)
