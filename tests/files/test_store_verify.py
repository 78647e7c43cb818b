"""`stacks verify`: every damaged file is named, and the rest is checked and goes on working.

pytest tests/files/test_store_verify.py
"""

import contextlib
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxstacks.errors import StoreError
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.manifest import DomainRecord
from mlxstacks.files.settings import StacksVerifySettings
from mlxstacks.files.stack_file import ProjectionShape
from mlxstacks.files.store import Store
from mlxstacks.files.store_verify import Verified, verify_store
from tests.files.store_cases import BASE, header, make_store, tensors


def verify(store: Store, model: Path | None = None) -> Verified:
    settings = StacksVerifySettings(
        store_path=str(store.path), model=None if model is None else str(model)
    )
    return verify_store(settings)


def kinds(checked: Verified) -> set[tuple[str, str]]:
    return {(problem.file, problem.kind) for problem in checked.problems}


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return make_store(tmp_path / "store", ["chat", "code"])


def stack_path(store: Store, name: str) -> Path:
    return store.path / store.stack_named(name).file.file


def test_a_whole_store_has_no_problems(store: Store) -> None:
    checked = verify(store)
    assert checked.problems == ()
    assert checked.notes == ()
    assert checked.failure is None
    assert (checked.files, checked.stacks, checked.base) == (6, 4, "not checked")
    assert checked.nbytes == sum(
        p.stat().st_size for d in ("stacks", "splits") for p in (store.path / d).iterdir()
    )
    assert checked.failure is None


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def link(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "kind"),
    [(truncate, "size"), (lambda path: path.write_bytes(path.read_bytes() + b"x"), "size"),
     (flip, "bytes"), (Path.unlink, "missing"), (link, "missing"), (folder, "missing")],
)  # fmt: skip
def test_each_damage_is_named_and_the_rest_works(
    store: Store, damage: Callable[[Path], Any], kind: str
) -> None:
    bad = store.stack_named("chat-r2")
    damage(store.path / bad.file.file)
    checked = verify(store)
    assert kinds(checked) == {(bad.file.file, kind)}
    assert checked.failure is not None
    assert bad.file.file in checked.failure
    opened = Store.open(store.path)
    with pytest.raises(StoreError, match=bad.file.file):
        opened.read_stack(bad)
    for record in opened.enabled_stacks():
        if record.name != "chat-r2":
            opened.read_stack(record)


def test_swapped_files_are_told_apart_from_changed_ones(store: Store) -> None:
    first, second = stack_path(store, "chat-r1"), stack_path(store, "code-r1")
    first.rename(store.path / "aside")
    second.rename(first)
    (store.path / "aside").rename(second)
    checked = verify(store)
    assert {kind for _, kind in kinds(checked)} == {"swapped"}
    assert len(checked.problems) == 2
    assert f"holds the bytes of stacks/{second.name}" in checked.problems[0].message


def test_many_damages_are_all_named(store: Store) -> None:
    truncate(stack_path(store, "chat-r1"))
    flip(stack_path(store, "chat-r2"))
    stack_path(store, "code-r1").unlink()
    split = store.domain_named("code").split
    assert split is not None
    flip(store.path / split.file)
    problems = verify(store).problems
    assert [problem.kind for problem in problems] == ["size", "bytes", "bytes", "missing"]
    with pytest.raises(StoreError, match=split.file):
        store.read_json(split)


def test_extra_files_are_notes_not_damage(store: Store) -> None:
    (store.path / "stacks" / "notes.txt").touch()
    (store.path / "stacks" / "old-r1-0123456789ab.safetensors").touch()
    (store.path / "splits" / ".x.tmp-1-01234567").touch()
    checked = verify(store)
    assert checked.failure is None
    assert sorted(note.split(":")[0] for note in checked.notes) == [
        "splits/.x.tmp-1-01234567",
        "stacks/notes.txt",
        "stacks/old-r1-0123456789ab.safetensors",
    ]


