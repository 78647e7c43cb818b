"""Prints what `mlxstacks guard` predicts; with --apply only the settings that fit, as a recipe."""

import json
from typing import TYPE_CHECKING

from mlxstacks.study.render.console import print_result

if TYPE_CHECKING:
    from rich.console import Console

    from mlxstacks.study.result import Result


def render(console: "Console", result: "Result") -> None:
    if not result.settings["apply"]:
        print_result(console, result)
        return
    for key, value in result.data["apply"].items():
        if value is not None:
            # JSON is a part of YAML
            text = json.dumps(value, ensure_ascii=False)
            console.print(f"{key}: {text}", markup=False, soft_wrap=True)
