"""A session of prompts from several domains, answered as `chat --routed` answers them.

    python -m benchmarks.routed_session [--model MODEL] [--store-path STORE] [--data DIR]

Held-out prompts of the store's domains (those of one domain alone; neither stacks nor router took
a step on them), in runs: with probability 1/RUN the next prompt is of another domain, so runs have
a geometric length of RUN on average. For each mean run and each budget of stacks a fresh engine
answers all of them, every prompt a conversation of its own:

    hit rate     of the prompts that are routed to a stack, how many found all their stacks loaded
    by chance    the same, had every prompt been routed to its label alone (least recently used)
    router       one pass of the base over the prompt, and the router
    load         reading, checking (at first) and packing what was missing, a stack
    right        the routed set is the label, or holds it

The hit rate is of the session more than of the router: with runs of 1 and S of D stacks it is near
(S - 1) / (D - 1).
"""

import argparse
import json
import random
import statistics
import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.timing import machine
from mlxstacks.files.store import Store
from mlxstacks.nano.exports import with_nano
from mlxstacks.recipe.on_nano import route as route_on_nano
from mlxstacks.routing.engine import RoutedModel, open_routed, sampling_of
from mlxstacks.routing.outcomes import RouterExample
from mlxstacks.routing.resident import Resident
from mlxstacks.routing.router_training import group_key
from mlxstacks.routing.settings import AnswerSettings, OutcomeSettings
from mlxstacks.studies.route.data import read_examples, routed_domains, split_of


@dataclass(frozen=True)
class Turn:
    """seconds: of the router, the lease and the answer. loaded: domains that were read."""

    label: str
    routed: tuple[str, ...]
    loaded: tuple[str, ...]
    router_seconds: float
    load_seconds: float
    answer_seconds: float


def session(
    examples: Sequence[RouterExample], count: int, run: float, seed: int
) -> list[RouterExample]:
    """Prompts in runs of one domain; those of a domain by turns, in an order of their own."""
    chance = random.Random(seed)
    queues: dict[str, list[RouterExample]] = {}
    for example in examples:
        queues.setdefault(example.label[0], []).append(example)
    for queue in queues.values():
        chance.shuffle(queue)
    names = sorted(queues)
    turns: list[RouterExample] = []
    taken, name = dict.fromkeys(names, 0), chance.choice(names)
    for _ in range(count):
        if turns and chance.random() < 1 / run:
            name = chance.choice([other for other in names if other != name])
        turns.append(queues[name][taken[name] % len(queues[name])])
        taken[name] += 1
    return turns


def label_hits(labels: Sequence[str], stacks: int) -> float:
    """Share of labels that are among the `stacks` labels that were used last."""
    held: OrderedDict[str, None] = OrderedDict()
    hits = 0
    for label in labels:
        hits += label in held
        held[label] = None
        held.move_to_end(label)
        if len(held) > stacks:
            held.popitem(last=False)
    return hits / len(labels)


def answered(engine: RoutedModel, example: RouterExample, settings: AnswerSettings) -> Turn:
    prompt = engine.prompt([{"role": "user", "content": example.prompt}])
    began = time.perf_counter()
    route = engine.route(example.prompt, "routed")
    routed = time.perf_counter()
    stream = engine.stream(prompt, route, sampling_of(settings), engine.new_cache())
    for _ in stream:
        pass
    ended, answer = time.perf_counter(), stream.answer
    assert answer is not None
    return Turn(
        example.label[0], tuple(answer.weights), answer.loaded, routed - began,
        answer.load_seconds, ended - routed - answer.load_seconds,
    )  # fmt: skip


