"""`guard`: predict a run, compare it with the limits, look for the cheapest change that fits."""

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxstacks import memory
from mlxstacks.base_model import make_prompt_cache
from mlxstacks.guard.build import (
    batch_of,
    config_errors,
    lazy_model,
    read_config,
    recurrence,
    training_step,
)
from mlxstacks.guard.hosts import hosts_table, plan_hosts
from mlxstacks.guard.predict import Prediction, predict, predict_decode, predict_drawing
from mlxstacks.guard.settings import REFUSE_SHARE, WARN_SHARE, GuardSettings
from mlxstacks.guard.step import Step, decoder_layers
from mlxstacks.memory import bytes_in_words
from mlxstacks.study.document import Block, Columns, Table
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

    weights: with the stored codes that merge_ready grid holds. adapter: what trains, a LoRA or a
    stack, with the run's copies of it. stacks: frozen ones.
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
    """Generating text. nbytes: with all that a training holds between its steps.
    tokens_until_limit: None where nothing grows.
    """

    tokens: int
    buffers: int
    nbytes: int
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
        if self.settings["apply"]:
            return None if self.change else f"{self.verdict}; no change makes it fit"
        return "does not fit (--force lets it pass all the same)"

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
    what = "fits"
    if nbytes is not None and limit.nbytes:
        share = f"{nbytes / limit.nbytes:.0%} of {bytes_in_words(limit.nbytes)}"
        words += f"; {bytes_in_words(nbytes)} are {share}"
    elif nbytes is not None:
        what = "the buffers fit"
        words += f"; {bytes_in_words(nbytes)}"
    opening = {"fits": what, "tight": f"{what}, but not with ease", "refused": "does not fit"}
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
    if (decode := report.decode) is not None:
        words = f"{decode.buffers:,} buffers after {decode.tokens:,} tokens, "
        words += bytes_in_words(decode.nbytes)
        if decode.leaked_per_token:
            words += f"; {decode.leaked_per_token} more each token, the limit after "
            words += f"{decode.tokens_until_limit:,}"
        facts["generating"] = words
    if (change := report.change) is not None:
        size = "" if change.nbytes is None else f", {bytes_in_words(change.nbytes)}"
        facts["cheapest change"] = f"{change.words}: at most {change.buffers:,} buffers{size}"
    parts = {name: count for name, count in asdict(report.nbytes).items() if count != 0}
    rows = [(name, count) for name, count in (parts | {"in all": report.nbytes.total}).items()]
    if limit.nbytes:
        rows.append(("to stay within", limit.nbytes))
    kinds = [(name, count, count / total) for name, count in report.kinds.items()]
    columns: Columns = {"buffers of": "text", "count": "count", "share": ("share", 0)}
    return (
        Table.of_facts("prediction", "Prediction", facts),
        Table.of("bytes", "Bytes at the peak", {"of": "text", "bytes": "bytes"}, rows),
        Table.of("buffers", "Live buffers by kind of layer", columns, kinds),
    )


# Row lengths to simulate. Lines through these meet the simulated counts of long rows exactly, on
# tiny models and on Qwen3.5-35B-A3B; through shorter ones not always.
_LENGTHS = {"none": (32, 48), "layers": (32, 48), "mlx": (48, 64)}
# In chunks a graph is small enough to be simulated as it is up to here.
_CHUNKED_LENGTHS, _CHUNKED_DIRECT = (1024, 2048), 2048
# A segment of the chunked recurrence: from there on more tokens are more operations.
_SEGMENT = 512

Say = Callable[[float, float, str], None]


def run_command(settings: GuardSettings, progress: Say | None = None) -> Result:
    """`mlxstacks guard`: the same as `guard`."""
    result = result_of(guard(settings, progress))
    if settings.hosts is None:
        return result
    plans = plan_hosts(read_config(settings.model or "")[0], settings)
    blocks = (*result.blocks, hosts_table(plans, settings))
    data = {**result.data, "hosts": [asdict(plan) for plan in plans]}
    return result.model_copy(update={"data": data, "blocks": blocks})


