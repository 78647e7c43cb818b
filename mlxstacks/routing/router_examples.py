"""Examples as the router's training takes them: targets in rows, and a split that leaks nothing.

Prompts that read alike are one group, and a group is either trained on or held out.
"""

import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mlxstacks.errors import InputError
from mlxstacks.routing.outcome_files import Kind, RouterExample, Targets, targets_or_label

GROUP_CHARACTERS = 100


@dataclass(frozen=True, eq=False)
class RouterRows:
    """Examples side by side; i counts examples, d domains.

    targets: (N, n) float32 in 0 to 1. discovered: (N,) bool, whether the target is more than the
    label.
    """

    prompts: list[str]
    kinds: list[Kind]
    row_ids: list[str]
    targets: np.ndarray
    discovered: np.ndarray

    def __len__(self) -> int:
        return len(self.prompts)

    def of_kind(self, kind: Kind) -> np.ndarray:
        """(N,) bool."""
        return np.array([one == kind for one in self.kinds], dtype=bool)

    def chosen(self, places: Sequence[int]) -> "RouterRows":
        """The examples at these places, in that order."""
        at = list(places)
        return RouterRows(
            [self.prompts[i] for i in at], [self.kinds[i] for i in at],
            [self.row_ids[i] for i in at], self.targets[at], self.discovered[at],
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
    strangers = {name for one in examples for name in one.label} - {*domains}
    if strangers:
        raise InputError(
            f"examples are of {', '.join(sorted(strangers))}, which the store does not serve "
            f"(it serves {', '.join(domains)}); run `mlxstacks route discover` again"
        )
    kept = [one for one in examples if one.row_id in discovered or not oracle_only]
    if not kept:
        why = "none has a discovered outcome, and oracle_only leaves out the rest"
        raise InputError(f"no examples to train the router on: {why if examples else 'none came'}")
    rows = [targets_or_label(one, discovered, domains) for one in kept]
    return RouterRows(
        [one.prompt for one in kept],
        [one.kind for one in kept],
        [one.row_id for one in kept],
        np.array([[row[d] for d in domains] for row in rows], dtype=np.float32),
        np.array([one.row_id in discovered for one in kept], dtype=bool),
    )


def group_key(prompt: str) -> str:
    """What prompts of one group share: the first 100 characters of their words, in lower case.

    Marks, blanks and letters that only look different do not count.
    """
    text = unicodedata.normalize("NFKC", prompt).casefold()
    words = " ".join(re.findall(r"\w+", text))
    return (words or text.strip())[:GROUP_CHARACTERS]


def split_places(
    prompts: Sequence[str], seed: int, share: float = 0.1, least: int = 200
) -> tuple[list[int], list[int]]:
    """(training, validation): places of prompts, rising, by groups that are shuffled with `seed`.

    Validation gets `share` of the groups, but at least `least`, unless these are more than half of
    all: then the share alone decides. The order of the prompts does not matter.
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
    order = np.random.default_rng(seed).permutation(len(groups))
    held_out = {groups[i] for i in order[:wanted]}
    training = [i for i, key in enumerate(keys) if key not in held_out]
    validation = [i for i, key in enumerate(keys) if key in held_out]
    assert not {keys[i] for i in training} & {keys[i] for i in validation}
    return training, validation
