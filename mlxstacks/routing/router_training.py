"""Training of the meta-router: rows, split, features, a first network, its epochs, its metrics.

AdamW, a cosine by epoch, the best epoch by the checkpoint score:

    L = BCE(logits, targets) + margin_weight * mean(relu(0.3 - |sigmoid(logits) - 0.5|))

The margin pushes scores out of 0.2 to 0.8, against soft targets too (Brainstacks), so
a calibration table comes with the metrics.
"""

import math
import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

from mlxstacks import __version__
from mlxstacks.errors import InputError
from mlxstacks.files.router_file import RouterFile, RouterHeader
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.routing.features import FeatureTable, PromptFeatures
from mlxstacks.routing.gap_detector import GapDetector, GapRows, candidate_layers, fit_detector
from mlxstacks.routing.outcomes import Kind, RouterExample, Targets, targets_or_label
from mlxstacks.routing.router import (
    CHAT_DOMAIN,
    CHAT_FLOOR,
    MetaRouter,
    first_queries,
    network_of,
    router_tensors,
)
from mlxstacks.routing.router_metrics import (
    EpochMetrics,
    calibration,
    confusion,
    domain_metrics,
    epoch_metrics,
    gap_rates,
    sigmoid,
)
from mlxstacks.routing.settings import RouterTrainSettings
from mlxstacks.training.loop import NonFiniteError
from mlxstacks.training.step import clip_by_global_norm, random_key

GROUP_CHARACTERS = 100


@dataclass(frozen=True, eq=False)
class RouterRows:
    """Examples side by side; i counts examples, d domains.

    targets: (N, n) float32 in 0 to 1. discovered: (N,) bool, whether the target is more than the
    label.
    """

    prompts: list[str]
    kinds: list[Kind]
    labels: list[tuple[str, ...]]
    row_ids: list[str]
    targets: np.ndarray
    discovered: np.ndarray

    def __len__(self) -> int:
        return len(self.prompts)

    def of_kind(self, kind: Kind) -> np.ndarray:
        """(N,) bool."""
        return np.array(self.kinds) == kind

    def chosen(self, places: Sequence[int]) -> "RouterRows":
        """The examples at these places, in that order."""
        at = list(places)
        return RouterRows(
            [self.prompts[i] for i in at], [self.kinds[i] for i in at],
            [self.labels[i] for i in at], [self.row_ids[i] for i in at], self.targets[at],
            self.discovered[at],
        )  # fmt: skip


def rows_of(
    examples: Sequence[RouterExample],
    discovered: Mapping[str, Targets],
    domains: Sequence[str],
    *,
    oracle_only: bool = False,
) -> RouterRows:
    """Targets of all examples: the discovered one, else the label.

    An example without a label has zeros: nothing should help with it.

    Raises: InputError: an example is of a domain that is not among `domains`, or nothing is left.
    """
    if unknown := {name for example in examples for name in example.label} - {*domains}:
        raise InputError(
            f"examples are of {', '.join(sorted(unknown))}, which the store does not serve "
            f"(it serves {', '.join(domains)}); run `mlxstacks route discover` again"
        )
    kept = [e for e in examples if e.row_id in discovered or not oracle_only]
    if not kept:
        why = "none has a discovered outcome, and oracle_only leaves out the rest"
        raise InputError(f"no examples to train the router on: {why if examples else 'none came'}")
    targets = [list(targets_or_label(e, discovered, domains).values()) for e in kept]
    return RouterRows(
        [e.prompt for e in kept], [e.kind for e in kept], [e.label for e in kept],
        [e.row_id for e in kept],
        np.array(targets, dtype=np.float32),
        np.array([e.row_id in discovered for e in kept], dtype=bool),
    )  # fmt: skip


def group_key(prompt: str) -> str:
    """What prompts of one group share: the first 100 characters of their words, in lower case.

    Marks, blanks and letters that only look different do not count.
    """
    text = unicodedata.normalize("NFKC", prompt).casefold()
    words = " ".join(re.findall(r"\w+", text))
    return (words or text.strip())[:GROUP_CHARACTERS]


