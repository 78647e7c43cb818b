"""A study of one's own: does a coin fall on heads more often than a fair one?

    python examples/coin_study.py mlxstacks-out/coin      # stopped, it resumes where it was
    mlxstacks report mlxstacks-out/coin                   # one page, its table and its plot

In a notebook the last line of `result = toss("mlxstacks-out/coin"); result` shows the same.
"""

import json
import random
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from pydantic import BaseModel

from mlxstacks.study.document import Column, Plot, Series, Table
from mlxstacks.study.engine import Step, Study, run_study
from mlxstacks.study.result import Result

ARMS = {"fair": 0.5, "loaded": 0.65}


class CoinSettings(BaseModel):
    save_path: str
    tosses: int = 400
    seed: int = 0
    alpha: float = 0.05
    force: bool = False
    resume: bool = True


class CoinStudy(Study):
    plot_formats = ("png",)
    artifacts = provenance = tuple(f"{arm}.json" for arm in ARMS)

    settings: CoinSettings

    def __init__(self, settings: CoinSettings) -> None:
        self.settings = settings

    def planned(self) -> Result:
        settings = self.settings.model_dump(exclude={"save_path", "force", "resume"})
        plan = {**settings, "arms": ARMS, "test": "Fisher's exact test, two-sided"}
        question = "Does the loaded coin fall on heads more often?"
        return Result(kind="coin", title="Coin", question=question, status="planned",
                      settings=settings, plan=plan)  # fmt: skip

    def steps(self, work: Path) -> Iterator[Step]:
        for arm in ARMS:
            yield Step(arm, partial(self.toss, arm), (f"{arm}.json",))

    def toss(self, arm: str, directory: Path) -> None:
        coin = random.Random(f"{arm} {self.settings.seed}")
        tosses = [coin.random() < ARMS[arm] for _ in range(self.settings.tosses)]
        (directory / f"{arm}.json").write_text(json.dumps(tosses))

    def conclude(self, work: Path) -> Result:
        from scipy.stats import binomtest, fisher_exact

        n = self.settings.tosses
        heads = {arm: sum(json.loads((work / f"{arm}.json").read_text())) for arm in ARMS}
        ends = [binomtest(k, n).proportion_ci(method="wilson") for k in heads.values()]
        low, high = [float(i.low) for i in ends], [float(i.high) for i in ends]
        y = [k / n for k in heads.values()]
        p = float(fisher_exact([[k, n - k] for k in heads.values()]).pvalue)
        outcome = "loaded" if p < self.settings.alpha else "no difference shown"
        verdict = f"{heads['loaded']} heads of {n}, fair {heads['fair']} (p = {p:.2g}): {outcome}."
        columns = (Column(name="coin"), Column(name="heads", kind="count"),
                   Column(name="share", kind="share"))  # fmt: skip
        rows = tuple(zip(heads, heads.values(), zip(y, low, high, strict=True), strict=True))
        plot = Plot(
            id="shares", title="Heads", kind="intervals", categories=tuple(heads),
            series=(Series(label="share", y=y, low=low, high=high),), references={"fair": 0.5},
            x_label="share of heads, 95% interval", alt=verdict,
        )  # fmt: skip
        table = Table(id="arms", title="Heads", columns=columns, rows=rows)
        return Result(kind="coin", title="Coin", status="done", outcome=outcome, verdict=verdict,
                      data={"heads": heads, "p": p}, blocks=(table, plot))  # fmt: skip


def toss(save_path: str) -> Result:
    return run_study(CoinStudy(CoinSettings(save_path=save_path)))


if __name__ == "__main__":
    print(toss(sys.argv[1]))  # noqa: T201
