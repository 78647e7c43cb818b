"""`mlxstacks convert`: tells the formats apart, plans, writes the directory as a whole or not."""

from __future__ import annotations

import os
import time
from pathlib import Path

from mlxstacks.convert.conversion import Conversion, ProgressCallback, shards_of, write
from mlxstacks.convert.report import ConvertReport, tensor_groups
from mlxstacks.convert.settings import ConvertSettings
from mlxstacks.errors import InputError
from mlxstacks.files.checkpoint import resolve_model
from mlxstacks.files.disk import user_path
from mlxstacks.files.outputs import check_target, staged_directory, write_json

REPORT_NAME = "convert_report.json"


def convert(
    settings: ConvertSettings,
    *,
    dry_run: bool = False,
    progress: ProgressCallback | None = None,
) -> ConvertReport:
    """Write `settings.model` as a directory that mlx-lm loads; a dry run plans and writes nothing.

    Raises:
        InputError: the model, an option or the target cannot be used; nothing is left behind.
    """
    started = time.monotonic()
    if settings.model is None or settings.save_path is None:
        raise InputError("convert needs model and save_path")
    target = user_path(settings.save_path)
    model = settings.model
    conversion = _plan(model, settings)
    check_target(target, force=settings.force, inputs=conversion.inputs)

    def report(status: str) -> ConvertReport:
        return ConvertReport(
            status=status,
            model=model,
            save_path=str(target),
            model_type=str(conversion.config["model_type"]),
            settings=settings.model_dump(mode="json"),
            groups=tensor_groups(conversion),
            files=[
                {"file": file, "bytes": sum(part.nbytes for part in parts)}
                for file, parts in shards_of(conversion).items()
            ],
            written_bytes=conversion.nbytes,
            seconds=time.monotonic() - started,
            notes=list(conversion.notes),
        )

    if dry_run:
        return report("planned")
    with staged_directory(
        target, force=settings.force, needed_bytes=conversion.nbytes, inputs=conversion.inputs
    ) as directory:
        write(conversion, directory, progress)
        done = report("converted")
        write_json(directory / REPORT_NAME, done.as_json())
    return done


def _plan(model: str, settings: ConvertSettings) -> Conversion:
    path = user_path(model)
    if path.is_file() or (path.suffix == ".gguf" and os.path.lexists(path) and not path.is_dir()):
        from mlxstacks.convert.gguf_model import gguf_conversion

        conversion = gguf_conversion(path, settings)
    else:
        conversion = _plan_directory(resolve_model(model, sidecars=True), settings)
    if settings.upcycle is None:
        return conversion
    from mlxstacks.convert.upcycle import upcycled

    return upcycled(conversion, settings.upcycle, settings.top_k, settings.seed)


def _plan_directory(source: Path, settings: ConvertSettings) -> Conversion:
    files = sorted(source.glob("*.gguf"))
    if files and not any(source.glob("*.safetensors")):
        raise InputError(f"{source}: no model*.safetensors; give a file: {files[0]}")
    if settings.bits is None and not settings.module_bits:
        from mlxstacks.convert.upcycle import stored_conversion

        if settings.upcycle is None:
            raise InputError(
                f"{source}: nothing to do; give --bits N to quantize, or --upcycle N for experts"
            )
        return stored_conversion(source)
    from mlxstacks.convert.quantize import checkpoint_conversion

    return checkpoint_conversion(
        source, settings.bits, settings.group_size, settings.overrides(), settings.dtype
    )
