"""What a fuse reports: per stage and module, in total, as a verdict in words, and as a result."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from mlxstacks.command_line import command_line
from mlxstacks.files.shards import tensor_nbytes
from mlxstacks.files.side_files import SideFile
from mlxstacks.fuse.blocks import Decision
from mlxstacks.fuse.decide import Choice, policy_name
from mlxstacks.fuse.fidelity import ALL_STAGES, Fidelity, Sums, fidelity
from mlxstacks.fuse.module import Module
from mlxstacks.fuse.rewrite import ModuleWork
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.memory import bytes_in_words
from mlxstacks.study.document import Block, Cell, Columns, Plot, Series, Table, Text
from mlxstacks.study.render.words import fixed, listed, number, percent
from mlxstacks.study.result import Result
from mlxstacks.study.write import environment

# Of modules below the target so many are named; all are in the report.
_MOST_SHORTFALLS, _MOST_FILES = 3, 3
_ALMOST_NONE = 0.05  # survival
_IN_DATA = (
    "status", "model", "save_path", "zero_delta", "kernels", "base_fingerprint", "files",
    "extra_bytes", "written_bytes",
)  # fmt: skip
_COLUMNS: Columns = {
    "module": "text", "policy": "text", "delta/step": ("number", 3), "correlation": ("number", 3),
    "survival": "share", "noise": ("number", 3), "artifact": ("share", 2),
}  # fmt: skip
_ARTIFACT_COLUMNS = {name: _COLUMNS[name] for name in ("module", "policy", "artifact")}
_ARTIFACT = "artifact: what the fuse changes at zero delta, in sizes of the weights"
_LEGEND = (
    "delta/step: size of the trained delta D in quantization steps; correlation: of the fused "
    "change F with D; survival: <F,D>/<D,D>, the share of D that is in F; noise: the rest of F, in "
    "sizes of D; " + _ARTIFACT
)


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """One module in one stage. tried: estimates by policy."""

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


@dataclass(frozen=True, slots=True)
class StageReport:
    """One adapter: its modules and the ratios of their summed figures."""

    adapter: str
    modules: list[ModuleReport]
    total: Fidelity | None

    def as_json(self) -> dict[str, Any]:
        modules = []
        for module in self.modules:
            fields = asdict(module)
            del fields["stage"]
            modules.append(
                {"module": fields.pop("path"), "estimates": fields.pop("tried"), **fields}
            )
        return {
            "adapter": self.adapter, "total": self.total and asdict(self.total), "modules": modules
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Alternative:
    """What another policy would give, by a sample of rows. extra_bytes: beside this fuse."""

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
    stage's own is measured against the weights that it was given. alternative: of another policy.
    files: the shards. side_files: all other files, carried along or left behind.
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
    alternative: Alternative | None = None

    def as_json(self) -> dict[str, Any]:
        """The figures; settings, verdict and notes stand in the head of the result."""
        carried, left = [], []
        for file in self.side_files:
            if file.how is None:
                left.append({"name": file.name, "reason": file.reason})
            else:
                link = {"link": file.link} if file.link else {}
                entry = {"name": file.name, "how": file.how, "bytes": file.nbytes}
                carried.append({**entry, **link})
        return {
            **{name: getattr(self, name) for name in _IN_DATA},
            "stages": [stage.as_json() for stage in self.stages],
            "total": self.total and asdict(self.total),
            "carried": carried,
            "left_out": left,
        }


def total_fidelity(sums: list[Sums]) -> Fidelity | None:
    """Figures of several modules together: ratios of the sums, never means of ratios; None: no
    modules.
    """
    return fidelity(sum(sums, Sums())) if sums else None


def together(sums: Mapping[str, Mapping[int, Sums]]) -> Fidelity | None:
    """Figures of all stages of all modules, from sums by module path and stage.

    A module of one stage has no sums of ALL_STAGES: its own are those.
    """
    return total_fidelity(
        [by_stage.get(ALL_STAGES) or next(iter(by_stage.values())) for by_stage in sums.values()]
    )


def stage_report(
    stage: int,
    adapter: str,
    works: list[ModuleWork],
    choices: dict[str, Choice],
    sums: dict[str, dict[int, Sums]],
) -> StageReport:
    """The report of one adapter; `sums` is empty for a dry run."""
    modules, measured = [], []
    for work in works:
        module = work.module
        if stage not in module.stages:
            continue
        decision = work.decisions[stage]
        module_sums = sums.get(module.path, {}).get(stage)
        if module_sums is not None:
            measured.append(module_sums)
        earlier = [work.decisions[s] for s in sorted(work.decisions) if s < stage]
        stored = Decision("", module.stored.bits, mode=module.stored.mode)
        before = earlier[-1] if earlier else stored
        modules.append(
            ModuleReport(
                path=module.path,
                stage=stage,
                policy=policy_name(decision),
                bits_before=before.bits,
                bits_after=decision.bits,
                base=module.stages[stage].base,
                bytes_before=tensor_bytes(module, before),
                bytes_after=tensor_bytes(module, decision),
                fidelity=fidelity(module_sums) if module_sums is not None else None,
                tried=choices[module.path].tried.get(stage, {}),
            )
        )
    return StageReport(adapter, modules, total_fidelity(measured))


def tensor_bytes(module: Module, decision: Decision) -> int:
    """Bytes of a module's tensors after a decision."""
    return entries_bytes(module.outputs(decision.bits, decision.mode))


