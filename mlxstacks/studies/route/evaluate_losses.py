"""Losses of prompts' answers under any weights of a store's domains, by the evaluator of discovery.

A row is one prompt and its answer as tokens; its loss is the mean over the answer's tokens. All
modes of a row see the same tokens.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mlxstacks.data import DomainDataSettings, Row, SourceSettings, encode_examples
from mlxstacks.data.examples import make_example
from mlxstacks.data.settings import Template
from mlxstacks.data.text_settings import PLAIN, Rendering
from mlxstacks.errors import InputError
from mlxstacks.layers.output_head import find_output_head
from mlxstacks.routing.candidate_losses import (
    CandidateLosses,
    candidate,
    choose_batch_tokens,
)
from mlxstacks.routing.outcome_cache import LossCache
from mlxstacks.routing.outcomes import Found, Rules, search_all
from mlxstacks.routing.random_stack import add_random_stacks, random_hash, random_name
from mlxstacks.studies.route.data import stack_hashes
from mlxstacks.studies.route.evaluate_served import Served

Weights = Mapping[str, float]


def encode_pair(
    prompt: str,
    answer: str,
    tokenizer: Any,
    template: Template,
    max_tokens: int,
    rendering: Rendering = PLAIN,
) -> Row | None:
    """A prompt and its answer as tokens, loss on the answer alone; None where none of it is left
    within max_tokens. Raises: InputError: the template refuses it.
    """
    settings = DomainDataSettings(
        sources=(SourceSettings(path="prompt"),), template=template, thinking=rendering.thinking,
        allow_special=rendering.allow_special,
    )  # fmt: skip
    example = make_example({"prompt": prompt, "answer": answer}, "the prompt")
    try:
        return encode_examples([example], tokenizer, settings, max_tokens).rows[0]
    except InputError as error:
        if "none of 1 rows" in str(error):
            return None
        raise


def with_controls(
    served: Served, stacks: Mapping[str, list[str]], seed: int
) -> dict[str, list[str]]:
    """Put a random stack of equal norm into the model for each of these domains' stacks; returns
    `stacks` (domain -> hashes) with what stands for the hashes of the random ones.
    """
    by_name = {stack.name: stack.file.sha256 for stack in served.store.enabled_stacks()}
    add_random_stacks(served.model, by_name, stacks, seed)
    return {
        **stacks,
        **{random_name(d): [random_hash(h, seed) for h in of_d] for d, of_d in stacks.items()},
    }


class RowLosses:
    """Losses of rows on a model that serves a store.

    width: of the base's hidden states; bounds a batch. control_seed: also put random stacks of
    equal norm in, under the names `random_stack.random_name` gives.
    """

    def __init__(
        self, served: Served, rows: Sequence[Row], width: int, control_seed: int | None = None
    ) -> None:
        self.rows = rows
        stacks = stack_hashes(served.store, served.domains)
        if control_seed is not None:
            stacks = with_controls(served, stacks, control_seed)
        self._losses = CandidateLosses(
            served.model,
            rows,
            stacks,
            served.store.manifest.base_fingerprint,
            LossCache(),
            batch_tokens=choose_batch_tokens(width),
            dtype=served.dtype,
            head=find_output_head(served.model)[0],
        )

    def of(self, pairs: Sequence[tuple[int, Weights]]) -> list[float]:
        """[(number of the row, weights of the domains that are on)] -> mean nats a token."""
        return self._losses([candidate(number, weights) for number, weights in pairs])

    def search(self, rules: Rules, numbers: Sequence[int]) -> list[Found]:
        """The best sets of domains for these rows, as `route discover` finds them."""

        def losses_of(asked: Sequence[tuple[int, frozenset[str]]]) -> list[float]:
            return self.of([(numbers[place], rules.weights(on)) for place, on in asked])

        return search_all(rules, len(numbers), losses_of)