def guard(settings: GuardSettings, progress: Say | None = None) -> GuardReport:
    """Predict the run of `settings`.

    Raises:
        CheckpointError: no config, or none that mlx-lm knows.
        InputError: layers, names or rank that do not fit the model.
    """
    say = progress or (lambda done, total, what: None)
    config, where = read_config(settings.model or "")
    started = time.perf_counter()
    say(0, 3, "training step")
    with config_errors(config):  # around the model alone: what else fails is a fault of ours
        model, tokens = lazy_model(config), mx.zeros((1, 2), mx.int32)
        model(tokens)
        model(tokens, cache=make_prompt_cache(model))
    step = training_step(config, settings, 1)
    prediction = predict_training(config, settings, step=step)
    say(1, 3, "generating" if settings.decode_tokens else "training, longest rows")
    device = memory.device()
    limit = Limit(
        buffers=settings.resource_limit or device.resource_limit,
        known=settings.resource_limit is not None or device.resource_limit_known,
        nbytes=settings.working_set_bytes or device.working_set_bytes,
    )
    nbytes = _bytes(step, prediction.nbytes, settings)
    decode = _decode(step, nbytes, settings, limit)
    say(2, 3, "changes")
    share = _share(limit, prediction)
    verdict = verdict_of(limit, prediction.buffers, prediction.nbytes)
    of_decode = 0.0 if decode is None else share_of(limit, decode.buffers, decode.nbytes)
    if decode is not None and of_decode > share:
        share, verdict = of_decode, verdict_of(limit, decode.buffers, decode.nbytes)
        verdict += f" after {decode.tokens:,} tokens"
    outcome = outcome_of(share)
    change = None
    if outcome not in ("fits", outcome_of(of_decode)):  # no change makes generating smaller
        change = _cheapest_change(config, settings, limit, prediction, step)
    machine = memory.host_memory_bytes()
    if limit.nbytes is None and machine and (prediction.nbytes or 0) > machine:
        verdict += f", more than the {bytes_in_words(machine)} of this machine"
    return GuardReport(
        settings=settings.model_dump(mode="json"),
        config=where,
        limit=limit,
        buffers=prediction.buffers,
        buffers_per_token=round(prediction.buffers_per_token, 2),
        simulated_tokens=tuple(point.tokens for point in prediction.points),
        kinds=prediction.kinds,
        nbytes=nbytes,
        decode=decode,
        longest=_longest(limit, prediction),
        outcome=outcome,
        verdict=verdict,
        change=change,
        notes=tuple(_notes(settings, limit, prediction)),
        seconds=round(time.perf_counter() - started, 2),
    )


def predict_training(
    config: dict[str, Any],
    settings: GuardSettings,
    with_bytes: bool = True,
    step: Step | None = None,
) -> Prediction:
    """The peak of a training step with these settings.

    step: that step, where it is built already; its rows and its recurrence may be others.
    """
    built = training_step(config, settings, 1) if step is None else step

    def step_at(tokens: int) -> Step:
        return replace(built, batch=batch_of(settings, tokens))

    lengths = _LENGTHS[settings.checkpointing]
    direct = max(lengths)
    if settings.recurrence == "chunked" or not _is_recurrent(built):
        lengths, direct = _CHUNKED_LENGTHS, _CHUNKED_DIRECT
    with recurrence(settings):
        prediction = predict(step_at, settings.max_seq_length, lengths, direct, with_bytes)
    trained = [array for _, array in tree_flatten(built.model.trainable_parameters())]
    copies = settings.adapter_copies
    return replace(
        prediction, held=(copies * len(trained), copies * sum(a.nbytes for a in trained))
    )


def _is_recurrent(step: Step) -> bool:
    """Whether layers run a recurrence over the tokens."""
    modules = (module for layer in decoder_layers(step.model) for module in layer.modules())
    return any(hasattr(module, "A_log") for module in modules)


def _bytes(step: Step, peak: int | None, settings: GuardSettings) -> StepBytes:
    adapter = sum(a.nbytes for _, a in tree_flatten(step.model.trainable_parameters()))
    weights = sum(a.nbytes for _, a in tree_flatten(step.model.parameters())) - adapter
    adapter *= 1 + settings.adapter_copies
    optimizer = sum(a.nbytes for _, a in tree_flatten(step.optimizer.state))
    held = sum(a.nbytes for a in step.held)
    stacks = 0 if settings.stack is None else held
    weights += held - stacks
    rest = None if peak is None else peak - weights - adapter - optimizer - stacks
    return StepBytes(weights, adapter, optimizer, stacks, rest)


def _decode(
    step: Step, nbytes: StepBytes, settings: GuardSettings, limit: Limit
) -> DecodeReport | None:
    if not settings.decode_tokens:
        return None
    asked = step.model, settings.decode_tokens, settings.decode_batch
    if settings.decode_with == "drawn":
        found = predict_drawing(*asked, step.held)
    else:
        found = predict_decode(*asked, settings.decode_with == "batched", step.held)
    held = nbytes.weights + nbytes.adapter + nbytes.optimizer + nbytes.stacks + found.cache_bytes
    until = found.tokens_until(limit.buffers)
    return DecodeReport(found.tokens, found.buffers, held, found.leaked_per_token, until)


