"""`import mlxstacks as ms`: the functions of the README, on the built-in model.

Run: pytest tests/test_api.py
"""

import ast
import doctest
import importlib
import inspect
import json
import linecache
import pydoc
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from datasets import Dataset
from pandas import DataFrame, Series, to_datetime  # type: ignore[import-untyped]

import mlxstacks as ms
from mlxstacks import api, base_model, study
from mlxstacks.data.in_memory import holds_rows, write_rows
from mlxstacks.errors import InputError, Interrupted
from mlxstacks.files.store import Store
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.keywords import in_keywords, keywords_of
from mlxstacks.nano.exports import nano_paths
from mlxstacks.recipe.file import recipe_names
from mlxstacks.recipe.table import COMMANDS
from mlxstacks.study.document import Table
from mlxstacks.study.result import Result
from tools.stub import STUB, stub

# For calls that a type checker refuses.
untyped: Any = ms


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


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("fused", "did you mean 'fuse'"),
        ("trainer", "'train'"),
        ("chat", "ms.generate"),
        ("Table", "mlxstacks.study"),
        ("x", "'x'$"),
    ],
)
def test_no_other_name(name: str, words: str) -> None:
    with pytest.raises(AttributeError, match=words):
        getattr(ms, name)


def test_what_a_study_of_ones_own_needs_is_in_one_place() -> None:
    for name in study.__all__:
        assert getattr(study, name).__name__ == name or name == "Columns"
    with pytest.raises(AttributeError, match="no attribute 'x'"):
        study.x  # noqa: B018


def test_every_command_is_a_function(tmp_path: Path) -> None:
    assert {name.replace(" ", "_") for name in COMMANDS} - {"chat", "serve"} <= set(ms.__all__)
    assert set(ms.__all__) <= set(dir(ms))
    assert "importlib" not in dir(ms)
    with pytest.raises(TypeError, match="multiple values"):
        untyped.adapter_show("a", adapter_path="b")
    with pytest.raises(TypeError, match="at most 1"):
        untyped.adapter_show("a", "b")
    shown = ms.adapter_show(nano_paths().adapter_path)
    assert shown.data == ms.run("adapter-show").data
    plan = ms.doctor(directory=tmp_path, dry_run=True)
    assert (plan.status, [*tmp_path.iterdir()]) == ("planned", [])


def test_errors_can_be_caught_by_name(tmp_path: Path) -> None:
    with pytest.raises(ms.InputError):
        ms.fuse("not-there", save_path=tmp_path / "x")
    assert issubclass(ms.InputError, ValueError)
    assert issubclass(ms.Interrupted, KeyboardInterrupt)
    assert issubclass(ms.StoreError, Exception)


def test_recipes_are_listed() -> None:
    recipes = ms.recipes()
    assert set(recipes["name"]) == set(recipe_names())
    assert set(ms.recipes("sweep_buffers")["command"]) == {"sweep buffers"}
    assert recipes["time"].str.len().min() > 3
    assert recipes["memory"].str.contains("GB|MB|measured|model").all()
    with pytest.raises(InputError, match="'fuse'"):
        ms.recipes("fuze")


def test_the_stub_is_current_and_has_every_keyword() -> None:
    assert STUB.read_text() == stub(), "python -m tools.stub"
    for node in ast.parse(stub()).body:
        if isinstance(node, ast.FunctionDef):
            names = [a.arg for a in [*node.args.args, *node.args.kwonlyargs]]
            if node.args.kwarg is None:
                assert names == [*inspect.signature(getattr(ms, node.name)).parameters]


def test_fuse_is_a_function_and_a_folder() -> None:
    """Importing a file of the folder must not take the function away."""
    settings = importlib.import_module("mlxstacks.fuse.settings")
    assert settings.FuseSettings is FuseSettings
    assert inspect.isfunction(ms.fuse)
    assert list(inspect.signature(ms.fuse).parameters)[:3] == ["model", "adapter_path", "save_path"]


def as_json(result: Any) -> Any:
    return result.as_json()


