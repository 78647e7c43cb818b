"""What the identity suite says: conditions beside the gate, prompts lost, broad regression."""

from functools import partial

from mlxstacks.report.content import Block, Cell, Content, Mark, Plot, Words, table
from mlxstacks.report.values import Value, bounds
from mlxstacks.study.render.drawings import Dot, draw_heat_map, draw_intervals
from mlxstacks.study.render.words import fixed, listed, number, p_value, percent, short

_MOST_PROMPTS = 30
# What a judgement says of its condition, as the verdict's sentence does.
_HEADS = {"kept": "keeps the persona", "lost": "loses it", "not shown": "leaves it open"}
_COUNTED = {"kept": "kept", "lost": "lost", "not shown": "left open", "no claim": "without a claim"}


def identity_content(document: Value, mark: Mark) -> Content:
    conditions = document["conditions"]
    if not conditions:
        return Content("planned", document["verdict"].text or "planned only; nothing was run.")
    blocks: list[Block] = [_condition_plot(document, mark)]
    if document["replies"]:
        blocks.append(_prompt_map(document, mark))
    blocks += [
        _condition_table(document, mark), _compared_table(document, mark), _words(document),
        _regression_table(document, mark),
        *([_published_table(document, mark)] if document["published"] else []),
        _reply_table(document, mark),
    ]  # fmt: skip
    return Content(_outcome(document), document["verdict"].text or "", tuple(blocks))


def _outcome(document: Value) -> str:
    """Per policy: what is judged under it, or that its gate is shut."""
    outcome = document["outcome"]
    if not outcome.is_mapping:
        return outcome.text or "no outcome"
    said = []
    for policy, state in outcome.items():
        if state.text != "valid":
            said.append(f"{policy}: scorer invalid, {state.text}")
            continue
        found = [
            one["outcome"].text or "not judged"
            for one in document["judgements"].each()
            if one["policy"].text == policy
        ]
        counts = [f"{found.count(one)} {_COUNTED.get(one, one)}" for one in dict.fromkeys(found)]
        said.append(f"{policy}: {listed(counts) or 'nothing judged'}")
    return "; ".join(said) or "no outcome"


def _called(name: str, one: Value) -> str:
    return one["label"].text or name.replace("_", " ")


def _full(document: Value, name: str) -> str:
    """Its label, with the policy where there are several."""
    conditions = document["conditions"]
    policies = {one["policy"].text for _, one in conditions.items()} - {None}
    label, policy = _called(name, conditions[name]), conditions[name]["policy"].text
    return f"{label}, {policy}" if policy and len(policies) > 1 else label


def _condition_plot(document: Value, mark: Mark) -> Plot:
    """Prompts passed by every condition, with intervals, beside both lines of the gate."""
    dots, n = [], 0
    for name, one in document["conditions"].items():
        n = max(n, one["n"].count or 0)
        own = one["n"].number or 0.0
        low, high = one["interval"]["low"].number, one["interval"]["high"].number
        dots.append(
            Dot(
                _full(document, name), one["passed"].number,
                None if low is None else own * low, None if high is None else own * high,
                one["policy"].text or "no fuse",
            )
        )  # fmt: skip
    references = _gate_lines(document)
    title = mark("Identity: prompts passed in each condition")
    said = listed(f"{dot.label} {number(dot.value) or 'not measured'}" for dot in dots)
    lines = listed(f"{name} {number(place)}" for name, place in references.items())
    draw = partial(
        draw_intervals, dots=dots, xlabel=f"prompts passed of {n}, 95% interval", title=title,
        references=references, form="{:.0f}",
    )  # fmt: skip
    alt = f"{title}, of {n}: {said}. Gate: {lines or 'not given'}."
    return Plot("conditions", title, alt, draw)


def _gate_lines(document: Value) -> dict[str, float]:
    for _, gate in document["gates"].items():
        most = gate["limits"]["most_of_base"].number
        least = gate["limits"]["least_of_persona"].number
        if most is not None and least is not None:
            return {"gate: most of the base": most, "gate: least of the persona": least}
    return {}


def _prompt_map(document: Value, mark: Mark) -> Plot:
    """Which prompt passed in which condition: equal totals may be different prompts."""
    replies = document["replies"]
    names = replies.names()
    first = replies[names[0]].each()[:_MOST_PROMPTS]
    prompts = [one["prompt_id"].text or "?" for one in first]
    values: list[list[float | None]] = []
    for name in names:
        passed = {r["prompt_id"].text: r["passed"].flag for r in replies[name].each()}
        values.append([
            None if (found := passed.get(prompt)) is None else float(found) for prompt in prompts
        ])  # fmt: skip
    title = mark("Which prompts pass (1) and which do not (0)")
    counts = [sum(1 for v in row if v) for row in values]
    said = listed(f"{_full(document, n)} {c}" for n, c in zip(names, counts, strict=True))
    draw = partial(
        draw_heat_map, rows=[_full(document, name) for name in names], columns=prompts,
        values=values, title=title, xlabel="prompt", ylabel="", unit="", form="{:.0f}",
        limits=(0.0, 1.0), words=("failed", "passed"),
    )  # fmt: skip
    return Plot("prompts", title, f"{title}. Passed of {len(prompts)}: {said}.", draw)


