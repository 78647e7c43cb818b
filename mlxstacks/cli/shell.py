"""What a shell has of the commands: completion scripts and man pages, both made from the table.

setup.py puts `shell_files` into the wheel's `share`, where shells and `man` of an environment look;
`mlxstacks completion` prints the scripts for those that look elsewhere.
"""

from collections.abc import Iterator

import click
from click.shell_completion import get_completion_class

from mlxstacks import __version__

# Where each shell, below `share`, looks for the script of a command.
SHELLS = {
    "bash": "bash-completion/completions/mlxstacks",
    "zsh": "zsh/site-functions/_mlxstacks",
    "fish": "fish/vendor_completions.d/mlxstacks.fish",
}
COMPLETION_HELP = "Print the completion script for a shell."
_HOW = """\b
bash: mlxstacks completion bash >> ~/.bashrc       (bash 4.4 or newer)
zsh:  mlxstacks completion zsh >> ~/.zshrc         (below compinit)
fish: mlxstacks completion fish > ~/.config/fish/completions/mlxstacks.fish"""


def completion_command() -> click.Command:
    """`completion SHELL`."""

    def callback(shell: str) -> None:
        click.echo(completion_script(shell))

    argument = click.Argument(["shell"], type=click.Choice(list(SHELLS)))
    return click.Command(
        "completion",
        params=[argument],
        callback=callback,
        short_help=COMPLETION_HELP,
        help=f"{COMPLETION_HELP}\n\n{_HOW}",
    )


def completion_script(shell: str) -> str:
    """click's script; it asks `mlxstacks` itself, so it never grows old."""
    kind = get_completion_class(shell)
    assert kind is not None
    names = {"complete_func": "_mlxstacks_completion", "complete_var": "_MLXSTACKS_COMPLETE"}
    return kind.source_template % {**names, "prog_name": "mlxstacks"}


def shell_files(group: click.Group) -> dict[str, str]:
    """Path below `share` -> text, of all completion scripts and man pages."""
    files = {path: completion_script(shell) for shell, path in SHELLS.items()}
    context = click.Context(group, info_name="mlxstacks")
    return files | {f"man/man1/{name}.1": page for name, page in man_pages(context)}


def man_pages(context: click.Context) -> Iterator[tuple[str, str]]:
    """Name and roff text of the page of a command and of all below it."""
    command, path = context.command, context.command_path
    name = path.replace(" ", "-")
    short = command.get_short_help_str(limit=200)
    lines = [
        f'.TH "{name.upper()}" "1" "" "mlxstacks {__version__}" "mlxstacks"',
        ".SH NAME", f"{_roff(name)} \\- {_roff(short)}",
        ".SH SYNOPSIS", f".B {_roff(path)}", _roff(" ".join(command.collect_usage_pieces(context))),
        ".SH DESCRIPTION", _roff(command.help or short),
        ".SH OPTIONS",
    ]  # fmt: skip
    options = [p for p in command.get_params(context) if isinstance(p, click.Option)]
    for names, text in filter(None, (option.get_help_record(context) for option in options)):
        lines += [".TP", f"\\fB{_roff(names)}\\fR", _roff(text)]
    below = []
    if isinstance(command, click.Group):
        for word in command.list_commands(context):
            one = command.get_command(context, word)
            assert one is not None
            below.append(click.Context(one, info_name=word, parent=context))
        lines.append(".SH COMMANDS")
        for inner in below:
            page = inner.command_path.replace(" ", "-")
            text = inner.command.get_short_help_str(limit=200)
            lines += [".TP", f"\\fB{_roff(page)}\\fR(1)", _roff(text)]
    if context.parent is not None:
        above = context.parent.command_path.replace(" ", "-")
        lines += [".SH SEE ALSO", f"\\fB{_roff(above)}\\fR(1)"]
    yield name, "\n".join(lines) + "\n"
    for inner in below:
        yield from man_pages(inner)


def _roff(text: str) -> str:
    """Text as roff shows it as it is: no line is a request, no character an escape."""
    escaped = text.replace("\b", "").replace("\\", "\\e").replace("-", "\\-")
    lines = [line.strip() for line in escaped.splitlines()]
    return "\n".join(f"\\&{line}" if line[:1] in (".", "'") else line or ".PP" for line in lines)
