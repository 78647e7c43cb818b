"""Where the rows of a new domain come from, and what of them can be used.

A folder or a function of the user's; nothing is fetched. Rows are cleaned as training data is, and
those that the store's domains were trained or judged with are left out.
"""

import json
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from mlxstacks.data.settings import DomainDataSettings, SourceSettings
from mlxstacks.data.sources import read_source
from mlxstacks.data.special_text import special_tokens
from mlxstacks.errors import InputError
from mlxstacks.files.disk import user_path
from mlxstacks.files.store import Store
from mlxstacks.grow.settings import GrowSettings
from mlxstacks.routing.settings import LabelledSource
from mlxstacks.studies.route.data import OTHERS, routed_domains
from mlxstacks.studies.stack.plan import stored_data
from mlxstacks.studies.train.rewards import load_function, own_function

# Fewer cannot be held out from training and still judge it.
LEAST_ROWS = 20


def write_rows(settings: GrowSettings, count: int, path: Path, tokenizer: Any, store: Store) -> int:
    """Ask for `count` rows of the new domain and write those that can be used to `path`, a JSON
    object a line; returns how many were left out because they are the store's.

    Raises: InputError: the source cannot be read, a row fits no format, too few rows are left.
    """
    name, known = str(settings.domain), _row_ids(store)
    if settings.provider is None:
        source, cap = user_path(str(settings.data)) / f"{name}.jsonl", count + len(known)
    else:
        source, cap = path.with_suffix(".given"), None
        _write(source, _provided(settings.provider, name, count))
    data = DomainDataSettings(sources=(SourceSettings(path=source.name, cap=cap),))
    examples, _ = read_source(data.sources[0], data, source.parent, special_tokens(tokenizer))
    rows = {row_id: each.record for row_id, each in examples.items() if row_id not in known}
    if settings.provider is not None:
        source.unlink()
    if len(rows) < min(LEAST_ROWS, count):
        raise InputError(
            f"{name}: {len(rows)} of {len(examples)} different rows are new to the store; at least "
            f"{LEAST_ROWS} are needed that none of its domains was trained or judged with"
        )
    _write(path, [rows[row_id] for row_id in sorted([*rows][:count])])
    return len(examples) - len(rows)


def _provided(provider: str, name: str, count: int) -> list[Mapping[str, Any]]:
    own = own_function(provider)
    if own is None:
        raise InputError(f"provider {provider!r}: give FILE.py:FUNCTION")
    function = load_function(*own, "provider")
    try:
        rows = list(islice(function(name, count), count))
    except Exception as error:
        raise InputError(
            f"provider {provider} raises {type(error).__name__}: {error}; it is called with a "
            "domain's name and a number of rows, and returns rows"
        ) from error
    if strange := [row for row in rows if not isinstance(row, Mapping)]:
        raise InputError(f"provider {provider}: {strange[0]!r:.80} is no row, a mapping of columns")
    if not rows:
        raise InputError(f"provider {provider}: no rows of {name}")
    return rows


def _write(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    try:
        lines = [json.dumps(row, allow_nan=False) for row in rows]
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"a row is no JSON: {error}") from None
    path.write_text("".join(f"{line}\n" for line in lines), encoding="ascii")


def _row_ids(store: Store) -> set[str]:
    """Of every row that a domain of the store was trained or judged with."""
    splits = [store.read_json(d.split) for d in store.manifest.domains if d.split is not None]
    return {row_id for split in splits for side in split.values() for row_id in side}


# --- rows of the domains that are there -----------------------------------------------------------


def known_sources(settings: GrowSettings, store: Store) -> list[LabelledSource]:
    """Prompts of the store's domains by label: `routing_data`, else what they were trained with.

    Raises: InputError: a file of a domain is not there.
    """
    domains = routed_domains(store)
    if settings.routing_data is None:
        return [
            LabelledSource(domains=(name,), data=_stored(settings, store, name)) for name in domains
        ]
    root = user_path(settings.routing_data)
    sources = []
    for path in sorted(root.glob("*.jsonl")):
        label = () if path.stem == OTHERS else tuple(path.stem.split("+"))
        if {*label} <= {*domains}:
            sources.append(labelled(label, path))
    if missing := {*domains} - {name for source in sources for name in source.domains}:
        raise InputError(f"{root}: no NAME.jsonl for {', '.join(sorted(missing))}")
    return sources


def _stored(settings: GrowSettings, store: Store, name: str) -> DomainDataSettings:
    try:
        return stored_data(store, store.domain_named(name), settings.stored_data)
    except InputError as error:
        raise InputError(f"{name}: {error}".replace("--data", "--stored-data")) from None


def labelled(label: tuple[str, ...], path: Path) -> LabelledSource:
    """A file of prompts of these domains."""
    source = SourceSettings(path=str(path.absolute()))
    return LabelledSource(domains=label, data=DomainDataSettings(sources=(source,)))
