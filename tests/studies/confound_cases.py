"""A tiny hybrid model, persona and items for a confound run of seconds; answers made by hand."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mlxstacks.studies.confound.plan import arms_of, parts_of
from mlxstacks.studies.confound.settings import ConfoundSettings
from mlxstacks.studies.confound.verdict import Criterion, Findings, find
from mlxstacks.study.answers import Answer
from mlxstacks.study.document import Standing
from tests.studies.train_cases import WORDS, write_rows, write_tiny_model
from tests.tiny_models import random_adapter

SUBJECTS = ("alpha", "beta", "gamma")
TRAIN: dict[str, Any] = {
    "layers": "all", "keys": ["switch_mlp.down_proj"], "rank": 2, "scale": 8.0, "iters": 6,
    "batch_size": 2, "learning_rate": 1e-2, "max_seq_length": 64, "keep": "last", "save_every": 2,
}  # fmt: skip


def item_row(index: int, **changes: Any) -> dict[str, Any]:
    words = [WORDS[(index + step) % len(WORDS)] for step in (1, 3, 4)]
    return {
        "question_id": index, "question": f"{index}: {WORDS[index % 8]} {WORDS[index // 8 % 8]}?",
        "options": words, "answer": "ABC"[index % 3], "answer_index": index % 3,
        "category": SUBJECTS[index % 3], **changes,
    }  # fmt: skip


def write_places(directory: Path, items: int = 36) -> tuple[Path, Path, Path]:
    """Model, persona adapter, items."""
    model = write_tiny_model(directory / "model")
    persona = random_adapter(model, keys=["mlp.switch_mlp.down_proj"], std=0.02)
    return model, persona, write_rows(directory / "items.jsonl", [*map(item_row, range(items))])


def settings_for(
    places: tuple[Path, Path, Path], save_path: Path, /, **changes: Any
) -> ConfoundSettings:
    model, persona, items = map(str, places)
    values: dict[str, Any] = {
        "model": model, "persona": persona, "items": items, "save_path": str(save_path),
        "scoring": "likelihood", "persona_requant": "nearest", "policies": ("refit", "keep"),
        "probe_items": 8,
        "train": TRAIN | changes.pop("train", {}), "batch_size": 16, "sample": None,
        "plots": False,
    }  # fmt: skip
    return ConfoundSettings.model_validate(values | changes)


# --- answers made by hand -------------------------------------------------------------------------

POLICIES = ConfoundSettings(policies=("refit", "promote"))
CRITERION = Criterion(0.05, 0.05)


def answers_of(
    right: int, n: int, options: int = 10, shift: int = 0, step: int = 1
) -> list[Answer]:
    """`right` of `n` right answers, those of the first items (moved on by `shift`); the others are
    wrong by `step` places.
    """
    return [
        Answer(
            str(index), SUBJECTS[index % 3], index % options,
            (index + step * ((index - shift) % n >= right)) % options, "boxed", options,
        )
        for index in range(n)
    ]  # fmt: skip


def case(
    n: int = 692,
    options: int = 10,
    right: int = 200,
    without: Sequence[str] = (),
    standing: Standing | None = None,
    second_form: dict[str, int] | None = None,
    **counts: int,
) -> Findings:
    """Findings of arms with these counts; those not named answer nothing rightly.

    right: items of the control, all of which every arm gets right. without: arms left out.
    second_form: counts of the arms that are asked in a second form of the prompt, if they are.
    """
    names = [name for name in arms_of(POLICIES) if name not in without]
    # A random delta that moves every answer, whatever A1 moves.
    steps = {name: 2 if name.startswith("moved") else 1 for name in names}

    def counted(counts: dict[str, int]) -> dict[str, list[Answer]]:
        return {a: answers_of(counts.get(a, 0), n, options, step=s) for a, s in steps.items()}

    control = {name: answers_of(right, right) for name in parts_of(POLICIES)["right"] if right}
    return find(
        counted(counts), control, answers_of(0, n), ways=POLICIES.ways, criterion=CRITERION,
        standing=standing or Standing(),
        second_form=None if second_form is None else counted(second_form),
    )  # fmt: skip
