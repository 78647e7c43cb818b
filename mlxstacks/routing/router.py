"""The meta-router: from a prompt's features to one independent sigmoid score per domain.

Architecture of Brainstacks. Letters: B prompts, S tokens, D width of the base, h
hidden dims, n domains.

    x       = LayerNorm(W f + b)                                 (B, S, h)
    global  = LayerNorm(attention of one query over x)           (B, h)
    domain  = LayerNorm(attention of the domain's query over x)  (B, h), for each domain
    logit   = w . MLP([domain, global]) / clamp(exp(t), 0.3, 3)

Each domain is read by itself, in calls of its own: its logit has the same bits however many other
domains there are. So a domain can be added without a trace in the others.

A score is the raw sigmoid of a domain, a weight what the deltas of its stacks are multiplied by. A
chat domain never falls below its floor; a domain is active where its weight is above the threshold
(strictly), and only active domains have a weight in a route. Everything goes by the domain's name.
"""

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from mlxstacks.command_line import command_line
from mlxstacks.errors import InputError, StoreError
from mlxstacks.files.disk import user_path
from mlxstacks.files.router_file import RouterFile, RouterHeader, check_router, read_router
from mlxstacks.files.store import Store
from mlxstacks.routing.features import PromptFeatures, masked_mean
from mlxstacks.routing.gap_detector import GapDetector, detector_of
from mlxstacks.routing.settings import RouterTrainSettings

CHAT_DOMAIN = "chat"
CHAT_FLOOR = 0.20
THRESHOLD = 0.12

RouteMode = Literal["base", "ungated", "routed", "pinned"]


@dataclass(frozen=True)
class Route:
    """How one request is answered.

    scores: of every domain the router knows, empty where it was not asked. weights: of the active
    domains, in the router's order; empty in mode ungated too, where every stack counts 1. alone:
    where a conversation keeps other weights, those that the prompt alone would get. gap: no
    domain is known to fit: the prompt is like none that the router was trained on, or, of a router
    without a gap detector, all scores are below the threshold.
    """

    mode: RouteMode
    scores: Mapping[str, float] = field(default_factory=dict)
    weights: Mapping[str, float] = field(default_factory=dict)
    gap: bool = False
    alone: Mapping[str, float] = field(default_factory=dict)


def decide(
    scores: Mapping[str, float],
    *,
    chat_domain: str | None = None,
    chat_floor: float = CHAT_FLOOR,
    threshold: float = THRESHOLD,
    hard: bool = False,
    routable: Collection[str] | None = None,
) -> Route:
    """The route of one prompt (Brainstacks).

    hard: active domains count 1 instead of their score. routable: domains that may get a weight;
    None for all. The gap is judged on raw scores: with the floor applied it could never be.

    Raises: ValueError for a score outside [0, 1].
    """
    # NaN is in no range
    if strange := {name: score for name, score in scores.items() if not 0 <= score <= 1}:
        raise ValueError(f"scores must lie in [0, 1]; got {strange}")
    weights = {}
    for name, score in scores.items():
        weight = max(score, chat_floor) if name == chat_domain else score
        if weight > threshold and (routable is None or name in routable):
            weights[name] = 1.0 if hard else weight
    gap = bool(scores) and all(score < threshold for score in scores.values())
    return Route("routed", dict(scores), weights, gap)


def pinned(names: Iterable[str]) -> Route:
    """These domains at weight 1, whatever the prompt."""
    return Route("pinned", weights=dict.fromkeys(names, 1.0))


# --- the network ----------------------------------------------------------------------------------


LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.3, 3.0
ROUTER_FILE = "router.safetensors"
_QUERY_STD = 0.02
_MASKED = -1e9