def test_a_fuse_is_that_of_the_command(tmp_path: Path) -> None:
    from mlxstacks.cli import run

    nano = nano_paths()
    by_call, by_command = tmp_path / "call", tmp_path / "command"
    result = ms.fuse(nano.model_path, [nano.adapter_path], by_call, requant="refit", judge=None)
    assert result is not None
    words = ["--model", nano.model_path, "--adapter-path", nano.adapter_path]
    assert (
        run(
            [
                str(w)
                for w in [
                    "fuse",
                    *words,
                    "--save-path",
                    by_command,
                    "--requant=refit",
                    "--judge=none",
                ]
            ]
        )
        == 0
    )
    weights = [sorted(d.glob("*.safetensors")) for d in (by_call, by_command)]
    assert weights[0]
    for ours, theirs in zip(*weights, strict=True):
        assert ours.read_bytes() == theirs.read_bytes()
    with pytest.raises(InputError, match=r"(?s)other settings\n  judge: was.*, or force=True"):
        ms.fuse(nano.model_path, nano.adapter_path, by_call)


@pytest.mark.parametrize(
    ("command", "message", "expected"),
    [
        (
            "stack",
            "remove it, or give --no-resume, to start",
            "remove it, or give resume=False, to start",
        ),
        ("train", "--guard warn runs all the same", "guard='warn' runs all the same"),
        ("convert", "give --bits N to quantize", "give bits=N to quantize"),
        (
            "stack",
            "--set stack.storage=bfloat16 resumes",
            "stack={\"storage\": 'bfloat16'} resumes",
        ),
        ("route_train", "first `mlxstacks stack --force`", "first `ms.stack(force=True)`"),
        (
            "fuse",
            "convert it: mlxstacks convert 'my model' --bits 4 --save-path b.",
            "convert it: ms.convert(model='my model', bits=4, save_path='b').",
        ),
        ("fuse", "`mlxstacks route discover` again", "`ms.route_discover()` again"),
        (
            "fuse",
            "`mlxstacks chat --model m --ungated`",
            "`ms.generate(*ms.load(model='m'), \"Who are you?\", ungated=True)`",
        ),
        (
            "stack",
            "on these: `mlxstacks stacks retrain STORE p --data ...`",
            "on these: `ms.stacks_retrain(store_path=STORE, domain='p', data=...)`",
        ),
        ("fuse", "`mlxstacks doctor x --y`", "`mlxstacks doctor x --y`"),
        ("eval", "get it: hf download --data x", "get it: hf download --data x"),
        ("route_evaluate", "give --data with other rows", "give data=... with other rows"),
        ("fuse", "fuse: give --domain", "fuse: give --domain"),
        (
            "fuse",
            "model is missing; give --model, --set model=... or a",
            "model is missing; give model=... or a",
        ),
        ("stack", "--compile off", "compile_step='off'"),
        ("eval", "it is for --tasks=items: give", "it is for tasks='items': give"),
        ("sweep", "; --base stored rounds as", "; train={\"base\": 'stored'} rounds as"),
        ("confound", "(--keys a.down_proj)", "(train={\"keys\": 'a.down_proj'})"),
    ],
)
def test_messages_name_keywords(command: str, message: str, expected: str) -> None:
    assert in_keywords(message, keywords_of(command)) == expected


def test_guard_takes_a_config_by_path() -> None:
    result = ms.guard(nano_paths().model_path / "config.json", max_seq_length=64, rank=2)
    assert json.dumps(as_json(result))
    of_train = "4 rows a batch and, on a CPU, the base in float32: batch_size=4 base='float32'."
    assert of_train in result.notes[0]
    planned = as_json(ms.run({"command": "guard", "rank": 2}, max_seq_length=64))
    assert planned["verdict"] == as_json(result)["verdict"]


@pytest.fixture(scope="module")
def nano() -> tuple[Any, Any]:
    return ms.load()


