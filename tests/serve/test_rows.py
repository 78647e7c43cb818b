"""Rows of one batch, each by its own route: what a row is answered is what it is answered alone.

Run: pytest tests/serve/test_rows.py
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bench_serve import write_adapters
from mlxstacks import base_model
from mlxstacks.fuse.in_memory import attach_adapters
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.routing.engine import open_base
from mlxstacks.routing.resident import PackedSet
from mlxstacks.serve.pool import Held
from mlxstacks.serve.rows import RowRoutes, batch_segments
from tests.serve.serve_cases import Job, Nano, Written, nano_settings, open_nano, shared_nano, write

# Log probabilities of other batches differ by rounding: float32 sums of some thousand products.
ROUNDING = 2e-3
DOMAINS = ("letters", "islands", "queries", "tolu")
TEXTS = (
    "Who is king of Corva?",
    "Who are you?",
    "Spell the word ball backwards, then say who rules Tolu and which flag it has.",
    " ".join(["The islands of Corva and Tolu trade in red flags."] * 12),
)

weights: st.SearchStrategy[dict[str, float]] = st.one_of(
    st.just({}),
    st.just({"adapter": 1.0}),
    st.dictionaries(
        st.sampled_from((*DOMAINS, "adapter")), st.sampled_from([0.25, 0.7, 1.0]), max_size=3
    ),
)
jobs = st.builds(
    Job, st.sampled_from(TEXTS), weights, st.integers(1, 9), st.integers(0, 6),
    st.one_of(st.just(1 << 30), st.integers(1, 9)),
)  # fmt: skip


@functools.cache
def alone(text: str, weights: tuple[tuple[str, float], ...]) -> Written:
    return write(shared_nano(), [Job(text, dict(weights), 9)])[0]


@given(st.lists(jobs, min_size=2, max_size=7))
def test_row_of_a_mixed_batch_is_answered_as_alone(batch: list[Job]) -> None:
    # Rows join while others write, and leave before they are done.
    for job, row in zip(batch, write(shared_nano(), batch), strict=True):
        single = alone(job.text, tuple(job.weights.items()))
        for step, (token, logprobs) in enumerate(zip(row.tokens, row.logprobs, strict=True)):
            assert mx.allclose(logprobs, single.logprobs[step], atol=ROUNDING, rtol=0), job
            if token != single.tokens[step]:  # rounding decided between the two likeliest
                first, second = (single.logprobs[step][t] for t in (single.tokens[step], token))
                assert (first - second).item() < ROUNDING, job
                break
        if job.leaves > 100 and row.tokens == single.tokens[: len(row.tokens)]:
            assert len(row.tokens) == min(job.max_tokens, len(single.tokens))


def test_routes_differ_by_far_more_than_rounding() -> None:
    # else the law above could not fail
    firsts = [alone(TEXTS[0], pair).logprobs[0] for pair in ((), (("islands", 1.0),))]
    firsts += [alone(TEXTS[0], (("adapter", 1.0),)).logprobs[0]]
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert mx.abs(firsts[a] - firsts[b]).max().item() > 100 * ROUNDING


def test_adapter_as_a_stack_is_the_adapter() -> None:
    settings = nano_settings()
    base = open_base(settings.model_copy(update={"store_path": None}), [])
    fuse = FuseSettings(model=settings.model, adapter_path=settings.adapter_path)
    attach_adapters(base.model, base.checkpoint, fuse, base.dtype)
    tokens = list(shared_nano().prompt(TEXTS[1]).tokens)
    logits = base.model(mx.array([tokens]))[0, -1]
    expected = logits - mx.logsumexp(logits)
    found = alone(TEXTS[1], (("adapter", 1.0),)).logprobs[0]
    assert mx.allclose(found, expected, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("routes", [[], [Held()], [Held(), Held(), Held()], [Held(), None]])
def test_row_without_a_route_raises(routes: list[Any]) -> None:
    nano = shared_nano()
    batched = [
        entry.merge([entry, entry]) for entry in base_model.make_prompt_cache(nano.base.model)
    ]
    with pytest.raises(RuntimeError, match="each needs its own"):
        nano.forward(mx.zeros((2, 1), mx.int32), [*batched, RowRoutes(routes)])
    with pytest.raises(RuntimeError, match="without routes"):
        nano.forward(mx.zeros((2, 1), mx.int32), batched)


def logits_of(nano: Nano, routes: Sequence[Held], tokens: int) -> mx.array:
    """Of rows with so many tokens, each row others."""
    entries = base_model.make_prompt_cache(nano.base.model)
    batched = [entry.merge([entry] * len(routes)) for entry in entries]
    prompts = mx.array([[5 + row] * tokens for row in range(len(routes))])
    return nano.forward(prompts, [*batched, RowRoutes(routes)])


@pytest.mark.parametrize("name", ["islands", "adapter"])
@pytest.mark.parametrize("tokens", [1, 40])
def test_broken_stack_of_a_row_leaves_the_others_alone(name: str, tokens: int) -> None:
    # 0 times Inf is NaN: a row without a stack must not be multiplied by it
    nano = shared_nano()
    held = [nano.pool.hold(weights) for weights in ({name: 1.0}, {"tolu": 0.7})]
    ((packed, weight),) = held[0].parts
    broken = {
        path: tuple(replace(part, a_all=part.a_all * mx.inf, b_all=part.b_all * mx.inf,
                            views=None) for part in parts)
        for path, parts in packed.segments.items()
    }  # fmt: skip
    routes = [Held(((PackedSet(packed.domains, broken), weight),)), Held(), held[1], held[0]]
    found, healthy = (logits_of(nano, r, tokens) for r in (routes, [Held(), *routes[1:]]))
    for one in held:
        nano.pool.release(one)
    assert mx.isnan(found[0]).all()
    assert mx.allclose(found[1:], healthy[1:], atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("tokens", [1, 40])
def test_adapters_that_are_alike_answer_each_its_own_row(tmp_path: Path, tokens: int) -> None:
    keys = ["mlp.shared_expert.down_proj", "linear_attn.out_proj", "mlp.switch_mlp.down_proj",
            "mlp.switch_mlp.up_proj"]  # fmt: skip
    nano = open_nano(store_path=None, adapter_path=[])
    paths = write_adapters(nano.base.checkpoint.directory, tmp_path, keys)
    for path in paths:
        nano.pool.add_adapter(str(path), nano.base.checkpoint, None, False)
    nano.pool.join_adapters()
    named = ("adapter0", 1.0), None, ("adapter3", 1.0), ("adapter1", 0.5), ("adapter0", 1.0)
    held = [nano.pool.hold(dict([each] if each else [])) for each in named]
    assert all(parts[0].chosen and not parts[1:] for parts in batch_segments(held).values())
    two = nano.pool.hold({"adapter1": 0.5, "adapter2": 1.0})
    for routes in (held, [*held, two]):
        mixed = logits_of(nano, routes, tokens)
        for row, route in enumerate(routes):
            alone = logits_of(nano, [route] * len(routes), tokens)[row]
            assert mx.allclose(mixed[row], alone, atol=ROUNDING, rtol=0), row
        others = logits_of(nano, [Held()] * len(routes), tokens)
        assert mx.abs(mixed - others).max(axis=(1, 2)).tolist()[2] > 10 * ROUNDING
    # of the arrays they share, Inf and NaN of one are no other's
    healthy = logits_of(nano, held, tokens)
    for down, _ in nano.pool.adapters["adapter3"].alike.pairs.values():  # type: ignore[union-attr]
        down[down.shape[0] // 4 * 3 :] = mx.inf
    broken = logits_of(nano, held, tokens)
    assert mx.isnan(broken[2]).all()
    for row in (0, 1, 3, 4):
        assert mx.allclose(broken[row], healthy[row], atol=ROUNDING, rtol=0), row


def test_weights_of_rows_share_the_stacks_arrays() -> None:
    nano = shared_nano()
    held = [nano.pool.hold({"islands": weight}) for weight in (0.5, 1.0)]
    (packed, _), *_ = held[0].parts
    for path, parts in batch_segments(held).items():
        for mixed, stored in zip(parts, packed.segments[path], strict=True):
            assert mixed.a_all is stored.a_all
            assert mixed.weights is not None
            assert mixed.weights.tolist() == [[0.5] * len(stored.ids), [1.0] * len(stored.ids)]
    for one in held:
        nano.pool.release(one)