def split_places(
    prompts: Sequence[str],
    seed: int,
    share: float = 0.1,
    least: int = 200,
    kinds: Sequence[Kind] = (),
) -> tuple[list[int], list[int]]:
    """(training, validation): places of prompts, rising, by groups that are shuffled with `seed`.

    Validation gets `share` of the groups, but at least `least`, unless these are more than half of
    all: then the share alone decides. The order of the prompts does not matter.
    kinds: of the prompts; validation gets a group of each kind that has at least two of its own.
    Law: no group has prompts on both sides, and every prompt is on one.

    Raises: InputError: there are fewer than two groups.
    """
    keys = [group_key(prompt) for prompt in prompts]
    groups = sorted(set(keys))
    if len(groups) < 2:
        raise InputError(
            f"{len(prompts)} examples make {len(groups)} groups of like prompts; to train and to "
            "validate a router takes two"
        )
    wanted = max(1, round(share * len(groups)))
    if least <= len(groups) // 2:
        wanted = max(wanted, least)
    wanted = min(wanted, len(groups) - 1)
    order = [groups[i] for i in np.random.default_rng(seed).permutation(len(groups))]
    held_out = set(order[:wanted])
    for kind in sorted(set(kinds)):
        of_kind = {key for key, other in zip(keys, kinds, strict=True) if other == kind}
        if len(of_kind) > 1 and not of_kind & held_out:
            held_out.add(next(key for key in order if key in of_kind))
    training = [i for i, key in enumerate(keys) if key not in held_out]
    validation = [i for i, key in enumerate(keys) if key in held_out]
    assert not {keys[i] for i in training} & {keys[i] for i in validation}
    return training, validation


# --- training -------------------------------------------------------------------------------------


Progress = Callable[[float, float, str], None]


@dataclass(frozen=True, eq=False)
class TrainedRouter:
    """The best epoch of a run.

    domains: in the order of the logits. history: one record an epoch. metrics: of the best epoch on
    the held-out prompts, which it was chosen by too. split: counts, and the row ids that were held
    out. about: what the header says of the features and of inference. detector: of gaps, None
    where too few prompts were held out.
    """

    network: MetaRouter
    domains: tuple[str, ...]
    input_dims: int
    history: list[dict[str, Any]]
    best_epoch: int
    metrics: dict[str, Any]
    split: dict[str, Any]
    about: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    detector: GapDetector | None = None

    def tensors(self) -> dict[str, mx.array]:
        """Its parameters and those of its gap detector by name, as they are stored."""
        gaps = self.detector.tensors if self.detector else {}
        return {**router_tensors(self.network), **{n: mx.array(a) for n, a in gaps.items()}}

    def header(
        self,
        base_model: str,
        base_fingerprint: str,
        stacks: Mapping[str, tuple[str, ...]],
        training: Mapping[str, Any] | None = None,
    ) -> RouterHeader:
        """The header of its file. stacks: domain -> SHA-256 of its stacks, in order."""
        ids = self.split["validation_row_ids"]
        split = {k: v for k, v in self.split.items() if k != "validation_row_ids"}
        return RouterHeader(
            domains=self.domains,
            stacks={name: tuple(stacks[name]) for name in self.domains},
            base_model=base_model,
            base_fingerprint=base_fingerprint,
            input_dims=self.input_dims,
            hidden_dims=int(self.network.global_query.shape[0]),
            training={
                "best_epoch": self.best_epoch,
                "epoch": self.history[self.best_epoch - 1],
                "split": {**split, "validation_sha256": json_sha256(ids)},
                **(training or {}),
            },
            code_version=__version__,
            gaps=self.detector.rule if self.detector else None,
            **self.about,
        )


