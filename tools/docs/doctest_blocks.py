"""A Markdown extension: examples in docstrings (`>>> ...`) become blocks of code."""

from typing import Any

from markdown import Extension
from markdown.preprocessors import Preprocessor


class DoctestBlocks(Preprocessor):
    def run(self, lines: list[str]) -> list[str]:
        fenced: list[str] = []
        inside = False
        for line in lines:
            if not inside and line.lstrip().startswith(">>> "):
                fenced += ["", "```pycon"]
                inside = True
            elif inside and not line.strip():
                fenced.append("```")
                inside = False
            fenced.append(line.strip() if inside else line)
        return [*fenced, "```"] if inside else fenced


class DoctestExtension(Extension):
    def extendMarkdown(self, md: Any) -> None:  # noqa: N802
        md.preprocessors.register(DoctestBlocks(md), "doctest_blocks", 60)


def makeExtension(**options: Any) -> Extension:  # noqa: N802
    return DoctestExtension(**options)
