"""What `mlxstacks confound` found: everything from the answers, and the tables and plots of it."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mlxstacks.stats import share_note
from mlxstacks.studies.confound.analysis import (
    Answers,
    ArmResult,
    Comparison,
    Decomposition,
    Flips,
    FormShift,
    arm_result,
    compare,
    decompose,
    flips,
    form_shift,
    guess_rate,
    position_shares,
    subject_table,
)
from mlxstacks.studies.confound.plan import AGAIN, PERSONA, arm
from mlxstacks.studies.confound.settings import ConfoundSettings
from mlxstacks.studies.confound.verdict import (
    Case,
    Criterion,
    Judgement,
    floor_in_words,
    judge,
    missing_controls,
    verdict,
)
from mlxstacks.study.document import Block, Cell, Column, Plot, Series, Table, Text
from mlxstacks.study.plan import Standing


@dataclass(frozen=True)
class Findings:
    """What the answers say. claims, forms, against_random, decomposition, floors: by way, in order.

    persona_flips: name of a pair of runs of the unfused persona -> what changed between them.
    right_positions: option position -> share of the test items where it is right.
    """

    arms: dict[str, ArmResult]
    right_arms: dict[str, ArmResult]
    claims: dict[str, Comparison]
    forms: dict[str, FormShift]
    against_random: dict[str, Comparison]
    decomposition: dict[str, Decomposition]
    judgements: list[Judgement]
    persona_flips: dict[str, Flips]
    right_flips: dict[str, Flips]
    floors: dict[str, str]
    subjects: dict[str, dict[str, int]]
    guess_rate: float
    right_positions: dict[str, float]
    missing_controls: list[str]
    standing: Standing
    verdict: str

    def as_json(self) -> dict[str, Any]:
        def each(found: Mapping[str, Any]) -> dict[str, Any]:
            return {name: one.as_json() for name, one in found.items()}

        return {
            "arms": each(self.arms),
            "arms_on_right_items": each(self.right_arms),
            "claims": each(self.claims),
            "forms": each(self.forms),
            "against_random": each(self.against_random),
            "decomposition": each(self.decomposition),
            "judgements": [one.as_json() for one in self.judgements],
            "persona_flips": each(self.persona_flips),
            "right_flips": each(self.right_flips),
            "floors": self.floors,
            "subjects": self.subjects,
            "guess_rate": self.guess_rate,
            "right_positions": self.right_positions,
            "missing_controls": self.missing_controls,
            "outcome": self.judgements[0].outcome,
        }


def find(
    answers: Answers,
    right: Answers,
    mined: Sequence[Any],
    *,
    ways: Sequence[str],
    criterion: Criterion,
    standing: Standing,
    seed: int,
    resamples: int = 10_000,
) -> Findings:
    """Everything from answers. right: arms on the items that both models got right. mined: the
    persona's answers when Set G was mined. Ways whose A1 or A0 is missing have no claim.

    Raises: ValueError where the deciding way has no claim, or arms answered different items.
    """
    arms = {name: arm_result(name, found) for name, found in answers.items() if found}
    claimed = [way for way in ways if {arm("a1", way), arm("a0", way)} <= arms.keys()]
    if not claimed or claimed[0] != ways[0]:
        raise ValueError(f"no answers of A1 and A0 by {ways[0]}, which decides")
    pairs = [(arm("a1", way), arm("a0", way)) for way in claimed]
    claims = dict(zip(claimed, compare(answers, pairs, seed, resamples), strict=True))
    against = {
        way: compare(answers, [(arm("a1", way), arm("random", way))], seed, resamples)[0]
        for way in claimed
        if arm("random", way) in arms
    }
    deciding = answers[arm("a1", ways[0])]
    forms = {way: form_shift(answers, arm("a1", way), arm("a0", way)) for way in claimed}
    case = Case(
        criterion, standing, arms, claims, forms, against,
        {way: flips(answers.get(PERSONA, ()), answers[arm("a1", way)]) for way in claimed},
        guess_rate(deciding), missing_controls(ways, answers, right),
    )  # fmt: skip
    judgements = [judge(case, way) for way in claimed]
    fused = [way for way in claimed if way != "unfused"]
    right_flips = {
        way: flips(right.get(PERSONA, ()), right.get(arm("a0", way), ())) for way in fused
    }
    floors = {
        way: floor_in_words(
            flips(answers.get(PERSONA, ()), answers[arm("a0", way)]), right_flips[way],
            criterion.alpha,
        )
        for way in fused
    }  # fmt: skip
    return Findings(
        arms=arms,
        right_arms={name: arm_result(name, found) for name, found in right.items() if found},
        claims=claims,
        forms=forms,
        against_random=against,
        decomposition={
            way: decompose(way, arms[PERSONA], arms[arm("a0", way)], arms[arm("a1", way)])
            for way in claimed
            if PERSONA in arms
        },
        judgements=judgements,
        persona_flips={
            "mining to test": flips(mined, answers.get(PERSONA, ())),
            "first to second run": flips(answers.get(PERSONA, ()), answers.get(AGAIN, ())),
        },
        right_flips=right_flips,
        floors=floors,
        subjects=subject_table({name: found for name, found in answers.items() if found}),
        guess_rate=case.guess_rate,
        right_positions=position_shares([one.gold for one in deciding]),
        missing_controls=list(case.missing),
        standing=standing,
        verdict=verdict(case, judgements),
    )


# --- for people -----------------------------------------------------------------------------------

_KINDS = {
    "persona": "persona, unfused", "a0": "A0, zero delta", "a1": "A1, trained",
    "random": "random delta",
}  # fmt: skip
OUTCOMES = {
    "format": "a change of form; no knowledge shown",
    "content": "adds knowledge", "no content": "no knowledge shown",
    "perturbation": "a disturbance; no knowledge shown", "guessing": "leads back to guessing",
    "exploratory": "no claim: exploratory", "refused": "no claim: controls are missing",
}  # fmt: skip


def plan_table(settings: Mapping[str, Any], arms: Sequence[str]) -> Table:
    """What is fixed before the first answer. settings: as JSON."""
    inputs = ("model", "persona", "items", "scoring", "sample", "train_answers", "seed")
    training = ("layers", "keys", "rank", "scale", "iters", "batch_size", "learning_rate")
    values = ", ".join(f"{key} {settings['train'][key] or 'as usual'}" for key in training)
    rows = {
        **{key: None if settings[key] is None else str(settings[key]) for key in inputs},
        "policies": ", ".join(settings["policies"]),
        "A1": values,
        "arms": f"{len(arms)}: {', '.join(arms)}",
        "criterion": f"A1 - A0 of at least {100 * settings['least_gain']:g} points and p < "
        f"{settings['alpha']:g}",
    }
    columns = (Column(name="what"), Column(name="value"))
    return Table(id="plan", title="The plan", columns=columns, rows=tuple(rows.items()))


def blocks(
    findings: Findings,
    fuses: Mapping[str, Any],
    mined: Mapping[str, Any],
    settings: ConfoundSettings,
) -> tuple[Block, ...]:
    """Arms and claims first; counts by subject last, folded."""
    return (
        _arm_plot(findings), _content_plot(findings, settings.least_gain),
        _arm_table(findings, fuses, settings), _claim_table(findings), _parts_table(findings),
        _words(findings, fuses, mined), *_right_table(findings), _form_table(findings),
        _counts_table("mined", "Mined items", mined["table"]),
        _counts_table("subjects", "Right answers by subject", findings.subjects),
        _position_table(findings),
    )  # fmt: skip


def _name(arm: str) -> str:
    return arm.replace("_again", ", again").replace("_", " ")


def _share(arm: ArmResult) -> Cell:
    return arm.accuracy, arm.interval.low, arm.interval.high


def _arm_plot(findings: Findings) -> Plot:
    """Accuracy of every arm with its interval; a series for each kind; guessing as a line."""
    names, series = tuple(findings.arms), []
    for kind, label in _KINDS.items():
        arms = [arm if arm.partition("_")[0] == kind else None for arm in names]
        found = [None if arm is None else findings.arms[arm] for arm in arms]
        series.append(Series(
            label=label,
            y=tuple(None if arm is None else 100 * arm.accuracy for arm in found),
            low=tuple(None if arm is None else 100 * arm.interval.low for arm in found),
            high=tuple(None if arm is None else 100 * arm.interval.high for arm in found),
        ))  # fmt: skip
    title = "Arms on Set G's test items"
    shares = ", ".join(f"{_name(arm)} {100 * findings.arms[arm].accuracy:.3g}%" for arm in names)
    return Plot(
        id="arms", title=title, kind="intervals", categories=tuple(map(_name, names)),
        series=tuple(series), x_label="right answers, %, 95% interval",
        references={"guessing": 100 * findings.guess_rate}, form="{:.1f}",
        alt=f"{title}, right answers with 95% intervals: {shares}. Guessing: "
        f"{findings.guess_rate:.1%}.",
    )  # fmt: skip


def _content_plot(findings: Findings, least_gain: float) -> Plot:
    """A1 less A0, and A1 less the random delta, by way."""
    ways = tuple(findings.claims)
    series = []
    for control, claims in (("A0", findings.claims), ("random", findings.against_random)):
        found = [claims.get(way) for way in ways]
        series.append(Series(
            label=f"A1 less {control}",
            y=tuple(None if c is None else 100 * c.difference for c in found),
            low=tuple(None if c is None else 100 * (c.bootstrap.low or 0) for c in found),
            high=tuple(None if c is None else 100 * (c.bootstrap.high or 0) for c in found),
        ))  # fmt: skip
    title = "Content: A1 less A0, by the way of fusing"
    points = ", ".join(f"{way} {100 * findings.claims[way].difference:+.3g}" for way in ways)
    return Plot(
        id="content", title=title, kind="intervals", categories=ways, series=tuple(series),
        x_label="percentage points, bootstrap 95% interval", form="{:.1f}",
        references={"no difference": 0.0, "least gain that counts": 100 * least_gain},
        alt=f"{title}, percentage points: {points}.",
    )  # fmt: skip


def _arm_table(findings: Findings, fuses: Mapping[str, Any], settings: ConfoundSettings) -> Table:
    """Beside each accuracy the correlation of the arm's fuse, and what that did by itself."""
    rows: list[tuple[Cell, ...]] = []
    for name, result in findings.arms.items():
        kind, _, way = name.partition("_")
        total = (fuses.get(way, {}).get(kind) or {}).get("total") or {}
        correlation: Cell = "not fused"
        if total:
            correlation = "no delta" if kind == "a0" else total.get("correlation")
        rows.append((
            _name(name), f"{result.correct} of {result.n}", _share(result), result.unanswered,
            ", ".join(f"{rule} {count}" for rule, count in result.rules.items()), correlation,
            total.get("artifact") if total else "not fused",
        ))  # fmt: skip
    silent = "no answer" if settings.scoring == "generate" else "ties"
    return Table(
        id="arms-table", title="Arms", rows=tuple(rows),
        columns=(
            Column(name="arm"), Column(name="right"), Column(name="share (95%)", kind="share"),
            Column(name=silent, kind="count"), Column(name="answer taken by"),
            Column(name="correlation", kind="number", digits=3),
            Column(name="artifact", kind="share", digits=2),
        ),
        caption=f"Guessing gives {findings.guess_rate:.1%}. Correlation: of what the fuse realised "
        "with the delta. Artifact: what the fuse does to the weights by itself.",
    )  # fmt: skip