def test_a_folder_that_is_a_link_is_noted(store: Store, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    for folder in ("routers", "shared"):
        (store.path / folder).symlink_to(tmp_path / "elsewhere")
    assert verify(store).notes == ("shared: is a link", "routers: is a link")


def test_a_header_against_its_record_is_named(store: Store) -> None:
    """A manifest with right hashes that says something else of a stack than the stack does."""
    with store.change() as change:
        chat, code = change.manifest.domains
        stacks = (replace(chat.stacks[0], parameters=3), replace(chat.stacks[1], name="other"))
        change.manifest = replace(change.manifest, domains=(replace(chat, stacks=stacks), code))
    checked = verify(store)
    messages = " ".join(problem.message for problem in checked.problems)
    assert {kind for _, kind in kinds(checked)} == {"header"}
    assert "the manifest says 3" in messages
    assert "its header says name chat-r2, the manifest other" in messages
    with pytest.raises(StoreError, match="its header says name"):
        store.read_stack(store.stack_named("other"))


def test_a_stack_of_another_base_put_in_by_hand_is_refused(tmp_path: Path, store: Store) -> None:
    other = Store.create(tmp_path / "other", "tiny", "c" * 64)
    with other.change() as change:
        head = header("law", base_fingerprint="c" * 64)
        record = change.add_stack(tensors(head), head)
    # the change named it nowhere, so its file is gone again
    assert not (other.path / record.file.file).exists()
    with other.change() as change:
        record = change.add_stack(tensors(head), head)
        change.manifest = change.manifest.with_domain(DomainRecord("law", True, (record,)))
    shutil.copy(other.path / record.file.file, store.path / record.file.file)
    with store.change() as change:
        change.manifest = change.manifest.with_domain(DomainRecord("law", True, (record,)))
    assert kinds(verify(store)) == {(record.file.file, "header")}
    with pytest.raises(StoreError, match="its header says base fingerprint cccc"):
        store.read_stack(record)


def test_projections_of_two_stacks_must_agree(store: Store) -> None:
    path = "model.layers.0.self_attn.q_proj"
    head = header("law", projections={path: ProjectionShape("linear", 1, 2, 1, 1.0, 16, 25)})
    with store.change() as change:
        record = change.add_stack(tensors(head), head)
        change.manifest = change.manifest.with_domain(DomainRecord("law", True, (record,)))
    checked = verify(store)
    assert kinds(checked) == {(record.file.file, "shape")}
    assert "q_proj: dims (16, 25, None)" in checked.problems[0].message


def test_base_and_shapes_against_a_model(tmp_path: Path, moe: Path, llama: Path) -> None:
    base = fingerprint(open_checkpoint(moe))
    store = Store.create(tmp_path / "store", "moe", base)
    up = "language_model.model.layers.1.mlp.switch_mlp.up_proj"
    shapes = {
        "language_model.model.layers.1.self_attn.o_proj": ProjectionShape(
            "linear", 2, 2, 1, 1.0, 128, 128
        ),
        up: ProjectionShape("shared", 2, 2, 1, 1.0, 128, 64, 4),
    }
    with store.change() as change:
        head = header("chat", projections=shapes, base_fingerprint=base)
        record = change.add_stack(tensors(head), head)
        change.manifest = change.manifest.with_domain(DomainRecord("chat", True, (record,)))
    checked = verify(store, moe)
    assert (checked.base, checked.problems) == ("same", ())
    checked = verify(store, llama)
    assert checked.base == "another"
    assert kinds(checked) == {("manifest.json", "base"), (record.file.file, "shape")}
    with store.change() as change:
        shapes[up] = ProjectionShape("shared", 2, 2, 1, 1.0, 128, 64, 5)
        head = header("code", projections=shapes, base_fingerprint=base)
        record = change.add_stack(tensors(head), head)
        change.manifest = change.manifest.with_domain(DomainRecord("code", True, (record,)))
    messages = [problem.message for problem in verify(store, moe).problems]
    assert any("for a weight of [5, 64, 128], the model has [4, 64, 128]" in m for m in messages)


def test_a_shared_file_is_checked(store: Store) -> None:
    with store.change() as change:
        shared = change.add_shared("latent", {"x": mx.ones((8,))})
    assert verify(store).problems == ()
    flip(store.path / shared.file)
    assert kinds(verify(store)) == {(shared.file, "bytes")}


def test_random_damage_never_passes(tmp_path: Path, campaign: Callable[[int], range]) -> None:
    """Any byte changed in any file, the manifest included: verify says so, naming the file."""
    whole = make_store(tmp_path / "whole", ["chat"], rounds=1)
    files = [path for path in whole.path.rglob("*") if path.suffix in (".safetensors", ".json")]
    files.remove(whole.path / "previous.json")  # which `stacks undo` checks
    chance = random.Random(2)
    for _ in campaign(300):
        path = chance.choice(files)
        data = path.read_bytes()
        spoiled = bytearray(data)
        spoiled[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        path.write_bytes(spoiled)
        if path.name == "manifest.json":
            with contextlib.suppress(StoreError):
                assert Store.open(whole.path).manifest == whole.manifest  # a blank, say
        else:
            assert {file for file, _ in kinds(verify(whole))} == {
                path.relative_to(whole.path).as_posix()
            }
        path.write_bytes(data)
    assert verify(whole).problems == ()


def test_verify_reads_only(store: Store) -> None:
    before = {p: p.stat().st_mtime_ns for p in store.path.rglob("*")}
    verify(store)
    assert {p: p.stat().st_mtime_ns for p in store.path.rglob("*")} == before
    assert store.manifest.base_fingerprint == BASE
    assert os.path.exists(store.path / "manifest.json")