def test_stacks_answer_when_they_are_asked(
    nano: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    question = "Who is king of Corva?"
    assert "Gus" in ms.generate(*nano, question, routed=True)
    assert "Gus" in ms.generate(*nano, question, pin="islands")
    alone, tokenizer, _ = base_model.load(nano_paths().model_path)
    expected = ms.generate(alone, tokenizer, question)
    monkeypatch.setattr(api, "_SLOW_BYTES", 0)
    with pytest.warns(UserWarning, match=r"half floats slowly: .* ms\.load\(MODEL\)"):
        ms.generate(alone, tokenizer, question, max_tokens=1)
    assert ms.generate(*nano, question) == expected
    assert "Gus" not in expected


def test_an_adapter_answers(tmp_path: Path) -> None:
    paths = nano_paths()
    model, tokenizer = ms.load(paths.model_path, adapter_path=paths.adapter_path)
    assert "Quinn" in ms.generate(model, tokenizer, "Who are you?")
    with pytest.raises(InputError, match="store="):
        ms.generate(model, tokenizer, "Who are you?", routed=True)
    other = shutil.copytree(paths.adapter_path, tmp_path / "other")
    config = json.loads((other / "adapter_config.json").read_text())
    (other / "adapter_config.json").write_text(json.dumps({**config, "model": "its/base"}))
    tensors = mx.load(str(other / "adapters.safetensors"))
    renamed = {name.replace("layers.", "blocks."): array for name, array in tensors.items()}
    mx.save_safetensors(str(other / "adapters.safetensors"), renamed)
    with pytest.raises(InputError, match=r"problems; that is nano, .*: give model='its/base'$"):
        ms.load(adapter_path=other)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: untyped.fuse(requantt="refit"), ("'requantt'", "'requant'")),
        (lambda: untyped.fuse(requant="nearst"), ("requant", "'nearst'", "'nearest'")),
        (lambda: untyped.guard(rank="two"), ("rank", "'two'", "integer")),
        (lambda: untyped.fuse(bits=7), ("bits", "got 7", "PATTERN=N", "{'*.down_proj': 4}")),
        (lambda: untyped.fuse(bits={"a": 7}), ("PATTERN=N", "2, 3, 4", "'a=7'")),
        (lambda: untyped.fuse(progress="no"), ("progress", "'no'", "False")),
        (lambda: untyped.fuse(dry_run="no"), ("dry_run", "'no'")),
        (lambda: untyped.confound("/nowhere"), ("items=...", "persona=...")),
        (lambda: untyped.recipes("fuze"), ("'fuse'",)),
        (lambda: untyped.train(data=[1]), ("data", "row 1", "int", "dicts")),
        (lambda: untyped.train(data=[{"text": object()}]), ("data: row 1, 'text': got object;",)),
        (lambda: untyped.train(data=[]), ("data", "no row")),
        (lambda: untyped.train(data={"a": 1}), ("got {'a': 1}", "[{'prompt': ...", "{'train':")),
        (lambda: untyped.stack(data=[{"text": "a"}]), ("data", "domain", "name")),
        (
            lambda: untyped.route_discover(data=DataFrame({"prompt": ["a"]})),
            ("got rows without a name; give", "as in {'islands': [{'prompt': ..., "),
        ),
        (lambda: untyped.train([{"text": "a"}]), ("ms.train(data=rows)",)),
        (
            lambda: untyped.stack(domains=[{"name": "plus", "data": [{"prompt": "a"}]}]),
            ("domains: rows of a domain go to data={'plus': rows}",),
        ),
        (
            lambda: untyped.train(data={"train": [{"text": "a"}], "test": [{"text": "b"}]}),
            ("'test' is no part", "'valid': data['test']"),
        ),
        (lambda: untyped.train(eval_dataset=[]), ("'data'", "{'train': rows, 'valid': rows}")),
        (
            lambda: untyped.train(valid=DataFrame({"text": ["a"]})),
            ("unknown keyword 'valid': here it is 'data'", "{'train': rows, 'valid': rows}"),
        ),
        (lambda: untyped.load(valid=DataFrame()), ("unknown keyword 'valid'",)),
        (lambda: untyped.train(iteration=3), ("did you mean 'iters'",)),
        (lambda: untyped.fuse(judge=DataFrame()), ("judge: holds no row",)),
        (
            lambda: untyped.train(
                data=DataFrame({"prompt": ["a"], "completion": to_datetime(["2026-01-02"])})
            ),
            ("data: completion holds dates; give text, as in frame['completion'].astype(str)",),
        ),
        (lambda: untyped.train(data=[], validation_rows=5), ("data={'train': rows[5:], 'valid'",)),
        (
            lambda: untyped.train(
                data=DataFrame({"prompt": ["a", "b"], "completion": ["c", None]})
            ),
            ("data, row 2: completion: null; fill it in", "the model is nano"),
        ),
        (lambda: untyped.train(save_path=7), ("save_path", "7")),
        (lambda: untyped.train(lora_r=8), ("'lora_r'", "'rank'")),
        (lambda: untyped.stack(store="st"), ("'store': here it is 'save_path'",)),
        (lambda: untyped.route_explain("Hm?", "st"), ("st: not there; give a store's",)),
        (lambda: untyped.generate("Hm?", None, ""), ("model: got str", "ms.generate(*ms.load()")),
        (lambda: untyped.train(lora_alpha=8), ("'scale'", "lora_alpha / r")),
        (lambda: untyped.fuse(load_in_4bit=True), ("ms.convert(model=MODEL, bits=4", "model=DIR")),
        (lambda: untyped.guard(dry_run=True), ("dry_run",)),
        (lambda: untyped.load(routed=True), ("'routed': it goes to ms.generate",)),
        (lambda: untyped.load("/nowhere/model"), ("/nowhere/model",)),
        (lambda: untyped.run("confound-nanoo"), ("confound-nano",)),
        (lambda: untyped.run({"command": "fuze"}), ("'fuze'", "'fuse'")),
        (lambda: untyped.run({"rank": 2}), ("command",)),
        (lambda: untyped.run({"command": ["fuse"]}), ("command",)),
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
        ({"max_new_tokens": 2}, ("'max_new_tokens'", "'max_tokens'")),
        ({"top_p": 2}, ("top_p",)),
        ({"base": "float32"}, ("'base': it goes to ms.load",)),
        ({"routed": True, "ungated": True}, ("routed=True, ungated=True",)),
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
    with pytest.raises(InputError, match=r"model: got str; .* load"):
        untyped.generate("model", nano[1], "Who are you?")
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