def train_router(
    examples: Sequence[RouterExample],
    targets: Mapping[str, Targets],
    features: PromptFeatures | FeatureTable,
    settings: RouterTrainSettings,
    *,
    domains: Sequence[str],
    start: RouterFile | None = None,
    directory: Path | None = None,
    progress: Progress | None = None,
) -> TrainedRouter:
    """Train a router for `domains` on examples and discovered targets (row id -> domain -> target).

    features: a table serves several runs over the same examples. start: the router to extend, where
    `settings.extend` is set; its domains come first, in its order. directory: for features that are
    too large for memory. progress: (done, all, what).

    Law: equal arguments give equal bits on one machine and BLAS. With extend "new" every old
    parameter keeps its bits, and so does every logit of an old domain.

    Raises: InputError: examples that do not fit, too few of them, a start of another kind.
        NonFiniteError: NaN or Inf in a step.
    """

    def report(part: float, done: float, what: str) -> None:
        if progress:  # on a real model the hidden states take far longer than the epochs
            progress(part + done, 2, what)

    notes: list[str] = []
    start = start if settings.extend else None
    ordered = _ordered(domains, start, settings)
    chat_domain = settings.chat_domain or (CHAT_DOMAIN if CHAT_DOMAIN in ordered else None)
    if chat_domain is not None and chat_domain not in ordered:
        raise InputError(f"chat_domain {chat_domain}: not among the domains {', '.join(ordered)}")
    rows = rows_of(examples, targets, ordered, oracle_only=settings.oracle_only)
    never = [name for d, name in enumerate(ordered) if not (rows.targets[:, d] > 0.5).any()]
    if len(never) == len(ordered):
        raise InputError(
            f"no example wants {' or '.join(never)}: their router would never choose a stack. Give "
            "prompts that are of these domains, and targets that were discovered on them"
        )
    if never:
        notes.append(
            f"No example wants {', '.join(never)}: the router will never choose "
            f"{'it' if len(never) == 1 else 'them'}."
        )
    if not rows.of_kind("mixed").any():
        notes.append("There are no mixed prompts: mixed_set is not measured.")
    if start is not None:
        notes.append(
            "The router before was trained with a split of its own: it may know held-out prompts, "
            "so the figures of its domains may be too good."
        )
    training, validation = split_places(
        rows.prompts, settings.seed, settings.validation_share, settings.validation_groups,
        rows.kinds,
    )  # fmt: skip
    table = features
    if isinstance(table, PromptFeatures):
        table.pooled_layers = candidate_layers(table.num_layers)
        table = FeatureTable(
            table, rows.prompts, directory=directory,
            progress=lambda done, total: report(0, done / total, "hidden states"),
        )  # fmt: skip
    network, kept = _first_network(ordered, table.input_dims, start, settings)
    run = RouterEpochs(
        network, kept, table, rows.chosen(training), rows.chosen(validation), settings
    )
    history, best = run.train(lambda done: report(1, done / settings.epochs, "training"))
    detector, metrics = _detector(run, rows, validation, ordered, settings, notes)
    about = {
        "max_tokens": table.features.max_tokens,
        "mid_weight": table.features.mid_weight,
        "last_weight": table.features.last_weight,
        "normalise_features": table.features.normalise,
        "chat_domain": chat_domain,
        "chat_floor": CHAT_FLOOR if settings.chat_floor is None else settings.chat_floor,
        "threshold": settings.threshold,
    }
    split = {
        "training": len(training),
        "validation": len(validation),
        "discovered": int(rows.discovered.sum()),
        "seed": settings.seed,
        "validation_row_ids": sorted(run.validation.row_ids),
    }
    return TrainedRouter(
        network, tuple(ordered), table.input_dims, history, best, metrics, split, about, notes,
        detector,
    )  # fmt: skip


def _detector(
    run: "RouterEpochs",
    rows: RouterRows,
    validation: Sequence[int],
    domains: Sequence[str],
    settings: RouterTrainSettings,
    notes: list[str],
) -> tuple[GapDetector | None, dict[str, Any]]:
    """The gap detector, and all metrics on held-out prompts."""
    logits, held_out = run.logits(rows), np.isin(np.arange(len(rows)), validation)
    features = run.table.features
    detector, note = fit_detector(GapRows(
        run.table.means(rows.prompts), features.pooled_layers,
        [features.tokens(prompt) for prompt in rows.prompts], logits, tuple(domains), rows.labels,
        held_out,
    ))  # fmt: skip
    notes += [note] if note else []
    metrics = _final_metrics(logits[held_out], run.validation, domains, settings)
    metrics["gap_detector"] = None if detector is None else {
        **detector.rule.chosen_by, "threshold": detector.rule.threshold
    }  # fmt: skip
    return detector, metrics


