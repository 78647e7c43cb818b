"""Gap events: prompts that no domain fits, kept with the vector by which like ones are found.

One event is one line of JSON in a log that only grows at its end:

    time      UTC, ISO 8601
    text      the prompt, cut to MOST_CHARACTERS
    scores    domain -> raw score, before any floor
    feature   the prompt's feature (D,), mean over its tokens, float16 little endian in base64
    router    a digest of the router that found the gap

Logs of before version 0.2 may have a text of null, which was not to be kept, no router, and further
keys.

Prompts are private: the file is for its owner alone (mode 0600). Its size is bounded: at half of
`max_bytes` it becomes LOG.1, in place of the LOG.1 before, and a new one begins.

Groups of like events are greedy: the event with the most others within the cosine becomes the
centre of a group, these others its members; they are taken out, and so on (the clustering of Daura
et al. 1999, there of molecular structures). Every member is within the cosine of its centre, and no
two centres are within it.

Laws: the same events give the same groups; so do the same events in another order, but for ties,
which the earlier event wins.
"""

import base64
import binascii
import fcntl
import json
import math
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from mlxstacks.errors import CheckpointError, InputError, TargetError
from mlxstacks.files.disk import append_line, target_errors, user_path
from mlxstacks.files.shards import open_regular

MOST_CHARACTERS = 500
MAX_BYTES = 32_000_000
# A line that is longer was not written here: 500 characters and 100,000 numbers are shorter.
_MOST_LINE_BYTES = 1_000_000
_FLOAT16_MOST = float(np.finfo(np.float16).max)


@dataclass(frozen=True, eq=False)
class GapEvent:
    """One prompt. feature: (D,) float32, not normalised; None where none was kept. router: "" where
    the log does not say.
    """

    time: str
    text: str | None
    scores: Mapping[str, float]
    feature: np.ndarray | None
    router: str = ""


@dataclass(frozen=True)
class GapEvents:
    """events: in the order of the log. damaged: lines that are none, as the torn last one."""

    events: tuple[GapEvent, ...]
    damaged: int
    files: tuple[str, ...]


# How every event, and so every log, begins.
_BEGINNING = b'{"time": "'


class GapLog:
    """Appends gap events to a file. Several processes may write to one log."""

    def __init__(self, path: str | Path, *, max_bytes: int = MAX_BYTES) -> None:
        self.path = user_path(path)
        self.max_bytes = max_bytes

    def add(
        self, text: str, scores: Mapping[str, float], feature: np.ndarray | None, router: str = ""
    ) -> None:
        """Write one event, in one write: a reader sees the whole line or a torn last one.

        feature: (D,) floating. router: of which the scores are (`PromptRouter.digest`).
        Raises: TargetError: the disk is full, the place is not writable, the log is a link or holds
            something else.
            ValueError: a score or a number of the feature is not finite.
        """
        if not all(math.isfinite(score) for score in scores.values()):
            raise ValueError(f"scores {dict(scores)}: not all are finite")
        event = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "text": text[:MOST_CHARACTERS],
            "scores": {name: round(float(score), 6) for name, score in scores.items()},
            "feature": None if feature is None else _packed(feature),
            "router": router,
        }
        line = (json.dumps(event, allow_nan=False) + "\n").encode("ascii")
        with target_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(self.path) as descriptor:
                nbytes = os.fstat(descriptor).st_size
                if nbytes and nbytes + len(line) > self.max_bytes // 2:
                    _check_older(older(self.path))
                    os.replace(self.path, older(self.path))
                    with _locked(self.path) as fresh:
                        append_line(fresh, line, self.path)
                else:
                    append_line(descriptor, line, self.path)


def older(path: Path) -> Path:
    """Where the older half of a log is."""
    return path.parent / f"{path.name}.1"


def log_files(path: str | Path) -> tuple[Path, Path]:
    """The files of a log, the older half first; either may be missing."""
    log = user_path(path)
    return older(log), log


