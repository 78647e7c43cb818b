"""`mlxstacks chat`: read a message, stream the answer, a line about it, and again."""

from typing import TYPE_CHECKING

from mlxstacks.cli import answers, chat_commands
from mlxstacks.cli.chat_input import open_lines
from mlxstacks.cli.chat_session import Chat, ChatReport

if TYPE_CHECKING:
    from rich.console import Console

    from mlxstacks.routing.settings import ChatSettings

HISTORY = "chat-history"


def run(settings: "ChatSettings") -> ChatReport:
    """Chat until somebody leaves.

    Raises: InputError, StoreError: model, store or router cannot be used.
    """
    from mlxstacks.nano.exports import cache_directory
    from mlxstacks.routing.engine import open_routed
    from mlxstacks.routing.settings import ChatSettings

    ready = answers.completed(settings)
    assert isinstance(ready, ChatSettings)
    chat = Chat(ready, open_routed(ready), chat_commands.run)
    lines = open_lines(
        lambda before: chat_commands.complete(chat, before), cache_directory() / HISTORY
    )
    with answers.ended_by_signals():
        chat.talk(lines)
    return chat.report()


def render(console: "Console", report: ChatReport) -> None:
    """Nothing is left to print: the conversation was, as it went."""
