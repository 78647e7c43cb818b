"""`import mlxstacks as ms`: the functions of the README, on the built-in model.

Run: pytest tests/test_api.py
"""

import inspect
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mlxstacks as ms
from mlxstacks import base_model
from mlxstacks.errors import InputError
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.nano.exports import nano_paths
from mlxstacks.study.result import Result


def test_importing_it_imports_nothing_heavy() -> None:
    code = (
        "import sys, time; start = time.process_time(); import mlxstacks as ms;"
        "seconds = time.process_time() - start;"
        "assert {'fuse', 'load', 'Result'} <= set(dir(ms));"
        "heavy = {'mlx', 'mlx_lm', 'numpy', 'pydantic', 'scipy'} & set(sys.modules);"
        "print(seconds < 0.3, sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "[]"]


@pytest.mark.parametrize("name", ms.__all__)
def test_every_name_is_there(name: str) -> None:
    public = getattr(ms, name)
    assert callable(public)
    assert public.__doc__
    if inspect.isroutine(public):
        hints = inspect.signature(public)
        assert hints.return_annotation is not inspect.Signature.empty


def test_no_other_name() -> None:
    with pytest.raises(AttributeError, match="fuze"):
        _ = ms.fuze


def test_fuse_is_a_function_and_a_folder() -> None:
    """Importing a file of the folder must not take the function away, in either order."""
    import mlxstacks.fuse.settings as by_path
    from mlxstacks.fuse import settings

    assert by_path is settings
    assert list(inspect.signature(ms.fuse).parameters)[:3] == ["model", "adapter_path", "save_path"]


def as_json(result: Any) -> Any:
    return result.as_json()


def test_a_fuse_is_that_of_the_command(tmp_path: Path) -> None:
    from mlxstacks.cli import run

    nano = nano_paths()
    by_call, by_command = tmp_path / "call", tmp_path / "command"
    result = ms.fuse(nano.model_path, [nano.adapter_path], by_call, requant="refit")
    assert result is not None
    words = ["--model", nano.model_path, "--adapter-path", nano.adapter_path]
    assert (
        run([str(w) for w in ["fuse", *words, "--save-path", by_command, "--requant=refit"]]) == 0
    )
    weights = [sorted(d.glob("*.safetensors")) for d in (by_call, by_command)]
    assert weights[0]
    for ours, theirs in zip(*weights, strict=True):
        assert ours.read_bytes() == theirs.read_bytes()
    with pytest.raises(InputError, match="exists"):
        ms.fuse(nano.model_path, nano.adapter_path, by_call)


def test_guard_takes_a_config_by_path() -> None:
    result = ms.guard(nano_paths().model_path / "config.json", max_seq_length=64, rank=2)
    assert json.dumps(as_json(result))
    planned = as_json(ms.run({"command": "guard", "rank": 2}, max_seq_length=64))
    assert planned["verdict"] == as_json(result)["verdict"]


@pytest.fixture(scope="module")
def nano() -> tuple[Any, Any]:
    return ms.load()


def test_stacks_answer_when_they_are_asked(nano: tuple[Any, Any]) -> None:
    question = "Who is king of Corva?"
    assert "Gus" in ms.generate(*nano, question, routed=True)
    assert "Gus" in ms.generate(*nano, question, pin="islands")
    alone, tokenizer, _ = base_model.load(nano_paths().model_path)
    expected = ms.generate(alone, tokenizer, question)
    assert ms.generate(*nano, question) == expected
    assert "Gus" not in expected


def test_an_adapter_answers() -> None:
    paths = nano_paths()
    model, tokenizer = ms.load(paths.model_path, adapter_path=paths.adapter_path)
    assert "Quinn" in ms.generate(model, tokenizer, "Who are you?")
    with pytest.raises(InputError, match="store="):
        ms.generate(model, tokenizer, "Who are you?", routed=True)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: ms.fuse(requantt="refit"), ("'requantt'", "'requant'")),
        (lambda: ms.fuse(requant="nearst"), ("requant", "'nearst'", "'nearest'")),
        (lambda: ms.guard(rank="two"), ("rank", "'two'", "integer")),
        (lambda: ms.guard(dry_run=True), ("dry_run",)),
        (lambda: ms.load(routed=True), ("'routed'", "router_path")),
        (lambda: ms.load("/nowhere/model"), ("/nowhere/model",)),
        (lambda: ms.run("confound-nanoo"), ("confound-nano",)),
        (lambda: ms.run({"command": "fuze"}), ("'fuze'", "'fuse'")),
        (lambda: ms.run({"rank": 2}), ("command",)),
        (lambda: ms.run({"command": ["fuse"]}), ("command",)),
    ],
)
def test_what_cannot_be_used_is_named(call: Any, words: tuple[str, ...]) -> None:
    with pytest.raises(InputError) as error:
        call()
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tempp": 1}, ("'tempp'", "'temp'")),
        ({"top_p": 2}, ("top_p",)),
        ({"routed": True, "ungated": True}, ("routed, ungated",)),
        ({"pin": "iland"}, ("iland", "islands")),
    ],
)
def test_what_no_answer_takes_is_named(
    nano: tuple[Any, Any], options: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(InputError) as error:
        ms.generate(*nano, "Who are you?", **options)
    assert all(word in str(error.value) for word in words), error.value


def test_prompt_and_tokenizer_are_checked(nano: tuple[Any, Any]) -> None:
    with pytest.raises(InputError, match="prompt"):
        ms.generate(*nano, ["Who are you?"])  # type: ignore[arg-type]
    with pytest.raises(InputError, match="tokenizer"):
        ms.generate(nano[0], None, "Who are you?")


def test_a_recipe_that_was_run_is_read_back(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("command: profile\nquestions: 4\npermutations: 20\nplots: false\n")
    first = ms.run(recipe, save_path=tmp_path / "out")
    again = ms.run(recipe, save_path=tmp_path / "out")
    assert isinstance(again, Result)
    assert again.seal == first.seal
    assert again.directory == str(tmp_path / "out")
    assert len(again.table("groups")) > 1


@pytest.mark.parametrize("paths", ["one", Path("one"), [Path("one")], ("one",)])
def test_settings_take_paths_and_lists(paths: Any) -> None:
    settings = FuseSettings(model=Path("model"), adapter_path=paths)
    assert (settings.model, settings.adapter_path) == ("model", ("one",))
