"""Every option of mlx-lm's commands and of lm_eval works here, or is answered by what to do
instead; so are the names that users of PEFT, Transformers and Unsloth type.

Parsers are read from their sources: importing `mlx_lm.evaluate` takes seconds.
Run: pytest tests/recipe/test_spellings.py
"""

import ast
import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Any

import click
import pytest

from mlxstacks.cli import group, make_group
from mlxstacks.recipe.spellings import LETTERS, NEAREST, REFUSED, SPELLINGS
from mlxstacks.recipe.table import COMMANDS, load
from tests.cli.conftest import Run

OURS = {
    "generate": ("mlx_lm.generate",), "chat": ("mlx_lm.chat",), "fuse": ("mlx_lm.fuse",),
    "train": ("mlx_lm.lora",), "eval": ("mlx_lm.evaluate", "lm_eval._cli.run"),
    "convert": ("mlx_lm.convert",), "serve": ("mlx_lm.server",),
}  # fmt: skip
# Fields of peft.LoraConfig, transformers.TrainingArguments and Unsloth's loaders.
OF_TRAINERS = (
    "r", "lora_r", "lora_rank", "lora_alpha", "lora_dropout", "target_modules", "use_rslora",
    "use_dora", "model_name", "model_name_or_path", "max_seq_length", "max_length", "load_in_4bit",
    "load_in_8bit", "full_finetuning", "use_gradient_checkpointing", "gradient_checkpointing",
    "dataset", "dataset_name", "output_dir", "per_device_train_batch_size", "max_grad_norm",
    "gradient_accumulation_steps", "learning_rate", "lr", "lr_scheduler_type", "warmup_steps",
    "warmup_ratio", "weight_decay", "num_train_epochs", "epochs", "max_steps", "logging_steps",
    "eval_steps", "save_steps", "seed", "optim", "bf16", "fp16", "resume_from_checkpoint",
    "push_to_hub", "device",
)  # fmt: skip


@cache
def options_of(module: str) -> dict[str, list[str]]:
    """Spelling -> what may follow it, from the `add_argument` calls of a module."""
    package, *inside = module.split(".")
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).parent.joinpath(*inside).with_suffix(".py").read_text()
    found: dict[str, list[str]] = {}
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or getattr(node.func, "attr", "") != "add_argument":
            continue
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
        several = keywords.get("nargs") in ("'+'", "'*'")
        flag = re.search("store_|Boolean|argparse", keywords.get("action", ""))
        values = [] if flag else ["1", "2"] if several else ["1"]
        for spelling in [ast.literal_eval(argument) for argument in node.args]:
            found[spelling] = values
            if "BooleanOptionalAction" in keywords.get("action", ""):
                found[f"--no-{spelling.removeprefix('--')}"] = values
    assert len(found) > 5
    return found


def options_typed(monkeypatch: pytest.MonkeyPatch, command: str, *arguments: str) -> dict[str, Any]:
    """The settings that a command line gives."""
    typed: dict[str, Any] = {}
    monkeypatch.setattr(group, "execute", lambda name, options, common: typed.update(options) or 0)
    make_group().main([command, *arguments], standalone_mode=False)
    return typed


