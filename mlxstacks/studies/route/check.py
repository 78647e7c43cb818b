"""`mlxstacks route check`: do answers and routes of known prompts hold, mode by mode?

Each prompt is routed once, on its raw text. One with a rule for its answer is answered greedily in
every mode and held to its rules: a text or number in it, the share of thinking and of repeats.
The published check (five prompts to answer, sixteen to route) is the recipe
route-check-qwen3.5-35b-a3b.
"""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mlxstacks.data import Rendering
from mlxstacks.errors import InputError
from mlxstacks.files.disk import user_path
from mlxstacks.files.outputs import check_target, staged_directory
from mlxstacks.files.store import Store
from mlxstacks.layers.selection import base, ungated
from mlxstacks.routing.engine import begins_in_thought
from mlxstacks.routing.generation import encode_prompt
from mlxstacks.routing.router import (
    PromptRouter,
    load_prompt_router,
)
from mlxstacks.routing.router_metrics import rate_json
from mlxstacks.studies.route.cells import RATE, interval_plot, rate_cells, rate_in_words
from mlxstacks.studies.route.data import routed_domains
from mlxstacks.studies.route.served import Served, open_served, weighted
from mlxstacks.studies.route.settings import CheckPrompt, RouteCheckSettings
from mlxstacks.study.document import Block, Table, counted
from mlxstacks.study.render.words import short
from mlxstacks.study.result import Result
from mlxstacks.study.write import environment, write_result

ABOUT = {
    "kind": "route check",
    "title": "Check of prompts",
    "question": "Do named prompts get the routes and answers expected?",
}
Progress = Callable[..., None]
_SHOWN_CHARACTERS = 70

