"""What a fuse reports: per stage and module, in total, and as a verdict in words."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mlxstacks.files.side_files import SideFile
from mlxstacks.fuse.fidelity import ALL_STAGES, Fidelity, Sums, fidelity
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.memory import bytes_in_words

# Of modules below the target so many are named; all are in the report.
_MOST_SHORTFALLS = 8
_FIGURES = (
    "status", "model", "save_path", "zero_delta", "kernels", "base_fingerprint", "files",
    "extra_bytes", "written_bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """One module in one stage."""

    path: str
    stage: int
    policy: str
    bits_before: int | None
    bits_after: int | None
    base: str
    bytes_before: int
    bytes_after: int
    fidelity: Fidelity | None
    tried: dict[str, Fidelity]

    @property
    def figures(self) -> Fidelity | None:
        """As measured; of a dry run, the estimate for the chosen policy."""
        return self.fidelity or self.tried.get(self.policy)

    def as_json(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["stage"]
        return {"module": fields.pop("path"), "estimates": fields.pop("tried"), **fields}


@dataclass(frozen=True, slots=True)
class StageReport:
    """One adapter: its modules and the ratios of their summed figures."""

    adapter: str
    modules: list[ModuleReport]
    total: Fidelity | None

    def as_json(self) -> dict[str, Any]:
        modules = [module.as_json() for module in self.modules]
        return {
            "adapter": self.adapter, "total": self.total and asdict(self.total), "modules": modules
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Alternative:
    """What another policy would give, estimated on a sample of rows."""

    policy: str
    survival: float
    correlation: float
    extra_bytes: int

    @classmethod
    def of(cls, policy: str, estimates: list[tuple[int, Fidelity, int]]) -> "Alternative | None":
        """From (weights, estimate, extra bytes) of each module, weighted by the weights."""
        known = [
            (weights, f.survival, f.correlation)
            for weights, f, _ in estimates
            if f.survival is not None and f.correlation is not None
        ]
        if not known:
            return None
        total = sum(weights for weights, _, _ in known)
        return cls(
            policy,
            sum(weights * survival for weights, survival, _ in known) / total,
            sum(weights * correlation for weights, _, correlation in known) / total,
            sum(extra for _, _, extra in estimates),
        )


@dataclass(frozen=True, slots=True)
class FuseReport:
    """Result of a fuse or, with `status` "planned", of its dry run.

    kernels: the GPU backend whose kernels did modules of it, None where NumPy did all.
    total: all stages together, the change of the base against the sum of the adapters' changes; a
    stage's own is measured against the weights that it was given.
    files: the shards. side_files: all that lies beside them, carried along or left behind.
    """

    status: str
    model: str
    save_path: str
    settings: dict[str, Any]
    base_fingerprint: str
    zero_delta: bool
    kernels: str | None
    stages: list[StageReport]
    files: list[dict[str, Any]]
    extra_bytes: int
    written_bytes: int
    seconds: float
    verdict: str
    failed_gate: str | None = None
    notes: list[str] = field(default_factory=list)
    side_files: list[SideFile] = field(default_factory=list)
    total: Fidelity | None = None

    def as_json(self) -> dict[str, Any]:
        """The figures; settings, verdict and notes stand in the head of the result."""
        figures = {name: getattr(self, name) for name in _FIGURES}
        carried, left = [], []
        for file in self.side_files:
            if file.how is None:
                left.append({"name": file.name, "reason": file.reason})
            else:
                link = {"link": file.link} if file.link else {}
                entry = {"name": file.name, "how": file.how, "bytes": file.nbytes}
                carried.append({**entry, **link})
        return figures | {
            "stages": [stage.as_json() for stage in self.stages],
            "total": self.total and asdict(self.total),
            "carried": carried,
            "left_out": left,
        }


def total_fidelity(sums: list[Sums]) -> Fidelity:
    """Figures of several modules together: ratios of the sums, never means of ratios."""
    return fidelity(sum(sums, Sums()))


def together(sums: Mapping[str, Mapping[int, Sums]]) -> Fidelity | None:
    """Figures of all stages of all modules, from sums by module path and stage; None for none.

    A module of one stage has no sums of ALL_STAGES: its own are those.
    """
    each = [by_stage.get(ALL_STAGES) or next(iter(by_stage.values())) for by_stage in sums.values()]
    return total_fidelity(each) if each else None


def below_target(
    stages: Sequence[StageReport], settings: FuseSettings
) -> list[tuple[float, ModuleReport]]:
    """(correlation, module) of the modules that miss the target, the worst first.

    Only `auto` and `promote` seek the target; of other policies, and at zero delta, none is listed.
    """
    if settings.requant not in ("auto", "promote") or settings.zero_delta:
        return []
    return [
        (correlation, module)
        for correlation, module in _by_correlation(stages)
        if correlation < settings.target_correlation
    ]


def _by_correlation(stages: Sequence[StageReport]) -> list[tuple[float, ModuleReport]]:
    pairs = [
        (module.figures.correlation, module)
        for stage in stages
        for module in stage.modules
        if module.figures is not None and module.figures.correlation is not None
    ]
    return sorted(pairs, key=lambda pair: (pair[0], pair[1].stage, pair[1].path))


def shortfall_notes(
    stages: Sequence[StageReport], settings: FuseSettings, dequantized: Mapping[str, Fidelity]
) -> list[str]:
    """The modules below the target with their correlations, by what can be done about them.

    dequantized: module path -> estimated figures of `--requant dequantize` in its last stage.
    """
    helped, lost = [], []
    for correlation, module in below_target(stages, settings):
        name = f"{module.path}{_of_stage(module.stage, stages)} {_floored(correlation)}"
        plain = dequantized.get(module.path)
        if plain and plain.correlation and 1 - plain.correlation < 0.9 * (1 - correlation):
            helped.append(f"{name} (then about {_floored(plain.correlation)})")
        else:
            lost.append(name)
    below = f"Correlation below the target of {settings.target_correlation:g}"
    notes = []
    if helped:
        notes.append(f"{below}; --requant dequantize does better: {_listed(helped)}.")
    if lost:
        notes.append(
            f"{below}, and no policy does better: {_listed(lost)}. Serve the adapter unfused "
            "(--adapter-path), or train a larger change."
        )
    return notes


def _listed(names: list[str]) -> str:
    hidden = len(names) - _MOST_SHORTFALLS
    return ", ".join(names[:_MOST_SHORTFALLS]) + (f" and {hidden} more" if hidden > 0 else "")


def _floored(correlation: float) -> str:
    """Four digits, never rounded up to a target that was missed."""
    return f"{math.floor(correlation * 1e4) / 1e4:.4f}"


def verdict(
    stages: Sequence[StageReport],
    total: Fidelity | None,
    settings: FuseSettings,
    alternative: Alternative | None,
    extra_bytes: int,
) -> str:
    """One to three sentences that say what the fuse did to the adapters and to the base.

    Every stage is measured against the weights it was given, so each one is spoken of, and then
    what all of them kept (`together`). The worst module below the target is named, and the
    alternative where it is better.
    """
    totals = [stage.total for stage in stages if stage.total is not None]
    if not totals:
        return _planned_verdict(stages, settings, alternative)
    if settings.zero_delta:
        return _zero_verdict(totals)
    if all(figures.survival is None for figures in totals):
        return "the delta is zero, or too small for float32; " + _zero_verdict(totals)
    many = len(totals) > 1
    parts = [
        (f"stage {number}: " if many else "") + _fidelity_words(figures)
        for number, figures in enumerate(totals, 1)
    ]
    if many and total is not None:
        parts.append(f"all {len(totals)} together: {_fidelity_words(total)}")
    sentence = "; ".join([*parts, _cost(extra_bytes), *_artifacts(totals)]) + "."
    sentence += _shortfall_words(stages, settings)
    return sentence + _alternative_words(alternative, totals[-1].correlation, settings)


def _planned_verdict(
    stages: Sequence[StageReport], settings: FuseSettings, alternative: Alternative | None
) -> str:
    opening = "planned only, nothing was written"
    ordered = _by_correlation(stages)
    if not ordered:
        return f"{opening}."
    (low, worst), (high, _) = ordered[0], ordered[-1]
    trained = ", with the trained delta" if settings.zero_delta else ""
    sentence = (
        f"{opening}; estimated correlation{trained} {low:.3f} ({worst.path}"
        f"{_of_stage(worst.stage, stages)})"
    )
    sentence += f" to {high:.3f}." if len(ordered) > 1 else "."
    sentence += _shortfall_words(stages, settings)
    return sentence + _alternative_words(alternative, low, settings)


def _shortfall_words(stages: Sequence[StageReport], settings: FuseSettings) -> str:
    below = below_target(stages, settings)
    if not below:
        return ""
    correlation, worst = below[0]
    count = sum(len(stage.modules) for stage in stages)
    return (
        f" {len(below)} of {count} module{'s' if count > 1 else ''} below the target of "
        f"{settings.target_correlation:g}, the worst {worst.path}"
        f"{_of_stage(worst.stage, stages)} with {_floored(correlation)}."
    )


def _alternative_words(
    alternative: Alternative | None, reached: float | None, settings: FuseSettings
) -> str:
    if alternative is None or (reached or 0.0) >= min(
        settings.target_correlation, alternative.correlation - 0.01
    ):
        return ""
    return (
        f" --requant {alternative.policy}: correlation {alternative.correlation:.3f}, survival "
        f"{_percent(alternative.survival)}, {_cost(alternative.extra_bytes)}."
    )


def _of_stage(stage: int, stages: Sequence[StageReport]) -> str:
    return f" in stage {stage + 1}" if len(stages) > 1 else ""


def _fidelity_words(total: Fidelity) -> str:
    if total.correlation is None or total.survival is None or total.noise is None:
        return "nothing to add"
    noise = "next to no noise"
    if total.noise >= 0.005:
        noise = f"noise {total.noise:.2g} times that change"
    return (
        f"correlation {total.correlation:.3f} with the trained change, survival "
        f"{_percent(total.survival)}, {noise}"
    )


def _cost(extra_bytes: int) -> str:
    if extra_bytes == 0:
        return "no extra bytes"
    return f"{bytes_in_words(abs(extra_bytes))} {'more' if extra_bytes > 0 else 'less'}"


def _artifacts(totals: list[Fidelity]) -> list[str]:
    """What the fuse does by itself, for the stage where that is largest; nothing where nothing."""
    artifact, share = max((t.artifact or 0.0, t.codes_changed_at_zero or 0.0) for t in totals)
    if not artifact:
        return []
    codes = f" ({_percent(share)} of the codes)" if share else ""
    up_to = "up to " if len(totals) > 1 else ""
    return [f"the fuse itself moves the weights by {up_to}{_percent(artifact)}{codes}"]


def _zero_verdict(totals: list[Fidelity]) -> str:
    if not any(total.artifact for total in totals):
        return "at zero delta no weight changed: this fuse adds nothing of its own."
    changes = []
    for number, total in enumerate(totals, 1):
        changed = _percent(total.artifact or 0.0)
        if total.codes_changed_at_zero:
            changed += f" and {_percent(total.codes_changed_at_zero)} of the codes"
        changes.append(f"{changed} in stage {number}" if len(totals) > 1 else changed)
    return (
        f"at zero delta the fuse itself changed the weights by {', '.join(changes)}: "
        "subtract what this model scores before you credit the adapter."
    )


def _percent(share: float) -> str:
    """A share in percent; next to 100 one digit more, so that 99.6% is not called all of it."""
    value = 100 * share
    if abs(value) >= 9.95:
        return f"{value:.1f}%" if 99 <= value < 99.95 else f"{value:.0f}%"
    return f"{value:.1f}%" if abs(value) >= 0.1 else f"{value:.2g}%"