@pytest.mark.parametrize("command", OURS)
def test_each_option_works_or_is_answered(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refused, unanswered = set(), {}
    theirs = {option: values for one in OURS[command] for option, values in options_of(one).items()}
    for option, values in theirs.items():
        message = ""
        try:
            options_typed(monkeypatch, command, option, *values)
        except click.BadParameter:  # the value is not one of ours, the option is
            pass
        except click.UsageError as error:  # a flag here may take a value there, as -v
            message = "" if "unexpected extra" in error.message else error.message
        typed = option.replace("_", "-")
        answered = [o for o in (typed, typed[:2]) if re.search(rf"no option {o}( 1)?: ", message)]
        refused |= set(answered)
        if message and not answered:
            unanswered[option] = message
    assert not unanswered
    of_generate = set(options_of("mlx_lm.generate")) if command == "chat" else set()
    stale = set(REFUSED.get(command, {})) - refused - of_generate - {"--verbose"}
    assert not stale, "mlx-lm has no such option, or it works here"


@pytest.mark.parametrize(
    ("name", "command"),
    [(name, command) for command in ("train", "stack") for name in OF_TRAINERS],
)
def test_names_of_trainers_work_or_are_answered(
    name: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = ""
    try:
        options_typed(monkeypatch, command, f"--{name}", "1")
    except click.BadParameter:
        pass
    except click.UsageError as error:
        message = error.message
    a_flag = re.search("unexpected extra argument|no command '1'", message)
    assert not message or a_flag or f"no option --{name.replace('_', '-')}: " in message


def test_a_sweep_takes_several_numbers_by_train_s_names(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = options_typed(monkeypatch, "sweep", "--rank", "4,8", "--ranks", "16", "--seed", "0,1")
    assert typed == {"ranks": [4, 8, 16], "seeds": [0, 1]}
    with pytest.raises(click.BadParameter, match="'x' is not a valid integer"):
        options_typed(monkeypatch, "sweep", "--ranks", "4,x")


def test_no_table_names_a_setting_that_is_not_there() -> None:
    settings = {c: set(load(row.settings).model_fields) for c, row in COMMANDS.items()}
    everywhere = {name for names in settings.values() for name in names}
    for command, table in SPELLINGS.items():
        assert set(table) <= (settings[command] if command else everywhere), command
    assert set(LETTERS) <= everywhere
    assert {setting for setting, _ in NEAREST.values()} <= everywhere


@pytest.mark.parametrize("command", COMMANDS)
def test_a_path_is_given_the_same_way_everywhere(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its option, whatever stands by position too; by one letter where it is a model."""
    row = COMMANDS[command]
    for name, field in load(row.settings).model_fields.items():
        several = "tuple" in str(field.annotation)
        if name in row.arguments or name in ("model", "store_path", "adapter_path", "save_path"):
            value: Any = ["here"] if several else "here"
            for flag in [LETTERS[name]] if name in LETTERS else []:
                assert options_typed(monkeypatch, *command.split(), flag, "here") == {name: value}
            flag = "--" + name.replace("_", "-")
            typed = options_typed(monkeypatch, *command.split(), flag, "here")
            assert {key: str(v) if not several else v for key, v in typed.items()} == {name: value}


@pytest.mark.parametrize(
    "line",
    ["stacks export s stack out", "stacks export --store-path s stack out",
     "stacks export --store s stack --save-path out", "stacks export s stack out --store-path s",
     "stacks export s out --stack stack", "stacks export s stack --output-dir=out"],
)  # fmt: skip
def test_what_stands_by_position_fills_what_no_option_gives(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert options_typed(monkeypatch, *line.split()) == {
        "store_path": "s", "stack": "stack", "save_path": "out"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "settings"),
    [
        ("generate -p hello -m here", {"prompt": "hello", "model": "here"}),
        ("generate -p a --max_new_tokens 3 --temperature 1",
         {"prompt": "a", "max_tokens": 3, "temp": 1.0}),
        ("generate --prompt=--store", {"prompt": "--store"}),
        ("generate -- --store", {"prompt": "--store"}),
        ("chat store --routed", {"store_path": "store", "routed": True}),
        ("generate hello there", {"prompt": "hello", "store_path": "there"}),
        ("route explain hello there", {"prompt": "hello", "store_path": "there"}),
        ("stack --lr 1e-4 --target_modules a b --output-dir o",
         {"learning_rate": 1e-4, "keys": ["a", "b"], "save_path": "o"}),
        ("stack --store o", {"save_path": "o"}),
        ("stack compare --output-dir o", {"save_path": "o"}),
        ("identity --limit 3", {"max_prompts": 3}),
        ("eval -t a,b -L 3 -o o", {"tasks": ["a,b"], "limit": 3, "save_path": "o"}),
        ("generate --prompt - --top_p 0.5", {"prompt": "-", "top_p": 0.5}),
        ("nano export d --save-path d", {"save_path": Path("d")}),
        ("generate store --prompt hello", {"prompt": "hello", "store_path": "store"}),
        ("chat --max-tokens 3 --adapter_path a", {"max_tokens": 3, "adapter_path": ["a"]}),
        ("train --adapter-path a", {"save_path": "a"}),
        ("eval --tasks a b --limit 3 --output-dir o",
         {"tasks": ["a", "b"], "limit": 3, "save_path": "o"}),
        ("eval --tasks a --tasks b", {"tasks": ["a", "b"]}),
        ("fuse --adapter_path a b --force", {"adapter_path": ["a", "b"], "force": True}),
        ("eval --confirm-run-unsafe-code", {"allow_code": True}),
    ],
)  # fmt: skip
def test_spellings_of_mlx_lm_give_our_settings(
    line: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert options_typed(monkeypatch, *line.split()) == settings


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("generate a b -p c", "prompt is given twice: 'a', and 'c' by --prompt"),
        ("fuse --dequantize", "no option --dequantize: --requant dequantize leaves the modules"),
        ("stacks list a --store-path b", "store_path is given twice: 'a', and 'b' by --store-path"),
        ("generate a -m 100", "has no option -m 100: -m is --model here"),
        ("confound --rank 4", "confound has no option --rank: here it is --set train.rank=..."),
        ("generate --tokens 3", "generate has no option --tokens: here it is --max-tokens"),
        (
            "train --lora-alpha 16",
            "no option --lora-alpha: here it is --scale, which is lora_alpha",
        ),
        ("stack --optim adam", "stack has no option --optim: AdamW alone is used"),
        ("run a --recipe b", "two recipes are given: a and b"),
        ("generate -p a --verbose False", "has no option --verbose False: the answer goes to"),
        ("chat --prompt hello", "chat has no option --prompt: prompts are typed"),
        ("chat -p hello", "`mlxstacks generate` answers one"),
        ("train --trust_remote_code", "code of a model is never run"),
        ("eval --tasks a --temp=1", "eval has no option --temp: answers are greedy"),
    ],
)
def test_what_differs_is_said(line: str, message: str, command: Run) -> None:
    code, out, err = command(*line.split())
    assert (code, out) == (2, "")
    assert message in err


@pytest.mark.parametrize("words", [(), ("generate",), ("route", "train"), ("nano",)])
def test_h_is_help_everywhere(words: tuple[str, ...], command: Run) -> None:
    code, out, _ = command(*words, "-h")
    assert (code, out) == (0, command(*words, "--help")[1])
    assert out.startswith("Usage: ")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lora", "`mlxstacks train`"),
        ("server", "`mlxstacks serve` does that"),
        ("foo", "known: fuse, compare"),
    ],
)
def test_commands_of_mlx_lm_are_answered(name: str, said: str, command: Run) -> None:
    code, out, err = command(name)
    assert (code, out) == (2, "")
    assert f"no command '{name}'" in err
    assert said in err


@pytest.mark.parametrize("command", ["chat", "generate", "serve"])
def test_options_of_llama_cpp_work_or_are_answered(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = {"-ngl": "leave it out", "-c": "the context", "--lora": "--adapter-path"}
    for word, answer in words.items():
        with pytest.raises(click.UsageError, match=f"no option {word}: .*{answer}"):
            options_typed(monkeypatch, command, word, "99")
    ours = {"serve": ("-np", {"concurrency": 4})}.get(command, ("-sys", {"system_prompt": "4"}))
    assert options_typed(monkeypatch, command, ours[0], "4") == ours[1]
