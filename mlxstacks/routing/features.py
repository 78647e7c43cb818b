"""What the router sees of a prompt: hidden states of the base model, all stacks off.

    feature = mid_weight * H[(L + 1) // 2] + last_weight * H[L]

H[0] are the embeddings, H[i] the residuals behind decoder layer i, and H[L] what the output head is
given, after the final norm (Brainstacks). One forward pass without logits; the
middle residuals are noted on the way.
"""

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxstacks import base_model
from mlxstacks.data.special_text import encode_text
from mlxstacks.errors import InputError
from mlxstacks.files.disk import require_space, target_errors
from mlxstacks.layers.blocks import BlockedDecoder
from mlxstacks.layers.output_head import find_output_head
from mlxstacks.layers.sharded import as_kind
from mlxstacks.layers.stacked import StackedLayer, stacked_layers
from mlxstacks.layers.working_as import working_as
from mlxstacks.training.modes import evaluating

MID_WEIGHT, LAST_WEIGHT = 0.45, 0.55
_EPS = 1e-6


class PromptFeatures:
    """Features of prompts: raw text, no chat template, no special tokens, cut at the right.

    normalise: divide both hidden states by their root mean square, token by token, before they are
    weighted; the middle one is a residual stream of any scale.
    pooled_layers: decoder layers, from 1, behind which each prompt's mean is taken too: of the
    residuals divided by their root mean square, token by token (routing/gap_detector.py).
    Build it when the model is as it will run: widening replaces modules.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: Any,
        *,
        max_tokens: int = 256,
        mid_weight: float = MID_WEIGHT,
        last_weight: float = LAST_WEIGHT,
        normalise: bool = False,
        pooled_layers: Sequence[int] = (),
    ) -> None:
        with _frozen(model):  # a head that trains is no head of a loss in pieces, and one here
            head, reason = find_output_head(model, prove=False)
        if head is None:
            raise InputError(
                "the router needs the hidden states behind the model's last layer, which are not "
                f"found. {reason}"
            )
        self._model, self._tokenizer, self._head = model, tokenizer, head
        self.max_tokens = max_tokens
        self.mid_weight, self.last_weight, self.normalise = mid_weight, last_weight, normalise
        self.pooled_layers = tuple(pooled_layers)

    @property
    def num_layers(self) -> int:
        """Decoder layers of the base."""
        return len(self._model.layers)

    def tokens(self, text: str) -> list[int]:
        """At most `max_tokens` ids. Raises: InputError for an empty prompt."""
        tokens = encode_text(text, self._tokenizer, limit=self.max_tokens) if text.strip() else []
        if not tokens:
            raise InputError("the prompt is empty; there is nothing to route by")
        return tokens

    def of(self, texts: Sequence[str], batch_size: int = 16) -> list[np.ndarray]:
        """Features (S, D) float32 of each text. Raises: InputError for an empty one."""
        prompts = [self.tokens(text) for text in texts]
        return [rows for rows, _ in self.of_tokens(prompts, batch_size)]

    def of_tokens(
        self, prompts: Sequence[Sequence[int]], batch_size: int = 16
    ) -> list[tuple[np.ndarray, np.ndarray]]:
        """Of token ids: features (S, D) float32 and the means (layers, D) float32 of each prompt.
        Prompts of like length share a batch.
        """
        found: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            features, _, means = self.batch([prompts[i] for i in chosen])
            for i, row, mean in zip(chosen, np.array(features), np.array(means), strict=True):
                found[i] = row[: len(prompts[i])].copy(), mean
        return [found[i] for i in range(len(prompts))]

    def batch(self, prompts: Sequence[Sequence[int]]) -> tuple[mx.array, mx.array, mx.array]:
        """Token ids -> features (B, S, D) float32, right-padded; mask (B, S) bool; means
        (B, layers, D) float32 of `pooled_layers`. All are evaluated.

        Every layer is causal, so what stands behind a prompt changes nothing in it.
        """
        width = max(map(len, prompts))
        ids = np.zeros((len(prompts), width), np.int32)
        mask = np.zeros(ids.shape, bool)
        for row, tokens in enumerate(prompts):
            ids[row, : len(tokens)] = tokens
            mask[row, : len(tokens)] = True
        with (
            evaluating(self._model),
            base_model.gated_delta_installed(),
            without_stacks(self._model),
            self._noted() as noted,
        ):
            last = self._head.hidden_states(self._model, mx.array(ids))
            middle = self._middle
            # The last layer's residuals are what the head is given, after the final norm.
            mid = (noted[middle] if middle < self.num_layers else last).astype(mx.float32)
            last = last.astype(mx.float32)
            means = [
                masked_mean(
                    mx.fast.rms_norm(noted[n].astype(mx.float32), None, _EPS), mx.array(mask)
                )
                for n in self.pooled_layers
            ]
            pooled = mx.stack(means, 1) if means else mx.zeros((len(prompts), 0, last.shape[-1]))
            if self.normalise:
                mid, last = mx.fast.rms_norm(mid, None, _EPS), mx.fast.rms_norm(last, None, _EPS)
            features = self.mid_weight * mid + self.last_weight * last
            noted.clear()  # the class that noted them lives until Python looks for circles
            mx.eval(features, pooled)
        return features, mx.array(mask), pooled

    @staticmethod
    def pooled(features: np.ndarray) -> np.ndarray:
        """(S, D) -> (D,) float32: the mean over tokens."""
        return features.mean(axis=0, dtype=np.float32)

    @property
    def _middle(self) -> int:
        return (self.num_layers + 1) // 2

    @contextmanager
    def _noted(self) -> Iterator[dict[int, mx.array]]:
        """Decoder layer, from 1 -> the residuals behind it, of those that are needed."""
        noted: dict[int, mx.array] = {}

        def note_of(number: int) -> Callable[[mx.array, Any], None]:
            def note(_: mx.array, output: Any) -> None:
                noted[number] = output[0] if isinstance(output, tuple) else output

            return note

        with ExitStack() as watching:
            for number in {*self.pooled_layers, self._middle}:
                layer = self._model.layers[number - 1]
                watching.enter_context(watched(layer, note_of(number)))
            yield noted


def masked_mean(x: mx.array, mask: mx.array) -> mx.array:
    """x (B, S, D), mask (B, S) bool -> (B, D): the mean over the tokens that count."""
    return mx.where(mask[..., None], x, 0).sum(axis=1) / mask.sum(axis=1, keepdims=True)


@contextmanager
def watched(module: nn.Module, note: Callable[[mx.array, Any], None]) -> Iterator[None]:
    """Each call of a module is told to `note`: its first argument and what it returns."""
    kind = type(module)

    def noting(module: nn.Module, *args: Any, **options: Any) -> Any:
        output = kind.__call__(module, *args, **options)
        note(args[0], output)
        return output

    with working_as([(module, type(kind.__name__, (kind,), {"__call__": noting}))]):
        yield


class _BaseAlone(StackedLayer):
    """A projection that answers without its stacks."""

    def __call__(
        self, x: mx.array, indices: mx.array | None = None, sorted_indices: bool = False
    ) -> mx.array:
        if self._dims.base_experts is None:
            return self.linear(x)
        return self.linear(x, indices, sorted_indices=sorted_indices)


@contextmanager
def without_stacks(model: nn.Module) -> Iterator[None]:
    """No stack, nor capability block, answers here, whatever is loaded, packed and selected: none
    of that is touched, so a running stream goes on afterwards as it was.
    """
    blocked = [(m, m.selected) for m in model.modules() if isinstance(m, BlockedDecoder)]
    for decoder, _ in blocked:
        decoder.select({})
    try:
        with working_as((m, as_kind(m, _BaseAlone)) for _, m in stacked_layers(model)):
            yield
    finally:
        for decoder, selected in blocked:
            decoder.select(selected)


@contextmanager
def _frozen(model: nn.Module) -> Iterator[None]:
    """Nothing of the model counts as trained inside the block."""
    before = [(module, set(module._no_grad)) for module in model.modules()]
    model.freeze()
    try:
        yield
    finally:
        for module, names in before:
            module._no_grad = names


# --- features of many prompts ---------------------------------------------------------------------


MEMORY_BYTES = 1 << 30
_BATCH = 16

Progress = Callable[[int, int], None]


class FeatureTable:
    """`of(prompt)` is (S, D) float32 of each prompt it was made for.

    Each distinct prompt is kept once, by the hash of its text. Above memory_bytes the numbers go to
    a file in `directory` that has no name: a killed run leaves nothing behind.
    Raises: InputError for an empty prompt, or one whose features are not finite; TargetError where
        the disk is too small.
    """

    def __init__(
        self,
        features: PromptFeatures,
        prompts: Sequence[str],
        *,
        directory: Path | None = None,
        memory_bytes: int = MEMORY_BYTES,
        progress: Progress | None = None,
    ) -> None:
        self.features = features
        texts = {_key(text): text for text in prompts}
        tokens = {key: features.tokens(text) for key, text in texts.items()}
        # Prompts of like length share a batch, and lie in the order in which they are made.
        order = sorted(tokens, key=lambda key: (len(tokens[key]), key))
        starts = np.cumsum([0, *(len(tokens[key]) for key in order)])
        self._at = {key: slice(int(starts[i]), int(starts[i + 1])) for i, key in enumerate(order)}
        self._means: dict[str, np.ndarray] = {}

        def batches() -> Iterator[np.ndarray]:
            for start in range(0, len(order), _BATCH):
                chosen = order[start : start + _BATCH]
                batch = features.of_tokens([tokens[key] for key in chosen], _BATCH)
                for key, (rows, means) in zip(chosen, batch, strict=True):
                    self._means[key] = means
                    if not np.isfinite(rows).all():
                        raise InputError(
                            f"the base gives NaN or Inf for the prompt {texts[key][:80]!a}; a "
                            "router cannot learn from it"
                        )
                yield np.concatenate([rows for rows, _ in batch])
                if progress:
                    progress(start + len(chosen), len(order))

        blocks = batches()
        first = next(blocks)
        shape = (int(starts[-1]), first.shape[1])
        nbytes = 4 * shape[0] * shape[1]
        if nbytes <= memory_bytes:
            self._rows, at = np.empty(shape, np.float32), 0
            for rows in chain([first], blocks):
                self._rows[at : at + len(rows)] = rows
                at += len(rows)
            return
        directory = Path(tempfile.gettempdir()) if directory is None else directory
        with target_errors(directory, nbytes):
            directory.mkdir(parents=True, exist_ok=True)
            require_space(directory, nbytes)
            with tempfile.TemporaryFile(dir=directory) as file:
                # Written, not mapped: a disk that is full is an error here and a crash there.
                for rows in chain([first], blocks):
                    file.write(np.ascontiguousarray(rows).data)
                file.flush()
                # the mapping outlives its descriptor
                self._rows = np.memmap(file, np.float32, "r", shape=shape)

    @property
    def input_dims(self) -> int:
        """D, the width of the base."""
        return int(self._rows.shape[1])

    def of(self, prompt: str) -> np.ndarray:
        """(S, D) float32. Raises: KeyError for a prompt that it was not made for."""
        return self._rows[self._at[_key(prompt)]]

    def means(self, prompts: Sequence[str]) -> np.ndarray:
        """(N, layers, D) float32, the means of `PromptFeatures.pooled_layers`."""
        return np.stack([self._means[_key(prompt)] for prompt in prompts])

    def padded(self, prompts: Sequence[str], multiple: int = 16) -> tuple[np.ndarray, np.ndarray]:
        """(B, S, D) float32 and mask (B, S) bool, S rounded up: fewer sizes, buffers used again."""
        features = [self.of(prompt) for prompt in prompts]
        width = -(-max(map(len, features)) // multiple) * multiple
        x = np.zeros((len(features), width, self.input_dims), np.float32)
        mask = np.zeros(x.shape[:2], bool)
        for i, rows in enumerate(features):
            x[i, : len(rows)], mask[i, : len(rows)] = rows, True
        return x, mask


def _key(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
