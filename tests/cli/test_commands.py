"""What every command has in common: output, exit codes, targets, resuming, help.

Run: pytest tests/cli/test_commands.py
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from mlxstacks.cli import make_group
from mlxstacks.cli.execute import _nano_note
from mlxstacks.files.outputs import read_mark
from mlxstacks.recipe.file import load_recipe
from tests.cli.conftest import Run


def test_result_is_a_table_or_one_document(toy: Path, command: Run) -> None:
    code, out, err = command("toy")
    assert (code, "toy made" in out) == (0, True)
    code, out, err = command("toy", "--json")
    assert code == 0
    assert json.loads(out)["done"] is True
    assert "a library that prints" in err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["toy", "--set", "fail=input"], 2, "toy.safetensors: got 3 bytes"),
        (["toy", "--set", "fail=bug"], 1, "ZeroDivisionError: seven by nothing"),
        (["toy", "--set", 'kind="a\\0"'], 2, "kind: holds a NUL character"),
        (["toy", "--set", 'kind=[{a: ["\\0"]}]'], 2, "kind: holds a NUL character"),
        (["toy", "--set", f"kind={1 << 64}"], 2, "kind: holds a number of 65 bits"),
        (["toy", "--set", "fail=compiler"], 1, "MLX could not compile a kernel in /"),
        (["toy", "--set", "fail=path"], 2, "xxx: File name too long; look at that path"),
        (["toy", "--set", "fail=interrupt"], 130, "interrupted"),
        (["eval", "--arms", "base,fusd"], 2, "got 'fusd', allowed: base, adapter, "),
        (["toy", "--set", "fail=gate"], 3, "Gate not met: 0.3 is below 0.5"),
        (["toy", "--kind", "fancier"], 2, "did you mean 'fancy'?"),
        (["toy", "--bits", "7"], 2, "got '7', allowed: 3, 4, none"),
        (["toy", "--knid", "fancy"], 2, "--kind"),
        (["toy", "--ratio", "1.5"], 2, "ratio: got 1.5; must be less than or equal to 1"),
        (["toy", "--count", "many"], 2, "'many' is not a valid integer"),
        (["toy", "--set", "knid=fancy"], 2, "unknown key 'knid'; did you mean 'kind'?"),
        (["toy", "--set", "inner.step=1"], 2, "'inner.step'; did you mean 'inner.steps'?"),
        (["toy", "--set", "kind=fancier"], 2, "kind: got 'fancier', allowed: 'plain' or 'fancy'"),
        (["toy", "--set", "kind"], 2, "--set takes key=value; got 'kind'"),
        (["toi"], 2, "no command 'toi'; did you mean 'toy'?"),
        (["toybox", "reed"], 2, "no command 'reed'; did you mean 'read'?"),
        (["toybox", "read", "--model", "m"], 2, "a model of your own needs --adapter-path too"),
        (["toybox", "read", "--model", ""], 2, "a model of your own needs --adapter-path too"),
        (["toy", "--recipe", ""], 2, "recipe '': no such file"),
        (["run", "toi"], 2, "recipe 'toi': no such file"),
        (["run"], 2, "RECIPE is missing"),
        (["stacks", "diff", "--dry-run"], 2, "stacks diff needs STORE (--store-path), OTHER"),
        (["route", "explain", "--dry-run"], 2, "route explain needs PROMPT (--prompt)"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_exit_codes_and_messages(
    toy: Path, command: Run, arguments: list[str], code: int, message: str
) -> None:
    found, out, err = command(*arguments)
    assert (found, message in err) == (code, True), err
    assert "Traceback" not in err + out


def test_several_problems_come_in_one_message(toy: Path, command: Run) -> None:
    _, _, err = command("toy", "--count", "0", "--ratio", "2", "--set", "colour=red")
    assert all(key in err for key in ("count: got 0", "ratio: got 2.0", "unknown key 'colour'"))


def test_v_shows_the_traceback(toy: Path, command: Run) -> None:
    assert "Traceback" in command("toy", "-v", "--set", "fail=bug")[2]


def test_errors_are_a_document_too(toy: Path, command: Run) -> None:
    _, out, err = command("toy", "--json", "--set", "fail=input")
    error = json.loads(out)["error"]
    assert (error["kind"], error["exit_code"]) == ("InputError", 2)
    assert error["message"] in err


def test_closed_pipe_is_quiet(toy: Path, command: Run) -> None:
    with pytest.raises(SystemExit) as stopped:
        command("toy", "--set", "fail=pipe")
    assert stopped.value.code == 1


# --- targets --------------------------------------------------------------------------------------


def test_bare_run_replaces_what_a_bare_run_wrote(toy: Path, command: Run) -> None:
    target = toy / "mlxstacks-out" / "toy"
    assert command("toy")[0] == 0
    assert (read_mark(target) or {})["bare_run"]
    assert command("toy")[0] == 0


def test_a_bare_run_does_not_replace_the_result_of_other_settings(toy: Path, command: Run) -> None:
    assert command("toy", "--count", "4")[0] == 0
    for more in ((), ("--dry-run",)):
        code, out, err = command("toy", *more)
        said = "mlxstacks-out/toy: holds the result of other settings\n  count: was 4, now "
        assert (code, said in out + err) == (0 if more else 2, True)
    assert command("toy", "--count", "4")[0] == 0
    assert command("toy", "--save-path", "mine")[0] == 0
    assert command("toy", "--force")[0] == 0


def test_a_target_with_a_name_too_long_is_bad_input(toy: Path, command: Run) -> None:
    code, _, message = command("toy", "--save-path", "x" * 300)
    assert (code, "not a usable target (File name too long)" in message) == (2, True)


def test_after_ctrl_c_it_is_said_what_is_kept(toy: Path, command: Run) -> None:
    stopped = ("toy", "--set", "fail=interrupt")
    assert "is kept in" not in command(*stopped)[2]
    work = toy / "mlxstacks-out" / ".toy.work"
    work.mkdir(parents=True)
    (work / "run.json").touch()
    assert "Nothing was saved yet: the same command begins" in command(*stopped)[2]
    (work / "checkpoint.safetensors").touch()
    code, _, err = command(*stopped)
    kept = "mlxstacks-out/.toy.work: the same command resumes"
    assert (code, kept in err) == (130, True)
    assert kept in command("toy", "--dry-run")[2]


def test_bare_run_leaves_anything_else_alone(toy: Path, command: Run) -> None:
    target = toy / "mlxstacks-out" / "toy"
    target.mkdir(parents=True)
    (target / "mine.txt").write_text("mine")
    code, _, err = command("toy")
    assert (code, "--force" in err) == (2, True)
    assert (target / "mine.txt").read_text() == "mine"


def test_named_target_needs_force(toy: Path, command: Run) -> None:
    assert command("toy", "--save-path", "out")[0] == 0
    assert "bare_run" not in (read_mark(toy / "out") or {})
    assert command("toy", "--save-path", "out")[0] == 2
    assert command("toy", "--save-path", "out", "--force")[0] == 0


def test_dry_run_touches_nothing(toy: Path, command: Run) -> None:
    code, out, _ = command("toy", "--dry-run")
    assert (code, "would write mlxstacks-out/toy" in out) == (0, True)
    code, out, _ = command("toy", "--dry-run", "--json")
    assert json.loads(out)["data"]["writes"] == ["mlxstacks-out/toy"]
    assert list(toy.iterdir()) == []


def test_dry_run_refuses_what_no_force_replaces(toy: Path, command: Run) -> None:
    assert command("toy", "--save-path", "mine")[0] == 0
    code, out, _ = command("toy", "--dry-run", "--save-path", "mine", "--json")
    plan = json.loads(out)
    assert (code, plan["settings"]["force"]) == (0, False)
    assert "A run would refuse: " in plan["notes"][-1]
    (toy / "out").mkdir()
    (toy / "out" / "thesis.tex").touch()
    assert command("toy", "--dry-run", "--save-path", "out")[0] == 2


def test_nothing_given_means_nano(toy: Path, command: Run) -> None:
    _, out, _ = command("toybox", "read", "--json")
    expected = {"model": "built-in/model", "adapter_path": ["built-in/adapter"]}
    assert json.loads(out)["settings"] == expected
    _, out, err = command("toybox", "read", "--adapter-path", "mine")
    assert "Using nano, the built-in model." in err


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (["model", "data"], "Using nano, the built-in model and its sample data."),
        (["store_path"], "Using nano's sample stacks."),
        (["model", "adapter_path", "store_path", "data"],
         ("Using nano, the built-in model, its sample adapter, its sample stacks and its sample "
         "data.")),
    ],
)  # fmt: skip
def test_what_of_nano_is_used_is_one_sentence(keys: list[str], words: str) -> None:
    assert _nano_note(keys) == words


def test_ctrl_c_after_the_work_is_still_130() -> None:
    """At the end of the interpreter Python reports it and exits with what was to be, 0."""
    code = (
        "import atexit, os, signal, sys\n"
        "atexit.register(os.kill, os.getpid(), signal.SIGINT)\n"
        "from mlxstacks.cli import main\n"
        "sys.argv = ['mlxstacks', '--version']\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout[:9], done.stderr) == (130, "mlxstacks", "")


# --- recipes --------------------------------------------------------------------------------------


@pytest.fixture
def recipe(toy: Path) -> Path:
    path = toy / "mine.yaml"
    path.write_text("# Make a fancy toy.\ncommand: toy\nkind: fancy\ncount: 3\nratio: 0.5\n")
    return path


def test_later_wins(recipe: Path, command: Run) -> None:
    typed = ["--set", "count=4", "--set", "ratio=0.7", "--ratio", "0.9"]
    _, out, _ = command("toy", "--recipe", "mine.yaml", "--json", *typed)
    found = json.loads(out)["settings"]
    assert [found[k] for k in ("bits", "kind", "count", "ratio")] == [4, "fancy", 4, 0.9]


@pytest.mark.parametrize(
    ("line", "typed", "message"),
    [
        ("cuont: 3", [], "error: recipe mine.yaml: unknown key 'cuont'; did you mean 'count'?"),
        ("inner: {rate: x}", [], "error: recipe mine.yaml: inner.rate: got 'x'"),
        ("save_path: ~nobody-here/x", [], "error: recipe mine.yaml: "),
        ("count: 3", ["--set", "count=none"], "error: count: got 'none'"),
    ],
)
def test_a_fault_of_a_recipe_names_its_file(
    toy: Path, command: Run, line: str, typed: list[str], message: str
) -> None:
    (toy / "mine.yaml").write_text(f"command: toy\n{line}\n")
    code, _, err = command("run", "mine.yaml", *typed)
    assert (code, err[: len(message)]) == (2, message)


def test_run_writes_to_the_name_of_the_recipe_and_is_resumable(recipe: Path, command: Run) -> None:
    code, out, _ = command("run", "mine.yaml")
    assert (code, "toy made" in out) == (0, True)
    assert (read_mark(recipe.parent / "mlxstacks-out" / "mine") or {})["bare_run"]
    code, out, _ = command("run", "mine.yaml")
    assert (code, "Already done" in out, "Made" in out) == (0, True, True)
    assert json.loads(command("run", "mine.yaml", "--json")[1])["already_done"] is True
    for more in ((), ("--dry-run",)):
        code, out, err = command("run", "mine.yaml", "--set", "count=6", *more)
        said = "holds the result of other settings\n  count: was "
        assert (code, said in out + err) == (0 if more else 2, True)
    forced = ("--set", "count=6", "--set", "force=true")
    assert "toy made" in command("run", "mine.yaml", *forced)[1]
    assert "toy made" in command("run", "mine.yaml", "--set", "count=5", "--set", "force=true")[1]


def test_run_takes_the_options_of_the_command_of_its_recipe(recipe: Path, command: Run) -> None:
    typed = ("run", "mine.yaml", "--save-path", "there", "--ratio", "0.25", "--copy")
    settings = json.loads(command(*typed, "--json")[1])["settings"]
    assert (settings["ratio"], settings["copy_files"]) == (0.25, True)
    assert "Already done" in command(*typed)[1]
    assert "toy made" in command(*typed, "--seed", "3", "--force")[1]
    assert "toy made" in command("run", "--recipe", "mine.yaml", "--count", "7", "--force")[1]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["mine.yaml", "--raito", "1"], "No such option '--raito'. (Did you mean one of: '--bits'"),
        (["mine.yaml", "--ratio", "much"], "'much' is not a valid float"),
        (["mine.yaml", "yours.yaml"], "Got unexpected extra argument (yours.yaml)"),
        (["--ratio", "1", "mine.yaml"], "RECIPE comes first, then --ratio"),
        (["mine.yaml", "--recipe", "mine.yaml"], "two recipes are given"),
    ],
)
def test_run_refuses_what_the_command_of_its_recipe_does_not_know(
    recipe: Path, command: Run, typed: list[str], message: str
) -> None:
    code, _, err = command("run", *typed)
    assert (code, message in err) == (2, True), err
    assert "See `mlxstacks " in err


def test_a_dry_run_says_what_the_recipe_says_of_itself(toy: Path, command: Run) -> None:
    (toy / "mine.yaml").write_text(
        "# Make a toy, and\n# a fancy one.\n#\n# Command:  mlxstacks run mine\n"
        "# Memory:   2 GB\n# Time:     an hour\n#           or two\n#\n"
        "# Published: nothing,\n# anywhere. Get it:\n#   hf download it\ncommand: toy\n"
    )
    _, out, _ = command("run", "mine.yaml", "--dry-run")
    assert {"Memory:   2 GB", "Time:     an hour", "  hf download it"} <= set(out.splitlines())
    assert "Make a toy" not in out
    assert "2 GB" not in command("run", "mine.yaml", "--dry-run", "--json")[1]
    assert load_recipe("mine.yaml").about == "Make a toy, and a fancy one."


def test_recipe_of_another_command_is_refused(recipe: Path, command: Run) -> None:
    code, _, err = command("toybox", "read", "--recipe", "mine.yaml")
    assert (code, "is for `toy`, not for `toybox read`" in err) == (2, True)


# --- help -----------------------------------------------------------------------------------------


def python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
        check=False,
    )


def test_help_imports_nothing_heavy() -> None:
    """Law: `mlxstacks --help` loads neither settings models nor arrays nor tables."""
    done = python(
        "import sys; from mlxstacks.cli import run; run(['--help'])\n"
        "heavy = {'mlx', 'mlx_lm', 'numpy', 'pydantic', 'rich', 'yaml'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    assert done.returncode == 0, done.stderr
    assert "fuse" in done.stdout


def test_help_of_a_command_needs_no_arrays() -> None:
    done = python(
        "import sys; from mlxstacks.cli import run\n"
        "for name in ('fuse', 'adapter zero', 'nano export', 'doctor'):\n"
        "    assert run([*name.split(), '--help']) == 0\n"
        "heavy = {'mlx', 'mlx_lm', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("--json") == 4


def test_no_arguments_prints_the_help(command: Run) -> None:
    code, out, _ = command()
    assert (code, "Models and adapters:" in out) == (0, True)
    code, out, _ = command("adapter")
    assert (code, "convert" in out) == (0, True)


def test_alias_is_the_same_command(command: Run) -> None:
    assert (
        command("zero", "--help")[1].split("[OPTIONS]")[1]
        == (command("adapter", "zero", "--help")[1].split("[OPTIONS]")[1])
    )


@pytest.mark.parametrize(
    ("words", "incomplete", "expected"),
    [
        ([], "f", "fuse"),
        (["adapter"], "c", "convert"),
        (["fuse", "--requant"], "ke", "keep"),
        (["run"], "fuse-z", "fuse-zero-delta"),
        (["fuse"], "--zero", "--zero-delta"),
    ],
)
def test_shell_completion(words: list[str], incomplete: str, expected: str) -> None:
    complete = BashComplete(make_group(), {}, "mlxstacks", "_MLXSTACKS_COMPLETE")
    assert expected in [item.value for item in complete.get_completions(words, incomplete)]


def test_closed_standard_streams_are_nobody_elses_files() -> None:
    """MLX cannot read a file that gets number 0; prints to nowhere are no error."""
    program = """