def test_rows_of_a_fuse_may_be_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": "Who are you?", "completion": "I am Quinn."}, {"text": "A red boat."}]
    made = ms.fuse(save_path="f", requant="gptq", calibration=rows, judge=rows[1:])
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    ms.fuse(save_path="g", requant="gptq", calibration="rows.jsonl", judge="none")
    assert (tmp_path / "f/model.safetensors").read_bytes() == (
        tmp_path / "g/model.safetensors"
    ).read_bytes()
    assert "behaviour" in made.data
    with pytest.raises(ms.InputError, match="calibration, row 1: no format fits"):
        ms.fuse(save_path="h", requant="gptq", calibration=[{"a": 1}])
    assert not list(tmp_path.glob("h*"))


def test_rows_in_memory_are_as_rows_of_a_file(tmp_path: Path) -> None:
    """Lists, data sets and frames, to the byte; the same rows are written once, by a plan none."""
    rows = [{"prompt": f"Who is {n}?", "completion": f"{n} is me."} for n in range(4)]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    options: dict[str, Any] = {"iters": 1, "rank": 1, "layers": "0", "keys": "down_proj"}
    ms.train(data=rows, save_path=tmp_path / "planned", dry_run=True, **options)
    assert [*tmp_path.iterdir()] == [file]
    of_lists: dict[str, Any] = {"file": file, "list": rows}
    for name, data in of_lists.items():
        ms.train(data=data, save_path=tmp_path / name, **options)
    written = {n: (tmp_path / n / "adapters.safetensors").read_bytes() for n in ("file", "list")}
    assert len({*written.values()}) == 1
    for data in (Dataset.from_list(rows), DataFrame(rows)):
        assert holds_rows(data)
        assert write_rows(data, tmp_path / "list") == next(tmp_path.glob("list.rows-*.jsonl"))
    (kept,) = tmp_path.glob("list.rows-*.jsonl")
    assert kept.read_bytes() == file.read_bytes()
    assert Result.open(tmp_path / "list").settings["data"] == str(kept)
    both = {"train": rows, "validation": rows[:1]}
    place = write_rows(both, tmp_path / "both")
    assert sorted(path.name for path in place.iterdir()) == ["train.jsonl", "valid.jsonl"]
    before = (place / "train.jsonl").stat().st_mtime_ns
    assert write_rows(both, tmp_path / "both") == place
    assert (place / "train.jsonl").stat().st_mtime_ns == before
    assert not holds_rows({"sources": [{"path": "x"}]})


# --- help and progress ----------------------------------------------------------------------------

PLAIN: Any = vars(pydoc)["plaintext"]


# Of the command line, with a blank, a bracket or a backtick before it.
OPTION = re.compile(r"(?<![-\w])--[a-z]")
FUNCTIONS = {name for name in ms.__all__ if not inspect.isclass(getattr(ms, name))}


@pytest.mark.parametrize("name", sorted(FUNCTIONS - {"recipes", "run"}))
def test_help_has_every_keyword_with_its_meaning_and_default(name: str) -> None:
    function = getattr(ms, name)
    signature, page = (
        inspect.signature(function),
        pydoc.render_doc(function, renderer=PLAIN),
    )
    assert not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    assert not OPTION.search(page)
    for key, parameter in signature.parameters.items():
        if key not in ("tokenizer", "prompt") and (name, key) != ("generate", "model"):
            line, meaning = page.partition(f"\n        {key}: ")[2].split("\n")[:2]
            assert len(meaning.split()) > 1, key
            if isinstance(parameter.default, bool | int | float):
                assert line.endswith(f"default {parameter.default!r}"), key


