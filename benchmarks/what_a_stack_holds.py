"""Does a stack hold capability or knowledge? Every set of stacks on every domain, random stacks,
and stacks that learned form alone, over seeds, on nano.

    python -m benchmarks.what_a_stack_holds --save-path DIR [--seeds 3] [--prompts 200]

Each stack is trained on the base alone, with the settings of `form_or_content`, for each domain and
seed on one of

    whole     the rows of the domain
    words     the same with their content words in each other's places (`form_or_content`)
    answers   the same with their answers dealt out anew among them

and measured on prompts that no stack was trained on: nats that it takes off the base's loss of the
right answer. The first table has the mean over seeds, with its 95% interval. The second says how
much of what a domain's own stack gains a random stack of its norm gains too, how much words add to
that, how much is left (content), and what answers gain: ratios of means over seeds, with Fieller's
95% interval. A run that was stopped goes on with the same command.
"""

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

import mlxstacks as ms
from benchmarks.form_or_content import HELD_OUT, SETTINGS, permuted, ratio
from mlxstacks.files.store import Store
from mlxstacks.nano.exports import nano_paths
from mlxstacks.routing.outcomes import Outcome, read_discovered_outcomes
from mlxstacks.stats import mean_interval
from mlxstacks.studies.route.served import random_name

Gains = dict[str, dict[str, float]]  # set of stacks -> domain of the prompts -> nats


def answers_dealt(rows: Sequence[Any], seed: int) -> list[Any]:
    """Rows of one question and one answer, with each other's answers."""
    answers = [row["messages"][-1] for row in rows]
    random.Random(seed).shuffle(answers)
    return [
        {**row, "messages": [*row["messages"][:-1], answer]}
        for row, answer in zip(rows, answers, strict=True)
    ]


def write_rows(place: Path, domains: Sequence[str]) -> None:
    """KIND/DOMAIN.jsonl: rows to train on, and held-out/DOMAIN.jsonl."""
    for domain in domains:
        text = (nano_paths().curriculum_path / f"{domain}.jsonl").read_text(encoding="utf-8")
        rows = [json.loads(line) for line in text.splitlines()]
        random.Random(1).shuffle(rows)
        held_out, rows = rows[:HELD_OUT], rows[HELD_OUT:]
        for kind, part in {
            "held-out": held_out, "whole": rows, "words": permuted(rows, 0),
            "answers": answers_dealt(rows, 0),
        }.items():  # fmt: skip
            file = place / kind / f"{domain}.jsonl"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text("".join(json.dumps(row) + "\n" for row in part), encoding="utf-8")


def enable(store: Path, names: Sequence[str]) -> None:
    """Enable these domains of a store, and no others."""
    with Store.open(store).change("enable") as change:
        for domain in change.manifest.domains:
            now = replace(domain, enabled=domain.name in names)
            change.manifest = change.manifest.with_domain(now)


def train(store: Path, data: Path, kind: str, domains: Sequence[str], seed: int) -> None:
    """A stack for each domain, in a store of theirs; each on the base alone."""
    for domain in domains:
        if store.exists():
            if Store.open(store).manifest.domain_named(domain):
                continue
            enable(store, ())
        sources = [
            {"path": f"held-out/{domain}.jsonl", "part": "validation"},
            {"path": f"{kind}/{domain}.jsonl", "part": "train"},
        ]
        about = {"validation_rows": HELD_OUT, "sources": sources}
        ms.run({
            "command": "stack", "save_path": str(store), "data": str(data), "seed": seed,
            "domains": [{"name": domain, "data": about}], **SETTINGS,
        }, progress=False)  # fmt: skip
    enable(store, domains)