def entries_bytes(entries: list[tuple[str, str, tuple[int, ...]]]) -> int:
    """Bytes of tensors given by (name, dtype, shape)."""
    return sum(tensor_nbytes(dtype, shape) or 0 for _, dtype, shape in entries)


# --- in words -------------------------------------------------------------------------------------


def below_target(
    stages: Sequence[StageReport], settings: FuseSettings
) -> list[tuple[float, ModuleReport]]:
    """(correlation, module) of the modules that miss the target, the worst first.

    Only `auto` and `promote` seek the target; of other policies, and at zero delta, none is listed.
    """
    sought = settings.requant in ("auto", "promote") and settings.target_kl is None
    if not sought or settings.zero_delta:
        return []
    return [pair for pair in _by_correlation(stages) if pair[0] < settings.target_correlation]


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
        name = f"{_named(module, stages)} {_floored(correlation)}"
        plain = dequantized.get(module.path)
        if plain and plain.correlation and 1 - plain.correlation < 0.9 * (1 - correlation):
            helped.append(f"{name} (then about {_floored(plain.correlation)})")
        else:
            lost.append(name)
    below = f"Correlation below the target of {settings.target_correlation:g}"
    notes = []
    if helped:
        names = listed(helped, _MOST_SHORTFALLS)
        notes.append(f"{below}; --requant dequantize does better: {names}.")
    if lost:
        names = listed(lost, _MOST_SHORTFALLS)
        notes.append(
            f"{below}, and no policy does better: {names}. Serve the adapter unfused "
            "(--adapter-path), or train a larger change."
        )
    return notes


def _named(module: ModuleReport, stages: Sequence[StageReport]) -> str:
    return module.path + (f" in stage {module.stage + 1}" if len(stages) > 1 else "")


def _floored(correlation: float) -> str:
    """Four digits, never rounded up to a target that was missed."""
    return f"{math.floor(correlation * 1e4) / 1e4:.4f}"


