"""The store: changes that happen whole or not at all; domains in and out.

pytest tests/files/test_store.py
"""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxstacks.errors import InputError, StoreError, TargetError
from mlxstacks.files import store_commands
from mlxstacks.files.manifest import DomainRecord, Manifest, parse_manifest, stack_name
from mlxstacks.files.settings import (
    StacksDiffSettings,
    StacksGcSettings,
    StacksListSettings,
    StacksRemoveSettings,
    StacksSwitchSettings,
)
from mlxstacks.files.store import Store
from mlxstacks.files.store_commands import (
    collect_garbage,
    diff_stores,
    disable_domain,
    enable_domain,
    remove_domain,
)
from mlxstacks.studies.stack.store_commands import list_store
from tests.files.store_cases import BASE, add_domain, header, make_store, tensors, tree


def remove(store: Store, domain: str, **options: Any) -> Any:
    dry_run = options.pop("dry_run", False)
    settings = StacksRemoveSettings(store_path=str(store.path), domain=domain, **options)
    return remove_domain(settings, dry_run=dry_run)


def switch(function: Any, store: Store, domain: str, dry_run: bool = False) -> Any:
    return function(StacksSwitchSettings(store_path=str(store.path), domain=domain), dry_run)


def gc(store: Store, grace_seconds: int = 0, dry_run: bool = False) -> Any:
    settings = StacksGcSettings(store_path=str(store.path), grace_seconds=grace_seconds)
    return collect_garbage(settings, dry_run)


def served(store: Store) -> list[tuple[str, bytes]]:
    """Names and bytes of the stacks that are served, in order."""
    found = Store.open(store.path)
    return [(s.name, (found.path / s.file.file).read_bytes()) for s in found.enabled_stacks()]


# --- the ordinary course ---------------------------------------------------------------------


