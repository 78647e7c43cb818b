"""Outcome discovery in batches, and one candidate after the other: pairs a second, in one run.

    python -m benchmarks.bench_discover STORE [--data DIR] [--pairs 48] [--rounds 5]
    mlxstacks stack --save-path STORE        makes a store on nano

Both do the same search on the same pairs, the base once a pair, nothing from a cache; the loop sets
the mode and asks the one evaluator (with the head in pieces) for each candidate. Losses and the
sets that are found are compared before anything is said. They take turns; wall time with the
processor time beside it, which another program's load moves less. A round of the loop takes a part
of the pairs, since it is slow; what counts is pairs a second.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.timing import machine, spread
from mlxstacks import base_model
from mlxstacks.evaluate import evaluate_mean_loss
from mlxstacks.files.store import Store
from mlxstacks.layers.output_head import OutputHead, find_output_head
from mlxstacks.layers.selection import base, routed
from mlxstacks.layers.stacked import set_mode
from mlxstacks.recipe import on_nano
from mlxstacks.routing.candidate_losses import (
    CandidateLosses,
    LossCache,
    candidate,
    choose_batch_tokens,
)
from mlxstacks.routing.outcomes import DomainSet, Found, Rules, search_all
from mlxstacks.routing.settings import OutcomeSettings
from mlxstacks.studies.route.data import read_examples, routed_domains, stack_hashes
from mlxstacks.studies.route.discover import choose_samples, rules_of
from mlxstacks.studies.route.served import Served, open_served
from mlxstacks.training.modes import evaluating

BAR, TOLERANCE = 4.0, 1e-4
Way = Callable[[Sequence[int]], list[Found]]
Asked = list[tuple[int, DomainSet]]


def batched(
    served: Served, rules: Rules, rows: Sequence[Any], head: OutputHead | None, tokens: int
) -> Way:
    stacks = stack_hashes(served.store, rules.domains)

    def run(pairs: Sequence[int]) -> list[Found]:
        losses = CandidateLosses(
            served.model, [rows[p] for p in pairs], stacks, "bench", LossCache(),
            batch_tokens=tokens, dtype=served.dtype, head=head,
        )  # fmt: skip

        def losses_of(asked: Asked) -> list[float]:
            return losses([candidate(p, rules.weights(on)) for p, on in asked])

        return search_all(rules, len(pairs), losses_of)

    return run


def one_by_one(served: Served, rules: Rules, rows: Sequence[Any], head: OutputHead | None) -> Way:
    def loss(row: Any, on: DomainSet) -> float:
        weights = rules.weights(on)
        mode = routed(list(weights), list(weights.values())) if weights else base()
        set_mode(served.model, mode, served.dtype)
        with evaluating(served.model):
            return evaluate_mean_loss(served.model, [row], head=head)

    def search_one(row: Any) -> Found:
        return search_all(rules, 1, lambda asked: [loss(row, on) for _, on in asked])[0]

    return lambda pairs: [search_one(rows[p]) for p in pairs]


def timed(way: Way, pairs: Sequence[int]) -> tuple[list[Found], float, float]:
    """(what was found, pairs a second, pairs a second of processor time)."""
    wall, cpu = time.perf_counter(), time.process_time()
    found = way(pairs)
    return (
        found,
        len(pairs) / (time.perf_counter() - wall),
        len(pairs) / (time.process_time() - cpu),
    )


def compare(some: Sequence[Found], others: Sequence[Found]) -> tuple[float, int]:
    """(largest difference of a loss that both have, pairs with another best set)."""
    largest = max(
        abs(one.losses[on] - other.losses[on])
        for one, other in zip(some, others, strict=True)
        for on in one.losses.keys() & other.losses.keys()
    )
    return largest, sum(a.best != b.best for a, b in zip(some, others, strict=True))


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("store")
    parser.add_argument("--data")
    parser.add_argument("--pairs", type=int, default=48)
    parser.add_argument("--loop-pairs", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch-tokens", type=int)
    return parser.parse_args()


def set_up(asked: argparse.Namespace) -> tuple[dict[str, Way], dict[str, Any]]:
    """Both ways over the same pairs, and what they work on."""
    settings = OutcomeSettings(store_path=asked.store, data=asked.data)
    settings, _ = on_nano.route(settings)
    store = Store.open(asked.store)
    domains = routed_domains(store)
    settings = settings.model_copy(update={"samples_per_domain": -(-asked.pairs // len(domains))})
    served = open_served(store, settings.model, settings.base)
    rules = rules_of(settings, domains, [])
    examples = read_examples(settings, store, served.tokenizer, [])
    samples = choose_samples(settings, examples, served.tokenizer, "chat")
    mixed = sorted(zip(samples.examples, samples.rows, strict=True), key=lambda one: one[0].row_id)
    rows = [row for _, row in mixed][: asked.pairs]
    base_model.install_gated_delta()
    head, _ = find_output_head(served.model)
    tokens = asked.batch_tokens or choose_batch_tokens(64)
    ways = {
        "batched": batched(served, rules, rows, head, tokens),
        "one by one": one_by_one(served, rules, rows, head),
    }
    about = {
        "pairs": len(rows), "domains": len(domains), "batch_tokens": tokens,
        "tokens_per_pair": sum(len(row.tokens) for row in rows) / len(rows),
    }  # fmt: skip
    return ways, about


def main() -> None:
    asked = arguments()
    ways, about = set_up(asked)
    parts = {"batched": range(about["pairs"]), "one by one": range(asked.loop_pairs)}
    some, others = (way(parts["one by one"]) for way in ways.values())
    largest, differ = compare(some, others)
    print(
        f"{len(some)} pairs: losses differ by {largest:.1e}, allowed {TOLERANCE:.0e}; "
        f"{differ} best sets differ"
    )
    if not largest <= TOLERANCE or differ:
        sys.exit("the two searches do not agree: nothing is timed")
    speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for index in range(asked.rounds):
        for name in list(ways)[:: 1 if index % 2 == 0 else -1]:
            speeds[name].append(timed(ways[name], parts[name])[1:])
        last = {name: [round(one, 2) for one in speeds[name][-1]] for name in ways}
        print(f"round {index + 1}: {last}", file=sys.stderr, flush=True)
    result = {}
    for place, clock in enumerate(("wall", "cpu")):
        fast, slow = ([one[place] for one in speeds[name]] for name in ways)
        ratio = spread([a / b for a, b in zip(fast, slow, strict=True)])
        result[clock] = {
            "batched_pairs_per_second": vars(spread(fast)),
            "one_by_one_pairs_per_second": vars(spread(slow)),
            "ratio": vars(ratio),
        }
        print(
            f"{clock}: {spread(fast).median:.2f} against {spread(slow).median:.2f} pairs a second,"
            f" {ratio.median:.1f}x ({ratio.p20:.1f} to {ratio.p80:.1f}), bar {BAR:.0f}x"
        )
    print(
        json.dumps(
            {
                "benchmark": "discover", "machine": machine(), **about,
                "loss_difference": largest, "result": result,
            }
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
