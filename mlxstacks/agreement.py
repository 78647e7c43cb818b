"""How far a model's next tokens are from a reference's: KL divergence, agreement, loss.

Both models read the same tokens, the right ones before each (teacher forcing): plain texts whole,
and the answers that the reference itself gives, greedily, to prompts. The reference is run once and
leaves its `TOP_K` likeliest next tokens at each position, so that the two models need never be in
memory together.

KL is of the distribution over those tokens and the rest taken as one token, in nats a position. By
the data processing inequality it is at most KL over the whole vocabulary.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxstacks import base_model
from mlxstacks.data.chat import prompt_tokens
from mlxstacks.data.encode import RowNotes, text_tokens
from mlxstacks.data.examples import as_messages
from mlxstacks.data.text_settings import PLAIN, Rendering
from mlxstacks.errors import InputError, NonFiniteModelError
from mlxstacks.training.modes import evaluating

TOP_K = 4096
_SUMMED_TOGETHER = 256
KINDS: tuple["Kind", ...] = ("answer", "text")
Kind = Literal["answer", "text"]
Advance = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class Passage:
    """Token ids, of which those from `start` on are predicted (start >= 1)."""

    tokens: tuple[int, ...]
    start: int
    kind: Kind

    @property
    def positions(self) -> int:
        return len(self.tokens) - self.start


@dataclass(frozen=True, eq=False)
class Reference:
    """What the reference says at the N predicted positions of all passages, one after the other.

    ids: (N, K) int32, the likeliest first. log_p: (N, K) float32. loss: (N,) float32, -log p of the
    token that stands there. K is TOP_K, or the vocabulary's size where that is smaller.
    """

    passages: tuple[Passage, ...]
    ids: np.ndarray
    log_p: np.ndarray
    loss: np.ndarray

    def save(self, path: Path, metadata: Mapping[str, str] | None = None) -> None:
        shape = [(len(p.tokens), p.start, KINDS.index(p.kind)) for p in self.passages]
        tokens = [token for passage in self.passages for token in passage.tokens]
        arrays = {
            "tokens": np.array(tokens, np.int32), "passages": np.array(shape, np.int32),
            "ids": self.ids, "log_p": self.log_p, "loss": self.loss,
        }  # fmt: skip
        values = {name: mx.array(value) for name, value in arrays.items()}
        base_model.save_arrays(path, values, metadata)

    @classmethod
    def open(cls, path: Path) -> "Reference":
        arrays = {name: np.array(value) for name, value in base_model.load_arrays(path)[0].items()}
        passages, at = [], 0
        for length, start, kind in arrays["passages"].tolist():
            tokens = tuple(arrays["tokens"][at : at + length].tolist())
            passages.append(Passage(tokens, start, KINDS[kind]))
            at += length
        return cls(tuple(passages), arrays["ids"], arrays["log_p"], arrays["loss"])


@dataclass(frozen=True, eq=False)
class Agreement:
    """A model beside the reference, at its N positions.

    kl: nats, float32. same_token: whether both find the same token likeliest. loss_change: of
    -log p of the token that stands there, to the reference's, float32. passages: (P, 2) int32, of
    each its positions and its kind, as a place in KINDS.
    """

    kl: np.ndarray
    same_token: np.ndarray
    loss_change: np.ndarray
    passages: np.ndarray

    def save(self, path: Path) -> None:
        base_model.save_arrays(path, {name: mx.array(value) for name, value in vars(self).items()})

    @classmethod
    def open(cls, path: Path) -> "Agreement":
        arrays = base_model.load_arrays(path)[0]
        return cls(**{name: np.array(value) for name, value in arrays.items()})


def read_passages(
    records: Sequence[Mapping[str, Any]],
    model: nn.Module,
    tokenizer: Any,
    *,
    answer_tokens: int,
    most_tokens: int,
    rendering: Rendering = PLAIN,
    advance: Advance | None = None,
    notes: list[str] | None = None,
    command: str = "",
) -> tuple[Passage, ...]:
    """Passages of rows with `text`, or with `prompt` or `messages`, which the model answers in at
    most `answer_tokens`. most_tokens: of a text or of a prompt, the first ones. notes: takes what a
    reader should know of the rows. command: that has the options which these name, if another one.

    Raises: InputError: a row has neither, or is empty; nothing is left to predict.
    """
    check_records(records)
    passages, rows, cut = [], RowNotes(tokenizer, rendering), 0
    for number, record in enumerate(records, 1):
        chat, limit = _asked(record), most_tokens + 1  # one more says that a row is longer
        if chat is not None:
            tokens = prompt_tokens(chat, tokenizer, rendering, limit)
            prompt = tuple(tokens[:most_tokens])
            answer = base_model.greedy_tokens(model, tokenizer, prompt, answer_tokens)
            passages.append(Passage((*prompt, *answer), len(prompt), "answer"))
        else:
            tokens = text_tokens(record["text"], tokenizer, rendering, limit)
            passages.append(Passage(tuple(tokens[:most_tokens]), 1, "text"))
        cut += len(tokens) > most_tokens
        rows.add({"messages": chat} if chat is not None else {"text": record["text"]})
        if advance:
            advance(number, len(records))
    if notes is not None:
        notes += rows.lines(command)
        if cut:
            notes.append(
                f"{cut:,} of {len(records):,} rows were cut to {most_tokens:,} tokens; "
                f"{command}--max-tokens changes that."
            )
    passages = [passage for passage in passages if passage.positions > 0]
    if not passages:
        raise InputError("no row leaves a token to predict; give longer texts")
    return tuple(passages)


def check_records(records: Sequence[Mapping[str, Any]]) -> None:
    """Raises: InputError: a row has neither text nor prompt nor messages, or an empty one."""
    for number, record in enumerate(records, 1):
        text = record.get("text")
        if _asked(record) is None and not (isinstance(text, str) and text):
            raise InputError(
                f"row {number} has {', '.join(map(repr, record)) or 'no keys'}; give "
                'one with words: {"text": "..."}, {"prompt": "..."} or {"messages": [...]}'
            )


def _asked(record: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The turns that the model answers: a prompt, or messages up to the first answer."""
    prompt = record.get("prompt")
    if isinstance(prompt, str) and prompt:
        return [{"role": "user", "content": prompt}]
    turns = as_messages(record) if "messages" in record else None
    return list(takewhile(lambda turn: turn["role"] != "assistant", turns or ())) or None


