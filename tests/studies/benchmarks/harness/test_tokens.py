"""Candidates have the tokens that lm-evaluation-harness gives them.

Run: pytest tests/studies/benchmarks/harness/test_tokens.py
"""

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lm_eval.api.model import TemplateLM
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from mlxstacks.nano.exports import nano_paths
from mlxstacks.studies.benchmarks.arms import PromptEncoder
from mlxstacks.studies.benchmarks.settings import ArmSettings


def llama_2_like() -> PreTrainedTokenizerFast:
    """Byte-pair merges over words with a blank of their own before the text, as SentencePiece."""
    words = ["▁", *"abcinoprst,.P"]
    merges = [
        ("▁", "P"),
        ("▁P", "a"),
        ("▁Pa", "r"),
        ("i", "s"),
        ("▁Par", "is"),
        ("▁", "a"),
        ("o", "n"),
    ]
    vocabulary = dict.fromkeys(["<unk>", "<s>", *words, *("".join(pair) for pair in merges)])
    ids = {piece: number for number, piece in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken("<s>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", unk_token="<unk>")


def theirs(tokenizer: Any, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """By lm_eval's own code, of a causal model."""
    model = SimpleNamespace(
        backend="causal",
        tok_encode=lambda text, **options: tokenizer.encode(text, add_special_tokens=False),
    )
    encode: Any = TemplateLM._encode_pair
    before, after = encode(model, context, continuation)
    return before, after


TOKENIZERS = {
    "llama 2": llama_2_like(),
    "nano": PreTrainedTokenizerFast(tokenizer_file=str(nano_paths().model_path / "tokenizer.json")),
}
TEXT = st.text(st.sampled_from("abcinoprst,. P"), max_size=12).filter(str.strip)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(context=TEXT, texts=st.lists(TEXT, min_size=1, max_size=3))
def test_contexts_and_candidates_are_those_of_the_harness(
    name: str, context: str, texts: list[str]
) -> None:
    tokenizer = TOKENIZERS[name]
    encoder = PromptEncoder(tokenizer, ArmSettings(chat="none"), None)
    before, continuations = encoder.context_and_candidates(context, texts)
    for text, tokens in zip(texts, continuations, strict=True):
        their_before, after = theirs(tokenizer, context, text)
        assert list(before) == their_before
        assert list(tokens) == after or not after


def test_a_word_behind_a_prompt_is_one_token() -> None:
    tokenizer = TOKENIZERS["llama 2"]
    paris = tokenizer.convert_tokens_to_ids("▁Paris")
    encoder = PromptEncoder(tokenizer, ArmSettings(chat="none"), None)
    for prompt, text in (("a:", " Paris"), ("a: ", "Paris")):
        _, [tokens] = encoder.context_and_candidates(prompt, [text])
        assert tokens == (paris,)
    # By itself the blank would stand twice.
    assert list(encoder.encode(" Paris")) != [paris]
