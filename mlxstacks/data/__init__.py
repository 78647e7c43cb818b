"""Training data: sources and row formats, cleaning, splits; rows, loss masks and batches.

Nothing here imports NumPy or `datasets` before it is used.
"""

from mlxstacks.data.batches import Batch, batch_at, make_batch
from mlxstacks.data.domain import (
    DomainData,
    data_notes,
    read_domains,
    read_train_data,
    split_ids,
)
from mlxstacks.data.encode import ChatTokenizer, encode_messages, encode_record
from mlxstacks.data.encode_examples import EncodedRows, encode_examples
from mlxstacks.data.examples import Example
from mlxstacks.data.json_lines import numbered_records, read_records
from mlxstacks.data.messages import as_messages
from mlxstacks.data.rows import Row, pack_rows
from mlxstacks.data.settings import DomainDataSettings, SourceSettings, TrainDataSettings
from mlxstacks.data.sources import train_data_paths, train_data_settings
from mlxstacks.data.splits import apply_split
from mlxstacks.data.text_settings import Rendering

__all__ = [
    "Batch",
    "ChatTokenizer",
    "DomainData",
    "DomainDataSettings",
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
