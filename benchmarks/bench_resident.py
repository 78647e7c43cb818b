"""Loading stacks from disk beside plain reading, and switching beside decoding.

    python -m benchmarks.bench_resident [--rounds 9] [--directory DIR]

Reads, of one stack's file (llama of 4 layers, hidden 1024; E=4, rank 16 at every projection):

    plain            like dd: one read after another into one buffer of 4 MB
    load             as `Resident` reads a file again: arrays in memory
    first load       the same with hash, header and numbers checked, as once a process

cold: the file's pages dropped before (posix_fadvise DONTNEED; Linux). warm: in the page cache.
Arms take turns; a round's ratio is taken within the round. Bar: load >= 0.8 of plain's bandwidth.
From the page cache that compares a copy into one warm buffer, which keeps nothing, with filling
memory that is new to the process, whose pages the system has to clear; `plain, new memory` reads
into such memory too, and is the plain read that does what a load has to do.

Switches, beside one token of the same model in float32 (bench_decode's, so with the stack active):

    switch, packed   another set that is packed already: a lease, activated
    switch, anew     another set of stacks in memory, packed then (four sets take turns)
    switch, read     a set that is read for it, hashed before

Bar: a resident switch below one token. Process time beside wall time, for busy machines.
"""

import argparse
import json
import mmap
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn

from benchmarks.bench_decode import CPU, build, decode
from benchmarks.timing import machine, spread
from mlxstacks.files.manifest import DomainRecord, StackRecord
from mlxstacks.files.stack_file import ProjectionShape, StackHeader
from mlxstacks.files.store import Store
from mlxstacks.layers.targets import find_targets
from mlxstacks.routing.resident import Resident

DOMAINS = ("a", "b", "c", "d")
CHUNK = 4 << 20
BAR = 0.8
Times = dict[str, list[tuple[float, float]]]


def make_store(path: Path, model: nn.Module) -> Store:
    """Four domains of one stack of random numbers."""
    shapes = {
        t.path: ProjectionShape("linear", 4, 16, 2, 4.0, t.dims.input_dims, t.dims.output_dims)
        for t in find_targets(model)
    }
    store = Store.create(path, "bench", "b" * 64)
    for index, domain in enumerate(DOMAINS):
        header = StackHeader(f"{domain}-r1", domain, 1, "bench", "b" * 64, shapes, 16.0, "rslora")
        key = mx.random.key(index)
        tensors = {}
        for name, (dtype, shape) in header.tensors().items():
            key, draw = mx.random.split(key)
            kind = mx.float32 if dtype == "F32" else mx.float16
            tensors[name] = (0.02 * mx.random.normal(shape, key=draw)).astype(kind)
        with store.change() as change:
            record = change.add_stack(tensors, header)
            manifest = change.manifest.with_domain(DomainRecord(domain, True, (record,)))
            change.manifest = manifest
    return store


def read_plainly(path: Path, buffer: bytearray | None) -> None:
    """Every byte of a file, into one small buffer, or into memory that is new."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if buffer is not None:
            while os.readv(descriptor, [buffer]):
                pass
            return
        size = os.fstat(descriptor).st_size
        # untouched pages, as malloc gives; bytearray would write to them first
        with mmap.mmap(-1, size) as whole, memoryview(whole) as view:
            done = 0
            while done < size:
                done += os.preadv(descriptor, [view[done:]], done)
    finally:
        os.close(descriptor)


def drop_pages(path: Path) -> bool:
    """Forget the file's pages; False where the system cannot."""
    if not hasattr(os, "posix_fadvise"):
        return False
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
    return True


def clocked(work: Callable[[], object]) -> tuple[float, float]:
    wall, process = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - process


def measure(
    arms: Mapping[str, Callable[[], object]], rounds: int, before: Callable[[], object]
) -> Times:
    """(wall, process) seconds by arm and round, in rotating order; a first round does not count."""
    taken: Times = {name: [] for name in arms}
    names = list(arms)
    for index in range(rounds + 1):
        start = index % len(names)
        for name in names[start:] + names[:start]:
            before()
            spent = clocked(arms[name])
            if index:
                taken[name].append(spent)
    return taken


