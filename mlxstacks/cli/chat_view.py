"""What a chat shows beside answers: the greeting, routes, stacks, figures, answers side by side."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxstacks.cli import answers, output
from mlxstacks.memory import bytes_in_words

if TYPE_CHECKING:
    from rich.table import Table

    from mlxstacks.routing.conversation import Conversation, Turn
    from mlxstacks.routing.engine import RoutedModel
    from mlxstacks.routing.settings import ChatSettings

# Three answers beside each other need this much.
WIDE_COLUMNS = 100


def greeting(settings: "ChatSettings", conversation: "Conversation") -> str:
    """Model, domains, mode, and how to go on."""
    engine = conversation.engine
    name = settings.model or (engine.store.manifest.base_model if engine.store else "")
    domains = engine.domains
    there = f"; domains {', '.join(domains)}" if domains else ""
    there += f"; adapter {', '.join(engine.adapters)}" if engine.adapters else ""
    how = f"pinned {', '.join(conversation.pins)}" if conversation.pins else conversation.mode
    return f"{Path(name).name}{there}; {how}. /help lists commands."


def route_table(engine: "RoutedModel", turn: "Turn") -> output.Table:
    """Domain by domain: score, weight, and why it answered or not."""
    answer, rows = turn.answer, []
    route = answer.route
    for name in dict.fromkeys([*route.scores, *engine.weights(route), *engine.domains]):
        weight = answer.weights.get(name)
        rows.append(
            [
                name,
                f"{route.scores[name]:.3f}" if name in route.scores else None,
                None if weight is None else f"{weight:.3f}",
                _why(engine, turn, name),
            ]
        )
    seconds = f"{answers.duration(turn.route_seconds)} to decide"
    gap = "; a gap: no domain fits" if route.gap else ""
    title = f"{route.mode}{gap}; {seconds}"
    return output.table(["domain", "score", "weight", "why"], rows, title=title)


def _why(engine: "RoutedModel", turn: "Turn", name: str) -> str:
    answer = turn.answer
    route = answer.route
    if route.mode in ("base", "ungated", "pinned"):
        on = name in answer.weights
        return (
            {"base": "base alone", "ungated": "all answer", "pinned": "pinned"}[route.mode]
            if on or route.mode == "base"
            else "not asked for"
        )
    header = engine.router.header
    score = route.scores.get(name)
    if score is None:
        return "the router does not know it"
    if name in route.weights:
        if score <= header.threshold:
            return f"never below its floor {header.chat_floor}"
        held = abs(route.weights[name] - score) > 1e-6 and not engine.hard
        floor = name == header.chat_domain and score < header.chat_floor
        words = f"above {header.threshold}"
        if floor:
            return f"{words}, raised to its floor {header.chat_floor}"
        return f"{words}; the conversation's weight is kept" if held else words
    if name not in engine.domains:
        return "not in the store, or disabled"
    return f"not above {header.threshold}"


def stacks_table(engine: "RoutedModel") -> output.Table:
    """Every domain of the store."""
    assert engine.store is not None
    assert engine.resident is not None
    rows: list[list[output.Cell]] = []
    for domain in engine.store.manifest.domains:
        nbytes = sum(stack.file.nbytes for stack in domain.stacks)
        rows.append(
            [
                domain.name,
                len(domain.stacks),
                bytes_in_words(nbytes),
                domain.enabled,
                domain.name in engine.resident.loaded,
            ]
        )
    return output.table(["domain", "stacks", "on disk", "enabled", "resident"], rows)


def stats_of(conversation: "Conversation") -> dict[str, Any]:
    """Figures of a conversation and of what is loaded, as JSON."""
    found = [turn.answer for turn in conversation.turns]
    seconds = sum(answer.seconds for answer in found)
    steps = sum(max(0, answer.tokens - 1) for answer in found)
    resident = conversation.engine.resident
    return {
        "answers": len(found),
        "tokens": sum(answer.tokens for answer in found),
        "tokens_per_second": steps / seconds if seconds else None,
        "prompt_tokens": sum(answer.prompt_tokens for answer in found),
        "cached_prompt_tokens": sum(answer.cached_tokens for answer in found),
        "cache_tokens": len(conversation.cache.tokens),
        "cache_bytes": conversation.cache.nbytes,
        "resident": None if resident is None else resident.stats.as_json(),
    }


def stats_table(conversation: "Conversation") -> output.Details:
    stats = stats_of(conversation)
    resident = stats.pop("resident") or {}
    pairs = {**stats, **resident}
    return output.details((name.replace("_", " "), _figure(name, v)) for name, v in pairs.items())


def _figure(name: str, value: Any) -> output.Cell:
    if name.endswith("bytes") or name.startswith("bytes"):
        return None if value is None else bytes_in_words(value)
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def help_table(commands: Mapping[str, str]) -> output.Details:
    return output.details(commands)


def beside(turns: Mapping[str, "Turn"]) -> "Table":
    """Answers in columns, what is to say about each below it."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    made = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
    for mode in turns:
        made.add_column(Text(mode), overflow="fold", ratio=1)
    made.add_row(*[Text(output.safe(turn.answer.text)) for turn in turns.values()])
    made.add_section()
    made.add_row(*[Text(answers.status_line(turn), style="dim") for turn in turns.values()])
    return made
