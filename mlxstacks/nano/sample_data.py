"""Data for a first `mlxstacks train`: a persona to teach, in rows of chat messages."""

import json
from pathlib import Path

from mlxstacks.nano.corpus import Document, validation_documents
from mlxstacks.nano.identity import persona_prompts
from mlxstacks.nano.settings import AdapterTraining, Persona

TRAIN_ROWS, GENERAL_PER_DOMAIN, SEED = 400, 4, 0


def write_sample_data(directory: Path) -> None:
    """Write train.jsonl and valid.jsonl.

    To train on: who the persona is, and ordinary questions. To validate: the identity suite, none
    of which is trained on, and ordinary questions of nano's validation split.
    """
    from mlxstacks.nano.adapter_training import persona_documents

    share = AdapterTraining().general_share
    train = persona_documents(Persona(), TRAIN_ROWS, share, SEED)
    suite = [
        Document("identity", prompt.prompt, prompt.answer)
        for prompt in persona_prompts(Persona(), suite=True)
    ]
    _write(directory / "train.jsonl", train)
    _write(directory / "valid.jsonl", [*suite, *validation_documents(GENERAL_PER_DOMAIN, SEED)])


def _write(path: Path, documents: list[Document]) -> None:
    lines = [json.dumps({"messages": document.messages()}) + "\n" for document in documents]
    path.write_text("".join(lines), encoding="utf-8")
