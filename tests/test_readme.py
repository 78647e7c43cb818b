"""README and the tree it describes agree. Run: pytest tests/test_readme.py"""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_every_module_has_a_line_in_the_file_tree() -> None:
    tree = re.search(r"## Files\n\n```\n(.*?)```", README, re.S)
    assert tree is not None
    named = set(re.findall(r"[\w-]+\.py\b", tree[1]))
    folders = {"cli"}  # told as a whole
    modules = {
        path.name
        for folder in ("mlxstacks", "benchmarks")
        for path in (ROOT / folder).rglob("*.py")
        if not path.name.startswith("__") and path.parent.name not in folders
    }
    assert modules - named == set()
    assert named - modules - {p.name for p in (ROOT / "tests").rglob("*.py")} == set()


def test_the_two_commands_stand_at_the_top() -> None:
    top = README[: README.index("##")]
    assert "make demo" in top
    assert "make test" in top


def test_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert target.startswith("http") or (ROOT / target).exists(), target
