"""Training data: sources and row formats, cleaning, splits; rows, loss masks and batches.

Nothing here imports NumPy or `datasets` before it is used.
"""

from mlxstacks.data.domain import (
    DomainData,
    apply_split,
    data_notes,
    read_domains,
    read_train_data,
    split_ids,
)
from mlxstacks.data.encode import (
    ChatTokenizer,
    EncodedPairs,
    EncodedPrompts,
    EncodedRows,
    encode_examples,
    encode_messages,
    encode_pair,
    encode_pairs,
    encode_prompts,
    encode_record,
)
from mlxstacks.data.examples import Example, as_messages
from mlxstacks.data.json_rows import numbered_records, read_records
from mlxstacks.data.rows import Batch, Row, batch_at, make_batch, pack_rows
from mlxstacks.data.settings import DomainDataSettings, SourceSettings, TrainDataSettings
from mlxstacks.data.sources import train_data_paths, train_data_settings
from mlxstacks.data.text_settings import Rendering

__all__ = [
    "Batch",
    "ChatTokenizer",
    "DomainData",
    "DomainDataSettings",
    "EncodedPairs",
    "EncodedPrompts",
    "EncodedRows",
    "Example",
    "Rendering",
    "Row",
    "SourceSettings",
    "TrainDataSettings",
    "apply_split",
    "as_messages",
    "batch_at",
    "data_notes",
    "encode_examples",
    "encode_messages",
    "encode_pair",
    "encode_pairs",
    "encode_prompts",
    "encode_record",
    "make_batch",
    "numbered_records",
    "pack_rows",
    "read_domains",
    "read_records",
    "read_train_data",
    "split_ids",
    "train_data_paths",
    "train_data_settings",
]