class MetaRouter(nn.Module):
    """Parameters are named as in files/router_file.py, all float32.

    dropout acts where a call gets a key, as in training. key: of the first weights.
    """

    def __init__(
        self,
        input_dims: int,
        num_domains: int,
        hidden_dims: int = 512,
        dropout: float = 0.1,
        key: mx.array | None = None,
    ) -> None:
        super().__init__()
        h = hidden_dims
        keys = mx.random.split(mx.random.key(0) if key is None else key, 6)
        self.dropout = dropout
        self.token = _linear(input_dims, h, keys[0])
        self.token_norm = nn.LayerNorm(h)
        self.global_query = _QUERY_STD * mx.random.normal((h,), key=keys[1])
        self.global_norm = nn.LayerNorm(h)
        self.domain_queries = first_queries(num_domains, h, keys[2])
        self.domain_norm = nn.LayerNorm(h)
        self.hidden_in = _linear(2 * h, h, keys[3])
        self.hidden_norm = nn.LayerNorm(h)
        self.hidden_out = _linear(h, h, keys[4])
        self.logit = _linear(h, 1, keys[5])
        self.temperature = mx.zeros((1,))

    @property
    def num_domains(self) -> int:
        return int(self.domain_queries.shape[0])

    def __call__(self, x: mx.array, mask: mx.array, key: mx.array | None = None) -> mx.array:
        """Features x (B, S, D) float32, mask (B, S) bool -> logits (B, n) float32.

        key: dropout draws with it; none without.
        Law: what x holds where the mask is False changes no bit.
        """
        x = self.token_norm(self.token(x.astype(mx.float32)))  # (B, S, h)
        whole = self.global_norm(_attended(x, mask, self.global_query))  # (B, h)
        count = self.num_domains
        keys = [None] * count if key is None else list(mx.random.split(key, count))
        logits = [
            self._logit(self.domain_norm(_attended(x, mask, query)), whole, query_key)
            for query, query_key in zip(self.domain_queries, keys, strict=True)
        ]
        # Outside the clamp its parameter has no gradient.
        temperature = mx.clip(mx.exp(self.temperature), LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE)
        return mx.concatenate(logits, axis=-1) / temperature  # (B, n)

    def _logit(self, domain: mx.array, whole: mx.array, key: mx.array | None) -> mx.array:
        """(B, h), (B, h) -> (B, 1)."""
        first, second = (None, None) if key is None else mx.random.split(key)
        hidden = nn.gelu(self.hidden_in(mx.concatenate([domain, whole], axis=-1)))
        hidden = self.hidden_norm(_dropped(hidden, self.dropout, first))
        hidden = _dropped(nn.gelu(self.hidden_out(hidden)), self.dropout, second)
        return self.logit(hidden)


class SimilarityNetwork(nn.Module):
    """Logits without training: of the cosine between a prompt's mean feature and each domain's.

    centroids: (n, D) float32, the mean feature of each domain's prompts. Their mean is taken off
    both first, since features of one model mostly point one way. A score, the sigmoid of a logit,
    is this cosine where it is above 0, and next to 0 elsewhere.
    """

    _SMALLEST = 1e-6

    def __init__(self, centroids: mx.array) -> None:
        super().__init__()
        self.centre = mx.mean(centroids, axis=0)  # (D,)
        self.centroids = _unit(centroids - self.centre)

    def __call__(self, x: mx.array, mask: mx.array, key: mx.array | None = None) -> mx.array:
        """Features x (B, S, D) float32, mask (B, S) bool -> logits (B, n) float32."""
        cosines = _unit(masked_mean(x, mask) - self.centre) @ self.centroids.T  # (B, n)
        scores = mx.clip(cosines, self._SMALLEST, 1 - self._SMALLEST)
        return mx.log(scores / (1 - scores))


def _unit(x: mx.array) -> mx.array:
    return x / mx.maximum(mx.linalg.norm(x, axis=-1, keepdims=True), 1e-12)


def parameter_count(input_dims: int, num_domains: int, hidden_dims: int = 512) -> int:
    """Numbers in a router: h D + h n + 3 h^2 + 13 h + 2."""
    h = hidden_dims
    return h * input_dims + h * num_domains + 3 * h * h + 13 * h + 2


def first_queries(num_domains: int, hidden_dims: int, key: mx.array) -> mx.array:
    """Untrained domain queries (n, h) float32."""
    return _QUERY_STD * mx.random.normal((num_domains, hidden_dims), key=key)


def router_tensors(network: MetaRouter) -> dict[str, mx.array]:
    """Its parameters by name, as they are stored."""
    return dict(tree_flatten(network.parameters()))


