"""Merging, `--set`, and when a target counts as finished. Run: pytest tests/recipe"""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxstacks.errors import InputError
from mlxstacks.files.outputs import mark_bare
from mlxstacks.files.store import Store
from mlxstacks.nano.exports import nano_paths
from mlxstacks.recipe import table
from mlxstacks.recipe.file import load_recipe
from mlxstacks.recipe.resolve import (
    Resolved,
    finished,
    parse_sets,
    resolve,
    validate,
)
from mlxstacks.settings import merge
from mlxstacks.studies.benchmarks.settings import EvalSettings
from tests.cli.toy import TOY
from tools.nano.settings import RebuildSettings

VALUES: st.SearchStrategy[Any] = st.sampled_from([0, 1, "x", None])
for _ in range(3):
    VALUES = VALUES | st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3)
MAPPINGS = st.dictionaries(st.sampled_from("abc"), VALUES, max_size=3)


@given(MAPPINGS, MAPPINGS)
def test_merge_laws(low: dict[str, Any], high: dict[str, Any]) -> None:
    """Law: merging is idempotent, the empty mapping changes nothing, and `high` wins."""
    assert merge(low, {}) == low
    assert merge({}, high) == high
    merged = merge(low, high)
    assert merge(merged, high) == merged
    assert merged.keys() == low.keys() | high.keys()
    for key, value in high.items():
        if not isinstance(value, dict):
            assert merged[key] == value


@pytest.mark.parametrize(
    ("pairs", "values"),
    [
        (["a=1", "b=x"], {"a": 1, "b": "x"}),
        (["a.b=1", "a.c=[1, 2]"], {"a": {"b": 1, "c": [1, 2]}}),
        (["a=1", "a=null"], {"a": None}),
        (["bits=*.q_proj=4"], {"bits": "*.q_proj=4"}),
        (["a="], {"a": ""}),
    ],
)
def test_parse_sets(pairs: list[str], values: dict[str, Any]) -> None:
    assert parse_sets(pairs) == values


@pytest.mark.parametrize("pair", ["a", "=1", "a..b=1", "a=[1", ".a=1"])
def test_bad_sets_are_refused(pair: str) -> None:
    with pytest.raises(InputError, match="--set"):
        parse_sets([pair])


def test_a_nested_setting_given_in_part_keeps_the_defaults_of_its_field() -> None:
    """The adapter of nano has a weight decay of its own, which is not the optimizer's default."""
    sets = ["adapter.optimizer.steps=7", "optimizer.steps=9"]
    settings: Any = validate(RebuildSettings, parse_sets(sets))
    default = RebuildSettings()
    changed = default.adapter.optimizer.model_copy(update={"steps": 7})
    assert settings.adapter == default.adapter.model_copy(update={"optimizer": changed})
    assert settings.optimizer == default.optimizer.model_copy(update={"steps": 9})


