"""What people see of a confound run: plots and tables of its findings, and the same in words."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple
from typing import Any

from mlxstacks.arms.set_g import split
from mlxstacks.stats import share, share_note
from mlxstacks.studies.confound.analysis import MOVED, ArmResult, Comparison
from mlxstacks.studies.confound.mechanism import growth_in_words, mechanism_blocks
from mlxstacks.studies.confound.plan import SECOND
from mlxstacks.studies.confound.settings import ConfoundSettings
from mlxstacks.studies.confound.verdict import Findings, headline
from mlxstacks.study.document import Block, Cell, Columns, Plot, Series, Table, Text, counted
from mlxstacks.study.items import Item, stratified_sample

_KINDS = {
    "persona": "persona, unfused", "a0": "A0, zero delta", "a1": "A1, trained",
    "random": "random delta, equal norm", "shuffled": "shuffled answers",
    "moved": MOVED, SECOND: "second choices, all items",
}  # fmt: skip


def plan_table(settings: Mapping[str, Any], arms: Sequence[str], items: Sequence[Item]) -> Table:
    """What is fixed before the first answer. settings: as JSON. items: none where they are not
    here.
    """
    mined: dict[str, Cell] = {"sample": settings["sample"] or "all"}
    if items:
        sample = stratified_sample(items, settings["sample"], settings["seed"])
        train, test = split(sample, settings["train_share"], settings["seed"])
        subjects = counted(len({item.subject for item in items}), "subject")
        part = "all" if len(sample) == len(items) else f"{len(sample):,}"
        mined = {
            "sample": f"{part} of {counted(len(items), 'item')} in {subjects}",
            "Set G": f"at most {len(train):,} items to train on and {len(test):,} to test, if base "
            "and persona get every one wrong",
        }
    inputs = ("model", "persona", "items", "scoring", "train_answers", "seed")
    training = ("layers", "keys", "rank", "scale", "iters", "batch_size", "learning_rate")
    values = ", ".join(f"{key} {settings['train'][key] or 'as usual'}" for key in training)
    return Table.of_facts("plan", "The plan", {
        **{key: None if settings[key] is None else str(settings[key]) for key in inputs},
        **mined,
        "policies": ", ".join(settings["policies"]),
        "A1": values,
        "arms": f"{len(arms)}: {', '.join(arms)}",
        "criterion": f"A1 - A0 of at least {100 * settings['least_gain']:g} points and p < "
        f"{settings['alpha']:g}",
    })  # fmt: skip


def blocks(
    findings: Findings,
    fuses: Mapping[str, Any],
    mined: Mapping[str, Any],
    settings: ConfoundSettings,
    matching: Mapping[str, Any],
    identity: Mapping[str, Any] | None = None,
    moves: Mapping[str, Any] | None = None,
) -> tuple[Block, ...]:
    """Arms and claims first; counts by subject last, folded. matching: way -> the search for the
    scale of its random delta. identity: arm -> its figures on the suite. moves: of fuses of zeros.
    """
    moves = moves or {"fuses": {}, "growth": None}
    growth = [growth_in_words(moves, findings.criterion.alpha)] if moves["growth"] else []
    return (
        _arm_plot(findings), _gain_plot(findings), _arm_table(findings, fuses, settings),
        *_identity_table(identity or {}), *_claim_tables(findings), _null_table(findings),
        _rule_table(findings), _moved_table(findings, matching), *mechanism_blocks(moves),
        _words(findings, fuses, mined, growth),
        *_more_tables(findings),
        _counts_table("mined", "Mined items", mined["table"]),
        _counts_table("subjects", "Right answers by subject", findings.subjects),
        _position_table(findings),
    )  # fmt: skip


def _name(arm: str) -> str:
    if arm == SECOND:
        return _KINDS[SECOND]
    return arm.replace("_again", ", again").replace("_", " ")


def _share(arm: ArmResult) -> tuple[float, float, float]:
    return arm.accuracy, arm.interval.low, arm.interval.high


def _gain(claim: Comparison) -> tuple[float, float, float]:
    return claim.difference, claim.interval.low, claim.interval.high


def _arm_plot(findings: Findings) -> Plot:
    """Accuracy of every arm with its interval; a series for each kind; guessing as a line."""
    arms = findings.arms
    series = tuple(
        Series.of_intervals(
            label,
            [
                _share(a) if kind == (SECOND if n == SECOND else n.partition("_")[0]) else None
                for n, a in arms.items()
            ],
            scale=100,
        )
        for kind, label in _KINDS.items()
    )
    title = "Arms on Set G's test items"
    shares = ", ".join(f"{_name(name)} {100 * arm.accuracy:.3g}%" for name, arm in arms.items())
    return Plot(
        id="arms", title=title, kind="intervals", categories=tuple(map(_name, arms)),
        series=series, x_label="right answers, %, 95% interval",
        references={"guessing": 100 * findings.guess_rate}, form="{:.1f}",
        alt=f"{title}, right answers with 95% intervals: {shares}. Guessing: "
        f"{findings.guess_rate:.1%}.",
    )  # fmt: skip


def _gain_plot(findings: Findings) -> Plot:
    """A1 - A0 by policy."""
    claims = findings.claims
    least_gain = 100 * findings.criterion.least_gain
    title = "Gain by policy: A1 - A0"
    points = ", ".join(f"{way} {100 * claim.difference:+.3g}" for way, claim in claims.items())
    return Plot(
        id="gain", title=title, kind="intervals", categories=tuple(claims),
        series=(Series.of_intervals("A1 - A0", map(_gain, claims.values()), scale=100),),
        x_label="percentage points, 95% interval", form="{:.1f}",
        references={"no difference": 0.0, "least gain that counts": least_gain},
        alt=f"{title}, percentage points: {points}.",
    )  # fmt: skip


def _arm_table(findings: Findings, fuses: Mapping[str, Any], settings: ConfoundSettings) -> Table:
    """Next to each accuracy the correlation of the arm's fuse, and what that did by itself."""
    rows: list[tuple[Cell, ...]] = []
    by_text = settings.scoring == "generate"  # of likelihoods all answers are taken alike
    for name, result in findings.arms.items():
        kind, _, way = name.partition("_")
        total = (fuses.get(way, {}).get(kind) or {}).get("total") or {}
        fuse: tuple[Cell, Cell] = ("not fused", "not fused")
        if total:
            correlation = "no delta" if kind == "a0" else total.get("correlation")
            fuse = correlation, total.get("artifact")
        rules = [", ".join(f"{rule} {count}" for rule, count in result.rules.items())] * by_text
        right = f"{result.correct} of {result.n}"
        again = findings.second_form.get(name)
        second = [f"{again.correct} of {again.n}" if again else None] * bool(findings.second_form)
        moved, on_right = findings.moved.get(name), findings.right_flips.get(name)
        rows.append((
            _name(name), right, _share(result), *second, moved.changed if moved else None,
            on_right.broken if on_right else None, result.unanswered, *rules, *fuse,
        ))  # fmt: skip
    columns: Columns = {
        "arm": "text", "right": "text", "share (95%)": "share",
        **({"right, second form": "text"} if findings.second_form else {}),
        "moved": "count", "lost": "count",
        **({"no answer": "count", "answer taken by": "text"} if by_text else {"ties": "count"}),
        "correlation": ("number", 3), "artifact": ("share", 2),
    }  # fmt: skip
    second_form = (
        "Second form: the same items in other words, their options in another order. "
        * bool(findings.second_form)
    )
    return Table.of(
        "arms-table", "Arms", columns, rows,
        caption=f"Guessing gives {findings.guess_rate:.1%}. {second_form}Second choices: what "
        "would be right if each answer were the unfused persona's second choice. Moved: answers "
        "other than the unfused persona's; the arm moved is a random delta, scaled until it moves "
        "as many as A1. Lost: of the items that both models got right. Correlation: of what the "
        "fuse realised with the delta. Artifact: what the fuse changes at zero delta, in sizes of "
        "the weights.",
    )  # fmt: skip