def network_of(file: RouterFile, dropout: float = 0.1) -> MetaRouter:
    """The network that a file holds. Law: `router_tensors` of it are the file's, bit for bit, but
    for those of a gap detector.
    """
    header = file.header
    network = MetaRouter(header.input_dims, len(header.domains), header.hidden_dims, dropout)
    own = [(name, array) for name, array in file.tensors.items() if not name.startswith("gap.")]
    network.load_weights(own)
    mx.eval(network.parameters())
    return network


@dataclass(frozen=True, eq=False)
class PromptReading:
    """What a router sees in one prompt. scores: by domain. feature: (D,) float32, the mean of its
    features over tokens. is_gap: what the gap detector says; None without one.
    """

    scores: dict[str, float]
    feature: np.ndarray
    is_gap: bool | None = None


class PromptRouter:
    """A router with its features: text in, scores by domain out.

    notes: what is worth saying about this router and this store. detector: says which prompts no
    domain fits; `features` pools the layers that it needs.
    """

    def __init__(
        self,
        network: MetaRouter | SimilarityNetwork,
        header: RouterHeader,
        features: PromptFeatures,
        notes: Sequence[str] = (),
        detector: GapDetector | None = None,
    ) -> None:
        self.network, self.header, self.features = network, header, features
        self.notes, self.detector = tuple(notes), detector
        if detector is not None:
            features.pooled_layers = detector.layers

    def by_similarity(self, prompts: Mapping[str, Sequence[str]]) -> "PromptRouter":
        """A router on the same features and with the same threshold, without training: see
        `SimilarityNetwork`. prompts: of each of its domains, some that are known to be of it.
        """
        centroids = [
            np.mean([self.features.pooled(f) for f in self.features.of(prompts[name])], axis=0)
            for name in self.domains
        ]
        network = SimilarityNetwork(mx.array(np.stack(centroids)))
        return PromptRouter(network, self.header, self.features)

    @property
    def domains(self) -> tuple[str, ...]:
        """In the order of the logits."""
        return self.header.domains

    @cached_property
    def digest(self) -> str:
        """See `router_digest`."""
        return router_digest(self.header, self.network)

    def scores(self, texts: Sequence[str]) -> list[dict[str, float]]:
        """Scores of each text by domain. Raises: InputError for an empty text."""
        return [reading.scores for reading in self.read(texts)]

    def score(self, text: str) -> dict[str, float]:
        """Domain -> score of one text. Raises: InputError for an empty text."""
        return self.scores([text])[0]

    def read(self, texts: Sequence[str], batch_size: int = 16) -> list[PromptReading]:
        """Scores, feature and gap of each text. Raises: InputError for an empty text."""
        prompts = [self.features.tokens(text) for text in texts]
        readings: list[PromptReading] = []
        for start in range(0, len(prompts), batch_size):
            readings += self._read(prompts[start : start + batch_size])
        return readings

    def routes(
        self,
        texts: Sequence[str],
        *,
        hard: bool = False,
        routable: Collection[str] | None = None,
    ) -> list[Route]:
        """The route of each text. Raises: InputError for an empty text."""
        return [self.decide(r, hard=hard, routable=routable) for r in self.read(texts)]

    def decide(
        self,
        reading: PromptReading,
        *,
        hard: bool = False,
        routable: Collection[str] | None = None,
    ) -> Route:
        """`decide` with the floor and the threshold that this router was trained for, and the gap
        as its detector sees it.
        """
        route = decide(
            reading.scores, chat_domain=self.header.chat_domain, chat_floor=self.header.chat_floor,
            threshold=self.header.threshold, hard=hard, routable=routable,
        )  # fmt: skip
        return route if reading.is_gap is None else replace(route, gap=reading.is_gap)

    def _read(self, prompts: Sequence[Sequence[int]]) -> list[PromptReading]:
        features, mask, means = self.features.batch(prompts)
        if features.shape[-1] != self.header.input_dims:
            raise StoreError(
                f"the router was trained on hidden states of {self.header.input_dims} dims, this "
                f"model has {features.shape[-1]}; it is of another base"
            )
        logits = self.network(features, mask)  # (B, n)
        scores = mx.sigmoid(logits)
        rows: Any = scores.tolist()
        if not mx.isfinite(scores).all():
            raise StoreError(
                "the router's scores are not numbers: its weights are finite, but sums of them "
                "leave the range of float32; train it again with `mlxstacks route train`"
            )
        gaps: Sequence[bool | None] = [None] * len(prompts)
        if self.detector is not None:
            gaps = self.detector.is_gap(np.array(means), prompts, np.array(logits)).tolist()
        return [
            PromptReading(dict(zip(self.domains, row, strict=True)), feature, gap)
            for row, feature, gap in zip(
                rows, np.array(masked_mean(features, mask)), gaps, strict=True
            )
        ]


