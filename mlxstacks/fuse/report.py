"""What a fuse reports: per stage and module, in total, and as a verdict in words."""

from dataclasses import dataclass, field
from typing import Any

from mlxstacks.files.outputs import SideFile
from mlxstacks.fuse.fidelity import Fidelity, Sums, fidelity
from mlxstacks.memory import bytes_in_words

# Below this share of a quantization step no same-bits rounding keeps an adapter (DESIGN section 6).
LOST_BELOW_STEPS = 0.25


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

    def as_json(self) -> dict[str, Any]:
        figures = self.fidelity.as_json() if self.fidelity else None
        return {
            "module": self.path,
            "policy": self.policy,
            "bits_before": self.bits_before,
            "bits_after": self.bits_after,
            "base": self.base,
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "fidelity": figures,
            "estimates": {name: found.as_json() for name, found in self.tried.items()},
        }


@dataclass(frozen=True, slots=True)
class StageReport:
    """One adapter: its modules and the ratios of their summed figures."""

    adapter: str
    modules: list[ModuleReport]
    total: Fidelity | None

    def as_json(self) -> dict[str, Any]:
        return {
            "adapter": self.adapter,
            "total": self.total.as_json() if self.total else None,
            "modules": [module.as_json() for module in self.modules],
        }


@dataclass(frozen=True, slots=True)
class Alternative:
    """What another policy would give, estimated on a sample of rows."""

    policy: str
    survival: float
    correlation: float
    extra_bytes: int

    @classmethod
    def of(cls, policy: str, found: list[tuple[int, Fidelity, int]]) -> "Alternative | None":
        """From (weights, estimate, extra bytes) of each module, weighted by the weights."""
        known = [
            (weights, f.survival, f.correlation)
            for weights, f, _ in found
            if f.survival is not None and f.correlation is not None
        ]
        if not known:
            return None
        total = sum(weights for weights, _, _ in known)
        return cls(
            policy,
            sum(weights * survival for weights, survival, _ in known) / total,
            sum(weights * correlation for weights, _, correlation in known) / total,
            sum(extra for _, _, extra in found),
        )


@dataclass(frozen=True, slots=True)
class FuseReport:
    """Result of a fuse or, with `status` "planned", of its dry run.

    kernels: the GPU backend whose kernels did modules of it, None where NumPy did all.
    files: the shards. side_files: all that lies beside them, carried along or left behind.
    """

    status: str
    model: str
    save_path: str
    settings: dict[str, Any]
    settings_sha256: str
    base_fingerprint: str
    zero_delta: bool
    kernels: str | None
    stages: list[StageReport]
    files: list[dict[str, Any]]
    extra_bytes: int
    written_bytes: int
    seconds: float
    versions: dict[str, str]
    verdict: str
    failed_gate: str | None = None
    notes: list[str] = field(default_factory=list)
    side_files: list[SideFile] = field(default_factory=list)

    @property
    def total(self) -> Fidelity | None:
        """Figures of the last stage; each stage is measured against the weights it was given."""
        return self.stages[-1].total if self.stages else None

    def as_json(self) -> dict[str, Any]:
        return {
            "status": self.status,
            "model": self.model,
            "save_path": self.save_path,
            "zero_delta": self.zero_delta,
            "kernels": self.kernels,
            "base_fingerprint": self.base_fingerprint,
            "settings": self.settings,
            "settings_sha256": self.settings_sha256,
            "stages": [stage.as_json() for stage in self.stages],
            "total": self.total.as_json() if self.total else None,
            "files": self.files,
            "carried": [
                {"name": file.name, "how": file.how, "bytes": file.nbytes}
                for file in self.side_files
                if file.how is not None
            ],
            "left_out": [
                {"name": file.name, "reason": file.reason}
                for file in self.side_files
                if file.how is None
            ],
            "extra_bytes": self.extra_bytes,
            "written_bytes": self.written_bytes,
            "seconds": round(self.seconds, 3),
            "versions": self.versions,
            "verdict": self.verdict,
            "failed_gate": self.failed_gate,
            "notes": self.notes,
        }


def total_fidelity(sums: list[Sums]) -> Fidelity:
    """Figures of several modules together: ratios of the sums, never means of ratios."""
    return fidelity(sum(sums, Sums()))


def verdict(
    stages: list[StageReport],
    zero_delta: bool,
    alternative: Alternative | None,
    extra_bytes: int,
    target_correlation: float,
) -> str:
    """One or two sentences that say what the fuse did to the adapters and to the base.

    Every stage is measured against the weights it was given, so each one is spoken of. The
    alternative is named where the last stage stays below the target and it is better.
    """
    totals = [stage.total for stage in stages if stage.total is not None]
    if not totals:
        return "nothing was measured"
    if zero_delta:
        return _zero_verdict(totals)
    if all(total.survival is None for total in totals):
        return "the delta is zero, or too small for float32; " + _zero_verdict(totals)
    many = len(totals) > 1
    kept = "; ".join(_stage(n, many) + _kept(total) for n, total in enumerate(totals, 1))
    words = [kept, _cost(extra_bytes), *_artifacts(totals)]
    sentence = ", ".join(words) + "."
    reached = totals[-1].correlation or 0.0
    if alternative and reached < min(target_correlation, alternative.correlation - 0.01):
        sentence += (
            f" --requant {alternative.policy} keeps {_percent(alternative.survival)} "
            f"(correlation {alternative.correlation:.2f}) for "
            f"{bytes_in_words(alternative.extra_bytes)} more."
        )
    return sentence


def _stage(number: int, many: bool) -> str:
    return f"stage {number} " if many else ""


def _kept(total: Fidelity) -> str:
    if total.survival is None or total.noise is None:
        return "had nothing to add"
    kept = f"kept {_percent(total.survival)} of the adapter"
    if total.noise < 0.005:
        return f"{kept} and added next to no noise"
    return f"{kept} and added {total.noise:.2g} times its size as noise"


def _cost(extra_bytes: int) -> str:
    if extra_bytes == 0:
        return "at no extra bytes"
    word = "more" if extra_bytes > 0 else "less"
    return f"for {bytes_in_words(abs(extra_bytes))} {word}"


def _artifacts(totals: list[Fidelity]) -> list[str]:
    """What the fuse does by itself, for the stage where that is largest; nothing where nothing."""
    artifact, share = max((t.artifact or 0.0, t.codes_changed_at_zero or 0.0) for t in totals)
    if not artifact:
        return []
    codes = f" ({_percent(share)} of the codes)" if share else ""
    up_to = "up to " if len(totals) > 1 else ""
    return [f"while the fuse itself moves the weights by {up_to}{_percent(artifact)}{codes}"]


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
