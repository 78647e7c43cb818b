"""The command group `stacks`: exit codes, JSON, tables, plans.

pytest tests/cli/test_stacks.py
"""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.files.store import Store
from mlxstacks.studies.stack.store_commands import _told_apart
from tests.files.store_cases import BASE, ONE_EXPERT, add_domain, make_store, tree

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def store(work_dir: Path) -> Store:
    store = Store.create(work_dir / "store", "tiny", BASE)
    for index, name in enumerate(("chat", "code")):
        add_domain(store, name, rounds=1, seed=index, projections=ONE_EXPERT)
    return store


def test_list_shows_stacks_losses_and_the_matrix(command: Run, store: Store) -> None:
    code, out, _ = command("stacks", "list", "store")
    assert code == 0
    for word in ("chat-r1", "code-r1", "tiny", "Losses, ungated", "Losses, prefix"):
        assert word in out
    code, out, _ = command("stacks", "list", "store", "--json")
    found = json.loads(out)["data"]
    assert found["enabled_stacks"] == ["chat-r1", "code-r1"]
    assert found["matrix"]["prefix"]["code"] == {"chat": 1.0, "code": 1.25}
    assert found["domains"][1]["trained_on"] == ["chat-r1"]


def test_verify_ends_with_1_on_a_damaged_store_and_names_the_file(
    command: Run, store: Store
) -> None:
    code, out, _ = command("stacks", "verify", "store")
    assert code == 0
    assert "Whole: 2 stacks in 4 files" in out
    file = store.stack_named("code-r1").file.file
    path = store.path / file
    path.write_bytes(path.read_bytes()[:-3])
    code, out, err = command("stacks", "verify", "store")
    assert code == 1
    assert f"Failed: 1 of the store's files cannot be trusted: {file}" in err
    assert "Damaged" in out
    code, out, err = command("stacks", "verify", "store", "--json")
    assert code == 1
    document = json.loads(out)
    found = document["data"]
    assert found["status"] == "damaged"
    assert (document["kind"], document["status"]) == ("stacks verify", "done")
    assert document["failure"].startswith("1 of the store's files")
    assert [(p["file"], p["kind"]) for p in found["problems"]] == [(file, "size")]


def test_one_stack_is_no_stacks(command: Run, work_dir: Path) -> None:
    store = Store.create(work_dir / "store", "tiny", BASE)
    add_domain(store, "chat", rounds=1, projections=ONE_EXPERT)
    assert "Whole: 1 stack in 2 files" in command("stacks", "verify", "store")[1]
    assert "Equal; 1 stack has the same bytes" in command("stacks", "diff", "store", "store")[1]


@given(st.floats(allow_nan=False), st.floats(allow_nan=False))
def test_numbers_that_differ_are_shown_so(first: float, second: float) -> None:
    shown = _told_apart(first, second)
    assert first == second or shown[0] != shown[1]
    assert _told_apart(0.5000312, 0.8216934) == ("0.5", "0.8217")


def test_a_damaged_manifest_ends_with_1_without_a_traceback(command: Run, store: Store) -> None:
    (store.path / "manifest.json").write_text("{}")
    for name in ("list", "verify", "gc"):
        code, out, err = command("stacks", name, "store")
        assert code == 1
        assert "manifest.json: damaged" in err
        assert "not expected" not in err
        assert "Traceback" not in err
    code, out, _ = command("stacks", "list", "store", "--json")
    assert json.loads(out)["error"]["kind"] == "StoreError"
    assert "Traceback" in command("stacks", "list", "store", "-v")[2]


def test_remove_disable_enable(command: Run, store: Store) -> None:
    before = tree(store.path)
    code, out, _ = command("stacks", "disable", "store", "chat")
    assert code == 0
    assert "Disabled chat (chat-r1); served now: code-r1." in out
    assert "trained on top of it" in " ".join(out.split())
    assert "Nothing to do" in command("stacks", "disable", "store", "chat")[1]
    assert command("stacks", "enable", "store", "chat")[0] == 0
    assert tree(store.path) == before
    code, _, err = command("stacks", "remove", "store", "chat")
    assert code == 2
    assert "code was trained on top of it" in err
    assert "--force removes it all the same" in err
    code, out, _ = command("stacks", "remove", "store", "chat", "--force", "--dry-run")
    assert code == 0
    assert "Would remove chat (chat-r1); served then: code-r1." in out
    assert tree(store.path) == before
    code, out, _ = command("stacks", "remove", "store", "code", "--json")
    assert json.loads(out)["data"]["served"] == ["chat-r1"]
    code, out, _ = command("stacks", "gc", "store")
    assert "Kept 2 files" in out
    code, out, _ = command("stacks", "gc", "store", "--grace-seconds", "0", "--dry-run")
    assert "Would remove 2 files" in out
    code, out, _ = command("stacks", "gc", "store", "--grace-seconds", "0", "--json")
    assert len(json.loads(out)["data"]["removed"]) == 2


def test_export_and_import(command: Run, store: Store, work_dir: Path) -> None:
    for to in ("mlx", "peft"):
        code, out, _ = command("stacks", "export", "store", "chat", to, "--to", to)
        assert code == 0
        assert f"Wrote chat-r1 to {to}" in out
        code, out, _ = command("stacks", "import", "store", to, "--domain", f"from-{to}")
        assert code == 0
        assert "bit for bit; base verified" in " ".join(out.split())
    opened = Store.open(store.path)
    shas = [
        {name: bytes(array) for name, array in opened.read_stack(s).tensors.items()}
        for s in opened.enabled_stacks()
    ]
    assert shas[0] == shas[2] == shas[3]
    code, _, err = command("stacks", "export", "store", "chat", "mlx")
    assert code == 2
    assert "exists" in err
    assert command("stacks", "export", "store", "chat")[0] == 0
    assert (work_dir / "mlxstacks-out" / "stacks-export" / "adapters.safetensors").exists()


def test_diff(command: Run, store: Store, work_dir: Path) -> None:
    make_store(work_dir / "other", ["chat"])
    assert command("stacks", "diff", "store", "store")[1].startswith("Verdict: Equal; 2 stacks")
    code, out, _ = command("stacks", "diff", "store", "other", "--json")
    assert code == 0
    found = json.loads(out)["data"]
    assert not found["equal"]
    assert {d["name"] for d in found["differences"]} >= {"code", "chat-r1"}
    code, out, _ = command("stacks", "diff", "store", "other")
    assert "differences; 0 stacks" in out
    assert str(store.manifest.matrix["prefix"]["code"]["code"]) in out


@pytest.mark.parametrize(
    "words",
    ["remove", "disable", "enable", "export", "import", "diff", "gc"],
)
def test_without_a_store_each_says_how_to_get_one(command: Run, work_dir: Path, words: str) -> None:
    code, out, err = command("stacks", words, "--json")
    assert code == 2
    assert json.loads(out)["error"]["exit_code"] == 2
    assert "store" in err or "adapter" in err
    assert list(work_dir.iterdir()) == []


@pytest.mark.parametrize("words", ["list", "verify"])
def test_what_only_reads_takes_nanos_store(command: Run, work_dir: Path, words: str) -> None:
    code, _, err = command("stacks", words)
    assert code == 0
    assert "Using nano's sample stacks." in err
    assert list(work_dir.iterdir()) == []
