"""Slash commands of a chat: a table of names, what they take, what they do."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from mlxstacks.cli import chat_view
from mlxstacks.cli.chat_session import MODES, Chat
from mlxstacks.errors import InputError
from mlxstacks.recipe.table import nearest
from mlxstacks.routing.settings import MOST_TEMP


@dataclass(frozen=True)
class SlashCommand:
    """run: (chat, what stands behind the name). words: what may follow, for completion."""

    takes: str
    help: str
    run: Callable[[Chat, str], None]
    words: Callable[[Chat], Iterable[str]] = lambda chat: ()


def run(chat: Chat, text: str) -> bool:
    """Do what a line that begins with a slash says, or a word of WORDS alone; whether it was one.

    Raises: InputError: no such command.
    """
    line = text.strip()
    name, _, rest = WORDS.get(line, line).partition(" ")
    if not name.startswith("/") or "\n" in line:
        return False
    name = WORDS.get(name, name)
    if name not in COMMANDS:
        raise InputError(f"no command {name!r}{nearest(name, COMMANDS)}; /help lists them")
    COMMANDS[name].run(chat, rest.strip())
    return True


def complete(chat: Chat, before: str) -> list[str]:
    """What a line that was begun may become: commands, then the words that they take."""
    if not before.startswith("/") or "\n" in before:
        return []
    name, space, rest = before.partition(" ")
    if not space:
        return [known for known in (*COMMANDS, *WORDS) if known.startswith(name)]
    if name not in COMMANDS:
        return []
    *given, last = rest.split(" ")
    start = before.removesuffix(last)
    words = COMMANDS[name].words(chat)
    return [start + word for word in words if word.startswith(last) and word not in given]


def _route(chat: Chat, rest: str) -> None:
    if not chat.conversation.messages:
        chat.say("Nothing was asked yet.")
        return
    chat.show(chat_view.route_table(chat.engine, chat.conversation.turns[-1]))


def _stacks(chat: Chat, rest: str) -> None:
    if chat.engine.store is None:
        chat.say("There is no store: the base answers alone.")
        return
    chat.show(chat_view.stacks_table(chat.engine))


def _pin(chat: Chat, rest: str) -> None:
    names = rest.replace(",", " ").split()
    if names:
        chat.engine.check_domains(names)
        chat.conversation.pins = tuple(dict.fromkeys(names))
    pins = ", ".join(chat.conversation.pins)
    chat.say(f"These answer from now on: {pins}." if pins else "No domain is pinned.")


def _domains(chat: Chat) -> Iterable[str]:
    return chat.engine.domains


def _unpin(chat: Chat, rest: str) -> None:
    chat.conversation.pins = ()
    chat.say(f"No domain is pinned; mode {chat.conversation.mode}.")


def _mode(chat: Chat, rest: str) -> None:
    conversation = chat.conversation
    if rest and rest not in MODES:
        raise InputError(f"got {rest!r}, allowed: {', '.join(MODES)}{nearest(rest, MODES)}")
    if rest:
        chat.set_mode(rest)
    pinned = f", but {', '.join(conversation.pins)} pinned" if conversation.pins else ""
    chat.say(f"Mode {conversation.mode}{pinned}.")


def _compare(chat: Chat, rest: str) -> None:
    turns = chat.conversation.turns
    if not rest and not turns:
        raise InputError("nothing was asked yet; /compare TEXT compares answers to a text")
    chat.compare(rest or turns[-1].question, again=not rest)


def _new(chat: Chat, rest: str) -> None:
    chat.restart()
    chat.say("A new conversation: what was said is forgotten.")


def _temp(chat: Chat, rest: str) -> None:
    sampling = chat.conversation.sampling
    if rest:
        try:
            temp = float(rest)
        except ValueError:
            temp = -1.0
        if not 0 <= temp <= MOST_TEMP:
            raise InputError(f"got {rest!r}; /temp takes a number from 0 to {MOST_TEMP}, as 0.7")
        chat.conversation.sampling = sampling = replace(sampling, temp=temp)
    drawn = "tokens are drawn" if sampling.temp else "the likeliest token is taken"
    chat.say(f"Temperature {sampling.temp:g}: {drawn}.")


def _stats(chat: Chat, rest: str) -> None:
    chat.show(chat_view.stats_table(chat.conversation))


def _save(chat: Chat, rest: str) -> None:
    if not rest:
        raise InputError("/save takes the name of a file that is not there yet")
    if not chat.conversation.messages:
        raise InputError("/save: nothing has been said yet")
    chat.say(f"Wrote {chat.conversation.save(rest)}.")


def _help(chat: Chat, rest: str) -> None:
    chat.show(chat_view.help_table({f"{name} {c.takes}": c.help for name, c in COMMANDS.items()}))
    chat.say("Esc Enter or a backslash at the end begins a new line. Ctrl-C stops an answer.")


def _quit(chat: Chat, rest: str) -> None:
    chat.done = True


COMMANDS: Mapping[str, SlashCommand] = {
    "/route": SlashCommand("", "scores of the last prompt, what answered, and why", _route),
    "/stacks": SlashCommand("", "domains of the store: size, enabled, resident", _stacks),
    "/pin": SlashCommand("DOMAIN...", "these domains answer, whatever the prompt", _pin, _domains),
    "/unpin": SlashCommand("", "the mode decides again", _unpin),
    "/mode": SlashCommand("MODE", "what answers: base, ungated or routed", _mode, lambda c: MODES),
    "/compare": SlashCommand("[TEXT]", "base, ungated and routed, beside each other", _compare),
    "/new": SlashCommand("", "a new conversation, mode and pins as they are; or /clear, r", _new),
    "/temp": SlashCommand("[NUMBER]", "temperature of what is drawn; 0: the likeliest", _temp),
    "/stats": SlashCommand("", "tokens, caches, what was read from disk", _stats),
    "/save": SlashCommand("FILE", "write the conversation as JSONL", _save),
    "/help": SlashCommand("", "this list; or h", _help),
    "/quit": SlashCommand("", "leave; or /exit, exit, quit, q, the end of input", _quit),
}
# Other names; those without a slash are commands only where they are all that was typed.
WORDS: Mapping[str, str] = {
    "/clear": "/new", "/exit": "/quit",
    "exit": "/quit", "quit": "/quit", "q": "/quit", "r": "/new", "h": "/help",
}  # fmt: skip
