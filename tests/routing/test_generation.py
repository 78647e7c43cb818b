"""Generation on a cache that is kept: whatever was before, the answer is that of a fresh cache.

Run: pytest tests/routing/test_generation.py
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx.utils import tree_flatten

from mlxstacks import base_model
from mlxstacks.data import Rendering
from mlxstacks.errors import InputError, NonFiniteModelError
from mlxstacks.routing import generation
from mlxstacks.routing.generation import (
    Prompt,
    PromptCache,
    Sampling,
    encode_prompt,
    generate,
    likeliest,
)
from tests.routing.engine_cases import TEMPLATE, user
from tests.tiny_models import write_llama, write_qwen_moe

GREEDY = Sampling(max_tokens=6)


@pytest.fixture(scope="module", params=["hybrid", "llama"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(model, tokenizer) with recurrent layers, or with attention alone."""
    write = {"hybrid": write_qwen_moe, "llama": write_llama}[request.param]
    path = write(
        tmp_path_factory.mktemp("m") / "model", bits=None, dtype="float32", hidden_size=64, shards=1
    )
    (path / "chat_template.jinja").write_text(TEMPLATE)
    model, tokenizer, _ = base_model.load(path)
    model.eval()
    return model, tokenizer


def new_cache(model: Any) -> PromptCache:
    return PromptCache(lambda: base_model.make_prompt_cache(model))


def answer(
    loaded: Any, tokens: list[int], cache: PromptCache | None = None, **options: Any
) -> list[str]:
    """Pieces of a greedy answer; the prompt's mark is four tokens before its end."""
    model, tokenizer = loaded
    prompt = Prompt(tuple(tokens), max(0, len(tokens) - 4))
    sampling = options.pop("sampling", GREEDY)
    pieces = generate(model, tokenizer, prompt, cache or new_cache(model), sampling, **options)
    return [piece.text for piece in pieces]


def ids(text: str) -> list[int]:
    return list(text.encode())


def test_greedy_is_what_mlx_lm_says(loaded: Any) -> None:
    model, tokenizer = loaded
    expected = base_model.generate(model, tokenizer, user("red blue"), max_tokens=6)
    prompt = encode_prompt(tokenizer, user("red blue"))
    pieces = generate(model, tokenizer, prompt, new_cache(model), GREEDY)
    assert "".join(piece.text for piece in pieces) == expected


