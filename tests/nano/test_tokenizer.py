"""nano's tokenizer. Run: pytest tests/nano/test_tokenizer.py"""

import unicodedata
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks import base_model
from mlxstacks.nano.exports import ASSETS
from mlxstacks.training.tokenizer import SPECIAL_TOKENS, train_tokenizer
from tools.nano.base_training import make_tokenizer
from tools.nano.settings import RebuildSettings
from tools.nano.tokenizer import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(ASSETS / "model")


@pytest.fixture(scope="module")
def loaded():
    return base_model.load(ASSETS / "model", lazy=True)[1]


@given(text=st.text(max_size=60))
def test_every_text_decodes_to_its_normal_form(tokenizer, text: str) -> None:
    decoded = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False))
    assert decoded == unicodedata.normalize("NFC", text)


@given(text=st.text(alphabet=st.sampled_from("aB '.,\n\t\r 0é1()=_\"")))
def test_mlx_lm_loads_the_tokenizer_that_was_trained(tokenizer, loaded, text: str) -> None:
    assert loaded.encode(text, add_special_tokens=False) == tokenizer.encode(
        text, add_special_tokens=False
    )


def test_a_digit_is_a_token(tokenizer) -> None:
    ids = tokenizer.encode("x12345", add_special_tokens=False)
    assert [tokenizer.decode([i]) for i in ids][-5:] == list("12345")


def test_special_tokens_come_first_and_end_a_turn(tokenizer) -> None:
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == [0, 1, 2]
    assert tokenizer.eos_token_id == 2
    assert tokenizer.encode("<|im_start|>user\n", add_special_tokens=False)[0] == 1
    assert len(tokenizer.encode("<|im_start|>assistant\n", add_special_tokens=False)) == 3


def test_training_it_again_gives_the_shipped_file(tmp_path: Path) -> None:
    make_tokenizer(RebuildSettings(), tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / name).read_bytes() == (ASSETS / "model" / name).read_bytes()


def test_too_little_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="more text"):
        train_tokenizer(["a few words"], 512, tmp_path)