@pytest.fixture
def made(work_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Resolved:
    """A toy's settings, and its target with a report that they made."""
    monkeypatch.setitem(table.COMMANDS, "toy", TOY)
    resolved = resolve("toy", {"save_path": "out", "kind": "fancy"})
    (work_dir / "out").mkdir()
    settings = resolved.settings.model_dump(mode="json", exclude={"force", "save_path"})
    (work_dir / "out" / "manifest.json").write_text(json.dumps({"settings": settings}))
    return resolved


def test_same_settings_are_finished(made: Resolved) -> None:
    assert finished("toy", made) is not None
    forced = resolve("toy", {"save_path": "out", "kind": "fancy", "force": True})
    assert finished("toy", forced) is not None


def test_other_settings_or_a_broken_report_are_not(made: Resolved, work_dir: Path) -> None:
    assert finished("toy", resolve("toy", {"save_path": "out", "kind": "plain"})) is None
    report = work_dir / "out" / "manifest.json"
    kept = report.read_text()
    for text in ("{", "[]", json.dumps({"settings": {}}), ""):
        report.write_text(text)
        assert finished("toy", made) is None
    report.write_text(kept)
    assert finished("toy", made) is not None


def test_data_is_a_path_or_says_how_it_is_read(work_dir: Path) -> None:
    def data(*sets: str, **options: Any) -> Any:
        values = {"model": "m", **options}
        return resolve("train", values, None, sets).settings.data  # type: ignore[attr-defined]

    assert data(data="rows.jsonl") == "rows.jsonl"
    read = data("data.sources=[a.jsonl, {path: b.jsonl, format: alpaca}]", "data.validation_rows=3")
    assert [source.format for source in read.sources] == ["auto", "alpaca"]
    assert (read.validation_rows, read.strip_markers) == (3, False)
    for sets, message in (
        (["data.validation_rows=3"], r"data\.sources is missing; give --set data\.sources="),
        (["data.sources=a", "data.sed=3"], r"unknown key 'data\.sed'; did you mean 'data\.seed'"),
        (["data=3"], "data: got 3; must be text"),
    ):
        with pytest.raises(InputError, match=message) as refused:
            data(*sets)
        assert "TrainDataSettings." not in str(refused.value)
    with pytest.raises(InputError, match=r"--set data\.seed is overridden by --data; give all of"):
        data("data.seed=3", data="rows.jsonl")


def test_newer_rows_are_not_finished(work_dir: Path) -> None:
    """Wherever they are: a directory, a file, or a file among several sources."""
    (work_dir / "rows").mkdir()
    files = [work_dir / "a.jsonl", work_dir / "b.jsonl", work_dir / "rows" / "train.jsonl"]
    for file in files:
        file.touch()
    listed = {"sources": ["a.jsonl", {"path": "b.jsonl"}, "rows", {"dataset": "o/n"}]}
    resolved = resolve("train", {"model": "m", "data": listed, "save_path": "out"})
    (work_dir / "out").mkdir()
    report = work_dir / "out" / "result.json"
    settings = resolved.settings.model_dump(mode="json")
    report.write_text(json.dumps({"settings": settings}))
    assert finished("train", resolved) is not None
    now = report.stat().st_mtime
    for file in files:
        os.utime(file, (now + 10, now + 10))
        assert finished("train", resolved) is None
        os.utime(file, (now, now))


def test_newer_input_is_not_finished(made: Resolved, work_dir: Path, monkeypatch: Any) -> None:
    from dataclasses import replace

    monkeypatch.setitem(table.COMMANDS, "toy", replace(TOY, nano={"source": "model_path"}))
    (work_dir / "in").mkdir()
    resolved = resolve("toy", {"save_path": "out", "kind": "fancy", "source": "in"})
    report = work_dir / "out" / "manifest.json"
    settings = resolved.settings.model_dump(mode="json", exclude={"force", "save_path"})
    report.write_text(json.dumps({"settings": settings}))
    assert finished("toy", resolved) is not None
    (work_dir / "in" / "weights").touch()
    later = report.stat().st_mtime + 10
    os.utime(work_dir / "in" / "weights", (later, later))
    assert finished("toy", resolved) is None


def test_marker_of_a_bare_run_allows_replacing_it(made: Resolved, work_dir: Path) -> None:
    target = work_dir / "mlxstacks-out" / "toy"
    target.mkdir(parents=True)
    assert resolve("toy", {}).settings.force is False  # type: ignore[attr-defined]
    mark_bare(target)
    resolved = resolve("toy", {})
    assert (resolved.settings.force, resolved.forced) == (True, False)  # type: ignore[attr-defined]
    assert resolve("toy", {"save_path": str(target)}).settings.force is False  # type: ignore[attr-defined]


def test_a_quick_look_does_not_stand_in_the_way_of_the_whole_run() -> None:
    targets = [resolve("eval", options).target for options in ({"limit": 5}, {"limit": None}, {})]
    targets.append(resolve("identity", {"max_prompts": 3}).target)
    names = ["eval.limit-5", "eval", "eval", "identity.limit-3"]
    assert [target.name for target in targets if target] == names


def test_home_and_force_mean_what_the_settings_say(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`force: no` is not force, and `~` in a target is found again by the next run."""
    monkeypatch.setenv("HOME", str(tmp_path))
    options = {"model": "m", "adapter_path": ["a"], "save_path": "~/out", "force": "no"}
    found = resolve("fuse", options)
    assert found.forced is False
    assert found.target == tmp_path / "out"
    (tmp_path / "out").mkdir()
    settings = found.settings.model_dump(mode="json", exclude={"force", "save_path"})
    (tmp_path / "out" / "result.json").write_text(json.dumps({"settings": settings}))
    assert finished("fuse", found) is not None


def test_a_dangling_link_beside_the_inputs_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "out").mkdir()
    paths = {"adapter_path": [str(tmp_path / "in")], "save_path": str(tmp_path / "out")}
    found = resolve("fuse", {"model": "m", **paths})
    settings = found.settings.model_dump(mode="json", exclude={"force", "save_path"})
    (tmp_path / "out" / "result.json").write_text(json.dumps({"settings": settings}))
    assert finished("fuse", found) is not None


def test_a_check_of_ours_says_once_what_came() -> None:
    with pytest.raises(InputError) as raised:
        validate(EvalSettings, {"domains": ["medical"]})
    assert str(raised.value).startswith("domains: got ['medical']; each is SUBJECT=DOMAIN")


def test_of_many_problems_the_first_are_told() -> None:
    with pytest.raises(InputError, match=r"\nand 4 more$") as error:
        validate(EvalSettings, {f"key{number}": 1 for number in range(14)})
    assert str(error.value).count("\n") == 10


def test_a_store_names_its_own_base(tmp_path: Path) -> None:
    """nano is no stand-in for the base of somebody's store; for its own it is."""
    Store.create(tmp_path / "store", "tiny", "c" * 64)
    resolved = resolve("eval", {"store_path": str(tmp_path / "store")})
    assert isinstance(resolved.settings, EvalSettings)
    assert (resolved.settings.model, resolved.from_nano) == (None, ())
    resolved = resolve("eval", {"store_path": str(nano_paths().store_path)})
    assert "model" in resolved.from_nano


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("confound", "alpha", 1e-17),
        ("confound", "least_gain", 1e-320),
        ("identity", "largest_loss", 1e-320),
        ("identity", "expected_failures", 1 - 1e-16),
        ("identity", "expected_discordant", 1e-320),
        ("eval", "expected_rate", 1 - 1e-16),
        ("profile", "alpha", 1e-17),
        ("generate", "budget", "9" * 400),
    ],
)
def test_numbers_that_no_test_or_memory_can_have_are_refused(
    name: str, key: str, value: object
) -> None:
    """Power tables and sizes failed over them."""
    with pytest.raises(InputError, match=key):
        resolve(name, {key: value})


