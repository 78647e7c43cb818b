"""log p of what follows the tokens of a row, in batches of rows: of equal weights first, of like
length, padded on the right, which changes nothing for what stands before.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from mlxstacks.evaluate import LogitsOf, log_probabilities_at
from mlxstacks.layers.output_head import OutputHead
from mlxstacks.routing.candidate_losses import Candidate, Weights, plan_batches

Prepare = Callable[[Sequence[Weights], tuple[int, int]], LogitsOf]
"""(weights of each row of a batch, its shape (B, T)) -> the model, ready for that batch."""


class Row(NamedTuple):
    """tokens: at least one. targets: predicted by the last so many of them, the last one by the
    last.
    """

    tokens: tuple[int, ...]
    targets: tuple[int, ...]
    weights: Weights = ()


def row_log_p(
    rows: Sequence[Row],
    prepare: Prepare,
    head: OutputHead | None,
    batch_size: int,
    batch_tokens: int,
    behind: int = 0,
) -> list[tuple[float, ...]]:
    """log p of each target of each row.

    head: of the model; logits are then made for the targets alone. batch_size: most rows at once;
    batch_tokens: most tokens, padding too, unless one row alone has more. behind: tokens before
    each row that are in a cache and count as the row's own.
    Rows of the same tokens and weights go in once: what a letter is after a context, one forward
    pass says of all letters.
    """
    same: dict[tuple[tuple[int, ...], Weights], list[int]] = {}
    for number, row in enumerate(rows):
        same.setdefault((row.tokens, row.weights), []).append(number)
    every = list(same)
    asked = [Candidate(number, weights) for number, (_, weights) in enumerate(every)]
    lengths = [behind + len(tokens) for tokens, _ in every]
    found: list[tuple[float, ...]] = [()] * len(rows)
    for batch in plan_batches(asked, lengths, batch_tokens) if rows else ():
        for start in range(0, len(batch), batch_size):
            part = [every[number] for number in batch[start : start + batch_size]]
            tokens = _padded([own for own, _ in part])
            lines = [(line, n) for line, key in enumerate(part) for n in same[key]]
            places = [
                line * tokens.shape[1] + place
                for line, n in lines
                for place in range(len(rows[n].tokens) - len(rows[n].targets), len(rows[n].tokens))
            ]
            targets = [token for _, n in lines for token in rows[n].targets]
            logits_of = prepare([weights for _, weights in part], tokens.shape)
            values = iter(
                log_probabilities_at(
                    logits_of, tokens, np.array(places), np.array(targets), head
                ).tolist()
            )
            for _, n in lines:
                found[n] = tuple(next(values) for _ in rows[n].targets)
    return found


def _padded(rows: Sequence[tuple[int, ...]]) -> np.ndarray:
    """(B, T) int32."""
    tokens = np.zeros((len(rows), max(map(len, rows))), np.int32)
    for line, row in enumerate(rows):
        tokens[line, : len(row)] = row
    return tokens