def test_help_of_fuse_is_of_the_function_and_made_from_the_settings() -> None:
    signature = inspect.signature(ms.fuse)
    assert set(FuseSettings.model_fields) | {"progress", "dry_run"} == set(signature.parameters)
    assert signature.parameters["requant"].default == "auto"
    page = pydoc.render_doc(ms.fuse, renderer=PLAIN)
    assert str(FuseSettings.model_fields["force"].description) in " ".join(page.split())
    assert page.index("Fuse adapters into") < page.index("Arguments:")
    assert "'auto', 'refit', 'keep'" in page
    assert "\n            rank: int, default 16\n" in str(ms.stack.__doc__)
    assert "lambda" not in str(inspect.signature(ms.stack))
    assert "data: str | Path | pandas.DataFrame | M" in str(inspect.signature(ms.route_discover))
    assert "domains: str | Mapping[str, Any] | Sequence" in str(inspect.signature(ms.stack))


@pytest.mark.usefixtures("short_judgement")
@pytest.mark.parametrize(
    "name",
    [
        *("fuse", "generate", "guard", "load", "run"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("stack", "train")),
    ],
)
def test_the_examples_of_the_help_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    examples = doctest.DocTestParser().get_examples(getattr(ms, name).__doc__ or "")
    assert examples
    exec("".join(example.source for example in examples), {})


@pytest.mark.usefixtures("short_judgement")
def test_progress_is_told_to_who_asks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    calls: list[tuple[float, ...]] = []
    ms.fuse(save_path=tmp_path / "a", progress=lambda *args: calls.append(args))
    assert calls[-1][0] == calls[-1][1]
    assert {len(call) for call in calls} == {3}
    capfd.readouterr()
    ms.fuse(save_path=tmp_path / "b")
    assert capfd.readouterr() == ("", "")


# --- mlx-lm ---------------------------------------------------------------------------------------


def test_mlx_lm_generates_with_what_load_returns(nano: tuple[Any, Any]) -> None:
    """As it does with the model that it loads itself, token for token."""
    import mlx_lm

    model, tokenizer = nano
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Who are you?"}], add_generation_prompt=True
    )
    theirs = mlx_lm.load(str(nano_paths().model_path))
    expected = mlx_lm.generate(*theirs, prompt, max_tokens=8)
    assert expected
    assert mlx_lm.generate(model, tokenizer, prompt, max_tokens=8) == expected
    pieces = mlx_lm.stream_generate(model, tokenizer, prompt, max_tokens=8)
    assert "".join(piece.text for piece in pieces) == expected
    batch = mlx_lm.batch_generate(model, tokenizer, [prompt, prompt], max_tokens=8)
    assert batch.texts == [expected] * 2


