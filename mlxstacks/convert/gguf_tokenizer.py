"""The tokenizer inside a GGUF file as `tokenizer.json`, its template and special tokens beside it.

A file holds tokens, their types and merges (byte-level BPE) or scores (SentencePiece), and the name
of a pre-tokenizer. What that name stands for is known from the models it was given to; a name that
is not in the table is refused, since a near miss gives other ids without a word.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlxstacks.errors import CheckpointError
from mlxstacks.files.gguf_file import GGUFFile
from mlxstacks.files.outputs import write_json

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
MAX_TOKEN = 4096  # letters; every cut of a token is tried, and public ones have some hundred


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """What a model's own tokenizer.json has before its BPE.

    split: pattern whose matches, and what lies between them, are the pieces; None for GPT-2's.
    digits: each digit is a piece of its own.
    nfc: text is put into Unicode's composed form first.
    ignore_merges: a piece that is a token is that token, whatever the merges say.
    bos: whether a begin token is added where the file does not say.
    """

    split: str | None = None
    digits: bool = False
    nfc: bool = False
    ignore_merges: bool = False
    bos: bool = False


_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"


def _cased(suffix: str, digits: str) -> str:
    """Words split where lower case turns to upper: OpenAI's o200k and Mistral's Tekken."""
    first = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{suffix}"
    second = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{suffix}"
    return rf"{first}|{second}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"


_LLAMA3 = PreTokenizer(
    "|".join([_CONTRACTIONS, _WORD, r"\p{N}{1,3}", _MARKS, _SPACES]), ignore_merges=True, bos=True
)
_QWEN2 = PreTokenizer("|".join([_CONTRACTIONS, _WORD, r"\p{N}", _MARKS, _SPACES]), nfc=True)
_QWEN35 = PreTokenizer(
    "|".join(
        [
            _CONTRACTIONS, r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"\p{N}",
            r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", _SPACES,
        ]
    ),
    nfc=True,
)  # fmt: skip
PRE_TOKENIZERS = {
    "gpt-2": PreTokenizer(),
    "smollm": PreTokenizer(digits=True),
    "starcoder": PreTokenizer(digits=True),
    "refact": PreTokenizer(digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _QWEN2,
    "qwen35": _QWEN35,
    "tekken": PreTokenizer(_cased("", r"\p{N}"), ignore_merges=True, bos=True),
    "gpt-4o": PreTokenizer(_cased(rf"{_CONTRACTIONS}?", r"\p{N}{1,3}")),
}


def end_of_text_ids(file: GGUFFile) -> dict[str, Any]:
    """`bos_token_id` and `eos_token_id` for `config.json`: the end of a text and of a turn."""
    ids: dict[str, Any] = {}
    begin, ends = _token_id(file, "bos"), []
    for name in ("eos", "eot"):
        end = _token_id(file, name)
        if end is not None and end not in ends:
            ends.append(end)
    if begin is not None:
        ids["bos_token_id"] = begin
    if ends:
        ids["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return ids


def tokenizer_files(file: GGUFFile) -> dict[str, dict[str, Any]]:
    """Contents of tokenizer.json, tokenizer_config.json and generation_config.json.

    Law: texts have the ids that the original tokenizer gives them.

    Raises: CheckpointError: a tokenizer or pre-tokenizer that is not known, or keys that do not
        fit.
    """
    return {
        "tokenizer.json": tokenizer_json(file),
        "tokenizer_config.json": tokenizer_config(file),
        "generation_config.json": end_of_text_ids(file),
    }


def write_files(files: dict[str, dict[str, Any]], directory: Path) -> None:
    """Write JSON files by their names."""
    for name, content in files.items():
        write_json(directory / name, content)


def tokenizer_json(file: GGUFFile) -> dict[str, Any]:
    """The tokenizer in the format of the `tokenizers` library. Raises: see `tokenizer_files`."""
    from tokenizers import AddedToken

    model = file.value("tokenizer.ggml.model", str)
    if model not in ("gpt2", "llama"):
        raise _error(
            file, f"tokenizer.ggml.model is {model!r}; known: gpt2 (byte-level BPE), llama"
        )
    tokenizer = _byte_level(file) if model == "gpt2" else _sentencepiece(file)
    tokens, types = _tokens(file), file.fields.get("tokenizer.ggml.token_type")
    if not isinstance(types, np.ndarray) or len(types) != len(tokens):
        raise _error(file, "tokenizer.ggml.token_type is missing or of another length")
    # found in a text before it is split
    tokenizer.add_tokens(
        [
            AddedToken(token, normalized=False, special=bool(kind != _USER_DEFINED))
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
    )
    description: dict[str, Any] = json.loads(tokenizer.to_str())
    return description | {"post_processor": _post_processor(file)}


def tokenizer_config(file: GGUFFile) -> dict[str, Any]:
    """What transformers needs beside tokenizer.json."""
    tokens = _tokens(file)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "add_bos_token": _adds_begin(file),
        "add_eos_token": False,
    }
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    for name, key in names.items():
        token_id = _token_id(file, name)
        if token_id is not None:
            config[key] = tokens[token_id]
    length = file.value(f"{file.fields.get('general.architecture')}.context_length", int)
    if length is not None:
        config["model_max_length"] = length
    template = file.value("tokenizer.chat_template", str)
    if template is not None:
        config["chat_template"] = template
    return config


def _byte_level(file: GGUFFile) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    known, vocabulary = _pre_tokenizer(file), _vocabulary(file)
    merges = file.fields.get("tokenizer.ggml.merges")
    if not isinstance(merges, list):
        raise _error(file, "tokenizer.ggml.merges, a list of text, is missing")
    pairs = [merge.split(" ") for merge in merges]
    for merge, pair in zip(merges, pairs, strict=True):
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocabulary.keys():
            raise _error(file, f"the merge {merge!a} is not of two tokens to a third")
    model = models.BPE(vocabulary, list(map(tuple, pairs)), ignore_merges=known.ignore_merges)
    tokenizer = Tokenizer(model)
    if known.nfc:
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = []
    if known.digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if known.split is not None:
        steps.append(pre_tokenizers.Split(Regex(known.split), "isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=known.split is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GGUFFile) -> Tokenizer:
    """SentencePiece's BPE: spaces are U+2581, what is no token is spelled in bytes.

    It joins the pair whose union has the best score; merges in the order of the scores do the same.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers

    tokens, vocabulary = _tokens(file), _vocabulary(file)
    if file.value("tokenizer.ggml.remove_extra_whitespaces", bool, False):
        raise _error(
            file, "tokenizer.ggml.remove_extra_whitespaces is set, which is not known here"
        )
    scores = file.fields.get("tokenizer.ggml.scores")
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
        raise _error(file, "tokenizer.ggml.scores is missing or of another length than the tokens")
    if not np.isfinite(scores).all():
        raise _error(file, "tokenizer.ggml.scores holds NaN or infinite numbers")
    merges = [
        (float(score), (vocabulary[token[:cut]], vocabulary[token[cut:]]), token, cut)
        for token, score in zip(tokens, scores, strict=True)
        for cut in range(1, len(token))
        if token[:cut] in vocabulary and token[cut:] in vocabulary
    ]
    merges.sort(key=lambda merge: (-merge[0], merge[1]))
    unknown = _token_id(file, "unknown")
    model = models.BPE(
        vocabulary,
        [(token[:cut], token[cut:]) for _, _, token, cut in merges],
        unk_token=None if unknown is None else tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    prefix = file.value("tokenizer.ggml.add_space_prefix", bool, True)
    first = [normalizers.Prepend("▁")] if prefix else []
    last = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last]
    )
    return tokenizer


