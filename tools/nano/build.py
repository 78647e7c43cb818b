"""The rebuild: tokenizer, base, checkpoint, samples, manifest, all from settings.

Order: tokenizer -> base in float32, in `processes` processes -> 8-bit checkpoint -> exports ->
adapter, then stacks and router, on one of them -> measurements -> manifest. An interrupted run goes
on from the base's last saved state, and from the stacks that are done.
"""

import os
import platform
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxstacks.errors import InputError
from mlxstacks.nano.exports import TOKENIZER_FILES, write_export
from mlxstacks.nano.settings import GROUP_SIZE
from tools.nano.settings import SHIPPED_BITS, RebuildSettings

MANIFEST_FILE = "manifest.json"
MEASURED_BITS = (SHIPPED_BITS, 4, 3)
REFIT_BITS = (4, 3)


@dataclass(frozen=True)
class RebuildResult:
    """Where the model is, and its manifest."""

    save_path: Path
    manifest: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {"save_path": str(self.save_path), "manifest": self.manifest}


def rebuild(settings: RebuildSettings) -> RebuildResult:
    """Train and measure all that the package ships as nano; write it to `save_path`.

    Law: the same settings give the same files on the same machine and libraries, interrupted or
    not.

    Raises:
        TargetError: the target exists and `force` is off.
        InputError: an interrupted rebuild of other settings lies in the way.
    """
    from mlxstacks.files.outputs import (
        MARK,
        check_claimable,
        check_target,
        new_mark,
        remove_marked,
        staged_directory,
        write_json,
    )

    check_target(settings.save_path, force=settings.force)
    _warn_without_openblas()
    work = settings.save_path.parent / f".{settings.save_path.name}.work"
    check_claimable(work)
    if not settings.resume:
        remove_marked(work)
    _check_saved_state(settings, work)
    work.mkdir(parents=True, exist_ok=True)
    write_json(work / MARK, new_mark())
    seconds: dict[str, float] = {}
    history = _train_base(settings, work)
    # Over the logged steps, so that it also holds for a run in several parts.
    mean_step = sum(record["seconds"] for record in history) / len(history)
    seconds["base"] = mean_step * settings.optimizer.steps
    start = time.perf_counter()
    with staged_directory(settings.save_path, force=settings.force) as target:
        manifest = _finish(settings, work, target, seconds)
        # Adapter and stacks are trained beside each other: the parts are more than the whole.
        manifest["total_seconds"] = round(seconds["base"] + time.perf_counter() - start, 1)
        manifest["base_training"]["history"] = history
        _write_manifest(target, manifest)
    remove_marked(work)
    return RebuildResult(settings.save_path, manifest)


def _check_saved_state(settings: RebuildSettings, work: Path) -> None:
    """Refuse a state of other settings here: a training process could only die of it."""
    import mlx.core as mx

    from tools.nano.base_training import STATE_FILE, run_id

    path = work / STATE_FILE
    if not path.exists():
        return
    _, metadata = mx.load(str(path), return_metadata=True)
    if metadata.get("run_id") != run_id(settings):
        raise InputError(
            f"{work}: holds an interrupted rebuild of other settings; give those settings to go on "
            "with it, or --no-resume to start anew"
        )


def _train_base(settings: RebuildSettings, work: Path) -> list[dict[str, float]]:
    """Train in `processes` processes; tokenizer and float32 weights are left in `work`."""
    import json

    import mlx.core as mx

    from tools.nano import base_training
    from tools.nano.workers import run_in_processes

    base_training.make_tokenizer(settings, work / "tokenizer")
    arguments = [settings.model_dump_json(), str(work)]
    run_in_processes("tools.nano.base_training", arguments, settings.processes)
    _, metadata = mx.load(str(work / base_training.STATE_FILE), return_metadata=True)
    keep = ("step", "loss", "grad_norm", "seconds")
    return [
        {key: round(record[key], 4) for key in keep} for record in json.loads(metadata["history"])
    ]


def _finish(
    settings: RebuildSettings, work: Path, target: Path, seconds: dict[str, float]
) -> dict[str, Any]:
    """Checkpoint, adapter, store and figures, once the base is trained."""
    from tools.nano.sample_store import train_sample_store

    _write_shipped_model(settings, work, target / "model")
    with tempfile.TemporaryDirectory() as directory:
        exports = {
            bits: Path(directory) / f"nano-{bits}bit"
            for bits in (*MEASURED_BITS, settings.adapter.bits)
        }
        for bits, path in exports.items():
            write_export(target / "model", path, bits)
        export = exports[settings.adapter.bits]
        # Beside each other: one process alone would leave a core idle for most of the time.
        with ThreadPoolExecutor(1) as pool:
            adapter = pool.submit(_train_adapter, settings, export, target / "adapter")
            seconds |= train_sample_store(settings, export, work, target / "store")
            seconds["adapter"] = adapter.result()
        start = time.perf_counter()
        measured = measure_all(settings, work, target, exports)
        seconds["measurement"] = time.perf_counter() - start
    return _manifest(settings, target, measured, seconds)


