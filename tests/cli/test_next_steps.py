"""What a command says to do next runs as it is printed, whatever the paths hold and in 40 columns.

Run: pytest tests/cli/test_next_steps.py
"""

import importlib
import io
import re
import shlex
import sys
from pathlib import Path

import pytest

from mlxstacks.command_line import command_line
from tests.cli.conftest import Run
from tests.studies.stack_cases import domain_rows
from tests.studies.train_cases import write_rows, write_tiny_model
from tests.tiny_models import random_adapter

_STEP = re.compile(r"^(?:Try it|Next|See also|.* without): ((?:mlxstacks|mlx_lm)\S* .*)$", re.M)
_IN_BACKTICKS = re.compile(r"`(mlxstacks [^`]*)`")


@pytest.fixture
def place(work_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory whose name a shell would tear, in a terminal that is narrow."""
    monkeypatch.setenv("COLUMNS", "40")
    directory = work_dir / 'it\'s a "place" & more'
    directory.mkdir()
    monkeypatch.chdir(directory)
    return directory


@pytest.fixture
def paste(command: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """`paste(line)` runs a line as a shell would read it."""

    def call(*lines: str) -> tuple[int, str, str]:
        program, *words = shlex.split(lines[0])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"red blue\n")))
        if program == "mlxstacks":
            return command(*words, *(["--max-tokens", "2"] if words[0] == "chat" else []))
        monkeypatch.setattr(sys, "argv", [program, *words])
        importlib.import_module(program).main()
        return 0, "", ""

    return call


def run_steps(paste: Run, out: str, expected: list[str]) -> list[str]:
    """Runs the steps that are printed; `expected` is what they begin with. Returns their output."""
    steps = _STEP.findall(out)
    assert [step[: len(start)] for step, start in zip(steps, expected, strict=True)] == expected
    outputs = []
    for step in steps:
        code, printed, err = paste(step)
        assert code == 0, f"{step}\n{err}"
        outputs.append(printed)
    return outputs


def test_fuse_and_train(place: Path, paste: Run) -> None:
    model = write_tiny_model(Path("my model"))
    random_adapter(model, ["self_attn.q_proj"], directory=Path("my adapter"))
    _, out, err = paste("mlxstacks fuse --model 'my model' --adapter-path 'my adapter' "
                        "--save-path 'it is fused' --requant dequantize")  # fmt: skip
    assert out, err
    assert out.splitlines()[-1].startswith("Verdict: ") or "Verdict: " in out
    chat, _ = run_steps(paste, out, ["mlxstacks chat", "mlx_lm.convert"])
    assert "it is fused." in chat
    write_rows(place / "my data/train.jsonl", domain_rows("alpha", 4))
    _, out, err = paste("mlxstacks train --model 'my model' --data 'my data' --iters 1 --rank 2 "
                        "--keys q_proj --save-path \"it's new\"")  # fmt: skip
    assert out, err
    [chat] = run_steps(paste, out, ["mlxstacks chat"])
    assert "my model; base with it's new" in " ".join(chat.split())
    (place / "my recipe.yaml").write_text("command: adapter show\nadapter_path: my adapter\n")
    code, _, err = paste("mlxstacks fuse --recipe 'my recipe.yaml'")
    [run] = _IN_BACKTICKS.findall(err.replace("`adapter show`", "").replace("`fuse`", ""))
    assert (code, paste(run)[0]) == (2, 0), err


def test_from_stacks_to_a_routed_chat(place: Path, paste: Run, command: Run) -> None:
    write_tiny_model(Path("my model"))
    for name in ("alpha", "beta"):
        write_rows(place / f"my data/{name}.jsonl", domain_rows(name, 8))
    _, out, err = command(
        "stack", "--model", "my model", "--data", "my data", "--save-path", "my store",
        "--keys", "q_proj", "--iters", "16", "--rounds", "1", "--validation-rows", "2",
        "--learning-rate", "0.01",
        "--set", "stack.rank=2", "--set", "null_space=null", "--max-seq-length", "64",
        "--domains", "alpha", "--domains", "beta",
    )  # fmt: skip
    assert out, err
    _, chat = run_steps(paste, out, ["mlxstacks stacks list", "mlxstacks chat --ungated"])
    assert "ungated: alpha, beta" in " ".join(chat.split())
    # without a model: the store knows where its base is
    code, _, err = paste("mlxstacks chat --routed --store-path 'my store'")
    discover, train = _IN_BACKTICKS.findall(err)
    assert (code, train) == (2, command_line("mlxstacks route train", place / "my store"))
    options = "--data 'my data' --samples-per-domain 2 --save-path 'my outcomes'"
    code, out, err = paste(f"{discover} {options}")
    assert code == 0, err
    [trained] = run_steps(paste, out, ["mlxstacks route train"])
    [chat] = run_steps(paste, trained, ["mlxstacks chat --routed"])
    assert "my model" in " ".join(chat.split())


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        (command_line("mlxstacks chat", model=None, routed=False), "mlxstacks chat"),
        (command_line("mlxstacks stacks list", "-odd"), "mlxstacks stacks list ./-odd"),
        (command_line("x", prompt="-odd", adapter_path=("a", "b c")),
         "x --prompt=-odd --adapter-path a --adapter-path 'b c'"),
        (command_line("x", "$HOME/`id`;\n", allow_base=True), "x '$HOME/`id`;\n' --allow-base"),
    ],
)  # fmt: skip
def test_words_are_quoted(line: str, printed: str) -> None:
    assert line == printed
