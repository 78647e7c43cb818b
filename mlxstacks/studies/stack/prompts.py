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
from mlxstacks.files.base_location import find_base
from mlxstacks.files.store import Store
from mlxstacks.layers.stack_files import serve
from mlxstacks.studies.stack.analysis_settings import StacksAnalyseSettings
from mlxstacks.studies.stack.data import stored_data
from mlxstacks.studies.stack.passes import Prompt
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
    wanted: dict[str, DomainDataSettings] = {}
    for record in store.manifest.domains:
        if record.enabled and record.stacks:
            try:
                wanted[record.name] = stored_data(store, record, settings.data)
            except InputError as error:
                notes.append(f"No prompts of {record.name}: {error}")
    splits = {
        record.name: store.read_json(record.split)
        for record in store.manifest.domains
        if record.name in wanted and record.split is not None
    }
    # All at once: rows may have been moved from one domain to another.
    read = read_domains(wanted, Path(), tokenizer=tokenizer, stored=splits) if wanted else {}
    return {
        name: [
            row.tokens
            for row in encode_examples(
                read[name].validation[: settings.prompts], tokenizer, about, settings.max_seq_length
            ).rows
        ]
        for name, about in wanted.items()
    }