def verdict(
    stages: Sequence[StageReport],
    total: Fidelity | None,
    settings: FuseSettings,
    alternative: Alternative | None,
    extra_bytes: int,
    base_bytes: int,
) -> str:
    """One to three sentences that say what the fuse did to the adapters and to the base.

    Every stage is measured against the weights it was given, so each one is spoken of, and then
    what all of them kept (`together`). The worst module below the target is named, and the
    alternative where it is better.
    """
    totals = [stage.total for stage in stages if stage.total is not None]
    reached: float | None
    if not totals:
        sentence = "planned only, nothing was written"
        ordered = _by_correlation(stages)
        if not ordered:
            return f"{sentence}."
        (reached, worst), (high, _) = ordered[0], ordered[-1]
        trained = ", with the trained delta" if settings.zero_delta else ""
        sentence += f"; {_cost(extra_bytes, base_bytes)}"
        sentence += f"; estimated correlation{trained} {reached:.3f} ({_named(worst, stages)})"
        sentence += f" to {high:.3f}." if len(ordered) > 1 else "."
    elif settings.zero_delta:
        return _zero_verdict(totals)
    elif all(figures.survival is None for figures in totals):
        return "the delta is zero, or too small for float32; " + _zero_verdict(totals)
    else:
        many, reached = len(totals) > 1, totals[-1].correlation
        parts = [
            (f"stage {place}: " if many else "")
            + _fidelity_words(figures, _of_outputs(stages[-1].modules))
            for place, figures in enumerate(totals, 1)
        ]
        if many and total is not None:
            parts.append(f"all {len(totals)} together: {_fidelity_words(total)}")
        sentence = "; ".join([*parts, _cost(extra_bytes, base_bytes), *_artifacts(totals)]) + "."
        if not many and (totals[0].survival or 0) < _ALMOST_NONE:
            sentence = f"almost none of the adapter is in the result: {sentence}"
    if below := below_target(stages, settings):
        correlation, worst = below[0]
        count = sum(len(stage.modules) for stage in stages)
        sentence += (
            f" {len(below)} of {count} module{'s' if count > 1 else ''} below the target of "
            f"{settings.target_correlation:g}, the worst {_named(worst, stages)} with "
            f"{_floored(correlation)}."
        )
    if alternative is not None and (reached or 0.0) < min(
        settings.target_correlation, alternative.correlation - 0.01
    ):
        cost = _cost(extra_bytes + alternative.extra_bytes, base_bytes)
        sentence += (
            f" Estimated for --requant {alternative.policy}: correlation "
            f"{alternative.correlation:.3f}, survival {_percent(alternative.survival)}, {cost}."
        )
    return sentence


def _of_outputs(modules: Sequence[ModuleReport]) -> bool:
    """Whether figures are of modules' outputs: gptq is alone in its fuse."""
    return any(module.policy.startswith("gptq") for module in modules)


def _fidelity_words(total: Fidelity, of_outputs: bool = False) -> str:
    if total.correlation is None or total.survival is None or total.noise is None:
        return "nothing to add"
    noise = "next to no noise"
    if total.noise >= 0.005:
        noise = f"noise {total.noise:.2g} times that change"
    return (
        "of the modules' outputs, "
        * of_outputs
        + f"correlation {total.correlation:.3f} with the trained change, survival "
        f"{_percent(total.survival)}, {noise}"
    )


def _cost(extra_bytes: int, base_bytes: int) -> str:
    if extra_bytes == 0:
        return "no extra bytes"
    more = "more" if extra_bytes > 0 else "less"
    return f"{bytes_in_words(abs(extra_bytes))} {more} ({_percent(abs(extra_bytes) / base_bytes)})"


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
    for place, total in enumerate(totals, 1):
        changed = _percent(total.artifact or 0.0)
        if total.codes_changed_at_zero:
            changed += f" and {_percent(total.codes_changed_at_zero)} of the codes"
        changes.append(f"{changed} in stage {place}" if len(totals) > 1 else changed)
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


# --- as a result ----------------------------------------------------------------------------------


