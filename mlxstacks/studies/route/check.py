"""`mlxstacks route check`: do answers and routes of known prompts hold, mode by mode?

Each prompt is routed once, on its raw text. One with a rule for its answer is answered greedily in
every mode. The published check (five prompts to answer, sixteen to route) is the recipe
route-check-qwen3.5-35b-a3b.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxstacks.data import Rendering
from mlxstacks.errors import InputError
from mlxstacks.files.disk import user_path
from mlxstacks.files.outputs import check_target, staged_directory, write_json
from mlxstacks.files.store import Store
from mlxstacks.routing.answer import begins_in_thought
from mlxstacks.routing.generation import encode_prompt
from mlxstacks.routing.route import Route, base_route, ungated_route
from mlxstacks.routing.router import PromptRouter, load_prompt_router
from mlxstacks.routing.router_metrics import rate_json
from mlxstacks.studies.route.check_rules import Judged, judge, missing_domains
from mlxstacks.studies.route.check_settings import CheckMode, CheckPrompt, RouteCheckSettings
from mlxstacks.studies.route.data import routed_domains
from mlxstacks.studies.route.evaluate_served import Served, open_served, selection_of

REPORT = "route_check_report.json"
Progress = Callable[..., None]
_NOT_OF_THE_RESULT = {"force", "save_path"}


@dataclass(frozen=True)
class Checked:
    """One prompt. missing: expected domains that are not active. answers: by mode."""

    check: CheckPrompt
    route: Route
    missing: tuple[str, ...]
    answers: Mapping[str, Judged] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.check.name,
            "prompt": self.check.prompt,
            "scores": dict(self.route.scores),
            "weights": dict(self.route.weights),
            "gap": self.route.gap,
            "expected_domains": list(self.check.domains),
            "missing_domains": list(self.missing),
            "answers": {mode: judged.as_json() for mode, judged in self.answers.items()},
        }


@dataclass(frozen=True)
class RouteCheckReport:
    """status: "planned" or "done"."""

    status: str
    store_path: str
    save_path: str
    settings: dict[str, Any]
    checked: list[Checked] = field(default_factory=list)
    chat_domain: str | None = None
    notes: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Rates with Wilson intervals: answers that hold by mode, routes with the expected domains,
        requests with more than one active domain (the chat domain, always active, counted too).
        """
        modes: dict[str, list[bool]] = {}
        for one in self.checked:
            for mode, judged in one.answers.items():
                modes.setdefault(mode, []).append(not judged.failed)
        expected = [not one.missing for one in self.checked if one.check.domains]
        several = [len(one.route.weights) > 1 for one in self.checked]
        beside = [
            len([name for name in one.route.weights if name != self.chat_domain]) > 1
            for one in self.checked
        ]
        return {
            "answers": {mode: _rate(passed) for mode, passed in modes.items()},
            "expected_domains_active": _rate(expected),
            "more_than_one_active": _rate(several),
            "more_than_one_active_beside_chat": _rate(beside),
        }

    @property
    def verdict(self) -> str:
        if self.status == "planned":
            return "planned only; nothing was asked."
        found = self.summary()
        said = [
            f"{rate['count']} of {rate['n']} answers hold in mode {mode}"
            for mode, rate in found["answers"].items()
        ]
        if rate := found["expected_domains_active"]:
            said.append(f"{rate['count']} of {rate['n']} routes have the expected domains")
        rate = found["more_than_one_active"]
        said.append(f"{rate['count']} of {rate['n']} requests have more than one active domain")
        return "; ".join(said) + "."

    def as_json(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            "kind": "route check",
            "status": self.status,
            "store_path": self.store_path,
            "save_path": self.save_path,
            "settings": self.settings,
        }
        if self.status == "done":
            document |= {"summary": self.summary(), "prompts": [c.as_json() for c in self.checked]}
        return document | {"notes": self.notes, "verdict": self.verdict}


def _rate(passed: list[bool]) -> dict[str, Any] | None:
    return rate_json(sum(passed), len(passed))


def run(
    settings: RouteCheckSettings, *, dry_run: bool = False, progress: Progress | None = None
) -> RouteCheckReport:
    """Route and answer, and write the report to `settings.save_path`.

    Raises: InputError: no prompts, store, model, router or target; an expected domain that the
        store does not have. StoreError: a damaged file, another base.
    """
    if settings.store_path is None or settings.save_path is None:
        raise InputError("route check needs store_path and save_path")
    if not settings.prompts:
        raise InputError(
            "route check needs prompts, from a recipe: `mlxstacks run route-check` for nano"
        )
    store = Store.open(settings.store_path)
    target = user_path(settings.save_path)
    check_target(target, force=settings.force, inputs=[store.path])
    _check_domains(settings, store)
    shown = settings.model_dump(mode="json", exclude=_NOT_OF_THE_RESULT)
    about = (str(store.path), str(target), shown)
    if dry_run:
        return RouteCheckReport("planned", *about)
    served = open_served(store, settings.model, settings.base)
    router = load_prompt_router(store, served.model, served.tokenizer, settings.router_path)
    checked = []
    for place, check in enumerate(settings.prompts, start=1):
        checked.append(_checked(settings, served, router, check))
        if progress:
            progress(place, len(settings.prompts), check.name)
    notes = [*served.notes, *router.notes]
    report = RouteCheckReport("done", *about, checked, router.header.chat_domain, notes)
    with staged_directory(target, force=settings.force, inputs=[store.path]) as directory:
        write_json(directory / REPORT, report.as_json())
    return report


def _check_domains(settings: RouteCheckSettings, store: Store) -> None:
    known = routed_domains(store)
    strange = {
        f"{check.name}: {name}"
        for check in settings.prompts
        for name in check.domains
        if name not in known
    }
    if strange:
        raise InputError(
            f"{store.path}: expected domains that the store does not serve: "
            f"{'; '.join(sorted(strange))} (it has {', '.join(known) or 'none'})"
        )


def _checked(
    settings: RouteCheckSettings, served: Served, router: PromptRouter, check: CheckPrompt
) -> Checked:
    scores = router.score(check.prompt)
    route = router.decide(scores, hard=settings.hard, routable=served.domains)
    routes: dict[CheckMode, Route] = {
        "base": base_route(), "ungated": ungated_route(), "routed": route
    }  # fmt: skip
    answers: dict[str, Judged] = {
        mode: _answered(settings, served, check, routes[mode])
        for mode in (settings.modes if check.is_answered else ())
    }
    return Checked(check, route, tuple(missing_domains(check, route.weights)), answers)


def _answered(
    settings: RouteCheckSettings, served: Served, check: CheckPrompt, route: Route
) -> Judged:
    rendering = Rendering.of(settings)
    text = served.answer(check.prompt, selection_of(route), settings.max_tokens, rendering)
    return judge(
        check,
        text,
        lambda part: len(served.tokenizer.encode(part, add_special_tokens=False)),
        begins_in_thought=_begins_in_thought(served, rendering),
        most_think_share=settings.most_think_share,
        most_repetition=settings.most_repetition,
    )


def _begins_in_thought(served: Served, rendering: Rendering) -> bool:
    """Whether the template opens a thought at the end of a prompt and leaves it open."""
    prompt = encode_prompt(served.tokenizer, [{"role": "user", "content": "Hello"}], rendering)
    return begins_in_thought(served.tokenizer, prompt.tokens[prompt.stable :])
