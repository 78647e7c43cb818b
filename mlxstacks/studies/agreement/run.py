"""`mlxstacks compare`: how far the next tokens of models differ from those of a reference.

The reference answers prompts and reads texts once, and leaves what it finds likely; each other
model then reads the same tokens. Models are loaded one after the other. See `mlxstacks.agreement`.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxstacks import base_model
from mlxstacks.agreement import (
    KINDS,
    TOP_K,
    Agreement,
    Reference,
    agree,
    check_records,
    read_passages,
    refer,
)
from mlxstacks.data import Rendering, read_records
from mlxstacks.errors import InputError
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.disk import user_path
from mlxstacks.files.hub import resolve_model
from mlxstacks.files.outputs import PLACES
from mlxstacks.fuse.in_memory import attach_adapters
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.processes import dealing, gathered
from mlxstacks.stats import bootstrap_ratio, wilson_interval
from mlxstacks.studies.agreement.settings import AgreementSettings
from mlxstacks.study.document import Block, Cell, Kind, Plot, Series, Standing, Table, counted
from mlxstacks.study.engine import Step, Study, run_study
from mlxstacks.study.integrity import file_sha256
from mlxstacks.study.progress import WholeProgress
from mlxstacks.study.render.words import listed
from mlxstacks.study.result import Result
from mlxstacks.training.modes import prepare_base

ABOUT = {
    "kind": "compare",
    "title": "Agreement",
    "question": "How far do the next tokens differ from the reference's?",
}
JUDGE = Path(__file__).resolve().parents[2] / "assets" / "judge.jsonl"
BASE = "without the adapter"
REFERENCE = "reference.safetensors"
_RESAMPLES_SEED = 0
_LEAST_PASSAGES = 5  # of fewer, resampling says next to nothing
Figures = dict[str, Any]


def run(
    settings: AgreementSettings,
    *,
    dry_run: bool = False,
    progress: Callable[..., None] | None = None,
) -> Result:
    """Compare, and write result and plots to `settings.save_path`.

    Raises: InputError: a model, an adapter or rows that cannot be used, or nothing to compare.
    """
    if settings.model is None or settings.save_path is None:
        raise InputError("compare needs model, other and save_path")
    return run_study(_Agreement(settings, progress), dry_run=dry_run)


class _Agreement(Study):
    is_dealt = True
    settings: AgreementSettings

    def __init__(self, settings: AgreementSettings, progress: Callable[..., None] | None) -> None:
        self.settings, self.notes = settings, dict[str, list[str]]()
        self.inputs = (settings.model, *settings.other, *settings.adapter_path, settings.data)
        self.plot_formats = [settings.plot_format] if settings.plots else []
        self.models = _names(settings)
        self.artifacts = self.provenance = [*map(_file, range(len(self.models)))]
        # The reference runs twice and generates, which takes the longest.
        self.whole = WholeProgress(progress, 4 + len(self.models))

    def planned(self) -> Result:
        settings = self.settings
        data = user_path(settings.data) if settings.data else JUDGE
        self.records = read_judge(data)
        directories = [resolve_model(str(settings.model)), *map(resolve_model, settings.other)]
        _check_tokenizers(directories, self.records)
        prints = [fingerprint(open_checkpoint(path)) for path in dict.fromkeys(directories)]
        adapters = [
            file_sha256(path)
            for adapter in settings.adapter_path
            for path in sorted(user_path(adapter).glob("*.safetensors"))
        ]
        plan = {
            "kind": "compare", "models": prints, "adapters": adapters, "data": file_sha256(data),
            "top_k": TOP_K, "answer_tokens": settings.answer_tokens,
            "max_tokens": settings.max_tokens, "base": settings.base,
            "thinking": settings.thinking, "allow_special": settings.allow_special,
        }  # fmt: skip
        prompts = sum("prompt" in record for record in self.records)
        facts: dict[str, Cell] = {
            "reference": _with_adapters(settings), "compared": ", ".join(self.models),
            "prompts": prompts, "texts": len(self.records) - prompts,
            "longest answer, tokens": settings.answer_tokens,
        }  # fmt: skip
        return Result(
            **ABOUT, status="planned", plan=plan, standing=Standing(status="planned"),
            settings=settings.model_dump(mode="json", exclude=PLACES),
            blocks=(Table.of_facts("plan", "What is compared", facts),),
        )  # fmt: skip

    def steps(self, work: Path) -> Iterator[Step | list[Step]]:
        yield Step("reference", self._refer, (REFERENCE,))
        reference = Reference.open(work / REFERENCE)
        yield [
            Step(name, partial(self._agree, reference, name, path, _file(number)), (_file(number),))
            for number, (name, path) in enumerate(self.models.items())
        ]

    def conclude(self, work: Path) -> Result:
        notes = {
            name: notes for part in gathered(self.notes, dealing()) for name, notes in part.items()
        }
        order = [note for name in ("", *self.models) for note in notes.get(name, ())]
        return concluded(self.settings, work, tuple(dict.fromkeys(order)))

    def _load(self, name: str, path: Path, adapters: Sequence[str] = ()) -> tuple[nn.Module, Any]:
        """name: of what is compared; "" for the reference."""
        matching = {
            "allow_base": self.settings.allow_base,
            "peft_layout": self.settings.peft_layout,
        }
        model, tokenizer, self.notes[name] = load(path, adapters, self.settings.base, **matching)
        return model, tokenizer

    def _refer(self, out: Path) -> None:
        settings = self.settings
        path = resolve_model(str(settings.model))
        model, tokenizer = self._load("", path, settings.adapter_path)
        passages = read_passages(
            self.records, model, tokenizer,
            answer_tokens=settings.answer_tokens, most_tokens=settings.max_tokens,
            rendering=Rendering.of(settings), advance=self.whole.part(3, "reference's answers"),
            notes=self.notes[""],
        )  # fmt: skip
        refer(model, passages, self.whole.part(1, "reference")).save(out / REFERENCE)

    def _agree(self, reference: Reference, name: str, path: str, file: str, out: Path) -> None:
        model, _ = self._load(name, resolve_model(path))
        agree(model, reference, self.whole.part(1, name)).save(out / file)


def read_judge(file: Path) -> list[dict[str, Any]]:
    """Rows to read and to answer. Raises: InputError naming the file, and a row that is neither."""
    records = read_records(file)
    try:
        check_records(records)
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    return records


def _check_tokenizers(models: Sequence[Path], records: Sequence[Mapping[str, Any]]) -> None:
    """Raises: InputError: a model's tokenizer reads the rows otherwise than the first one's."""
    vocabularies = {path: path / "tokenizer.json" for path in models}
    known = {
        path: file.read_bytes() if file.is_file() else b"" for path, file in vocabularies.items()
    }
    first = models[0]
    texts = [str(value)[:2_000] for record in records for value in record.values()]
    for path in known.keys() - {first}:
        if known[path] and known[path] == known[first]:
            continue
        one, other = (base_model.load(model, lazy=True)[1] for model in (first, path))
        for text in texts:
            ids, other_ids = (tokenizer.encode(text) for tokenizer in (one, other))
            if ids != other_ids:
                raise InputError(
                    f"{path}: reads {text[:40]!r} as {len(other_ids)} tokens that are not the "
                    f"{len(ids)} of {first}; compare models of one tokenizer"
                )


def concluded(settings: AgreementSettings, directory: Path, notes: tuple[str, ...] = ()) -> Result:
    """The result of the files in `directory`."""
    figures = {
        name: figures_of(Agreement.open(directory / _file(number)))
        for number, name in enumerate(_names(settings))
    }
    least = settings.fail_under_agreement
    low = [
        f"{name} {100 * parts['all']['agreement']:.2f}%"
        for name, parts in _candidates(figures).items()
        if least is not None and parts["all"]["agreement"] < least
    ]
    gate = f"agreement is below --fail-under-agreement {least}: {', '.join(low)}" if low else None
    return Result(
        **ABOUT, status="done", standing=Standing(), outcome=outcome(figures),
        verdict=verdict(figures, _with_adapters(settings)), blocks=blocks(figures), notes=notes,
        data={"models": figures, "top_k": TOP_K}, failed_gate=gate,
    )  # fmt: skip


def conclude_again(result: Result, directory: Path) -> Result:
    """What follows from the files of a finished comparison. Raises: ValueError, KeyError."""
    return concluded(AgreementSettings.model_validate(result.settings), directory)


def load(
    path: Path, adapters: Sequence[str] = (), base: str = "auto", **matching: Any
) -> tuple[nn.Module, Any, list[str]]:
    """A model with adapters, not fused: (model, tokenizer, notes).

    base: see `prepare_base`. matching: settings of a fuse, of how adapters are read.
    """
    model, tokenizer, _ = base_model.load(path, lazy=True)
    notes: list[str] = []
    is_wide = prepare_base(model, base, notes)
    if adapters:
        fuse = FuseSettings(model=str(path), adapter_path=tuple(adapters), **matching)
        dtype = mx.float32 if is_wide else None
        notes += attach_adapters(model, open_checkpoint(path), fuse, dtype)
    return model, tokenizer, notes


def _names(settings: AgreementSettings) -> dict[str, str]:
    """What is compared: name -> model. Names are the last parts of paths, numbered where alike."""
    models = {BASE: str(settings.model)} if settings.adapter_path else {}
    for path in settings.other:
        name, number = Path(path).name or path, 2
        while name in models:
            name, number = f"{Path(path).name} ({number})", number + 1
        models[name] = path
    return models


def _with_adapters(settings: AgreementSettings) -> str:
    adapters = [Path(path).name for path in settings.adapter_path]
    return " with ".join(
        [Path(str(settings.model)).name, *([", ".join(adapters)] * bool(adapters))]
    )


def _file(number: int) -> str:
    return f"model-{number}.safetensors"


# --- figures and words ----------------------------------------------------------------------------


def figures_of(agreement: Agreement) -> dict[str, Figures]:
    """Figures over all passages ("all") and over each kind ("answer", "text").

    kl_nats, agreement, loss_change_nats: means over positions, with intervals over resampled
    passages, None where there are too few to resample; kl_p99_nats: of positions.
    """
    positions, kind = agreement.passages.T
    owner, kinds = np.repeat(np.arange(len(positions)), positions), np.repeat(kind, positions)
    figures: dict[str, Figures] = {}
    for number, name in enumerate(("all", *KINDS), -1):
        chosen = np.ones(len(kinds), bool) if name == "all" else kinds == number
        if not chosen.any():
            continue
        counts = np.bincount(owner[chosen])
        parts: Figures = {"positions": int(chosen.sum()), "passages": int((counts > 0).sum())}
        for figure, values in (
            ("kl_nats", agreement.kl),
            ("agreement", agreement.same_token),
            ("loss_change_nats", agreement.loss_change),
        ):
            sums = np.bincount(owner[chosen], values[chosen])[counts > 0]
            parts[figure] = float(values[chosen].mean(dtype=np.float64))
            parts[f"{figure}_interval"] = None
            if len(sums) < _LEAST_PASSAGES:
                continue
            interval = bootstrap_ratio(
                sums.tolist(), counts[counts > 0].tolist(), seed=_RESAMPLES_SEED
            )
            if figure == "agreement" and interval.low == interval.high:  # in every passage the same
                interval = wilson_interval(int(sums.sum()), int(chosen.sum()))
            parts[f"{figure}_interval"] = [interval.low, interval.high]
        parts["kl_p99_nats"] = float(np.quantile(agreement.kl[chosen], 0.99))
        figures[name] = parts
    return figures


def _candidates(figures: dict[str, dict[str, Figures]]) -> dict[str, dict[str, Figures]]:
    """Without the control: the base alone says how much of the adapter there is to keep."""
    return {name: parts for name, parts in figures.items() if name != BASE} or figures


def outcome(figures: dict[str, dict[str, Figures]]) -> str:
    shares = [parts["all"]["agreement"] for parts in _candidates(figures).values()]
    ends = dict.fromkeys(f"{100 * share:.1f}%" for share in (min(shares), max(shares)))
    between = " and " if len(shares) == 2 else f" (lowest of {len(shares)} models) to "
    return f"{between.join(ends)} agree"


def verdict(figures: dict[str, dict[str, Figures]], reference: str) -> str:
    """The reference, and the lowest KL first; of more than three the lowest and the highest. And
    which models cannot be told from the first: those whose interval overlaps its own.
    """
    ordered = sorted(figures.items(), key=lambda pair: float(pair[1]["all"]["kl_nats"]))
    said = [f"{name}: {in_words(parts['all'])}" for name, parts in ordered]
    if len(said) <= 3:
        words = f"The reference is {reference}. {'; '.join(said)}."
    else:
        words = f"The reference is {reference}. Closest to it by KL is {said[0]}; farthest "
        words += f"{said[-1]}; {len(said) - 2} lie between."
    (closest, first), *others = ordered
    _, high = first["all"]["kl_nats_interval"] or (0.0, 0.0)
    near = [name for name, p in others if (p["all"]["kl_nats_interval"] or (math.inf,))[0] <= high]
    return f"{words} By KL, {listed(near)} cannot be told from {closest}." if near else words


def in_words(parts: Figures) -> str:
    kl = f"KL {parts['kl_nats']:.4f} nats per token"
    if parts["agreement"] == 1:
        return f"the same next token in all of {parts['positions']:,}, {kl}"
    ends = [f"{100 * end:.1f}" for end in parts["agreement_interval"] or ()]
    interval = f" ({' to '.join(ends)})" if ends else ""
    share = f"{100 * parts['agreement']:.1f}%{interval}"
    return f"the same next token in {share} of {parts['positions']:,}, {kl}"


def blocks(figures: dict[str, dict[str, Figures]]) -> tuple[Block, ...]:
    first = next(iter(figures.values()))
    prompts, texts = (first[kind]["passages"] if kind in first else 0 for kind in KINDS)
    what = {
        "all": (f"{counted(prompts, 'answer')} of its own and {counted(texts, 'text')}", ""),
        "answer": ("the reference's answers", "-answers"),
        "text": ("texts", "-texts"),
    }
    tables = [
        agreement_table(
            f"agreement{ending}", f"Next tokens, compared with the reference: {read}",
            {name: kinds[kind] for name, kinds in figures.items()}, folded=kind != "all",
        )
        for kind, (read, ending) in what.items()
        if kind in first
    ]  # fmt: skip
    names = tuple(figures)
    kl = {name: parts["all"]["kl_nats"] for name, parts in figures.items()}
    ends = [parts["all"]["kl_nats_interval"] or (None, None) for parts in figures.values()]
    values = ", ".join(f"{name} {value:.4f}" for name, value in kl.items())
    cells = [(value, *of) for value, of in zip(kl.values(), ends, strict=True)]
    title = "KL from the reference"
    plot = Plot(
        id="kl", title=title, kind="intervals", categories=names, x_label="KL, nats per token",
        series=(Series.of_intervals("KL", cells),),
        references={"the same": 0.0}, alt=f"{title}, nats per token: {values}.",
    )  # fmt: skip
    return *tables, plot


def agreement_table(
    id: str, title: str, figures: Mapping[str, Figures], *, folded: bool = False
) -> Table:
    """A row a model: figures of one kind of passages; folded: the loss with its interval too."""
    columns: dict[str, Kind | tuple[Kind, int]] = {
        "model": "text", "same next token": "share", "KL, nats per token": ("number", 4),
        "KL, 99th percentile": ("number", 3), "loss, nats": ("change", 3),
    }  # fmt: skip
    loss = _cell if folded else dict.get  # a line of 80 has no room for a third interval
    rows = [
        [name, *(_cell(parts, figure) for figure in ("agreement", "kl_nats")),
         parts["kl_p99_nats"], loss(parts, "loss_change_nats")]
        for name, parts in figures.items()
    ]  # fmt: skip
    caption = (
        f"{next(iter(figures.values()))['positions']:,} tokens, each after the right tokens before "
        "it. KL and change of loss: from the reference. 95% intervals: passages drawn anew, where "
        f"there are {_LEAST_PASSAGES} or more."
    )
    return Table.of(id, title, columns, rows, caption=caption, folded=folded)


def _cell(parts: Figures, name: str) -> Cell:
    interval = parts[f"{name}_interval"]
    return parts[name] if interval is None else (parts[name], *interval)