def result_of(report: FuseReport) -> Result:
    """The document of a fuse; what it was made from is added where it is written."""
    is_planned, notes = report.status == "planned", list(report.notes)
    next_steps = {}
    if is_planned:
        if any(module.figures for stage in report.stages for module in stage.modules):
            trained = " of the trained adapter" if report.zero_delta else ""
            notes.append(f"Figures{trained} are estimates from a sample of rows.")
    else:
        next_steps["Try it"] = command_line("mlxstacks chat", model=report.save_path)
        if report.settings["requant"] == "dequantize":
            next_steps["Other modules keep their bits; without"] = command_line(
                "mlx_lm.convert", hf_path=report.save_path, mlx_path=f"{report.save_path}-plain",
                dequantize=True,
            )  # fmt: skip
    blocks: list[Block] = []
    if len(report.stages) > 1 and report.total is not None:
        row = ("sum of the adapters", "", *_cells(report.total))
        blocks.append(Table.of("together", "Fidelity of all stages together", _COLUMNS, [row]))
    for place, stage in enumerate(report.stages, 1):
        which = f" (stage {place} of {len(report.stages)})" if len(report.stages) > 1 else ""
        blocks += _stage_blocks(stage, place, which, report.zero_delta)
    if (plot := _bytes_plot(report)) is not None:
        blocks.append(plot)
    shards = Table.of(
        "files", "Files of the model", {"file": "text", "how": "text", "written": "bytes"},
        [(file["name"], file["how"], file["written_bytes"]) for file in report.files], folded=True,
        caption=f"The model grows by {bytes_in_words(report.extra_bytes)}; "
        f"{bytes_in_words(report.written_bytes)} were written.",
    )  # fmt: skip
    return Result(
        kind="fuse",
        title="Fuse",
        question="How much of the adapter is in the fused weights, and what does the fuse do by "
        "itself?",
        status="planned" if is_planned else "done",
        outcome=_outcome(report),
        verdict=report.verdict,
        settings=report.settings,
        environment=environment(report.seconds),
        data=report.as_json(),
        blocks=(*blocks, shards, Text(title="Files", paragraphs=_files(report))),
        notes=tuple(notes),
        failed_gate=report.failed_gate,
        directory=report.save_path,
        next_steps=next_steps,
    )


def _outcome(report: FuseReport) -> str:
    total = report.total
    if total is None:
        return "planned" if report.status == "planned" else "not measured"
    if report.zero_delta or total.survival is None:
        if total.artifact is None:
            return "not measured"
        moved = f"the fuse alone moves weights by {percent(total.artifact)}"
        return moved if total.artifact else "no artifact"
    words = "of outputs: " * _of_outputs(report.stages[-1].modules)
    words += f"correlation {fixed(total.correlation)}, survival {percent(total.survival)}"
    words += f", noise {number(total.noise, 2)}"
    return f"{words}, artifact {percent(total.artifact)}" if total.artifact else words


def _stage_blocks(stage: StageReport, place: int, which: str, zero: bool) -> list[Block]:
    modules = sorted(stage.modules, key=_worst_first)
    names = _short_names([module.path for module in modules])
    known = [m.figures for m in modules if m.figures]
    what, columns, first, legend = "Fidelity", _COLUMNS, 0, _LEGEND
    if (known or zero) and all(figures.correlation is None for figures in known):
        # Of a zero delta there is nothing that could be kept.
        what, columns, first, legend = "Artifact", _ARTIFACT_COLUMNS, -1, _ARTIFACT
    elif _of_outputs(modules):
        legend += "; here D and F are what they do to the modules' outputs"
    rows = [(names[m.path], m.policy, *_cells(m.figures)[first:]) for m in modules]
    if stage.total is not None:
        many = "module" if len(modules) == 1 else "modules"
        rows.insert(0, (f"total of {len(modules)} {many}", "", *_cells(stage.total)[first:]))
    estimates = [
        (names[module.path], policy, *_cells(figures))
        for module in modules
        for policy, figures in module.tried.items()
    ]
    blocks: list[Block] = [
        Table.of(
            f"fidelity-{place}", f"{what} by module{which}, worst modules first", columns, rows,
            caption=f"Adapter: {stage.adapter}. {legend}.",
        ),
        _weights(modules, stage.total, which, place),
    ]  # fmt: skip
    if (plot := _plot(modules, names, zero, which, place)) is not None:
        blocks.insert(0, plot)
    if estimates:
        title = f"What other policies would give, estimated{which}"
        blocks.append(Table.of(f"estimates-{place}", title, _COLUMNS, estimates, folded=True))
    return blocks


