"""`mlxstacks route discover`: by the loss of their answers, which stacks prompts should go to.

All losses are kept in `.NAME.work` beside the target as they are made. Killed at any moment, the
same command goes on there, and ends with the same examples, outcomes and losses. Losses of an
earlier discovery in the target are used too, so after a change of threshold, or with a domain more
in the store, only what is new is measured.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import Any

from mlxstacks import base_model, memory
from mlxstacks.errors import InputError
from mlxstacks.files.base_location import find_base
from mlxstacks.files.disk import user_path
from mlxstacks.files.outputs import check_target, staged_directory, write_json
from mlxstacks.files.store import Store
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.layers.output_head import OutputHead, find_output_head
from mlxstacks.routing.candidate_losses import CandidateLosses, candidate, choose_batch_tokens
from mlxstacks.routing.outcome_cache import LossCache
from mlxstacks.routing.outcome_files import (
    EXAMPLES,
    LOSSES,
    OUTCOMES,
    REPORT,
    Outcome,
    RouterExample,
    config_text,
    write_lines,
)
from mlxstacks.routing.outcome_settings import OutcomeSettings
from mlxstacks.routing.outcomes import Found, Rules, blended, search_all, targets_of
from mlxstacks.studies.route.data import (
    read_examples,
    routed_domains,
    stack_hashes,
    template_of,
)
from mlxstacks.studies.route.discover_control import add_control
from mlxstacks.studies.route.discover_plan import Samples, choose_samples, rules_of
from mlxstacks.studies.route.discover_tables import (
    control_table,
    counts_of,
    greedy_gap,
    oracle_table,
    verdict,
)
from mlxstacks.studies.route.evaluate_losses import with_controls
from mlxstacks.studies.route.evaluate_served import Served, open_served
from mlxstacks.study.run_directory import RunDirectory, plain

Progress = Callable[..., None]
# Of a model whose head, and so whose width, is not found.
USUAL_WIDTH = 4096


@dataclass(frozen=True)
class DiscoverReport:
    """status: "planned" or "done". stacks: domain -> sha256 of its stacks. Tables: see
    route_discover_tables.py; None where not measured.
    """

    status: str
    store_path: str
    save_path: str
    settings: dict[str, Any]
    base_fingerprint: str
    domains: list[str]
    stacks: dict[str, list[str]]
    chat_domain: str | None
    chat_floor: float
    template: str
    counts: dict[str, Any]
    oracle: list[dict[str, Any]] = field(default_factory=list)
    greedy_gap: dict[str, Any] | None = None
    control: dict[str, Any] | None = None
    figures: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    verdict: str = ""

    def as_json(self) -> dict[str, Any]:
        values = plain({**vars(self), "settings_sha256": json_sha256(self.settings)})
        assert isinstance(values, dict)
        return {"kind": "route discover", **values}


def run(
    settings: OutcomeSettings, *, dry_run: bool = False, progress: Progress | None = None
) -> DiscoverReport:
    """Search, and write examples, outcomes, losses and report to `settings.save_path`.

    Raises: InputError: no store, model, data or target; a setting that does not fit the store.
        StoreError: a damaged file, another base.
    """
    if settings.store_path is None:
        raise InputError(
            "route discover needs a store: give its directory (`mlxstacks stack` makes one)"
        )
    if settings.save_path is None:
        raise InputError("route discover needs save_path")
    store = Store.open(settings.store_path)
    check_target(user_path(settings.save_path), force=settings.force, inputs=[store.path])
    notes: list[str] = []
    rules = rules_of(settings, routed_domains(store), notes)
    template = template_of(settings, store)
    if dry_run:
        checkpoint = find_base(store, settings.model, notes)
        tokenizer = base_model.load(checkpoint.directory, lazy=True)[1]
        served = None
    else:
        served = open_served(store, settings.model, settings.base)
        tokenizer, notes = served.tokenizer, [*served.notes, *notes]
    examples = read_examples(settings, store, tokenizer, notes)
    samples = choose_samples(settings, examples, tokenizer, template)
    report = DiscoverReport(
        status="planned",
        store_path=str(store.path),
        save_path=str(user_path(settings.save_path)),
        settings=settings.model_dump(mode="json"),
        base_fingerprint=store.manifest.base_fingerprint,
        domains=list(rules.domains),
        stacks=stack_hashes(store, rules.domains),
        chat_domain=rules.chat_domain,
        chat_floor=rules.chat_floor if rules.chat_domain else 0.0,
        template=template,
        counts=counts_of(
            examples, samples.examples, samples.dropped, rules, settings.random_control
        ),
        notes=notes,
    )
    if served is None:
        return report
    return _Discovery(settings, rules, served, examples, samples, report, progress).run()


class _Discovery:
    def __init__(
        self,
        settings: OutcomeSettings,
        rules: Rules,
        served: Served,
        examples: list[RouterExample],
        samples: Samples,
        report: DiscoverReport,
        progress: Progress | None,
    ) -> None:
        self.settings, self.rules, self.served = settings, rules, served
        self.examples, self.samples, self.report = examples, samples, report
        self.progress = progress
        self.target = user_path(settings.save_path or "")
        self.done = 0
        self.expected = max(1, report.counts["passes_expected"])

    def run(self) -> DiscoverReport:
        settings = self.settings
        work = RunDirectory(self.target, {"kind": "route discover"}, resume=settings.resume)
        try:
            known = [self.target / LOSSES] if settings.resume else []
            cache = LossCache(work.path / LOSSES, known)
            try:
                self._write(cache)
            finally:
                cache.close()
            work.remove()
            return self.report
        finally:
            work.close()

    def _write(self, cache: LossCache) -> None:
        outcomes = self._discover(cache)
        inputs = [self.served.store.path]
        with staged_directory(self.target, force=self.settings.force, inputs=inputs) as directory:
            write_lines(directory / EXAMPLES, self.examples)
            write_lines(directory / OUTCOMES, outcomes)
            cache.write(directory / LOSSES)
            write_json(directory / REPORT, self.report.as_json())

    def _discover(self, cache: LossCache) -> list[Outcome]:
        started, cpu = time.monotonic(), time.process_time()
        with ExitStack() as stack:
            stack.callback(base_model.install_gated_delta())
            losses = self._losses(cache)
            found = self._search(losses)
            searched = time.monotonic() - started
            recalled = losses.recalled
            controls = (
                add_control(self.rules, found, losses) if self.settings.random_control else []
            )
        outcomes = self._outcomes(found, controls)
        figures = {
            "seconds": round(time.monotonic() - started, 3),
            "cpu_seconds": round(time.process_time() - cpu, 3),
            "passes_made": losses.made,
            "passes_recalled": losses.recalled,
            "passes_per_pair": round(sum(len(f.losses) for f in found) / max(1, len(found)), 2),
            "tokens": losses.tokens,
            # of the search alone, where nothing came from the cache
            "pairs_per_second": None if recalled else round(len(found) / searched, 3),
            "batch_tokens": losses.batch_tokens,
            "peak_bytes": memory.counters().peak_bytes,
            "device": f"{memory.device().name} ({memory.device().kind})",
            "versions": {name: version(name) for name in ("mlxstacks", "mlx", "mlx-lm", "numpy")},
        }
        gap = greedy_gap(self.rules, found) if self.settings.search == "exhaustive" else None
        control = control_table(self.rules, outcomes) if controls else None
        oracle = oracle_table(self.rules, outcomes)
        notes = [*self.report.notes, *cache.notes]
        self.report = DiscoverReport(**{
            **vars(self.report), "status": "done", "oracle": oracle, "greedy_gap": gap,
            "control": control, "figures": figures, "notes": notes,
            "verdict": verdict(self.report.counts, outcomes, gap, control),
        })  # fmt: skip
        return outcomes

    def _losses(self, cache: LossCache) -> CandidateLosses:
        """Losses on the model with all stacks and, where asked for, their random controls."""
        settings, store, model = self.settings, self.served.store, self.served.model
        stacks = dict(self.report.stacks)
        if settings.random_control:
            stacks = with_controls(self.served, stacks, settings.seed)
        head, note = find_output_head(model)
        if note:
            self.report.notes.append(note)
        tokens = settings.batch_tokens or choose_batch_tokens(_width(model, head))
        numbers = "float32" if self.served.dtype is not None else "stored"
        return CandidateLosses(
            model,
            self.samples.rows,
            stacks,
            f"{store.manifest.base_fingerprint}/{numbers}",
            cache,
            batch_tokens=tokens,
            dtype=self.served.dtype,
            head=head,
            on_batch=self._say,
        )

    def _search(self, losses: CandidateLosses) -> list[Found]:
        def losses_of(asked: Sequence[tuple[int, frozenset[str]]]) -> list[float]:
            return losses([candidate(pair, self.rules.weights(on)) for pair, on in asked])

        return search_all(self.rules, len(self.samples.rows), losses_of)

    def _outcomes(
        self, found: Sequence[Found], controls: Sequence[dict[str, float]]
    ) -> list[Outcome]:
        made = []
        for number, (one, result) in enumerate(zip(self.samples.examples, found, strict=True)):
            rules = self.rules
            targets = targets_of(rules, result)
            made.append(
                Outcome(
                    row_id=one.row_id,
                    label=one.label,
                    kind=one.kind,
                    base_loss=result.base_loss,
                    best_loss=result.best_loss,
                    best=rules.ordered(result.best),
                    soft=rules.ordered(result.soft),
                    targets=targets,
                    final=blended(rules, targets, one.label),
                    losses={
                        config_text(rules.ordered(on)): loss for on, loss in result.losses.items()
                    },
                    path=tuple(config_text(rules.ordered(on)) for on in result.path),
                    trained_on=one.trained_on,
                    control=controls[number] if controls else {},
                )
            )
        return made

    def _say(self, made: int) -> None:
        self.done += made
        if self.progress:
            # how many passes the searches will ask for is an estimate
            done = min(self.done, 0.99 * self.expected)
            self.progress(done, self.expected, f"{self.done} losses")


def _width(model: Any, head: OutputHead | None) -> int:
    """Of the hidden states that the head is given; nothing is evaluated."""
    import mlx.core as mx

    if head is None:
        return USUAL_WIDTH
    return int(head.hidden_states(model, mx.zeros((1, 2), mx.int32)).shape[-1])