def _identity_table(identity: Mapping[str, Any]) -> Iterator[Table]:
    if not identity:
        return
    n = max(figures["n"] for figures in identity.values())
    columns: Columns = {
        "arm": "text", f"passed of {n}": "count", "share (95%)": "share", "lost": "count",
        "gained": "count",
    }  # fmt: skip
    rows = [
        (
            _name(arm), figures["passed"], share(figures["passed"], figures["n"]),
            len(figures["lost"]), len(figures["gained"]),
        )
        for arm, figures in identity.items()
    ]  # fmt: skip
    yield Table.of(
        "identity", "Identity suite", columns, rows,
        caption="Replies that pass as the persona's. Lost, gained: compared with the unfused "
        "persona. So few prompts show no small loss, and nothing is claimed of them here: "
        "`mlxstacks identity` does.",
    )  # fmt: skip


def _claim_tables(findings: Findings) -> Iterator[Table]:
    columns: Columns = {
        "policy": "text", "A1 - A0, points (95%)": ("points", 2),
        "over subjects, points (95%)": ("points", 2), "p (z)": "p",
        "p (McNemar)": "p", "largest p (Holm)": "p", "outcome": "text",
    }  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for judgement in findings.judgements:
        way, claim = judgement.way, findings.claims[judgement.way]
        p_value = _largest_p(findings, way)
        rows.append((
            way, _gain(claim), claim.clustered.cell, claim.p_value, claim.mcnemar.p_value, p_value,
            headline(findings, judgement),
        ))  # fmt: skip
    yield Table.of(
        "claims", "Gain: A1 - A0", columns, rows,
        caption="A1 - A0 is what the paper calls content; whether it is knowledge, the next table "
        "decides. 95%: Newcombe's interval of paired rates; where its upper end is below the least "
        "gain, too few items are not the reason. Over subjects: by errors clustered over them, too "
        "small where they are few. z: test of two proportions, the published one; McNemar: exact, "
        "on pairs of answers. Largest p (Holm): of all that A1 has to beat, below; the verdict's "
        "p (Holm) is that against A0.",
    )  # fmt: skip
    columns = {
        "policy": "text", **dict.fromkeys(("floor", "gain", "total"), ("points", 2)),
        **dict.fromkeys(("floor share", "gain share", "A0 / A1"), ("share", 0)),
    }  # fmt: skip
    yield Table.of(
        "parts", "Where the score of A1 comes from, in points", columns,
        [
            (way, p.floor, p.gain, p.total, p.floor_share, p.gain_share,
             p.published_floor_share)
            for way, p in findings.decomposition.items()
        ],
        folded=True,
        caption="Floor: A0 - persona, what the fuse does by itself. Gain: A1 - A0. Total: their "
        "sum. Shares where the total is positive; 95% intervals of the differences are above.",
    )  # fmt: skip


