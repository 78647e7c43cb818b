"""Prompts through a model, and how often each chose each expert.

Only the choices are evaluated: MLX computes nothing that they do not need, so neither the last
experts nor the output head run. `profile_routing` is the whole profile of a loaded model.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxstacks.base_model import gated_delta_installed
from mlxstacks.data import ChatTokenizer
from mlxstacks.data.encode import begin_mark
from mlxstacks.data.special_text import encode_text
from mlxstacks.errors import NonFiniteModelError
from mlxstacks.layers.switch_choices import (
    SwitchLayer,
    chosen_weights,
    find_switches,
    hearing,
)
from mlxstacks.studies.profile.analysis import Choices, Rule, analyse
from mlxstacks.studies.profile.data import Prompt, first_tokens
from mlxstacks.studies.profile.routing_profile import divergence, shares, usual_top_experts
from mlxstacks.studies.profile.settings import ProfileSettings
from mlxstacks.training.modes import evaluating

Tokens = Sequence[int]


def count_choices(
    model: nn.Module,
    switches: Sequence[SwitchLayer],
    prompts: Sequence[Tokens],
    *,
    batch_size: int,
    weights: bool = False,
    tick: Callable[[int], None] | None = None,
) -> np.ndarray:
    """Choices of every prompt, layer and expert, (n, L, E) float64; padding counts nothing.

    weights: sum the router's weights of the choices instead. tick: called with the prompts done.
    Law: independent of batch size and of padding, as far as the model's arithmetic is.
    Raises: ValueError: an empty prompt, or a mixture that does not see every token;
        NonFiniteModelError: NaN or Inf in what a mixture sees.
    """
    if not all(prompts):
        raise ValueError("every prompt needs a token")
    counts = np.zeros((len(prompts), len(switches), switches[0].num_experts))
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    heard: dict[int, tuple[mx.array, mx.array | None]] = {}
    is_finite: dict[int, mx.array] = {}

    def hear(place: int, x: mx.array, indices: mx.array) -> None:
        # Some blocks give (B, T, top_k), some (B * T, top_k): the order of tokens is the same.
        weight = chosen_weights(switches[place], x, indices) if weights else None
        heard[place] = indices, weight
        is_finite[place] = mx.isfinite(x).all()

    with gated_delta_installed(), evaluating(model), hearing(switches, hear):
        for start in range(0, len(order), batch_size):
            places = order[start : start + batch_size]
            tokens, real = _padded([prompts[place] for place in places])
            heard.clear()
            model(mx.array(tokens))
            mx.eval(heard, is_finite)
            for place, finite in is_finite.items():
                if not finite.item():
                    raise NonFiniteModelError(f"the input of {switches[place].path}")
            owner = np.repeat(np.arange(len(places)), tokens.shape[1])[real]
            for layer, (indices, weight) in heard.items():
                counts[places, layer] = _per_prompt(
                    indices, weight, real, owner, (len(places), counts.shape[2])
                )
            if tick:
                tick(start + len(places))
    heard.clear()
    return counts


def _padded(prompts: Sequence[Tokens]) -> tuple[np.ndarray, np.ndarray]:
    """tokens (B, T) int32, padded on the right, which a causal model's tokens never see; and which
    of them are real, (B * T,) bool.
    """
    lengths = np.array([len(prompt) for prompt in prompts])
    real = np.arange(lengths.max()) < lengths[:, None]  # (B, T)
    tokens = np.zeros(real.shape, dtype=np.int32)
    tokens[real] = np.concatenate([np.asarray(prompt) for prompt in prompts])
    return tokens, real.reshape(-1)


def _per_prompt(
    indices: mx.array,
    weight: mx.array | None,
    real: np.ndarray,
    owner: np.ndarray,
    shape: tuple[int, int],
) -> np.ndarray:
    """indices (..., top_k), real (B * T,) bool, owner (real tokens,) -> (B, E)."""
    if indices.size // indices.shape[-1] != len(real):
        raise ValueError(
            f"a mixture got {indices.size // indices.shape[-1]} tokens of {len(real)}; its choices "
            "cannot be told apart by prompt"
        )
    chosen = np.array(indices).reshape(len(real), -1)[real].astype(np.int64)  # (tokens, top_k)
    cells = (owner[:, None] * shape[1] + chosen).reshape(-1)
    amounts = None if weight is None else np.array(weight).reshape(len(real), -1)[real].reshape(-1)
    return np.bincount(cells, amounts, minlength=shape[0] * shape[1]).reshape(shape)


@dataclass(frozen=True, eq=False)
class RoutingProfile:
    """layers: numbers of the L; shares: p[s, l, e] (S, L, E); kl (S, L) nats; tables: as JSON, see
    `analysis.analyse`.
    """

    names: tuple[str, ...]
    layers: tuple[int, ...]
    shares: np.ndarray
    kl: np.ndarray
    tables: dict[str, Any]


def profile_routing(
    model: nn.Module,
    tokenizer: ChatTokenizer,
    groups: Mapping[str, Sequence[str]],
    rule: Rule | None = None,
    *,
    batch_size: int = 8,
) -> RoutingProfile:
    """The profile of a loaded model. groups: name -> texts, as they go in; each group counts as
    many tokens as the smallest one has. rule: by default as `mlxstacks profile`.

    Raises: ValueError: a dense model, one with experts in a single layer, fewer than two groups, or
        a group with fewer than two texts within these tokens.
    """
    switches = find_switches(model)
    if len(switches) < 2:
        raise ValueError(
            "one layer has experts, so no layer can be a group's own; need two of them or more"
        )
    mark = begin_mark(tokenizer)
    encoded = {
        name: [Prompt("", (*mark, *encode_text(text, tokenizer))) for text in texts]
        for name, texts in groups.items()
    }  # fmt: skip
    totals = {name: sum(len(one.tokens) for one in own) for name, own in encoded.items()}
    budget = min(totals.values(), default=0)
    kept = {name: first_tokens(own, budget) for name, own in encoded.items()}
    few = [name for name, own in kept.items() if len(own) < 2]
    if few or len(kept) < 2:
        raise ValueError(
            f"got {len(kept)} groups of {budget} tokens, {few or 'none'} of them with fewer than "
            "two texts; need two groups or more, each of two texts or more"
        )
    prompts = [one.tokens for own in kept.values() for one in own]
    choices = Choices(
        count_choices(model, switches, prompts, batch_size=batch_size),
        np.repeat(np.arange(len(kept)), [len(own) for own in kept.values()]),
        np.array([len(tokens) for tokens in prompts]),
        tuple(kept),
        tuple(switch.layer for switch in switches),
    )
    usual = ProfileSettings()
    rule = rule or Rule(
        min(usual.top_layers, len(switches) - 1), usual_top_experts(switches[0].num_experts),
        usual.permutations, usual.halves, usual.alpha, usual.seed,
    )  # fmt: skip
    p = shares(choices.counts)
    return RoutingProfile(choices.names, choices.layers, p, divergence(p), analyse(choices, rule))
