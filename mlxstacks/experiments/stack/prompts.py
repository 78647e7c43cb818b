"""The validation rows of a store's domains as prompts, and the base they are for.

Rows are those that were held out when the domain was trained: the store has their ids, and the data
settings of the domain, which say where they come from.
"""

from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlxstacks import base_model
from mlxstacks.data import DomainDataSettings, encode_examples, read_domains
from mlxstacks.errors import InputError
from mlxstacks.experiments.stack.analysis_settings import StacksAnalyseSettings
from mlxstacks.experiments.stack.data import data_settings_of
from mlxstacks.experiments.stack.passes import Prompt
from mlxstacks.files.base_location import find_base
from mlxstacks.files.disk import user_path
from mlxstacks.files.manifest import DomainRecord
from mlxstacks.files.store import Store
from mlxstacks.layers.stack_files import serve
from mlxstacks.training.prepare_base import prepare_base


def load_served(
    settings: StacksAnalyseSettings, store: Store, notes: list[str]
) -> tuple[nn.Module, Any]:
    """(model with every enabled stack of the store, tokenizer), the base as training has it.

    Raises: InputError: no model is found. StoreError: it is another base.
    """
    try:
        checkpoint = find_base(store, settings.model, notes)
    except InputError as error:
        raise type(error)(f"{error}; --weights-only does without it") from None
    model, tokenizer, _ = base_model.load(checkpoint.directory, lazy=True)
    prepare_base(model, "auto", notes)
    serve(model, store, base_fingerprint=store.manifest.base_fingerprint)
    return model, tokenizer


def domain_prompts(
    settings: StacksAnalyseSettings, store: Store, tokenizer: Any, notes: list[str]
) -> dict[str, list[Prompt]]:
    """Domain -> token ids of its validation rows, the first `settings.prompts` by row id.

    Domains whose data is not there are left out, and `notes` says why.
    Raises: InputError: data that is there but cannot be used, or of which held-out rows are gone.
    """
    root = user_path(settings.data) if settings.data else Path()
    wanted: dict[str, DomainDataSettings] = {}
    for record in store.manifest.domains:
        if record.enabled and record.stacks:
            try:
                wanted[record.name] = _settings_of(record, root)
            except InputError as error:
                notes.append(f"No prompts of {record.name}: {error}")
    splits = {
        record.name: store.read_json(record.split)
        for record in store.manifest.domains
        if record.name in wanted and record.split is not None
    }
    # All at once: rows may have been moved from one domain to another.
    read = read_domains(wanted, root, tokenizer=tokenizer, stored=splits) if wanted else {}
    return {
        name: [
            row.tokens
            for row in encode_examples(
                read[name].validation[: settings.prompts], tokenizer, about, settings.max_seq_length
            ).rows
        ]
        for name, about in wanted.items()
    }


def _settings_of(record: DomainRecord, root: Path) -> DomainDataSettings:
    """Those of the store; of an imported domain, NAME.jsonl.

    Raises: InputError: a file of them is not there.
    """
    if record.origin == "imported":
        found = DomainDataSettings(sources=(f"{record.name}.jsonl",))
    else:
        found = data_settings_of(record)
    gone = [
        str(root / user_path(source.path))
        for source in found.sources
        if source.path is not None and not (root / user_path(source.path)).exists()
    ]
    if gone:
        raise InputError(f"{', '.join(gone)} not there; give --data, the directory they are in")
    return found