def _null_table(findings: Findings) -> Table:
    """What A1 has to beat for knowledge, by policy; all of it."""
    columns: Columns = {
        "policy: A1 against": "text", "A1": "share", "against": "share",
        "gain, points (95%)": ("points", 2), "items": "count", "p": "p", "p (Holm)": "p",
    }  # fmt: skip
    rows = [
        (
            f"{way}{form}: {null.name}", null.count / n, null.expected / n,
            (null.difference, i.low, i.high) if (i := null.interval) else null.difference, null.n,
            *((null.p_of_gain, null.p_adjusted) if null.tested else (None, None)),
        )
        for form, of_form in (("", findings.nulls), (", second form", findings.second_nulls))
        for way, nulls in of_form.items()
        for null in nulls
        for n in [max(null.n, 1)]
    ]  # fmt: skip
    n = min(arm.n for arm in findings.arms.values())
    return Table.of(
        "nulls", "What A1 has to beat", columns, rows,
        caption="McNemar's exact test on pairs of answers, with Newcombe's interval; guessing by "
        "the binomial test, with Wilson's, against the rate of any option, or of A1's own choice "
        "of places if that is more. p: two-sided, 1 where A1 does no better. Form: A0 among "
        "the items that both answer in form, where some are not. A policy shows knowledge where "
        "all of its rows have p (Holm) below alpha: what Holm's rule over the policies gives where "
        "the row stands for its policy, beside the others' largest p. Without p: not "
        f"tested, the random delta moves too few answers to be a control. All {share_note(n)}.",
    )  # fmt: skip


