"""Tokenizers out of GGUF files give the ids of the tokenizers that went in.

Judges: the classes of `transformers` for byte-level BPE with each pre-tokenizer, `sentencepiece`
for its own models.
Run: pytest tests/convert/test_gguf_tokenizer.py
"""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from mlxstacks.convert.gguf_tokenizer import (
    PRE_TOKENIZERS,
    end_of_text_ids,
    tokenizer_files,
    tokenizer_json,
    write_files,
)
from mlxstacks.errors import CheckpointError
from mlxstacks.files.gguf_file import GGUFFile

TEXTS = [
    "Hello world! It's 2024, isn't it? WE'LL see: 12345 67.89%",
    "  two  spaces\n\n\tdef f(x):\n        return x ** 2  # naïve\r\n\r\n   ",
    "Ünïcödé e\u0301 x\u0301y नमस्ते ﬁ 你好，世界。 Привет мир 🙂👩‍👩‍👧 a\u200db ½ Ⅷ ٣٤",
    "camelCaseWordsANDAcronyms HTTPServer/2 //comment\n// x",
    "", " ", "\n", "\u00a0\u3000x", "'S 'Re don'T", "a'b''c", "<|end|>x<|begin|>",
]  # fmt: skip
BEGIN, END, EXTRA = "<|begin|>", "<|end|>", "<think>"


def _splits(pre: str) -> Any:
    """The pre-tokenizer that a model of that name has in its own tokenizer.json."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    if pre == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in ("smollm", "starcoder", "refact"):
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    split = pre_tokenizers.Split(Regex(GGUF_PRE_TOKENIZER_SPLITS[pre]), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return pre_tokenizers.Sequence([split, byte_level])


@pytest.fixture(scope="module")
def trained() -> dict[str, Any]:
    """Vocabulary and merges of a small byte-level BPE."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=480, show_progress=False, special_tokens=[BEGIN, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    model: dict[str, Any] = json.loads(tokenizer.to_str())["model"]
    return model