def read_gaps(path: str | Path) -> GapEvents:
    """All events of a log, the older half first. Lines that are no events are counted and left out.

    Raises: InputError: there is no log, or it is no file.
    """
    events: list[GapEvent] = []
    files: list[str] = []
    damaged = 0
    first, log = log_files(path)
    for file in (first, log):
        if file == first and not os.path.lexists(file):
            continue
        if file == log and files and not os.path.lexists(file):
            continue  # the moment between two halves
        try:
            descriptor = open_regular(file)
        except CheckpointError as error:
            is_directory = file.is_dir()
            if not os.path.lexists(file) or is_directory:
                what = "a directory, no log of gaps" if is_directory else "no log of gaps"
                raise InputError(
                    f"{file}: {what}; `mlxstacks chat --routed --gap-log FILE` notes prompts that "
                    "no domain fits"
                ) from None
            raise InputError(str(error)) from None
        files.append(str(file))
        with os.fdopen(descriptor, "rb") as lines:
            for line in iter(lambda: lines.readline(_MOST_LINE_BYTES), b""):
                event = _event(line)
                events += [event] if event else []
                damaged += event is None and bool(line.strip())
    if damaged and not events:
        raise InputError(f"{log}: no log of gaps: none of its {damaged:,} lines is an event")
    return GapEvents(tuple(events), damaged, tuple(files))


def is_loss_gap(base_loss: float, best_loss: float, threshold: float = 0.01) -> bool:
    """Whether no combination of domains lowers the loss of an answer, in nats per token, by
    `threshold`: the test where an answer is known (`route.decide` has the one on scores).
    best_loss: of the best combination.
    """
    return base_loss - best_loss < threshold


def _packed(feature: np.ndarray) -> str:
    values = np.asarray(feature, dtype=np.float32)
    if values.ndim != 1 or not np.isfinite(values).all():
        raise ValueError(f"feature {values.shape}: need (D,), all finite")
    # only directions are compared: a vector that float16 cannot hold is scaled down
    largest = float(np.abs(values).max(initial=0.0))
    if largest > _FLOAT16_MOST:
        values = values * (_FLOAT16_MOST / largest)
    return base64.b64encode(values.astype("<f2").tobytes()).decode("ascii")