def _largest_p(findings: Findings, way: str) -> float | None:
    """Of all that A1 has to beat, adjusted; None where one of them could not be tested."""
    nulls = findings.nulls[way]
    return max(n.p_adjusted for n in nulls) if all(n.tested for n in nulls) else None


def _rule_table(findings: Findings) -> Table:
    """The published rule next to ours, of the deciding way."""
    published, first = findings.published_rule, findings.judgements[0]
    p_value = _largest_p(findings, first.way)
    columns: Columns = {
        "rule": "text", "items": "count", "A1": "count", "A0": "count",
        "least passing count": "text", "p": "p", "knowledge": "text",
    }  # fmt: skip
    counts = published.count, published.control_count
    least = str(published.least_count) if published.least_count <= published.n else "none passes"
    ours = f"ours: {100 * findings.criterion.least_gain:g} points, every control, all policies"
    rows: list[tuple[Cell, ...]] = [
        (
            "published: 5 points, p < 0.05 (z), one policy", published.n, *counts, least,
            published.p_value, "yes" if published.met else "no",
        ),
        (ours, published.n, *counts, "depends on pairs", p_value, headline(findings, first)),
    ]  # fmt: skip
    return Table.of(
        "rules", f"The published rule and ours, {first.way}", columns, rows,
        caption=f"The published rule is stated for {published.stated_n} items; our p is the "
        "largest p (Holm).",
    )  # fmt: skip


def _moved_table(findings: Findings, matching: Mapping[str, Any]) -> Table:
    """Answers moved by each kind of arm, and the scale of the random delta that moves as many."""
    kinds = ("a1", "a0", "random", "shuffled", "moved")
    columns: Columns = {
        "policy": "text", **dict.fromkeys(kinds, "count"), "scale": "number",
        "moved in the search": "text", "searched for": "share", "probes": "count",
    }  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for way in findings.claims:
        moved = [findings.moved.get(f"{kind}_{way}") for kind in kinds]
        counts = [None if flips is None else flips.changed for flips in moved]
        search = matching.get(way)
        about: tuple[Cell, ...] = (None, None, None, None)
        if search:
            [best] = [p for p in search["probes"] if p["scale"] == search["scale"]]
            shown = f"{best['moved']} of {best['n']}"
            about = search["scale"], shown, search["target"], len(search["probes"])
        rows.append((way, *counts, *about))
    n = min(arm.n for arm in findings.arms.values())
    return Table.of(
        "moved", "Answers moved", columns, rows, folded=True,
        caption=f"Of {n} answers, those that are not the unfused persona's. Scale: of the random "
        "delta, 1 being A1's norm; searched on items to train on until it moves the share that A1 "
        "moves of the test's.",
    )  # fmt: skip