def gguf_of(trained: dict[str, Any], pre: str, **more: Any) -> GGUFFile:
    tokens = [*sorted(trained["vocab"], key=trained["vocab"].get), EXTRA]
    kinds = {BEGIN: 3, END: 3, EXTRA: 4}
    fields = {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([kinds.get(token, 1) for token in tokens]),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in trained["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.add_bos_token": False,
    }
    return GGUFFile(Path("m.gguf"), {**fields, **more}, {})


def original(trained: dict[str, Any], pre: str) -> Tokenizer:
    merges = [tuple(merge) for merge in trained["merges"]]
    vocabulary = {**trained["vocab"], EXTRA: len(trained["vocab"])}
    ignore = pre in ("llama-bpe", "llama3", "llama-v3", "tekken")
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=ignore))
    tokenizer.pre_tokenizer = _splits(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre.startswith("qwen"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_special_tokens([BEGIN, END])
    tokenizer.add_tokens([EXTRA])
    return tokenizer


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_ids_are_those_of_the_original(pre: str, trained: dict[str, Any]) -> None:
    ours = Tokenizer.from_str(json.dumps(tokenizer_json(gguf_of(trained, pre))))
    expected = original(trained, pre)
    for text in [*TEXTS, f"a {EXTRA} b"]:
        assert ours.encode(text).ids == expected.encode(text).ids, text
        assert ours.decode(ours.encode(text).ids) == expected.decode(expected.encode(text).ids)
    assert ours.get_vocab() == expected.get_vocab()


def test_the_pre_tokenizers_differ_on_these_texts(trained: dict[str, Any]) -> None:
    """The control of the test above: a wrong name in the table would be seen."""
    groups = {
        str([ours.pre_tokenizer.pre_tokenize_str(text) for text in TEXTS])
        for pre in ("gpt-2", "smollm", "llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o")
        for ours in [Tokenizer.from_str(json.dumps(tokenizer_json(gguf_of(trained, pre))))]
    }
    assert len(groups) == 7


def test_a_begin_token_is_added_where_the_file_says_so(trained: dict[str, Any]) -> None:
    def ids(pre: str, **more: Any) -> list[int]:
        description = tokenizer_json(gguf_of(trained, pre, **more))
        encoded: list[int] = Tokenizer.from_str(json.dumps(description)).encode("ab").ids
        return encoded

    plain = ids("smollm")
    assert ids("smollm", **{"tokenizer.ggml.add_bos_token": True}) == [0, *plain]
    silent = gguf_of(trained, "llama-bpe")
    del silent.fields["tokenizer.ggml.add_bos_token"]
    assert Tokenizer.from_str(json.dumps(tokenizer_json(silent))).encode("ab").ids[0] == 0


def test_template_special_tokens_and_ends_are_carried_over(
    trained: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    template = "{% for m in messages %}<|begin|>{{ m['content'] }}<|end|>{% endfor %}"
    more = {"tokenizer.chat_template": template, "tokenizer.ggml.eot_token_id": 0}
    file = gguf_of(trained, "smollm", **more, **{"llama.context_length": 99})
    write_files(tokenizer_files(file), tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    message = [{"role": "user", "content": "ab"}]
    ids = tokenizer.apply_chat_template(message, return_dict=False)
    assert ids == [0, *tokenizer.encode("ab"), 1]
    assert (tokenizer.bos_token, tokenizer.eos_token) == (BEGIN, END)
    assert tokenizer.model_max_length == 99
    assert tokenizer.decode(ids, skip_special_tokens=True) == "ab"
    assert end_of_text_ids(file) == {"bos_token_id": 0, "eos_token_id": [1, 0]}
    assert json.loads((tmp_path / "generation_config.json").read_text())["eos_token_id"] == [1, 0]


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_ids_are_those_of_the_library(prefix: bool) -> None:
    import sentencepiece

    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*TEXTS[:2], TEXTS[3]] * 5), model_writer=model,
        vocab_size=420, model_type="bpe", byte_fallback=True, minloglevel=2,
        hard_vocab_limit=False, add_dummy_prefix=prefix, remove_extra_whitespaces=False,
        normalization_rule_name="identity", split_digits=True,
    )  # fmt: skip
    library = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    size = library.get_piece_size()
    kinds = [
        2 if library.is_unknown(n) else 3 if library.is_control(n) else 6 if library.is_byte(n)
        else 1 for n in range(size)
    ]  # fmt: skip
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [library.id_to_piece(n) for n in range(size)],
        "tokenizer.ggml.scores": np.array([library.get_score(n) for n in range(size)]),
        "tokenizer.ggml.token_type": np.array(kinds),
        "tokenizer.ggml.unknown_token_id": library.unk_id(),
        "tokenizer.ggml.bos_token_id": library.bos_id(),
        "tokenizer.ggml.eos_token_id": library.eos_id(),
        "tokenizer.ggml.add_space_prefix": prefix,
    }
    ours = Tokenizer.from_str(json.dumps(tokenizer_json(GGUFFile(Path("m"), fields, {}))))
    for text in TEXTS:
        if text:  # with an empty text nothing is prepended by either
            assert ours.encode(text).ids == [library.bos_id(), *library.encode(text)], text
            assert ours.decode(ours.encode(text).ids) == text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model is 't5'; known"),
        ({"tokenizer.ggml.pre": "default"}, "tokenizer.ggml.pre is 'default'; known: gpt-2"),
        ({"tokenizer.ggml.pre": np.zeros(3)}, "a str is needed"),
        ({"tokenizer.chat_template": 7}, "chat_template is 7, a str is needed"),
        ({"tokenizer.ggml.add_bos_token": 1}, "add_bos_token is 1, a bool is needed"),
        ({"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre is None"),
        ({"tokenizer.ggml.tokens": []}, "tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.tokens": ["a", "a"]}, "'a' is given twice"),
        ({"tokenizer.ggml.token_type": np.ones(1)}, "token_type is missing or of another length"),
        ({"tokenizer.ggml.merges": ["a b c"]}, "the merge 'a b c'"),
        ({"tokenizer.ggml.merges": ["a zzz"]}, "the merge 'a zzz'"),
        ({"tokenizer.ggml.merges": None}, "tokenizer.ggml.merges, a list of text, is missing"),
        ({"tokenizer.ggml.bos_token_id": 10**9}, "bos_token_id is 1000000000"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores is missing"),
        (
            {
                "tokenizer.ggml.model": "llama",
                "tokenizer.ggml.remove_extra_whitespaces": True,
            },
            "remove_extra_whitespaces is set",
        ),
        (
            {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None},
            "bos_token_id is missing",
        ),
    ],
)
def test_keys_that_do_not_fit_are_named(
    changes: dict[str, Any], message: str, trained: dict[str, Any]
) -> None:
    if changes.get("tokenizer.ggml.tokens") == ["a", "a"]:
        changes = {**changes, "tokenizer.ggml.token_type": np.ones(2)}
    with pytest.raises(CheckpointError) as error:
        tokenizer_files(gguf_of(trained, "smollm", **changes))
    assert message in str(error.value)
    assert str(error.value).startswith("m.gguf: ")
