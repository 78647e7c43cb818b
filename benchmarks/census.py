"""How large the house is: lines, files, helpers, words, at any commits side by side.

    python -m benchmarks.census 076cc66 HEAD        (make census)

Counts of the package and its tests as git has them, by reading the code (ast), not running it:

helpers called once   private functions and methods that one place of their file names, of all
vague names           assignments to found, one, said, told, own, there or made
files naming a study  files of the package outside a study's folder that name the study, on average
                      over confound, identity and profile: what a new study would have to touch
"""

import ast
import io
import subprocess
import sys
import tarfile
from collections import Counter
from collections.abc import Mapping
from statistics import fmean

Sources = Mapping[str, str]
"""Path -> text."""
VAGUE = {"found", "one", "said", "told", "own", "there", "made"}
STUDIES = ("confound", "identity", "profile")
LIBRARIES = ("scipy", "datasets", "safetensors", "jinja2")


def sources_at(revision: str) -> dict[str, str]:
    """Python files and the README of a commit. Raises: CalledProcessError: no such commit."""
    command = ["git", "archive", "--format=tar", revision]
    data = subprocess.run(command, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        return {
            member.name: file.read().decode()
            for member in archive
            if member.name.endswith((".py", ".md")) and (file := archive.extractfile(member))
        }


def census(sources: Sources) -> dict[str, str]:
    package = _below(sources, "mlxstacks/")
    trees = {path: ast.parse(text) for path, text in package.items()}
    helpers = [count for tree in trees.values() for count in _calls_of_helpers(tree)]
    vague = sum(_vague_names(tree) for tree in trees.values())
    touched = fmean(_naming(package, study) for study in STUDIES)
    return {
        "lines of the package": f"{_lines(package):,}",
        "lines of tests": f"{_lines(_below(sources, 'tests/')):,}",
        "files of the package": f"{len(package):,}",
        "helpers called once": f"{sum(n == 1 for n in helpers) / len(helpers):.0%}",
        "vague names": f"{vague:,}",
        "files naming a study": f"{touched:.1f}",
        "lines of the README": f"{sources['README.md'].count(chr(10)):,}",
        **{
            f"files importing {name}": str(sum(_imports(tree, name) for tree in trees.values()))
            for name in LIBRARIES
        },
    }


def _below(sources: Sources, directory: str) -> dict[str, str]:
    return {p: t for p, t in sources.items() if p.startswith(directory) and p.endswith(".py")}


def _lines(sources: Sources) -> int:
    return sum(text.count("\n") for text in sources.values())


def _calls_of_helpers(tree: ast.Module) -> list[int]:
    """Of each private function of a file, how many places name it."""
    names = [
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("_")
        and not node.name.startswith("__")
    ]
    used: Counter[str] = Counter()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            used[node.id] += 1
        elif isinstance(node, ast.Attribute):
            used[node.attr] += 1
    return [used[name] for name in names]


def _vague_names(tree: ast.Module) -> int:
    return sum(
        isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE
        for node in ast.walk(tree)
    )


def _naming(package: Sources, study: str) -> int:
    """Files outside the study's own folder that import it or hold its name as a text."""
    marks = [f"s.{study}.", f"s.{study} ", f'"{study}"', f'"{study}_report.json"']
    outside = {path: text for path, text in package.items() if f"s/{study}" not in path}
    return sum(
        any(mark in text for mark in marks) or path.endswith(f"/{study}.py")
        for path, text in outside.items()
    )


def _imports(tree: ast.Module, library: str) -> bool:
    modules = [
        name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module or ""]
        )
    ]
    return any(name.split(".")[0] == library for name in modules)


def main() -> None:
    revisions = sys.argv[1:] or ["HEAD"]
    columns = [census(sources_at(revision)) for revision in revisions]
    print(f"| | {' | '.join(revisions)} |")
    print(f"|---|{'---:|' * len(columns)}")
    for name in columns[0]:
        print(f"| {name} | {' | '.join(column[name] for column in columns)} |")


if __name__ == "__main__":
    main()
