"""`mlxstacks stacks analyse`: what the frozen stacks of a store do, in numbers, tables and plots.

The store is only read. Weights are looked at domain by domain, without a model; unless that is all
that is asked for, the domains' validation rows then go through the base with all stacks on. They
are the rows that were held out when the domain was trained: the store has their ids, and the data
settings of the domain, which say where they come from.
"""

import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlxstacks import base_model
from mlxstacks.data import DomainDataSettings, encode_examples, read_domains
from mlxstacks.errors import InputError
from mlxstacks.files.disk import user_path
from mlxstacks.files.outputs import check_target, staged_directory
from mlxstacks.files.settings import StacksAnalyseSettings
from mlxstacks.files.store import Store, find_base
from mlxstacks.files.store_files import LOG
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.layers.packed import FrozenStack
from mlxstacks.layers.stack_files import SharedPairs, parts_of, serve
from mlxstacks.studies.stack.analysis_report import (
    ABOUT,
    blocks,
    domain_table,
    left_out,
    outcome,
    verdict,
)
from mlxstacks.studies.stack.geometry import (
    Directions,
    Spectrum,
    cosines_json,
    data_directions,
    shares_json,
    spectra_json,
    weights_of,
)
from mlxstacks.studies.stack.plan import stored_data
from mlxstacks.studies.stack.report import ordered_matrix, stored_json
from mlxstacks.studies.stack.routing import Prompt, routing_json, run_prompts
from mlxstacks.study.progress import WholeProgress
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import plain
from mlxstacks.study.write import environment, write_result
from mlxstacks.training.modes import prepare_base

# Where an analysis writes and reads, not what it finds.
# A look at the weights of a domain counts as so many of its prompts.
_PROMPTS_OF_WEIGHTS = 8
_NOT_OF_THE_RESULT = {"force", "save_path"}
_OF_A_DOMAIN = ("name", "enabled", "origin", "stacks", "parameters", "bytes", "losses")
Progress = Callable[..., None]


def run(
    settings: StacksAnalyseSettings, *, dry_run: bool = False, progress: Progress | None = None
) -> Result:
    """Look, and write result and plots to `settings.save_path`.

    Raises: InputError: no store, model or target, or no enabled stack. StoreError: a damaged file,
        another base.
    """
    if settings.store_path is None:
        raise InputError(
            "stacks analyse needs a store: give its directory (`mlxstacks stack` makes one)"
        )
    if settings.save_path is None:
        raise InputError("stacks analyse needs save_path")
    started = time.monotonic()
    target = user_path(settings.save_path)
    store = Store.open(settings.store_path)
    check_target(target, force=settings.force, inputs=[store.path])
    if not store.enabled_stacks():
        raise InputError(f"{store.path}: holds no enabled stack; there is nothing to look at")
    shown = settings.model_dump(mode="json", exclude=_NOT_OF_THE_RESULT)
    curves = curves_of(store.path)
    data: dict[str, Any] = {
        "store_path": str(store.path),
        "settings_sha256": json_sha256(shown),
        "domains": [
            {
                **{key: value for key, value in stored_json(record).items() if key in _OF_A_DOMAIN},
                "curve": curves.get(record.name, []),
                # Captured energy and capacity used; by projection it is in the store's manifest.
                "protected": {
                    key: value
                    for key, value in (record.protected or {}).items()
                    if key != "projections"
                }
                or None,
            }
            for record in store.manifest.domains
        ],
        "matrix": ordered_matrix(store.manifest),
    }
    planned = Result(
        **ABOUT, status="planned", settings=shown, data=plain(data), directory=str(target),
        blocks=(domain_table(data["domains"]),),
    )  # fmt: skip
    if dry_run:
        return planned
    notes: list[str] = []
    geometry, routing = _look(settings, store, notes, progress)
    data = plain(data | {"geometry": geometry, "routing": routing})
    notes += left_out(data) if settings.plots else []
    result = planned.model_copy(update={
        "status": "done", "outcome": outcome(geometry), "verdict": verdict(geometry, routing),
        "environment": environment(time.monotonic() - started), "data": data,
        "blocks": tuple(blocks(data)), "notes": tuple(notes),
    })  # fmt: skip
    formats = [settings.plot_format] if settings.plots else []
    with staged_directory(target, force=settings.force, inputs=[store.path]) as directory:
        return write_result(result, directory, target, formats)


def _look(
    settings: StacksAnalyseSettings, store: Store, notes: list[str], progress: Progress | None
) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """(geometry, routing); of the weights one domain in memory at a time."""
    k, pairs = settings.directions, SharedPairs(store)
    spectra: dict[str, dict[str, Spectrum]] = {}  # by stack and path
    from_weights: dict[str, Directions] = {}  # by domain and path
    domains = [record for record in store.manifest.domains if record.enabled and record.stacks]
    sizes = len(domains) * _PROMPTS_OF_WEIGHTS, len(domains) * settings.prompts
    whole = WholeProgress(progress, sizes[0] if settings.weights_only else sum(sizes))
    of_weights = whole.part(sizes[0], "weights")
    for number, record in enumerate(domains, start=1):
        stacks: dict[str, dict[str, FrozenStack]] = {}
        for stack in record.stacks:
            file = store.read_stack(stack)
            stacks[stack.name] = parts_of(file, pairs.of(file.header))
        of_domain, from_weights[record.name] = weights_of(stacks, k, settings.seed)
        spectra |= of_domain
        of_weights(number, len(domains))
    geometry: dict[str, Any] = {
        "spectra": spectra_json(spectra, {s.name: s.domain for s in store.manifest.stacks}),
        "weights": cosines_json(from_weights, k),
        "data": None,
        "delta_energy": None,
    }
    if settings.weights_only:
        return geometry, None
    model, tokenizer = load_served(settings, store, notes)
    prompts = domain_prompts(settings, store, tokenizer, notes)
    if not prompts:
        notes.append("Nothing was measured on data: no domain's rows are to be had.")
        return geometry, None
    passes = run_prompts(model, prompts, whole.part(sizes[1], "prompts"))
    from_data, shares = data_directions(passes.deltas, k)
    geometry |= {"data": cosines_json(from_data, k), "delta_energy": shares_json(shares, k)}
    if not passes.routing:
        notes.append("No routing: every stack has one expert.")
        return geometry, None
    order = [stack.name for stack in store.enabled_stacks()]
    routing = tuple(sorted(passes.routing, key=lambda stack: order.index(stack.name)))
    return geometry, routing_json(replace(passes, routing=routing), settings.seed)


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


def curves_of(store: Path) -> dict[str, list[dict[str, Any]]]:
    """Domain -> [{round, step, validation_loss}], by round and step; empty without a log.

    Lines of other events are passed over, as is what a killed process left half written. Of a round
    that was trained again the last training counts.
    """
    try:
        lines = (store / LOG).read_bytes().splitlines()
    except FileNotFoundError:
        return {}
    curves: dict[str, dict[tuple[int, int], float]] = {}  # domain -> (round, step) -> loss
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if not isinstance(event, dict) or event.get("event") != "validation":
            continue
        match [event.get(key) for key in ("domain", "round", "step", "validation_loss")]:
            case [str(domain), int(number), int(step), float(loss)]:
                curve = curves.setdefault(domain, {})
                if step == 0:  # trained again: what later steps said before no longer counts
                    for key in [key for key in curve if key >= (number, 0)]:
                        del curve[key]
                curve[number, step] = loss
    return {
        domain: [
            {"round": number, "step": step, "validation_loss": loss}
            for (number, step), loss in sorted(curve.items())
        ]
        for domain, curve in curves.items()
    }
