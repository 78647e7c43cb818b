"""A result as Markdown: what stands in a target as result.md, and what a notebook shows."""

import re
from collections.abc import Sequence

from mlxstacks.study.document import Document, Plot, Table
from mlxstacks.study.render.words import NO_VALUE, POWER, capital, clean, format_cell, made_of

# What Markdown would read as its own.
_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|!~$&])")
# A list, a rule or the line under a heading, where a paragraph begins so.
_LEADING = re.compile(r"^(\d{0,9})([-+.)](?=\s|$)|[-=](?=[-=\s]*$))")


def to_markdown(result: Document, pictures: Sequence[str] = ()) -> str:
    """Question, verdict, plan, blocks, power, notes. pictures: names of files; those named as a
    plot stand there.

    Law: no text of the result is read as Markdown or HTML.
    """
    parts = [f"# {_text(result.title)}", _text(made_of(result))]
    parts += [f"**EXPLORATORY**: {_text(reason)}" for reason in result.standing.reasons]
    if result.question:
        parts.append(f"**Question.** {_text(result.question)}")
    if result.verdict:
        parts.append(f"**Verdict.** {_text(capital(result.verdict))}")
    if result.failed_gate:
        parts.append(f"**Gate not met.** {_text(result.failed_gate)}")
    if result.tested_plan:
        standing = f": {result.standing.status}" if result.status == "done" else ""
        parts.append(f"Plan `{result.tested_plan}`, fixed before the first answer{standing}.")
    if hypothesis := (result.plan or {}).get("hypothesis"):
        parts.append(f"**Hypothesis.** {_text(str(hypothesis))}")
    for block in result.shown_blocks:
        if isinstance(block, Table):
            parts += [f"## {_text(block.title)}", _table(block), _text(block.caption)]
        elif isinstance(block, Plot):
            files = [name for name in pictures if name.rpartition(".")[0] == block.id]
            parts += [f"![{_text(block.alt)}]({name})" for name in files[:1]]
        else:
            parts += [f"## {_text(block.title)}", *map(_text, block.paragraphs)]
    for title, lines in (POWER, result.power), ("Notes", result.notes):
        if lines:
            parts += [f"## {title}", *(f"- {_text(line)}" for line in lines)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _text(text: str) -> str:
    escaped = _SPECIAL.sub(r"\\\1", " ".join(clean(text, 20_000).split()))
    return _LEADING.sub(r"\1\\\2", escaped)


def _table(block: Table) -> str:
    columns = [_text(column.name) for column in block.columns]
    sides = [":---" if column.kind == "text" else "---:" for column in block.columns]
    rows = [
        [_text(format_cell(cell, column) or NO_VALUE)
         for cell, column in zip(row, block.columns, strict=True)]
        for row in block.rows
    ]  # fmt: skip
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, sides, *rows))