def summary(turns: Sequence[Turn], stacks: int) -> dict[str, Any]:
    needing = [turn for turn in turns if turn.routed]
    router = sorted(1e3 * turn.router_seconds for turn in turns)
    loads = [turn.load_seconds / len(turn.loaded) for turn in turns if turn.loaded]
    router_s, load_s, answer_s = (
        sum(getattr(turn, f"{part}_seconds") for turn in turns)
        for part in ("router", "load", "answer")
    )
    whole = router_s + load_s + answer_s
    return {
        "prompts": len(turns),
        "routed_to_a_stack": len(needing),
        "hit_rate": sum(not turn.loaded for turn in needing) / len(needing) if needing else None,
        "hit_rate_of_labels": label_hits([turn.label for turn in turns], stacks),
        "router_ms_median": statistics.median(router),
        "router_ms_p95": router[int(0.95 * (len(router) - 1))],
        "loads": len(loads),
        "load_ms_median": 1e3 * statistics.median(loads) if loads else None,
        "load_ms_largest": 1e3 * max(loads) if loads else None,
        "router_share": router_s / whole,
        "load_share": load_s / whole,
        "exact": sum(turn.routed == (turn.label,) for turn in turns) / len(turns),
        "label_among": sum(turn.label in turn.routed for turn in turns) / len(turns),
    }


def largest_stacks_bytes(engine: RoutedModel) -> int:
    """What the stacks of the largest domain take in memory, packed."""
    assert isinstance(engine.resident, Resident)
    sizes = []
    for name in engine.domains:
        before = engine.resident.stats.resident_bytes
        engine.resident.lease({name: 1.0}).close()
        sizes.append(engine.resident.stats.resident_bytes - before)
    return max(sizes)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model")
    parser.add_argument("--store-path", help="default: nano's sample store")
    parser.add_argument("--data", help="directory of NAME.jsonl; default: nano's routing data")
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--runs", type=float, nargs="+", default=[1, 5])
    parser.add_argument("--stacks", type=int, nargs="+", default=[2])
    parser.add_argument("--max-tokens", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    settings = with_nano(AnswerSettings(
        model=options.model, store_path=options.store_path, routed=True, gap_log="none",
        max_tokens=options.max_tokens,
    ))  # fmt: skip
    assert settings.store_path is not None
    store = Store.open(settings.store_path)
    about = OutcomeSettings(
        store_path=settings.store_path, data=options.data, single_cap=10**6, seed=options.seed
    )
    about = route_on_nano(about)[0]
    engine = open_routed(settings)
    every = read_examples(about, store, engine.tokenizer)
    split = split_of(engine.router, None, every, None)
    if split is None:
        print("what the router was trained on is not known: its prompts may be among these")
    trained = split.training if split else ()
    examples = [
        example
        for example in every
        if len(example.label) == 1
        and not example.trained_on
        and group_key(example.prompt) not in trained
    ]
    each = largest_stacks_bytes(engine)
    print(f"{len(examples)} held-out prompts of {', '.join(routed_domains(store))}")
    print(f"the largest domain takes {each} bytes packed; budgets are multiples of it")
    print(
        "| mean run | stacks | hit rate (labels) | router ms, median (p95) | loads | "
        "load ms a stack, median (largest) | time: router, load | exact set | label among |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    rows = []
    for run in options.runs:
        prompts = session(examples, options.prompts, run, options.seed)
        for stacks in options.stacks:
            engine = open_routed(settings.model_copy(update={"budget": stacks * each}))
            _ = engine.router
            answered(engine, prompts[0], settings.model_copy(update={"max_tokens": 1}))  # warm
            engine = open_routed(settings.model_copy(update={"budget": stacks * each}))
            turns = [answered(engine, example, settings) for example in prompts]
            row = {"run": run, "stacks": stacks, **summary(turns, stacks)}
            rows.append({**row, "turns": [asdict(turn) for turn in turns]})
            rate, load = row["hit_rate"] or 0, row["load_ms_median"] or 0
            print(
                f"| {run:g} | {stacks} | {rate:.1%} ({row['hit_rate_of_labels']:.1%}) | "
                f"{row['router_ms_median']:.1f} ({row['router_ms_p95']:.1f}) | {row['loads']} | "
                f"{load:.1f} ({row['load_ms_largest'] or 0:.1f}) | {row['router_share']:.1%}, "
                f"{row['load_share']:.1%} | {row['exact']:.1%} | {row['label_among']:.1%} |",
                flush=True,
            )
    for row in rows:
        del row["turns"]
    print(json.dumps({"benchmark": "routed_session", "machine": machine(), "result": rows}))


if __name__ == "__main__":
    main()