def measure_reads(store: Store, record: StackRecord, rounds: int) -> dict[str, object]:
    path = store.path / record.file.file
    buffer = bytearray(CHUNK)
    known = store.read_index(record)
    arms = {
        "plain": lambda: read_plainly(path, buffer),
        "plain, new memory": lambda: read_plainly(path, None),
        "load": lambda: store.read_stack(record, known=known),
        "first load": lambda: store.read_stack(record),
    }
    result: dict[str, object] = {"file_bytes": record.file.nbytes}
    print("| read | MB/s wall | MB/s process | share of plain, wall (p20 to p80) | of plain, new |")
    print("|---|---|---|---|---|")
    for state in ("warm", "cold"):
        if state == "cold" and not drop_pages(path):
            result[state] = "not measured: this system cannot drop a file's pages"
            continue
        before = (lambda: drop_pages(path)) if state == "cold" else (lambda: None)
        result[state] = _rates(measure(arms, rounds, before), record.file.nbytes, state)
    return result


def _rates(taken: Times, nbytes: int, state: str) -> dict[str, dict[str, float]]:
    rows = {}
    for name, times in taken.items():
        wall, process = (nbytes / 1e6 / spread([t[i] for t in times]).median for i in (0, 1))
        share, kept = (
            spread([p[0] / t[0] for p, t in zip(taken[beside], times, strict=True)])
            for beside in ("plain", "plain, new memory")
        )
        rows[name] = {
            "wall_mb_per_second": wall, "process_mb_per_second": process,
            "share_of_plain": share.median, "p20": share.p20, "p80": share.p80,
            "share_of_plain_new_memory": kept.median,
        }  # fmt: skip
        print(
            f"| {state}: {name} | {wall:.0f} | {process:.0f} | {share.median:.2f} "
            f"({share.p20:.2f} to {share.p80:.2f}) | {kept.median:.2f} |"
        )
    return rows


def measure_switches(store: Store, model: nn.Module, rounds: int, tokens: int) -> dict[str, object]:
    resident = Resident(model, store, dtype=mx.float32)
    alone = [{name: 1.0} for name in DOMAINS]
    for weights in alone:
        resident.lease(weights).close()
    turn = 0

    def switch_packed() -> None:
        nonlocal turn
        turn += 1
        with resident.lease(alone[turn % 2]) as lease:
            assert not lease.loaded

    def switch_anew() -> None:
        nonlocal turn
        turn += 1
        key = (DOMAINS[turn % 4], DOMAINS[(turn + 1) % 4])
        with fresh.lease(dict.fromkeys(key, 1.0)) as lease:
            assert not lease.loaded

    def switch_read() -> None:
        nonlocal turn
        turn += 1
        with other.lease(alone[turn % 4]) as lease:
            assert lease.loaded

    # all four single sets stay leased, so only the pair is packed, dropped and packed again
    size = resident.stats.resident_bytes
    fresh = Resident(model, store, dtype=mx.float32, budget_bytes=int(1.6 * size))
    held = [fresh.lease(weights) for weights in alone]
    other = Resident(model, store, dtype=mx.float32, budget_bytes=int(0.3 * size))
    token = resident.lease(alone[0])

    def one_token() -> None:
        token.activate()
        spent.append(decode(model, tokens))

    spent: list[tuple[float, float]] = []
    arms = {"switch, packed": switch_packed, "switch, anew": switch_anew,
            "switch, read": switch_read, "token": one_token}  # fmt: skip
    taken = measure(arms, rounds, lambda: None)
    taken["token"] = spent[1:]
    for lease in (*held, token):
        lease.close()
    rows = {}
    print("| switch | wall ms | process ms | share of a token, wall | process |")
    print("|---|---|---|---|---|")
    for name, times in taken.items():
        wall, process = (1e3 * spread([t[i] for t in times]).median for i in (0, 1))
        shares = [
            spread([t[i] / one[i] for t, one in zip(times, taken["token"], strict=True)]).median
            for i in (0, 1)
        ]
        rows[name] = {"wall_ms": wall, "process_ms": process, "tokens_wall": shares[0],
                      "tokens_process": shares[1]}  # fmt: skip
        print(f"| {name} | {wall:.2f} | {process:.2f} | {shares[0]:.3f} | {shares[1]:.3f} |")
    return {"set_bytes": size // 4, **rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=4, help="decoded for one token's time")
    parser.add_argument("--directory", help="where the store is made; default: a temporary one")
    options = parser.parse_args()
    mx.set_default_device(mx.cpu)
    model = build(argparse.Namespace(model="dense", **CPU), mx.float32)
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        store = make_store(Path(directory) / "store", model)
        reads = measure_reads(store, store.manifest.stacks[0], options.rounds)
        switches = measure_switches(store, model, options.rounds, options.tokens)
    result = {"reads": reads, "switches": switches, "bar": BAR}
    print(json.dumps({"benchmark": "resident", "machine": machine(), "result": result}))


if __name__ == "__main__":
    main()
