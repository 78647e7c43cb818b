"""Stacks behind shared latent projections beside stacks of full width: bytes, time to load.

    python -m benchmarks.latent_stacks --model DIR [--latent-dim 72] [--rounds 5]

DIR: a model, of which every projection gets a stack of random numbers (E=4, K=2, rank 16, as
published). For 1, 4 and 10 stacks: bytes on disk, bytes in memory and seconds to load and pack them
all, the files in the page cache, the two forms in turn. The shared projections are paid once and
count from the first stack on. Last, the number of stacks from which the latent form is smaller.
"""

import argparse
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from benchmarks.timing import spread
from mlxstacks.base_model import load_stored
from mlxstacks.files.manifest import DomainRecord
from mlxstacks.files.stack_file import ProjectionShape, StackHeader
from mlxstacks.files.store import Store
from mlxstacks.layers.latent import full_parameters, latent_pairs, latent_parameters
from mlxstacks.layers.stack_files import pair_tensors
from mlxstacks.layers.targets import Target, find_targets
from mlxstacks.routing.resident import Resident

COUNTS = (1, 4, 10)
EXPERTS, RANK = 4, 16
BASE = "b" * 64  # a fingerprint; no stack here is used with another model


def make_store(path: Path, targets: list[Target], latent_dim: int | None) -> Store:
    """A store of random stacks, one a domain."""
    dims = {t.path: t.dims for t in targets}
    shapes = {
        path: ProjectionShape(
            "linear", EXPERTS, RANK, 2, 4.0, d.input_dims, d.output_dims, latent_dim=latent_dim
        )
        for path, d in dims.items()
    }
    store = Store.create(path, "bench", BASE)
    for index in range(max(COUNTS)):
        name = f"d{index}"
        header = StackHeader(f"{name}-r1", name, 1, "bench", BASE, shapes, 16.0, "rslora")
        with store.change() as change:
            if latent_dim is not None:
                pairs = latent_pairs(dims, latent_dim, BASE)
                shared = change.add_shared("latent", pair_tensors(pairs))
                header = replace(header, shared_sha256=shared.sha256)
            keys = iter(mx.random.split(mx.random.key(index), len(header.tensors())))
            tensors = {
                key: (0.02 * mx.random.normal(shape, key=next(keys))).astype(
                    mx.float32 if dtype == "F32" else mx.float16
                )
                for key, (dtype, shape) in header.tensors().items()
            }
            record = change.add_stack(tensors, header)
            change.manifest = change.manifest.with_domain(DomainRecord(name, True, (record,)))
    return store


def load(model: nn.Module, store: Store, count: int) -> tuple[float, int]:
    """Seconds to load and pack so many stacks from nothing, and the bytes that they take."""
    resident = Resident(model, store)
    started = time.perf_counter()
    lease = resident.lease({f"d{index}": 1.0 for index in range(count)})
    lease.activate()
    seconds = time.perf_counter() - started
    nbytes = resident.stats.resident_bytes
    lease.close()
    return seconds, nbytes


def disk_bytes(store: Store, count: int) -> int:
    stacks = [record.file for record in store.manifest.stacks[:count]]
    return sum(file.nbytes for file in (*stacks, *store.manifest.shared))


def measure(model: nn.Module, stores: Mapping[str, Store], rounds: int) -> None:
    print("| stacks | form | MB on disk | MB in memory | ms to load (p20 to p80) |")
    print("|---|---|---|---|---|")
    for count in COUNTS:
        seconds: dict[str, list[float]] = {form: [] for form in stores}
        sizes = {}
        for turn in range(rounds + 1):
            for form in [*stores][:: 1 if turn % 2 else -1]:
                taken, sizes[form] = load(model, stores[form], count)
                if turn:  # the first fills the page cache
                    seconds[form].append(1e3 * taken)
        for form, store in stores.items():
            ms = spread(seconds[form])
            print(
                f"| {count} | {form} | {disk_bytes(store, count) / 1e6:.1f} "
                f"| {sizes[form] / 1e6:.1f} | {ms.median:.0f} ({ms.p20:.0f} to {ms.p80:.0f}) |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--latent-dim", type=int, default=72)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    mx.set_default_device(mx.cpu)
    model = load_stored(Path(options.model))[0]
    targets = find_targets(model)
    with tempfile.TemporaryDirectory() as directory:
        stores = {
            "full": make_store(Path(directory) / "full", targets, None),
            "latent": make_store(Path(directory) / "latent", targets, options.latent_dim),
        }
        measure(model, stores, options.rounds)
        full, latent = (disk_bytes(s, 2) - disk_bytes(s, 1) for s in stores.values())
        shared = disk_bytes(stores["latent"], 0)
    dims = [t.dims for t in targets]
    trained = full_parameters(dims, EXPERTS, RANK)
    trained_latent = latent_parameters(dims, EXPERTS, RANK, options.latent_dim)
    print()
    print(f"Trained for a stack: {trained:,} numbers, latent {trained_latent:,}.")
    sizes = "{:.1f} MB a stack; latent {:.1f}, and {:.1f} shared".format(
        *(size / 1e6 for size in (full, latent, shared))
    )
    print(f"On disk: {sizes}: latent stacks are smaller from {ceil(shared / (full - latent))} on.")


if __name__ == "__main__":
    main()
