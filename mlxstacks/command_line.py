"""Commands as messages print them: pasted into a shell they run, whatever the paths hold."""

import shlex
from collections.abc import Iterable


def command_line(command: str, *arguments: object, **options: object) -> str:
    """`command` with its arguments and options, each quoted where a shell would read it otherwise.

    command: the words of a command, as they are. options: by the names of settings; None and False
    are left out, True is a flag alone, a list or tuple repeats its option.

        command_line("mlxstacks chat", model="my model", routed=True)
        mlxstacks chat --model 'my model' --routed
    """
    words = [*command.split(), *(_argument(str(argument)) for argument in arguments)]
    for name, value in options.items():
        for item in value if isinstance(value, list | tuple) else [value]:
            words += _option("--" + name.replace("_", "-"), item)
    return shlex.join(words)


def _argument(text: str) -> str:
    """A path that begins with a dash is no option."""
    return f"./{text}" if text.startswith("-") else text


def _option(flag: str, value: object) -> Iterable[str]:
    if value is None or value is False:
        return ()
    if value is True:
        return (flag,)
    text = str(value)
    return (f"{flag}={text}",) if text.startswith("-") else (flag, text)