def test_a_key_of_nested_settings_is_named_whole() -> None:
    for key, message in (
        ("rank", r"'rank': here it is --set train\.rank=\.\.\., in a recipe below train$"),
        ("train.rank", r"'train.rank': here it is --set train\.rank=\.\.\.,"),
        ("train", r"'train\.itrs'; did you mean 'train\.iters'\? \(known: "),
    ):
        with pytest.raises(InputError, match=f"unknown key {message}"):
            resolve("confound", {key: {"itrs": 4}})


def test_domains_name_their_files_and_faults_their_keys() -> None:
    """As the help of `domains` shows it; paths are then of here, not of nano's data."""
    domain = {"name": "colors", "data": "colors.jsonl"}
    settings: Any = resolve("stack", {"domains": [domain]}).settings
    assert settings.data is None
    assert [source.path for source in settings.domains[0].data.sources] == ["colors.jsonl"]
    for data, said in (
        ({"source": "x"}, r"'domains\.0\.data\.source'; .*\.sources'\? \(known: sources, "),
        (3, r"domains\.0\.data: got 3; give keys with values \(known: sources, validation_fract"),
        ([{"pat": "x"}], r"\.path'\? \(known: path, dataset, .*\)$"),
    ):
        with pytest.raises(InputError, match=said):
            resolve("stack", {"domains": [{**domain, "data": data}]})


def test_a_persona_of_ones_own_gets_neither_the_rows_nor_the_prompts_of_nanos() -> None:
    resolved = resolve("identity", {"persona": "mine"})
    settings: Any = resolved.settings
    assert (settings.suite, settings.persona_data) == (None, None)
    assert set(resolved.from_nano) == {"model", "items"}


@pytest.mark.parametrize(
    ("name", "options", "recipe"),
    [
        ("confound", {"items": "mine.jsonl"}, "confound-nano"),
        ("identity", {"persona": "mine"}, "identity-nano"),
        ("confound", {"model": "m", "persona": "p", "items": "i"}, None),
        ("stack", {"data": "mine"}, None),
        ("stack", {}, "stack"),
    ],
)
def test_the_recipe_of_nano_goes_with_the_model(
    name: str, options: dict[str, str], recipe: str | None
) -> None:
    resolved = resolve(name, options)
    assert resolved.nano_recipe == recipe
    if recipe:
        values = load_recipe(recipe).values
        assert resolved.settings == resolve(name, values | options).settings
