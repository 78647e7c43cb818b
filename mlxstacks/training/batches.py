"""Which rows go together: few widths, one row a place, the longest batch first.

Rows are not packed end to end. In a hybrid model that would carry the recurrent state, and the
convolution before it, from one row into the next; mlx-lm's models take no mark of where a row
begins. Instead rows of like length share a batch, padded on the right to one of at most `WIDTHS`
widths, which are chosen so that the padding is least. Padding stands behind every token that counts
and has no loss weight, so no row sees another.
"""

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

WIDTHS = 8
# Widths are one more than multiples of this, as mlx-lm's: a row of n tokens has n - 1 inputs.
MULTIPLE = 32
# Beyond so many candidates the multiple is doubled; the search grows with their square.
_CANDIDATES = 128


def choose_widths(
    lengths: Sequence[int], longest: int, most: int = WIDTHS, multiple: int = MULTIPLE
) -> tuple[int, ...]:
    """At most `most` widths in tokens, rising, that pad rows of these lengths least.

    lengths: tokens of each row, at most `longest`, the widest that may be chosen.
    Law: every row fits the last width, and no other choice of so many widths, each one more than a
    multiple or `longest`, has less padding.
    """
    while True:
        rounded = Counter(min(longest, 1 + multiple * -(-(n - 1) // multiple)) for n in lengths)
        if len(rounded) <= _CANDIDATES:
            break
        multiple *= 2
    candidates = sorted(rounded)
    # Rows that fit the first 0, 1, ... candidates.
    counts = [0, *itertools.accumulate(rounded[width] for width in candidates)]
    # How many candidates are served -> tokens with padding, and the widths that serve them.
    best: dict[int, tuple[int, tuple[int, ...]]] = {0: (0, ())}
    for _ in range(most):
        with_one_more = dict(best)
        for served, (tokens, chosen) in best.items():
            for until, width in enumerate(candidates[served:], served + 1):
                option = (tokens + (counts[until] - counts[served]) * width, (*chosen, width))
                with_one_more[until] = min(with_one_more.get(until, option), option)
        best = with_one_more
    return best[len(candidates)][1]


@dataclass(frozen=True)
class BatchPlan:
    """Rows of each batch, as a function of the batch's number alone.

    lengths: tokens of each row. widths: of which each row gets the first that it fits.
    Laws: an epoch has every row once; a batch has `batch_size` rows, but for one an epoch with the
    rest; what does not fill a batch of its width goes with wider ones; batch 0 is as long as any.
    """

    lengths: tuple[int, ...]
    widths: tuple[int, ...]
    batch_size: int
    seed: int

    @property
    def batches_per_epoch(self) -> int:
        return -(-len(self.lengths) // self.batch_size)

    def batch(self, number: int) -> tuple[list[int], int]:
        """(row numbers, width) of batch 0, 1, ..."""
        epoch, place = divmod(number, self.batches_per_epoch)
        return _epoch(self, epoch)[place]

    def padding_share(self) -> float:
        """Share of the tokens of an epoch that are padding."""
        batches = _epoch(self, 0)
        return 1 - sum(self.lengths) / sum(len(rows) * width for rows, width in batches)


@lru_cache(maxsize=4)
def _epoch(plan: BatchPlan, epoch: int) -> list[tuple[list[int], int]]:
    chance = random.Random(f"{plan.seed}/{epoch}")
    order = list(range(len(plan.lengths)))
    chance.shuffle(order)
    buckets: dict[int, list[int]] = {width: [] for width in plan.widths}
    for row in order:
        buckets[next(width for width in plan.widths if plan.lengths[row] <= width)].append(row)
    batches: list[tuple[list[int], int]] = []
    rest: list[int] = []
    for width, rows in buckets.items():
        rows = rest + rows
        full = len(rows) - len(rows) % plan.batch_size
        batches += [
            (rows[start : start + plan.batch_size], width)
            for start in range(0, full, plan.batch_size)
        ]
        rest = rows[full:]
    if rest:
        batches.append((rest, plan.widths[-1]))
    chance.shuffle(batches)
    if epoch == 0:
        # What does not fit the memory is met at once, not after hours.
        largest = max(range(len(batches)), key=lambda i: len(batches[i][0]) * batches[i][1])
        batches.insert(0, batches.pop(largest))
    return batches
