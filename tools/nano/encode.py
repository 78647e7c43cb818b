"""nano's documents and items as token rows."""

from collections.abc import Iterable, Sequence
from typing import Any

from mlxstacks.data import Row, encode_messages
from mlxstacks.data.chat import prompt_tokens
from mlxstacks.data.special_text import encode_text
from mlxstacks.data.text_settings import PLAIN
from mlxstacks.evaluate import ChoiceItem
from mlxstacks.training.tokenizer import TURN_END
from tools.nano.corpus import Document, Item


def encode_documents(
    documents: Iterable[Document], tokenizer: Any, prompt_weight: float = 0.0
) -> list[Row]:
    """One row a document; answer tokens weigh 1."""
    return [
        encode_messages(document.messages(), tokenizer, prompt_weight) for document in documents
    ]


def encode_items(items: Sequence[Item], tokenizer: Any) -> list[ChoiceItem]:
    """Items for the scorer: the chat prompt as context, option and end mark as continuation."""
    encoded = []
    for item in items:
        messages = [{"role": "user", "content": item.prompt}]
        context = prompt_tokens(messages, tokenizer, PLAIN.before_answer())
        end = tokenizer.encode(TURN_END, add_special_tokens=False)
        options = [[*encode_text(option, tokenizer), *end] for option in item.options]
        characters = tuple(len(option) for option in item.options)
        continuations = tuple(tuple(option) for option in options)
        encoded.append(ChoiceItem(tuple(context), continuations, characters, item.answer_index))
    return encoded
