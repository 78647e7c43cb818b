"""README and the tree it describes agree. Run: pytest tests/test_readme.py"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


# Folders that are told as a whole.
WHOLE = {Path("mlxstacks/cli"), Path("tests")}


def paths_of(tree: str) -> set[Path]:
    """Every Python file of a tree of lines: names at two spaces below the folder they are in."""
    found, folders = set(), [Path()]
    for line in tree.splitlines():
        names = line.strip().partition("   ")[0]
        depth = (len(line) - len(line.lstrip())) // 2
        folders = folders[: depth + 1]
        folder = re.match(r"([\w./-]+)/(?: |$)", names)
        if folder is not None:
            folders.append(folders[-1] / folder[1])
        # A description may name other files of the same folder.
        for name in re.findall(r"[\w-]+\.py\b", line):
            found.add(folders[depth] / name)
    return found


def test_a_tree_is_read_by_its_indentation() -> None:
    tree = (
        "a/\n  b/   two files\n    one.py, two.py  text\n  one.py  text; more.py: text\nc/\n  x.py"
    )
    names = {"a/b/one.py", "a/b/two.py", "a/one.py", "a/more.py", "c/x.py"}
    assert {str(path) for path in paths_of(tree)} == names


def test_every_module_has_a_line_in_its_folder_of_the_file_tree() -> None:
    """Folder and name together: several folders have a run.py."""
    tree = re.search(r"## Files\n\n```\n(.*?)```", README, re.S)
    assert tree is not None
    named = paths_of(tree[1])
    modules = {
        path.relative_to(ROOT)
        for folder in ("mlxstacks", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        if not path.name.startswith("__")
    }
    missing = {path for path in modules - named if not WHOLE & set(path.parents)}
    assert not missing, f"no line in README: {', '.join(sorted(map(str, missing)))}"
    gone = {path for path in named - modules if not (ROOT / path).is_file()}
    assert not gone, f"in README, not on disk: {', '.join(sorted(map(str, gone)))}"


def test_the_two_commands_stand_at_the_top() -> None:
    top = README[: README.index("##")]
    assert "make demo" in top
    assert "make test" in top


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target
