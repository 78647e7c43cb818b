"""What the documentation has beside the files of docs/: a hook of mkdocs (see mkdocs.yml).

`reference/commands/*`, `reference/recipes.md`, `results.md` and `laws.md` are made here, and a line
`<!-- picture: NAME -->` becomes the picture of that name.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from tests.laws import laws_page
from tools.docs import commands
from tools.docs.pictures import pictures

ROOT = Path(__file__).parents[2]


def generated() -> dict[str, Callable[[], str]]:
    """Path of every page that is made -> what makes its text."""
    pages: dict[str, Callable[[], str]] = {
        "results.md": results_page,
        "laws.md": laws_page,
        "reference/recipes.md": commands.recipes_page,
        "reference/commands/index.md": commands.index,
    }
    for name in commands.names():
        path = f"reference/commands/{commands.slug(name)}.md"
        pages[path] = lambda name=name: commands.page(name)  # type: ignore[misc]
    return pages


def results_page() -> str:
    return (ROOT / "benchmarks/RESULTS.md").read_text()


def on_config(config: Any) -> Any:
    """The pages of the commands go into the navigation, below Reference."""
    for section in config.nav:
        if "Reference" in section:
            listed: list[Any] = ["reference/commands/index.md"]
            for name in commands.names():
                listed.append({name: f"reference/commands/{commands.slug(name)}.md"})
            section["Reference"].insert(1, {"Commands": listed})
    return config


def on_files(files: Files, config: Any) -> Files:
    for path, make in generated().items():
        files.append(File.generated(config, path, content=make()))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    def drawn(match: re.Match[str]) -> str:
        return f'<div class="picture">{pictures()[match[1]]}</div>'

    return re.sub(r"^<!-- picture: ([a-z-]+) -->$", drawn, markdown, flags=re.M)