def _final_metrics(
    logits: np.ndarray, rows: RouterRows, domains: Sequence[str], settings: RouterTrainSettings
) -> dict[str, Any]:
    """All that is reported of a router on held-out prompts. logits (N, n)."""
    scores = sigmoid(logits)
    single, mixed, other = rows.of_kind("single"), rows.of_kind("mixed"), rows.of_kind("other")
    return {
        **epoch_metrics(logits, rows.targets, single, mixed, settings.batch_size).as_json(),
        "examples": {
            "single": int(single.sum()), "mixed": int(mixed.sum()), "other": int(other.sum()),
        },
        "calibration": calibration(scores, rows.targets),
        "domains": domain_metrics(scores, rows.targets, domains, settings.threshold),
        "confusion": confusion(scores[single], rows.targets[single], domains),
        "gaps": gap_rates(scores, settings.threshold, {"known": single | mixed, "other": other}),
    }  # fmt: skip


def _ordered(
    domains: Sequence[str], start: RouterFile | None, settings: RouterTrainSettings
) -> list[str]:
    """Domains as the router has them: those of the start first, in its order."""
    if not domains:
        raise InputError("no domain to route to: the store serves no stacks")
    if settings.extend and start is None:
        raise InputError(f"extend {settings.extend} needs a router to start from; there is none")
    if start is None:
        return list(domains)
    old = [name for name in start.header.domains if name in domains]
    new = [name for name in domains if name not in old]
    if settings.extend == "new" and not new:
        raise InputError(
            f"the router knows {', '.join(old)}, all that the store serves: extend new has nothing "
            "to train; extend all trains everything from there"
        )
    return [*old, *new]


def _first_network(
    domains: Sequence[str], dims: int, start: RouterFile | None, settings: RouterTrainSettings
) -> tuple[MetaRouter, int | None]:
    """The network before training, and how many rows of its queries are to stay."""
    key = random_key(f"router/{settings.seed}")
    if start is None:
        return MetaRouter(dims, len(domains), settings.hidden_dims, settings.dropout, key), None
    header = start.header
    if header.input_dims != dims:
        raise InputError(
            f"the router to extend reads {header.input_dims} dims, this base has {dims}; it is of "
            "another base"
        )
    network = network_of(start, settings.dropout)
    kept = [header.domains.index(name) for name in domains if name in header.domains]
    queries = [network.domain_queries[place][None] for place in kept]
    if count := len(domains) - len(kept):
        queries.append(first_queries(count, header.hidden_dims, key))
    network.domain_queries = mx.concatenate(queries)
    mx.eval(network.parameters())
    return network, len(kept) if settings.extend == "new" else None


# --- epochs ---------------------------------------------------------------------------------------


MARGIN = 0.3


def router_loss(
    logits: mx.array,
    targets: mx.array,
    weights: mx.array | None = None,
    margin_weight: float = 0.05,
) -> mx.array:
    """logits, targets (B, n), weights (B,) or None for equal ones -> a scalar, in nats."""
    bce = nn.losses.binary_cross_entropy(logits, targets, with_logits=True, reduction="none")
    margin = nn.relu(MARGIN - mx.abs(mx.sigmoid(logits) - 0.5))
    each = mx.mean(bce + margin_weight * margin, axis=-1)  # (B,)
    return mx.mean(each) if weights is None else mx.sum(each * weights) / mx.sum(weights)


def epoch_learning_rate(settings: RouterTrainSettings, epoch: int) -> float:
    """Of epoch 0, 1, ...: a cosine from the first rate towards zero, one step an epoch."""
    return settings.learning_rate * 0.5 * (1 + math.cos(math.pi * epoch / settings.epochs))