def _train_adapter(settings: RebuildSettings, export: Path, directory: Path) -> float:
    """In a process of its own, on one BLAS thread: the same bytes each time. Returns seconds."""
    from tools.nano.workers import run_in_processes

    start = time.perf_counter()
    arguments = [settings.model_dump_json(), str(export), str(directory)]
    run_in_processes("tools.nano.adapter_training", arguments, 1)
    return time.perf_counter() - start


def _write_shipped_model(settings: RebuildSettings, work: Path, directory: Path) -> None:
    import mlx.core as mx

    from mlxstacks import base_model
    from tools.nano.base_training import load_trained

    model = load_trained(settings, work)
    base_model.cast(model, mx.bfloat16)
    config = base_model.quantize(model, settings.shape.config(), SHIPPED_BITS, GROUP_SIZE)
    base_model.save_model(directory, model, config)
    # One file of weights needs no index.
    (directory / "model.safetensors.index.json").unlink()
    for name in TOKENIZER_FILES:
        shutil.copyfile(work / "tokenizer" / name, directory / name)


def measure_all(
    settings: RebuildSettings, work: Path, target: Path, exports: dict[int, Path]
) -> dict[str, Any]:
    """Every figure of the manifest."""
    from mlxstacks import base_model
    from tools.nano import measure
    from tools.nano.base_training import load_trained
    from tools.nano.measure_store import measure_store
    from tools.nano.tokenizer import load_tokenizer

    benchmark = measure.make_benchmark(
        load_tokenizer(target / "model"),
        settings.validation_per_domain,
        settings.items_per_domain,
        settings.seed,
    )
    models: dict[str, Any] = {}
    trained, _ = measure.measure_model(load_trained(settings, work), benchmark)
    models["as_trained_float32"] = trained
    refits: dict[str, Any] = {}
    for bits in MEASURED_BITS:
        model, _, _ = base_model.load(exports[bits])
        models[f"{bits}_bit"], picks = measure.measure_model(measure.float_values(model), benchmark)
        if bits in REFIT_BITS:
            refits[f"{bits}_bit"] = [
                measure.measure_refit(exports[bits], benchmark, layers, picks)
                for layers in (None, refit_layers(settings.shape.num_hidden_layers))
            ]
    export = exports[settings.adapter.bits]
    return {
        "models": models,
        "zero_delta_refit_of_down_proj": refits,
        "adapter": _measure_adapter(settings, target, export),
        "store": measure_store(target / "store", export, settings),
    }


def _measure_adapter(settings: RebuildSettings, target: Path, export: Path) -> dict[str, Any]:
    from mlxstacks import base_model
    from tools.nano import measure

    adapter = target / "adapter"
    figures = {"bits": settings.adapter.bits, **measure.measure_adapter(export, adapter)}
    for name in ("identity_without", "identity_with", "identity_after_mlx_lm_fuse"):
        wanted = None if name == "identity_without" else adapter
        model, tokenizer, _ = base_model.load(export, wanted)
        if name == "identity_after_mlx_lm_fuse":
            base_model.fuse_lora(model)
        reply = measure.greedy_reply(model, tokenizer)
        figures[name] = measure.measure_identity(reply, settings.persona)
    return figures


def refit_layers(count: int) -> tuple[int, ...]:
    """Three layers spread over the depth, as in the published study (8, 14 and 20 of 40)."""
    return tuple(sorted({count // 5, 7 * count // 20, count // 2}))[:3]


def _manifest(
    settings: RebuildSettings, target: Path, measured: dict[str, Any], seconds: dict[str, float]
) -> dict[str, Any]:
    from importlib.metadata import version

    import numpy as np
    from mlx.utils import tree_flatten

    from mlxstacks import base_model

    model = base_model.build_model(settings.shape.config())
    parameters = sum(int(np.prod(value.shape)) for _, value in tree_flatten(model.parameters()))
    files = sorted(path for path in target.rglob("*") if path.is_file())
    return {
        "format": 1,
        "name": "nano",
        "parameters": parameters,
        "stored_bits": SHIPPED_BITS,
        "group_size": GROUP_SIZE,
        "command": "python -m tools.nano rebuild",
        "settings": settings.model_dump(mode="json", exclude={"save_path", "force", "resume"}),
        "versions": {name: version(name) for name in ("mlx", "mlx-lm", "tokenizers", "numpy")},
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "file_bytes": {path.relative_to(target).as_posix(): path.stat().st_size for path in files},
        "base_training": {
            "tokens": settings.optimizer.steps * settings.batch_size * settings.row_length
        },
        "measured": _rounded(measured),
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list) else value


def _write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    from mlxstacks.files.outputs import write_json

    write_json(directory / MANIFEST_FILE, manifest)


def _warn_without_openblas() -> None:
    if platform.system() == "Linux" and "blas" not in os.environ.get("LD_PRELOAD", ""):
        sys.stderr.write(
            "warning: OpenBLAS is not preloaded; training will take hours instead of minutes.\n"
            "Install libopenblas0-pthread and set LD_PRELOAD to its libblas.so.3 (make does so).\n"
        )
