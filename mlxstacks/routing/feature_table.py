"""Features of many prompts, made once for a training run: in memory, or in a file without a name.

Each distinct prompt is kept once, by the hash of its text. Above a size the numbers go to a file
that is removed from its directory as soon as it is open: a killed run leaves nothing behind.
"""

import hashlib
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from mlxstacks.errors import InputError
from mlxstacks.files.disk import require_space, target_errors
from mlxstacks.routing.features import PromptFeatures

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
