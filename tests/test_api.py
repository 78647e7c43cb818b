"""`import mlxstacks as ms`: the functions of the README, on the built-in model.

Run: pytest tests/test_api.py
"""

import doctest
import inspect
import json
import pydoc
import subprocess
import sys
import types
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
    result = ms.fuse(nano.model_path, [nano.adapter_path], by_call, requant="refit", judge="none")
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


# --- help and progress ----------------------------------------------------------------------------

PLAIN: Any = vars(pydoc)["plaintext"]


@pytest.mark.parametrize("name", ["fuse", "guard", "train", "stack", "load", "generate"])
def test_help_has_every_keyword_with_its_meaning_and_default(name: str) -> None:
    function = getattr(ms, name)
    signature, page = (
        inspect.signature(function),
        pydoc.render_doc(function, renderer=PLAIN),
    )
    assert not any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
    for key, parameter in signature.parameters.items():
        if key not in ("tokenizer", "prompt") and (name, key) != ("generate", "model"):
            line, meaning = page.partition(f"    {key}: ")[2].split("\n")[:2]
            assert len(meaning.split()) > 1, key
            if isinstance(parameter.default, bool | int | float):
                assert line.endswith(f"default {parameter.default!r}"), key


def test_help_of_fuse_is_of_the_function_and_made_from_the_settings() -> None:
    signature = inspect.signature(ms.fuse)
    assert set(FuseSettings.model_fields) | {"progress", "dry_run"} == set(signature.parameters)
    assert signature.parameters["requant"].default == "auto"
    page = pydoc.render_doc(ms.fuse, renderer=PLAIN)
    assert str(FuseSettings.model_fields["force"].description) in " ".join(page.split())
    assert page.index("Fuse adapters into") < 200
    assert "'auto' or 'refit' or" in page


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


def test_progress_is_told_to_who_asks_and_to_a_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from mlxstacks.study.render.progress import ProgressBar

    calls: list[tuple[float, ...]] = []
    ms.fuse(save_path=tmp_path / "a", progress=lambda *args: calls.append(args))
    assert calls[-1][0] == calls[-1][1]
    assert {len(call) for call in calls} == {3}
    capfd.readouterr()
    ms.fuse(save_path=tmp_path / "b")
    assert capfd.readouterr() == ("", "")

    drawn: list[tuple[float | None, str]] = []
    monkeypatch.setattr(
        "mlxstacks.study.render.progress._in_notebook", lambda: lambda *a: drawn.append(a)
    )
    ticks = iter([0.0, 0.1, 1.0, 1.1, 101.0])
    with ProgressBar("fuse", clock=lambda: next(ticks)) as bar:
        for done in (1, 2, 3, 50):
            bar(done, 100, "layer <1>")
    texts = ["fuse layer <1>: 2%, 49 s left", "fuse layer <1>: 50%, 2 min left"]
    assert drawn == [(0.02, texts[0]), (0.5, texts[1]), (None, "")]


def test_a_notebook_draws_one_bar_and_takes_it_away(monkeypatch: pytest.MonkeyPatch) -> None:
    display = pytest.importorskip("IPython.display")
    from mlxstacks.study.render import progress

    shown: list[str] = []
    handle = types.SimpleNamespace(update=lambda html: shown.append(html.data))

    def display_first(html: Any, **_: Any) -> Any:
        shown.append(html.data)
        return handle

    monkeypatch.setattr(display, "display", display_first)
    monkeypatch.setitem(sys.modules, "ipykernel.zmqshell", types.ModuleType("zmqshell"))
    draw = progress._in_notebook()
    assert draw is not None
    draw(0.5, "train <i>")
    draw(0.75, "train")
    draw(None, "")
    assert shown == [
        '<progress max="1" value="0.500"></progress> train &lt;i&gt;',
        '<progress max="1" value="0.750"></progress> train', "",
    ]  # fmt: skip


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
