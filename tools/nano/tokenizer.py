"""nano's documents as its tokenizer sees them, and that tokenizer read back."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def tokenizer_text(prompt: str, answer: str) -> str:
    """A document as the tokenizer sees it: role names and line breaks in, special tokens out."""
    return f"user\n{prompt}\nassistant\n{answer}\n"


def load_tokenizer(directory: Path) -> "PreTrainedTokenizerFast":
    """The tokenizer of a directory, without mlx_lm's wrapper."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(directory))
