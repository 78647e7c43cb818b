"""The engine of all studies: results, provenance, answer logs, and the renderers of results.

    from mlxstacks.study import OwnStudy, RunSettings, Step, Table, main

What a study of one's own needs; each is imported when its name is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlxstacks.study.answer_log import AnswersToItems
    from mlxstacks.study.document import Columns, Plot, Series, Table, Text
    from mlxstacks.study.own import OwnStudy, RunSettings, Step, main, run_study
    from mlxstacks.study.result import Result

_FILES = {
    "answer_log": ("AnswersToItems",),
    "document": ("Columns", "Plot", "Series", "Table", "Text"),
    "own": ("OwnStudy", "RunSettings", "Step", "main", "run_study"),
    "result": ("Result",),
}
__all__ = [
    "AnswersToItems", "Columns", "OwnStudy", "Plot", "Result", "RunSettings", "Series", "Step",
    "Table", "Text", "main", "run_study",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    for file, names in _FILES.items():
        if name in names:
            return getattr(importlib.import_module(f"mlxstacks.study.{file}"), name)
    raise AttributeError(f"module 'mlxstacks.study' has no attribute {name!r}")
