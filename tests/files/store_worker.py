"""Children of the process tests of the store. Run as `python store_worker.py ROLE STORE ...`.

loop    forks writers on request that add and remove domains and set routers for ever; a line on
        stdin starts one, its pid is the answer; the test kills it
hold    takes the writers' lock, says `ready`, waits for a line
read    opens the store again and again, reads every stack it names, until a line comes; prints
        how many states it saw
"""

import os
import random
import select
import sys
from pathlib import Path

from mlxstacks.files.settings import StacksGcSettings, StacksRemoveSettings
from mlxstacks.files.store import Store
from mlxstacks.files.store_commands import collect_garbage, remove_domain
from tests.files.router_cases import set_router
from tests.files.store_cases import ONE_EXPERT, add_domain

NAMES = ("chat", "code", "math")


def one_change(path: Path, chance: random.Random) -> None:
    """Add the next domain, or remove the last one, train a router, or collect garbage."""
    store = Store.open(path)
    known = [domain.name for domain in store.manifest.domains]
    what = chance.random()
    if what < 0.1:
        collect_garbage(StacksGcSettings(store_path=str(path), grace_seconds=3600))
    elif what < 0.3 and known:
        set_router(store)
    elif len(known) < len(NAMES) and (not known or chance.random() < 0.6):
        name = NAMES[len(known)]
        add_domain(store, name, seed=10 * len(known), projections=ONE_EXPERT)
    else:
        remove_domain(StacksRemoveSettings(store_path=str(path), domain=known[-1]))


def loop(path: Path) -> None:
    for line in sys.stdin:
        # MLX is imported, but nothing was computed: its threads would not be in a fork
        pid = os.fork()
        if pid == 0:
            chance = random.Random(int(line))
            while True:
                one_change(path, chance)
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("dead", flush=True)


def hold(path: Path) -> None:
    with Store.open(path).change():
        print("ready", flush=True)
        sys.stdin.readline()


def read(path: Path) -> None:
    seen: set[str] = set()
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        store = Store.open(path)
        for record in store.enabled_stacks():
            stack = store.read_stack(record)
            assert stack.header.name == record.name
        for domain in store.manifest.domains:
            assert domain.split is not None
            assert store.read_json(domain.split)["train"] == ["0", "1"]
        seen.add(store.manifest.checksum)
    print(len(seen), flush=True)


if __name__ == "__main__":
    {"loop": loop, "hold": hold, "read": read}[sys.argv[1]](Path(sys.argv[2]))
