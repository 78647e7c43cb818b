"""Small stores for the tests of the store: random stacks, domains with losses and a matrix."""

from collections.abc import Sequence
from pathlib import Path

import mlx.core as mx

from mlxstacks.files.manifest import DomainRecord, Manifest, stack_name
from mlxstacks.files.stack_file import ProjectionShape, StackHeader, StorageDtype
from mlxstacks.files.store import Store

BASE = "full:" + "b" * 64
PATHS = {
    "model.layers.0.self_attn.q_proj": ProjectionShape("linear", 2, 3, 1, 4.0, 16, 24),
    "model.layers.0.mlp.switch_mlp.up_proj": ProjectionShape("shared", 2, 3, 1, 4.0, 16, 8, 5),
    "model.layers.1.mlp.switch_mlp.up_proj": ProjectionShape("per_expert", 2, 3, 1, 4.0, 16, 8, 5),
    "model.layers.1.self_attn.q_proj": ProjectionShape(
        "linear", 2, 3, 2, 2.0, 16, 24, latent_dim=4
    ),
}
ONE_EXPERT = {
    "model.layers.0.self_attn.q_proj": ProjectionShape("linear", 1, 3, 1, 1.7, 16, 24),
    "model.layers.1.mlp.switch_mlp.up_proj": ProjectionShape("per_expert", 1, 3, 1, 1.7, 16, 8, 5),
}


def header(
    domain: str = "chat",
    number: int = 1,
    storage: StorageDtype = "float16",
    projections: dict[str, ProjectionShape] | None = None,
    **other: object,
) -> StackHeader:
    return StackHeader(
        name=stack_name(domain, number),
        domain=domain,
        round=number,
        base_model="tiny",
        base_fingerprint=str(other.pop("base_fingerprint", BASE)),
        projections=PATHS if projections is None else projections,
        alpha=16.0,
        scale_rule="rslora",
        storage=storage,
        **other,  # type: ignore[arg-type]
    )


def tensors(head: StackHeader, seed: int = 0) -> dict[str, mx.array]:
    """Random numbers in the shapes and dtypes that a header asks for."""
    dtypes = {"F16": mx.float16, "BF16": mx.bfloat16, "F32": mx.float32}
    names = head.tensors()
    keys = mx.random.split(mx.random.key(seed), len(names))
    return {
        name: mx.random.normal(shape, key=key).astype(dtypes[dtype])
        for key, (name, (dtype, shape)) in zip(keys, names.items(), strict=True)
    }


def add_domain(
    store: Store,
    name: str,
    rounds: int = 2,
    seed: int = 0,
    projections: dict[str, ProjectionShape] | None = None,
) -> DomainRecord:
    """Train nothing, but leave what a training would: stacks, a split, losses, matrix rows."""
    with store.change("train", domain=name) as change:
        records = []
        for number in range(1, rounds + 1):
            head = header(name, number, projections=projections)
            loss = 2.0 / number
            record = change.add_stack(tensors(head, seed + number), head, loss, loss / 2)
            records.append(record)
        split = change.add_json("splits", name, {"train": ["0", "1"], "validation": ["2"]})
        domain = DomainRecord(name, True, tuple(records), (2.0, 1.0), 1.0, {"rank": 3}, split=split)
        change.manifest = with_matrix(change.manifest.with_domain(domain), name)
    return domain


def with_matrix(manifest: Manifest, trained: str) -> Manifest:
    """The rows that training this domain adds, in all modes."""
    from dataclasses import replace

    seen = [domain.name for domain in manifest.domains]
    row = {name: 1.0 + 0.25 * index for index, name in enumerate(seen)}
    matrix = {mode: dict(manifest.matrix.get(mode, {})) for mode in ("ungated", "prefix")}
    for mode in matrix:
        matrix[mode][trained] = row
    return replace(manifest, matrix=matrix)  # type: ignore[arg-type]


def make_store(
    path: Path, domains: Sequence[str] = ("chat", "code", "math"), rounds: int = 2
) -> Store:
    store = Store.create(path, "tiny", BASE)
    for index, name in enumerate(domains):
        add_domain(store, name, rounds, seed=10 * index)
    return store


def tree(path: Path) -> dict[str, bytes]:
    """Every file below a directory and its bytes, but the log and the lock."""
    return {
        p.relative_to(path).as_posix(): p.read_bytes()
        for p in sorted(path.rglob("*"))
        if p.is_file() and p.name not in ("log.jsonl", "previous.json", ".lock")
    }
