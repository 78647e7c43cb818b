"""What a chat shows next to answers: the greeting, routes, stacks, figures, comparisons."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxstacks.cli import answers, output
from mlxstacks.memory import bytes_in_words
from mlxstacks.study.document import counted

if TYPE_CHECKING:
    from rich.table import Table

    from mlxstacks.routing.conversation import Conversation, Turn
    from mlxstacks.routing.engine import RoutedModel
    from mlxstacks.routing.settings import ChatSettings

# Three answers side by side need this much.
WIDE_COLUMNS = 100


def greeting(settings: "ChatSettings", conversation: "Conversation") -> str:
    """Model, domains, mode, and how to go on."""
    engine = conversation.engine
    name = settings.model or (engine.store.manifest.base_model if engine.store else "")
    domains = engine.domains
    parts = f"; domains {', '.join(domains)}" if domains else ""
    if not engine.alone:
        pins, adapters = ", ".join(conversation.pins), ", ".join(engine.adapters)
        mode = " with ".join(filter(None, [conversation.mode, adapters]))
        parts += f"; pinned {pins}" if pins else f"; {mode}"
    return f"{Path(name).name}{parts}. /help lists commands."


def route_table(engine: "RoutedModel", turn: "Turn") -> output.Table:
    """Every domain: score, weight, and why it answered or not."""
    route, weights = turn.answer.route, turn.answer.weights
    rows: list[list[output.Cell]] = []
    for name in dict.fromkeys([*route.scores, *engine.weights(route), *engine.domains]):
        score, weight = (
            None if value is None else f"{value:.3f}"
            for value in (route.scores.get(name), weights.get(name))
        )
        rows.append([name, score, weight, _why(engine, turn, name)])
    gap = "; a gap: no domain fits" if route.gap else ""
    title = f"{route.mode}{gap}; {answers.duration(turn.route_seconds)} to decide"
    return output.table(["domain", "score", "weight", "why"], rows, title=title)


def _why(engine: "RoutedModel", turn: "Turn", name: str) -> str:
    route = turn.answer.route
    if route.mode == "base":
        return "base alone"
    if route.mode != "routed":
        on = {"ungated": "all answer", "pinned": "pinned"}[route.mode]
        return on if name in turn.answer.weights else "not asked for"
    header = engine.router.header
    score = route.scores.get(name)
    if score is None:
        return "the router does not know it"
    if name not in route.weights:
        known = name in engine.domains
        return f"not above {header.threshold}" if known else "not in the store, or disabled"
    if score <= header.threshold:
        return f"never below its floor {header.chat_floor}"
    above = f"above {header.threshold}"
    if name == header.chat_domain and score < header.chat_floor:
        return f"{above}, raised to its floor {header.chat_floor}"
    return f"{above}; the conversation's weight is kept" if name in route.alone else above


def stacks_table(engine: "RoutedModel") -> output.Table:
    """Every domain of the store."""
    assert engine.store is not None
    assert engine.resident is not None
    rows: list[list[output.Cell]] = []
    for domain in engine.store.manifest.domains:
        size = bytes_in_words(sum(stack.file.nbytes for stack in domain.stacks))
        is_resident = domain.name in engine.resident.loaded
        rows.append([domain.name, len(domain.stacks), size, domain.enabled, is_resident])
    return output.table(["domain", "stacks", "on disk", "enabled", "resident"], rows)


def stats_of(conversation: "Conversation") -> dict[str, Any]:
    """Figures of a conversation and of what is loaded, as JSON."""
    given = [turn.answer for turn in conversation.turns]
    seconds = sum(answer.seconds for answer in given)
    steps = sum(max(0, answer.tokens - 1) for answer in given)
    resident = conversation.engine.resident
    return {
        "answers": len(given),
        "tokens": sum(answer.tokens for answer in given),
        "tokens_per_second": steps / seconds if seconds else None,
        "prompt_tokens": sum(answer.prompt_tokens for answer in given),
        "cached_prompt_tokens": sum(answer.cached_tokens for answer in given),
        "cache_tokens": len(conversation.cache.tokens),
        "cache_bytes": conversation.cache.nbytes,
        "resident": None if resident is None else resident.stats.as_json(),
    }


def stats_table(conversation: "Conversation") -> output.Details:
    stats, engine = stats_of(conversation), conversation.engine
    speed = stats["tokens_per_second"]
    cache = bytes_in_words(stats["cache_bytes"])
    pairs = {
        "answers": f"{stats['answers']:,}; {counted(stats['tokens'], 'token')}"
        + (f", {speed:.3g} a second" if speed else ""),
        "prompts": f"{stats['prompt_tokens']:,} tokens, {stats['cached_prompt_tokens']:,} of them "
        "from the cache",
        "cache": f"{stats['cache_tokens']:,} tokens, {cache}",
    }
    if engine.resident is not None:
        held = engine.resident.stats
        most = (
            "" if held.budget_bytes is None else f" of at most {bytes_in_words(held.budget_bytes)}"
        )
        pairs |= {
            "stacks in memory": f"{bytes_in_words(held.resident_bytes)}{most}",
            "domains asked for": f"{held.hits:,} in memory, {held.misses:,} read: "
            f"{bytes_in_words(held.bytes_read)} in {answers.duration(held.read_seconds)}",
            "domains dropped": f"{held.unloads:,}",
        }
    return output.details(pairs)


def side_by_side(turns: Mapping[str, "Turn"]) -> "Table":
    """Answers in columns, what is to say about each below it."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, expand=True)
    for mode in turns:
        table.add_column(Text(mode), overflow="fold", ratio=1)
    table.add_row(*[Text(output.safe(turn.answer.text)) for turn in turns.values()])
    table.add_section()
    table.add_row(*[Text(answers.status_line(turn), style="dim") for turn in turns.values()])
    return table
