"""A tiny store with a router, and prompts by label, for what asks a routed model."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mlxstacks.files.router_file import write_router
from mlxstacks.files.store import Store
from tests.files.router_cases import router_header, router_tensors, set_router
from tests.studies.stack_analysis_cases import write_store
from tests.studies.stack_cases import domain_rows
from tests.studies.train_cases import write_rows, write_tiny_model

# Hidden size of the tiny model.
WIDTH = 64


class Places(NamedTuple):
    """data: alpha, beta, alpha+beta, others; unseen: gamma."""

    model: Path
    store: Path
    data: Path
    unseen: Path


def write_places(directory: Path, **header: Any) -> Places:
    """Two domains of random stacks, a random router; header: changes to the router's."""
    model = write_tiny_model(directory / "model")
    store = write_store(directory / "store", model, directory / "trained", {"alpha": 2, "beta": 1})
    set_router(store, input_dims=WIDTH, **header)
    data = directory / "routing"
    for name in ("alpha", "beta"):
        write_rows(data / f"{name}.jsonl", domain_rows(name, 12))
    mixed = [
        {
            "prompt": f"{a['prompt']} and {b['prompt']}",
            "completion": f"{a['completion']} {b['completion']}",
        }
        for a, b in zip(domain_rows("alpha", 6, 20), domain_rows("beta", 6, 20), strict=True)
    ]
    write_rows(data / "alpha+beta.jsonl", mixed)
    write_rows(data / "others.jsonl", [{"text": f"nobody asks {n}"} for n in range(4)])
    unseen = write_rows(directory / "gamma.jsonl", domain_rows("gamma", 5))
    return Places(model, directory / "store", data, unseen)


def write_routers(
    places: Places, directory: Path, seeds: Sequence[int], **header: Any
) -> list[Path]:
    """Routers of the store beside it."""
    store, paths = Store.open(places.store), []
    head = router_header(store, input_dims=WIDTH, **header)
    directory.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        paths.append(directory / f"{seed}.safetensors")
        write_router(paths[-1], router_tensors(head, seed), head)
    return paths
