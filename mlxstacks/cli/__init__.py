"""The command line: one command a row of `mlxstacks.recipe.COMMANDS`, and how errors are shown.

Exit codes: 0 done, 1 failed while running, 2 bad usage or input, 3 a gate not met, 130 interrupted.
"""

import contextlib
import io
import os
import signal
import sys
import tempfile
import traceback
import warnings
from collections.abc import Sequence
from typing import TextIO

import click

from mlxstacks import __version__
from mlxstacks.cli import output
from mlxstacks.cli.execute import BAD_INPUT, FAILED, GATE, INTERRUPTED
from mlxstacks.cli.group import TableGroup
from mlxstacks.cli.init import init_command
from mlxstacks.cli.recipes import list_command, run_command
from mlxstacks.cli.shell import completion_command
from mlxstacks.errors import InputError, ResourceLimitError, StoreError
from mlxstacks.recipe.table import COMMANDS

HELP = """Fuse, train, stack and route LoRA adapters on quantized models, natively on MLX.

Without arguments, a command runs on nano, a small built-in model, and writes to ./mlxstacks-out;
one that needs more says so. `mlxstacks COMMAND --help` lists the options of a command.
"""

EPILOG = "`mlxstacks completion --help` explains shell completion."


def make_group() -> click.Group:
    """The root of all commands."""
    special = {
        "run": run_command(),
        "recipes": list_command(),
        "init": init_command(),
        "completion": completion_command(),
    }
    context = {
        "help_option_names": ["-h", "--help"],
        "token_normalize_func": lambda word: word.replace("_", "-"),  # --max_tokens
    }
    group = TableGroup(special=special, help=HELP, epilog=EPILOG, context_settings=context)
    return click.version_option(__version__, prog_name="mlxstacks")(group)


def run(arguments: Sequence[str]) -> int:
    """Run one command line; returns its exit code and prints any error as one message."""
    try:
        code = make_group().main(args=list(arguments), prog_name="mlxstacks", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except click.exceptions.Abort as abort:
        left = str(abort.__cause__ or abort.__context__ or "")  # what there is all the same
        return _fail(arguments, f"interrupted{left and '; '}{left}", INTERRUPTED)
    except click.UsageError as error:
        command = next((word for word in arguments if word in COMMANDS), "")
        where = error.ctx.command_path if error.ctx else f"mlxstacks {command}".strip()
        message = f"{error.format_message()}\nSee `{where} --help`."
        return _fail(arguments, message, BAD_INPUT)
    except click.ClickException as error:
        return _fail(arguments, error.format_message(), BAD_INPUT)
    except ResourceLimitError as error:
        return _fail(arguments, str(error), GATE, type(error).__name__)
    except InputError as error:
        return _fail(arguments, str(error), BAD_INPUT, type(error).__name__)
    except (StoreError, FloatingPointError) as error:  # NaN in training; both say what to do
        return _fail(arguments, str(error), FAILED, type(error).__name__)
    except Exception as error:
        kind = type(error).__name__
        if isinstance(error, OSError) and error.errno is not None:
            code = FAILED if error.filename is None else BAD_INPUT
            return _fail(arguments, _system_message(error), code, kind)
        if "Compile::" in str(error):  # MLX's words, over pages of what the compiler printed
            message = (
                f"MLX could not compile a kernel in {tempfile.gettempdir()}; look for room there, "
                "or set TMPDIR to a directory on another disk (-v shows what the compiler said)"
            )
            return _fail(arguments, message, FAILED, kind)
        message = f"{kind}: {error}\nThis was not expected; -v shows where it happened."
        return _fail(arguments, message, FAILED, kind)


def _system_message(error: OSError) -> str:
    """What the system says, of a path where it names one; that is no fault of ours."""
    if error.filename is None:
        return f"the system says: {error.strerror} (-v shows what was being done)"
    name = error.filename
    path = name if isinstance(name, int) else os.fsdecode(name)
    return f"{path}: {error.strerror}; look at that path, or give another"


def _fail(arguments: Sequence[str], message: str, code: int, kind: str = "Error") -> int:
    """Say what went wrong on stderr; with --json also as the one document on stdout."""
    is_usage = isinstance(sys.exception(), click.UsageError)
    asked = any(word in ("-v", "-vv", "--verbose") for word in arguments)
    if asked and code != INTERRUPTED and not is_usage:
        output.write(traceback.format_exc(), error=True)
    # a stranger's file may have written a part of it
    plain = "error: "
    label = click.style(plain, fg="red", bold=True) if sys.stderr.isatty() else plain
    shown = output.wrapped_on_terminal(output.safe(message), plain)
    output.write(shown, error=True, label=label)
    if "--json" in arguments:
        document = {"error": {"kind": kind, "message": message, "exit_code": code}}
        with contextlib.suppress(OSError):  # it may be stdout that is full
            output.print_json(document)
    return code


def _open_standard_streams() -> None:
    """Those that whoever started this had closed lead nowhere. Left closed, the next file that is
    opened gets their number, and MLX takes a file of number 0 for one that it could not open.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    text = warnings.formatwarning(message, category, filename, lineno, line)
    output.write(text, end="", error=True)


def main() -> None:
    """The console script.

    SIGTERM and SIGHUP end it as Ctrl-C does: temporaries are removed, the exit code is 130.
    """
    # transformers tells everybody that PyTorch is not there; nothing here needs it.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    for name in ("SIGTERM", "SIGHUP"):
        # A shell's nohup has SIGHUP ignored, and that stays.
        if signal.getsignal(getattr(signal, name)) is signal.SIG_DFL:
            signal.signal(getattr(signal, name), signal.default_int_handler)
    _open_standard_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what cannot be shown is no reason to fail
            stream.reconfigure(errors="backslashreplace")
    warnings.showwarning = _show_warning
    try:
        code = run(sys.argv[1:])
        with contextlib.suppress(OSError):  # a closed pipe, a full disk: Python says so at its end
            sys.stdout.flush()
    except KeyboardInterrupt:  # while the message about another one was written
        code = INTERRUPTED
    # From here on nothing would catch it, and the end of the interpreter would exit with 0.
    signal.signal(signal.SIGINT, lambda number, frame: os._exit(INTERRUPTED))
    sys.exit(code)