class RouterEpochs:
    """One training run. kept: rows of the domain queries that stay as they are; None: all train."""

    def __init__(
        self,
        network: MetaRouter,
        kept: int | None,
        table: FeatureTable,
        training: RouterRows,
        validation: RouterRows,
        settings: RouterTrainSettings,
    ) -> None:
        self.network, self.table, self.settings = network, table, settings
        self.training, self.validation = training, validation
        self._old = None if kept is None else network.domain_queries[:kept]
        self._weights = np.where(training.discovered, settings.discovered_weight, 1.0)
        self._step = mx.value_and_grad(self._loss_at)
        self._optimizer = optim.AdamW(
            settings.learning_rate, weight_decay=settings.weight_decay, bias_correction=True
        )

    def train(self, report: Callable[[int], None]) -> tuple[list[dict[str, Any]], int]:
        """(a record an epoch, the best epoch from 1); the network then has its weights."""
        history: list[dict[str, Any]] = []
        best, best_score, best_weights = 0, -math.inf, self._trained()
        for epoch in range(self.settings.epochs):
            rate = epoch_learning_rate(self.settings, epoch)
            loss = self._epoch(epoch, rate)
            metrics = self._measured()
            history.append({
                "epoch": epoch + 1, "learning_rate": rate, "train_loss": loss, **metrics.as_json()
            })  # fmt: skip
            if metrics.checkpoint_score > best_score:
                best, best_score = epoch + 1, metrics.checkpoint_score
                best_weights = self._trained()
            report(epoch + 1)
        self._put(best_weights)
        mx.eval(self.network.parameters())
        return history, best

    def logits(self, rows: RouterRows) -> np.ndarray:
        """(N, n) float32, without dropout."""
        size = self.settings.batch_size
        parts = []
        for at in range(0, len(rows), size):
            x, mask = self.table.padded(rows.prompts[at : at + size])
            parts.append(np.array(self.network(mx.array(x), mx.array(mask))))
        return np.concatenate(parts)

    def _measured(self) -> EpochMetrics:
        rows = self.validation
        logits = self.logits(rows)
        if not np.isfinite(logits).all():
            raise NonFiniteError(
                "the router's logits of held-out prompts are NaN or Inf; lower learning_rate, or "
                "set normalise_features"
            )
        return epoch_metrics(
            logits, rows.targets, rows.of_kind("single"), rows.of_kind("mixed"),
            self.settings.batch_size,
        )  # fmt: skip

    def _epoch(self, epoch: int, rate: float) -> float:
        """The mean loss of its batches."""
        self._optimizer.learning_rate = rate
        size, rows = self.settings.batch_size, self.training
        order = np.random.default_rng([self.settings.seed, epoch]).permutation(len(rows))
        losses = []
        for at in range(0, len(order), size):
            places = order[at : at + size]
            batch = rows.chosen(places.tolist())
            x, mask = self.table.padded(batch.prompts)
            losses.append(self._take_step(
                mx.array(x), mx.array(mask), mx.array(batch.targets),
                mx.array(self._weights[places].astype(np.float32)),
                random_key(f"{self.settings.seed}/{epoch}/{at}"),
            ))  # fmt: skip
        return float(np.mean(losses))

    def _take_step(self, *arrays: mx.array) -> float:
        weights = self._trained()
        try:
            loss, gradients = self._step(weights, *arrays)
        finally:
            self._put(weights)  # tracing left placeholders there
        gradients, norm = clip_by_global_norm(gradients, self.settings.clip_norm)
        self._put(self._optimizer.apply_gradients(gradients, weights))
        mx.eval(self.network.parameters(), self._optimizer.state, loss, norm)
        if not math.isfinite(loss.item()) or not math.isfinite(norm.item()):
            raise NonFiniteError(
                f"the router's loss is {loss.item()}, its gradient's norm {norm.item()}; lower "
                "learning_rate, or set normalise_features"
            )
        return float(loss.item())

    def _loss_at(
        self,
        weights: Any,
        x: mx.array,
        mask: mx.array,
        targets: mx.array,
        counts: mx.array,
        key: mx.array,
    ) -> mx.array:
        self._put(weights)
        logits = self.network(x, mask, key)
        return router_loss(logits, targets, counts, self.settings.margin_weight)

    def _trained(self) -> dict[str, Any]:
        """The parameters that are trained."""
        if self._old is None:
            return dict(self.network.trainable_parameters())
        return {"new_queries": self.network.domain_queries[len(self._old) :]}

    def _put(self, weights: dict[str, Any]) -> None:
        if self._old is None:
            self.network.update(weights)
        else:
            self.network.domain_queries = mx.concatenate([self._old, weights["new_queries"]])
