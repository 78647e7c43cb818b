"""`mlxstacks chat`: read a message, stream the answer, a line about it, and again; or do what a
slash command says.
"""

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mlxstacks.cli import answers, chat_view, output
from mlxstacks.cli.chat_input import Lines, open_lines
from mlxstacks.errors import InputError, StoreError
from mlxstacks.recipe.table import nearest
from mlxstacks.routing.settings import MOST_TEMP
from mlxstacks.study.document import counted

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mlxstacks.routing.conversation import Asked, Turn
    from mlxstacks.routing.engine import Mode, RoutedModel
    from mlxstacks.routing.settings import ChatSettings

HISTORY = "chat-history"
# What a stranger to nano may ask: its stacks, trained alone on single questions, fail at two.
FOR_NANO = (
    'Ask nano one thing at a time: "Ella likes nuts. What does Ella like?", and with --routed '
    '"Which wind has Lurba?".'
)
# What an answer may fail of without an end to the chat; RuntimeError is what MLX raises.
_SURVIVED = (InputError, StoreError, RuntimeError)
MODES: tuple["Mode", ...] = ("base", "ungated", "routed")


@dataclass(frozen=True)
class ChatReport:
    """What was said. messages: since the last /new; turns: of the whole chat. compared: answers of
    comparisons, which are not part of the conversation.
    """

    settings: dict[str, Any]
    messages: list[dict[str, Any]]
    turns: list[dict[str, Any]]
    compared: list[dict[str, Any]]
    stats: dict[str, Any]
    notes: list[str]


def run(settings: "ChatSettings") -> ChatReport:
    """Chat until somebody leaves.

    Raises: InputError, StoreError: model, store or router cannot be used.
    """
    from mlxstacks.nano.exports import cache_directory
    from mlxstacks.routing.engine import open_routed

    ready = answers.completed(settings)
    with answers.loading():
        chat = Chat(ready, open_routed(ready))
    if settings.model is None and settings.store_path is None:
        output.note(FOR_NANO)
    lines = open_lines(lambda before: complete(chat, before), cache_directory() / HISTORY)
    with answers.ended_by_signals():
        chat.talk(lines)
    return chat.report()


