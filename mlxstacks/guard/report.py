"""What `guard` says: counts, bytes, limits, a verdict in words; as a record and as a result."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from mlxstacks.guard.settings import REFUSE_SHARE, WARN_SHARE
from mlxstacks.memory import bytes_in_words
from mlxstacks.study.document import Block, Column, Table
from mlxstacks.study.result import Result
from mlxstacks.study.write import environment

Outcome = Literal["fits", "tight", "refused"]


@dataclass(frozen=True)
class Limit:
    """Buffers that a process may hold, and bytes to stay within (None: not known).

    known: the device or the caller said so; otherwise `buffers` is the usual number.
    """

    buffers: int
    known: bool
    nbytes: int | None


@dataclass(frozen=True)
class StepBytes:
    """Bytes of a training step at its peak; activations are all that the others are not.

    adapter: what trains, a LoRA or a stack, with the run's copies of it. stacks: frozen ones.
    """

    weights: int
    adapter: int
    optimizer: int
    stacks: int
    activations: int | None

    @property
    def total(self) -> int | None:
        if self.activations is None:
            return None
        return sum(asdict(self).values())


@dataclass(frozen=True)
class DecodeReport:
    """Generating text. tokens_until_limit: None where nothing grows."""

    tokens: int
    buffers: int
    leaked_per_token: int
    tokens_until_limit: int | None


@dataclass(frozen=True)
class Change:
    """Settings to change, in words and as keys, and what the run would then need at most."""

    words: str
    settings: dict[str, Any]
    buffers: int
    nbytes: int | None


@dataclass(frozen=True)
class GuardReport:
    """A run, predicted.

    buffers, buffers_per_token: of the training step's peak. simulated_tokens: the row lengths that
    were simulated. kinds: buffers by kind of layer, most first. longest: tokens that still pass.
    change: the cheapest change that fits, None where none is needed or none was found.
    """

    settings: dict[str, Any]
    config: str
    limit: Limit
    buffers: int
    buffers_per_token: float
    simulated_tokens: tuple[int, ...]
    kinds: dict[str, int]
    nbytes: StepBytes
    decode: DecodeReport | None
    longest: int
    outcome: Outcome
    verdict: str
    change: Change | None
    notes: tuple[str, ...]
    seconds: float

    @property
    def failed_gate(self) -> str | None:
        if self.outcome != "refused" or self.settings["force"]:
            return None
        return f"{self.verdict} (--force runs all the same)"

    @property
    def apply(self) -> dict[str, Any]:
        """The settings that fit: those asked for, with the change."""
        asked = {k: v for k, v in self.settings.items() if k not in ("apply", "force")}
        return asked | (self.change.settings if self.change else {})

    def as_json(self) -> dict[str, Any]:
        """The figures; settings, verdict and notes stand in the head of the result."""
        document = {"status": self.outcome, **asdict(self)}
        document["limit"] = {
            "buffers": self.limit.buffers,
            "known": self.limit.known,
            "working_set_bytes": self.limit.nbytes,
        }
        document["headroom_buffers"] = self.limit.buffers - self.buffers
        parts = {f"{name}_bytes": nbytes for name, nbytes in asdict(self.nbytes).items()}
        document["bytes"] = parts | {"total_bytes": self.nbytes.total}
        for name in ("nbytes", "outcome", "settings", "verdict", "notes", "seconds"):
            del document[name]
        return document | {"apply": self.apply}


def share_of(limit: Limit, buffers: int, nbytes: int | None) -> float:
    """The larger of the two shares of a limit that a run takes."""
    share = buffers / limit.buffers
    if limit.nbytes and nbytes is not None:
        share = max(share, nbytes / limit.nbytes)
    return share


def outcome_of(share: float) -> Outcome:
    if share >= REFUSE_SHARE:
        return "refused"
    return "tight" if share >= WARN_SHARE else "fits"


def verdict_of(limit: Limit, buffers: int, nbytes: int | None) -> str:
    """What the numbers mean, in a sentence."""
    by_count = buffers / limit.buffers
    words = f"{buffers:,} live buffers are {by_count:.0%} of the limit of {limit.buffers:,}"
    if nbytes is not None:
        words += f"; {bytes_in_words(nbytes)}"
        if limit.nbytes:
            words += f" are {nbytes / limit.nbytes:.0%} of {bytes_in_words(limit.nbytes)}"
    opening = {"fits": "fits", "tight": "fits, but not with ease", "refused": "does not fit"}
    return f"{opening[outcome_of(share_of(limit, buffers, nbytes))]}: {words}"


def result_of(report: GuardReport) -> Result:
    """The document of a prediction; it is written nowhere."""
    return Result(
        kind="guard",
        title="Guard",
        question="Does a run fit into the live buffers and the bytes of its device?",
        status="done",
        outcome=report.outcome,
        verdict=report.verdict,
        settings=report.settings,
        environment=environment(report.seconds),
        data=report.as_json(),
        blocks=_blocks(report),
        notes=report.notes,
        failed_gate=report.failed_gate,
    )


def _blocks(report: GuardReport) -> tuple[Block, ...]:
    limit, total = report.limit, sum(report.kinds.values()) or 1
    assumed = "" if limit.known else " (assumed)"
    facts = {
        "config": report.config,
        "row length": f"{report.settings['max_seq_length']:,} tokens",
        "live buffers": f"{report.buffers:,} of {limit.buffers:,}{assumed}",
        "headroom": f"{limit.buffers - report.buffers:,} buffers",
        "each token": f"{report.buffers_per_token:,.1f} buffers",
        "longest row": f"{report.longest:,} tokens" if report.longest else "none",
    }
    if report.decode is not None:
        facts["generating"] = _decode_words(report.decode)
    if report.change is not None:
        facts["cheapest change"] = _change_words(report.change)
    parts = {name: count for name, count in asdict(report.nbytes).items() if count != 0}
    rows = [(name, count) for name, count in (parts | {"in all": report.nbytes.total}).items()]
    if limit.nbytes:
        rows.append(("to stay within", limit.nbytes))
    kinds = tuple((name, count, count / total) for name, count in report.kinds.items())
    share = Column(name="share", kind="share", digits=0)
    return (
        Table(
            id="prediction", title="Prediction", rows=tuple(facts.items()),
            columns=(Column(name="what"), Column(name="value")),
        ),
        Table(
            id="bytes", title="Bytes at the peak", rows=tuple(rows),
            columns=(Column(name="of"), Column(name="bytes", kind="bytes")),
        ),
        Table(
            id="buffers", title="Live buffers by kind of layer", rows=kinds,
            columns=(Column(name="buffers of"), Column(name="count", kind="count"), share),
        ),
    )  # fmt: skip


def _decode_words(decode: DecodeReport) -> str:
    words = f"{decode.buffers:,} buffers after {decode.tokens:,} tokens"
    if decode.leaked_per_token:
        words += f"; {decode.leaked_per_token} more each token, the limit after "
        words += f"{decode.tokens_until_limit:,}"
    return words


def _change_words(change: Change) -> str:
    size = "" if change.nbytes is None else f", {bytes_in_words(change.nbytes)}"
    return f"{change.words}: at most {change.buffers:,} buffers{size}"