def _words(
    findings: Findings, fuses: Mapping[str, Any], mined: Mapping[str, Any], growth: Sequence[str]
) -> Text:
    counts = mined["table"]["all"]
    listed = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    set_g = f"{len(mined['train']):,} to train, {len(mined['test']):,} to test"
    lines = [f"Mined {sum(counts.values()):,} items: {listed}. Set G: {set_g}."]
    # The words continue the difference: "That is at least ..."
    lines += [
        f"{judgement.way}: A1 - A0 is "
        f"{100 * findings.claims[judgement.way].difference:+.2f} points. {judgement.words}"
        for judgement in findings.judgements
    ]
    lines += [f"Floor, {way}: {words}" for way, words in findings.floors.items()]
    lines += growth
    # How many packed codes the fuses of a policy leave different.
    for way, figures in fuses.items():
        if codes := figures.get("codes_that_differ"):
            a1, a0 = (
                "at other bits" if share is None else f"{share:.2%} of the codes"
                for share in (codes["a1_and_a0"], codes["a0_and_unfused"])
            )
            lines.append(
                f"Fused by {way}, A1 differs from A0: {a1}; A0 from the unfused model: {a0}."
            )
    lines += [
        f"Persona unfused, {name}: {flips.changed} of {flips.n} answers differ, {flips.fixed} "
        f"became right, {flips.broken} wrong."
        for name, flips in findings.persona_flips.items()
    ]
    missing = ", ".join(findings.missing_controls) or "none"
    return Text(title="In words", paragraphs=(*lines, f"Controls that are missing: {missing}."))


def _more_tables(findings: Findings) -> Iterator[Table]:
    """The control's items, and the form of answers: more that a rule can read are more right ones
    without any knowledge.
    """
    if findings.arms_on_right_items:
        columns: Columns = {"arm": "text", "right": "text", "share (95%)": "share"}
        right = [
            (_name(name), f"{arm.correct} of {arm.n}", _share(arm))
            for name, arm in findings.arms_on_right_items.items()
        ]
        yield Table.of(
            "right", "Items that both models got right", columns, right, folded=True,
            caption="The other side of Set G: what a fuse breaks here, beside what it fixes there.",
        )  # fmt: skip
    columns = {
        "policy": "text", "A1 in form": "count", "A0 in form": "count", "p (McNemar)": "p",
        "both in form": "count", "of them A1 right": "count", "A0 right": "count",
    }  # fmt: skip
    rows = [(way, *astuple(form)) for way, form in findings.forms.items()]
    yield Table.of(
        "forms", "Answers in the form that was asked for", columns, rows, folded=True,
        caption="In form: the letter stands where the prompt asked for it; no fallback rule was "
        "needed to find it.",
    )  # fmt: skip


def _counts_table(id: str, title: str, counts: Mapping[str, Mapping[str, int]]) -> Table:
    """Subject by subject, all of them last."""
    names = list(dict.fromkeys(name for row in counts.values() for name in row))
    columns: Columns = {"subject": "text", **{_name(name): "count" for name in names}}
    rows = [(subject, *map(row.get, names)) for subject, row in counts.items()]
    return Table.of(id, title, columns, rows, folded=True)


def _position_table(findings: Findings) -> Table:
    """Where the right option stands, and which places the arms prefer: a guess has a place, too."""
    arms, right = findings.arms, findings.right_positions
    letters = sorted({*right, *(letter for arm in arms.values() for letter in arm.picks)})
    columns: Columns = {"arm": "text", **dict.fromkeys(letters, ("share", 0)), "by place": "share"}
    shares = {"right option": (right, None)} | {
        _name(name): (arm.picks, arm.by_position) for name, arm in arms.items()
    }
    n = min(arm.n for arm in arms.values())
    return Table.of(
        "positions", "Which options are picked", columns,
        [
            (name, *(picks.get(letter, 0.0) for letter in letters), by_place)
            for name, (picks, by_place) in shares.items()
        ],
        folded=True,
        caption="By place: what these picks score in the mean when they are dealt to the items by "
        f"chance. Picks: {share_note(n)}.",
    )  # fmt: skip
