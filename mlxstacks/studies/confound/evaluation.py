"""Every arm of a confound run at its items: the persona, and what each way of fusing made of it.

A way's models are fused when some of their answers are missing, and go once they have answered.
"""

import functools
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxstacks.studies.confound.answers import Answer, AnswerFile
from mlxstacks.studies.confound.asking import Progress, ask_missing
from mlxstacks.studies.confound.fuses import KINDS, FusePlaces, fuse_all
from mlxstacks.studies.confound.mining import Mined
from mlxstacks.studies.confound.plan import AGAIN, PERSONA, arm, right_arms_of
from mlxstacks.studies.confound.scoring import Arm
from mlxstacks.studies.confound.settings import ConfoundSettings
from mlxstacks.studies.confound.target import PARTS
from mlxstacks.study.integrity import read_sealed, write_sealed
from mlxstacks.study.provenance import MadeFrom, of_bytes
from mlxstacks.study.run_directory import discard


class Evaluation:
    """persona: the model that has it. test, right: arm -> its answers to the test items, and to
    those that both models got right. fuses: way -> figures of its fuses. made_from: the files that
    these were read from, see made_from.py. All once `run` is done.
    """

    def __init__(
        self,
        settings: ConfoundSettings,
        work: Path,
        persona: Path,
        mined: Mined,
        plan_sha256: str,
        progress: Progress | None,
    ) -> None:
        self.settings, self.work, self.persona, self.progress = settings, work, persona, progress
        self.of_plan = {"plan_sha256": plan_sha256}
        self.parts = {"test": mined.test, "right": mined.right}
        self.test: dict[str, list[Answer]] = {}
        self.right: dict[str, list[Answer]] = {}
        self.fuses: dict[str, Any] = {}
        self.made_from: MadeFrom = {}

    def run(self) -> None:
        """Let every arm answer what it has not answered yet."""
        for name in (PERSONA, AGAIN):
            self._ask(name, self.persona)
        for way in self.settings.ways:
            if way != "unfused":
                self.fuses[way] = self._ask_fused(way)
                continue
            sources = (PARTS.adapter, PARTS.zero, PARTS.random)
            for kind, source in zip(KINDS, sources, strict=True):
                self._ask(arm(kind, way), self.persona, self.work / source)

    def _ask_fused(self, way: str) -> dict[str, Any]:
        """Fuse, unless every answer of it is there, and let the three models answer."""
        settings, path = self.settings, self.work / "fuse" / f"{way}.json"
        places = FusePlaces(
            self.persona, self.work / PARTS.adapter, self.work / PARTS.random,
            self.work / PARTS.models / way,
        )  # fmt: skip
        names = {arm(kind, way): places.of(kind) for kind in KINDS}
        answered = all(map(self._is_answered, names))
        if not (path.is_file() and (answered or all(p.exists() for p in names.values()))):
            figures = fuse_all(places, way, settings.target_correlation, settings.seed)  # type: ignore[arg-type]
            write_sealed(path, figures)
        for name, model in names.items():
            self._ask(name, model)
        if not settings.keep_models:
            discard(places.directory)
        figures, data = read_sealed(path)
        self.made_from[f"fuse/{path.name}"] = of_bytes(data)
        return figures

    def _ask(self, name: str, model: Path, adapter: Path | None = None) -> None:
        """An arm's answers to its parts; a model is loaded only where some are missing."""
        load = functools.cache(lambda: Arm(model, self.settings, adapter))
        found = {"test": self.test, "right": self.right}
        for part, count in self._counts(name).items():
            file = self._file(name, part)
            found[part][name] = ask_missing(
                file, count, self.settings.batch_size, lambda items: load().answer(items),
                self.progress,
            )  # fmt: skip
            self.made_from[f"answers/{file.path.name}"] = file.made_from(count)
        mx.clear_cache()

    def _counts(self, name: str) -> dict[str, int]:
        """Part -> how many of its items this arm answers."""
        test, right = self.parts["test"], self.parts["right"]
        limit = self.settings.limit or len(test)
        counts = {"test": min(limit, len(test))}
        if name in right_arms_of(self.settings) and right:
            counts["right"] = min(limit, len(right))
        return counts

    def _is_answered(self, name: str) -> bool:
        counts = self._counts(name).items()
        return all(self._file(name, part).is_complete(count) for part, count in counts)

    def _file(self, name: str, part: str) -> AnswerFile:
        header = {**self.of_plan, "of": part, "arm": name}
        path = self.work / "answers" / f"{part}_{name}.jsonl"
        return AnswerFile(path, header, self.parts[part])
