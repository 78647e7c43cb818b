"""A row: token ids with one loss weight per token; and rows packed end to end.

`weights[i]` is how much the loss counts the prediction **of** token i. The first token of a row is
never predicted, so its weight is always 0.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Row:
    """Token ids and the loss weight of each."""

    tokens: tuple[int, ...]
    weights: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.weights):
            raise ValueError(f"{len(self.tokens)} tokens but {len(self.weights)} loss weights")
        if self.weights and self.weights[0] != 0:
            raise ValueError(
                "the first token of a row is never predicted: its loss weight must be 0"
            )


def row_of(tokens: Sequence[int], weights: Sequence[float]) -> Row:
    """A row of these tokens; the first loses its weight."""
    # One object for each number: hundreds of thousands of rows are held at once, and with an int of
    # its own a token takes 48 bytes, so 22 (rows of 300 tokens, ids up to 150,000).
    ids = tuple(_IDS.setdefault(token, token) for token in tokens)
    return Row(ids, (0.0, *weights[1:]) if tokens else ())


_IDS: dict[int, int] = {}


def pack_rows(rows: Iterable[Row], length: int) -> list[Row]:
    """Rows laid end to end in rows of at most `length` tokens; a longer one is cut.

    Law: every token that is kept keeps its weight, except that the first of a packed row gets 0.
    """
    packed: list[Row] = []
    tokens: list[int] = []
    weights: list[float] = []
    for row in rows:
        if tokens and len(tokens) + len(row.tokens) > length:
            packed.append(row_of(tokens, weights))
            tokens, weights = [], []
        tokens += row.tokens[: length - len(tokens)]
        weights += row.weights[: length - len(weights)]
    if tokens:
        packed.append(row_of(tokens, weights))
    return packed