def refer(
    model: nn.Module, passages: Sequence[Passage], advance: Advance | None = None
) -> Reference:
    """Run the reference over all passages."""
    ids, log_ps, losses = [], [], []
    for passage, log_p in _log_probabilities(model, passages, advance):
        k = min(TOP_K, log_p.shape[-1])
        top = mx.argpartition(-log_p, k - 1, axis=-1)[:, :k]
        values = mx.take_along_axis(log_p, top, axis=-1)
        order = mx.argsort(-values, axis=-1)
        ids.append(np.array(mx.take_along_axis(top, order, axis=-1)).astype(np.int32))
        log_ps.append(np.array(mx.take_along_axis(values, order, axis=-1)))
        losses.append(_loss(passage, log_p))
    return Reference(tuple(passages), *map(np.concatenate, (ids, log_ps, losses)))


def agree(model: nn.Module, reference: Reference, advance: Advance | None = None) -> Agreement:
    """Run a model over the reference's passages.

    Raises: InputError: the vocabulary is smaller than the ids of the reference.
    """
    kls, same, changes, at = [], [], [], 0
    largest = max(max(passage.tokens) for passage in reference.passages)
    for passage, log_p in _log_probabilities(model, reference.passages, advance):
        if (largest := max(largest, int(reference.ids.max()))) >= log_p.shape[-1]:
            raise InputError(
                f"the model has {log_p.shape[-1]:,} tokens and the reference at least "
                f"{largest + 1:,}; compare models of one tokenizer"
            )
        part = slice(at, at + passage.positions)
        ids = mx.array(reference.ids[part])
        own = np.array(mx.take_along_axis(log_p, ids, axis=-1))
        is_whole = ids.shape[-1] == log_p.shape[-1]
        kls.append(divergence(reference.log_p[part], own, is_whole))
        same.append(np.array(mx.argmax(log_p, axis=-1)) == reference.ids[part, 0])
        changes.append(_loss(passage, log_p) - reference.loss[part])
        at += passage.positions
    shapes = [(p.positions, KINDS.index(p.kind)) for p in reference.passages]
    kl, same_token, loss_change = map(np.concatenate, (kls, same, changes))
    return Agreement(kl, same_token, loss_change, np.array(shapes, np.int32))


def divergence(reference: np.ndarray, other: np.ndarray, is_whole: bool) -> np.ndarray:
    """KL(reference || other) in nats, (N,) float32, of log probabilities (N, K).

    is_whole: K tokens are all there are; else those that are missing count as one token more.
    Laws: never negative; 0 for equal distributions; merging tokens never raises it.
    """
    p, q = reference.astype(np.float64), other.astype(np.float64)
    kl = (np.exp(p) * (p - q)).sum(axis=-1)
    if not is_whole:
        # What float32 leaves of a rest that is next to nothing is rounding, and as good as any.
        rests = [np.maximum(1 - np.exp(values).sum(axis=-1), 1e-7) for values in (p, q)]
        kl += rests[0] * np.log(rests[0] / rests[1])
    result: np.ndarray = np.maximum(kl, 0).astype(np.float32)
    return result


def _log_probabilities(
    model: nn.Module, passages: Sequence[Passage], advance: Advance | None
) -> Iterator[tuple[Passage, mx.array]]:
    """Of each passage log p (positions, V) float32. Raises: NonFiniteModelError."""
    with evaluating(model), base_model.gated_delta_installed():
        for number, passage in enumerate(passages, 1):
            logits = model(mx.array([passage.tokens[:-1]]))[0, passage.start - 1 :]
            log_p = _log_softmax(logits.astype(mx.float32))
            if mx.isnan(log_p).any().item():
                raise NonFiniteModelError(f"the log probability of a token of passage {number}")
            yield passage, log_p
            if advance:
                advance(number, len(passages))


def _log_softmax(logits: mx.array) -> mx.array:
    """(N, V). Sums a few hundred terms at a time: added to one total of float32, what the unlikely
    tokens of a large vocabulary have together would be lost.
    """
    missing = -logits.shape[-1] % _SUMMED_TOGETHER
    logits = logits - logits.max(axis=-1, keepdims=True)
    padded = mx.pad(mx.exp(logits), ((0, 0), (0, missing)))
    parts = padded.reshape(len(logits), -1, _SUMMED_TOGETHER).sum(axis=-1)
    return logits - mx.log(parts.sum(axis=-1, keepdims=True))


def _loss(passage: Passage, log_p: mx.array) -> np.ndarray:
    targets = mx.array(passage.tokens[passage.start :])
    return np.array(-mx.take_along_axis(log_p, targets[:, None], axis=-1)[:, 0])
