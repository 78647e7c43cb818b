"""Split, targets, extension of the router's training; the epoch that is kept.

Run: pytest tests/routing/test_router_training.py
"""

import math
import random
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.errors import InputError
from mlxstacks.files.router_file import RouterFile, read_router, write_router
from mlxstacks.routing.outcomes import Kind, RouterExample
from mlxstacks.routing.router import router_tensors
from mlxstacks.routing.router_training import (
    TrainedRouter,
    epoch_learning_rate,
    group_key,
    router_loss,
    rows_of,
    split_places,
    train_router,
)
from mlxstacks.routing.settings import RouterTrainSettings
from mlxstacks.training.loop import NonFiniteError

DIMS = 12
WORDS = {"code": "loop", "math": "sum", "chat": "hello", "law": "court"}


class WordTable:
    """Stands for a FeatureTable: a token a word, a random direction each. No model is needed."""

    max_tokens, mid_weight, last_weight, normalise = 256, 0.45, 0.55, False
    pooled_layers = (1,)

    def __init__(self) -> None:
        self.features, self.input_dims = self, DIMS

    def of(self, prompt: str) -> np.ndarray:
        rows = [np.random.default_rng(list(word.encode())).normal(size=DIMS)
                for word in prompt.split()]  # fmt: skip
        return np.array(rows, np.float32)

    def tokens(self, prompt: str) -> list[int]:
        return [zlib.crc32(word.encode()) % 1000 for word in prompt.split()]

    def means(self, prompts: list[str]) -> np.ndarray:
        return np.stack([self.of(prompt).mean(axis=0)[None] for prompt in prompts])

    def padded(self, prompts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        found = [self.of(prompt) for prompt in prompts]
        x = np.zeros((len(found), 8, DIMS), np.float32)
        mask = np.zeros((len(found), 8), bool)
        for i, rows in enumerate(found):
            x[i, : len(rows)], mask[i, : len(rows)] = rows, True
        return x, mask


def example(prompt: str, *label: str) -> RouterExample:
    kind = {0: "other", 1: "single"}.get(len(label), "mixed")
    return RouterExample(prompt, "yes", label, kind, f"id {prompt}")  # type: ignore[arg-type]


def examples_of(*domains: str, each: int = 24) -> list[RouterExample]:
    found = [example(f"{WORDS[d]} w{i} v{i % 5}", d) for d in domains for i in range(each)]
    pairs = [(a, b) for a in domains for b in domains if a < b]
    found += [
        example(f"{WORDS[a]} {WORDS[b]} u{i}", a, b) for a, b in pairs for i in range(each // 2)
    ]
    return found + [example(f"nothing t{i}") for i in range(each // 2)]


SETTINGS = RouterTrainSettings(hidden_dims=16, learning_rate=1e-2, batch_size=8, epochs=5)


def train(domains: list[str], settings: RouterTrainSettings = SETTINGS, **more: Any) -> Any:
    table: Any = WordTable()
    given_examples = more.pop("examples", None) or examples_of(*domains)
    return train_router(
        given_examples, more.pop("targets", {}), table, settings, domains=domains, **more
    )


@pytest.fixture(scope="module")
def two() -> TrainedRouter:
    found = train(["code", "math"])
    assert isinstance(found, TrainedRouter)
    return found


def file_of(trained: TrainedRouter) -> RouterFile:
    stacks = dict.fromkeys(trained.domains, ("a" * 64,))
    header = trained.header("base", "b" * 64, stacks)
    return RouterFile(header, trained.tensors())


# --- split ----------------------------------------------------------------------------------------


def test_prompts_that_read_alike_are_one_group() -> None:
    assert group_key("What is  2 + 2?") == group_key("what is 2+2 ?!") == "what is 2 2"
    assert group_key("a" * 100 + "b") == group_key("A" * 100 + "c")
    assert group_key("What is 2 + 3?") != group_key("What is 2 + 2?")
    assert group_key("+ ?") == "+ ?"


@given(
    st.lists(st.text("ab ?", min_size=1, max_size=6), min_size=2, max_size=60),
    st.integers(0, 2**32),
    st.integers(1, 30),
)
def test_no_group_is_on_both_sides(prompts: list[str], seed: int, least: int) -> None:
    keys = [group_key(prompt) for prompt in prompts]
    if len(set(keys)) < 2:
        with pytest.raises(InputError, match="groups"):
            split_places(prompts, seed, 0.1, least)
        return
    training, validation = split_places(prompts, seed, 0.1, least)
    assert sorted([*training, *validation]) == list(range(len(prompts)))
    assert training
    assert validation
    assert not {keys[i] for i in training} & {keys[i] for i in validation}


@pytest.mark.parametrize(
    ("groups", "held_out"), [(50, 5), (399, 40), (400, 200), (1000, 200), (3000, 300), (2, 1)]
)
def test_validation_has_200_groups_where_there_are_enough(groups: int, held_out: int) -> None:
    prompts = [f"prompt {i}" for i in range(groups)]
    training, validation = split_places(prompts, 42)
    assert (len(training), len(validation)) == (groups - held_out, held_out)


@given(st.integers(0, 2**32), st.integers(2, 6))
def test_a_kind_of_two_groups_has_one_to_validate_with(seed: int, others: int) -> None:
    prompts = [f"prompt {i}" for i in range(80)]
    kinds: list[Kind] = ["other" if i < others else "single" for i in range(79)]
    kinds.append("mixed")
    training, validation = split_places(prompts, seed, 0.05, kinds=kinds)
    assert {"other", "single"} <= {kinds[i] for i in validation}
    assert sorted([*training, *validation]) == list(range(80))


def test_split_depends_on_seed_and_not_on_order() -> None:
    prompts = [f"prompt {i}" for i in range(80)]
    mixed = prompts.copy()
    random.Random(1).shuffle(mixed)
    chosen = {prompts[i] for i in split_places(prompts, 1)[1]}
    assert chosen == {mixed[i] for i in split_places(mixed, 1)[1]}
    assert chosen != {prompts[i] for i in split_places(prompts, 2)[1]}


# --- targets --------------------------------------------------------------------------------------


def test_targets_are_discovered_ones_else_plain_labels() -> None:
    """Without the floor of chat: prompts of no domain have no score above the gap's threshold."""
    examples = [example("a", "code"), example("b", "chat", "math"), example("c"), example("d")]
    discovered = {"id a": {"chat": 0.36, "code": 0.2, "math": 0.8}}
    rows = rows_of(examples, discovered, ["chat", "code", "math"])
    np.testing.assert_allclose(
        rows.targets, np.array([[0.36, 0.2, 0.8], [1, 0, 1], [0, 0, 0], [0, 0, 0]]), rtol=1e-6
    )
    assert rows.discovered.tolist() == [True, False, False, False]
    assert not rows_of(examples[2:], {}, ["code"]).targets.any()


def test_oracle_only_leaves_out_plain_labels() -> None:
    examples = [example("a", "code"), example("b", "code")]
    rows = rows_of(examples, {"id b": {"code": 0.8}}, ["code"], oracle_only=True)
    assert rows.prompts == ["b"]
    with pytest.raises(InputError, match="oracle_only"):
        rows_of(examples, {}, ["code"], oracle_only=True)


def test_a_label_that_is_not_served_is_refused() -> None:
    with pytest.raises(InputError, match="law"):
        rows_of([example("a", "law")], {}, ["code"])


# --- training -------------------------------------------------------------------------------------


def test_the_router_learns_and_reports(two: TrainedRouter) -> None:
    assert two.metrics["single_top1"] >= 0.8  # half of it is chance
    assert two.history[-1]["train_loss"] < 0.9 * two.history[0]["train_loss"]
    best = max(two.history, key=lambda one: one["checkpoint_score"])
    assert two.history[two.best_epoch - 1] == best
    # The kept weights are those of the best epoch, not of the last.
    assert two.metrics["checkpoint_score"] == pytest.approx(best["checkpoint_score"], abs=1e-6)
    split = two.split
    assert split["training"] + split["validation"] == len(examples_of("code", "math"))
    assert len(split["validation_row_ids"]) == split["validation"]
    assert set(two.metrics["domains"]) == {"code", "math"}


def test_domains_keep_the_order_in_which_they_are_given() -> None:
    found = train(["math", "code"], SETTINGS.model_copy(update={"epochs": 1}))
    assert found.domains == tuple(found.metrics["domains"]) == ("math", "code")


def test_the_best_epoch_is_kept_and_not_the_last() -> None:
    wild = SETTINGS.model_copy(update={"learning_rate": 0.5, "epochs": 6, "clip_norm": 1e3})
    found = train(["code", "math"], wild)
    scores = [one["checkpoint_score"] for one in found.history]
    assert found.best_epoch == 1 + scores.index(max(scores))
    assert found.best_epoch < 6
    assert found.metrics["checkpoint_score"] == pytest.approx(max(scores), abs=1e-6)


def test_equal_arguments_give_equal_bits_and_another_seed_others() -> None:
    short = [SETTINGS.model_copy(update={"epochs": 2, "seed": seed}) for seed in (0, 0, 7)]
    first, again, other = (train(["code", "math"], settings) for settings in short)
    mine, same, new = (router_tensors(one.network) for one in (first, again, other))
    assert all(mx.array_equal(mine[name], same[name]) for name in mine)
    assert again.history == first.history
    assert not mx.array_equal(mine["token.weight"], new["token.weight"])


def test_discovered_outcomes_win_over_labels() -> None:
    examples = examples_of("code", "math")
    swap = {"code": {"code": 0.0, "math": 1.0}, "math": {"code": 1.0, "math": 0.0}}
    targets = {one.row_id: swap[one.label[0]] for one in examples if len(one.label) == 1}
    settings = SETTINGS.model_copy(update={"epochs": 10})
    found = train(["code", "math"], settings, examples=examples, targets=targets)
    confusion = found.metrics["confusion"]
    assert found.split["discovered"] == 48
    assert confusion["math"]["math"] + confusion["code"]["code"] > 0
    x, mask = WordTable().padded(["loop w1 v1"])
    logits = np.array(found.network(mx.array(x), mx.array(mask)))[0]
    assert logits[1] > logits[0]  # a code prompt goes to math


def test_numbers_that_are_not_finite_end_the_run() -> None:
    with pytest.raises(NonFiniteError, match="lower"):
        train(["code", "math"], SETTINGS.model_copy(update={"learning_rate": 1e38}))


def test_a_validation_that_is_not_finite_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step may make weights of which the training sees no loss any more."""

    def broken(self: Any, rows: Any) -> np.ndarray:
        return np.full((len(rows), 2), np.nan)

    monkeypatch.setattr("mlxstacks.routing.router_training.RouterEpochs.logits", broken)
    with pytest.raises(NonFiniteError, match="held-out"):
        train(["code", "math"], SETTINGS.model_copy(update={"epochs": 1}))


def test_too_few_examples_and_no_domains_are_refused() -> None:
    with pytest.raises(InputError, match="groups"):
        train(["code"], examples=[example("a", "code"), example("A!", "code")])
    with pytest.raises(InputError, match="no domain"):
        train([], examples=[example("a")])
    with pytest.raises(InputError, match="no example wants law or math: their router would never"):
        train(["law", "math"], examples=[example(f"w{i}") for i in range(24)])
    with pytest.raises(InputError, match="chat_domain law"):
        train(["code", "math"], SETTINGS.model_copy(update={"chat_domain": "law"}))


def test_a_domain_without_examples_is_noted() -> None:
    found = train(["code", "math"], examples=examples_of("code"))
    assert any("math" in note for note in found.notes)


# --- extension ------------------------------------------------------------------------------------


def extended(two: TrainedRouter, how: Any, domains: list[str] | None = None) -> Any:
    names = domains or ["law", "code", "math"]
    settings = SETTINGS.model_copy(update={"extend": how, "epochs": 3})
    return train(names, settings, start=file_of(two), examples=examples_of(*names))


def test_extend_new_keeps_every_old_parameter_and_logit_to_the_bit(two: TrainedRouter) -> None:
    found = extended(two, "new")
    assert found.domains == ("code", "math", "law")  # old ones first
    old, new = router_tensors(two.network), router_tensors(found.network)
    queries = new.pop("domain_queries")
    assert mx.array_equal(queries[:2], old.pop("domain_queries"))
    assert all(mx.array_equal(old[name], new[name]) for name in old)
    x, mask = map(mx.array, WordTable().padded(["loop w1 v1", "court sum u3", "nothing t9"]))
    before, after = two.network(x, mask), found.network(x, mask)
    assert mx.array_equal(after[:, :2], before)
    # It has learned something: the new rows are not the first ones of any seed's draw.
    losses = [one["train_loss"] for one in found.history]
    assert losses[-1] < losses[0]


def test_extend_all_starts_from_the_old_router_and_moves_it(two: TrainedRouter) -> None:
    found = extended(two, "all")
    assert any("may know held-out prompts" in note for note in found.notes)
    assert not any("may know" in note for note in two.notes)
    assert found.domains == ("code", "math", "law")
    old, new = router_tensors(two.network), router_tensors(found.network)
    assert not mx.array_equal(old["token.weight"], new["token.weight"])
    assert float(mx.max(mx.abs(old["token.weight"] - new["token.weight"]))) < 0.5
    assert found.metrics["single_top1"] > 0.8


def test_a_domain_that_is_gone_loses_its_row_alone(two: TrainedRouter) -> None:
    found = extended(two, "new", ["math", "law"])
    assert found.domains == ("math", "law")
    x, mask = map(mx.array, WordTable().padded(["loop w1 v1", "sum w2 v2"]))
    assert mx.array_equal(found.network(x, mask)[:, :1], two.network(x, mask)[:, 1:])


def test_extension_needs_a_router_that_lacks_something(two: TrainedRouter) -> None:
    with pytest.raises(InputError, match="nothing to train"):
        extended(two, "new", ["code", "math"])
    with pytest.raises(InputError, match="needs a router"):
        train(["code", "math"], SETTINGS.model_copy(update={"extend": "new"}))
    file = file_of(two)
    wide = RouterFile(replace(file.header, input_dims=DIMS + 1), file.tensors)
    with pytest.raises(InputError, match="another base"):
        train(["code", "law"], SETTINGS.model_copy(update={"extend": "all"}), start=wide,
              examples=examples_of("code", "law"))  # fmt: skip


# --- its file -------------------------------------------------------------------------------------


def test_a_trained_router_is_written_and_read(two: TrainedRouter, tmp_path: Path) -> None:
    file = file_of(two)
    hashes = {write_router(tmp_path / f"{i}.safetensors", file.tensors, file.header)
              for i in range(2)}  # fmt: skip
    assert len(hashes) == 1
    found = read_router(tmp_path / "0.safetensors")
    assert found.header == file.header
    assert found.header.training["split"]["validation"] == two.split["validation"]  # type: ignore
    assert "validation_row_ids" not in str(found.header.training)


# --- epochs ---------------------------------------------------------------------------------------


def test_loss_by_hand() -> None:
    logits, targets = [2.0, -0.5], [1.0, 0.2]
    bce = (math.log(1 + math.exp(-2)) + (math.log(1 + math.exp(-0.5)) + 0.2 * 0.5)) / 2
    p = 1 / (1 + math.exp(0.5))
    margin = (0 + (0.3 - (0.5 - p))) / 2  # 0.88 is outside the margin, 0.38 inside
    found = router_loss(mx.array([logits]), mx.array([targets]))
    assert float(found) == pytest.approx(bce + 0.05 * margin, rel=1e-5)


def test_weighted_loss_is_the_weighted_mean_over_examples() -> None:
    logits, targets = mx.array([[3.0, 1.0], [-2.0, 0.1]]), mx.array([[1.0, 0.0], [0.0, 1.0]])
    one, two = (float(router_loss(logits[i : i + 1], targets[i : i + 1])) for i in (0, 1))
    found = router_loss(logits, targets, mx.array([3.0, 1.0]))
    assert float(found) == pytest.approx((3 * one + two) / 4, rel=1e-5)
    assert float(router_loss(logits, targets)) == pytest.approx((one + two) / 2, rel=1e-5)


def test_margin_acts_between_02_and_08_alone() -> None:
    for p, inside in ((0.19, False), (0.21, True), (0.79, True), (0.81, False)):
        logit = mx.array([[math.log(p / (1 - p))]])
        without = float(router_loss(logit, mx.array([[0.5]]), margin_weight=0))
        assert (float(router_loss(logit, mx.array([[0.5]]))) > without + 1e-6) == inside


def test_cosine_steps_by_epoch() -> None:
    rates = [epoch_learning_rate(RouterTrainSettings(), epoch) for epoch in range(8)]
    assert rates[0] == 8e-4
    assert rates[4] == pytest.approx(4e-4)
    assert rates == sorted(rates, reverse=True)
    assert rates[7] > 0
