"""`mlxstacks psn stacks`: the same stacks on a random and on a pretrained base, and a control.

Of each seed, in `cells/SEED/` of the work directory:

    pretrained, random     models of `pretrain`, after its last and before its first batch
    on_pretrained, on_random   stores of `stack`
    control/NAME.safetensors   states of the control after each domain

The control trains every weight of the random base, domain after domain on the rows of the stacks,
with the same core. Its steps cost the same arithmetic: a step of stacks costs 4 P + 6 A operations
a token for P weights of the base, which only carry gradients, and A of the stack; one of the
control costs 6 P. Passes through the stacks of earlier domains are not counted: where they are
many, the control gets less than they cost.
"""

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from pydantic import BaseModel, ValidationError

from mlxstacks import base_model
from mlxstacks.data import (
    DomainData,
    TrainDataSettings,
    data_notes,
    read_train_data,
    train_data_settings,
)
from mlxstacks.errors import InputError
from mlxstacks.files.disk import user_path
from mlxstacks.files.outputs import PLACES, write_json
from mlxstacks.files.store import Store
from mlxstacks.files.strict_json import json_sha256, read_object
from mlxstacks.layers.spectrum import blocks_of, spectrum_of
from mlxstacks.layers.stack_files import SharedPairs, parts_of
from mlxstacks.stats import mean_interval
from mlxstacks.studies.psn.settings import PsnStacksSettings
from mlxstacks.studies.stack import run as stack_run
from mlxstacks.studies.stack.plan import data_root, listed_domains
from mlxstacks.studies.stack.setup import StackSetup, choose_targets, set_up
from mlxstacks.studies.train import pretrain
from mlxstacks.studies.train.setup import SaveTimer
from mlxstacks.study.document import Block, Columns, Plot, Series, Table, cell_of, problem_of
from mlxstacks.study.engine import Step, Study, run_study
from mlxstacks.study.render.figures import FORMATS
from mlxstacks.study.result import Result
from mlxstacks.study.run_directory import plain
from mlxstacks.training.loop import (
    TrainingState,
    Validation,
    load_state,
    new_state,
    restore_best,
    save_state,
    train,
)
from mlxstacks.training.settings import (
    DomainSettings,
    PretrainSettings,
    SnapshotSettings,
    StackRunSettings,
)
from mlxstacks.training.step import cross_entropy_loss

ABOUT = {
    "kind": "psn stacks",
    "title": "Stacks on a random base",
    "question": "Do stacks need a base that has learned something?",
}
CELLS = "cells"
ARMS = ("on_pretrained", "on_random", "control")
WORDS = {"on_pretrained": "pretrained base", "on_random": "random base", "control": "all weights"}
Progress = Callable[..., None]
Say = Callable[[float, str], None]


def run(
    settings: PsnStacksSettings, *, dry_run: bool = False, progress: Progress | None = None
) -> Result:
    """Train bases, stacks and control for each seed; write the comparison to `save_path`.

    Raises: InputError: no corpus or domains, or what `pretrain` and `stack` refuse.
    """
    if settings.corpus is None:
        raise InputError("psn stacks needs corpus, the texts of the base")
    return run_study(_Stacks(settings, progress), dry_run=dry_run, progress=progress)


def domain_data(settings: BaseModel, validation_rows: int) -> dict[str, TrainDataSettings]:
    """Domain -> where its rows come from; paths are whole ones. Raises: InputError."""
    try:
        listed = StackRunSettings.model_validate(settings.model_dump(include={"data", "domains"}))
    except ValidationError as error:
        raise InputError(problem_of(error)) from None
    root, found = data_root(listed), {}
    for domain in listed_domains(listed):
        assert domain.data is not None
        about = domain.data.model_dump(exclude_unset=True)
        for source in about["sources"]:
            if source.get("path"):
                source["path"] = str(root / user_path(source["path"]))
        about["validation_rows"] = validation_rows
        found[domain.name] = TrainDataSettings.model_validate(about)
    return found


def pretrained(
    settings: PretrainSettings, path: Path, data: Any, seed: int, progress: Any, **changes: Any
) -> None:
    """A model of `pretrain` at `path`, where there is none yet."""
    if not path.is_dir():
        update = {"data": data, "save_path": str(path), "seed": seed, **changes}
        pretrain.run(settings.model_copy(update=update), progress=progress)