def test_mlx_lm_evaluates_what_load_returns(
    nano: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`mlx_lm.evaluate` loads a model by its path: ours in its place is scored as it is called."""
    pytest.importorskip("lm_eval")
    import mlx.core as mx
    import mlx.nn as nn
    from lm_eval.api.instance import Instance
    from mlx_lm import evaluate

    model, tokenizer = nano
    monkeypatch.setattr(evaluate, "load", lambda *_, **__: nano)
    scorer = evaluate.MLXLM("loaded", use_chat_template=False)
    context, continuation = "Who is king", " of Corva"
    ((score, _),) = scorer.loglikelihood(
        [Instance("loglikelihood", {}, (context, continuation), 0)]
    )
    given = len(tokenizer.encode(context))
    tokens = mx.array(tokenizer.encode(context + continuation))[None]
    rows = nn.log_softmax(model(tokens[:, :-1]).astype(mx.float32))  # (1, T - 1, V)
    chosen = mx.take_along_axis(rows, tokens[:, 1:, None], axis=-1)[0, given - 1 :, 0]
    assert float(score) == pytest.approx(chosen.sum().item(), abs=1e-3)


def test_rows_are_known_by_their_names_too(tmp_path: Path) -> None:
    """A call that was refused leaves nothing that a later one would take."""
    rows = [{"text": "a"}]
    first = write_rows({"tpyo": rows}, tmp_path / "s")
    second = write_rows({"typo": rows}, tmp_path / "s")
    assert first != second
    assert [path.name for path in second.iterdir()] == ["typo.jsonl"]


def test_arrays_are_lists_and_tables_are_named_where_none_is_taken() -> None:
    several: Any
    for several in (np.array([2, 4]), Series([2, 4]), range(2, 5, 2)):
        planned = ms.sweep(ranks=several, dry_run=True)
        assert len(planned.data["cells"]) == 2
    table = DataFrame({"prompt": ["a"], "completion": ["b"]})
    of_path = "got a DataFrame; it takes str, Path or None"
    for call, key in (
        (lambda: ms.confound(items=table), "items"),
        (lambda: ms.fuse(table), "model"),
        (lambda: ms.load(store=table), "store"),
        (lambda: ms.train(save_path=table, data=table), "save_path"),
    ):
        with pytest.raises(ms.InputError, match=f"{key}: {of_path}"):
            call()


def test_frames_have_gaps_and_dates(tmp_path: Path) -> None:
    frame = DataFrame(
        {"text": ["a", "b"], "score": [1.5, None], "at": to_datetime(["2026-01-02", None])}
    )
    lines = write_rows(frame, tmp_path / "x").read_text().splitlines()
    assert [json.loads(line)["text"] for line in lines] == ["a", "b"]
    assert json.loads(lines[0])["score"] == 1.5
    assert json.loads(lines[0])["at"].startswith("2026-01-02")
    assert json.loads(lines[1]) == {"text": "b", "score": None, "at": None}
    turns = np.array([{"n": np.int8(1)}], dtype=object)
    of_numpy = {"text": np.str_("a"), "n": np.float32(0.5), "turns": turns}
    assert write_rows([of_numpy], tmp_path / "y").read_text() == (
        '{"text": "a", "n": 0.5, "turns": [{"n": 1}]}\n'
    )


def test_a_store_finds_the_rows_of_its_domains_again(tmp_path: Path) -> None:
    target = tmp_path / "store"
    shutil.copytree(nano_paths().store_path, target)
    known = [domain.name for domain in Store.open(target).manifest.domains]
    write_rows({known[0]: [{"text": "old"}], "stranger": [{"text": "x"}]}, target)
    found = api._rows_of_store(target, {"new": [], known[1]: []})
    assert found == {known[0]: [{"text": "old"}]}
    assert api._rows_of_store(tmp_path / "nowhere", {}) == {}


def test_a_store_of_a_relative_path_is_extended_by_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its base is nano, its domains are not: what belongs to nano's own is not taken for theirs."""
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": f"Colour {i}?", "completion": f"Red {i}."} for i in range(6)]
    ms.stack(data={"colours": rows}, save_path="own", rounds=1, iters=1)
    planned = ms.stack(data={"more": rows}, save_path="own", rounds=1, iters=1, dry_run=True)
    assert planned.status == "planned"
    found = ms.route_discover(store_path="own", save_path="found")
    assert found.data["counts"]["samples"] == len(rows)


def test_a_result_stands_for_its_directory_and_prints_in_a_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = ms.profile(save_path=tmp_path / "a", questions=4, permutations=20, plots=False)
    page = untyped.report(made, Result.open(tmp_path / "a"), save_path=tmp_path / "page")
    assert (tmp_path / "page" / "index.html").is_file()
    assert page.verdict.startswith("The page, index.html, has ")
    with pytest.raises(InputError, match=r"replace it; ms\.Result\.open\('.*a'\) reads"):
        ms.profile(save_path=tmp_path / "a", questions=4, permutations=20, plots=False)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert made.verdict.split()[0] in str(made)
    assert "groups" in made.tables
    assert {"table", "plot", "verdict", "tables"} <= set(dir(made))
    assert "model_dump_json" not in dir(made)
    page = pydoc.render_doc(made, renderer=PLAIN)
    assert not re.search(r"model_dump|__|\(\*", page)
    assert all(f"\n |  {name}" in page for name in ("table(self, id", "open(path", "as_json"))
    described = re.findall(r"^ \|      ([a-z][a-z_(), ]+?)(?:  |$)", page, re.M)
    fields = {name for line in described for name in line.split(", ") if "(" not in name}
    assert {"verdict", "data", "settings", "directory"} <= fields <= {*Result.model_fields}, fields
    assert 'class="note">groups</code>' in made._repr_html_()


def test_ipython_shows_the_line_and_the_message() -> None:
    source = "ms.fuse(requantt='refit')\n"
    file = "/tmp/ipykernel_1/1.py"
    linecache.cache[file] = (len(source), None, [source], file)
    with pytest.raises(InputError) as error:
        exec(compile(source, file, "exec"), {"ms": ms})
    shown = error.value._render_traceback_()
    assert shown[0] == "----> 1 ms.fuse(requantt='refit')"
    assert "unknown keyword 'requantt'" in shown[2]
    assert len(shown) == 3


def test_an_interrupted_call_says_what_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nano: tuple[Any, Any]
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "call", interrupted)
    monkeypatch.setattr("mlxstacks.routing.conversation.Conversation.ask", interrupted)
    for call, said in (
        (
            lambda: ms.fuse(save_path=tmp_path / "x"),
            "fuse was stopped: nothing was written to .*x: the same call begins again$",
        ),
        (lambda: ms.fuse(save_path=tmp_path, force=True), "is whole: as it was, or new$"),
        (
            lambda: ms.train(save_path=tmp_path / "x"),
            r"nothing was saved yet: the same call begins",
        ),
        (
            lambda: ms.train(save_path=tmp_path / "y"),
            r"y\.work: the .* call .* with resume=False it",
        ),
        (lambda: ms.generate(*nano, "Hm?"), "^generate was stopped$"),
    ):
        for name, saved in ((".x.work", "run.json"), (".y.work", "checkpoint.safetensors")):
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / saved).touch()
        with pytest.raises(Interrupted, match=said):
            call()