def _pre_tokenizer(file: GGUFFile) -> PreTokenizer:
    name = file.value("tokenizer.ggml.pre", str)
    if name not in PRE_TOKENIZERS:
        raise _error(
            file,
            f"tokenizer.ggml.pre is {name!r}; known: {', '.join(PRE_TOKENIZERS)}. Another would "
            "give other ids than the model learned: convert the original checkpoint instead",
        )
    return PRE_TOKENIZERS[name]


def _post_processor(file: GGUFFile) -> dict[str, Any] | None:
    """The begin token before every text, where the file asks for it."""
    if not _adds_begin(file):
        return None
    begin = _token_id(file, "bos")
    if begin is None:
        raise _error(file, "adds a begin token, but tokenizer.ggml.bos_token_id is missing")
    token = _tokens(file)[begin]
    special = {"SpecialToken": {"id": token, "type_id": 0}}
    return {
        "type": "TemplateProcessing",
        "single": [special, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [
            special,
            {"Sequence": {"id": "A", "type_id": 0}},
            {"SpecialToken": {"id": token, "type_id": 1}},
            {"Sequence": {"id": "B", "type_id": 1}},
        ],
        "special_tokens": {token: {"id": token, "ids": [begin], "tokens": [token]}},
    }


def _adds_begin(file: GGUFFile) -> bool:
    sentencepiece = file.value("tokenizer.ggml.model", str) == "llama"
    default = True if sentencepiece else _pre_tokenizer(file).bos
    adds: bool = file.value("tokenizer.ggml.add_bos_token", bool, default)
    return adds


def _tokens(file: GGUFFile) -> list[str]:
    tokens = file.fields.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise _error(file, "tokenizer.ggml.tokens, a list of text, is missing")
    longest = max(map(len, tokens))
    if longest > MAX_TOKEN:
        raise _error(file, f"a token of {longest:,} letters, at most {MAX_TOKEN:,} are allowed")
    return tokens


def _vocabulary(file: GGUFFile) -> dict[str, int]:
    tokens = _tokens(file)
    vocabulary = {token: number for number, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for number, token in enumerate(tokens) if vocabulary[token] != number)
        raise _error(file, f"the token {twice!a} is given twice")
    return vocabulary


def _token_id(file: GGUFFile, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = file.fields.get(key)
    if value is not None and not (type(value) is int and 0 <= value < len(_tokens(file))):
        raise _error(file, f"{key} is {value!r}, and there are {len(_tokens(file))} tokens")
    return value


def _error(file: GGUFFile, fault: str) -> CheckpointError:
    return CheckpointError(f"{file.path}: {fault}")