def _condition_table(document: Value, mark: Mark) -> Block:
    conditions = document["conditions"]
    categories = list(
        dict.fromkeys(c for _, one in conditions.items() for c in one["by_category"].names())
    )
    rows: list[list[Cell]] = []
    for name, one in conditions.items():
        parts = [one["by_category"][category] for category in categories]
        rows.append([
            one["label"].text or name, one["policy"].text or "no fuse",
            _of(one["passed"], one["n"]), bounds(one["interval"], 0, scale=100),
            *(_of(part["passed"], part["n"]) if part else None for part in parts),
        ])  # fmt: skip
    columns = ("condition", "policy", "passed", "95%, in percent", *categories)
    return table(mark("Conditions"), columns, rows)


def _of(count: Value, n: Value) -> Cell:
    if count.number is None:
        return None
    return f"{number(count.number)} of {number(n.number) or 'unknown'}"


def _compared_table(document: Value, mark: Mark) -> Block:
    rows: list[list[Cell]] = []
    for name, one in document["compared"].items():
        loss = one["loss"]
        rows.append([
            _full(document, name), _full(document, one["reference"].text or "?"),
            number(one["kept"].number), len(one["lost"].each()), len(one["gained"].each()),
            bounds(loss, 0, scale=100) if loss else "nothing to lose",
            p_value(one["p_value"].number),
            p_value(one["p_adjusted"].number) or "no claim", number(one["other_texts"].number),
            listed(one["lost"].texts()) or "none", listed(one["gained"].texts()) or "none",
        ])  # fmt: skip
    columns = ("condition", "beside", "kept", "lost", "gained", "lost, 95%, in percent",
               "p (McNemar)", "p (Holm)", "replies that differ", "prompts lost",
               "prompts gained")  # fmt: skip
    return table(mark("Prompt by prompt"), columns, rows)


def _words(document: Value) -> Words:
    said = [gate["words"].text or "" for _, gate in document["gates"].items()]
    said += _judged(document)
    said += [words.text or "" for _, words in document["regression_words"].items()]
    for policy, missing in document["missing_controls"].items():
        if missing:
            said.append(f"Controls that are missing under {policy}: {listed(missing.texts())}.")
    return Words("In words", tuple(words for words in said if words))


def _judged(document: Value) -> list[str]:
    """Sentences with their outcome; conditions of which the same is said have one together."""
    named: dict[str, list[str]] = {}
    for one in document["judgements"].each():
        outcome = one["outcome"].text or "not judged"
        words = f"{_HEADS.get(outcome, outcome)}: {one['words'].text or 'no words'}"
        full = _full(document, one["arm"].text or one["name"].text or "")
        named.setdefault(words, []).append(full)
    return [f"{'; '.join(names)}: {words}" for words, names in named.items()]


def _regression_table(document: Value, mark: Mark) -> Block:
    rows: list[list[Cell]] = [
        [
            name.replace("_", " "), (one["reference"].text or "?").replace("_", " "),
            number(one["n"].number), number(one["right"].number),
            number(one["reference_right"].number), number(one["fixed"].number),
            number(one["broken"].number), number(one["net"].number),
            p_value(one["p_value"].number), fixed(one["chi_square"].number, 2),
            number(one["in_form"].number), number(one["reference_in_form"].number),
        ]
        for name, one in document["regression"].items()
    ]  # fmt: skip
    columns = ("arm", "beside", "items", "right", "right before", "fixed", "broken", "net",
               "p (McNemar)", "chi square", "in form", "in form before")  # fmt: skip
    return table(mark("Broad regression: right answers gained and lost"), columns, rows)


def _published_table(document: Value, mark: Mark) -> Block:
    found = document["published"]
    n = found["n"].number
    rows: list[list[Cell]] = [
        [
            name.replace("_", " "), f"{number(count.number)} of {number(n)}",
            percent(None if count.number is None or not n else count.number / n, 0),
            bounds(found["intervals"][name], 0, scale=100),
        ]
        for name, count in found["passed"].items()
    ]  # fmt: skip
    note = f"Of {found['of'].text or 'a model that is not named'}."
    columns = ("condition", "passed", "share", "95%, in percent")
    return table("Published scores, for comparison", columns, rows, note=note, folded=True)


def _reply_table(document: Value, mark: Mark) -> Block:
    rows: list[list[Cell]] = [
        [
            _full(document, name), reply["prompt_id"].text, reply["category"].text,
            "yes" if reply["passed"].flag else "no", reply["reason"].text,
            short(reply["text"].text or "", 160),
        ]
        for name, replies in document["replies"].items()
        for reply in replies.each()
    ]  # fmt: skip
    columns = ("condition", "prompt", "category", "passed", "why", "reply")
    return table(mark("Replies"), columns, rows, folded=True)
