"""The router network: count, parity with PyTorch, masks, clamp, independence of domains; files.

tests/fixtures/router_parity.py made the expected numbers. Run: pytest tests/routing/test_router.py
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks import base_model
from mlxstacks.errors import InputError, StoreError
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.router_file import (
    GapPart,
    GapRule,
    RouterFile,
    RouterHeader,
    gap_shapes,
    router_shapes,
    write_router,
)
from mlxstacks.files.store import Store
from mlxstacks.routing.features import PromptFeatures
from mlxstacks.routing.gap_detector import detector_of
from mlxstacks.routing.router import (
    ROUTER_FILE,
    MetaRouter,
    PromptRouter,
    SimilarityNetwork,
    decide,
    first_queries,
    load_prompt_router,
    network_of,
    parameter_count,
    pinned,
    router_tensors,
)
from mlxstacks.routing.router_training import router_loss
from tests.layers.build import assert_close
from tests.tiny_models import write_llama

FOLDER = Path(__file__).parents[1] / "fixtures" / "router"
DESCRIBED = json.loads((FOLDER / "settings.json").read_text())
CASES: dict[str, Any] = DESCRIBED["cases"]


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    with np.load(FOLDER / "expected.npz") as arrays:
        return dict(arrays)


def filled(expected: dict[str, np.ndarray], name: str) -> MetaRouter:
    case = CASES[name]
    network = MetaRouter(case["input_dims"], case["domains"], case["hidden_dims"])
    prefix = f"{name}.parameter."
    weights = {k.removeprefix(prefix): v for k, v in expected.items() if k.startswith(prefix)}
    network.load_weights([(key, mx.array(value)) for key, value in weights.items()])
    return network


def given_to(expected: dict[str, np.ndarray], name: str) -> tuple[mx.array, mx.array]:
    return mx.array(expected[f"{name}.x"]), mx.array(expected[f"{name}.mask"])


# --- the network ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("dims", "domains", "count"), [(3840, 5, 2_761_730), (2048, 4, 1_843_714)])
def test_published_parameter_counts(dims: int, domains: int, count: int) -> None:
    assert parameter_count(dims, domains) == count


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 20))
def test_count_is_that_of_the_network_and_of_its_file(D: int, n: int, h: int) -> None:
    tensors = router_tensors(MetaRouter(D, n, h))
    assert sum(array.size for array in tensors.values()) == parameter_count(D, n, h)
    assert {name: array.shape for name, array in tensors.items()} == router_shapes(D, n, h)
    assert {array.dtype for array in tensors.values()} == {mx.float32}


@pytest.mark.parametrize("name", CASES)
def test_logits_and_loss_are_those_of_pytorch(name: str, expected: dict[str, np.ndarray]) -> None:
    logits = filled(expected, name)(*given_to(expected, name))
    assert_close(logits, expected[f"{name}.logits"], 2e-5)
    loss = router_loss(logits, mx.array(expected[f"{name}.targets"]))
    assert_close(loss.reshape(1), expected[f"{name}.loss"], 2e-5)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_those_of_pytorch(name: str, expected: dict[str, np.ndarray]) -> None:
    network = filled(expected, name)
    x, mask = given_to(expected, name)
    targets = mx.array(expected[f"{name}.targets"])

    def loss(weights: Any) -> mx.array:
        network.update(weights)
        return router_loss(network(x, mask), targets, margin_weight=DESCRIBED["margin_weight"])

    weights = network.parameters()
    gradients = mx.grad(loss)(weights)
    network.update(gradients)
    for key, got in router_tensors(network).items():
        wanted = expected[f"{name}.gradient.{key}"]
        # What cancels to rounding (all of one softmax, a clamped t) is measured against 1e-3.
        error = np.abs(np.array(got) - wanted).max()
        assert error <= 1e-4 * max(np.abs(wanted).max(), 1e-3), key


def test_clamp_takes_the_gradient_of_the_temperature(expected: dict[str, np.ndarray]) -> None:
    for name, case in CASES.items():
        inside = np.log(0.3) < case["temperature"] < np.log(3.0)
        assert (expected[f"{name}.gradient.temperature"][0] != 0) == inside


@pytest.mark.parametrize(("t", "divisor"), [(-5.0, 0.3), (0.0, 1.0), (0.5, np.exp(0.5)), (9, 3.0)])
def test_temperature_is_clamped(t: float, divisor: float) -> None:
    network = MetaRouter(6, 2, 4)
    x, mask = mx.random.normal((1, 3, 6), key=mx.random.key(1)), mx.ones((1, 3), dtype=mx.bool_)
    plain = np.array(network(x, mask))
    network.temperature = mx.array([t])
    np.testing.assert_allclose(np.array(network(x, mask)), plain / divisor, rtol=1e-5)


def test_what_stands_in_padding_changes_no_bit_and_its_width_nothing_but_rounding() -> None:
    network = MetaRouter(12, 3, 16, key=mx.random.key(3))
    x = mx.random.normal((2, 9, 12), key=mx.random.key(4))
    mask = mx.array([[True] * 9, [True] * 4 + [False] * 5])
    logits = network(x, mask)
    dirty = mx.where(mask[..., None], x, 1e4)
    assert mx.array_equal(network(dirty, mask), logits)
    assert_close(network(x[1:, :4], mask[1:, :4]), logits[1:], 1e-5)
    wide = mx.pad(x, [(0, 0), (0, 30), (0, 0)])
    assert_close(network(wide, mx.pad(mask, [(0, 0), (0, 30)])), logits, 1e-5)
    # The mask is not for nothing: without it the other prompt's logits move.
    assert not np.allclose(network(dirty, mx.ones_like(mask))[1], logits[1], atol=1e-3)


@pytest.mark.parametrize(("B", "S"), [(1, 100), (3, 7), (16, 33)])
def test_a_domain_has_the_same_bits_whatever_domains_stand_beside_it(B: int, S: int) -> None:
    network = MetaRouter(20, 4, 32, key=mx.random.key(5))
    x = mx.random.normal((B, S, 20), key=mx.random.key(6))
    mask = mx.random.bernoulli(0.7, (B, S), key=mx.random.key(7)) | (mx.arange(S) == 0)
    four, queries = network(x, mask), network.domain_queries
    for count in (1, 3, 5, 11):
        more = first_queries(max(0, count - 4), 32, mx.random.key(8))
        network.domain_queries = mx.concatenate([queries[:count], more])
        found = network(x, mask)
        same = min(count, 4)
        assert found.shape == (B, count)
        assert mx.array_equal(found[:, :same], four[:, :same])


def test_similarity_is_the_cosine_of_means_without_their_centre() -> None:
    """Of NumPy; and what stands in padding is not seen."""
    random = np.random.default_rng(0)
    centroids, x = random.normal(size=(3, 8)) + 4, random.normal(size=(2, 5, 8)) + 4
    mask = np.arange(5) < np.array([[5], [3]])
    network = SimilarityNetwork(mx.array(centroids, mx.float32))
    logits = network(mx.array(np.where(mask[..., None], x, np.nan), mx.float32), mx.array(mask))
    centre = centroids.mean(axis=0)
    for row, length in enumerate((5, 3)):
        a, b = x[row, :length].mean(axis=0) - centre, centroids - centre
        cosines = b @ a / np.linalg.norm(a) / np.linalg.norm(b, axis=1)
        scores = np.array(mx.sigmoid(logits[row]))
        np.testing.assert_allclose(scores, np.clip(cosines, 1e-6, 1 - 1e-6), atol=1e-5)


def test_dropout_acts_by_its_key_alone() -> None:
    network = MetaRouter(8, 2, 16, dropout=0.5)
    x, mask = mx.random.normal((2, 5, 8), key=mx.random.key(0)), mx.ones((2, 5), dtype=mx.bool_)
    one, two = (network(x, mask, mx.random.key(k)) for k in (1, 2))
    assert mx.array_equal(one, network(x, mask, mx.random.key(1)))
    assert not mx.array_equal(one, two)
    network.train()
    assert mx.array_equal(network(x, mask), network(x, mask))
    many = mx.stack([network(x, mask, mx.random.key(k)) for k in range(300)])
    assert float(mx.max(mx.abs(mx.mean(many, axis=0) - network(x, mask)))) < 0.1


def test_first_weights_depend_on_the_key() -> None:
    same = [router_tensors(MetaRouter(8, 2, 16, key=mx.random.key(k))) for k in (1, 1, 2)]
    assert all(mx.array_equal(same[0][name], same[1][name]) for name in same[0])
    assert not mx.array_equal(same[0]["token.weight"], same[2]["token.weight"])
    std = float(mx.std(first_queries(100, 512, mx.random.key(0))))
    assert std == pytest.approx(0.02, rel=0.02)


# --- with a store ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, str]:
    path = write_llama(tmp_path_factory.mktemp("base") / "m", bits=4, hidden_size=64)
    model, tokenizer, _ = base_model.load(path)
    return model, tokenizer, fingerprint(open_checkpoint(path))


def header_for(base: str, **changes: Any) -> RouterHeader:
    values: dict[str, Any] = {
        "domains": ("code", "math"), "stacks": {"code": (), "math": ()}, "base_model": "m",
        "base_fingerprint": base, "input_dims": 64, "hidden_dims": 16, "max_tokens": 20,
    }  # fmt: skip
    return RouterHeader(**{**values, **changes})


def tensors_for(header: RouterHeader) -> dict[str, mx.array]:
    key = mx.random.key(9)
    return router_tensors(
        MetaRouter(header.input_dims, len(header.domains), header.hidden_dims, key=key)
    )


def test_a_router_whose_sums_overflow_is_an_error(served: Any) -> None:
    model, tokenizer, base = served
    header = header_for(base)
    huge = {name: mx.full(a.shape, 3e38) for name, a in tensors_for(header).items()}
    features = PromptFeatures(model, tokenizer, max_tokens=20)
    router = PromptRouter(network_of(RouterFile(header, huge)), header, features)
    with pytest.raises(StoreError, match="scores are not numbers: its weights are finite, but"):
        router.score("some words")


def test_router_of_a_store_scores_prompts(served: Any, tmp_path: Path) -> None:
    model, tokenizer, base = served
    store = Store.create(tmp_path / "store", "m", base)
    with pytest.raises(InputError, match="mlxstacks route train"):
        load_prompt_router(store, model, tokenizer)
    header = header_for(base)
    with store.change() as change:
        change.set_router(tensors_for(header), header)
    router = load_prompt_router(store, model, tokenizer)
    (reading,) = router.read(["what is 2 + 2?"])
    scores, feature = reading.scores, reading.feature
    assert list(scores) == ["code", "math"]
    assert all(0 < score < 1 for score in scores.values())
    (rows,) = router.features.of(["what is 2 + 2?"])
    np.testing.assert_allclose(feature, rows.mean(axis=0), rtol=1e-4, atol=1e-6)
    assert any("not in the store" in note for note in router.notes)
    assert reading.is_gap is None
    assert router.decide(reading, routable=["math"]).weights == {"math": scores["math"]}
    many = router.scores(["a", "what is 2 + 2?", "x" * 50])
    assert many[1] == pytest.approx(scores, abs=1e-3)
    with pytest.raises(InputError, match="empty"):
        router.score(" ")


def test_router_beside_the_store(served: Any, tmp_path: Path) -> None:
    model, tokenizer, base = served
    store = Store.create(tmp_path / "store", "m", base)
    header = header_for(base)
    (tmp_path / "out").mkdir()
    write_router(tmp_path / "out" / ROUTER_FILE, tensors_for(header), header)
    by_directory = load_prompt_router(store, model, tokenizer, tmp_path / "out")
    by_file = load_prompt_router(store, model, tokenizer, tmp_path / "out" / ROUTER_FILE)
    assert by_directory.score("prompt") == by_file.score("prompt")
    with pytest.raises(InputError, match="no router there"):
        load_prompt_router(store, model, tokenizer, tmp_path / "nowhere")


def test_router_of_another_base_is_refused(served: Any, tmp_path: Path) -> None:
    model, tokenizer, base = served
    store = Store.create(tmp_path / "store", "m", base)
    other = header_for("0" * 64)
    write_router(tmp_path / "r.safetensors", tensors_for(other), other)
    with pytest.raises(StoreError, match="fingerprint"):
        load_prompt_router(store, model, tokenizer, tmp_path / "r.safetensors")
    narrow = header_for(base, input_dims=32)
    file = RouterFile(narrow, tensors_for(narrow))
    router = PromptRouter(network_of(file), narrow, PromptFeatures(model, tokenizer))
    with pytest.raises(StoreError, match="32 dims"):
        router.score("prompt")


def test_a_gap_detector_of_a_deeper_base_is_refused(served: Any, tmp_path: Path) -> None:
    model, tokenizer, base = served
    store = Store.create(tmp_path / "store", "m", base)
    part = GapPart("nearest prompt", 99, references=2, directions=1, mean=0.0, deviation=1.0)
    header = replace(header_for(base), gaps=GapRule((part,), 0.0))
    shapes = gap_shapes(0, part, header.input_dims)
    gaps = {name: mx.zeros(shape) for name, shape in shapes.items()}
    write_router(tmp_path / "r.safetensors", {**tensors_for(header), **gaps}, header)
    with pytest.raises(StoreError, match="reads layer 99, this base has"):
        load_prompt_router(store, model, tokenizer, tmp_path / "r.safetensors")


def test_a_gap_detector_is_asked_about_the_tokens_of_each_prompt(served: Any) -> None:
    model, tokenizer, base = served
    features = PromptFeatures(model, tokenizer, max_tokens=20)
    ids = np.unique(features.tokens("what is 2 + 2?"))
    part = GapPart("tokens", 0, references=1, directions=len(ids), mean=0.0, deviation=1.0)
    header = header_for(base, gaps=GapRule((part,), 1.0))
    shares = np.append(np.zeros(len(ids)), -9.0)[None]
    gaps = {"gap.0.directions": mx.array(ids, mx.float32), "gap.0.references": mx.array(shares)}
    file = RouterFile(header, {**tensors_for(header), **gaps})
    router = PromptRouter(network_of(file), header, features, detector=detector_of(file))
    asked = router.read(["what is 2 + 2?", "ZZZ", "2 + 2 is what"])
    assert [reading.is_gap for reading in asked] == [False, True, False]


def test_a_router_is_read_back_bit_for_bit() -> None:
    header = header_for("1" * 64)
    tensors = tensors_for(header)
    found = router_tensors(network_of(RouterFile(header, tensors)))
    assert found.keys() == tensors.keys()
    assert all(mx.array_equal(found[name], tensors[name]) for name in tensors)


# --- routes ---------------------------------------------------------------------------------------


SCORES = st.dictionaries(
    st.sampled_from(["chat", "code", "math", "medical"]), st.floats(0, 1), min_size=1
)


def test_published_example() -> None:
    route = decide({"chat": 0.59, "code": 0.01, "math": 1.0, "medical": 1.0}, chat_domain="chat")
    assert dict(route.weights) == {"chat": 0.59, "math": 1.0, "medical": 1.0}
    assert route.mode == "routed"
    assert not route.gap


def test_the_threshold_itself_is_not_above_the_threshold() -> None:
    assert decide({"math": 0.12}).weights == {}
    assert decide({"math": 0.1200001}).weights == {"math": 0.1200001}


def test_chat_never_falls_below_its_floor_and_only_chat_has_one() -> None:
    scores = {"math": 0.05, "chat": 0.05}
    assert dict(decide(scores, chat_domain="chat").weights) == {"chat": 0.2}
    assert decide(scores).weights == {}
    assert decide({"math": 0.05}, chat_domain="chat").weights == {}


def test_gap_is_judged_before_the_floor_and_strictly() -> None:
    assert decide({"chat": 0.1, "math": 0.11}, chat_domain="chat").gap
    assert not decide({"chat": 0.1, "math": 0.12}, chat_domain="chat").gap
    assert not decide({}).gap


def test_hard_weights_are_one_for_the_same_domains() -> None:
    scores = {"chat": 0.0, "code": 0.3, "math": 0.1}
    soft, hard = (decide(scores, chat_domain="chat", hard=hard) for hard in (False, True))
    assert list(soft.weights) == list(hard.weights) == ["chat", "code"]
    assert set(hard.weights.values()) == {1.0}


def test_only_routable_domains_get_a_weight_and_all_keep_their_score() -> None:
    route = decide({"code": 0.9, "math": 0.8}, routable=["math"])
    assert dict(route.weights) == {"math": 0.8}
    assert dict(route.scores) == {"code": 0.9, "math": 0.8}


@pytest.mark.parametrize("score", [-0.1, 1.1, float("nan")])
def test_what_is_no_score_is_refused(score: float) -> None:
    with pytest.raises(ValueError, match="must lie in"):
        decide({"code": score, "math": 0.5})


@given(SCORES)
def test_weights_are_scores_above_the_threshold_in_their_order(scores: dict[str, float]) -> None:
    route = decide(scores, chat_domain="chat")
    assert all(weight > 0.12 for weight in route.weights.values())
    assert list(route.weights) == [name for name in scores if name in route.weights]
    for name, score in scores.items():
        floored = max(score, 0.2) if name == "chat" else score
        assert route.weights.get(name, 0.0) == (floored if floored > 0.12 else 0.0)
    assert route.gap == (max(scores.values()) < 0.12)


def test_other_modes_ask_no_router() -> None:
    assert dict(pinned(["b", "a"]).weights) == {"b": 1.0, "a": 1.0}
    assert pinned([]).mode == "pinned"
