"""What `mlxstacks route evaluate` found: tables and plots of its figures, and the verdict."""

from collections.abc import Iterator, Mapping
from typing import Any

from mlxstacks.studies.route.cells import (
    RATE,
    Estimate,
    Head,
    cell,
    in_words,
    interval_plot,
    rate_in_words,
    rate_row,
    table,
)
from mlxstacks.studies.route.evaluate_figures import ALL
from mlxstacks.study.document import Block, Plot, Table
from mlxstacks.study.render.words import short

_KINDS = {
    "unseen domains seen": "detection", "false alarms on known ones": "false_alarms",
    "other prompts": "others",
}  # fmt: skip
_LONGEST = 200
# The modes whose difference to a mode is shown at once; a folded table has all.
_COMPARED = {"base": ("ungated", "routed"), "random_stack": ("oracle_domain", "routed")}


def blocks(data: Mapping[str, Any]) -> tuple[Block, ...]:
    """Losses and differences first, single answers last."""
    return (
        _loss_table(data),
        *_plots(data),
        *(_difference_table(data, to) for to in data["differences"]),
        _gap_table(data["gaps"]),
        *_router_tables(data),
        _panel_table(data["panels"]),
        _every_difference(data["differences"]),
        _sample_table(data),
    )


def outcome(data: Mapping[str, Any]) -> str:
    return f"routed less base {in_words(data['differences']['base']['routed'][ALL])}"


def verdict(data: Mapping[str, Any]) -> str:
    return " ".join(_sentences(data))


def sign(estimate: Estimate) -> int:
    """1 or -1 where the interval lies above or below 0, else 0: not distinguishable from it."""
    if estimate["low"] is None or estimate["high"] is None:
        return 0
    return int(estimate["low"] > 0) - int(estimate["high"] < 0)


def compared_words(
    differences: Mapping[str, Estimate], better: str, worse: str, unclear: str
) -> str:
    """How one mode stands to another over domains: `better a, b; worse c; unclear d`."""
    by_sign: dict[int, list[str]] = {-1: [], 1: [], 0: []}
    for name, difference in differences.items():
        if name != ALL:
            by_sign[sign(difference)].append(f"{name} ({difference['value']:+.3f})")
    words = {-1: better, 1: worse, 0: unclear}
    return "; ".join(f"{words[s]} {', '.join(names)}" for s, names in by_sign.items() if names)


def _sentences(data: Mapping[str, Any]) -> Iterator[str]:
    routed = {to: data["differences"][to]["routed"] for to in ("base", "ungated")}
    words = {-1: "lowers", 1: "raises", 0: "does not measurably change"}
    to_base, to_ungated = (routed[to][ALL] for to in routed)
    yield f"Routing {words[sign(to_base)]} the mean loss against the base ({in_words(to_base)})"
    yield f"and {words[sign(to_ungated)]} it against ungated stacks ({in_words(to_ungated)})."
    for to, row in routed.items():
        domains = {name: row[name] for name in data["domains"] if name in data["rows"]}
        stands = compared_words(domains, "better on", "worse on", "not distinguishable on")
        yield f"Against {to}: {stands}."
    if "random_stack" in data["matrix"]:
        random = data["differences"]["base"]["random_stack"][ALL]
        right = data["differences"]["random_stack"]["oracle_domain"][ALL]
        words = {
            -1: "the domains make a difference",
            0: "not distinguishable, so no gain is shown to be the domains'",
            1: "worse than random",
        }
        yield (
            f"Random stacks of equal norm: {in_words(random)} to the base; the right ones to these "
            f"{in_words(right)}: {words[sign(right)]}."
        )
    detection, alarms = (data["gaps"]["scores"][kind] for kind in ("detection", "false_alarms"))
    if detection:
        yield f"Gaps on unseen domains are seen in {rate_in_words(detection)}."
    if alarms:
        yield f"False alarms on known domains: {rate_in_words(alarms)}."
    if detection and alarms and detection["low"] <= alarms["high"]:
        yield "By scores unseen domains are not told from known ones."


def _words(name: str) -> str:
    return name.replace("_", " ")


def _groups(data: Mapping[str, Any]) -> dict[str, int | None]:
    return {**data["rows"], ALL: None}