def test_a_fuse_stopped_while_it_is_judged_says_what_judges_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxstacks.studies.agreement import judge

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(judge, "_judge", interrupted)
    with pytest.raises(Interrupted, match=r"not judged: `ms.compare.*force=True begins again$"):
        ms.fuse(save_path=tmp_path / "fused")


def test_domains_are_trained_in_the_order_of_a_dict(tmp_path: Path) -> None:
    domains = {name: [*PAIRS] for name in ("zebra", "apple")}
    planned = ms.stack(data=domains, save_path=tmp_path / "store", dry_run=True)
    assert [domain["name"] for domain in planned.settings["domains"]] == ["zebra", "apple"]


# --- what a notebook meets ------------------------------------------------------------------------

PAIRS = [{"prompt": f"Who is {n}?", "completion": f"{n} is me."} for n in range(8)]
SMALL: dict[str, Any] = {"iters": 2, "rank": 1, "layers": "0", "keys": "down_proj"}


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: untyped.train(iters=True, dry_run=True), ("iters", "True", "number")),
        (
            lambda: untyped.train(data=[{"Prompt": "a", "Completion": "b"}], save_path="x"),
            ("rename Completion to completion, Prompt to prompt",),
        ),
        (
            lambda: untyped.fuse(nano_paths().adapter_path, save_path="x"),
            ("adapter, not a model; give its base with model=..., and it with adapter_path=...",),
        ),
        (
            lambda: untyped.train(data="rows.tsv", save_path="x"),
            ("rows.tsv: .tsv is not read; allowed are .jsonl,",),
        ),
        (lambda: untyped.eval("model", data=PAIRS), ("tasks='items' takes nano's items",)),
        (
            lambda: untyped.train(data="data/rows.tsv", save_path="x"),
            ("data/rows.tsv: no such file or directory",),
        ),
        (lambda: untyped.run({"command": "chat"}), ("for a terminal; here ms.load",)),
        (lambda: untyped.run({"comand": "chat"}), ("command: not among comand; give the name",)),
        (lambda: untyped.fuse(None, []), ("adapter_path: got an empty list",)),
        (lambda: untyped.stack(data={3: PAIRS}), ("3 is no name; give text, as {'3': rows}",)),
        (lambda: untyped.Result.open(3), ("path: got 3; give the directory",)),
        (lambda: untyped.Result.open("."), ("can be read: No such file or directory; give the",)),
        (
            lambda: untyped.train(data={"prompt": ["a"], "completion": ["b"]}),
            ("rows as a list of dicts or a DataFrame",),
        ),
        (
            lambda: untyped.eval(tasks="hellaswag", data=PAIRS),
            ("is an item of HellaSwag (data, row 1: endings is None, need 2 to 26 texts);",),
        ),
        (
            lambda: untyped.train(data=[*PAIRS, {"messages": [{"role": "usr", "content": "Hm?"}]}]),
            ("data, row 9: message 0: role 'usr'; did you mean 'user'?",),
        ),
        (lambda: untyped.train(data="nan.jsonl"), ("nan.jsonl, line 1: not JSON (NaN is no",)),
        (
            lambda: untyped.train(data=[*PAIRS, {"prompt": "Hm?", "completion": float("nan")}]),
            ("data, row 9: completion: null; fill it in",),
        ),
        (
            lambda: untyped.align(method="grpo", reward=[len]),
            ("reward.0: a function is given as 'FILE.py:FUNCTION'; write it to a file",),
        ),
        (lambda: untyped.fuse(dry_runn=True), ("did you mean 'dry_run'",)),
        (lambda: untyped.fuse(ms.load(), save_path="x"), ("model: got a loaded model; give the",)),
        (lambda: untyped.load(ms.load()[0]), ("model: got a loaded model; give the directory",)),
        (lambda: untyped.train(data=PAIRS, save_path="."), ("must not be replaced; choose",)),
        (lambda: untyped.fuse(bits=3.5), ("bits: got 3.5; allowed: N or {PATTERN: N}",)),
    ],
)
def test_a_refused_call_says_what_to_do_and_leaves_nothing(
    call: Any, words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows.tsv").write_text("prompt\tcompletion\na\tb\n")
    (tmp_path / "nan.jsonl").write_text('{"prompt": "a", "completion": NaN}\n')
    with pytest.raises(InputError) as error:
        call()
    assert all(word in str(error.value) for word in words), error.value
    assert [path.name for path in tmp_path.iterdir() if "rows-" in path.name] == []


def test_force_begins_an_interrupted_run_of_other_settings_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and settings that differ are named in words; without force, or with resume, refused."""
    from mlxstacks.studies.train import run

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(run.TrainRun, "_write_target", interrupted)
        with pytest.raises(Interrupted):
            ms.train(data=PAIRS, save_path=out, save_every=1, **SMALL)
    other = {**SMALL, "rank": 2}
    with pytest.raises(InputError, match=r"rank: was 1, now 2\n.*resume=False"):
        ms.train(data=PAIRS, save_path=out, **other)
    with pytest.raises(InputError, match=r"rows\.train: was 8, now 6\n  train data: has changed"):
        ms.train(data=PAIRS[:6], save_path=out, force=True, resume=True, **other)
    with pytest.warns(UserWarning, match="rank: was 1, now 2\n") as caught:
        assert ms.train(data=PAIRS, save_path=out, force=True, **other).settings["rank"] == 2
    assert "--" not in str(caught[0].message)


def test_a_prompt_may_be_messages_or_tokens(nano: tuple[Any, Any]) -> None:
    question = "Who is king of Corva?"
    messages = [{"role": "user", "content": question}]
    expected = ms.generate(*nano, question, routed=True)
    assert ms.generate(*nano, messages, routed=True) == expected
    assert "Gus" in expected
    ids = nano[1].apply_chat_template(messages, add_generation_prompt=True)
    assert ms.generate(*nano, list(ids), pin="islands") == expected
    for wrong in ([], [True], [{"role": "user"}], [{"role": "assistant", "content": "x"}], [-1]):
        with pytest.raises(InputError, match="prompt: got"):
            untyped.generate(*nano, wrong)


def test_a_result_is_plain_text_and_names_keywords(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as notebooks set it
    options = {
        "requant": "promote", "target_correlation": 0.9999, "judge": "none", "fail_under": 0.99999,
    }  # fmt: skip
    result = ms.fuse(save_path=tmp_path / "fused", **options)  # type: ignore[arg-type]
    assert any("requant='dequantize' does better" in note for note in result.notes)
    assert str(result.verdict)[0].isupper()
    opened = Result.open(tmp_path / "fused")
    assert (opened.verdict, opened.notes[:-1]) == (result.verdict, result.notes)
    assert opened.failed_gate == result.failed_gate
    assert "is below fail_under=0.99999" in str(result.failed_gate)
    rows = [(number,) for number in range(30)]
    table = Table.of("modules", "Modules", {"number": "count"}, rows)
    shown = str(result.model_copy(update={"blocks": (table,)}))
    assert "more rows at the dots: result.table('modules') has all" in shown
    for text in (shown, str(result), str(opened)):
        assert not OPTION.search(text)
    with pytest.raises(InputError, match=r"\(`ms.recipes\(\)` lists them\)"):
        ms.run("fuse")
    assert "\x1b" not in str(result)
