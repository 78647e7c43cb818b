"""`mlxstacks convert`: tells the formats apart, plans, writes the directory as a whole or not."""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

from mlxstacks.command_line import command_line
from mlxstacks.convert.conversion import (
    Conversion,
    ProgressCallback,
    shards_of,
    stored_conversion,
    upcycled,
    write,
)
from mlxstacks.convert.settings import ConvertSettings
from mlxstacks.errors import InputError
from mlxstacks.files.disk import user_path
from mlxstacks.files.hub import resolve_model
from mlxstacks.files.outputs import check_target, staged_directory
from mlxstacks.memory import bytes_in_words
from mlxstacks.study.document import Columns, Table, Text
from mlxstacks.study.result import Result
from mlxstacks.study.write import environment, write_result


def convert(
    settings: ConvertSettings,
    *,
    dry_run: bool = False,
    progress: ProgressCallback | None = None,
) -> Result:
    """Write `settings.model` as a directory that mlx-lm loads; a dry run plans and writes nothing.

    Raises: InputError: the model, an option or the target cannot be used; nothing is left behind.
    """
    started = time.monotonic()
    if settings.model is None or settings.save_path is None:
        raise InputError("convert needs model and save_path")
    target = user_path(settings.save_path)
    conversion = _plan(settings.model, settings)
    check_target(target, force=settings.force, inputs=conversion.inputs)
    if dry_run:
        return _result(conversion, settings, target, "planned", started)
    with staged_directory(
        target, force=settings.force, needed_bytes=conversion.nbytes, inputs=conversion.inputs
    ) as directory:
        write(conversion, directory, progress)
        result = _result(conversion, settings, target, "converted", started)
        small = [directory / name for name in ("config.json", "model.safetensors.index.json")]
        return write_result(result, directory, target, sources=small)


def _result(
    conversion: Conversion, settings: ConvertSettings, target: Path, status: str, started: float
) -> Result:
    """status: "converted", or "planned" for a dry run."""
    is_planned, model_type = status == "planned", str(conversion.config["model_type"])
    tensors = Counter[tuple[str, str]]()
    nbytes = Counter[tuple[str, str]]()
    for part in conversion.parts:
        tensors[part.kind, part.stored] += 1
        nbytes[part.kind, part.stored] += part.nbytes
    rows = tuple((*key, count, nbytes[key]) for key, count in tensors.items())
    columns: Columns = {
        "in the source": "text", "written as": "text", "tensors": "count", "bytes": "bytes"
    }  # fmt: skip
    size = bytes_in_words(conversion.nbytes)
    return Result(
        kind="convert",
        title="Conversion",
        question="What becomes of each tensor of the source?",
        status="planned" if is_planned else "done",
        outcome=f"{model_type}, {size}",
        verdict="" if is_planned else f"A model of type {model_type}, {size}, was written.",
        settings=settings.model_dump(mode="json"),
        environment=environment(time.monotonic() - started),
        data={
            "status": status,
            "model": settings.model,
            "save_path": str(target),
            "model_type": model_type,
            "tensors": [
                dict(zip(("kind", "stored", "tensors", "bytes"), row, strict=True)) for row in rows
            ],
            "files": [
                {"file": file, "bytes": sum(part.nbytes for part in parts)}
                for file, parts in shards_of(conversion).items()
            ],
            "written_bytes": conversion.nbytes,
        },
        blocks=(
            Table.of("tensors", "Tensors by kind", columns, rows),
            Text(title="Model", paragraphs=(f"{model_type}, {size} of tensors.",)),
        ),
        notes=conversion.notes,
        directory=str(target),
        next_steps={} if is_planned else {"Try it": command_line("mlxstacks chat", model=target)},
    )


def _plan(model: str, settings: ConvertSettings) -> Conversion:
    path = user_path(model)
    if path.is_file() or (path.suffix == ".gguf" and os.path.lexists(path) and not path.is_dir()):
        from mlxstacks.convert.gguf_model import gguf_conversion

        conversion = gguf_conversion(path, settings)
    else:
        source = resolve_model(model, sidecars=True)
        files = sorted(source.glob("*.gguf"))
        if files and not any(source.glob("*.safetensors")):
            raise InputError(f"{source}: no model*.safetensors; give a file: {files[0]}")
        if settings.bits is None and not settings.module_bits and settings.upcycle is None:
            raise InputError(
                f"{source}: nothing to do; give --bits N to quantize, or --upcycle N for experts "
                "(mlx_lm.convert casts with --dtype alone)"
            )
        if settings.bits is None and not settings.module_bits:
            conversion = stored_conversion(source)
        else:
            from mlxstacks.convert.quantize import checkpoint_conversion

            conversion = checkpoint_conversion(
                source, settings.bits, settings.group_size, settings.overrides(), settings.dtype
            )
    if settings.upcycle is None:
        return conversion
    return upcycled(conversion, settings.upcycle, settings.top_k, settings.seed)