def _claim_table(findings: Findings) -> Table:
    outcomes = {judgement.way: judgement.outcome for judgement in findings.judgements}
    rows = []
    for way, claim in findings.claims.items():
        random = findings.against_random.get(way)
        interval = claim.bootstrap.low or 0.0, claim.bootstrap.high or 0.0
        rows.append((
            way, (claim.difference, *interval), claim.p_value, claim.p_adjusted,
            claim.mcnemar.p_value, random and random.difference, outcomes[way],
        ))  # fmt: skip
    return Table(
        id="claims", title="Content: A1 less A0", rows=tuple(rows),
        columns=(
            Column(name="by"), Column(name="A1 less A0, points (95%)", kind="points", digits=2),
            Column(name="p (z)", kind="p"), Column(name="p (z, Holm)", kind="p"),
            Column(name="p (McNemar)", kind="p"),
            Column(name="A1 less random", kind="points", digits=2), Column(name="outcome"),
        ),
    )  # fmt: skip


def _parts_table(findings: Findings) -> Table:
    rows = tuple(
        (way, p.floor, p.content, p.total, p.floor_share, p.content_share, p.published_floor_share)
        for way, p in findings.decomposition.items()
    )
    return Table(
        id="parts", title="Where the score of A1 comes from, in points", rows=rows,
        columns=(
            Column(name="by"),
            *(Column(name=n, kind="points", digits=2) for n in ("floor", "content", "total")),
            *(Column(name=name, kind="share", digits=0)
              for name in ("floor share", "content share", "A0 / A1")),
        ),
        caption="A share has no value where the total is not positive; the differences that it is "
        "made of have their 95% intervals above.",
    )  # fmt: skip