def _event(line: bytes) -> GapEvent | None:
    """The event of a line, or None where it is none."""
    try:
        value = json.loads(line)
        feature = value["feature"]
        event = GapEvent(
            _text(value["time"]),
            None if value["text"] is None else _text(value["text"]),
            {_text(name): float(score) for name, score in value["scores"].items()},
            None if feature is None else _unpacked(feature),
            _text(value.get("router", "")),
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return None
    return event if all(math.isfinite(score) for score in event.scores.values()) else None


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{type(value).__name__}, need text")
    # half a character of a pair cannot be printed
    return value.encode("utf-8", "replace").decode("utf-8")


def _unpacked(text: Any) -> np.ndarray:
    try:
        data = base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None
    if not data or len(data) % 2:
        raise ValueError(f"{len(data)} bytes of a feature")
    values = np.frombuffer(data, dtype="<f2").astype(np.float32)
    if not np.isfinite(values).all():
        raise ValueError("a feature is not finite")
    return values


@contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The log, open at its end and held by this process alone; made where it is not there."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    if path.is_symlink():
        raise TargetError(f"{path}: is a link; the log of gaps is a file of its own")
    while True:
        descriptor = os.open(path, flags, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            # another process may have put it away while this one waited
            if _is_still(descriptor, path):
                _check_log(descriptor, path)
                os.fchmod(descriptor, 0o600)
                yield descriptor
                return
        finally:
            os.close(descriptor)


def _check_older(path: Path) -> None:
    """Without its lock, which another process may hold that waits for the newer half's."""
    with suppress(FileNotFoundError):
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            _check_log(descriptor, path)
        finally:
            os.close(descriptor)


def _check_log(descriptor: int, path: Path) -> None:
    """Raises: TargetError: what is there is no log of gaps, and stays as it is."""
    is_file = stat.S_ISREG(os.fstat(descriptor).st_mode)
    head = os.pread(descriptor, len(_BEGINNING), 0) if is_file else b"?"
    if head != _BEGINNING[: len(head)]:
        raise TargetError(f"{path}: holds something else than a log of gaps; choose another file")


def _is_still(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


# --- groups ---------------------------------------------------------------------------------------


# Rows of the table of cosines that are made at a time.
_BLOCK = 512


@dataclass(frozen=True, eq=False)
class GapCluster:
    """events: the centre first, then by falling cosine to it. cohesion: their mean cosine to it."""

    events: tuple[GapEvent, ...]
    cohesion: float

    def prompts(self, count: int) -> list[str]:
        """Different texts, those nearest the centre first."""
        texts = dict.fromkeys(event.text for event in self.events if event.text)
        return list(texts)[:count]

    def mean_scores(self) -> dict[str, float]:
        """Domain -> mean raw score over the events that have one, the highest first."""
        scores: dict[str, list[float]] = {}
        for event in self.events:
            for name, score in event.scores.items():
                scores.setdefault(name, []).append(score)
        means = {name: float(np.mean(of_domain)) for name, of_domain in scores.items()}
        return dict(sorted(means.items(), key=lambda item: (-item[1], item[0])))

    def as_json(self, samples: int, minimum_events: int) -> dict[str, Any]:
        return {
            "events": len(self.events),
            "propose_domain": len(self.events) >= minimum_events,
            "cohesion": self.cohesion,
            "router": self.events[0].router,
            "first_time": min(event.time for event in self.events),
            "last_time": max(event.time for event in self.events),
            "mean_scores": self.mean_scores(),
            "prompts": self.prompts(samples),
        }


def cluster_gaps(
    events: Iterable[GapEvent], similarity: float = 0.8, *, centre: bool = False
) -> list[GapCluster]:
    """Groups, the largest first. Events without a feature are left out. What two routers logged
    never shares a group: their features and scores are of other models, or of other training.

    centre: take the mean of the features of one router off first.
    """
    by_router: dict[tuple[str, int], list[GapEvent]] = {}
    for event in events:
        if event.feature is not None:
            by_router.setdefault((event.router, len(event.feature)), []).append(event)
    clusters = [
        GapCluster(tuple(of_router[place] for place in places), cohesion)
        for _, of_router in sorted(by_router.items())
        for places, cohesion in _groups(_directions(of_router, centre), similarity)
    ]
    return sorted(clusters, key=lambda cluster: -len(cluster.events))


def _directions(events: Sequence[GapEvent], centre: bool) -> np.ndarray:
    """(n, D) float32 rows of length 1; zero where the feature is zero."""
    points = np.stack([event.feature for event in events if event.feature is not None])
    if centre:
        points = points - points.mean(axis=0)
    # twice: the square of a small number of float32 is zero
    points = points / np.maximum(np.abs(points).max(axis=1, keepdims=True), 1e-30)
    lengths = np.linalg.norm(points, axis=1, keepdims=True)
    return points / np.maximum(lengths, 1e-30)


def _groups(points: np.ndarray, similarity: float) -> list[tuple[list[int], float]]:
    """(places of a group, mean cosine to its centre) in the order they are found."""
    n = len(points)
    near = np.empty((n, n), dtype=bool)
    for start in range(0, n, _BLOCK):
        near[start : start + _BLOCK] = points[start : start + _BLOCK] @ points.T > similarity
    # rounding may not decide who is a neighbour of whom, nor a zero vector be alone with nobody
    near |= near.T
    np.fill_diagonal(near, True)
    left = np.ones(n, dtype=bool)
    neighbours = near.sum(axis=1)
    groups = []
    while left.any():
        middle = int(np.argmax(np.where(left, neighbours, -1)))
        members = np.flatnonzero(near[middle] & left)
        cosines = points[members] @ points[middle]
        order = sorted(
            range(len(members)), key=lambda i: (members[i] != middle, -cosines[i], members[i])
        )
        groups.append(([int(members[i]) for i in order], float(cosines.mean())))
        left[members] = False
        neighbours -= near[:, members].sum(axis=1)
    return groups