def router_digest(header: RouterHeader, network: MetaRouter | SimilarityNetwork) -> str:
    """Of the header, which names base and stacks, and of the weights: tells routers apart."""
    digest = hashlib.sha256(repr(header).encode())
    for name, array in sorted(tree_flatten(network.parameters())):
        digest.update(name.encode())
        digest.update(np.array(array.astype(mx.float32)).tobytes())
    return digest.hexdigest()[:16]


def load_prompt_router(
    store: Store, model: nn.Module, tokenizer: Any, router_path: str | Path | None = None
) -> PromptRouter:
    """The store's router, or another one, ready for prompts.

    router_path: a router's file, or the directory that `route train` wrote.
    Raises:
        InputError: the store has no router, or there is none at router_path.
        StoreError: it is damaged, of another base, or was trained for other stacks.
    """
    if router_path is None:
        if store.manifest.router is None:
            if store.manifest.holds_blocks:
                raise InputError(
                    f"{store.path}: has no router; `mlxstacks psn blocks` trains one with its "
                    "blocks. --ungated and --pin DOMAIN answer without"
                )
            discover = command_line("mlxstacks route discover", store.path)
            train = command_line("mlxstacks route train", store.path)
            raise InputError(
                f"{store.path}: the store has no router; `{discover}`, then `{train}` trains one"
            )
        file = store.read_router()
    else:
        file = read_router(router_file_at(router_path))
    notes = check_router(file.header, store)
    features = features_for(file.header, model, tokenizer)
    detector = detector_of(file)
    if detector is not None and max(detector.layers, default=0) > features.num_layers:
        raise StoreError(
            f"the router's gap detector reads layer {max(detector.layers)}, this base has "
            f"{features.num_layers}; it is of another base: train one with `mlxstacks route train`"
        )
    return PromptRouter(network_of(file), file.header, features, notes, detector)


def router_file_at(path: str | Path) -> Path:
    """A router's file, named itself or by its directory. Raises: InputError: there is none."""
    file = user_path(path)
    if file.is_dir():
        file = file / ROUTER_FILE
    if not file.is_file():
        raise InputError(f"{file}: no router there; `mlxstacks route train` writes {ROUTER_FILE}")
    return file


def features_for(
    header: RouterHeader | RouterTrainSettings, model: nn.Module, tokenizer: Any
) -> PromptFeatures:
    """Features as a router was, or is to be, trained on them."""
    return PromptFeatures(
        model, tokenizer, max_tokens=header.max_tokens, mid_weight=header.mid_weight,
        last_weight=header.last_weight, normalise=header.normalise_features,
    )  # fmt: skip


def _attended(x: mx.array, mask: mx.array, query: mx.array) -> mx.array:
    """x (B, S, h), mask (B, S), query (h,) -> (B, h): the mean of x that the query asks for.

    No 1/sqrt(h) on the scores, as published.
    """
    scores = mx.where(mask, x @ query, _MASKED)  # (B, S)
    weights = mx.softmax(scores, axis=-1)
    return (weights[:, None, :] @ x).squeeze(1)


def _linear(input_dims: int, output_dims: int, key: mx.array) -> nn.Linear:
    """A linear with nn.Linear's (and PyTorch's) first weights, from a key."""
    layer = nn.Linear(input_dims, output_dims)
    bound = input_dims**-0.5
    for_weight, for_bias = mx.random.split(key)
    layer.weight = mx.random.uniform(-bound, bound, (output_dims, input_dims), key=for_weight)
    layer.bias = mx.random.uniform(-bound, bound, (output_dims,), key=for_bias)
    return layer


def _dropped(x: mx.array, share: float, key: mx.array | None) -> mx.array:
    if key is None or share == 0:
        return x
    return x * mx.random.bernoulli(1 - share, x.shape, key=key) / (1 - share)