def _worst_first(module: ModuleReport) -> tuple[float, float]:
    """By correlation; where there is none, as at zero delta, by what the fuse itself changed."""
    figures = module.figures
    if figures is None or figures.correlation is None:
        return 2.0, -(figures.artifact or 0.0) if figures else 0.0
    return figures.correlation, 0.0


def _cells(figures: Fidelity | None) -> tuple[Cell, ...]:
    if figures is None:
        return (None,) * 5
    return (
        figures.delta_over_step, figures.correlation, figures.survival, figures.noise,
        figures.artifact,
    )  # fmt: skip


def _short_names(paths: Sequence[str]) -> dict[str, str]:
    """Layer and last name of each module path, "3 down_proj"; with more names where that is not
    the module's alone.
    """

    def short(path: str, count: int) -> str:
        layer = re.search(r"layers\.(\d+)\.(.+)$", path)
        ending = ".".join((layer[2] if layer else path).split(".")[-count:])
        return f"{layer[1]} {ending}" if layer else ending

    names = {path: path for path in paths}
    for count in range(max((path.count(".") for path in paths), default=0), 0, -1):
        shorter = {path: short(path, count) for path in paths}
        taken = Counter(shorter.values())
        names |= {path: name for path, name in shorter.items() if taken[name] == 1}
    return names


def _plot(
    modules: Sequence[ModuleReport], names: Mapping[str, str], zero: bool, which: str, place: int
) -> Plot | None:
    """Correlation and survival, the worst module first; of a control what the fuse changed."""
    keys = {"correlation": "correlation with the delta", "survival": "survival, <F,D>/<D,D>"}
    if zero:
        keys = {
            "artifact": "artifact, |change| / |weights|",
            "codes_changed_at_zero": "codes changed",
        }
    series, spans = [], []
    for key, label in keys.items():
        values = tuple(getattr(module.figures, key, None) for module in modules)
        series.append(Series(label=label, y=values))
        if known := [value for value in values if value is not None]:
            spans.append(f"{label}: {number(min(known), 3)} to {number(max(known), 3)}")
    if not spans:
        return None
    title = f"{'Change at zero delta' if zero else 'Fidelity'} by module{which}"
    kinds = "correlation or survival" + " of its outputs" * _of_outputs(modules)
    kinds = "share" if zero else kinds
    return Plot(
        id=f"fidelity-plot-{place}", title=title, kind="series", series=tuple(series),
        categories=tuple(names[module.path] for module in modules),
        x_label=kinds,
        references={} if zero else {"all of the delta": 1.0},
        alt=f"{title}: a dot for each of {len(modules)} modules. {'; '.join(spans)}.",
    )  # fmt: skip