def _longest(limit: Limit, prediction: Prediction) -> int:
    """Tokens of the longest row that is not refused, by bisection."""

    def passes(tokens: int) -> bool:
        buffers, nbytes = prediction.buffers_at(tokens), prediction.bytes_at(tokens)
        return share_of(limit, buffers, nbytes) < REFUSE_SHARE

    if not prediction.extrapolated:
        return prediction.tokens if passes(prediction.tokens) else 0
    low, high = 0, 1
    while passes(high) and high < 1 << 24:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low


def _changes(settings: GuardSettings, recurrent: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """What could be changed, the cheapest first."""
    chunked = {"recurrence": "chunked"}
    layers = {"checkpointing": "layers"}
    loop = recurrent and settings.recurrence == "loop"
    if loop:
        yield "train the recurrence in chunks (same mathematics, faster)", chunked
    if settings.checkpointing != "layers":
        cost = "one more forward pass a step"
        if loop:
            yield f"recurrence in chunks and checkpointed layers ({cost})", chunked | layers
        else:
            yield f"checkpoint the layers ({cost})", layers


def _cheapest_change(
    config: dict[str, Any],
    settings: GuardSettings,
    limit: Limit,
    prediction: Prediction,
    step: Step,
) -> Change | None:
    """The first change with which the run fits, else one with which it just passes, else shorter
    rows with what helps most.
    """
    tried: list[tuple[str, dict[str, Any], Prediction]] = [("", {}, prediction)]
    for words, change in _changes(settings, _is_recurrent(step)):
        changed = settings.model_copy(update=change)
        changed_step = step if "checkpointing" not in change else None
        bound = _bound(config, changed, limit, changed_step)
        if bound is not None:
            return Change(words, change, bound, None)
        with_bytes = limit.nbytes is not None
        tried.append((words, change, predict_training(config, changed, with_bytes, changed_step)))
        if outcome_of(_share(limit, tried[-1][2])) == "fits":
            break
    before = _share(limit, prediction)
    for least in ("fits", "tight"):
        for words, change, candidate in tried[1:]:
            share = _share(limit, candidate)
            if outcome_of(share) == least and share < before:
                return Change(words, change, candidate.buffers, candidate.nbytes)
    words, change, candidate = min(tried, key=lambda row: _share(limit, row[2]))
    longest = _longest(limit, candidate)
    if longest < 1 or outcome_of(before) != "refused":
        return None
    shorter = f"rows of at most {longest:,} tokens"
    return Change(
        f"{words}, and {shorter}" if words else shorter,
        change | {"max_seq_length": longest},
        candidate.buffers_at(longest),
        candidate.bytes_at(longest),
    )


def _share(limit: Limit, prediction: Prediction) -> float:
    return share_of(limit, prediction.buffers, prediction.nbytes)


def _bound(
    config: dict[str, Any], settings: GuardSettings, limit: Limit, step: Step | None
) -> int | None:
    """Buffers of shorter rows, scaled up, where that is enough to say that a run fits.

    More than there will be, because not all of them grow with the rows; and found in less time.
    """
    if settings.recurrence != "chunked" or settings.max_seq_length <= _SEGMENT or limit.nbytes:
        return None
    cut = settings.model_copy(update={"max_seq_length": _SEGMENT})
    prediction = predict_training(config, cut, False, step)
    scaled = -(-prediction.buffers * settings.max_seq_length // _SEGMENT)
    return scaled if outcome_of(scaled / limit.buffers) == "fits" else None


def _notes(settings: GuardSettings, limit: Limit, prediction: Prediction) -> Iterator[str]:
    if not {"batch_size", "base"} & settings.model_fields_set:
        yield (
            "For a batch of 1 and the base as stored; train has 4 rows a batch and, on a CPU, the "
            "base in float32: --batch-size 4 --base float32."
        )
    if not limit.known:
        yield (
            f"The limit is the usual {limit.buffers:,}: this device names none. "
            "--resource-limit sets another."
        )
    if limit.nbytes is None:
        yield (
            "Bytes are compared with nothing: no Metal device here. "
            "--working-set-bytes names what the machine should stay within."
        )
    if memory.device().kind != "metal":
        yield "Built from MLX's CPU graph; on Metal single kernels replace parts of it."
    if prediction.extrapolated:
        shown = ", ".join(str(point.tokens) for point in prediction.points)
        yield f"Simulated at {shown} tokens and continued on a line for each phase of the step."
    if settings.compile and settings.recurrence == "loop" and prediction.extrapolated:
        # Equal zeros become one array there, which cannot be donated.
        yield "Bytes are a lower bound: in a compiled loop they grow faster than the rows."
    if prediction.note:
        yield prediction.note