# What opens a thought, and what closes it: Qwen and DeepSeek, OpenThoughts, Cohere.
THINK_MARKS = (
    ("<think>", "</think>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
_RUN = 4  # words
# Not inside a word or a longer number ("x60" and "1.60" hold no 60); a unit may follow at once.
_NUMBER = re.compile(r"(?<![\w.,])[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?!\d)")


def run(
    settings: RouteCheckSettings, *, dry_run: bool = False, progress: Progress | None = None
) -> Result:
    """Route and answer, and write the result to `settings.save_path`.

    Raises: InputError: no prompts, store, model, router or target; an expected domain that the
        store does not have. StoreError: a damaged file, another base.
    """
    if settings.store_path is None or settings.save_path is None:
        raise InputError("route check needs store_path and save_path")
    if not (checks := settings.prompts):
        raise InputError(
            "route check needs prompts, from a recipe: `mlxstacks init --command 'route check'` "
            "writes one to fill in; `mlxstacks run route-check` is nano's. In Python: prompts=[...]"
        )
    started, store = time.monotonic(), Store.open(settings.store_path)
    target = user_path(settings.save_path)
    check_target(target, force=settings.force, inputs=[store.path])
    known = routed_domains(store)
    if strange := {f"{c.name}: {name}" for c in checks for name in c.domains if name not in known}:
        raise InputError(
            f"{store.path}: expected domains that the store does not serve: "
            f"{'; '.join(sorted(strange))} (it has {', '.join(known) or 'none'})"
        )
    result = Result(
        **ABOUT, status="planned", directory=str(target),
        settings=settings.model_dump(mode="json", exclude={"force", "save_path"}),
    )  # fmt: skip
    if dry_run:
        note = f"To be asked of {store.path}: {counted(len(checks), 'prompt')}."
        return result.model_copy(update={"notes": (note,)})
    served = open_served(store, settings.model, settings.base)
    router = load_prompt_router(store, served.model, served.tokenizer, settings.router_path)
    prompts = []
    for count, check in enumerate(checks, start=1):
        prompts.append(_checked(settings, served, router, check))
        if progress:
            progress(count, len(checks), check.name)
    summary = summary_of(prompts, router.header.chat_domain)
    routes = summary["expected_domains_active"]
    result = result.model_copy(update={
        "status": "done",
        "outcome": f"expected domains: {rate_in_words(routes) if routes else 'not measured'}",
        "verdict": verdict(summary),
        "environment": environment(time.monotonic() - started),
        "data": {"summary": summary, "prompts": prompts},
        "blocks": tuple(blocks(summary, prompts)),
        "notes": (*served.notes, *router.notes),
    })  # fmt: skip
    with staged_directory(target, force=settings.force, inputs=[store.path]) as directory:
        return write_result(result, directory, target)


def _checked(
    settings: RouteCheckSettings, served: Served, router: PromptRouter, check: CheckPrompt
) -> dict[str, Any]:
    """missing_domains: expected ones that are not active. answers: by mode."""
    (route,) = router.routes([check.prompt], hard=settings.hard, routable=served.domains)
    selections = {"base": base(), "ungated": ungated(), "routed": weighted(route.weights)}
    rendering = Rendering.of(settings)
    # Whether the template opens a thought at the end of a prompt and leaves it open.
    prompt = encode_prompt(served.tokenizer, [{"role": "user", "content": "Hello"}], rendering)
    in_thought = begins_in_thought(served.tokenizer, prompt.tokens[prompt.stable :])
    answers = {}
    for mode in settings.modes if check.is_answered else ():
        text = served.answer(check.prompt, selections[mode], settings.max_tokens, rendering)
        answers[mode] = judge(
            check, text,
            lambda part: len(served.tokenizer.encode(part, add_special_tokens=False)),
            begins_in_thought=in_thought, most_think_share=settings.most_think_share,
            most_repetition=settings.most_repetition,
        )  # fmt: skip
    return {
        "name": check.name,
        "prompt": check.prompt,
        "scores": dict(route.scores),
        "weights": dict(route.weights),
        "gap": route.gap,
        "expected_domains": list(check.domains),
        "missing_domains": missing_domains(check, route.weights),
        "answers": answers,
    }


# --- the rules ------------------------------------------------------------------------------------


def judge(
    check: CheckPrompt,
    text: str,
    count_tokens: Callable[[str], int],
    *,
    begins_in_thought: bool = False,
    most_think_share: float,
    most_repetition: float,
) -> dict[str, Any]:
    """Hold an answer to its rules. What is expected must stand outside of thoughts.

    begins_in_thought: the template's prompt ends with an opening mark.
    Returns text, think_share, repetition, failed (the rules it breaks, in words) and passed.
    """
    spoken, thought = split_thoughts(text, begins_in_thought)
    thinking = count_tokens(thought) if thought else 0
    speaking = count_tokens(spoken) if spoken else 0
    share = thinking / (thinking + speaking) if thinking else 0.0
    repeats = repetition(text)
    failed = list(_broken(check, spoken))
    if share > most_think_share:
        failed.append(f"{share:.0%} of it is thinking")
    if repeats > most_repetition:
        failed.append(f"{repeats:.0%} of it repeats")
    return {
        "text": text, "think_share": share, "repetition": repeats, "failed": failed,
        "passed": not failed,
    }  # fmt: skip


def _broken(check: CheckPrompt, spoken: str) -> Iterator[str]:
    lower = spoken.casefold()
    if not spoken.strip():
        yield "no answer outside of thoughts"
        return
    if check.expect and not any(text.casefold() in lower for text in check.expect):
        yield f"has none of {', '.join(check.expect)}"
    if check.number is not None and not has_number(spoken, check.number, check.tolerance):
        yield f"lacks the number {check.number:g}"
    for text in check.forbid:
        if text.casefold() in lower:
            yield f"has {text}"


def split_thoughts(text: str, begins_in_thought: bool = False) -> tuple[str, str]:
    """(what is said, what is thought). A thought that is not closed goes on to the end; a closing
    mark without an opening one ends a thought that the template began.
    """
    opening, closing = THINK_MARKS[0]
    for other_opening, other_closing in THINK_MARKS[1:]:
        text = text.replace(other_opening, opening).replace(other_closing, closing)
    first = text.partition(closing)
    if first[1] and opening not in first[0]:
        begins_in_thought = True
    spoken, thought, inside, rest = "", "", begins_in_thought, text
    while rest:
        part, mark, rest = rest.partition(closing if inside else opening)
        if inside:
            thought += part
        else:
            spoken += part
        inside = not inside if mark else inside
    return spoken, thought


def repetition(text: str) -> float:
    """Share of the runs of four words that stand in the text before; 0 for fewer than five words.

    Law: it lies in [0, 1); a text without a repeated run has 0.
    """
    words = text.split()
    runs = [tuple(words[i : i + _RUN]) for i in range(len(words) - _RUN + 1)]
    return 1 - len(set(runs)) / len(runs) if len(runs) > 1 else 0.0


def has_number(text: str, number: float, tolerance: float) -> bool:
    """Whether a number within `tolerance` stands in the text, thousands with or without commas."""
    values = (float(match.group().replace(",", "")) for match in _NUMBER.finditer(text))
    return any(abs(value - number) <= tolerance for value in values)


def missing_domains(check: CheckPrompt, weights: Mapping[str, float]) -> list[str]:
    """Expected domains that the route leaves out."""
    return [name for name in check.domains if name not in weights]


# --- the result -----------------------------------------------------------------------------------


def summary_of(prompts: Sequence[Mapping[str, Any]], chat_domain: str | None) -> dict[str, Any]:
    """Rates with Wilson intervals: answers that hold by mode, routes with the expected domains,
    requests with more than one active domain (the chat domain, always active, counted too).
    """
    modes: dict[str, list[bool]] = {}
    for prompt in prompts:
        for mode, answer in prompt["answers"].items():
            modes.setdefault(mode, []).append(answer["passed"])
    expected = [not p["missing_domains"] for p in prompts if p["expected_domains"]]
    several = [len(p["weights"]) > 1 for p in prompts]
    besides_chat = [len(p["weights"].keys() - {chat_domain}) > 1 for p in prompts]
    return {
        "answers": {mode: rate_json(sum(passed), len(passed)) for mode, passed in modes.items()},
        "expected_domains_active": rate_json(sum(expected), len(expected)),
        "more_than_one_active": rate_json(sum(several), len(several)),
        "more_than_one_active_besides_chat": rate_json(sum(besides_chat), len(besides_chat)),
    }


def verdict(summary: Mapping[str, Any]) -> str:
    parts = {f"answers hold in mode {mode}": rate for mode, rate in summary["answers"].items()}
    parts["routes have the expected domains"] = summary["expected_domains_active"]
    parts["requests have more than one active domain"] = summary["more_than_one_active"]
    counts = (f"{rate['count']} of {rate['n']} {what}" for what, rate in parts.items() if rate)
    return f"{'; '.join(counts)}."


def blocks(summary: Mapping[str, Any], prompts: Sequence[Mapping[str, Any]]) -> Iterator[Block]:
    yield _prompt_table(list(summary["answers"]), prompts)
    failures = [
        (p["name"], mode, "; ".join(answer["failed"]), short(answer["text"], _SHOWN_CHARACTERS))
        for p in prompts
        for mode, answer in p["answers"].items()
        if answer["failed"]
    ]
    if failures:
        columns = ("prompt", "mode", "rules", "the answer begins")
        yield Table.of(
            "failures", "Answers that break a rule", dict.fromkeys(columns, "text"), failures
        )
    rates = {f"answers hold, {mode}": rate for mode, rate in summary["answers"].items()}
    rates |= {key.replace("_", " "): summary[key] for key in summary if key != "answers"}
    rows = ((name, *rate_cells(rate)) for name, rate in rates.items())
    yield Table.of("rate-table", "Rates", {"what": "text", **RATE}, rows)
    yield interval_plot(
        "rates", "Answers and routes that hold",
        {name: rate for name, rate in rates.items() if rate}, "% of prompts, 95% interval",
        scale=100, form="{:.0f}", limits=(-5.0, 105.0),
    )  # fmt: skip
    texts = ((p["name"], p["prompt"]) for p in prompts)
    yield Table.of("texts", "Prompts", {"prompt": "text", "text": "text"}, texts, folded=True)


def _prompt_table(modes: Sequence[str], prompts: Sequence[Mapping[str, Any]]) -> Table:
    rows = []
    for prompt in prompts:
        active = ", ".join(f"{name} {weight:.2f}" for name, weight in prompt["weights"].items())
        answers = map(prompt["answers"].get, modes)
        holds = [answer and ("holds" if answer["passed"] else "fails") for answer in answers]
        missing = ", ".join(prompt["missing_domains"]) or "none"
        rows.append((prompt["name"], active or "none", missing, *holds))
    columns = ("prompt", "active domains", "missing domains", *modes)
    return Table.of("prompts", "Prompts and their routes", dict.fromkeys(columns, "text"), rows)
