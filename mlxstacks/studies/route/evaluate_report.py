"""What `mlxstacks route evaluate` returns and writes: JSON, a Markdown page, a verdict in words."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from mlxstacks import memory
from mlxstacks.studies.route.evaluate_matrix import ALL, Estimate, compared_words

REPORT, PAGE, ROWS = "route_evaluate_report.json", "route_evaluate.md", "rows.jsonl"
Matrix = Mapping[str, Mapping[str, Estimate]]


@dataclass(frozen=True)
class Evaluation:
    """What was measured.

    matrix: mode -> group -> loss, ALL the mean over the domains. differences: mode that is
    compared with (`AGAINST`) -> mode -> group. routers: of each router, the first one that of the
    matrix. over_routers: means with Student's interval, where there are several. gaps: test ->
    rates. panels, samples: see route_evaluate_panels.py.
    """

    domains: tuple[str, ...]
    rows: Mapping[str, int]
    matrix: Matrix
    differences: Mapping[str, Matrix]
    routers: Sequence[Mapping[str, Any]]
    over_routers: Mapping[str, Any] | None
    gaps: Mapping[str, Any]
    panels: Mapping[str, Any]
    samples: Sequence[Mapping[str, Any]]

    def as_json(self) -> dict[str, Any]:
        return {
            "domains": list(self.domains),
            "rows": dict(self.rows),
            "matrix": _matrix_json(self.matrix),
            "differences": {to: _matrix_json(m) for to, m in self.differences.items()},
            "routers": list(self.routers),
            "over_routers": self.over_routers,
            "gaps": dict(self.gaps),
            "panels": dict(self.panels),
            "samples": list(self.samples),
        }

    def verdict(self) -> str:
        return " ".join(_sentences(self))


@dataclass(frozen=True)
class RouteEvaluateReport:
    """status: "planned" or "done"."""

    status: str
    store_path: str
    save_path: str
    settings: dict[str, Any]
    template: str | None = None
    evaluation: Evaluation | None = None
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        return self.evaluation.verdict() if self.evaluation else "planned only; nothing measured."

    def as_json(self) -> dict[str, Any]:
        device = memory.device()
        document: dict[str, Any] = {
            "kind": "route evaluate",
            "status": self.status,
            "store_path": self.store_path,
            "save_path": self.save_path,
            "settings": self.settings,
            "device": f"{device.name} ({device.kind})",
            "versions": {name: version(name) for name in ("mlxstacks", "mlx", "mlx-lm", "numpy")},
        }
        if self.evaluation:
            document |= {"template": self.template, **self.evaluation.as_json()}
            document |= {"seconds": round(self.seconds, 1)}
        return document | {"notes": self.notes, "verdict": self.verdict}


def _matrix_json(matrix: Matrix) -> dict[str, Any]:
    return {mode: {g: e.as_json() for g, e in row.items()} for mode, row in matrix.items()}


def _sentences(found: Evaluation) -> Iterable[str]:
    to_base = found.differences["base"]["routed"][ALL]
    to_ungated = found.differences["ungated"]["routed"][ALL]
    words = {-1: "lowers", 1: "raises", 0: "does not measurably change"}
    yield f"Routing {words[to_base.sign]} the mean loss against the base ({spread(to_base)})"
    yield f"and {words[to_ungated.sign]} it against ungated stacks ({spread(to_ungated)})."
    for to in ("base", "ungated"):
        routed = found.differences[to]["routed"]
        domains = {name: routed[name] for name in found.domains if name in found.rows}
        said = compared_words(domains, "better on", "worse on", "not distinguishable on")
        yield f"Against {to}: {said}."
    if "random_stack" in found.matrix:
        yield _control_words(found)
    yield _gap_words(found.gaps)


def _control_words(found: Evaluation) -> str:
    random = found.differences["base"]["random_stack"][ALL]
    right = found.differences["random_stack"]["oracle_domain"][ALL]
    words = {
        -1: "the domains make a difference",
        0: "not distinguishable, so no gain is shown to be the domains'",
        1: "worse than random",
    }
    return (
        f"Random stacks of equal norm: {spread(random)} to the base; the right ones to these "
        f"{spread(right)}: {words[right.sign]}."
    )


def _gap_words(gaps: Mapping[str, Any]) -> str:
    detection, alarms = (gaps["scores"][kind] for kind in ("detection", "false_alarms"))
    said = []
    if detection:
        said.append(f"Gaps on unseen domains are seen in {rate_words(detection)}.")
    if alarms:
        said.append(f"False alarms on known domains: {rate_words(alarms)}.")
    if detection and alarms and detection["low"] <= alarms["high"]:
        said.append("By scores unseen domains are not told from known ones.")
    return " ".join(said)


def spread(estimate: Estimate) -> str:
    """`-0.123 [-0.150, -0.100]`."""
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:+.3f}, one row"
    return f"{estimate.value:+.3f} [{estimate.low:+.3f}, {estimate.high:+.3f}]"


def rate_words(rate: Mapping[str, Any]) -> str:
    return (
        f"{rate['count']} of {rate['n']} ({100 * rate['rate']:.0f}%, {100 * rate['low']:.0f} to "
        f"{100 * rate['high']:.0f})"
    )


# --- the page -------------------------------------------------------------------------------------


def markdown(report: RouteEvaluateReport) -> str:
    """The tables of a report, to be pasted somewhere."""
    found = report.evaluation
    assert found is not None
    parts = ["# Routing, evaluated", "", report.verdict, "", "## Loss, nats a token", ""]
    parts += _table(
        ["mode", *(f"{g} ({found.rows[g]})" for g in found.rows), ALL],
        (
            [mode, *(_plain(row.get(g)) for g in found.rows), _plain(row.get(ALL))]
            for mode, row in found.matrix.items()
        ),
    )
    for to, matrix in found.differences.items():
        parts += ["", f"## Difference to {to}, same tokens, 95% interval over rows", ""]
        parts += _table(
            ["mode", *found.rows, ALL],
            (
                [mode, *(_spread(row.get(g)) for g in found.rows), _spread(row.get(ALL))]
                for mode, row in matrix.items()
            ),
        )
    parts += ["", "## Three panels", ""]
    parts += _table(
        ["panel", *found.rows, "answers exactly right"],
        (
            [name, *(f"{p['losses'][g]:.3f}" if g in p["losses"] else "" for g in found.rows),
             f"{p['exactly_right']} of {p['samples']}"]
            for name, p in found.panels.items()
        ),
    )  # fmt: skip
    parts += ["", "## Routers", ""]
    parts += _table(
        ["router", "top-1, single", "set, mixed", "BCE", "calibration error", f"loss, {ALL}"],
        (_router_row(router) for router in found.routers),
    )
    parts += ["", "## Gaps", ""]
    kinds = ("detection", "false_alarms", "others")
    parts += _table(
        ["test", "unseen domains", "known domains (false alarms)", "other prompts"],
        (
            [test, *(rate_words(rates[kind]) if rates[kind] else "" for kind in kinds)]
            for test, rates in found.gaps.items()
            if rates
        ),
    )
    parts += ["", "## Samples", ""]
    for sample in found.samples:
        parts.append(f"- {sample['group']}: `{_code(sample['prompt'])}`")
        parts.append(f"  - expected: `{_code(sample['expected'] or '')}`")
        parts += [f"  - {p}: `{_code(a['text'])}`" for p, a in sample["answers"].items()]
    return "\n".join([*parts, "", *(f"- {note}" for note in report.notes), ""])


def _router_row(router: Mapping[str, Any]) -> list[str]:
    metrics = router["metrics"]
    rates = [rate_words(metrics[k]) if metrics[k] else "" for k in ("single_top1", "mixed_set")]
    bce, error = f"{metrics['bce']:.3f}", f"{metrics['calibration_error']:.3f}"
    return [router["name"], *rates, bce, error, f"{router['losses']['routed'][ALL]:.3f}"]


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return [f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines]


def _plain(estimate: Estimate | None) -> str:
    return "" if estimate is None else f"{estimate.value:.3f}"


def _spread(estimate: Estimate | None) -> str:
    return "" if estimate is None else spread(estimate)


def _code(text: str) -> str:
    return " ".join(text.split()).replace("`", "'")[:200]