class Chat:
    """The conversation, and what commands do to it."""

    def __init__(self, settings: "ChatSettings", engine: "RoutedModel") -> None:
        from mlxstacks.routing.conversation import Conversation
        from mlxstacks.routing.engine import sampling_of

        self.settings, self.engine, self.done = settings, engine, False
        self.compared: list[dict[str, Any]] = []
        self.last: Turn | None = None  # answered, or compared, in this conversation
        self._earlier: list[Turn] = []
        self._shown_notes = 0
        self.conversation = Conversation(
            engine, sampling_of(settings), system_prompt=settings.system_prompt,
            thinking=settings.thinking, reroute=settings.reroute,
        )  # fmt: skip

    def talk(self, lines: Lines) -> None:
        """Until /quit, the end of input, or Ctrl-C twice."""
        self.say(chat_view.greeting(self.settings, self.conversation))
        self._show_notes()
        interrupts = 0
        while not self.done:
            try:
                text = lines.read()
            except EOFError:
                break
            except KeyboardInterrupt:
                interrupts += 1
                if interrupts == 2:
                    break
                self.say("Ctrl-C again or /quit leaves.")
                continue
            interrupts = 0
            if text.strip():
                self._take(text)

    def _take(self, text: str) -> None:
        """A message or a command; what fails is said, and the chat goes on."""
        try:
            if run_command(self, text):
                pass
            elif self.settings.compare:
                self.compare(text, record=True)
            else:
                with answers.stoppable() as stop, answers.reading() as progress:
                    answering = self.conversation.ask(text, stop=stop, progress=progress)
                    answers.write_answer(answering)
                self._about(answering)
        except _SURVIVED as error:
            self.say(f"error: {error}", style="red")
        except KeyboardInterrupt:  # the second one, in the middle of a step
            self.say("Stopped; the answer is forgotten.")
        self._show_notes()

    def _about(self, answering: "Asked") -> None:
        if answering.turn is None:
            self.say("Stopped before the first token; the question is forgotten.")
        else:
            self.last = answering.turn
            self.say(
                answers.status_line(answering.turn, self.conversation.engine.alone), style="dim"
            )

    def compare(self, text: str, *, again: bool = False, record: bool = False) -> None:
        """Answers of base, ungated and routed: streamed under their names, or, in a wide terminal,
        computed first and shown side by side. again: to the last question, as it stood.
        record: the routed answer becomes part of the conversation.
        """
        wide = output.console().width >= chat_view.WIDE_COLUMNS
        turns: dict[str, Turn] = {}
        with answers.stoppable() as stop:
            for mode in MODES:
                if stop():
                    break
                try:
                    if record and mode == "routed":
                        answering = self.conversation.ask(text, stop=stop)
                    else:
                        answering = self.conversation.compared(text, mode, again=again, stop=stop)
                    if wide:
                        for _ in answering:
                            pass
                    else:
                        self.say(f"{mode}:", style="bold")
                        answers.write_answer(answering)
                        self._about(answering)
                    if answering.turn is not None:
                        turns[mode] = answering.turn
                except _SURVIVED as error:
                    self.say(f"{mode}: error: {error}", style="red")
        self.last = turns.get("routed", self.last)
        self.compared += [turn.as_json() for turn in turns.values()]
        if turns and wide:
            self.show(chat_view.side_by_side(turns))

    def restart(self) -> None:
        """A new conversation."""
        self._earlier += self.conversation.turns
        self.last = None
        self.conversation.restart()

    def load(self, name: str) -> None:
        """Go on from a saved conversation."""
        turns = self.conversation.turns
        source = self.conversation.load(name)
        self._earlier += turns
        self.last = None
        messages = counted(len(self.conversation.messages), "message")
        self.say(f"Read {messages} from {source}; go on.")

    def report(self) -> ChatReport:
        return ChatReport(
            self.settings.model_dump(mode="json"),
            self.conversation.messages,
            [turn.as_json() for turn in [*self._earlier, *self.conversation.turns]],
            self.compared,
            chat_view.stats_of(self.conversation),
            list(self.engine.notes),
        )

    def say(self, text: str, style: str = "") -> None:
        """A line of ours."""
        from rich.text import Text

        console = output.console()
        whole = not console.is_terminal or output.holds_command(text)
        console.print(Text(text, style=style), soft_wrap=whole)
        sys.stdout.flush()

    def show(self, what: "RenderableType") -> None:
        output.console().print(what)
        sys.stdout.flush()

    def _show_notes(self) -> None:
        for note in self.engine.notes[self._shown_notes :]:
            self.say(note, style="dim")
            self._shown_notes += 1


# --- slash commands -------------------------------------------------------------------------------


@dataclass(frozen=True)
class SlashCommand:
    """run: (chat, what stands behind the name). words: what may follow, for completion."""

    takes: str
    help: str
    run: Callable[[Chat, str], None]
    words: Callable[[Chat], Iterable[str]] = lambda chat: ()


def run_command(chat: Chat, text: str) -> bool:
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
    if name not in offered(chat):
        raise InputError(f"{name} is about stacks, and there is no store; start with --store-path")
    COMMANDS[name].run(chat, rest.strip())
    return True


def offered(chat: Chat) -> Mapping[str, "SlashCommand"]:
    """The commands that have something to act on: those about stacks need a store."""
    has_store = chat.engine.store is not None
    return {name: c for name, c in COMMANDS.items() if has_store or name not in _OF_STACKS}


def complete(chat: Chat, before: str) -> list[str]:
    """What a line that was begun may become: commands, then the words that they take."""
    if not before.startswith("/") or "\n" in before:
        return []
    name, space, rest = before.partition(" ")
    if not space:
        return [known for known in (*offered(chat), *WORDS) if known.startswith(name)]
    if name not in COMMANDS:
        return []
    *given, last = rest.split(" ")
    start = before.removesuffix(last)
    words = COMMANDS[name].words(chat)
    return [start + word for word in words if word.startswith(last) and word not in given]


def _route(chat: Chat, rest: str) -> None:
    if chat.last is not None:
        chat.show(chat_view.route_table(chat.engine, chat.last))
    else:
        chat.say("Nothing was asked yet.")


def _stacks(chat: Chat, rest: str) -> None:
    if chat.engine.store is None:
        chat.say("There is no store: the base answers alone.")
    else:
        chat.show(chat_view.stacks_table(chat.engine))


def _pin(chat: Chat, rest: str) -> None:
    names = rest.replace(",", " ").split()
    if names:
        chat.engine.check_domains(names)
        chat.conversation.pins = tuple(dict.fromkeys(names))
    pins = ", ".join(chat.conversation.pins)
    chat.say(f"These answer from now on: {pins}." if pins else "No domain is pinned.")


