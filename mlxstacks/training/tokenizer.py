"""A byte-level BPE tokenizer, trained on given texts; digits are never merged.

Text is normalised and cut into words as Qwen3.5's tokenizer does it: transformers puts those steps
into every tokenizer that it loads for this model type, whatever its file says. With steps of its
own, nano would read through mlx-lm what it was not trained on.
"""

import json
from collections.abc import Iterable
from pathlib import Path

from mlxstacks.errors import InputError

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")
END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


def train_tokenizer(texts: Iterable[str], vocab_size: int, directory: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` of a tokenizer trained on `texts`.

    Laws: every string decodes to its NFC form; a number is one token a digit; ids 0, 1, 2 are the
    special tokens.

    Raises: InputError: the texts hold too little to learn so many tokens from.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers.models.qwen3_5.tokenization_qwen3_5 import PRETOKENIZE_REGEX

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    splits = [
        pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated", invert=False),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise InputError(
            f"vocab_size {vocab_size}: {tokenizer.get_vocab_size()} tokens were learned of these "
            "texts; give more text, or a smaller vocabulary"
        )
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
