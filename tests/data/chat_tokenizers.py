"""Tiny tokenizers of the kinds that public models have, each with a chat template of ours.

tokenizer = chat_tokenizer("gemma")        # transformers' fast tokenizer, built once
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

WORDS = (
    "the red ship sails to the far islands and back again", "user assistant system model think",
    "seven times three is twenty-one", "who are you and what is this", "im_end im_start INST",
)  # fmt: skip

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %} {{ m.content | trim }}"
    "{{ eos_token }}{% else %}[INST] {{ m.content | trim }} [/INST]{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m.role == 'assistant' else m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
HEADERS = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
ROLES = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' }}{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# Names of arguments as tags.
JOINING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call><{{ c.name | trim }}>{{ c.argument }}>"
    "</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{# </think> #}{% endif %}"
)
# The prompt opens the thoughts, or closes them at once; answers before the last question have none.
_ANSWERS = (
    "{% set ns = namespace(asked=-1) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% set content = m.content %}"
    "{% if m.role == 'assistant' %}{% set thought = m.reasoning_content or '' %}"
    "{% if not thought and '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1] %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{% if loop.index0 > ns.asked %}<think>\n{{ thought.strip('\n') }}\n</think>\n\n{% endif %}"
    "{{ content }}{% for call in m.tool_calls or [] %}\n<tool_call>\n"
    "{{ call.function | tojson }}\n</tool_call>{% endfor %}"
    "{% else %}{{ content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
)
OPENED = _ANSWERS + (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)
CLOSED = _ANSWERS + (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    "{% endif %}"
)
# As `OPENED`, but an answer in the history never has a block, the last one neither.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{{ '<think>\n' if enable_thinking else '<think>\n\n</think>\n\n' }}{% endif %}"
)


def _byte_level() -> tuple[Tokenizer, list[str], str]:
    """(without special tokens yet, its alphabet, what a blank is in a word)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġ"


def _sentencepiece(begin: bool) -> tuple[Tokenizer, list[str], str]:
    """As Llama 2 has it (begin: a blank before the beginning), or Gemma: no words, bytes for the
    rest.
    """
    tokenizer = Tokenizer(models.BPE())
    steps: list[Any] = [normalizers.Prepend("▁")] if begin else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    ends: list[Any] = [decoders.Strip(" ", 1, 0)] if begin else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *ends]
    )
    letters = [chr(code) for code in range(33, 127)]
    return tokenizer, [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "\n", *letters], "▁"


class Kind(NamedTuple):
    """added: words that are one token, but not special."""

    build: Callable[[], tuple[Tokenizer, list[str], str]]
    special: tuple[str, ...]
    template: str
    begin: str | None = None
    added: tuple[str, ...] = ()


_CHATML = ("<|im_start|>", "<|im_end|>")
_MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
# The last special token ends an answer.
KINDS = {
    "chatml": Kind(_byte_level, _CHATML, CHATML, added=("<h1>",)),
    "inst": Kind(
        lambda: _sentencepiece(True), ("<unk>", "<s>", "[INST]", "[/INST]", "</s>"), INST, "<s>"
    ),
    "gemma": Kind(
        lambda: _sentencepiece(False),
        ("<unk>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<eos>"), GEMMA, "<bos>",
    ),
    "headers": Kind(
        _byte_level,
        ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
        HEADERS, "<|begin_of_text|>",
    ),
    "roles": Kind(_byte_level, ("<|user|>", "<|assistant|>", "<|end|>"), ROLES),
    "joining": Kind(_byte_level, _CHATML, JOINING, added=_MARKERS),
    "opened": Kind(_byte_level, _CHATML, OPENED, added=_MARKERS),
    "closed": Kind(_byte_level, _CHATML, CLOSED, added=_MARKERS),
    "forgetful": Kind(_byte_level, _CHATML, FORGETFUL, added=_MARKERS),
}  # fmt: skip
PLAIN_KINDS = ("chatml", "inst", "gemma", "headers")


@cache
def chat_tokenizer(name: str) -> Any:
    kind = KINDS[name]
    tokenizer, alphabet, blank = kind.build()
    merges: dict[tuple[str, str], None] = {}
    for word in " ".join(WORDS).split():
        letters = blank + word
        merges |= {(letters[:n], letters[n]): None for n in range(1, len(letters))}
    pieces = dict.fromkeys([*kind.special, *alphabet, *(a + b for a, b in merges)])
    in_bytes: dict[str, Any] = {"byte_fallback": True} if blank == "▁" else {}
    tokenizer.model = models.BPE(
        {piece: place for place, piece in enumerate(pieces)}, list(merges), **in_bytes
    )
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in kind.special])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in kind.added])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=kind.begin, eos_token=kind.special[-1],
        chat_template=kind.template, clean_up_tokenization_spaces=False,
    )  # fmt: skip


class Counting:
    """Counts the characters that a tokenizer is given."""

    def __init__(self, name: str) -> None:
        self._tokenizer, self.characters = chat_tokenizer(name), 0

    def encode(self, text: str, **options: Any) -> list[int]:
        self.characters += len(text)
        return self._tokenizer.encode(text, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)