class SeedStudy(Study):
    """Each seed is a step, whose figures are one file; settings have `seeds`, `corpus`, `data`."""

    about: dict[str, str]
    artifacts: Sequence[str] = (f"{CELLS}/*.json",)
    provenance = (f"{CELLS}/*.json",)
    plot_formats = FORMATS
    settings: Any

    def __init__(self, settings: Any, progress: Progress | None) -> None:
        self.settings, self.progress = settings, progress
        self.inputs = (settings.data,)

    def data_of(self) -> dict[str, TrainDataSettings]:
        """What is read, by name, where the study reads it itself."""
        return {"corpus": train_data_settings(self.settings.corpus)}

    def check(self, read: Mapping[str, DomainData]) -> None:
        """Raises: InputError: what would end a run after a base is trained. read: of `data_of`."""

    def planned(self) -> Result:
        read = {n: read_train_data(data, Path()) for n, data in self.data_of().items()}
        self.check(read)
        reports = {name: data.report for name, data in read.items()}
        shown = self.settings.model_dump(mode="json", exclude=PLACES)
        plan = {
            **{key: value for key, value in shown.items() if key != "data"},
            "sha256": {n: [x["sha256"] for x in r["sources"]] for n, r in reports.items()},
        }
        notes = [note for name, report in reports.items() for note in data_notes(name, report)]
        rows = [f"{n}: {r['train_rows']:,} + {r['validation_rows']:,}" for n, r in reports.items()]
        facts = {"rows to train + to validate": "; ".join(rows)}
        for key, value in self.settings:
            if key not in PLACES and value not in (None, ()):
                facts[key] = _in_words(value)
        return Result(
            **self.about, status="planned", plan=plan, notes=tuple(notes), settings=shown,
            blocks=(Table.of_facts("plan", "The plan", facts),),
        )  # fmt: skip

    def steps(self, work: Path) -> Iterator[Step]:
        for place, seed in enumerate(self.settings.seeds):
            name = f"{CELLS}/seed-{seed}.json"
            yield Step(f"seed-{seed}", partial(self._seed, work, seed, place, name), (name,))

    def _seed(self, work: Path, seed: int, place: int, name: str, out: Path) -> None:
        def say(share: float, what: str) -> None:
            if self.progress:
                self.progress(place + share, len(self.settings.seeds), f"seed {seed}, {what}")

        directory = work / CELLS / str(seed)
        directory.mkdir(parents=True, exist_ok=True)
        record = self.cell(seed, directory, say)
        (out / name).parent.mkdir(parents=True)
        write_json(out / name, plain(record))

    def conclude(self, work: Path) -> Result:
        names = [f"{CELLS}/seed-{seed}.json" for seed in self.settings.seeds]
        cells = [read_object((work / name).read_bytes()) for name in names]
        return Result(**self.about, status="done", **self.concluded(cells))

    @abstractmethod
    def cell(self, seed: int, directory: Path, say: Say) -> dict[str, Any]:
        """The figures of a seed. say: (share of it that is done, what)."""

    @abstractmethod
    def concluded(self, cells: list[dict[str, Any]]) -> dict[str, Any]:
        """Fields of the result."""


def _in_words(value: Any) -> str:
    """Of nested settings, those that are not the defaults."""
    if isinstance(value, tuple):
        return ", ".join(map(_in_words, value))
    if isinstance(value, DomainSettings):
        return value.name
    if isinstance(value, BaseModel):
        set_here = value.model_dump(mode="json", exclude_defaults=True)
        return ", ".join(f"{key} {part}" for key, part in set_here.items()) or "by default"
    return str(value)


class _Stacks(SeedStudy):
    about = ABOUT

    def data_of(self) -> dict[str, TrainDataSettings]:
        of_domains = domain_data(self.settings, self.settings.stack.validation_rows)
        return {**super().data_of(), **of_domains}

    def check(self, read: Mapping[str, DomainData]) -> None:
        layout, domains = self.settings.pretrain, self.settings.domains
        base = base_model.build_model(pretrain.new_config(layout, layout.vocab_size))
        try:
            choose_targets(base, self.settings.stack.model_copy(update={"domains": domains}))
        except InputError as error:
            raise InputError(f"stack: {error}") from None

    def cell(self, seed: int, directory: Path, say: Say) -> dict[str, Any]:
        settings = self.settings

        def part(what: str, number: int) -> Progress:
            return lambda done, total, words="": say(
                (number + done / max(1, total)) / 4, f"{what}: {words}"
            )

        corpus, base, random = settings.corpus, directory / "pretrained", directory / "random"
        pretrained(settings.pretrain, base, corpus, seed, part("base", 0))
        pretrained(settings.pretrain, random, corpus, seed, None, iters=0, tokenizer=str(base))
        arms: dict[str, Any] = {}
        for number, (arm, model) in enumerate(zip(ARMS[:2], (base, random), strict=True), 1):
            update = {
                "model": str(model), "data": settings.data, "domains": settings.domains,
                "save_path": str(directory / arm), "seed": seed, "rounds": 1,
            }  # fmt: skip
            of_arm = settings.stack.model_copy(update=update)
            result = stack_run.run(of_arm, progress=part(WORDS[arm], number))
            arms[arm] = _arm_record(result, Store.open(directory / arm))
        of_control = of_arm.model_copy(update={"save_path": str(directory / "none")})
        arms["control"] = _control(
            of_control, arms["on_random"], settings.control_learning_rate, directory / "control",
            part(WORDS["control"], 3),
        )  # fmt: skip
        losses = [r["validation_loss"] for r in Result.open(base).data["validation"]]
        return {"seed": seed, "arms": arms, "base": {"loss_before": losses[0], "loss": losses[-1]}}

    def concluded(self, cells: list[dict[str, Any]]) -> dict[str, Any]:
        return concluded(cells)


