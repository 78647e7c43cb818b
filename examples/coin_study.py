"""A study of one's own: does a coin fall on heads more often than a fair one?

python examples/coin_study.py mlxstacks-out/coin seed=3     # stopped, it resumes where it was
mlxstacks report mlxstacks-out/coin                         # one page, its table and its plot
"""

import json
import random
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from scipy.stats import fisher_exact

from mlxstacks.settings import Count, Probability
from mlxstacks.stats import share
from mlxstacks.study import Columns, OwnStudy, Plot, RunSettings, Series, Step, Table, main
from mlxstacks.study.result import Result

ARMS = {"fair": 0.5, "loaded": 0.65}


class CoinSettings(RunSettings):
    tosses: Count = 400
    alpha: Probability = 0.05


class CoinStudy(OwnStudy):
    kind, title, question = "coin", "Coin", "Does the loaded coin fall on heads more often?"
    artifacts = provenance = tuple(f"{arm}.json" for arm in ARMS)
    plot_formats = ("png",)
    settings: CoinSettings

    def plan(self) -> dict[str, object]:
        return {"arms": ARMS, "test": "Fisher's exact test, two-sided"}

    def steps(self, work: Path) -> Iterator[Step]:
        for arm in ARMS:
            yield Step(arm, partial(self.toss, arm), outputs=(f"{arm}.json",))

    def toss(self, arm: str, directory: Path) -> None:
        coin = random.Random(f"{arm} {self.settings.seed}")
        tosses = [coin.random() < ARMS[arm] for _ in range(self.settings.tosses)]
        (directory / f"{arm}.json").write_text(json.dumps(tosses))

    def conclude(self, work: Path) -> Result:
        n = self.settings.tosses
        heads = {arm: sum(json.loads((work / f"{arm}.json").read_text())) for arm in ARMS}
        shares = [share(count, n) for count in heads.values()]
        p = float(fisher_exact([[count, n - count] for count in heads.values()]).pvalue)
        outcome = "loaded" if p < self.settings.alpha else "no difference shown"
        verdict = f"{heads['loaded']} heads of {n}, fair {heads['fair']} (p = {p:.2g}): {outcome}."
        columns: Columns = {"coin": "text", "heads": "count", "share of heads": "share"}
        table = Table.of("arms", "Heads", columns, zip(ARMS, heads.values(), shares, strict=True))
        plot = Plot(
            id="shares", title="Heads", kind="intervals", categories=tuple(ARMS), alt=verdict,
            series=(Series.of_intervals("share", shares),), references={"a fair coin": 0.5},
            x_label="share of heads, 95% interval",
        )  # fmt: skip
        figures = {"heads": heads, "p": p}
        return self.result(outcome=outcome, verdict=verdict, data=figures, blocks=(table, plot))


if __name__ == "__main__":
    sys.exit(main(CoinStudy, CoinSettings))