def _words(findings: Findings, fuses: Mapping[str, Any], mined: Mapping[str, Any]) -> Text:
    counts = mined["table"]["all"]
    listed = ", ".join(f"{name} {count:,}" for name, count in counts.items())
    set_g = f"{len(mined['train']):,} to train, {len(mined['test']):,} to test"
    lines = [f"Mined {sum(counts.values()):,} items: {listed}. Set G: {set_g}."]
    # The words go on from the difference: "That is at least ..."
    lines += [
        f"{judgement.way}: A1 less A0 is "
        f"{100 * findings.claims[judgement.way].difference:+.2f} points. {judgement.words}"
        for judgement in findings.judgements
    ]
    lines += [f"Floor, {way}: {words}" for way, words in findings.floors.items()]
    lines += [
        _codes(way, figures["codes_that_differ"])
        for way, figures in fuses.items()
        if figures.get("codes_that_differ")
    ]
    lines += [
        f"Persona unfused, {name}: {flips.changed} of {flips.n} answers differ, {flips.fixed} "
        f"became right, {flips.broken} wrong."
        for name, flips in findings.persona_flips.items()
    ]
    missing = ", ".join(findings.missing_controls) or "none"
    return Text(title="In words", paragraphs=(*lines, f"Controls that are missing: {missing}."))