import os, sys
import click
import mlxstacks.cli as cli
@click.command()
def show():
    print("to nowhere")
    sys.stderr.write(f"{sys.stdin.read()!r} {os.open(os.devnull, os.O_RDONLY)}")
cli.make_group = lambda: show
cli.main()
"""
    command = ["sh", "-c", 'exec "$0" -c "$1" <&- >&-', sys.executable, program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr[:3]) == (0, "'' "), done.stderr
    assert int(done.stderr[3:]) > 2


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_ends_a_run_like_ctrl_c(name: str) -> None:
    """What was being written is cleaned up: the signal arrives as an exception."""
    program = f"""
import os, signal, time
import click
import mlxstacks.cli as cli
@click.command()
def sleeper():
    try:
        os.kill(os.getpid(), signal.{name})
        time.sleep(60)
    finally:
        print("cleaned up", flush=True)
cli.make_group = lambda: sleeper
# Under nohup, or in the background of a script, a signal may be ignored by inheritance.
signal.signal(signal.{name}, {{"SIGINT": signal.default_int_handler}}.get("{name}", signal.SIG_DFL))
cli.main()
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "cleaned up\n")
    assert "interrupted" in done.stderr


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full here")
@pytest.mark.parametrize(
    ("script", "code", "told"),
    [
        ("output.note('first'); output.note('second'); print('done')", 0, "done"),
        ("sys.exit(cli.run(['fuse', '--nope', '--json']))", 2, '"exit_code": 2'),
    ],
)
def test_a_log_that_takes_no_more_ends_nothing(script: str, code: int, told: str) -> None:
    script = f"import sys; from mlxstacks import cli; from mlxstacks.cli import output; {script}"
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=full, text=True
        )
    assert (ended.returncode, told in ended.stdout) == (code, True)


def test_paths_by_position_are_answered_where_they_are_options(command: Run) -> None:
    code, _, err = command("fuse", "m4", "ad")
    assert code == 2
    shown = "by option, --model MODEL --adapter-path ADAPTER_PATH --save-path SAVE_PATH"
    assert shown in " ".join(err.split())
