"""What the stacking confound says: arms beside guessing, content, where a score comes from."""

from functools import partial

from mlxstacks.report.content import Block, Cell, Content, Mark, Plot, Words, table
from mlxstacks.report.values import Value, bounds
from mlxstacks.stats import share_note
from mlxstacks.study.render.drawings import draw_intervals, percent_dot
from mlxstacks.study.render.words import fixed, listed, number, p_value, percent, points

_KINDS = {
    "persona": "persona, unfused", "a0": "A0, zero delta", "a1": "A1, trained",
    "random": "random delta",
}  # fmt: skip
_OUTCOMES = {
    "format": "a change of form; no knowledge shown",
    "content": "adds knowledge", "no content": "no knowledge shown",
    "perturbation": "a disturbance; no knowledge shown", "guessing": "leads back to guessing",
    "exploratory": "no claim: exploratory", "refused": "no claim: controls are missing",
}  # fmt: skip


def confound_content(document: Value, mark: Mark) -> Content:
    arms = document["arms"]
    if not arms:
        return Content("planned", document["verdict"].text or "planned only; nothing was run.")
    blocks: list[Block] = [_arm_plot(document, mark)]
    if document["claims"]:
        blocks.append(_claim_plot(document, mark))
    blocks += [
        _arm_table(document, mark), _claim_table(document, mark), _parts_table(document, mark),
        _words(document), _mined_table(document, mark), _subject_table(document, mark),
        _position_table(document, mark),
    ]  # fmt: skip
    if document["forms"]:
        blocks.append(_form_table(document, mark))
    if document["arms_on_right_items"]:
        blocks.append(_right_table(document, mark))
    outcome = document["outcome"].text or "no outcome"
    outcome = _OUTCOMES.get(outcome, outcome)
    return Content(outcome, document["verdict"].text or "", tuple(blocks))


def _kind(name: str) -> str:
    return _KINDS.get(name.partition("_")[0], "other")


def _arm_plot(document: Value, mark: Mark) -> Plot:
    """Accuracy of every arm with its interval; guessing as a line."""
    dots = []
    for name, arm in document["arms"].items():
        share, found = arm["accuracy"].number, arm["interval"]
        low, high = found["low"].number, found["high"].number
        dots.append(percent_dot(name.replace("_", " "), share, low, high, _kind(name)))
    guess = document["guess_rate"].number
    references = {} if guess is None else {"guessing": 100 * guess}
    title = mark("Arms on Set G's test items")
    said = listed(f"{dot.label} {number(dot.value, 3) or 'not measured'}%" for dot in dots)
    alt = f"{title}, right answers with 95% intervals: {said}. Guessing: {percent(guess)}."
    draw = partial(
        draw_intervals, dots=dots, xlabel="right answers, %, 95% interval", title=title,
        references=references, form="{:.1f}",
    )  # fmt: skip
    return Plot("arms", title, alt, draw)


def _claim_plot(document: Value, mark: Mark) -> Plot:
    dots = []
    for way, claim in document["claims"].items():
        found = claim["bootstrap"]
        low, high = found["low"].number, found["high"].number
        dots.append(percent_dot(way, claim["difference"].number, low, high))
    least = document["settings"]["least_gain"].number
    references = {"no difference": 0.0}
    if least is not None:
        references["least gain that counts"] = 100 * least
    title = mark("Content: A1 less A0, by the way of fusing")
    said = listed(f"{dot.label} {number(dot.value, 3) or 'not measured'}" for dot in dots)
    draw = partial(
        draw_intervals, dots=dots, xlabel="percentage points, bootstrap 95% interval", title=title,
        references=references, form="{:+.1f}",
    )  # fmt: skip
    return Plot("content", title, f"{title}, percentage points: {said}.", draw)


def _arm_table(document: Value, mark: Mark) -> Block:
    """Beside each accuracy the correlation of the arm's fuse, and what that did by itself."""
    rows: list[list[Cell]] = []
    for name, arm in document["arms"].items():
        kind, _, way = name.partition("_")
        total = document["fuses"][way][kind]["total"]
        rows.append([
            name.replace("_", " "), f"{number(arm['correct'].number)} of {number(arm['n'].number)}",
            percent(arm["accuracy"].number), bounds(arm["interval"], 1, scale=100),
            number(arm["unanswered"].number),
            listed(f"{rule} {number(count.number)}" for rule, count in arm["rules"].items()),
            _correlation(total, kind),
            percent(total["artifact"].number, 2) if total else "not fused",
        ])  # fmt: skip
    columns = ("arm", "right", "share", "95%, points", "no answer or tie", "answer taken by",
               "correlation of the fuse", "artifact")  # fmt: skip
    guess = percent(document["guess_rate"].number) or "not measured"
    return table(mark("Arms"), columns, rows, note=f"Guessing gives {guess}.")


def _correlation(total: Value, kind: str) -> Cell:
    """Correlation of the realised with the intended delta; the control has no delta."""
    if not total:
        return "not fused"
    return "no delta" if kind == "a0" else fixed(total["correlation"].number)


def _claim_table(document: Value, mark: Mark) -> Block:
    outcomes = {one["way"].text: one["outcome"].text for one in document["judgements"].each()}
    rows: list[list[Cell]] = []
    for way, claim in document["claims"].items():
        random = document["against_random"][way]
        rows.append([
            way, points(claim["difference"].number),
            bounds(claim["bootstrap"], 1, scale=100, sign=True), p_value(claim["p_value"].number),
            p_value(claim["p_adjusted"].number), p_value(claim["mcnemar"]["p_value"].number),
            points(random["difference"].number), outcomes.get(way),
        ])  # fmt: skip
    columns = ("by", "A1 less A0, points", "95%", "p (z)", "p (z, Holm)", "p (McNemar)",
               "A1 less random", "outcome")  # fmt: skip
    return table(mark("Content: A1 less A0"), columns, rows)