def test_nan_logits_are_no_answer(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = loaded
    norm = getattr(model, "language_model", model).model.norm
    monkeypatch.setitem(norm, "weight", norm.weight * mx.nan)
    with pytest.raises(NonFiniteModelError, match="log probability of token 1 is not finite"):
        answer(loaded, ids("red"))
    with pytest.raises(NonFiniteModelError, match="log probability of token 1 is not finite"):
        base_model.generate(model, tokenizer, user("red"), max_tokens=2)


def test_conversation_goes_on_from_the_cache(loaded: Any) -> None:
    cache = new_cache(loaded[0])
    answer(loaded, ids("a long first question"), cache)
    longer = [*cache.tokens, *ids(" and a second one")]
    held = len(cache.tokens)
    told: list[int] = []
    again = answer(loaded, longer, cache, progress=lambda done, total: told.append(done))
    assert told[0] == held  # nothing was computed twice
    assert again == answer(loaded, longer)


def test_other_answer_goes_back_to_the_mark(loaded: Any) -> None:
    first = ids("a long first question")
    cache = new_cache(loaded[0])
    answer(loaded, first, cache)
    other = [*first[:-4], *ids("what the template leaves of it, and a second one")]
    told: list[int] = []
    again = answer(loaded, other, cache, progress=lambda done, total: told.append(done))
    assert told[0] == len(first) - 4
    assert again == answer(loaded, other)


@pytest.mark.parametrize("what", ["key", "beginning"])
def test_nothing_is_kept_of_another_route_or_beginning(loaded: Any, what: str) -> None:
    first = ids("a long first question")
    cache = new_cache(loaded[0])
    answer(loaded, first, cache, key="one")
    prompt = [*cache.tokens, *ids("?")] if what == "key" else ids("b long first question")
    told: list[int] = []
    key = "two" if what == "key" else "one"
    again = answer(loaded, prompt, cache, key=key, progress=lambda done, _: told.append(done))
    assert told[0] == 0
    assert again == answer(loaded, prompt)


def failing(after: int, kind: type[BaseException]) -> Callable[[], None]:
    """A function that raises at its call number `after`."""
    calls = iter(range(after))

    def call() -> None:
        if next(calls, None) is None:
            raise kind

    return call


@pytest.mark.parametrize("kind", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("after", [0, 1, 2, 3, 5])
def test_broken_off_step_leaves_no_trace(
    loaded: Any, after: int, kind: type[BaseException]
) -> None:
    """Also where layers were called and none was evaluated: the failing one is inside the model."""
    model, _ = loaded
    cache = new_cache(model)
    answer(loaded, ids("a first question"), cache)
    second = [*cache.tokens, *ids(" and a second one")]
    last = model.layers[-1]
    own, fail = type(last), failing(after, kind)

    def broken(module: Any, *args: Any, **options: Any) -> Any:
        made = own.__call__(module, *args, **options)
        fail()
        return made

    last.__class__ = type(own.__name__, (own,), {"__call__": broken})
    try:
        with pytest.raises(kind):
            answer(loaded, second, cache)
    finally:
        last.__class__ = own
    assert len(cache.tokens) < len(second)
    assert cache.tokens == second[: len(cache.tokens)]
    assert answer(loaded, second, cache) == answer(loaded, second)


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_stopped_answer_can_be_gone_on_from(loaded: Any, steps: int) -> None:
    cache = new_cache(loaded[0])
    calls = iter(range(steps))
    said = answer(loaded, ids("a first question"), cache, stop=lambda: next(calls, None) is None)
    assert len(said) < 6
    after = [*cache.tokens, *ids(" go on")]
    assert answer(loaded, after, cache) == answer(loaded, after)


def test_closed_stream_can_be_gone_on_from(loaded: Any) -> None:
    model, tokenizer = loaded
    cache = new_cache(model)
    pieces = generate(model, tokenizer, Prompt(tuple(ids("a question")), 3), cache, GREEDY)
    next(pieces)
    pieces.close()
    after = [*cache.tokens, *ids(" go on")]
    assert answer(loaded, after, cache) == answer(loaded, after)


def test_chunked_prefill_makes_the_states_of_the_loop(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _ = loaded
    states = []
    for chunked_from in (1, 10**9):
        monkeypatch.setattr(generation, "CHUNKED_FROM", chunked_from)
        entries = base_model.make_prompt_cache(model)
        generation._prefill(model, ids("forty tokens and some more of them " * 2), entries)
        states.append([v for _, v in tree_flatten([e.state for e in entries])])
    for one, other in zip(*states, strict=True):
        if isinstance(one, mx.array):
            np.testing.assert_allclose(np.array(one), np.array(other), rtol=1e-4, atol=1e-4)
        else:
            assert one == other


def test_prefill_in_pieces_is_prefill_at_once(loaded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = ids("a question that is longer than a piece of it")
    whole = answer(loaded, prompt)
    monkeypatch.setattr(generation, "PREFILL_TOKENS", 7)
    assert answer(loaded, prompt) == whole


# --- sampling -------------------------------------------------------------------------------------


@given(st.lists(st.floats(-8, 0), min_size=1, max_size=12), st.floats(0.01, 1.0))
def test_likeliest_keeps_the_smallest_set_that_is_enough(logits: list[float], top_p: float) -> None:
    values = np.array(logits) - np.log(np.sum(np.exp(logits)))
    found = np.array(likeliest(mx.array(values, mx.float32)[None], top_p))[0]
    kept = np.isfinite(found)
    p = np.exp(values)
    assert p[kept].sum() >= top_p - 1e-5
    assert (found[kept] == values.astype(np.float32)[kept]).all()
    # without its least likely member (and ties with it) the set is not enough
    above = p[kept][p[kept] > p[kept].min() * (1 + 1e-6)]
    assert above.sum() < top_p + 1e-5
    assert not kept.all() or kept.size == 1 or (p >= p[kept].min() * (1 - 1e-6)).all()


def test_draws_come_from_the_seed_alone(loaded: Any) -> None:
    drawn = [Sampling(temp=1.5, top_p=0.9, max_tokens=12, seed=seed) for seed in (1, 1, 2)]
    said = []
    for sampling in drawn:
        mx.random.uniform(shape=(3,))
        said.append(answer(loaded, ids("a question"), sampling=sampling))
    assert said[0] == said[1] != said[2]


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16])
@pytest.mark.parametrize("temp", [1e-45, 1e-40, 1e-6])
def test_next_to_no_temperature_draws_the_likeliest(dtype: mx.Dtype, temp: float) -> None:
    log_p = mx.array([[-9.0, -3.0, -0.1, -5.0]], dtype)
    draw = generation.sampler_of(Sampling(temp=temp, top_p=0.9))
    assert [draw(log_p).item() for _ in range(8)] == [2] * 8


@pytest.mark.parametrize(
    ("limits", "drawn"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_k": 1}, {2}),
        ({"top_k": 2}, {1, 2}),
        ({"top_k": 9}, {0, 1, 2, 3}),
        ({"min_p": 1.0}, {2}),
        ({"min_p": 0.3}, {1, 2}),
        ({"min_p": 0.01, "top_k": 3}, {1, 2, 3}),
        ({"min_p": 0.3, "top_p": 0.4}, {2}),
    ],
)
def test_draws_are_among_the_likeliest(limits: dict[str, Any], drawn: set[int]) -> None:
    log_p = mx.log(mx.array([[0.05, 0.25, 0.55, 0.15]]))
    draw = generation.sampler_of(Sampling(temp=3.0, **limits))
    assert {draw(log_p).item() for _ in range(80)} == drawn


def test_repetition_penalty_sees_the_prompt(loaded: Any) -> None:
    prompt = ids("qrst")
    plain = generation._processors(Sampling(repetition_penalty=5.0), prompt[:-1])[0]
    logits = mx.ones((1, 320))
    out = np.array(plain(mx.array(prompt[-1:]), logits))[0]
    assert set(np.flatnonzero(out < 1)) == set(prompt)


# --- prompts --------------------------------------------------------------------------------------


def test_stable_part_is_what_any_later_prompt_begins_with(loaded: Any) -> None:
    _, tokenizer = loaded
    messages = user("one")
    first = encode_prompt(tokenizer, messages, Rendering("on"))
    later = [*messages, {"role": "assistant", "content": "two"}, *user("three")]
    second = encode_prompt(tokenizer, later, Rendering("on"))
    assert first.stable < len(first.tokens) - 1
    assert first.tokens[: first.stable] == second.tokens[: first.stable]
    assert first.tokens != second.tokens[: len(first.tokens)]
    assert encode_prompt(tokenizer, messages, Rendering("off")).tokens != first.tokens


def test_refused_and_empty_prompts_are_input_errors(loaded: Any, tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m", bits=None, dtype="float32", hidden_size=64)
    (path / "chat_template.jinja").write_text("{{ raise_exception('no system here') }}")
    _, tokenizer, _ = base_model.load(path, lazy=True)
    with pytest.raises(InputError, match="no system here"):
        encode_prompt(tokenizer, user("x"))
    with pytest.raises(InputError, match="chat template has no place for them"):
        encode_prompt(loaded[1], user("x"), tools=[{"function": {"name": "add"}}])
    (path / "chat_template.jinja").write_text("{{ '' }}")
    _, tokenizer, _ = base_model.load(path, lazy=True)
    with pytest.raises(InputError, match="no tokens"):
        encode_prompt(tokenizer, user("x"))


def test_long_prompt_is_no_matter_of_the_tokenizers_log(
    loaded: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = loaded[1]
    monkeypatch.setattr(tokenizer._tokenizer, "model_max_length", 8)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("transformers").addHandler(handler)
    try:
        encode_prompt(tokenizer, user("longer than eight tokens"))
        assert not said
        tokenizer.encode("longer than eight tokens")
        assert "longer than the specified maximum" in said[0]
    finally:
        logging.getLogger("transformers").removeHandler(handler)


@pytest.mark.parametrize("place", [0, 1])
def test_half_a_character_is_no_text(loaded: Any, place: int) -> None:
    messages = [{"role": "system", "content": "brief"}, *user("a question")]
    messages[place]["content"] = "ab\udcffc"
    with pytest.raises(InputError, match=r"character 3 is '\\udcff'"):
        encode_prompt(loaded[1], messages)


def test_model_without_template_reads_the_text_itself(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m", bits=None, dtype="float32", hidden_size=64)
    (path / "chat_template.jinja").unlink()
    _, tokenizer, _ = base_model.load(path, lazy=True)
    assert encode_prompt(tokenizer, user("plain")).tokens == tuple(b"plain")