def measure(store: Path, domains: Sequence[str], prompts: int, seed: int) -> list[Outcome]:
    """The loss of each prompt with every set of the store's stacks, and with random ones."""
    found = store.with_name(f"{store.name}-losses")
    if not found.exists():
        routing = nano_paths().routing_path
        sources = [
            {"domains": [name], "data": {"sources": [str(routing / f"{name}.jsonl")]}}
            for name in domains
        ]
        ms.run({
            "command": "route discover", "store_path": str(store), "save_path": str(found),
            "sources": sources, "samples_per_domain": prompts, "search": "exhaustive",
            "random_control": True, "seed": seed,
        }, progress=False)  # fmt: skip
    return read_discovered_outcomes(found)


def gains_of(outcomes: Sequence[Outcome], domains: Sequence[str]) -> Gains:
    """Of every set, and of each random stack by its name, the mean over a domain's prompts."""
    gains: Gains = {}
    for domain in domains:
        of_label = [outcome for outcome in outcomes if outcome.label == (domain,)]
        twins = [random_name(name) for name in domains]
        for on in [name for name in of_label[0].losses if name] + twins:
            gains.setdefault(on, {})[domain] = float(
                np.mean([o.base_loss - {**o.losses, **o.control}[on] for o in of_label])
            )
    return gains


def tables(
    whole: Sequence[Gains], form: Mapping[str, Sequence[Gains]], domains: Sequence[str]
) -> str:
    """whole, form: of each seed; of form only each domain's own stack."""

    def over_seeds(values: Sequence[float]) -> str:
        mean = mean_interval(values)
        return f"{mean.mean:+.2f} ({mean.low:+.2f} to {mean.high:+.2f})"

    lines = [f"| set | {' | '.join(domains)} |", "|---|" + "---|" * len(domains)]
    for on in [on for on in whole[0] if on not in map(random_name, domains)]:
        cells = [over_seeds([of_seed[on][domain] for of_seed in whole]) for domain in domains]
        lines.append(f"| {on.replace('+', ', ')} | {' | '.join(cells)} |")
    twins = [
        over_seeds([of_seed[random_name(domain)][domain] for of_seed in whole])
        for domain in domains
    ]
    parts = "random | words, beyond random | content: the rest | answers dealt out"
    lines += [
        f"| a random stack, of the norm of its own | {' | '.join(twins)} |", "",
        f"| domain | gain of its own stack, by seed | {parts} |", "|---|---|---|---|---|---|",
    ]  # fmt: skip
    for domain in domains:
        own = np.array([of_seed[domain][domain] for of_seed in whole])
        twin = np.array([of_seed[random_name(domain)][domain] for of_seed in whole])
        words, answers = (
            np.array([of_seed[domain][domain] for of_seed in form[kind]])
            for kind in ("words", "answers")
        )
        shares = [
            "{:.0%} ({:.0%} to {:.0%})".format(*ratio(part, own))
            for part in (twin, words - twin, own - words, answers)
        ]
        by_seed = ", ".join(f"{gain:.2f}" for gain in own)
        lines.append(f"| {domain} | {by_seed} | {' | '.join(shares)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--save-path", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=200, help="of each domain")
    parser.add_argument("--domains", nargs="*")
    options = parser.parse_args()
    if options.seeds < 2:
        parser.error("--seeds: at least 2, for intervals over them")
    domains = options.domains or sorted(
        file.stem for file in nano_paths().curriculum_path.glob("*.jsonl")
    )
    data = options.save_path / "rows"
    write_rows(data, domains)
    whole: list[Gains] = []
    form: dict[str, list[Gains]] = {"words": [], "answers": []}
    for seed in range(options.seeds):
        for kind in ("whole", *form):
            groups = [domains] if kind == "whole" else [[domain] for domain in domains]
            gains: Gains = {}
            for group in groups:
                store = options.save_path / f"{kind}-{'-'.join(group)}-{seed}"
                train(store, data, kind, group, seed)
                gains |= gains_of(measure(store, group, options.prompts, seed), group)
            (whole if kind == "whole" else form[kind]).append(gains)
            print(f"seed {seed}, {kind}: done", flush=True)
    print(tables(whole, form, domains))


if __name__ == "__main__":
    main()
