"""Which tests find prompts of a domain that was left out, on any model and real prompts.

    python -m benchmarks.gap_detection MODEL NAME=FILE.jsonl NAME=FILE.jsonl ... [--rows N]

Each file is a domain: rows in any format that training data has. A test is fitted on all domains
but one, as `mlxstacks route train` does it (mlxstacks/routing/gap_detector.py), and asked for
prompts of that one; so is the test that the others alone would choose. Of the others a fifth is
held out for the threshold and a tenth to count false alarms, which chose nothing. The router's
energy and the loss of the best route are not among the tests: they need a router and stacks that
do not know the domain, the second an answer too. Prints a table; writes nothing.
"""

import argparse
from pathlib import Path

import numpy as np

from mlxstacks import base_model
from mlxstacks.data.examples import first_pair, turns_of
from mlxstacks.data.settings import DomainDataSettings, SourceSettings
from mlxstacks.data.sources import read_source
from mlxstacks.routing.features import FeatureTable, PromptFeatures
from mlxstacks.routing.gap_detector import (
    GapRows,
    candidate_layers,
    candidates,
    fit_detector,
    fitted,
    some_rows,
    spelled,
)
from mlxstacks.stats import wilson_interval
from mlxstacks.training.modes import prepare_base


def prompts_of(file: Path, rows: int) -> list[str]:
    """The first questions of a file's rows, drawn by a hash of their content."""
    data = DomainDataSettings(sources=(SourceSettings(path=str(file.absolute()), cap=rows),))
    examples, _ = read_source(data.sources[0], data, Path())
    found = []
    for example in examples.values():
        turns = turns_of(example.record)
        found.append(str(example.record["text"])[:300] if turns is None else first_pair(turns)[0])
    return list(dict.fromkeys(found))


def read_rows(model: str, files: dict[str, Path], rows: int) -> GapRows:
    """Means behind the layers that are compared, of every prompt."""
    loaded, tokenizer, _ = base_model.load(Path(model), lazy=True)
    prepare_base(loaded, "auto", [])
    features = PromptFeatures(loaded, tokenizer, max_tokens=96)
    features.pooled_layers = candidate_layers(features.num_layers)
    prompts = {name: prompts_of(file, rows) for name, file in files.items()}
    every = [prompt for of_domain in prompts.values() for prompt in of_domain]
    means = FeatureTable(features, every).means(every)
    labels = [(name,) for name, of_domain in prompts.items() for _ in of_domain]
    return GapRows(
        means, features.pooled_layers, [features.tokens(prompt) for prompt in every],
        np.zeros((len(labels), len(files))), tuple(files), labels, np.arange(len(labels)) % 10 >= 7,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("files", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--rows", type=int, default=500)
    given = parser.parse_args()
    files = {name: Path(file) for name, _, file in (text.partition("=") for text in given.files)}
    rows = read_rows(given.model, files, given.rows)
    counted = {name: sum(label == (name,) for label in rows.labels) for name in files}
    print(f"{counted} prompts, layers {rows.layers}")
    spare = np.arange(len(rows.labels)) % 10 == 9
    print(f"{'test':36} {'mean':>5} {'alarms':>16}  " + "  ".join(f"{n:>8}" for n in files))
    table, chosen = [], dict[str, object]()
    # None: what the other domains choose
    for tests in [None, *(t for t in candidates(rows.layers) if ("energy", 0) not in t)]:
        found, alarms = [], []
        for place, name in enumerate(files):
            alone = np.array([label == (name,) for label in rows.labels])
            others = [d for d in range(len(files)) if d != place]
            seen = some_rows(rows, ~alone & ~spare, others)
            detector = fitted(seen, tests) if tests else fit_detector(seen)[0]
            assert detector is not None
            chosen |= {} if tests else {name: detector.rule.chosen_by["test"]}
            at = [rows.layers.index(layer) for layer in detector.layers]
            flags = detector.is_gap(rows.means[:, at], rows.tokens, rows.logits[:, others])
            found.append(flags[alone].mean())
            alarms += flags[~alone & spare].tolist()
        bounds = wilson_interval(sum(alarms), len(alarms))
        words = f"{np.mean(alarms):.1%} ({bounds.low:.1%}-{bounds.high:.1%})"
        shares = "  ".join(f"{share:8.0%}" for share in found)
        test = spelled(tests) if tests else "chosen without the domain"
        table.append((np.mean(found), f"{test:36} {np.mean(found):5.0%} {words:>16}  {shares}"))
    for _, line in sorted(table, reverse=True):
        print(line)
    print(f"chosen without the domain: {chosen}")


if __name__ == "__main__":
    main()
