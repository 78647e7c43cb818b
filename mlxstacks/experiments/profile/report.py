"""The result of `mlxstacks profile`: as JSON, and as Markdown for people."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from mlxstacks import memory
from mlxstacks.experiments.profile.analysis import verdict
from mlxstacks.files.strict_json import json_sha256

REPORT, MARKDOWN, COUNTS = "profile_report.json", "profile.md", "routing_counts.safetensors"

_ABOUT_GROUPS = (
    "KL: how far a group's shares of the experts are from the mean of all groups; 0: the same. Top "
    "layers: where it is largest. By excess: where it exceeds that of shuffled labels most."
)
_ABOUT_JACCARD = (
    "Jaccard: layers that two groups both have among their top k, of those that either has; 1: the "
    "same, 0: none. p: how often chance gives as much or more."
)
_ABOUT_LAYERS = (
    "JS: mean divergence of the groups at a layer; shuffled: the same when prompts are dealt to "
    "the groups by chance; p (adjusted): how often chance gives as much, for so many layers. "
    "Jaccard of the groups' most chosen experts; the last p: how often chance gives so little."
)


@dataclass(frozen=True)
class ProfileReport:
    """status: "planned" or "done". plan: what was fixed before the first prompt; None where model
    or data are not here. about_layers: kind of attention and bits, by layer number.
    """

    status: str
    save_path: str
    settings: dict[str, Any]
    plan: dict[str, Any] | None
    groups: list[dict[str, Any]] = field(default_factory=list)
    about_layers: list[dict[str, Any]] = field(default_factory=list)
    tables: dict[str, Any] = field(default_factory=dict)
    plots: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0
    peak_bytes: int = 0
    power: list[str] = field(default_factory=list)

    @property
    def plan_sha256(self) -> str | None:
        return None if self.plan is None else json_sha256(self.plan)

    @property
    def verdict(self) -> str:
        if self.status == "planned":
            return "planned only; nothing was measured."
        return " ".join(verdict(self.tables, self.settings["alpha"]))

    def as_json(self) -> dict[str, Any]:
        device = memory.device()
        document: dict[str, Any] = {
            "kind": "profile",
            "status": self.status,
            "save_path": self.save_path,
            "settings": self.settings,
            "settings_sha256": json_sha256(self.settings),
            "plan": self.plan,
            "plan_sha256": self.plan_sha256,
            "power": self.power,
            "device": f"{device.name} ({device.kind})",
            "versions": {name: version(name) for name in ("mlxstacks", "mlx", "mlx-lm", "numpy")},
            "groups": self.groups,
            "layers": self.about_layers,
        }
        if self.status != "planned":
            document |= {
                "tables": self.tables,
                "plots": self.plots,
                "seconds": round(self.seconds, 1),
                "peak_bytes": self.peak_bytes,
            }
        return document | {"notes": self.notes, "verdict": self.verdict}


def markdown(report: ProfileReport) -> str:
    """Verdict, plan, groups with their layers, Jaccard by k, a row a layer, notes."""
    tables, plan = report.tables, report.plan or {}
    tops, by_kl = tables["top_layers"], tables["divergence"]["kl_nats"]
    parts = ["# Routing profile", f"**Verdict.** {report.verdict}"]
    parts.append(
        f"Plan `{report.plan_sha256}`, fixed before the first prompt: {plan['hypothesis']}"
    )
    own, excess = f"top {tops['k']} layers", f"top {tops['k']} by excess"
    parts.append(_table(
        ["group", "prompts", "tokens", "mean KL, nats", own, excess],
        [
            [g["name"], g["prompts"], g["tokens"], _mean(by_kl[g["name"]]),
             _listed(tops["by_kl"][g["name"]]), _listed(tops["by_excess"][g["name"]])]
            for g in report.groups
        ],
    ))  # fmt: skip
    parts.append(_ABOUT_GROUPS)
    parts.append(_table(
        ["k", "mean Jaccard", "random layers", "p", "shuffled labels", "p"],
        [
            [k, *(f"{row[key]:.4f}" for key in
                  ("mean", "chance", "p_random_layers", "shuffled", "p_shuffled"))]
            for k, row in tables["jaccard"].items()
        ],
    ))  # fmt: skip
    parts.append(_ABOUT_JACCARD)
    parts.append(_table(
        ["layer", "attention", "bits of experts", "JS, nats", "shuffled", "p (adjusted)",
         "Jaccard of top experts", "shuffled", "p"],
        [
            [row["layer"], about["attention"], about["expert_bits"] or "float",
             f"{row['jensen_shannon_nats']:.4f}", f"{row['shuffled_nats']:.4f}",
             f"{row['p_adjusted']:.3g}", f"{row['expert_overlap']:.3f}",
             f"{row['shuffled_expert_overlap']:.3f}", f"{row['expert_overlap_p']:.3g}"]
            for row, about in zip(tables["layers"], report.about_layers, strict=True)
        ],
    ))  # fmt: skip
    parts.append(_ABOUT_LAYERS)
    parts += [*report.power, *report.notes]
    parts += [f"![{name.rpartition('.')[0]}]({name})" for name in report.plots]
    return "\n\n".join(parts) + "\n"


def _table(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(
        "| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def _mean(values: Sequence[float]) -> str:
    return f"{sum(values) / len(values):.4f}"


def _listed(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))


def differing_bits(about_layers: Sequence[Mapping[str, Any]]) -> str | None:
    """A note where layers are not stored alike: a pattern of depth may then be one of bits."""
    for what, key in (("experts", "expert_bits"), ("routers", "router_bits")):
        by_bits: dict[Any, list[int]] = {}
        for about in about_layers:
            by_bits.setdefault(about[key], []).append(about["layer"])
        if len(by_bits) > 1:
            listed = "; ".join(f"{b or 'float'}: {_listed(n)}" for b, n in by_bits.items())
            return (
                f"The {what} have different bits in different layers ({listed}): a pattern over "
                "layers may come from that."
            )
    return None
