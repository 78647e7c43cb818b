"""What `guard` says: counts, bytes, limits, and a verdict in words."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

from mlxstacks.guard.settings import REFUSE_SHARE, WARN_SHARE
from mlxstacks.memory import bytes_in_words

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
        document = {"status": self.outcome, **asdict(self)}
        document["limit"] = {
            "buffers": self.limit.buffers,
            "known": self.limit.known,
            "working_set_bytes": self.limit.nbytes,
        }
        document["headroom_buffers"] = self.limit.buffers - self.buffers
        parts = {f"{name}_bytes": nbytes for name, nbytes in asdict(self.nbytes).items()}
        document["bytes"] = parts | {"total_bytes": self.nbytes.total}
        del document["nbytes"], document["outcome"]
        return document | {"apply": self.apply, "failed_gate": self.failed_gate}


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
