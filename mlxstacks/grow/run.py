"""`mlxstacks grow`: prompts that no domain fits become a domain.

    watch    the gap log of the store's router, in groups of like prompts; needs no approval
    confirm  gaps are like rows of the new domain, which no present stack answers well
    gather   rows from a folder or a function of the user's, cleaned, none that the store knows
    train    stacks on a copy of the store, as its last domain was trained
    gate     the new stack has learned its domain, and the others are as they were
    route    the copy's router learns the domain; it must be as good on the others as before
    accept   the store takes domain and router, in one change that `stacks undo` takes back

A stage runs where `yes` names it, and the run stops before the first that it does not name; the
same command with more of them goes on. Up to `accept` the store is only read, so whatever stops the
run, the store is as it was. A stage whose checks fail ends the run: the result says which.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mlxstacks import base_model
from mlxstacks.data.settings import SourceSettings
from mlxstacks.errors import InputError, StoreError
from mlxstacks.files.disk import sync_tree, target_errors, user_path
from mlxstacks.files.manifest import DomainRecord
from mlxstacks.files.outputs import PLACES, refuse_built_in, write_json
from mlxstacks.files.router_file import read_router
from mlxstacks.files.side_files import clone_or_link
from mlxstacks.files.store import Store, data_directories, find_base, remember_places
from mlxstacks.files.store_files import LOCATION, MANIFEST, file_of, read_manifest
from mlxstacks.files.strict_json import read_object
from mlxstacks.grow import checks
from mlxstacks.grow.checks import Check
from mlxstacks.grow.report import ABOUT, concluded, stage_table, waiting
from mlxstacks.grow.rows import LEAST_ROWS, known_sources, labelled, write_rows
from mlxstacks.grow.settings import STAGES, GrowSettings, Stage
from mlxstacks.routing.gaps import GapCluster, GapEvent, cluster_gaps, read_gaps
from mlxstacks.routing.router import (
    ROUTER_FILE,
    load_prompt_router,
    network_of,
    router_digest,
)
from mlxstacks.routing.settings import OutcomeSettings, RouterTrainSettings
from mlxstacks.studies.route import discover, evaluate
from mlxstacks.studies.route import train as route_train
from mlxstacks.studies.route.data import routed_domains
from mlxstacks.studies.route.gaps import group_table
from mlxstacks.studies.route.served import open_served
from mlxstacks.studies.route.settings import RouteEvaluateSettings
from mlxstacks.studies.stack.checkpoint import read_report
from mlxstacks.studies.stack.plan import data_settings_of, run_settings_of
from mlxstacks.studies.stack.run import run as run_stack
from mlxstacks.study.document import counted
from mlxstacks.study.engine import Step, Study, run_study
from mlxstacks.study.result import Result
from mlxstacks.training.settings import DomainSettings, StackRunSettings

MOST_HELD_OUT, MOST_EVENTS = 100, 10_000
ROWS, FORK, BEFORE = "rows", "store", "before.json"
_SHOWN_GROUPS = 5
_BEGIN_AGAIN = "undo that change and run again, or begin again with --no-resume"
_Progress = Callable[..., None]


class _NotApprovedError(Exception):
    """A stage was reached that nobody approved."""

    def __init__(self, stage: Stage, done: Mapping[str, Any]) -> None:
        super().__init__(stage)
        self.stage, self.done = stage, done


def run(
    settings: GrowSettings, *, dry_run: bool = False, progress: _Progress | None = None
) -> Result:
    """Do the approved stages.

    Raises: InputError: no store, router or gap log; no name or rows for the domain where a stage
        needs them; a name that the store has. StoreError: the store is damaged, or was changed
        since the run began. As the commands behind its stages.
    """
    if settings.store_path is None:
        raise InputError("grow needs a store: give its directory (`mlxstacks stack` makes one)")
    study = _Growth(settings, progress)
    if dry_run or not settings.yes:
        planned = study.planned()
        groups = group_table(settings, study.clusters[:_SHOWN_GROUPS])
        return planned.model_copy(update={"blocks": (groups, *planned.blocks)})
    if settings.domain is None:
        raise InputError("grow needs a name for the new domain from `confirm` on: give --domain")
    if settings.data is None and settings.provider is None:
        raise InputError(
            f"grow needs rows of {settings.domain}: give --data, a directory with "
            f"{settings.domain}.jsonl, or --provider FILE.py:FUNCTION"
        )
    try:
        return run_study(study, progress=progress)
    except _NotApprovedError as stop:
        return waiting(study.head, settings, stop.stage, stop.done)


class _Growth(Study):
    artifacts = (f"{ROWS}/*", "*.json")
    provenance = ("*.json",)
    settings: GrowSettings
    head: Result

    def __init__(self, settings: GrowSettings, progress: _Progress | None) -> None:
        self.settings, self.progress = settings, progress
        self.name = str(settings.domain)
        self.store = Store.open(str(settings.store_path))
        # The rows of a domain that grew before lie in the result of its growth.
        self.inputs = (self.store.path, *data_directories(self.store))

    def planned(self) -> Result:
        settings = self.settings
        store = self.store
        refuse_built_in(store.path)
        router = store.read_router()
        self.header, notes = router.header, list[str]()
        self.base = find_base(store, settings.model, notes).directory
        self.events = self._watch(router_digest(router.header, network_of(router)))
        shown = settings.model_dump(mode="json", exclude={*PLACES, "yes"})
        self.head = Result(
            **ABOUT, status="planned", settings=shown, notes=tuple(notes),
            plan={**shown, "base_fingerprint": store.manifest.base_fingerprint},
            blocks=(stage_table({}, None),), verdict=self._found(), directory=settings.save_path,
        )  # fmt: skip
        return self.head

    @cached_property
    def clusters(self) -> list[GapCluster]:
        """Groups of like gaps, the largest first."""
        return cluster_gaps(self.events, self.settings.similarity, centre=self.settings.centre)

    def steps(self, work: Path) -> Iterator[Step]:
        yield Step("watch", self._write_watch, ("watch.json", BEFORE))
        watched = read_object((work / "watch.json").read_bytes())
        if watched["events"] < self.settings.minimum_events:
            return
        stages: dict[Stage, Callable[[Path, Path], Sequence[Check]]] = {
            "confirm": self._confirm, "gather": self._gather, "train": self._train,
            "gate": self._gate, "route": self._route, "accept": self._accept,
        }  # fmt: skip
        for place, (stage, do) in enumerate(stages.items()):
            file = f"{stage}.json"
            if not (work / file).exists():
                if not self.settings.may(stage):
                    raise _NotApprovedError(stage, read_stages(work))
                if self.progress:
                    self.progress(place, len(STAGES), stage)

            def write(scratch: Path, do: Any = do, file: str = file) -> None:
                found = do(work, scratch)
                write_json(scratch / file, {"checks": [asdict(check) for check in found]})

            outputs = (file, f"{ROWS}/{self.name}.jsonl") if stage == "gather" else (file,)
            yield Step(stage, write, outputs)
            found = read_object((work / file).read_bytes())["checks"]
            if not all(check["passed"] for check in found):
                return

    def conclude(self, work: Path) -> Result:
        watched = read_object((work / "watch.json").read_bytes())
        return concluded(self.settings, watched, read_stages(work))

    # --- stages -----------------------------------------------------------------------------------

    def _watch(self, digest: str) -> tuple[GapEvent, ...]:
        """Gaps that this router has logged; those of routers before it are of other features, and
        may have been learned since.
        """
        width, events = self.header.input_dims, read_gaps(self.settings.log_path).events
        of_router = (e for e in events if e.router == digest and e.feature is not None)
        fitting = [e for e in of_router if e.feature is not None and len(e.feature) == width]
        return tuple(fitting[-MOST_EVENTS:])  # groups of n take n^2 bytes

    def _found(self) -> str:
        count, least = len(self.events), self.settings.minimum_events
        if count < least:
            return f"No domain is proposed: {counted(count, 'gap')} so far, {least} are asked for."
        return (
            f"{counted(count, 'prompt')} had no domain that fits. If many are of one domain, name "
            "it: --domain, --data (or --provider) and --yes confirm go on. Nothing was written."
        )

    def _write_watch(self, scratch: Path) -> None:
        asked = (self.settings.samples, self.settings.minimum_events)
        groups = [cluster.as_json(*asked) for cluster in self.clusters]
        write_json(scratch / "watch.json", {"events": len(self.events), "groups": groups})
        write_json(scratch / BEFORE, self.store.manifest.document(), sort_keys=True)

    def _confirm(self, work: Path, scratch: Path) -> list[Check]:
        settings = self.settings
        if self.store.manifest.domain_named(self.name) is not None:
            raise InputError(f"{self.store.path}: has a domain {self.name} already; name another")
        self._last_trained()  # or nothing could follow
        served = open_served(self.store, str(self.base), settings.base)
        sample = scratch / f"{self.name}.jsonl"
        write_rows(settings, settings.samples_per_domain, sample, served.tokenizer, self.store)
        limits = (settings.samples_per_domain, settings.seed)
        sources = known_sources(settings, self.store)
        known = checks.examples_of(self.store, served.tokenizer, sources, *limits)
        # Mixed prompts, and those of no domain, have no stack of their own to be measured by.
        known = [example for example in known if example.kind == "single"]
        new = checks.examples_of(self.store, served.tokenizer, [labelled((), sample)], *limits)
        of_known, of_new = (checks.encoded(_pairs(each), served) for each in (known, new))
        for name, found in {"domains that are there": of_known, self.name: of_new}.items():
            if len(found) < 2:
                raise InputError(
                    f"{name}: {counted(len(found), 'row')} that no stack was trained on with an "
                    f"answer within {checks.MOST_TOKENS} tokens; 2 or more are needed"
                )
        router = load_prompt_router(self.store, served.model, served.tokenizer)
        # each prompt once: one that repeats is as near to another row as can be
        readings = router.read([*dict.fromkeys(example.prompt for example in new)])
        return [
            checks.are_the_gaps(settings, [r.feature for r in readings], self.events),
            checks.is_unserved(
                settings, served, self.header, of_known, of_new, self._counting("confirm")
            ),
        ]

    def _gather(self, work: Path, scratch: Path) -> list[Check]:
        (scratch / ROWS).mkdir()
        tokenizer = base_model.load(self.base, lazy=True)[1]
        path = scratch / ROWS / f"{self.name}.jsonl"
        known = write_rows(self.settings, self.settings.rows, path, tokenizer, self.store)
        found = f"{_count(path)}" + (f"; {known} left out that the store knows" if known else "")
        return [Check("rows", True, found, f"{LEAST_ROWS} or more")]

    def _train(self, work: Path, scratch: Path) -> list[Check]:
        """As the store's last domain was trained: on the stacks before it, or on the base alone."""
        fork, before, last = self._fork(work), read_manifest(work, BEFORE), self._last_trained()
        # a run that was killed after the store's change did not say yet how the training went
        if self.name not in read_report(fork.path):
            is_alone = not last.trained_on and last.name != before.domains[0].name
            _switch(fork, {d.name: d.enabled and not is_alone for d in before.domains})
            self._train_on(fork, last, work)
        _switch(fork, {d.name: d.enabled for d in before.domains})
        done = fork.domain_named(self.name)
        found = f"{len(done.stacks)}, validation loss {done.losses[0]:.3f} to {done.losses[-1]:.3f}"
        return [Check("stacks", bool(done.stacks), found, "1 or more")]

    def _last_trained(self) -> DomainRecord:
        for record in reversed(self.store.manifest.domains):
            if record.origin == "trained" and record.split is not None:
                return record
        raise InputError(
            f"{self.store.path}: every domain was imported, so how to train another is not known; "
            "train one with `mlxstacks stack`"
        )

    def _train_on(self, fork: Store, last: DomainRecord, work: Path) -> None:
        new = work / ROWS / f"{self.name}.jsonl"
        given = self.settings.model_dump(
            include={"rounds", "iters", "learning_rate", "base", "seed"}, exclude_none=True
        )
        sources = (SourceSettings(path=new.name),)
        rows = data_settings_of(last).model_copy(
            update={"sources": sources, "validation_rows": _held_out(_count(new))}
        )
        run_stack(
            StackRunSettings.model_validate({
                **run_settings_of(last), **given, "model": str(self.base),
                "data": str(work / ROWS), "save_path": str(fork.path),
                "modes": ("prefix", "isolated"),
                "domains": (DomainSettings(name=self.name, data=rows),),
            }),
            progress=self._part("train"),
        )  # fmt: skip
        fork.refresh()

    def _gate(self, work: Path, scratch: Path) -> list[Check]:
        fork, settings = Store.open(work / FORK), self.settings
        served = open_served(fork, str(self.base), settings.base)
        rows = labelled((), work / ROWS / f"{self.name}.jsonl")
        held_out = checks.examples_of(fork, served.tokenizer, [rows], MOST_HELD_OUT, settings.seed)
        return [
            *checks.is_learned(
                settings, served, self.header, self.name, _pairs(held_out), self._counting("gate")
            ),
            *checks.leaves_others_alone(
                read_manifest(work, BEFORE), fork.manifest, fork.domain_named(self.name)
            ),
            checks.was_trained_cleanly(read_report(fork.path)[self.name]["rounds"]),
        ]

    def _route(self, work: Path, scratch: Path) -> list[Check]:
        settings, fork = self.settings, Store.open(work / FORK)
        old = known_sources(settings, self.store)
        new = labelled((self.name,), work / ROWS / f"{self.name}.jsonl")
        here = {"store_path": str(fork.path), "model": str(self.base), "base": settings.base}
        discovered, trained = work / "discover", work / "router"
        # What a router serves by is in its header, how it was trained in settings that may be gone.
        header, fields = self.header, RouterTrainSettings.model_fields
        chat = header.chat_domain if header.chat_domain in routed_domains(fork) else None
        floor: dict[str, Any] = {"chat_domain": chat, "chat_floor": header.chat_floor}
        given: Any = header.training.get("settings", {})
        known = {key: value for key, value in given.items() if key in fields}
        known |= {**floor, "threshold": header.threshold}
        if not discovered.is_dir():
            discover.run(
                OutcomeSettings(
                    **here, sources=(*old, new), samples_per_domain=settings.samples_per_domain,
                    # no more of a domain than of the new one: each costs a pass of the base
                    single_cap=settings.rows, save_path=str(discovered), seed=settings.seed,
                    **floor,
                ),
                progress=self._part("route"),
            )  # fmt: skip
        trained_anew = route_train.run(
            RouterTrainSettings.model_validate({
                **known, **here, "targets": str(discovered), "save_path": str(trained),
                "extend": "all", "install": False, "force": True,
            }),
            progress=self._part("route"),
        )  # fmt: skip
        before = read_manifest(work, BEFORE).router
        assert before is not None
        # On rows that the routers may know: those that both were not trained on are too few, and
        # whether old domains lose is asked, not how good a router is.
        judged = evaluate.run(
            RouteEvaluateSettings(
                **here, sources=tuple(old), targets=str(discovered), gap_rows=0, sample_prompts=0,
                random_control=False, rows_per_group=settings.samples_per_domain,
                include_trained=True,
                routers=(str(file_of(fork.path, before)), str(trained / ROUTER_FILE)),
                save_path=str(work / "evaluate"), force=True,
            )
        )  # fmt: skip
        recall = trained_anew.data["metrics"]["domains"][self.name]["recall"]
        found = f"{recall['rate']:.0%} of {recall['n']} held-out prompts" if recall else "none"
        return [
            *checks.is_routed_safely(settings, judged.data),
            Check("new domain found", bool(recall and recall["rate"] > 0), found, "some"),
        ]

    def _accept(self, work: Path, scratch: Path) -> list[Check]:
        fork, store = Store.open(work / FORK), self.store
        record = fork.domain_named(self.name)
        # else the store took it already, and the run was stopped before it could say so
        if store.refresh().domain_named(self.name) != record:
            router = read_router(work / "router" / ROUTER_FILE)
            with store.change("grown", domain=self.name) as change:
                if change.manifest != read_manifest(work, BEFORE):
                    raise StoreError(
                        f"{store.path}: was changed since `grow` began; nothing was added. "
                        f"{_BEGIN_AGAIN}"
                    )
                change.adopt(fork)
                change.set_router(router.tensors, router.header)
        target = user_path(str(self.settings.save_path))
        remember_places(store, str(self.base), target / ROWS)
        return [Check("in the store", True, ", ".join(s.name for s in record.stacks), "")]

    # --- the copy ---------------------------------------------------------------------------------

    def _fork(self, work: Path) -> Store:
        """A copy of the store as it was when the run began, made once; it knows where the rows of
        its domains are.
        """
        place = work / FORK
        if not place.exists():
            scratch = work / f".{FORK}"
            shutil.rmtree(scratch, ignore_errors=True)
            scratch.mkdir()
            store, data = self.store, self.settings.stored_data
            if store.refresh() != read_manifest(work, BEFORE):
                raise StoreError(f"{store.path}: was changed since `grow` began; {_BEGIN_AGAIN}")
            for record in store.manifest.files():
                (scratch / record.file).parent.mkdir(exist_ok=True)
                clone_or_link(file_of(store.path, record), scratch / record.file)
            with target_errors(scratch, only_writes=True):
                shutil.copy2(work / BEFORE, scratch / MANIFEST)
                if data is None and (store.path / LOCATION).exists():
                    shutil.copy2(store.path / LOCATION, scratch / LOCATION)
            place_of_data = None if data is None else user_path(data)
            remember_places(Store.open(scratch), str(self.base), place_of_data)
            sync_tree(scratch)
            scratch.rename(place)
        return Store.open(place)

    def _part(self, stage: Stage) -> _Progress | None:
        """Progress of a command that a stage runs."""
        if self.progress is None:
            return None
        told, place = self.progress, STAGES.index(stage)

        def part(done: float, total: float, what: str = "", **more: Any) -> None:
            told(place + done / max(total, 1e-9) * 0.999, len(STAGES), f"{stage}: {what}")

        return part

    def _counting(self, stage: Stage) -> checks.OnLosses:
        """Progress of a stage that measures losses itself."""
        part, done = self._part(stage), 0

        def count(more: int) -> None:
            nonlocal done
            done += more
            if part:
                part(0, 1, f"{done} losses")

        return count


def _count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def _held_out(rows: int) -> int:
    """Rows to judge a new domain by: more than the 2% that `stack` holds out."""
    return max(8, min(MOST_HELD_OUT, rows // 5))


def _switch(store: Store, enabled: Mapping[str, bool]) -> None:
    """Serve these domains, and not those."""
    with store.change("switch") as change:
        for name, value in enabled.items():
            domain = change.manifest.domain_named(name)
            assert domain is not None
            change.manifest = change.manifest.with_domain(replace(domain, enabled=value))


def _pairs(examples: Sequence[Any]) -> list[tuple[str, str]]:
    return [(example.prompt, str(example.answer)) for example in examples]


def read_stages(work: Path) -> dict[str, list[dict[str, Any]]]:
    """Stage -> its checks, of the stages that are done."""
    done: dict[str, list[dict[str, Any]]] = {}
    for stage in STAGES:
        path = work / f"{stage}.json"
        if path.exists():
            done[stage] = read_object(path.read_bytes())["checks"]
    return done
