"""Cross-entropy through an output head in pieces of tokens, so that one piece's logits exist.

Over a vocabulary of 248,320 the float32 logits of 2,048 tokens take 2 GB, their gradient as much
again. What comes after the logits is known beforehand, a weighted sum over tokens. So the gradient
of the hidden states is made together with the loss, piece by piece, and only scaled on the way
back: no logits are kept, and none are computed twice. Each piece waits for the one before it
(`mx.depends`); MLX would otherwise be free to begin them all.
"""

from collections.abc import Callable, Iterator, Sequence

import mlx.core as mx
import mlx.nn as nn

# 67 MB in float32: 64 tokens of a vocabulary of 248,320.
PIECE_LOGITS = 1 << 24

Head = Callable[[mx.array], mx.array]
"""Hidden states (N, D) -> logits (N, V), each token by itself."""


def piece_tokens(vocabulary_size: int) -> int:
    """Tokens of a piece: a power of two with about `PIECE_LOGITS` logits."""
    return 1 << max(0, (PIECE_LOGITS // vocabulary_size).bit_length() - 1)


def pieces(tokens: int, most: int) -> Iterator[slice]:
    """Slices of at most `most` tokens; only the last one is shorter."""
    for start in range(0, tokens, most):
        yield slice(start, min(start + most, tokens))


def weighted_cross_entropy_sum(logits: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
    """Sum of weight * -log p(target): logits (..., V), targets (...) int, weights (...)."""
    return mx.sum(nn.losses.cross_entropy(logits.astype(mx.float32), targets) * weights)


def cross_entropy_sum(
    head: Head, hidden: mx.array, targets: mx.array, weights: mx.array, most: int
) -> mx.array:
    """`weighted_cross_entropy_sum(head(hidden), targets, weights)` by pieces of `most` tokens.

    hidden (N, D), targets (N,) int, weights (N,) float32; a float32 scalar.
    Law: equal to the whole form but for rounding, gradient by `hidden` included; there targets,
    weights and the weights of the head are constants.
    """

    def piece(logits: mx.array, targets: mx.array, weights: mx.array) -> mx.array:
        return weighted_cross_entropy_sum(logits, targets, weights)[None]

    return sum_by_pieces(head, piece, hidden, (targets, weights), most)[0]


PieceSums = Callable[..., mx.array]
"""(logits (N, V), *arrays (N, ...)) -> (k,) float32, sums over the N tokens; the first is the loss,
the others are reported with it.
"""


def sum_by_pieces(
    head: Head, sums: PieceSums, hidden: mx.array, arrays: Sequence[mx.array], most: int
) -> mx.array:
    """`sums(head(hidden), *arrays)` by pieces of `most` tokens; (k,) float32.

    hidden (N, D), each of `arrays` (N, ...).
    Law: equal to the whole form but for rounding. Only the first sum has a gradient, by `hidden`;
    the others, `arrays` and the weights of the head are constants.
    """

    @mx.custom_function
    def scored(hidden: mx.array, *arrays: mx.array) -> tuple[mx.array, mx.array]:
        total, gradients = mx.array(0.0), list[mx.array]()
        for part in pieces(len(hidden), most):
            given = hidden[part]
            if gradients:
                given, total = mx.depends([given, total], [gradients[-1]])
            value, gradient = _scored_piece(head, sums, given, [a[part] for a in arrays])
            total = total + value
            gradients.append(gradient)
        return total, mx.concatenate(gradients)

    @scored.vjp
    def backward(
        primals: tuple[mx.array, ...],
        cotangents: tuple[mx.array, ...],
        outputs: tuple[mx.array, ...],
    ) -> tuple[mx.array, ...]:
        hidden, *others = primals
        gradient = (outputs[1] * cotangents[0][0]).astype(hidden.dtype)
        return gradient, *map(mx.zeros_like, others)

    return scored(hidden, *arrays)[0]


def _scored_piece(
    head: Head, sums: PieceSums, hidden: mx.array, arrays: Sequence[mx.array]
) -> tuple[mx.array, mx.array]:
    """The sums, and the gradient of the first by `hidden`, by the operations of the whole form."""

    def loss(hidden: mx.array) -> tuple[mx.array, mx.array]:
        found = sums(head(hidden), *arrays)
        return found[0], found

    (_, found), gradient = mx.value_and_grad(loss)(hidden)
    return found, gradient