def _arm_record(result: Result, store: Store) -> dict[str, dict[str, Any]]:
    """Domain -> figures of its stacks, from a run of `stack`."""
    pairs, records = SharedPairs(store), {}
    for domain in store.manifest.domains:
        norm = 0.0
        for stack in domain.stacks:
            file = store.read_stack(stack)
            for part in parts_of(file, pairs.of(file.header)).values():
                norm += spectrum_of(blocks_of(part)).energy
        told = result.data["domains"][domain.name]
        records[domain.name] = {
            "loss_before": domain.losses[0], "loss": domain.final_loss, "delta_norm": norm**0.5,
            "captured_energy": (told.get("protected") or {}).get("captured_energy_mean"),
            "parameters": sum(stack.parameters for stack in domain.stacks),
            "steps": told.get("steps"),
        }  # fmt: skip
    return records


def _control(
    settings: StackRunSettings, stacks: Mapping[str, Mapping[str, Any]], rate: float,
    directory: Path, progress: Progress,
) -> dict[str, dict[str, Any]]:  # fmt: skip
    """Every weight of the base, trained on the rows of the stacks. stacks: their figures."""
    directory.mkdir(exist_ok=True)
    setup = set_up(settings, None)
    model = setup.model
    mx.eval(model.parameters())
    model.unfreeze()
    model.train()
    count = base_model.count_parameters(model)
    records: dict[str, dict[str, Any]] = {}
    for place, plan in enumerate(setup.to_train):
        ratio = (4 * count + 6 * stacks[plan.name]["parameters"]) / (6 * count)
        update = {"steps": math.ceil(ratio * plan.optimizer.steps), "learning_rate": rate}
        optimizer = plan.optimizer.model_copy(update=update)
        path, run = directory / f"{plan.name}.safetensors", json_sha256(
            [settings.model_dump(mode="json"), plan.name, optimizer.model_dump(mode="json")]
        )  # fmt: skip
        before = _projections(setup)
        state = load_state(path, model, optimizer, run) if path.exists() else new_state(optimizer)
        timer = SaveTimer(optimizer.steps)

        def on_step(
            state: TrainingState, _: Any, timer: Any = timer, path: Path = path, run: str = run,
            place: int = place, steps: int = optimizer.steps, name: str = plan.name,
        ) -> None:  # fmt: skip
            timer.save_if_due(state.step, lambda: save_state(path, model, state, run))
            progress(place + state.step / steps, len(setup.to_train), name)

        every = max(1, settings.steps_per_eval // settings.grad_accumulation_steps)
        train(
            model, cross_entropy_loss(), partial(plan.batches_at, 1), optimizer, state,
            validation=Validation(setup.loss_of(plan.name), every, SnapshotSettings()),
            seed=settings.seed, on_step=on_step,
        )  # fmt: skip
        restore_best(model, state)
        moved = [mx.sum((w - before[name]) ** 2) for name, w in _projections(setup).items()]
        assert state.best is not None
        records[plan.name] = {
            "loss_before": state.validation[0]["validation_loss"], "loss": state.best.loss,
            "delta_norm": mx.sqrt(mx.sum(mx.stack(moved))).item(), "captured_energy": None,
            "parameters": count, "steps": optimizer.steps,
        }  # fmt: skip
    return records


def _projections(setup: StackSetup) -> dict[str, mx.array]:
    """Weights of the projections that stacks are put on, by path."""
    layers: dict[str, nn.Module] = dict(setup.model.named_modules())
    return {target.path: layers[target.path].weight for target in setup.targets}


def concluded(cells: list[dict[str, Any]]) -> dict[str, Any]:
    """Fields of the result."""
    domains = list(cells[0]["arms"]["control"])

    def of(arm: str, domain: str, key: str) -> list[float]:
        values = [cell["arms"][arm][domain][key] for cell in cells]
        return [value for value in values if value is not None]

    def interval(values: list[float]) -> dict[str, Any] | None:
        return mean_interval(values).as_json() if values else None

    figures = {
        domain: {
            arm: {
                key: interval(of(arm, domain, key))
                for key in ("loss_before", "loss", "delta_norm", "captured_energy")
            }
            for arm in ARMS
        }
        for domain in domains
    }
    pairs = {"random_less_pretrained": ARMS[:2], "control_less_random": ARMS[1:]}
    differences = {
        domain: {
            name: [b - a for a, b in zip(*(of(arm, domain, "loss") for arm in arms), strict=True)]
            for name, arms in pairs.items()
        }
        for domain in domains
    }
    worse = [d for d in domains if min(differences[d]["random_less_pretrained"]) > 0]
    gap = fmean(x for d in domains for x in differences[d]["random_less_pretrained"])
    kept = fmean(x for d in domains for x in differences[d]["control_less_random"])
    base = [cell["base"]["loss"] for cell in cells]
    seeds = len(cells)
    verdict = (
        f"The same stacks end at a higher loss on the random base than on the pretrained one in "
        f"{len(worse)} of {len(domains)} domains in every one of {seeds} seeds, by {gap:+.3f} nats "
        f"per token on average. Training every weight of the random base at equal arithmetic ends "
        f"{abs(kept):.3f} nats {'below' if kept < 0 else 'above'} the stacks on it."
    )
    steps = {arm: sum(cells[0]["arms"][arm][d]["steps"] or 0 for d in domains) for arm in ARMS}
    return {
        "verdict": verdict,
        "outcome": f"worse on a random base in {len(worse)} of {len(domains)} domains",
        "data": {"cells": cells, "domains": figures, "differences": differences,
                 "base_loss": interval(base), "steps": steps},
        "blocks": _blocks(domains, figures, differences, interval),
        "notes": (
            f"Loss of the pretrained base on its corpus: {fmean(base):.3f} nats per token.",
            f"Optimizer steps: {steps['on_random']:,} of stacks, {steps['control']:,} of control.",
        ),
    }  # fmt: skip


def _blocks(
    domains: list[str], figures: Any, differences: Any, interval: Callable[[list[float]], Any]
) -> tuple[Block, ...]:
    columns: Columns = {
        "domain": "text", **{WORDS[arm]: ("number", 3) for arm in ARMS},
        "random - pretrained": ("change", 3), "all weights - random": ("change", 3),
    }  # fmt: skip
    rows = [
        (
            domain, *(cell_of(figures[domain][arm]["loss"]) for arm in ARMS),
            *(cell_of(interval(d)) for d in differences[domain].values()),
        )
        for domain in domains
    ]  # fmt: skip
    more: Columns = {"domain": "text"}
    for what, names in (("delta norm", ARMS), ("captured energy", ARMS[:2])):
        more = {**more, **{f"{what}, {WORDS[arm]}": ("number", 3) for arm in names}}
    norms = [
        (
            domain,
            *(cell_of(figures[domain][arm]["delta_norm"]) for arm in ARMS),
            *(cell_of(figures[domain][arm]["captured_energy"]) for arm in ARMS[:2]),
        )
        for domain in domains
    ]
    caption = "Nats per token on held-out rows, after the domain was trained; means over seeds "
    series = tuple(
        Series.of_intervals(WORDS[arm], [cell_of(figures[d][arm]["loss"]) for d in domains])
        for arm in ARMS
    )
    return (
        Table.of("losses", "Validation loss after each domain", columns, rows,
                 caption=caption + "with 95% intervals; differences are of pairs."),
        Table.of("deltas", "What was added", more, norms,
                 caption="delta norm: Frobenius, over all adapted projections. captured energy: "
                 "share of what earlier stacks write that the protected directions hold, a mean "
                 "over projections; the first domain has none before it."),
        Plot(id="losses-plot", title="Validation loss after each domain", kind="intervals",
             series=series, categories=tuple(domains), x_label="nats per token",
             alt="Validation loss of each domain: stacks on a pretrained and a random base, and "
             "all weights trained."),
    )  # fmt: skip