def _unpin(chat: Chat, rest: str) -> None:
    chat.conversation.pins = ()
    chat.say(f"No domain is pinned; mode {chat.conversation.mode}.")


def _mode(chat: Chat, rest: str) -> None:
    conversation, engine = chat.conversation, chat.engine
    if rest:
        mode = next((mode for mode in MODES if mode == rest), None)
        if mode is None:
            raise InputError(f"got {rest!r}, allowed: {', '.join(MODES)}{nearest(rest, MODES)}")
        if mode == "routed":
            _ = engine.router  # one that does not fit is bad input now
        conversation.mode = mode
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


def _max_tokens(chat: Chat, rest: str) -> None:
    sampling = chat.conversation.sampling
    if rest:
        if not rest.isdecimal() or int(rest) < 1:
            raise InputError(f"got {rest!r}; /max-tokens takes a number from 1, as 512")
        chat.conversation.sampling = sampling = replace(sampling, max_tokens=int(rest))
    chat.say(f"At most {counted(sampling.max_tokens, 'token')} an answer.")


def _system(chat: Chat, rest: str) -> None:
    if rest:
        chat.restart()
        chat.conversation.begin(None if rest == "none" else rest)
    prompt = next((m["content"] for m in chat.conversation.messages if m["role"] == "system"), None)
    begun = "A new conversation. " if rest else ""
    chat.say(f"{begun}System prompt: {prompt}" if prompt else f"{begun}There is no system prompt.")


def _stats(chat: Chat, rest: str) -> None:
    chat.show(chat_view.stats_table(chat.conversation))


def _save(chat: Chat, rest: str) -> None:
    if not rest:
        raise InputError("/save takes the name of a file that is not there yet")
    if not chat.conversation.messages:
        raise InputError("/save: nothing has been said yet")
    chat.say(f"Wrote {chat.conversation.save(rest)}.")


def _load(chat: Chat, rest: str) -> None:
    if not rest:
        raise InputError("/load takes the name of a file that /save wrote")
    chat.load(rest)


def _help(chat: Chat, rest: str) -> None:
    chat.show(output.details({f"{name} {c.takes}": c.help for name, c in offered(chat).items()}))
    chat.say("Esc Enter or a backslash at the end begins a new line. Ctrl-C stops an answer.")


def _quit(chat: Chat, rest: str) -> None:
    chat.done = True


COMMANDS: Mapping[str, SlashCommand] = {
    "/route": SlashCommand("", "scores of the last prompt, what answered, and why", _route),
    "/stacks": SlashCommand("", "domains of the store: size, enabled, resident", _stacks),
    "/pin": SlashCommand(
        "DOMAIN...", "these domains answer, whatever the prompt", _pin, lambda c: c.engine.domains
    ),
    "/unpin": SlashCommand("", "the mode decides again", _unpin),
    "/mode": SlashCommand("MODE", "what answers: base, ungated or routed", _mode, lambda c: MODES),
    "/compare": SlashCommand("[TEXT]", "base, ungated and routed, side by side", _compare),
    "/new": SlashCommand("", "a new conversation, mode and pins as they are; or /clear, r", _new),
    "/temp": SlashCommand("[NUMBER]", "temperature of what is drawn; 0: the likeliest", _temp),
    "/max-tokens": SlashCommand("[NUMBER]", "most tokens in an answer", _max_tokens),
    "/system": SlashCommand(
        "[TEXT]",
        "the system prompt; TEXT, or none, begins a conversation with another",
        _system,
    ),
    "/stats": SlashCommand("", "tokens, caches, what was read from disk", _stats),
    "/save": SlashCommand("FILE", "write the conversation as a row of training data", _save),
    "/load": SlashCommand("FILE", "go on from a conversation that was saved", _load),
    "/help": SlashCommand("", "this list; or h", _help),
    "/quit": SlashCommand("", "leave; or /exit, exit, quit, q, the end of input", _quit),
}
_OF_STACKS = ("/route", "/stacks", "/pin", "/unpin", "/mode", "/compare")
# Other names; those without a slash are commands only where they are all that was typed.
WORDS: Mapping[str, str] = {
    "/clear": "/new", "/exit": "/quit",
    "exit": "/quit", "quit": "/quit", "q": "/quit", "r": "/new", "h": "/help",
}  # fmt: skip
