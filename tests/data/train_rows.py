"""A file of rows as `mlxstacks train` reads it."""

from pathlib import Path
from typing import Any

from mlxstacks.data import EncodedRows, TrainDataSettings, encode_examples, read_train_data


def read_rows(
    path: Path, tokenizer: Any, max_tokens: int | None = None, **settings: Any
) -> EncodedRows:
    """A file as `train` reads and encodes it, without validation."""
    about = TrainDataSettings.model_validate({"sources": str(path), **settings})
    data = read_train_data(about, Path(), tokenizer)
    return encode_examples([*data.train, *data.validation], tokenizer, about, max_tokens)
