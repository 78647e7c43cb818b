"""What a comparison of stack settings says: arms less the control, over seeds."""

from functools import partial

from mlxstacks.report.content import Block, Cell, Content, Mark, Plot, table
from mlxstacks.report.values import Value, estimate
from mlxstacks.study.render.drawings import Dot, draw_intervals
from mlxstacks.study.render.words import listed, number


def compare_content(document: Value, mark: Mark) -> Content:
    """Of compare_report.json: arms against the control, with intervals over seeds."""
    arms = document["arms"].each()
    plan = document["plan"]
    primary, margin = plan["primary"].text or "?", plan["margin"].number
    dots: list[Dot] = []
    rows: list[list[Cell]] = []
    for arm in arms:
        judged = arm["judged"]
        rows.append([
            arm["arm"].text, estimate(arm["means"][primary], digits=4),
            estimate(judged, digits=4, sign=True), number(judged["n"].number),
            arm["outcome"].text or "control", arm["reason"].text or "",
        ])  # fmt: skip
        if arm["outcome"].text:
            dots.append(
                Dot(arm["arm"].text or "?", judged["mean"].number, judged["low"].number,
                    judged["high"].number)
            )  # fmt: skip
    blocks: list[Block] = []
    if dots:
        title = mark(f"Arms less control, {primary}")
        blocks.append(_plot(title, dots, margin))
    columns = ("arm", f"mean {primary}", "less control", "seeds", "outcome", "why")
    blocks.append(table(mark(f"Arms, by {primary}"), columns, rows,
                        note="Nats a token; intervals of Student over seeds."))  # fmt: skip
    measures = list(dict.fromkeys(name for arm in arms for name in arm["means"].names()))
    more: list[list[Cell]] = [
        [name, *(estimate(arm["means"][name], digits=4) for arm in arms)] for name in measures
    ]
    names = [arm["arm"].text or "?" for arm in arms]
    blocks.append(table(mark("All measures"), ("measure", *names), more, folded=True))
    outcomes = [f"{a['arm'].text}: {a['outcome'].text}" for a in arms if a["outcome"].text]
    return Content(listed(outcomes) or "not run", document["verdict"].text or "", tuple(blocks))


def _plot(title: str, dots: list[Dot], margin: float | None) -> Plot:
    said = listed(f"{dot.label} {number(dot.value) or 'not measured'}" for dot in dots)
    references = {"no difference": 0.0}
    if margin is not None:
        references |= {"what counts as better": -margin, "what counts as worse": margin}
    draw = partial(
        draw_intervals, dots=dots, xlabel="difference to the control, nats a token", title=title,
        references=references, form="{:+.4f}",
    )  # fmt: skip
    return Plot("arms", title, f"{title}, nats a token, with intervals: {said}.", draw)
