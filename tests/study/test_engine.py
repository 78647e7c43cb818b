"""Laws of every study, on the study of examples/coin_study.py.

Run: pytest tests/study/test_engine.py
"""

import importlib
import importlib.util
import json
import math
import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import mlx.nn as nn
import numpy as np
import pytest

from mlxstacks.errors import InputError, StoreError
from mlxstacks.report.settings import ReportSettings
from mlxstacks.report.write import write_report
from mlxstacks.study import engine, own
from mlxstacks.study.code import Code, code_of
from mlxstacks.study.engine import run_step
from mlxstacks.study.own import OwnStudy, Step, main, run_study
from mlxstacks.study.result import Result

EXAMPLE = Path(__file__).parents[2] / "examples" / "coin_study.py"
_spec = importlib.util.spec_from_file_location("coin_study", EXAMPLE)
assert _spec is not None
assert _spec.loader is not None
coin = importlib.util.module_from_spec(_spec)
sys.modules["coin_study"] = coin
_spec.loader.exec_module(coin)


class Quick(coin.CoinStudy):  # type: ignore[name-defined]
    """Without pictures, which take seconds."""

    plot_formats = ()


def study(place: Path, **settings: Any) -> Any:
    return Quick(coin.CoinSettings(save_path=str(place / "coin"), **settings))


def files(directory: Path) -> dict[str, bytes]:
    """All but the mark and what tells of the machine."""
    whole = {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != ".mlxstacks.json"
    }
    document = json.loads(whole.pop("result.json"))
    whole.pop("result.md")
    del document["environment"], document["seal"]
    return {**whole, "result": json.dumps(document).encode()}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run_study(study(tmp_path_factory.mktemp("unbroken")))


def test_the_head_is_filled_by_the_engine(unbroken: Result) -> None:
    assert (unbroken.kind, unbroken.status, unbroken.standing.status) == (
        "coin", "done", "confirmatory",
    )  # fmt: skip
    assert unbroken.question == "Does the loaded coin fall on heads more often?"
    assert unbroken.plan is not None
    assert {*unbroken.provenance} == {"plan.json", "fair.json", "loaded.json"}
    assert unbroken.environment.seconds is not None
    assert Result.open(str(unbroken.directory)).standing.status == "confirmatory"


def stops() -> Iterator[Any]:
    """Where a run can be stopped: (name in the engine, call of it that is the last)."""
    for name in ("keep_plan", "run_step", "write_json", "keep_parts", "write_result"):
        for call in range(2 if name in ("run_step", "write_json") else 1):
            for when in ("before", "after"):
                yield pytest.param(name, call, when, id=f"{when} {name} {call}")


