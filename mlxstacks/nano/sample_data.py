"""Data for a first `mlxstacks train`, and nano's own domains as files, in rows of messages."""

import json
from pathlib import Path

from mlxstacks.nano.corpus import Document, validation_documents
from mlxstacks.nano.domains import DOMAINS
from mlxstacks.nano.identity import persona_prompts
from mlxstacks.nano.settings import AdapterTraining, Persona

TRAIN_ROWS, GENERAL_PER_DOMAIN, SEED = 400, 4, 0
# The medical world has 106 validation questions.
ROWS_PER_DOMAIN = 100


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


def domain_files() -> list[str]:
    return [f"{domain}.jsonl" for domain in DOMAINS]


def write_domain_data(directory: Path) -> None:
    """Write <domain>.jsonl of the five domains: questions that no training document asks."""
    documents = validation_documents(ROWS_PER_DOMAIN, SEED)
    for domain, name in zip(DOMAINS, domain_files(), strict=True):
        _write(directory / name, [each for each in documents if each.domain == domain])


def _write(path: Path, documents: list[Document]) -> None:
    lines = [json.dumps({"messages": document.messages()}) + "\n" for document in documents]
    path.write_text("".join(lines), encoding="utf-8")
