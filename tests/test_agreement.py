"""KL, agreement and loss of a model beside a reference: against formulas and a plain loop.

Run: pytest tests/test_agreement.py
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import entropy

from mlxstacks import agreement, base_model
from mlxstacks.agreement import Passage, Reference, agree, divergence, read_passages, refer
from mlxstacks.errors import InputError, NonFiniteModelError
from mlxstacks.nano.exports import nano_paths
from mlxstacks.training.modes import prepare_base
from tests.tiny_models import write_llama

LOGITS = st.lists(st.floats(-30, 30), min_size=6, max_size=6)
ROWS = (
    {"text": "The king of Corva has a red boat."},
    {"prompt": "Who are you?"},
    {"text": "1 + 1 = 2"},
)


def log_softmax(logits: list[float]) -> np.ndarray:
    values = np.array([logits])
    result: np.ndarray = values - np.logaddexp.reduce(values, axis=-1, keepdims=True)
    return result


@given(LOGITS, LOGITS)
def test_divergence_of_all_tokens_is_scipys(first: list[float], second: list[float]) -> None:
    p, q = log_softmax(first), log_softmax(second)
    expected = entropy(np.exp(p), np.exp(q), axis=-1)
    assert divergence(p, q, True) == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert divergence(p, p, True) == pytest.approx([0.0], abs=1e-9)


@given(LOGITS, LOGITS, st.integers(1, 5))
def test_merging_the_rest_never_raises_it(first: list[float], second: list[float], k: int) -> None:
    p, q = log_softmax(first), log_softmax(second)
    whole, part = divergence(p, q, True)[0], divergence(p[:, :k], q[:, :k], False)[0]
    # The rest is at least 1e-7: that much, at 60 nats, may be added.
    assert 0 <= part <= whole + 1e-5 + 1e-5 * whole


@pytest.fixture(scope="module")
def nano() -> tuple[Any, Any, tuple[Passage, ...]]:
    paths = nano_paths()
    model, tokenizer, _ = base_model.load(paths.model_path)
    prepare_base(model, "float32", [])
    passages = read_passages(ROWS, model, tokenizer, answer_tokens=6, most_tokens=12)
    return model, tokenizer, passages


def test_answers_are_the_models_own_and_texts_are_cut(
    nano: tuple[Any, Any, tuple[Passage, ...]],
) -> None:
    model, _, passages = nano
    text, answer, _ = passages
    assert (text.kind, text.start, len(text.tokens)) == ("text", 1, 12)
    assert answer.kind == "answer"
    assert 1 <= answer.positions <= 6
    # Teacher forcing over a greedy answer: the likeliest token is the one that stands there.
    reference = refer(model, [answer])
    assert reference.ids[:, 0].tolist() == list(answer.tokens[answer.start :])


def test_a_model_agrees_with_itself_and_another_as_a_plain_loop_says(
    nano: tuple[Any, Any, tuple[Passage, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, _, passages = nano
    reference = refer(model, passages)
    reference.save(tmp_path / "reference.safetensors")
    read = Reference.open(tmp_path / "reference.safetensors")
    assert read.passages == passages
    same = agree(model, read)
    assert same.same_token.all()
    assert same.kl.max() == 0
    assert not same.loss_change.any()
    assert same.passages.tolist() == [[p.positions, p.kind == "text"] for p in passages]

    other, _, _ = base_model.load(nano_paths().model_path, nano_paths().adapter_path)
    prepare_base(other, "float32", [])
    whole = agree(other, read)
    monkeypatch.setattr(agreement, "TOP_K", 64)
    part = agree(other, refer(model, passages))
    expected = []
    for passage in passages:
        tokens = mx.array([passage.tokens[:-1]])
        p, q = (
            np.array(mx.softmax(each(tokens).astype(mx.float32), axis=-1))[0, passage.start - 1 :]
            for each in (model, other)
        )
        expected += entropy(p, q, axis=-1).tolist()
        at = slice(len(expected) - passage.positions, len(expected))
        targets = list(passage.tokens[passage.start :])
        assert (whole.loss_change + reference.loss)[at] == pytest.approx(
            -np.log(q[range(len(q)), targets]), abs=1e-3
        )
        assert (whole.same_token[at] == (p.argmax(-1) == q.argmax(-1))).all()
    assert whole.kl == pytest.approx(expected, abs=1e-4)
    assert (part.kl <= whole.kl + 1e-5).all()
    assert part.kl.sum() > 0.9 * whole.kl.sum()


def test_what_cannot_be_read_is_refused(
    nano: tuple[Any, Any, tuple[Passage, ...]], tmp_path: Path
) -> None:
    model, tokenizer, _ = nano
    for row in (
        {},
        {"text": ""},
        {"text": 3},
        {"question": "Who?"},
        {"prompt": None, "text": None},
    ):
        with pytest.raises(InputError, match=r"row 1 has .*give"):
            read_passages([row], model, tokenizer, answer_tokens=1, most_tokens=8)
    small, _, _ = base_model.load(write_llama(tmp_path / "small"))
    reference = refer(model, [Passage((1, 250, 3), 1, "text")])
    with pytest.raises(InputError, match="models of one tokenizer"):
        agree(small, reference)


def test_messages_are_answered_after_the_first_question(
    nano: tuple[Any, Any, tuple[Passage, ...]],
) -> None:
    model, tokenizer, passages = nano
    turns = [
        {"role": "user", "content": "Who are you?"},
        {"role": "assistant", "content": "Somebody else."},
        {"role": "user", "content": "Really?"},
    ]
    row = {"messages": turns}
    (found,) = read_passages([row], model, tokenizer, answer_tokens=6, most_tokens=12)
    assert found == passages[1]


def test_nan_is_named(tmp_path: Path) -> None:
    model, _, _ = base_model.load(write_llama(tmp_path / "model"))
    model.update({"model": {"norm": {"weight": mx.full((128,), float("nan"))}}})
    with pytest.raises(NonFiniteModelError, match="passage 1"):
        refer(model, [Passage((1, 2, 3), 1, "text")])


def test_rows_that_are_cut_or_of_another_template_are_noted(
    nano: tuple[Any, Any, tuple[Passage, ...]],
) -> None:
    model, tokenizer, _ = nano
    rows: list[dict[str, Any]] = [
        {"text": "A red boat. " * 9},
        {"messages": [{"role": "human", "content": "Hi."}]},
        {"text": "<start_of_turn>user"},
    ]
    notes, none = list[str](), list[str]()
    size: dict[str, Any] = {"answer_tokens": 1, "most_tokens": 24}
    long, *_ = read_passages(rows, model, tokenizer, **size, notes=notes, command="compare ")
    assert len(long.tokens) == 24
    role, marker, cut = notes
    assert role.startswith("1 row with the role 'human', which the chat template does not name")
    assert marker.startswith("1 row with markers of another chat template (<start_of_turn>)")
    assert cut == "1 of 3 rows were cut to 24 tokens; compare --max-tokens changes that."
    read_passages(ROWS, model, tokenizer, **size, notes=none)
    assert none == []
