"""Frozen stacks of random numbers, for models and stores that are analysed in tests."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import mlx.core as mx

from mlxstacks import base_model
from mlxstacks.data import DomainDataSettings, read_domains, split_ids
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.manifest import DomainRecord, StackRecord
from mlxstacks.files.store import Change, Store
from mlxstacks.layers.adapted import Dims
from mlxstacks.layers.freezing import stack_tensors
from mlxstacks.layers.moe_lora import MoELoRADelta
from mlxstacks.layers.packed import FrozenStack, StackShape
from mlxstacks.layers.selection import StackId
from mlxstacks.layers.settings import StackSettings, TargetSettings
from mlxstacks.layers.stack_files import header_of
from mlxstacks.layers.targets import Target, find_targets
from tests.studies.train_cases import chat_rows, write_rows


def random_part(
    dims: Dims, settings: StackSettings, name: str, domain: str, seed: int
) -> FrozenStack:
    """One projection of a stack, as training might leave it: nothing in it is zero."""
    delta = MoELoRADelta(dims, settings, mx.random.key(seed))
    shape = StackShape(
        delta.form, settings.num_experts, settings.rank, settings.top_k, settings.scale
    )
    keys = mx.random.split(mx.random.key(seed + 1000), 2)
    lora_b = 0.05 * mx.random.normal(delta.lora_b.shape, key=keys[0])
    router = None
    if delta.has_router:
        router = 0.3 * mx.random.normal(delta.router.shape, key=keys[1])
    cast = [value.astype(mx.float16) for value in (delta.lora_a, lora_b)]
    return FrozenStack(StackId(name, domain), shape, cast[0], cast[1], router)


def write_store(path: Path, model_path: Path, data: Path, rounds: Mapping[str, int]) -> Store:
    """A store as training leaves it: domain -> number of stacks, of random numbers.

    data: gets NAME.jsonl for each domain, of words of its own.
    """
    checkpoint = open_checkpoint(model_path)
    model, tokenizer, _ = base_model.load(model_path, lazy=True)
    targets = find_targets(model, TargetSettings(projections=("down_proj", "q_proj", "in_proj_z")))
    store = Store.create(path, "tiny", fingerprint(checkpoint))
    for place, name in enumerate(rounds):
        write_rows(data / f"{name}.jsonl", chat_rows(40, place))
    settings = {
        name: DomainDataSettings(sources=(f"{name}.jsonl",), validation_rows=8) for name in rounds
    }
    read = read_domains(settings, data, tokenizer=tokenizer)
    for place, (name, count) in enumerate(rounds.items()):
        with store.change("trained", domain=name) as change:
            stacks = tuple(
                _add_stack(change, targets, name, number, 10 * place + number)
                for number in range(1, count + 1)
            )
            record = DomainRecord(
                name=name,
                enabled=True,
                stacks=stacks,
                losses=(2.0, *(1.5 - 0.1 * number for number in range(count))),
                data={"settings": settings[name].model_dump(mode="json")},
                split=change.add_json("splits", name, split_ids(read[name])),
                protected={"captured_energy_mean": 0.5, "capacity_used_highest": 0.25,
                           "projections": {}} if place else None,
            )  # fmt: skip
            row = dict.fromkeys(list(rounds)[: place + 1], 1.0 + 0.1 * place)
            matrix = {**change.manifest.matrix}
            matrix["ungated"] = {**matrix.get("ungated", {}), name: row}
            change.manifest = replace(change.manifest.with_domain(record), matrix=matrix)
    return store


def _add_stack(
    change: Change, targets: Sequence[Target], domain: str, number: int, seed: int
) -> StackRecord:
    settings = StackSettings(rank=2)
    name = f"{domain}-r{number}"
    parts = {t.path: random_part(t.dims, settings, name, domain, seed) for t in targets}
    header = header_of(
        parts,
        {t.path: t.dims for t in targets},
        settings,
        round_number=number,
        base_model=change.manifest.base_model,
        base_fingerprint=change.manifest.base_fingerprint,
    )
    return change.add_stack(stack_tensors(parts), header, 2.0, 1.5)
