"""`mlxstacks fuse`: the fuse, and then how the fused model behaves next to the unfused adapter.

Weights say how much of a delta is left; users see next tokens. The fused model is on disk, whole,
before it is judged: a judgement that is interrupted, or that this machine has no memory for, takes
nothing from it. Four models read the same tokens, one after the other:

    the base with its adapters, unfused    the reference: it answers the prompts
    this fuse                              what the fuse lost or added
    without the adapter                    how much there was to keep
    the same fuse of zeros                 what the fuse does by itself, from the base; only where
                                           it changes weights at all
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import mlx.nn as nn

from mlxstacks import memory
from mlxstacks.agreement import KINDS, agree, read_passages, refer
from mlxstacks.command_line import command_line
from mlxstacks.errors import CheckpointError, InputError, NonFiniteModelError
from mlxstacks.files.checkpoint import open_checkpoint
from mlxstacks.files.disk import user_path
from mlxstacks.files.hub import resolve_model
from mlxstacks.files.outputs import check_target
from mlxstacks.fuse.in_memory import fuse_in_memory
from mlxstacks.fuse.run import run_command
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.ops.gptq import Moments
from mlxstacks.studies.agreement.allocate import allocate, blocks, note
from mlxstacks.studies.agreement.calibrate import calibrate
from mlxstacks.studies.agreement.reference_files import Referred, once, reference_key
from mlxstacks.studies.agreement.run import (
    BASE,
    JUDGE,
    Figures,
    agreement_table,
    figures_of,
    in_words,
    load,
    read_judge,
)
from mlxstacks.study.progress import WholeProgress
from mlxstacks.study.result import Result
from mlxstacks.study.write import environment, write_result

# Below it the weights may be right and the model is not what was trained.
_LOW_AGREEMENT = 0.9
_LOW_NOTE = (
    "The weights hold the adapter, and next tokens still differ: small changes flip much in this "
    "model. {}a higher --target-correlation or --requant dequantize keeps more, and --adapter-path "
    "serves the adapter unfused."
)
_BY_KL = "--target-kl chooses bits by next tokens, "
FUSED, ZERO = "this fuse", "the same fuse of zeros, from the base"
ANSWER_TOKENS, MOST_TOKENS = 32, 256
_FUSE_SHARE = 1 / 8
_CALIBRATION_SHARE = 1 / 2
# Weights, what a widened copy of them takes while it is made, and room for a pass.
_MEMORY_FACTOR = 1.5
# And the fused tensors of all modules beside the unfused.
_ALLOCATION_MEMORY_FACTOR = 2.5
Progress = Callable[..., None]


def run(
    settings: FuseSettings, *, dry_run: bool = False, progress: Progress | None = None
) -> Result:
    """Fuse, write, judge; the result says both, the behaviour first.

    Raises: InputError: as the fuse, or rows to judge on that cannot be used; nothing is written.
    """
    is_judged = settings.judge != "none" and not dry_run
    if settings.target_kl is not None and settings.bits:
        raise InputError("--target-kl chooses the bits of all modules: leave --bits out")
    file = JUDGE if settings.judge == "shipped" else user_path(settings.judge)
    if settings.judge != "none" and not file.exists():
        raise InputError(f"judge: no file {file}; allowed: shipped, none, a JSONL file of rows")
    records = read_judge(file) if settings.judge != "none" else []
    calibration = _CALIBRATION_SHARE if settings.requant == "gptq" and not dry_run else 0.0
    whole, started = WholeProgress(progress, 1.0 + calibration), time.monotonic()
    if settings.target_kl is not None:
        return _to_target(settings, records, progress, dry_run=dry_run)
    share = _FUSE_SHARE if is_judged else 1.0
    moments, notes = _calibrated(settings, whole.part(calibration, "calibration"), dry_run)
    result = run_command(
        settings, moments, notes, dry_run=dry_run, progress=whole.part(share, "fuse")
    )
    if not is_judged:
        return result
    return _with_judgement(settings, records, result, whole, started)


def _calibrated(
    settings: FuseSettings, advance: Progress, dry_run: bool
) -> tuple[dict[str, Moments] | None, list[str]]:
    """Moments for gptq, and notes. Raises: InputError: rows or a target that cannot be used."""
    if settings.requant != "gptq":
        return None, []
    if dry_run:
        return None, ["gptq is not estimated: a plan does not read the calibration."]
    base = resolve_model(str(settings.model))
    _check_memory(base)
    check_target(user_path(str(settings.save_path)), force=settings.force)
    model, tokenizer, _ = load(base, settings.adapter_path, **_matching(settings))
    return calibrate(settings, model, tokenizer, advance)


def _with_judgement(
    settings: FuseSettings,
    records: list[dict[str, Any]],
    result: Result,
    whole: WholeProgress,
    started: float,
    referred: Referred | None = None,
) -> Result:
    """The result of a fuse that is on disk, with its behaviour, written again."""
    target = Path(str(result.directory))
    try:
        figures, notes = _judge(settings, target, records, result, whole, referred)
    except KeyboardInterrupt:
        again = command_line(
            "mlxstacks compare", settings.model, target, adapter_path=settings.adapter_path
        )
        raise KeyboardInterrupt(
            f"{target} is whole, but not judged: `{again}` does that; the same command with "
            "--force begins again"
        ) from None
    except (CheckpointError, InputError, NonFiniteModelError, MemoryError) as error:
        whole.part(1 - _FUSE_SHARE, "fuse, not judged")(1, 1)
        note = f"Not judged by its behaviour: {error}"
        update: dict[str, Any] = {"notes": (*result.notes, note)}
        if settings.fail_under_agreement is not None:
            update["failed_gate"] = f"agreement was not measured: {error}"
        judged = result.model_copy(update=update)
    else:
        result = result.model_copy(update={"notes": (*result.notes, *notes)})
        judged = _judged(result, figures, settings)
    judged = judged.model_copy(update={"environment": environment(time.monotonic() - started)})
    written = write_result(judged, target, target, sources=())
    return written.model_copy(update={"next_steps": result.next_steps})


def _to_target(
    settings: FuseSettings, records: list[dict[str, Any]], progress: Progress | None, dry_run: bool
) -> Result:
    """Choose bits by `allocate`, then fuse and judge as with these bits."""
    assert settings.target_kl is not None
    calibration = _CALIBRATION_SHARE if settings.requant == "gptq" else 0.0
    whole, started = WholeProgress(progress, 2.0 + calibration), time.monotonic()
    base = resolve_model(str(settings.model))
    _check_memory(base, _ALLOCATION_MEMORY_FACTOR)
    check_target(user_path(str(settings.save_path)), force=settings.force)
    model, tokenizer, _ = load(base, settings.adapter_path, **_matching(settings))
    loaded = model, tokenizer
    referred = _refer(settings, settings.adapter_path, records, whole, 0.05, loaded)
    moments, notes = None, list[str]()
    if settings.requant == "gptq":
        advance = whole.part(calibration, "calibration")
        moments, notes = calibrate(settings, model, tokenizer, advance)
    allocation = allocate(
        model, referred[0], settings, moments, whole.part(0.8, "KL of each module")
    )
    del model, loaded
    chosen = settings.model_copy(update={"bits": allocation.bits()})
    result = run_command(chosen, moments, notes, dry_run=dry_run, progress=whole.part(0.2, "fuse"))
    missed = note(allocation, settings.target_kl)
    result = result.model_copy(
        update={
            "settings": {**result.settings, "bits": []},
            "notes": (*result.notes, *([missed] if missed else [])),
            "blocks": (*blocks(allocation, settings.target_kl), *result.blocks),
            "data": {**result.data, "target_kl": allocation.as_json()},
        }
    )
    if dry_run:
        return result
    known = None if settings.zero_delta else referred  # a fuse of zeros is compared with the base
    return _with_judgement(settings, records, result, whole, started, known)


def _refer(
    settings: FuseSettings,
    adapters: Sequence[str],
    records: list[dict[str, Any]],
    whole: WholeProgress,
    size: float,
    loaded: tuple[nn.Module, Any] | None = None,
) -> Referred:
    """What the base with adapters answers and says. size: a pass's share of the whole. loaded:
    this model and its tokenizer; else they are loaded, if no earlier fuse asked the same.
    """
    base = resolve_model(str(settings.model))
    asked = [records, ANSWER_TOKENS, MOST_TOKENS, settings.peft_layout]
    key = partial(reference_key, base, adapters, asked)
    answered = whole.part(3 * size, "answers of the reference")
    read = whole.part(size, "reference")

    def make() -> Referred:
        model, tokenizer = loaded or load(base, adapters, **_matching(settings))[:2]
        notes = list[str]()
        passages = read_passages(
            records, model, tokenizer, answer_tokens=ANSWER_TOKENS, most_tokens=MOST_TOKENS,
            advance=answered, notes=notes, command="mlxstacks compare ",
        )  # fmt: skip
        return refer(model, passages, read), notes

    referred = once(key, make)
    read(1, 1)
    return referred


def _matching(settings: FuseSettings) -> dict[str, Any]:
    """How adapters are read, as `load` takes it."""
    return {"allow_base": settings.allow_base, "peft_layout": settings.peft_layout}


def _judge(
    settings: FuseSettings,
    target: Path,
    records: list[dict[str, Any]],
    fused: Result,
    whole: WholeProgress,
    referred: Referred | None,
) -> tuple[dict[str, dict[str, Figures]], list[str]]:
    """Figures by model and by kind of passages, and notes on the rows. referred: where that is
    known already.

    Raises: InputError: no memory for the base.
    """
    base = resolve_model(str(settings.model))
    _check_memory(base)
    adapters = () if settings.zero_delta else settings.adapter_path
    by_itself = not settings.zero_delta and bool((fused.data["total"] or {}).get("artifact"))
    passes = 1 + bool(adapters) + 2 * by_itself + 4 * (referred is None)
    size = (1 - _FUSE_SHARE) / passes
    if referred is None:
        referred = _refer(settings, adapters, records, whole, size)
    reference, notes = referred
    fuse = agree(load(target)[0], reference, whole.part(size, FUSED))
    figures = {FUSED: figures_of(fuse)}
    if adapters:
        model = load(base)[0]
        without = agree(model, reference, whole.part(size, BASE))
        figures[BASE] = figures_of(without)
        if by_itself:
            advance = whole.part(size, "base")
            key = partial(reference_key, base, (), [*map(asdict, reference.passages)])
            plain, _ = once(key, lambda: (refer(model, reference.passages, advance), []))
            fuse_in_memory(model, settings.model_copy(update={"zero_delta": True}))
            zero = agree(model, plain, whole.part(size, ZERO))
            figures[ZERO] = figures_of(zero)
    return figures, notes


def _check_memory(base: Path, factor: float = _MEMORY_FACTOR) -> None:
    available = memory.device().memory_bytes
    needed = int(factor * sum(h.file_bytes for h in open_checkpoint(base).headers))
    if available is not None and needed > available:
        raise InputError(
            f"that takes about {memory.bytes_in_words(needed)} of memory, and there are "
            f"{memory.bytes_in_words(available)}"
        )


def adapters_kept(result: Result, settings: FuseSettings) -> bool:
    """Whether the figures of weights say that the trained adapter is in the result."""
    correlation = (result.data["total"] or {}).get("correlation")
    return not settings.zero_delta and (correlation or 0) >= settings.target_correlation


def _judged(
    result: Result, figures: dict[str, dict[str, Figures]], settings: FuseSettings
) -> Result:
    """The fuse's result with the behaviour in front."""
    parts = figures[FUSED]["all"]
    than = "the base" if settings.zero_delta else "the unfused adapter"
    words = f"Compared with {than}: {in_words(parts)}"
    sizes = {BASE: "{} without the adapter", ZERO: "{} by a fuse of zeros, from the base"}
    others = [
        what.format(f"{figures[name]['all']['kl_nats']:.3g}")
        for name, what in sizes.items()
        if name in figures
    ]
    words += f" ({', '.join(others)})" if others else ""
    table = agreement_table(
        "behaviour", f"Next tokens, compared with {than}",
        {name: kinds["all"] for name, kinds in figures.items()},
    )  # fmt: skip
    by_kind = [
        agreement_table(
            f"behaviour-{kind}", f"The same, {'answers' if kind == 'answer' else 'texts'} alone",
            {name: kinds[kind] for name, kinds in figures.items()}, folded=True,
        )
        for kind in KINDS
        if kind in figures[FUSED]
    ]  # fmt: skip
    notes = result.notes
    if parts["agreement"] < _LOW_AGREEMENT and adapters_kept(result, settings):
        notes = (*notes, _LOW_NOTE.format("" if settings.target_kl else _BY_KL))
        words += ". It answers otherwise than the adapter does (see the notes)"
    failed, least = result.failed_gate, settings.fail_under_agreement
    if least is not None and parts["agreement"] < least:
        low = f"agreement {parts['agreement']:.4f} is below --fail-under-agreement {least}"
        failed = f"{failed}; {low}" if failed else low
    return result.model_copy(
        update={
            "verdict": f"{words}. {result.verdict[:1].upper()}{result.verdict[1:]}",
            "outcome": f"{100 * parts['agreement']:.1f}% of next tokens agree; {result.outcome}",
            "data": {**result.data, "behaviour": figures}, "notes": notes,
            "blocks": (table, *result.blocks, *by_kind), "failed_gate": failed,
        }
    )  # fmt: skip
