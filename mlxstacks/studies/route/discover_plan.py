"""What a discovery is about: its rules, the examples it searches."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mlxstacks.data import Rendering, Row
from mlxstacks.data.settings import Template
from mlxstacks.errors import InputError
from mlxstacks.routing.outcome_files import RouterExample
from mlxstacks.routing.outcome_settings import MOST_EXHAUSTIVE, OutcomeSettings
from mlxstacks.routing.outcomes import Rules
from mlxstacks.studies.route.evaluate_losses import encode_pair


@dataclass(frozen=True, eq=False)
class Samples:
    """Examples whose outcome is searched, each with its tokens. dropped: without answer tokens."""

    examples: list[RouterExample]
    rows: list[Row]
    dropped: int


def rules_of(settings: OutcomeSettings, domains: tuple[str, ...], notes: list[str]) -> Rules:
    """The rules of a search among these domains. Raises: InputError for what does not fit them."""
    chat = settings.chat_domain or ("chat" if "chat" in domains else None)
    if chat is not None and chat not in domains:
        raise InputError(
            f"chat_domain {chat!r} is no domain to route to (there are {', '.join(domains)})"
        )
    if settings.search == "exhaustive" and len(domains) > MOST_EXHAUSTIVE:
        raise InputError(
            f"search exhaustive takes up to {MOST_EXHAUSTIVE} domains, the store has "
            f"{len(domains)}; use greedy, or disable domains"
        )
    absent = [name for name in settings.soft if name not in domains]
    if absent and "soft" in settings.model_fields_set:
        notes.append(f"soft: no domain {', '.join(absent)} to route to.")
    return Rules(
        domains,
        threshold=settings.threshold,
        chat_domain=chat,
        chat_floor=settings.chat_floor,
        soft=tuple(name for name in settings.soft if name in domains),
        label_share=settings.label_share,
        search=settings.search,
    )


def choose_samples(
    settings: OutcomeSettings, examples: Sequence[RouterExample], tokenizer: Any, template: Template
) -> Samples:
    """The first examples of each label that have answer tokens."""
    limits = {
        "single": settings.samples_per_domain,
        "mixed": settings.mixed_samples,
        "other": settings.other_samples,
    }
    chosen = Samples([], [], 0)
    taken: dict[tuple[str, ...], int] = {}
    dropped = 0
    for one in examples:
        if one.answer is None or taken.get(one.label, 0) >= limits[one.kind]:
            continue
        row = encode_pair(
            one.prompt, one.answer, tokenizer, template, settings.max_tokens,
            Rendering.of(settings),
        )  # fmt: skip
        if row is None:
            dropped += 1
            continue
        taken[one.label] = taken.get(one.label, 0) + 1
        chosen.examples.append(one)
        chosen.rows.append(row)
    return Samples(chosen.examples, chosen.rows, dropped)
