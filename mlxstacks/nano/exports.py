"""The shipped model as checkpoints: exports at any width, and a cache of them for bare commands."""

import gzip
import hashlib
import json
import shlex
import shutil
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from mlxstacks.command_line import command_line
from mlxstacks.errors import InputError
from mlxstacks.files.disk import cache_directory
from mlxstacks.memory import bytes_in_words
from mlxstacks.nano.settings import (
    ADAPTER_BITS,
    EXPORT_BITS,
    GROUP_SIZE,
    ExportSettings,
    ShowSettings,
)
from mlxstacks.study.document import Columns, Kind, Table
from mlxstacks.study.result import Result
from mlxstacks.training.tokenizer import TOKENIZER_FILES

if TYPE_CHECKING:
    from mlxstacks.routing.settings import BaseSettings

Answering = TypeVar("Answering", bound="BaseSettings")
ASSETS = Path(__file__).resolve().parent.parent / "assets" / "nano"
# By group and path; tools/nano/samples.py makes them. And a file of each group.
SAMPLES_FILE = ASSETS.parent / "nano-samples.json.gz"
SAMPLES = {
    "data": "train.jsonl", "preferences": "train.jsonl", "domains": "chat.jsonl",
    "curriculum": "letters.jsonl", "routing": "letters.jsonl", "items": "items.jsonl",
    "suite": "suite.json",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class NanoPaths:
    """Where the built-in model, its sample adapter and its sample store are."""

    model_path: Path
    adapter_path: Path
    store_path: Path

    @property
    def float_model_path(self) -> Path:
        """The model in float32, for what begins with unquantized weights; made as data_path is."""
        return nano_paths(None).model_path

    @property
    def data_path(self) -> Path:
        """train.jsonl and valid.jsonl, made in the cache when they are first asked for."""
        return nano_samples("data")

    @property
    def preferences_path(self) -> Path:
        """train.jsonl and valid.jsonl of preferred and rejected answers, made as data_path is."""
        return nano_samples("preferences")

    @property
    def curriculum_path(self) -> Path:
        """<domain>.jsonl of the domains that sample stacks learn, made as data_path is."""
        return nano_samples("curriculum")

    @property
    def routing_path(self) -> Path:
        """<domain>.jsonl, <domain>+<domain>.jsonl and others.jsonl: what a router learns from."""
        return nano_samples("routing")

    @property
    def items_path(self) -> Path:
        """Multiple-choice items of `mlxstacks confound`, made as data_path is."""
        return nano_samples("items") / SAMPLES["items"]

    @property
    def suite_path(self) -> Path:
        """Prompts of `mlxstacks identity` with their rules, made as data_path is."""
        return nano_samples("suite") / SAMPLES["suite"]

    @property
    def domains_path(self) -> Path:
        """<domain>.jsonl of nano's own domains, not trained on, made as data_path is."""
        return nano_samples("domains")

    def as_json(self) -> dict[str, str]:
        return {name: str(path) for name, path in asdict(self).items()}


def asset_hash() -> str:
    """SHA-256 over names and contents of the shipped files, shortened: the key of the cache."""
    digest = hashlib.sha256()
    files = [SAMPLES_FILE, *(path for path in ASSETS.rglob("*") if path.is_file())]
    for path in sorted(files):
        digest.update(path.relative_to(ASSETS.parent).as_posix().encode() + b"\0")
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def write_export(
    source: Path, directory: Path, bits: int | None, group_size: int = GROUP_SIZE
) -> None:
    """Write the model of `source` into `directory` at `bits`, quantized as `mlx_lm.convert` does.

    `bits` of None writes float32 (experts in bfloat16 do not run on a CPU). Every export starts
    from the stored values of `source`, dequantized to bfloat16; the width of `source` itself is a
    copy of its files. Router gates stay at 8 bits.

    Raises: InputError: no such width.
    """
    import mlx.core as mx

    from mlxstacks import base_model

    if bits is not None and bits not in EXPORT_BITS:
        allowed = ", ".join(map(str, EXPORT_BITS))
        raise InputError(f"got bits={bits}; allowed: {allowed}, or none for float32")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if config.get("quantization", {}).get("bits") == bits:
        directory.mkdir(parents=True, exist_ok=True)
        for file in source.iterdir():
            shutil.copyfile(file, directory / file.name)
        return
    model, _, config = base_model.load(source)
    base_model.dequantize(model)
    base_model.cast(model, mx.float32 if bits is None else mx.bfloat16)
    config = {k: v for k, v in config.items() if k not in ("quantization", "quantization_config")}
    if bits is not None:
        config = base_model.quantize(model, config, bits, group_size)
    base_model.save_model(directory, model, config)
    for name in TOKENIZER_FILES:
        shutil.copyfile(source / name, directory / name)


def export(settings: ExportSettings) -> Result:
    """`nano export`: the built-in model at `settings.bits`, alone or, at the bits of its adapter
    and its store, with its samples beside it; the target appears as a whole or not.

    Raises: TargetError: the target exists and `force` is off, or cannot be written.
    """
    from mlxstacks.files.disk import mlx_write_errors
    from mlxstacks.files.outputs import MARK, new_mark, staged_directory, write_json

    target = settings.save_path
    bits = ADAPTER_BITS if settings.samples else settings.bits
    with staged_directory(target, force=settings.force) as directory, mlx_write_errors(target):
        if settings.samples:
            for name, source in beside_each_other(nano_paths()).items():
                shutil.copytree(source, directory / name)
            write_json(directory / "adapters" / MARK, new_mark(built_in=True))
        else:
            write_export(ASSETS / "model", directory, bits)
    model = target / "model" if settings.samples else target
    written = (model / "model.safetensors").stat().st_size
    width = "float32" if bits is None else f"{bits} bits"
    command = command_line("mlx_lm.generate", model=model, prompt="Who are you?")
    facts = {"numbers": width, "weights": bytes_in_words(written)}
    note = f"Try it: {command}"
    if settings.samples:
        facts["directories"] = ", ".join(beside_each_other(nano_paths()))
        note = f"The how-to pages run as they stand after `cd {shlex.quote(str(target))}`."
    return Result(
        kind="nano export",
        title="The built-in model as a checkpoint",
        status="done",
        settings=settings.model_dump(mode="json"),
        data={"model_path": str(model), "bits": bits, "model_bytes": written},
        blocks=(Table.of_facts("model", "Model", facts),),
        notes=(note,),
        directory=str(target),
    )


def beside_each_other(paths: NanoPaths) -> dict[str, Path]:
    """Names that the how-to pages use -> directories of nano."""
    return {
        "model": paths.model_path, "adapters": paths.adapter_path, "store": paths.store_path,
        "data": paths.data_path, "preferences": paths.preferences_path,
        "domains": paths.curriculum_path,
    }  # fmt: skip


def read_manifest() -> dict[str, Any]:
    """The manifest that ships with the model."""
    manifest: dict[str, Any] = json.loads((ASSETS / "manifest.json").read_text(encoding="utf-8"))
    return manifest


def show(settings: ShowSettings | None = None) -> Result:
    """`nano`: where the built-in model is (the export is made in the cache when it is not there),
    and what it was measured to know.
    """
    settings = settings or ShowSettings()
    paths, manifest = nano_paths(settings.bits).as_json(), read_manifest()
    facts = {
        **paths,
        "parameters": f"{manifest['parameters']:,}",
        "shipped at": f"{manifest['stored_bits']} bits",
    }
    return Result(
        kind="nano",
        title="nano, the built-in model",
        status="done",
        settings=settings.model_dump(mode="json"),
        data={**paths, "manifest": manifest},
        blocks=(Table.of_facts("model", "Model", facts), measured_table(manifest)),
    )


def measured_table(manifest: Mapping[str, Any]) -> Table:
    """Validation loss by domain and multiple-choice accuracy of each export."""
    models = manifest["measured"]["models"]
    first = next(iter(models.values()))
    domains = list(first["validation_loss"])
    rows = []
    for name, figures in models.items():
        choice = figures["multiple_choice"]
        accuracy = (choice["accuracy"], choice["interval"]["low"], choice["interval"]["high"])
        losses = (figures["validation_loss"][domain] for domain in domains)
        rows.append((name.replace("_", " "), *losses, accuracy))
    choices = first["multiple_choice"]["n"]
    loss: tuple[Kind, int] = ("number", 3)
    columns: Columns = {"model": "text", **dict.fromkeys(domains, loss), "accuracy": "share"}
    return Table.of(
        "measured",
        f"Loss in nats per token, and accuracy on {choices} choices (95% interval)",
        columns,
        rows,
    )


def nano_paths(bits: int | None = ADAPTER_BITS) -> NanoPaths:
    """Paths of the built-in model at `bits`, made in the cache at the first call.

    Law: two calls, also at once from two processes, give the same bytes and leave no half-written
    directory.
    """
    name = "model-float32" if bits is None else f"model-{bits}bit"
    target = cache_directory() / f"nano-{asset_hash()}" / name
    _fill(target, "config.json", lambda place: write_export(ASSETS / "model", place, bits))
    return NanoPaths(target, ASSETS / "adapter", ASSETS / "store")


def nano_model(store_path: str | None) -> Path | None:
    """nano's model, for a store whose base it is."""
    from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
    from mlxstacks.files.store import Store

    if store_path is None:
        return None
    wanted = Store.open(store_path, blocks=True).manifest.base_fingerprint
    path = nano_paths().model_path
    return path if fingerprint(open_checkpoint(path), wanted) == wanted else None


def with_nano(settings: "Answering") -> "Answering":
    """With nano for a model, where none was named: for a store whose base it is, for adapters, or
    with its sample store.
    """
    if settings.model is not None:
        return settings
    if settings.store_path is not None:
        model = nano_model(settings.store_path)
        return settings if model is None else settings.model_copy(update={"model": str(model)})
    nano = nano_paths()
    update = {"model": str(nano.model_path)}
    if not settings.adapter_path and nano.store_path.is_dir():
        update["store_path"] = str(nano.store_path)
    return settings.model_copy(update=update)


def nano_samples(name: str) -> Path:
    """The directory of a group of `SAMPLES`, made in the cache at the first call. Law: as
    `nano_paths`.
    """
    target = cache_directory() / f"nano-{asset_hash()}" / name

    def write(directory: Path) -> None:
        samples = json.loads(gzip.decompress(SAMPLES_FILE.read_bytes()))
        write_files(directory, samples[name])

    _fill(target, SAMPLES[name], write)
    return target


def _fill(target: Path, part: str, write: Callable[[Path], None]) -> None:
    """Make a directory of the cache where `part` of it is not there."""
    from mlxstacks.files.outputs import fill_cache

    fill_cache(target, (target / part).is_file, write)


def write_files(directory: Path, files: dict[str, str]) -> None:
    """Write texts under their relative paths."""
    for path, text in files.items():
        (directory / path).parent.mkdir(parents=True, exist_ok=True)
        (directory / path).write_text(text, encoding="utf-8")