def _bytes_plot(report: FuseReport) -> Plot | None:
    """What bytes buy: this fuse, the fewer bits that it tried first, and another policy."""
    points: list[tuple[str, float, float, bool]] = []  # name, extra bytes, correlation, this fuse
    modules = report.stages[-1].modules
    tried = {
        m.path: {
            m.bits_before if policy == "nearest" else int(policy.removeprefix("promote-")): value
            for policy, figures in m.tried.items()
            if policy.startswith(("nearest", "promote-"))
            and (value := figures.correlation) is not None
        }
        for m in modules
    }
    chosen = {m.path: m.figures.correlation for m in modules if m.figures is not None}
    known = [(m, m.bits_before) for m in modules if m.bits_before and chosen.get(m.path)]
    for bits in sorted({b for by_bits in tried.values() for b in by_bits if b}):
        # Modules that reached their target with fewer bits stay there.
        if len(report.stages) > 1 or all((m.bits_after or 99) <= bits for m, _ in known):
            break
        extra = weight = sum_of = 0.0
        for m, before in known:
            stays = (m.bits_after or 99) <= bits or bits not in tried[m.path]
            size = m.bytes_after - m.bytes_before
            if not stays and m.bits_after and before != m.bits_after:
                size = size * (bits - before) // (m.bits_after - before)
            extra += size
            weight += m.bytes_before / before
            value = chosen[m.path] if stays else tried[m.path][bits]
            sum_of += m.bytes_before / before * (value or 0.0)
        points.append((f"at most {bits} bits", extra, sum_of / weight, False))
    if report.total is not None and report.total.correlation is not None:
        points.append(("this fuse", report.extra_bytes, report.total.correlation, True))
    if (other := report.alternative) is not None:
        extra = report.extra_bytes + other.extra_bytes
        points.append((other.policy, extra, other.correlation, False))
    if report.zero_delta or len({extra for _, extra, *_ in points}) < 2:
        return None
    words = ", ".join(f"{name} {bytes_in_words(abs(int(extra)))}{'' if extra >= 0 else ' less'} "
                      f"{correlation:.3f}" for name, extra, correlation, _ in points)  # fmt: skip
    title = "Fidelity against the bytes that the fuse adds"
    return Plot(
        id="bytes-plot", title=title, kind="frontier", unit="bytes",
        categories=tuple(name for name, *_ in points),
        series=tuple(
            Series(
                label=label, x=tuple(extra for _, extra, *_ in points),
                y=tuple(value if own == measured else None for *_, value, own in points),
            )
            for label, measured in (("estimated on samples", False), ("measured", True))
            if any(own == measured for *_, own in points)
        ),
        x_label="bytes that the fuse adds to the model",
        y_label="correlation with the trained change",
        references={"all of the adapter": 1.0}, alt=f"{title}; correlation: {words}.",
    )  # fmt: skip


def _weights(
    modules: Sequence[ModuleReport], total: Fidelity | None, which: str, place: int
) -> Table:
    columns: Columns = {
        "module": "text", "bits before": "count", "bits after": "count", "bytes before": "bytes",
        "bytes after": "bytes", "base": "text", "codes changed": "share", "at zero delta": "share",
    }  # fmt: skip
    rows: list[tuple[Cell, ...]] = [
        (
            m.path, m.bits_before, m.bits_after, m.bytes_before, m.bytes_after, m.base,
            m.figures.codes_changed if m.figures else None,
            m.figures.codes_changed_at_zero if m.figures else None,
        )
        for m in modules
    ]  # fmt: skip
    if total is not None:
        sizes = (sum(m.bytes_before for m in modules), sum(m.bytes_after for m in modules))
        codes = (total.codes_changed, total.codes_changed_at_zero)
        rows.insert(0, ("total", None, None, *sizes, "", *codes))
    return Table.of(
        f"weights-{place}", f"Bits and codes by module{which}", columns, rows, folded=True,
        caption="Shares of all codes of a module; of no bits: its weights are plain floats.",
    )  # fmt: skip


def _files(report: FuseReport) -> tuple[str, str]:
    """The shards by what became of them, and what came along: which files hold weights without the
    adapter, what did not come.
    """
    is_planned = report.status == "planned"
    counts = Counter(str(file["how"]) for file in report.files)
    shards = ", ".join(f"{count} {how}" for how, count in sorted(counts.items()))
    written = f"{bytes_in_words(report.written_bytes)} of weights"
    names = [file.name for file in report.side_files if file.how is not None]
    parts = {
        "unchanged weights": [n for n in names if n.endswith((".safetensors", ".gguf"))],
        "behind links that leave the directory": [
            f"{file.name} ({file.link})" for file in report.side_files if file.link
        ],
        "left out": [
            f"{file.name} ({file.reason})"
            for file in report.side_files
            if file.reason not in (None, "hidden")
        ],
    }
    carried = [f"Other files {'to carry' if is_planned else 'carried'} along: {len(names)}"]
    carried += [f"{what}: {listed(files, _MOST_FILES)}" for what, files in parts.items() if files]
    return (
        f"Weight files: {shards}; {written}{' to write' if is_planned else ' written'}.",
        "; ".join(carried) + ".",
    )
