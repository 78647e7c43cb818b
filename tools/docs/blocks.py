"""The blocks of code in README and docs: what the tests run, and the pages of commands show."""

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {"README.md": ROOT / "README.md"} | {
    path.relative_to(ROOT).as_posix(): path for path in sorted((ROOT / "docs").rglob("*.md"))
}
# The first line of a block that `make test` does not run, and why not: see docs/howto/index.md.
MARKS = (
    "# needs a Mac",
    "# takes ",
    "# This runs on",
    "# This installs",
    "# needs the hub",
    "# needs a GPU",
)


def blocks(page: str) -> Iterator[tuple[str, str]]:
    """(language, text) of every block of commands, of Python or of output, marks included."""
    yield from re.findall(r"^```(bash|python|text)\n(.*?)^```", page, re.S | re.M)


def runnable(page: str) -> list[tuple[str, str]]:
    """Those that are run on nano."""
    return [
        (kind, text) for kind, text in blocks(page) if kind != "text" and not text.startswith(MARKS)
    ]


def commands(block: str) -> Iterator[str]:
    """The lines of a block, without comments and with continuations joined."""
    for line in re.sub(r"\\\n\s*", "", block).splitlines():
        line = re.sub(r"(^|\s)#\s.*", "", line).strip()
        if line:
            yield line


@cache
def lines_of_docs() -> tuple[tuple[str, str, str], ...]:
    """(page, mark or "", line) of every command line of docs/, those that are run on nano first."""
    lines = [
        (name, text.split("\n")[0] if text.startswith(MARKS) else "", line)
        for name, path in PAGES.items()
        if name.startswith("docs/")
        for kind, text in blocks(path.read_text())
        if kind == "bash"
        for line in commands(text)
    ]
    return tuple(sorted(lines, key=lambda each: bool(each[1])))