def _codes(way: str, codes: Mapping[str, float | None]) -> str:
    """How many packed codes the fuses of a policy leave different (spec/confound.md section 4)."""
    a1, a0 = (
        "at other bits" if share is None else f"{share:.2%} of the codes"
        for share in (codes["a1_and_a0"], codes["a0_and_unfused"])
    )
    return f"Fused by {way}, A1 differs from A0: {a1}; A0 from the unfused model: {a0}."


def _right_table(findings: Findings) -> Iterator[Table]:
    if findings.right_arms:
        yield Table(
            id="right", title="Items that both models got right",
            rows=tuple(
                (_name(name), f"{arm.correct} of {arm.n}", _share(arm))
                for name, arm in findings.right_arms.items()
            ),
            columns=(
                Column(name="arm"), Column(name="right"), Column(name="share (95%)", kind="share"),
            ),
        )  # fmt: skip


def _form_table(findings: Findings) -> Table:
    """More answers that a rule can read are more right ones without any knowledge."""
    rows = tuple(
        (way, form.in_form, form.control_in_form, form.p_value, form.n, form.right,
         form.control_right)
        for way, form in findings.forms.items()
    )  # fmt: skip
    counts = ("both in form", "of them A1 right", "A0 right")
    return Table(
        id="forms", title="Answers in the form that was asked for", rows=rows, folded=True,
        columns=(
            Column(name="by"), Column(name="A1 in form", kind="count"),
            Column(name="A0 in form", kind="count"), Column(name="p (McNemar)", kind="p"),
            *(Column(name=name, kind="count") for name in counts),
        ),
    )  # fmt: skip


def _counts_table(id: str, title: str, counts: Mapping[str, Mapping[str, int]]) -> Table:
    """Subject by subject, all of them last."""
    names = list(dict.fromkeys(name for row in counts.values() for name in row))
    return Table(
        id=id, title=title, folded=True,
        rows=tuple(
            (subject, *(row.get(name) for name in names)) for subject, row in counts.items()
        ),
        columns=(Column(name="subject"), *(Column(name=_name(n), kind="count") for n in names)),
    )  # fmt: skip


def _position_table(findings: Findings) -> Table:
    """Where the right option stands, and which places the arms prefer: a guess has a place, too."""
    arms, right = findings.arms, findings.right_positions
    letters = sorted({*right, *(letter for arm in arms.values() for letter in arm.picks)})

    def shares(of: Mapping[str, float]) -> list[float]:
        return [of.get(letter, 0.0) for letter in letters]

    rows = [("right option", *shares(right), None)]
    rows += [(_name(name), *shares(arm.picks), arm.by_position) for name, arm in arms.items()]
    n = min(arm.n for arm in arms.values())
    return Table(
        id="positions", title="Which options are picked", rows=tuple(rows), folded=True,
        columns=(
            Column(name="arm"), *(Column(name=n, kind="share", digits=0) for n in letters),
            Column(name="by place", kind="share"),
        ),
        caption="By place: what these picks score in the mean when they are dealt to the items by "
        f"chance. Picks: {share_note(n)}.",
    )  # fmt: skip
