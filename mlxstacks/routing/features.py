"""What the router sees of a prompt: hidden states of the base model, all stacks off.

    feature = mid_weight * H[(L + 1) // 2] + last_weight * H[L]

H[0] are the embeddings, H[i] the residuals behind decoder layer i, and H[L] what the output head is
given, after the final norm (spec/router.md, section 2). One forward pass without logits; the
middle residuals are noted on the way.
"""

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxstacks import base_model
from mlxstacks.data.special_text import encode_text
from mlxstacks.errors import InputError
from mlxstacks.files.disk import require_space, target_errors
from mlxstacks.layers.output_head import find_output_head
from mlxstacks.layers.stacked import StackedLayer, stacked_layers
from mlxstacks.training.modes import evaluating

MID_WEIGHT, LAST_WEIGHT = 0.45, 0.55
_EPS = 1e-6


class PromptFeatures:
    """Features of prompts: raw text, no chat template, no special tokens, cut at the right.

    normalise: divide both hidden states by their root mean square, token by token, before they are
    weighted; the middle one is a residual stream of any scale.
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

    def tokens(self, text: str) -> list[int]:
        """At most `max_tokens` ids. Raises: InputError for an empty prompt."""
        found: list[int] = []
        if text.strip():
            found = encode_text(text, self._tokenizer, limit=self.max_tokens)
        if not found:
            raise InputError("the prompt is empty; there is nothing to route by")
        return found

    def of(self, texts: Sequence[str], batch_size: int = 16) -> list[np.ndarray]:
        """Features (S, D) float32 of each text. Raises: InputError for an empty one."""
        return self.of_tokens([self.tokens(text) for text in texts], batch_size)

    def of_tokens(self, prompts: Sequence[Sequence[int]], batch_size: int = 16) -> list[np.ndarray]:
        """The same of token ids. Prompts of like length share a batch."""
        found: list[np.ndarray] = [np.empty(0, np.float32)] * len(prompts)
        order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
        for start in range(0, len(order), batch_size):
            chosen = order[start : start + batch_size]
            made, _ = self.batch([prompts[i] for i in chosen])
            rows = np.array(made)
            for row, i in zip(rows, chosen, strict=True):
                found[i] = row[: len(prompts[i])].copy()
        return found

    def batch(self, prompts: Sequence[Sequence[int]]) -> tuple[mx.array, mx.array]:
        """Token ids -> features (B, S, D) float32, right-padded and evaluated; mask (B, S) bool.

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
            self._middle() as noted,
        ):
            last = self._head.hidden_states(self._model, mx.array(ids))
            # A model of one layer: its middle is its end.
            features = self._mixed(noted[0] if noted else last, last)
            noted.clear()  # the class that noted them lives until Python looks for circles
            mx.eval(features)
        return features, mx.array(mask)

    @staticmethod
    def pooled(features: np.ndarray) -> np.ndarray:
        """(S, D) -> (D,) float32: the mean over tokens."""
        return features.mean(axis=0, dtype=np.float32)

    def _mixed(self, mid: mx.array, last: mx.array) -> mx.array:
        mid, last = mid.astype(mx.float32), last.astype(mx.float32)
        if self.normalise:
            mid, last = mx.fast.rms_norm(mid, None, _EPS), mx.fast.rms_norm(last, None, _EPS)
        return self.mid_weight * mid + self.last_weight * last

    @contextmanager
    def _middle(self) -> Iterator[list[mx.array]]:
        """The decoder layer behind which the middle is notes what it makes."""
        noted: list[mx.array] = []
        count = len(self._model.layers)
        middle = (count + 1) // 2
        if middle == count:
            yield noted
            return
        layer = self._model.layers[middle - 1]
        own = type(layer)

        def noting(module: nn.Module, *args: Any, **options: Any) -> Any:
            made = own.__call__(module, *args, **options)
            noted.append(made[0] if isinstance(made, tuple) else made)
            return made

        layer.__class__ = type(own.__name__, (own,), {"__call__": noting})
        try:
            yield noted
        finally:
            layer.__class__ = own


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
    """No stack answers inside the block, whatever is loaded, packed and selected: none of that is
    touched, so a running stream goes on afterwards as it was.
    """
    layers = [layer for _, layer in stacked_layers(model)]
    own = [type(layer) for layer in layers]
    for layer in layers:
        layer.__class__ = _BaseAlone
    try:
        yield
    finally:
        for layer, kind in zip(layers, own, strict=True):
            layer.__class__ = kind


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

    directory: where the file goes, with more than memory_bytes of features.
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
        tokens = {_key(text): features.tokens(text) for text in prompts}
        # Prompts of like length share a batch, and lie in the order in which they are made.
        order = sorted(tokens, key=lambda key: (len(tokens[key]), key))
        starts = np.cumsum([0, *(len(tokens[key]) for key in order)])
        self._at = {key: slice(int(starts[i]), int(starts[i + 1])) for i, key in enumerate(order)}
        texts = {_key(text): text for text in prompts}
        self._rows = np.empty((0, 0), np.float32)
        self._file: IO[bytes] | None = None
        try:
            for start in range(0, len(order), _BATCH):
                chosen = order[start : start + _BATCH]
                made = features.of_tokens([tokens[key] for key in chosen], _BATCH)
                for key, rows in zip(chosen, made, strict=True):
                    _check(texts[key], rows)
                if start == 0:
                    self._open(int(starts[-1]), made[0].shape[1], directory, memory_bytes)
                self._put(self._at[chosen[0]].start, np.concatenate(made))
                if progress:
                    progress(start + len(chosen), len(order))
            self._map(int(starts[-1]))
        finally:
            if self._file is not None:
                self._file.close()

    @property
    def input_dims(self) -> int:
        """D, the width of the base."""
        return int(self._rows.shape[1])

    def of(self, prompt: str) -> np.ndarray:
        """(S, D) float32. Raises: KeyError for a prompt that it was not made for."""
        return self._rows[self._at[_key(prompt)]]

    def padded(self, prompts: Sequence[str], multiple: int = 16) -> tuple[np.ndarray, np.ndarray]:
        """(B, S, D) float32 and mask (B, S) bool, S rounded up: fewer sizes, buffers used again."""
        found = [self.of(prompt) for prompt in prompts]
        width = -(-max(map(len, found)) // multiple) * multiple
        x = np.zeros((len(found), width, self.input_dims), np.float32)
        mask = np.zeros(x.shape[:2], bool)
        for i, rows in enumerate(found):
            x[i, : len(rows)], mask[i, : len(rows)] = rows, True
        return x, mask

    def _open(self, tokens: int, dims: int, directory: Path | None, memory_bytes: int) -> None:
        nbytes = 4 * tokens * dims
        if nbytes <= memory_bytes:
            self._rows = np.empty((tokens, dims), np.float32)
            return
        place = Path(tempfile.gettempdir()) if directory is None else directory
        with target_errors(place, nbytes):
            place.mkdir(parents=True, exist_ok=True)
            require_space(place, nbytes)
            self._file = tempfile.TemporaryFile(dir=place)  # noqa: SIM115  closed in __init__
        self._rows = np.empty((0, dims), np.float32)
        self._place, self._nbytes = place, nbytes

    def _map(self, tokens: int) -> None:
        """Read from the file from here on; the mapping outlives its descriptor."""
        if self._file is not None:
            with target_errors(self._place, self._nbytes):
                self._file.flush()
            self._rows = np.memmap(self._file, np.float32, "r", shape=(tokens, self.input_dims))

    def _put(self, start: int, rows: np.ndarray) -> None:
        if self._file is None:
            self._rows[start : start + len(rows)] = rows
            return
        # Written, not mapped: a disk that is full is an error here and a crash there.
        with target_errors(self._place, self._nbytes):
            self._file.write(np.ascontiguousarray(rows).data)


def _key(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _check(text: str, rows: np.ndarray) -> None:
    if not np.isfinite(rows).all():
        raise InputError(
            f"the base gives NaN or Inf for the prompt {text[:80]!a}; a router cannot learn from it"
        )