@pytest.mark.parametrize(("name", "call", "when"), [*stops()])
def test_a_stopped_run_ends_with_the_bytes_of_one_that_was_not(
    name: str,
    call: int,
    when: str,
    unbroken: Result,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, calls = getattr(engine, name), []

    def stopping(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if len(calls) - 1 == call and when == "before":
            raise KeyboardInterrupt
        result = real(*args, **kwargs)
        if len(calls) - 1 == call:
            raise KeyboardInterrupt
        return result

    with monkeypatch.context() as patched:
        patched.setattr(engine, name, stopping)
        with pytest.raises(KeyboardInterrupt):
            run_study(study(tmp_path))
    assert not (tmp_path / "coin").exists()
    about = run_study(study(tmp_path)).environment
    assert (about.seconds, about.peak_bytes) == (None, None)  # known of its last part alone
    assert files(tmp_path / "coin") == files(Path(str(unbroken.directory)))
    assert [path.name for path in tmp_path.iterdir()] == ["coin"]


def test_results_that_are_older_than_any_plan_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(engine, "keep_parts", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_study(study(tmp_path))
    (tmp_path / ".coin.work" / "plan.json").unlink()
    with pytest.raises(InputError, match=r"fair\.json.*a plan must be older than its results"):
        run_study(study(tmp_path))


def test_a_part_has_a_work_directory_of_its_own(tmp_path: Path) -> None:
    quick = Quick(coin.CoinSettings(save_path=f"{tmp_path}/coin/"))
    quick.part = ".limit-2"
    assert quick.work_target == tmp_path / "coin.limit-2"


def test_a_killed_process_leaves_a_run_that_goes_on(
    unbroken: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = (
        "import os, signal, sys; from tests.study import test_engine as t;"
        "toss = t.Quick.toss;"
        "t.Quick.toss = lambda self, arm, out: os.kill(os.getpid(), signal.SIGKILL)"
        " if arm == 'loaded' else toss(self, arm, out);"
        "t.main(t.Quick, t.coin.CoinSettings, sys.argv[1:])"
    )
    target = tmp_path / "coin"
    done = subprocess.run(
        [sys.executable, "-c", killed, str(target)],
        env={**os.environ, "PYTHONPATH": str(EXAMPLE.parents[1])},
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert not target.exists()
    work = tmp_path / ".coin.work"
    tossed: list[str] = []
    toss = Quick.toss

    def counted(self: Any, arm: str, directory: Path) -> None:
        tossed.append(arm)
        toss(self, arm, directory)

    monkeypatch.setattr(Quick, "toss", counted)
    assert {*json.loads((work / "steps.json").read_text())} == {"fair"}
    run_study(study(tmp_path))
    assert tossed == ["loaded"]
    assert files(target) == files(Path(str(unbroken.directory)))


def _stop_before_the_end(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Quick, "conclude", stop)
        with pytest.raises(KeyboardInterrupt):
            run_study(study(place))
    return place / ".coin.work"


def test_another_plan_is_refused_and_may_begin_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _stop_before_the_end(tmp_path, monkeypatch)
    with pytest.raises(InputError, match=r"other settings; it differs in\n  seed: was 0, now 1"):
        run_study(study(tmp_path, seed=1))
    assert run_study(study(tmp_path, seed=1, resume=False)).settings["seed"] == 1


def _flip(path: Path) -> None:
    path.write_text(path.read_text().replace("true", "false", 1))


CHANGES: dict[str, Callable[[Path], Any]] = {
    "an answer": lambda work: _flip(work / "fair.json"),
    "a file that is gone": lambda work: (work / "loaded.json").unlink(),
    "digests": lambda work: (work / "steps.json").write_text('{"fair": {"sha256": {}}}'),
    "digests of no shape": lambda work: (work / "steps.json").write_text('{"fair": [1]}'),
    "digests that are no JSON": lambda work: (work / "steps.json").write_text("{"),
    "the plan": lambda work: (work / "plan.json").write_text('{"seed": 0}'),
    "a plan that is no JSON": lambda work: (work / "plan.json").write_bytes(b"\xff"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_was_changed_in_the_work_directory_is_refused(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = _stop_before_the_end(tmp_path, monkeypatch)
    CHANGES[change](work)
    with pytest.raises(InputError, match=r"\.coin\.work"):
        run_study(study(tmp_path))
    assert not (tmp_path / "coin").exists()


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    planned = run_study(study(tmp_path), dry_run=True)
    assert planned.status == "planned"
    assert planned.plan_sha256 is not None
    assert [*tmp_path.iterdir()] == []


def test_an_existing_target_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    first = run_study(study(tmp_path))
    with pytest.raises(
        InputError, match=r"another plan was carried .*\n  seed: was 0, now 1\ngive"
    ):
        run_study(study(tmp_path, seed=1))
    assert Result.open(tmp_path / "coin").as_json() == {
        **first.as_json(), "notes": Result.open(tmp_path / "coin").as_json()["notes"],
    }  # fmt: skip
    assert run_study(study(tmp_path)).as_json() == Result.open(tmp_path / "coin").as_json()
    assert run_study(study(tmp_path, seed=1, force=True)).settings["seed"] == 1


def test_a_step_without_all_its_outputs_is_an_error(tmp_path: Path) -> None:
    step = Step("half", lambda out: (out / "a").write_text("1"), ("a", "b"))
    with pytest.raises(InputError, match=r"^step half left no b$"):
        run_step(step, tmp_path, None)
    assert not (tmp_path / "a").exists()


def test_a_conclusion_without_a_result_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coin.CoinStudy, "conclude", lambda self, directory: None)
    with pytest.raises(TypeError, match=r"returned a NoneType; return self\.result"):
        run_study(study(tmp_path))


def test_a_study_has_a_name_and_settings_of_its_own(tmp_path: Path) -> None:
    class Sweep(Quick):
        kind = "sweep"

    with pytest.raises(InputError, match="'sweep' is a command; name this study otherwise"):
        run_study(Sweep(coin.CoinSettings(save_path=str(tmp_path / "run"))))
    with pytest.raises(TypeError, match="a study takes its settings, not str: Quick"):
        Quick("run")


def test_a_script_ends_as_a_command_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(*words: str) -> int:
        return main(Quick, coin.CoinSettings, words)

    plan = coin.CoinStudy.plan
    # a tuple is read back as a list
    monkeypatch.setattr(Quick, "plan", lambda study: {**plan(study), "pair": (1, 2)})
    place = str(tmp_path / "coin")
    assert script(place, "tosses=40") == 0
    first = capsys.readouterr().out
    assert "Verdict: " in first
    monkeypatch.setattr(Quick, "toss", None)  # nothing is tossed again
    assert script(place, "tosses=40") == 0
    again = capsys.readouterr().out
    assert "Read again: 3 files" in again
    assert again.splitlines()[-2:] == first.splitlines()[-2:]
    for words, message in (
        ((place,), "another plan was carried out there; it differs in\n  tosses: was 40, now 400"),
        ((), "give SAVE_PATH [KEY=VALUE...]"),
        ((place, "tosses"), "give SAVE_PATH [KEY=VALUE...]"),
        (("-x",), "give SAVE_PATH [KEY=VALUE...]"),
        ((place, "tosss=3"), "no setting tosss: tosses?"),
        ((place, "tosses=many"), "tosses: Input should be a valid integer"),
    ):
        assert script(*words) == 2
        assert message in capsys.readouterr().err
    assert script("--help") == 0
    assert "\n  tosses (default 400)" in capsys.readouterr().out
    for error, code in ((KeyboardInterrupt(), 130), (OSError("full"), 1), (StoreError("no"), 1)):
        monkeypatch.setattr(own, "run_study", Mock(side_effect=error))
        assert script(str(tmp_path / "other")) == code


def test_patterns_name_what_steps_wrote_and_lists_are_yaml(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class Listed(coin.CoinSettings):  # type: ignore[name-defined]
        names: tuple[str, ...] = ()

    class ByPattern(Quick):
        artifacts = provenance = ("*.json",)

    assert main(ByPattern, Listed, [str(tmp_path / "coin"), "names=a,b", "tosses=9"]) == 0
    result = Result.open(tmp_path / "coin")
    assert {*result.provenance} == {"plan.json", "fair.json", "loaded.json"}
    assert result.settings["names"] == ["a", "b"]
    assert main(ByPattern, Listed, [str(tmp_path / "x"), "names=[a"]) == 2
    assert "names=[a: no YAML list" in capsys.readouterr().err


def test_a_plan_says_that_a_quick_look_decides_nothing(tmp_path: Path) -> None:
    class Limited(coin.CoinSettings):  # type: ignore[name-defined]
        limit: int = 3

    limited = Quick(Limited(save_path=str(tmp_path / "coin")))
    assert "the result will be EXPLORATORY" in run_study(limited, dry_run=True).notes[-1]


def test_a_study_of_ones_own_is_reported_and_shown(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("pandas")
    result = run_study(coin.CoinStudy(coin.CoinSettings(save_path=str(tmp_path / "coin"))))
    assert result.table("arms")["heads"].tolist() == [*result.data["heads"].values()]
    assert result.plot("shares").axes
    assert (tmp_path / "coin" / "shares.png").is_file()
    assert result.verdict in result._repr_markdown_()
    assert "](shares.png)" in (tmp_path / "coin" / "result.md").read_text()
    settings = ReportSettings(runs=(str(tmp_path / "coin"),), save_path=str(tmp_path / "page"))
    write_report(settings)
    page = (tmp_path / "page" / "index.html").read_text()
    assert result.question in page
    assert "No command of mlxstacks makes this result again" in page
    assert "<svg" in page


def test_what_a_study_of_ones_own_says_wrongly_is_one_line(tmp_path: Path) -> None:
    class Endless(coin.CoinStudy):  # type: ignore[name-defined]
        def conclude(self, work: Path) -> Result:
            return self.result(data={"odds": {"loaded": math.inf}})

    with pytest.raises(InputError, match=r"^coin: data\.odds\.loaded: inf cannot be"):
        run_study(Endless(coin.CoinSettings(save_path=str(tmp_path / "coin"))))


def _as_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what says that its module is `__main__` count as of a notebook."""
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    monkeypatch.setattr(Quick, "__module__", "__main__")


def test_code_that_was_changed_between_steps_makes_a_result_exploratory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a class in a notebook, which has no file; read back, it is told too."""
    _stop_before_the_end(tmp_path, monkeypatch)
    assert run_study(study(tmp_path)).standing.status == "confirmatory"
    (tmp_path / "edited").mkdir()

    _as_cells(monkeypatch)
    _stop_before_the_end(tmp_path / "edited", monkeypatch)  # by an edited `conclude`
    edited = run_study(study(tmp_path / "edited"))
    assert edited.standing.status == "exploratory"
    assert "code was changed after its first step" in edited.standing.reasons[0]
    again = run_study(study(tmp_path / "edited", force=True))
    assert again.standing.status == "confirmatory"
    assert len(run_study(study(tmp_path / "edited")).notes) == 1
    monkeypatch.setattr(Quick, "conclude", lambda self, work: None)
    assert (
        "Changed since this was made: code of Quick."
        in run_study(study(tmp_path / "edited")).notes[-1]
    )


@pytest.mark.parametrize("of", ["artifacts", "provenance"])
def test_a_pattern_that_names_nothing_loses_nothing(
    of: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Quick, of, ("fair.json", "laoded.json"))
    with pytest.raises(InputError, match=rf"^{of}: no step left a laoded\.json; nothing is lost"):
        run_study(study(tmp_path))
    assert (tmp_path / ".coin.work" / "loaded.json").is_file()


def _leave(file: str, directory: Path) -> None:
    (directory / file).write_text("1")


@pytest.mark.parametrize(
    ("second", "words"),
    [(("fair", "b.json"), "are called 'fair'"), (("b", "fair.json"), "leave fair.json")],
)
def test_steps_have_names_and_outputs_of_their_own(
    second: tuple[str, str], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def steps(self: Any, work: Path) -> Any:
        for name, file in (("fair", "fair.json"), second):
            yield Step(name, partial(_leave, file), outputs=(file,))

    monkeypatch.setattr(Quick, "steps", steps)
    with pytest.raises(InputError, match=f"two steps {words}"):
        run_study(study(tmp_path))


PREAMBLE = (
    "import mlx.core as mx, numpy as np, pandas as pd\nfrom pathlib import Path\n"
    "from collections import defaultdict\nfrom dataclasses import dataclass\n"
    "from functools import cache, partial\n"
    "@dataclass\nclass Reply:\n text: str\n def get(self, x): return self.text\n"
)
BARE = "def bare(f):\n def inner(*a): return f(*a)\n return inner"


def _cells(code: str, lines: int = 0) -> str:
    """Digest of a study in cells."""
    names = {"Quick": Quick, "__name__": "__main__", "cache": cache}
    exec(compile("\n" * lines + code, "<cell>", "exec"), names)
    return code_of(names["Own"], OwnStudy).digests["code of Own"]  # type: ignore[arg-type]


def test_code_is_told_by_what_it_does_not_by_where_it_stands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _as_cells(monkeypatch)
    codes = ["limit = 1", "limit = 2", "limit = {'a': 1}", "limit = {1, 2}", "limit = {1, 3}"]
    codes += [
        f"{way}\n def f(x): return x {test} {values}"
        for way, test in (("@staticmethod", "in"), ("@property", "not in"))
        for values in ("{'a', 'b'}", "{'a', 'c'}")
    ]
    codes = [f"class Own(Quick):\n {code}" for code in codes]
    codes += [
        f"{helper}\nclass Own(Quick):\n def steps(self, work): return [x for x in helper(work)]"
        for helper in (
            "def helper(x): return x", "def helper(x): return -x", "class helper: limit = 1",
            "class helper: limit = 2", "A = 1\ndef helper(x): return A",
            "A = {'a': [1, 2]}\ndef helper(x): return A",
            "A = {'a': [1, 3]}\ndef helper(x): return A",
            *(
                f"{PREAMBLE}A = {value}\ndef helper(x): return A"
                for value in (
                    "np.array([1, 2])", "np.array([1, 3])", "np.array([1.0, 2])",
                    "np.array(['a', None])", "np.array(['b', None])",
                    "mx.array([1, 2], mx.bfloat16)", "mx.array([1, 3], mx.bfloat16)",
                    "pd.DataFrame({'a': [1]})", "pd.DataFrame({'a': [2]})",
                    "pd.DataFrame({'b': [1]})", "pd.DataFrame({'a': [1]}, dtype='int8')",
                    "pd.Series([1])", "pd.Series([1], name='a')",
                    "pd.Series(pd.Categorical(['a'], categories=['a', 'b']))",
                    "pd.Series(pd.Categorical(['a'], categories=['b', 'a']))",
                    "defaultdict(lambda: 1)", "defaultdict(lambda: 2)", "{1: 2}.get", "{1: 3}.get",
                    "Reply('a')", "Reply('b')",
                    "partial(Reply, 'a')", "partial(Reply, 'b')", "Path('a')", "Path('b')", "None",
                )
            ),
            "@cache\ndef helper(x): return 1", "@cache\ndef helper(x): return 2",
            *(f"def helper(x, n={n}): return n" for n in (1, 2)),
            *(f"def helper(x, *, n={n}): return n" for n in (3, 4)),
            *(f"def make(n): return lambda x: n\nhelper = make({n})" for n in (5, 6)),
            *(f"{BARE}\n@bare\ndef helper(x): return {n}" for n in (7, 8)),
            *(f"{PREAMBLE}@np.vectorize\ndef helper(x): return {n}" for n in (9, 10)),
            *(f"{PREAMBLE}helper = Reply({n}).get" for n in (11, 12)),
            *(f"def helper(x): return helper.n\nhelper.n = {n}" for n in (13, 14)),
        )
    ]  # fmt: skip
    assert len({*map(_cells, codes)}) == len(codes)
    assert _cells(codes[0]) == _cells(codes[0], lines=5)
    assert _cells(codes[0]) == _cells(f"other = 1\ndef unused(): pass\n{codes[0]}")
    attribute = "class Own(Quick):\n def steps(self, work): return work.x"
    assert _cells(f"x = 1\n{attribute}") == _cells(f"x = 2\n{attribute}")


def test_what_a_function_of_a_file_encloses_is_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _as_cells(monkeypatch)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_making.py").write_text("def make(n): return lambda x: n\n")
    codes = [
        f"from own_making import make\nhelper = make({n})\n"
        "class Own(Quick):\n def steps(self, work): return helper(work)"
        for n in (1, 2)
    ]
    assert _cells(codes[0]) == _cells(codes[0]) != _cells(codes[1])
    names: dict[str, Any] = {"Quick": Quick, "__name__": "__main__"}
    exec("class Own(Quick):\n def steps(self, work):\n  from own_making import make", names)
    assert "own_making.py" in code_of(names["Own"], OwnStudy).digests


def test_what_a_study_was_given_belongs_to_it_as_it_was_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _as_cells(monkeypatch)
    cell = (
        "SEEN = []\nclass Own(Quick):\n"
        " def __init__(self, settings, rows):\n"
        "  super(Own, self).__init__(settings); self.rows = rows\n"
        " def conclude(self, work):\n"
        "  SEEN.append(1)\n"
        "  return self.result(outcome='none', verdict=f'{self.rows}.')\n"
    )

    def run(rows: Any) -> Result:
        names = {"Quick": Quick, "__name__": "__main__"}
        exec(cell, names)  # as after a restart
        given = coin.CoinSettings(save_path=str(tmp_path / "coin"))
        return run_study(names["Own"](given, rows))  # type: ignore[operator]

    def settings_that_give(n: int) -> str:
        names: dict[str, Any] = {
            "Settings": coin.CoinSettings,
            "Quick": Quick,
            "__name__": "__main__",
        }
        exec(f"class Own(Quick): pass\nclass Given(Settings):\n def f(self): return {n}", names)
        kind, given = names["Own"], names["Given"](save_path="out")
        return str(kind(given)._read_code()["code of Own"])

    assert settings_that_give(1) == settings_that_give(1) != settings_that_give(2)
    run(np.array([1]))
    assert "Changed" not in str(run(np.array([1])).notes)
    assert "Changed since this was made: code of Own" in str(run(np.array([2])).notes)


def test_what_cannot_be_watched_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _as_cells(monkeypatch)
    names: dict[str, Any] = {
        "Quick": Quick, "__name__": "__main__", "np": np, "random": random.Random(1),
        "model": nn.Linear(1, 1), "add": np.add, "log": print, "RATE": 1, "Linear": nn.Linear,
    }  # fmt: skip
    code = "random, model, np.add, add, log, RATE, Linear, len"
    exec(f"class Own(Quick):\n def plan(self):\n  {code}\n  return {{}}", names)
    given = coin.CoinSettings(save_path=str(tmp_path / "coin"))
    result = run_study(names["Own"](given))
    assert result.notes[-1] == "Used, but not watched for changes: model (Linear), random (Random)."


def test_files_that_a_study_imports_belong_to_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But what is installed does not."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "own_inner.py").write_text("import own_study, numpy\nLIMIT = 1\n")
    (tmp_path / "own_helper.py").write_text("from parts import own_inner\ndef f(): pass\n")
    (tmp_path / "own_study.py").write_text(
        "import json\nfrom own_helper import f\nfrom mlxstacks.study.own import OwnStudy\n"
        "class Own(OwnStudy): pass\n"
    )
    kind = importlib.import_module("own_study").Own
    before = code_of(kind, OwnStudy).digests
    assert before.keys() == {"own_study.py", "own_helper.py", "parts/own_inner.py"}
    (tmp_path / "parts" / "own_inner.py").write_text("LIMIT = 2\n")
    importlib.reload(importlib.import_module("parts.own_inner"))
    after = code_of(kind, OwnStudy).digests
    assert {name for name in before if before[name] != after[name]} == {"parts/own_inner.py"}


def test_what_a_step_left_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def conclude(self: Any, work: Path) -> Result:
        (work / "fair.json").write_text("[]")
        return self.result(outcome="none", verdict="Nothing.")

    monkeypatch.setattr(Quick, "conclude", conclude)
    with pytest.raises(InputError, match=r"fair\.json: what step 'fair' left there was changed"):
        run_study(study(tmp_path))
    assert not (tmp_path / "coin").exists()


def test_code_that_was_edited_after_its_import_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    _as_cells(monkeypatch)
    helper = tmp_path / "edited_helper.py"
    helper.write_text("def value(): return 1\n")
    cell = "import edited_helper\nfrom edited_helper import value\n" * 1
    names: dict[str, Any] = {"Quick": Quick, "__name__": "__main__"}
    code = "class Own(Quick):\n def plan(self): return {'value': value()}"
    exec(f"{cell}{code}", names)
    kind = names["Own"]
    before = code_of(kind, OwnStudy, is_new=True).digests
    helper.write_text("def value(): return 22\n")
    assert code_of(kind, OwnStudy).digests == before
    with pytest.raises(InputError, match=r"edited_helper\.py was edited after it was imported"):
        run_study(kind(coin.CoinSettings(save_path=str(tmp_path / "coin"))))
    importlib.invalidate_caches()
    helper.touch()
    os.utime(helper, (2e9, 2e9))
    importlib.reload(names["edited_helper"])
    with pytest.raises(InputError, match="value is from before edited_helper was loaded again"):
        code_of(kind, OwnStudy, is_new=True)
    exec(cell, names)
    assert code_of(kind, OwnStudy, is_new=True).digests != before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"provenance": ("fair.json",), "artifacts": ()}, "fair.json would not be kept"),
        ({"inputs": ("nowhere",)}, "inputs: nowhere: no such file or directory"),
    ],
)
def test_what_would_be_lost_or_is_not_there(
    changes: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in changes.items():
        monkeypatch.setattr(Quick, name, value)
    with pytest.raises(InputError, match=message):
        run_study(study(tmp_path))


def test_inputs_belong_to_the_plan_and_directories_to_the_provenance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data.csv").write_text("1\n")
    monkeypatch.setattr(Quick, "inputs", (str(tmp_path / "data.csv"),))

    def into(arm: str, directory: Path) -> None:
        (directory / "out").mkdir()
        _leave(f"out/{arm}.json", directory)

    def steps(self: Any, work: Path) -> Any:
        yield Step("a", partial(into, "a"), outputs=("out/a.json",))
        yield Step("b", partial(_leave, "b.json"), outputs=("b.json",))

    def conclude(self: Any, work: Path) -> Result:
        return self.result(outcome="none", verdict="Nothing.")

    for name, value in {"steps": steps, "conclude": conclude}.items():
        monkeypatch.setattr(Quick, name, value)
    for of in ("artifacts", "provenance"):
        monkeypatch.setattr(Quick, of, ("out",))
    result = run_study(study(tmp_path))
    assert {*result.provenance} == {"plan.json", "out/a.json"}
    assert "Not kept, for artifacts do not name it: b.json." in result.notes
    (tmp_path / "data.csv").write_text("2\n")
    with pytest.raises(InputError, match=r"inputs\.\S+data\.csv: has changed"):
        run_study(study(tmp_path))
    (tmp_path / "coin" / "out" / "a.json").write_text("3")
    assert Result.open(tmp_path / "coin").standing.status == "exploratory"


def test_slips_of_a_study_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(TypeError, match=r"outputs is a tuple, \('a\.json',\)"):
        Step("a", print, outputs="a.json")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"as in Quick\(MySettings\(\.\.\.\)\)"):
        run_study(Quick)  # type: ignore[arg-type]
    assert main(Quick, coin.CoinSettings, ["tosses=4"]) == 2
    assert main(Quick, coin.CoinSettings, [str(tmp_path / "x"), "seed=1", "seed=2"]) == 2
    assert "given twice: seed" in capsys.readouterr().err
    for name in ("plan", "steps"):
        nothing = type("Nothing", (Quick,), {name: lambda *_: None})
        with pytest.raises(TypeError, match=f"{name} (returned|gave) None"):
            run_study(nothing(coin.CoinSettings(save_path=str(tmp_path / name))))


@pytest.mark.parametrize("name", ["artifacts", "provenance", "inputs", "plot_formats"])
def test_a_forgotten_comma_is_told(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Quick, name, "a.json")
    with pytest.raises(TypeError, match=rf"^{name} is a tuple, \('a\.json',\)"):
        run_study(study(tmp_path))


def test_inputs_that_change_on_the_way_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "data.csv").write_text("1\n")
    monkeypatch.setattr(Quick, "inputs", (str(tmp_path / "data.csv"),))
    plain = Quick.conclude

    def conclude(self: Any, work: Path) -> Result:
        (tmp_path / "data.csv").write_text("2\n")
        return plain(self, work)

    monkeypatch.setattr(Quick, "conclude", conclude)
    with pytest.raises(InputError, match=r"data\.csv: changed while the study ran; resume=False"):
        run_study(study(tmp_path))


def test_a_directory_is_no_output(tmp_path: Path) -> None:
    step = Step("train", lambda directory: (directory / "models").mkdir(), ("models",))
    with pytest.raises(InputError, match="train: outputs are files; name those in models"):
        run_step(step, tmp_path, None)


def test_constants_of_a_module_that_is_loaded_again_belong_to_the_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_rates.py").write_text("RATE = 1\n")
    (tmp_path / "own_rated.py").write_text(
        "from own_rates import RATE\nfrom mlxstacks.study.own import OwnStudy\n"
        "class Own(OwnStudy):\n def f(self):\n  import json\n  from own_lazy import x\n"
    )
    (tmp_path / "own_lazy.py").write_text("raise SystemExit('imported')")
    importlib.invalidate_caches()
    kind = importlib.import_module("own_rated").Own
    before = code_of(kind, OwnStudy, is_new=True).digests
    assert before.keys() == {"own_rated.py", "own_rates.py", "own_lazy.py"}
    (tmp_path / "own_rates.py").write_text("RATE = 222\n")
    importlib.reload(sys.modules["own_rates"])
    with pytest.raises(InputError, match=r"own_rated\.py has values from before own_rates was loa"):
        code_of(kind, OwnStudy, is_new=True)
    kind = importlib.reload(sys.modules["own_rated"]).Own
    assert code_of(kind, OwnStudy, is_new=True).digests != before


def test_an_import_inside_a_function_is_no_reload(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_late.py").write_text("def late(): return 7\n")
    (tmp_path / "own_first.py").write_text(
        "from mlxstacks.study.own import OwnStudy\nclass Own(OwnStudy):\n"
        " def f(self):\n  from own_late import late\n  return late()\n"
    )
    importlib.invalidate_caches()
    kind = importlib.import_module("own_first").Own
    before = code_of(kind, OwnStudy, is_new=True).digests
    assert kind.f(None) == 7
    assert code_of(kind, OwnStudy, is_new=True).digests == before


def test_code_that_was_changed_within_a_log_makes_a_result_exploratory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step without outputs keeps what it has done; code that kept nothing does not count."""
    code = [""]
    monkeypatch.setattr(Quick, "artifacts", ("log",))
    monkeypatch.setattr(Quick, "provenance", ("log",))
    monkeypatch.setattr(own, "code_of", lambda *_, **__: Code({"s.py": code[0]}, ()))

    def log(self: Any, work: Path) -> Any:
        def add(work: Path) -> None:
            if code[0] != "kept nothing":
                (work / "log").write_text("1")
            if code[0] != "new":
                raise KeyboardInterrupt

        yield Step("log", add)

    monkeypatch.setattr(Quick, "steps", log)
    monkeypatch.setattr(
        Quick, "conclude", lambda self, work: self.result(outcome="none", verdict="Nothing.")
    )
    for code[0] in ("kept nothing", "old"):
        with pytest.raises(KeyboardInterrupt):
            run_study(study(tmp_path))
    code[0] = "new"
    assert run_study(study(tmp_path)).standing.status == "exploratory"
    assert json.loads((tmp_path / "coin" / "result.json").read_text())["standing"]["reasons"]


def test_what_a_step_leaves_besides_its_outputs_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def both(directory: Path) -> None:
        _leave("a.json", directory)
        (directory / "logs").mkdir()
        _leave("logs/b.json", directory)

    monkeypatch.setattr(Quick, "steps", lambda self, work: [Step("a", both, ("a.json",))])
    monkeypatch.setattr(
        Quick, "conclude", lambda self, work: self.result(outcome="none", verdict="Nothing.")
    )
    for of in ("artifacts", "provenance"):
        monkeypatch.setattr(Quick, of, ("a.json", "logs/*"))
    result = run_study(study(tmp_path))
    assert {*result.provenance} == {"plan.json", "a.json", "logs/b.json"}


def test_what_two_steps_leave_does_not_meet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def both(name: str, directory: Path) -> None:
        for file in (name, "log.txt"):
            _leave(file, directory)

    steps = [Step(name, partial(both, name), (name,)) for name in ("a", "b")]
    monkeypatch.setattr(Quick, "steps", lambda self, work: steps)
    with pytest.raises(InputError, match=r"step b left log\.txt, as an earlier step did"):
        run_study(study(tmp_path))
    assert (tmp_path / ".coin.work" / ".b" / "log.txt").is_file()


def test_a_study_of_a_module_that_nobody_registered_has_code_too(tmp_path: Path) -> None:
    (tmp_path / "own_loose.py").write_text(
        "from mlxstacks.study.own import OwnStudy\n"
        "class Own(OwnStudy):\n def f(self):\n  from . import nothing\n"
    )
    spec = importlib.util.spec_from_file_location("own_loose", tmp_path / "own_loose.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert code_of(module.Own, OwnStudy).digests.keys() == {"code of Own"}
    sys.modules["own_loose"] = module
    try:
        assert code_of(module.Own, OwnStudy).digests.keys() == {"own_loose.py"}
    finally:
        del sys.modules["own_loose"]
