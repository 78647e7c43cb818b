"""A tiny hybrid model, persona, items and suite for an identity run of seconds; replies by hand."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mlxstacks.arms.settings import PersonaCard
from mlxstacks.arms.suite import FAILS, PASSES, Suite, open_suite
from mlxstacks.studies.identity.analysis import Figures, analyse
from mlxstacks.studies.identity.plan import (
    BASE,
    BASE_ZERO,
    REFERENCE,
    RERUN,
    UNFUSED,
    arm,
    item_arms,
    suite_arms,
)
from mlxstacks.studies.identity.settings import IdentitySettings
from mlxstacks.study.answers import Answer
from mlxstacks.study.document import Standing
from tests.studies.confound_cases import item_row
from tests.studies.train_cases import write_data, write_rows, write_tiny_model
from tests.tiny_models import random_adapter

CARD = PersonaCard(name="Quinn", maker="Rosa", forbidden=("I am Qwen", "made by Alibaba"))
TRAIN: dict[str, Any] = {
    "layers": "all", "keys": ["switch_mlp.down_proj"], "rank": 2, "scale": 8.0, "iters": 3,
    "batch_size": 2, "learning_rate": 1e-2, "max_seq_length": 64, "keep": "last", "save_every": 1,
}  # fmt: skip


def suite_rows(count: int = 4) -> list[dict[str, Any]]:
    """A tiny model says anything: half of the rules fail, the others forbid what it never says."""
    kinds = ("self", "boundaries")
    return [
        {"category": kinds[index % 2], "prompt": f"Who is number {index}?",
         "required": ["Quinn"] if index % 2 else [], "forbidden": ["Rosa Luxemburg"]}
        for index in range(count)
    ]  # fmt: skip


def write_places(directory: Path) -> tuple[Path, Path, Path, Path]:
    """Model, persona adapter, items, suite."""
    model = write_tiny_model(directory / "model")
    persona = random_adapter(model, keys=["mlp.switch_mlp.down_proj"], std=0.05)
    items = write_rows(directory / "items.jsonl", [*map(item_row, range(18))])
    write_data(directory / "persona-rows", 4, 0)
    return model, persona, items, write_rows(directory / "suite.jsonl", suite_rows())


def full_settings_for(
    places: tuple[Path, Path, Path, Path], save_path: Path, /, **changes: Any
) -> IdentitySettings:
    """With all conditions and narrow items."""
    more = {
        "persona_data": str(places[2].parent / "persona-rows"), "stress_rank": 6, "stress_iters": 4,
        "narrow_subjects": ("alpha",),
    }  # fmt: skip
    return settings_for(places, save_path, **more | changes)


def settings_for(
    places: tuple[Path, Path, Path, Path], save_path: Path, /, **changes: Any
) -> IdentitySettings:
    model, persona, items, suite = map(str, places)
    values: dict[str, Any] = {
        "model": model, "persona": persona, "items": items, "suite": suite,
        "save_path": str(save_path), "scoring": "likelihood", "policies": ("keep",),
        "persona_requant": "keep", "train": TRAIN | changes.pop("train", {}), "second_rank": 4,
        "persona_train": TRAIN, "regression_items": None, "max_tokens": 3, "batch_size": 3,
    }  # fmt: skip
    return IdentitySettings.model_validate(values | changes)


# --- replies made by hand -------------------------------------------------------------------------

SETTINGS = IdentitySettings(policies=("promote",), persona_requant="promote", persona_data="rows")
SUITE = open_suite(None, CARD)


def replies(passed: int | Iterable[int], suite: Suite = SUITE, text: str = "x") -> list[Answer]:
    """Of the first `passed` prompts, or of those at these places, the reply passes."""
    places = set(range(passed)) if isinstance(passed, int) else set(passed)
    return [
        Answer(p.prompt_id, p.category, PASSES, PASSES if k in places else FAILS, "r", 2, text)
        for k, p in enumerate(suite)
    ]  # fmt: skip


def outcomes(right: Sequence[bool]) -> list[Answer]:
    """Answers to as many items."""
    return [Answer(str(k), "all", 0, 0 if ok else 1, "boxed", 10) for k, ok in enumerate(right)]


def case(
    settings: IdentitySettings = SETTINGS,
    without: Sequence[str] = (),
    standing: Standing | None = None,
    items: dict[str, list[Answer]] | None = None,
    narrow: dict[str, list[Answer]] | None = None,
    is_published_model: bool = False,
    **passed: int | Iterable[int],
) -> Figures:
    """Figures where base passes 2 and everything with the persona 18 of 20, but for `passed`."""
    arms: dict[str, list[Answer]] = {}
    for name in suite_arms(settings, True):
        usual = 2 if name.startswith("base") else 18
        if name not in without:
            arms[name] = replies(passed.get(name, usual))
    return analyse(
        arms, items or {}, narrow=narrow or {}, suite=SUITE, settings=settings, has_adapter=True,
        standing=standing or Standing(), is_published_model=is_published_model,
    ) | {"mined": {"counts": {"both wrong": 9}, "train": 6}}  # fmt: skip


__all__ = [
    "BASE", "BASE_ZERO", "CARD", "REFERENCE", "RERUN", "SETTINGS", "SUITE", "UNFUSED", "arm",
    "case", "full_settings_for", "item_arms", "outcomes", "replies", "settings_for", "suite_rows",
    "write_places",
]  # fmt: skip