def _loss_table(data: Mapping[str, Any]) -> Table:
    """Groups down and modes across: there are seven modes, and any number of domains."""
    modes = data["matrix"]
    heads: list[Head] = [(_words(mode), "number", 3) for mode in modes]
    rows = (
        (group, count, *(row.get(group, {}).get("value") for row in modes.values()))
        for group, count in _groups(data).items()
    )
    return table("losses", "Loss, nats a token", ("prompts", ("rows", "count"), *heads), rows)


def _plots(data: Mapping[str, Any]) -> Iterator[Plot]:
    means = {mode: row[ALL] for mode, row in data["matrix"].items()}
    yield interval_plot(
        "modes", "Loss in each mode, mean over domains", means, "loss, nats a token"
    )
    differences = {mode: row[ALL] for mode, row in data["differences"]["base"].items()}
    yield interval_plot(
        "differences", "Difference to the base, same tokens, mean over domains", differences,
        "difference, nats a token (left is better)", references={"no difference": 0.0},
        form="{:.2f}",
    )  # fmt: skip


def _difference_table(data: Mapping[str, Any], to: str) -> Table:
    matrix = data["differences"][to]
    modes = [m for m in _COMPARED.get(to, ("routed", "routed_hard")) if m in matrix]
    heads: list[Head] = [(_words(mode), "change", 3) for mode in modes]
    rows = [(group, *(cell(matrix[mode].get(group)) for mode in modes)) for group in _groups(data)]
    title = f"Difference to {_words(to)}, same tokens"
    return table(
        f"to-{to.replace('_', '-')}", title, ("prompts", *heads), rows,
        caption="Nats a token, 95% intervals over rows; below 0 is better.",
    )  # fmt: skip


def _every_difference(differences: Mapping[str, Any]) -> Table:
    rows = (
        (_words(mode), _words(to), group, cell(estimate))
        for to, matrix in differences.items()
        for mode, row in matrix.items()
        for group, estimate in row.items()
    )
    heads = ("mode", "less", "prompts", ("nats a token", "change", 3))
    title = "Every difference between modes, same tokens"
    return table("every-difference", title, heads, rows, folded=True)


def _gap_table(gaps: Mapping[str, Any]) -> Table:
    rows = (
        (test, name, *rate_row(rates[kind]))
        for test, rates in gaps.items()
        if rates
        for name, kind in _KINDS.items()
    )
    return table("gaps", "Gaps: prompts that no domain fits", ("test", "prompts", *RATE), rows)


def _router_tables(data: Mapping[str, Any]) -> Iterator[Table]:
    rows = []
    for router in data["routers"]:
        metrics = router["metrics"]
        hits = [metrics[key] for key in ("single_top1", "mixed_set")]
        rates = [part for rate in hits for part in (cell(rate), rate and rate["n"])]
        rows.append((
            router["name"], *rates, metrics["bce"], metrics["calibration_error"],
            router["losses"]["routed"][ALL], router["mean_active_domains"],
        ))  # fmt: skip
    yield table("routers", "Routers", (
        "router", ("right domain first", "share", 0), ("single prompts", "count"),
        ("both domains", "share", 0), ("mixed prompts", "count"), ("cross entropy", "number", 3),
        ("calibration error", "number", 3), ("routed loss", "number", 3),
        ("active domains", "number", 2),
    ), rows)  # fmt: skip
    if data["over_routers"]:
        means = ((_words(key), cell(mean)) for key, mean in data["over_routers"].items())
        title = "Means over routers, with Student's intervals"
        yield table("over-routers", title, ("what", ("mean", "change", 3)), means)


def _panel_table(panels: Mapping[str, Any]) -> Table:
    rows = (
        (name, panel["mode"], panel["losses"].get(ALL), panel["exactly_right"], panel["samples"])
        for name, panel in panels.items()
    )
    return table("panels", "Three panels", (
        "panel", "mode", ("loss", "number", 3), ("exactly right", "count"), ("of answers", "count")
    ), rows)  # fmt: skip


def _sample_table(data: Mapping[str, Any]) -> Table:
    samples = data["samples"]
    panels = list(dict.fromkeys(name for sample in samples for name in sample["answers"]))
    rows = []
    for sample in samples:
        texts = [sample["expected"] or "", *(sample["answers"][panel]["text"] for panel in panels)]
        prompt, *answers = (short(text, _LONGEST) for text in (sample["prompt"], *texts))
        rows.append((prompt, sample["group"], *answers))
    heads = ("prompt", "group", "expected", *panels)
    return table("samples", "Samples", heads, rows, folded=True)
