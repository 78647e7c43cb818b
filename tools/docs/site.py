"""What the documentation has beside the files of docs/: a hook of mkdocs (see mkdocs.yml).

`reference/commands/*`, `reference/recipes.md`, `results.md` and `laws.md` are made here, and a line
`<!-- picture: NAME -->` becomes the picture of that name. Pages link to files of the clone, so that
they can be read there too; in the site such a link leads to the page that is made of the file.
"""

import posixpath
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from tests.laws import laws_page
from tools.docs import commands
from tools.docs.pictures import pictures

ROOT = Path(__file__).parents[2]
# A file or folder of the clone -> the page of the site that shows it.
SHOWN_BY = {
    "benchmarks/RESULTS.md": "results.md",
    "tests/laws.py": "laws.md",
    "recipes": "reference/recipes.md",
    "mlxstacks/recipe/table.py": "reference/commands/index.md",
    "mlxstacks/training/settings.py": "reference/commands/stack.md",
}


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
    # Words stand before figures in a search.
    return "---\nsearch:\n  boost: 0.3\n---\n\n" + (ROOT / "benchmarks/RESULTS.md").read_text()


# Pages whose tables need the room of the table of contents.
WIDE = {"howto/papers.md"}


def on_config(config: Any) -> Any:
    """The pages of the commands go into the navigation, below Reference, families as folds."""
    for section in config.nav:
        if "Reference" in section:
            listed: list[Any] = ["reference/commands/index.md"]
            for first, family in commands.families().items():
                pages = [{n: f"reference/commands/{commands.slug(n)}.md"} for n in family]
                listed += [{first: pages}] if len(pages) > 1 else pages
            section["Reference"].insert(1, {"Commands": listed})
    return config


def on_files(files: Files, config: Any) -> Files:
    for path, make in generated().items():
        files.append(File.generated(config, path, content=make()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    def drawn(match: re.Match[str]) -> str:
        return f'<div class="picture" data-search-exclude>{pictures()[match[1]]}</div>'

    markdown = re.sub(r"^<!-- picture: ([a-z-]+) -->$", drawn, markdown, flags=re.M)
    if page.file.src_uri in WIDE:
        page.meta["hide"] = ["toc"]
    return with_pages(markdown, page.file.src_uri)


def with_pages(markdown: str, page: str) -> str:
    """A page of docs/ whose links out of docs/ lead to pages; a file without one is named."""
    here = posixpath.dirname(page)

    def led(match: re.Match[str]) -> str:
        text, target, anchor = match[1], match[2], match[3] or ""
        path = posixpath.normpath(posixpath.join("docs", here, target))
        if path in SHOWN_BY:
            return f"[{text}]({posixpath.relpath(SHOWN_BY[path], here or '.')}{anchor})"
        if path.startswith("docs/") or not (ROOT / path).exists():
            return match[0]  # a page, or a fault for the strict build to find
        return text if path in text else f"{text} (`{path}` in the clone)"

    return re.sub(r"(?<!!)\[([^\]\n]+)\]\((\.\./[^)#\s]*)(#[^)\s]*)?\)", led, markdown)
