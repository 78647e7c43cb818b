"""One chat: reads messages, streams answers, does what slash commands say."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mlxstacks.cli import answers, chat_view, output
from mlxstacks.cli.chat_input import Lines
from mlxstacks.errors import InputError, StoreError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mlxstacks.routing.conversation import Asked, Turn
    from mlxstacks.routing.engine import RoutedModel
    from mlxstacks.routing.settings import ChatSettings

# What an answer may fail of without an end to the chat; RuntimeError is what MLX raises.
_SURVIVED = (InputError, StoreError, RuntimeError)
MODES = ("base", "ungated", "routed")


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

    def as_json(self) -> dict[str, Any]:
        return {
            "settings": self.settings,
            "messages": self.messages,
            "turns": self.turns,
            "compared": self.compared,
            "stats": self.stats,
            "notes": self.notes,
        }


class Chat:
    """The conversation, and what commands do to it. command: does what a line says, if it is a
    command; whether it was.
    """

    def __init__(
        self,
        settings: "ChatSettings",
        engine: "RoutedModel",
        command: Callable[["Chat", str], bool],
    ) -> None:
        from mlxstacks.routing.conversation import Conversation
        from mlxstacks.routing.engine import sampling_of

        self.settings, self.engine = settings, engine
        self.done, self._command = False, command
        self.compared: list[dict[str, Any]] = []
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
            self._take(text)

    def _take(self, text: str) -> None:
        """A message or a command; what fails is said, and the chat goes on."""
        if not text.strip():
            return
        try:
            if self._command(self, text):
                pass
            elif self.settings.compare:
                self.compare(text, record=True)
            else:
                self._answer(text)
        except _SURVIVED as error:
            self.say(f"error: {error}", style="red")
        except KeyboardInterrupt:  # the second one, in the middle of a step
            self.say("Stopped; the answer is forgotten.")
        self._show_notes()

    def _answer(self, text: str) -> None:
        with answers.stoppable() as stop, answers.reading() as progress:
            asked = self.conversation.ask(text, stop=stop, progress=progress)
            answers.write_answer(asked)
        self._about(asked)

    def _about(self, asked: "Asked") -> None:
        if asked.turn is None:
            self.say("Stopped before the first token; the question is forgotten.")
        else:
            self.say(answers.status_line(asked.turn), style="dim")

    def compare(self, text: str, *, again: bool = False, record: bool = False) -> None:
        """Answers of base, ungated and routed. again: to the last question, as it stood.
        record: the routed answer becomes part of the conversation.
        """
        found: dict[str, Asked] = {}
        with answers.stoppable() as stop:
            for mode in MODES:
                if stop():
                    break
                try:
                    if record and mode == "routed":
                        asked = self.conversation.ask(text, stop=stop)
                    else:
                        asked = self.conversation.compared(text, mode, again=again, stop=stop)  # type: ignore[arg-type]
                    self._one_of_three(mode, asked)
                    found[mode] = asked
                except _SURVIVED as error:
                    self.say(f"{mode}: error: {error}", style="red")
        turns = {mode: asked.turn for mode, asked in found.items() if asked.turn is not None}
        self.compared += [turn.as_json() for turn in turns.values()]
        if turns and self._wide():
            self.show(chat_view.beside(turns))

    def _one_of_three(self, mode: str, asked: "Asked") -> None:
        """Streamed under its name; in a wide terminal computed first, and shown beside others."""
        if self._wide():
            for _ in asked:
                pass
            return
        self.say(f"{mode}:", style="bold")
        answers.write_answer(asked)
        self._about(asked)

    def _wide(self) -> bool:
        return output.console().width >= chat_view.WIDE_COLUMNS

    def restart(self) -> None:
        """A new conversation."""
        self._earlier += self.conversation.turns
        self.conversation.restart()

    def set_mode(self, mode: Any) -> None:
        """Raises: InputError, StoreError: there are no stacks, or no router that fits."""
        if mode == "routed":
            _ = self.engine.router
        elif mode == "ungated" and self.engine.resident is None:
            raise InputError("there is no store, so no stacks; start with --store-path")
        self.conversation.mode = mode

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