def _parts_table(document: Value, mark: Mark) -> Block:
    rows: list[list[Cell]] = [
        [
            way, *(points(parts[key].number) for key in ("floor", "content", "total")),
            *(percent(parts[key].number, 0)
              for key in ("floor_share", "content_share", "published_floor_share")),
        ]
        for way, parts in document["decomposition"].items()
    ]  # fmt: skip
    columns = ("by", "floor", "content", "total", "floor share", "content share", "A0 / A1")
    return table(mark("Where the score of A1 comes from, in points"), columns, rows,
                 note="A share has no value where the total is not positive; the differences that "
                 "it is made of have their 95% intervals above.")  # fmt: skip


def _words(document: Value) -> Words:
    said = []
    for one in document["judgements"].each():
        way = one["way"].text or "?"
        gain = points(document["claims"][way]["difference"].number) or "not measured"
        # the words go on from the difference: "That is at least ..."
        said.append(f"{way}: A1 less A0 is {gain} points. {one['words'].text}")
    said += [f"Floor, {way}: {words.text}" for way, words in document["floors"].items()]
    said += [
        _codes(way, figures["codes_that_differ"])
        for way, figures in document["fuses"].items()
        if figures["codes_that_differ"]
    ]
    for name, flips in document["persona_flips"].items():
        said.append(
            f"Persona unfused, {name}: {number(flips['changed'].number)} of "
            f"{number(flips['n'].number)} answers differ, {number(flips['fixed'].number)} became "
            f"right, {number(flips['broken'].number)} wrong."
        )
    missing = document["missing_controls"].texts()
    said.append(f"Controls that are missing: {listed(missing) or 'none'}.")
    return Words("In words", tuple(said))


def _codes(way: str, codes: Value) -> str:
    """How many packed codes the fuses of a policy leave different."""
    a1, a0 = (
        "at other bits" if share is None else f"{percent(share, 2)} of the codes"
        for share in (codes["a1_and_a0"].number, codes["a0_and_unfused"].number)
    )
    return f"Fused by {way}, A1 differs from A0: {a1}; A0 from the unfused model: {a0}."


def _form_table(document: Value, mark: Mark) -> Block:
    """More answers that a rule can read are more right ones without any knowledge."""
    rows: list[list[Cell]] = [
        [
            way, number(one["in_form"].number), number(one["control_in_form"].number),
            p_value(one["p_value"].number), number(one["n"].number), number(one["right"].number),
            number(one["control_right"].number),
        ]
        for way, one in document["forms"].items()
    ]  # fmt: skip
    columns = ("by", "A1 in form", "A0 in form", "p (McNemar)", "both in form", "of them A1 right",
               "A0 right")  # fmt: skip
    return table(mark("Answers in the form that was asked for"), columns, rows)


def _mined_table(document: Value, mark: Mark) -> Block:
    mined = document["mined"]["table"]
    names = list(dict.fromkeys(name for _, row in mined.items() for name in row.names()))
    rows: list[list[Cell]] = [
        [subject, *(number(row[name].number) for name in names)] for subject, row in mined.items()
    ]
    return table(mark("Mined items"), ("subject", *names), rows, folded=True)


def _subject_table(document: Value, mark: Mark) -> Block:
    subjects = document["subjects"]
    names = list(dict.fromkeys(name for _, row in subjects.items() for name in row.names()))
    rows: list[list[Cell]] = [
        [subject, *(number(row[name].number) for name in names)]
        for subject, row in subjects.items()
    ]
    columns = ("subject", *(name.replace("_", " ") for name in names))
    return table(mark("Right answers by subject"), columns, rows, folded=True)


def _right_table(document: Value, mark: Mark) -> Block:
    rows: list[list[Cell]] = [
        [
            name.replace("_", " "), f"{number(arm['correct'].number)} of {number(arm['n'].number)}",
            percent(arm["accuracy"].number), bounds(arm["interval"], 1, scale=100),
        ]
        for name, arm in document["arms_on_right_items"].items()
    ]  # fmt: skip
    columns = ("arm", "right", "share", "95%, points")
    return table(mark("Items that both models got right"), columns, rows, folded=True)


def _picks_note(arms: Value) -> str:
    n = min((arm["n"].count or 0 for _, arm in arms.items()), default=0)
    return f"Picks: {share_note(n)}." if n else ""


def _position_table(document: Value, mark: Mark) -> Block:
    """Where the right option stands, and which places the arms prefer: a guess has a place, too."""
    right, arms = document["right_positions"], document["arms"]
    picked = {letter for _, arm in arms.items() for letter in arm["picks"].names()}
    letters = sorted({*right.names(), *picked})

    def shares(of: Value) -> list[Cell]:
        return [percent(of[letter].number or 0.0, 0) for letter in letters]

    rows: list[list[Cell]] = [["right option", *shares(right), ""]]
    rows += [
        [name.replace("_", " "), *shares(arm["picks"]), percent(arm["by_position"].number)]
        for name, arm in arms.items()
    ]
    return table(
        mark("Which options are picked"), ("arm", *letters, "by place"), rows, folded=True,
        note="By place: what these picks score in the mean when they are dealt to the items by "
        f"chance. {_picks_note(arms)}",
    )  # fmt: skip