def test_what_was_put_in_comes_out(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    opened = Store.open(tmp_path / "store")
    assert opened.manifest == store.manifest
    assert [s.name for s in opened.enabled_stacks()] == [
        f"{domain}-r{number}" for domain in ("chat", "code", "math") for number in (1, 2)
    ]
    record = opened.stack_named("code-r2")
    stack = opened.read_stack(record)
    assert stack.header == header("code", 2) == opened.read_header(record)
    for name, array in tensors(header("code", 2), seed=12).items():
        assert mx.array_equal(stack.tensors[name], array).item()
    split = opened.domain_named("chat").split
    assert split is not None
    assert opened.read_json(split) == {"train": ["0", "1"], "validation": ["2"]}
    # what was on while a domain was trained is noted for it
    trained_on = {domain.name: domain.trained_on for domain in opened.manifest.domains}
    assert trained_on["chat"] == ()
    assert trained_on["math"] == ("chat-r1", "chat-r2", "code-r1", "code-r2")


def test_equal_runs_write_equal_stores(tmp_path: Path) -> None:
    make_store(tmp_path / "a")
    make_store(tmp_path / "b")
    assert tree(tmp_path / "a") == tree(tmp_path / "b")
    document = json.loads((tmp_path / "a" / "manifest.json").read_text())
    assert str(tmp_path) not in json.dumps(document)


def test_manifest_is_its_own_inverse(tmp_path: Path) -> None:
    manifest = make_store(tmp_path / "store").manifest
    assert Manifest.from_json(json.loads(json.dumps(manifest.as_json()))) == manifest
    assert parse_manifest((tmp_path / "store" / "manifest.json").read_bytes()) == manifest


def test_a_change_without_changes_writes_nothing(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", ["chat"])
    before = tree(store.path)
    log = (store.path / "log.jsonl").read_bytes()
    with store.change("nothing"):
        pass
    assert tree(store.path) == before
    assert (store.path / "log.jsonl").read_bytes() == log


def test_every_change_has_a_line_in_the_log(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", ["chat", "code"])
    store.log("note", text="x")
    log = store.path / "log.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["event"] for line in lines] == ["train", "train", "note"]
    assert lines[1]["checksum"] == store.manifest.checksum[:12]
    assert lines[1]["domain"] == "code"
    log.write_bytes(log.read_bytes()[:-9])  # a writer died within its line
    store.log("after")
    assert json.loads(log.read_text().splitlines()[-1])["event"] == "after"
    assert log.read_text().splitlines()[:2] == [json.dumps(line) for line in lines[:2]]


def test_create_spares_what_is_there(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", ["chat"])
    before = tree(store.path)
    with pytest.raises(TargetError, match="exists"):
        Store.create(store.path, "tiny", BASE)
    assert tree(store.path) == before
    assert Store.create(store.path, "tiny", BASE, force=True).manifest.domains == ()
    assert Store.open(store.path).manifest.domains == ()


def test_no_store_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for name, message in [("gone", "not there"), ("file", "a file"), ("folder", "no store")]:
        with pytest.raises(InputError, match=message):
            Store.open(tmp_path / name)
    with pytest.raises(InputError, match="no store given"):
        list_store(StacksListSettings())


def _half_a_change(store: Store, error: type[BaseException]) -> None:
    with store.change() as change:
        head = header("code")
        record = change.add_stack(tensors(head, 5), head)
        change.manifest = change.manifest.with_domain(DomainRecord("code", True, (record,)))
        raise error


def test_an_exception_in_a_change_changes_nothing(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", ["chat"])
    before = tree(store.path)
    for error in (RuntimeError, KeyboardInterrupt, SystemExit):
        with pytest.raises(error):
            _half_a_change(store, error)
        assert tree(store.path) == before
    assert store.manifest == Store.open(store.path).manifest
    add_domain(store, "code")


def test_what_another_process_added_before_the_lock_is_kept(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", ["chat"])
    late = Store.open(store.path)
    add_domain(store, "code")
    with late.change("note") as change:
        change.manifest = replace(change.manifest, matrix={})
    names = [domain.name for domain in Store.open(store.path).manifest.domains]
    assert names == [domain.name for domain in late.manifest.domains] == ["chat", "code"]


def test_an_interrupt_after_the_manifest_keeps_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt that comes between the rename and the end of the block removes nothing named."""
    from mlxstacks.files import store as module

    store = make_store(tmp_path / "store", ["chat"])
    write_json = module.write_json

    def then_interrupt(*args: Any, **options: Any) -> None:
        write_json(*args, **options)
        if args[0].name == "manifest.json":
            raise KeyboardInterrupt

    monkeypatch.setattr(module, "write_json", then_interrupt)
    with pytest.raises(KeyboardInterrupt):
        add_domain(store, "code")
    monkeypatch.undo()
    opened = Store.open(store.path)
    assert [domain.name for domain in opened.manifest.domains] == ["chat", "code"]
    for record in opened.enabled_stacks():
        opened.read_stack(record)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: replace(m, base_fingerprint="short"), "base_fingerprint"),
        (lambda m: replace(m, matrix={"ungated": {"chat": {"chat": float("nan")}}}), "JSON"),
        (
            lambda m: m.with_domain(replace(m.domains[0], stacks=m.domains[0].stacks[::-1])),
            r"rounds \[2, 1\] must rise",
        ),
        (lambda m: m.with_domain(replace(m.domains[0], settings={"x": object()})), "Manifest"),
    ],
)
def test_a_manifest_that_could_not_be_read_again_is_not_written(
    tmp_path: Path, edit: Any, message: str
) -> None:
    store = make_store(tmp_path / "store", ["chat"])
    before = tree(store.path)
    with pytest.raises(ValueError, match=message), store.change() as change:
        change.manifest = edit(change.manifest)
    assert tree(store.path) == before


def test_a_stack_of_another_base_is_refused(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", ["chat"])
    before = tree(store.path)
    head = header("code", base_fingerprint="c" * 64)
    with pytest.raises(StoreError, match="a store holds stacks of one base"), store.change() as c:
        c.add_stack(tensors(head), head)
    with pytest.raises(StoreError, match="trained on tiny with fingerprint full:bbbbbbb"):
        store.check_base("c" * 64)
    store.check_base(BASE)
    assert tree(store.path) == before


def test_shared_files_live_as_long_as_a_stack_that_needs_them(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", ["chat"])
    plain = store.manifest
    with store.change() as change:
        shared = change.add_shared("latent", {"x.d_in": mx.ones((2, 4))})
        head = header("code", shared_sha256=shared.sha256)
        record = change.add_stack(tensors(head, 7), head)
        change.manifest = change.manifest.with_domain(DomainRecord("code", True, (record,)))
    opened = Store.open(store.path)
    assert opened.read_shared(shared)["x.d_in"].tolist() == [[1.0] * 4] * 2
    assert opened.read_stack(record).header.shared_sha256 == shared.sha256
    remove(store, "code")
    assert Store.open(store.path).manifest == plain


# --- domains in and out ----------------------------------------------------------------------


def test_removing_the_last_domain_restores_the_store_before_it(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", ["chat", "code"])
    manifest, stacks, files = store.manifest, served(store), tree(store.path)
    add_domain(store, "math", seed=20)
    assert remove(store, "math").notes == ()
    assert Store.open(store.path).manifest == manifest
    assert served(store) == stacks
    gc(store)
    assert tree(store.path) == files


def test_removing_an_earlier_domain_needs_force_and_says_why(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    before = tree(store.path)
    with pytest.raises(InputError, match=r"code, math were trained on top of it.*--force removes"):
        remove(store, "chat")
    assert tree(store.path) == before
    done = remove(store, "chat", force=True)
    assert done.served == ("code-r1", "code-r2", "math-r1", "math-r2")
    assert "trained on top of it" in done.notes[0]
    manifest = Store.open(store.path).manifest
    # with chat's stacks on, all of it was measured
    assert manifest.matrix == {}
    notes = list_store(StacksListSettings(store_path=str(store.path))).notes
    assert "code was trained on top of chat-r1, chat-r2, not served now" in notes[0]


def test_matrix_keeps_what_removal_leaves_true(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    alone = {name: {name: 1.5} for name in ("chat", "code", "math")}
    with store.change() as change:
        change.manifest = replace(
            change.manifest, matrix={**change.manifest.matrix, "isolated": alone}
        )
    remove(store, "code", force=True)
    matrix = Store.open(store.path).manifest.matrix
    # math's row was measured with code on; in prefix mode chat's column knows chat alone
    assert matrix == {
        "ungated": {"chat": {"chat": 1.0}},
        "prefix": {"chat": {"chat": 1.0}, "math": {"chat": 1.0}},
        "isolated": {"chat": {"chat": 1.5}, "math": {"math": 1.5}},
    }


def test_a_disabled_domain_still_counts_as_trained_on_top(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", ["chat", "code"])
    switch(disable_domain, store, "code")
    with pytest.raises(InputError, match="code was trained on top of it"):
        remove(store, "chat")


@pytest.mark.parametrize("command", [disable_domain, remove_domain])
def test_a_command_keeps_what_was_added_while_it_waited_for_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any
) -> None:
    store = make_store(tmp_path / "store", ["chat", "code"])

    def open_before_another_writes(path: str) -> Store:
        opened = Store.open(path)
        add_domain(Store.open(path), "math", seed=20)
        return opened

    monkeypatch.setattr(store_commands, "open_store", open_before_another_writes)
    if command is remove_domain:
        remove(store, "code", force=True)
    else:
        switch(command, store, "code")
    manifest = Store.open(store.path).manifest
    left = ["chat", "math"] if command is remove_domain else ["chat", "code", "math"]
    assert [domain.name for domain in manifest.domains] == left
    assert "code-r1" not in [stack.name for stack in manifest.enabled_stacks()]


def test_a_domain_that_nothing_was_trained_on_goes_without_force(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", ["chat"])
    switch(disable_domain, store, "chat")
    add_domain(store, "code", seed=10)
    assert Store.open(store.path).domain_named("code").trained_on == ()
    assert remove(store, "chat").status == "done"
    assert [d.name for d in Store.open(store.path).manifest.domains] == ["code"]


def test_disabling_and_enabling_is_exact(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    before, files = served(store), tree(store.path)
    done = switch(disable_domain, store, "code")
    assert done.served == ("chat-r1", "chat-r2", "math-r1", "math-r2")
    assert "math was trained on top of it" in done.notes[0]
    assert served(store) == before[:2] + before[4:]
    assert switch(disable_domain, store, "code").status == "nothing to do"
    assert switch(enable_domain, store, "code").status == "done"
    assert served(store) == before
    assert tree(store.path) == files


def test_names_that_are_not_there_are_told_with_those_that_are(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    with pytest.raises(InputError, match="code-r1 is a stack; its domain is code"):
        switch(disable_domain, store, "code-r1")
    with pytest.raises(InputError, match=r"no domain 'cod' .there are: chat, code, math"):
        remove(store, "cod")
    with pytest.raises(InputError, match=r"no stack 'x' .there are: chat-r1"):
        store.stack_named("x")
    with pytest.raises(InputError, match="no domain given"):
        remove_domain(StacksRemoveSettings(store_path=str(store.path)))


def test_a_plan_writes_nothing(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    before = {p: p.stat().st_mtime_ns for p in store.path.rglob("*")}
    assert remove(store, "math", dry_run=True).served == (
        "chat-r1",
        "chat-r2",
        "code-r1",
        "code-r2",
    )
    assert remove(store, "chat", dry_run=True, force=True).status == "planned"
    assert switch(disable_domain, store, "chat", dry_run=True).status == "planned"
    gc(store, dry_run=True)
    assert {p: p.stat().st_mtime_ns for p in store.path.rglob("*")} == before


def test_a_domain_can_be_updated_in_its_place(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    with store.change() as change:
        head = header("code", 3)
        record = change.add_stack(tensors(head, 99), head, 1.0, 0.5)
        old = change.manifest.domain_named("code")
        assert old is not None
        change.manifest = change.manifest.with_domain(
            DomainRecord("code", True, (*old.stacks, record), split=old.split)
        )
    code = Store.open(store.path).domain_named("code")
    assert [s.name for s in code.stacks] == ["code-r1", "code-r2", "code-r3"]
    assert code.trained_on == ("chat-r1", "chat-r2")
    assert [d.name for d in store.manifest.domains] == ["chat", "code", "math"]


# --- gc --------------------------------------------------------------------------------------


def test_gc_counts_age_from_the_moment_a_file_lost_its_name(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store")
    for path in (store.path / "stacks").iterdir():
        os.utime(path, (1, 1))  # written in 1970
    remove(store, "math")
    assert gc(store, grace_seconds=600).removed == ()
    kept = gc(store, grace_seconds=600).kept
    assert len(kept) == 3  # two stacks and a split
    for name in kept:
        past = time.time() - 601
        os.utime(store.path / name, (past, past))
    assert set(gc(store, grace_seconds=600).removed) == set(kept)
    assert not any((store.path / name).exists() for name in kept)


def test_gc_takes_temporaries_and_leaves_strangers(tmp_path: Path) -> None:
    store = make_store(tmp_path / "store", ["chat"])
    before = tree(store.path)
    dead = [
        ".manifest.json.tmp-12-0123abcd",
        "stacks/.chat-r1.tmp-12-0123abcd",
        "splits/.chat.tmp-99999-deadbeef",
        "stacks/lost-r1-2d711642b726.safetensors",  # what "x" hashes to
    ]
    looks_like_ours = "stacks/mine-r1-0123456789ab.safetensors"
    others = ["stacks/notes.txt", "splits/.DS_Store", "report.json", "run/state.safetensors"]
    strangers = [looks_like_ours, *others]
    (store.path / "run").mkdir()
    for name in (*dead, *strangers):
        (store.path / name).write_text("x")
    done = gc(store)
    assert sorted(done.removed) == sorted(dead)
    assert sorted(done.strange) == ["splits/.DS_Store", looks_like_ours, "stacks/notes.txt"]
    assert done.removed_bytes == len(dead)
    assert tree(store.path) == before | dict.fromkeys(strangers, b"x")


# --- diff ------------------------------------------------------------------------------------


def test_diff_names_every_difference_and_no_other(tmp_path: Path) -> None:
    first, second = make_store(tmp_path / "a"), make_store(tmp_path / "b")

    def diff() -> Any:
        settings = StacksDiffSettings(store_path=str(first.path), other_path=str(second.path))
        return diff_stores(settings)

    assert diff().equal
    assert diff().equal_stacks == tuple(s.name for s in first.manifest.stacks)
    switch(disable_domain, second, "code")
    found = [(d.what, d.name, d.field, d.first, d.second) for d in diff().differences]
    assert found == [("domain", "code", "enabled", True, False)]
    switch(enable_domain, second, "code")
    with second.change() as change:
        matrix = json.loads(json.dumps(change.manifest.matrix))
        matrix["prefix"]["math"]["chat"] = 9.0
        change.manifest = replace(change.manifest, matrix=matrix)
    found = [(d.what, d.name, d.field, d.first, d.second) for d in diff().differences]
    assert found == [("matrix", "prefix", "chat after math", 1.0, 9.0)]
    remove(second, "math")
    add_domain(second, "math", seed=77)
    changed = {(d.what, d.name, d.field) for d in diff().differences}
    assert changed == {("stack", "math-r1", "sha256"), ("stack", "math-r2", "sha256")}
    remove(second, "math")
    add_domain(second, "law", seed=78)
    assert {("domain", "math", "present"), ("domain", "law", "present")} <= {
        (d.what, d.name, d.field) for d in diff().differences
    }
    assert stack_name("law", 1) in {d.name for d in diff().differences}
