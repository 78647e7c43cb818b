"""The model card of what is shared: the hub's YAML head, and a page made from `Result`s.

Of a result only verdict and tables of measurements are taken, by their ids: other parts may hold
prompts or paths. Where the files are no longer those that it was made from, the card says so and
shows no number.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData, metadata_load

from mlxstacks.command_line import command_line
from mlxstacks.errors import InputError
from mlxstacks.files.adapters import WEIGHTS
from mlxstacks.files.disk import user_path
from mlxstacks.files.hub import may_be_hub_id
from mlxstacks.files.lora_modules import CONFIG, read_config
from mlxstacks.files.manifest import Manifest
from mlxstacks.files.settings import StacksListSettings
from mlxstacks.files.store import base_name
from mlxstacks.share.settings import PushSettings
from mlxstacks.share.things import CARD, Kind, without_paths
from mlxstacks.studies.stack.store_commands import list_store
from mlxstacks.study.document import RESULT, Cell, Table
from mlxstacks.study.render.markdown import to_markdown
from mlxstacks.study.result import Result

# Tables of measurements, in results of train, align, distill, fuse and compare, and of a store.
_MEASURED = re.compile(
    r"validation|training|domains|losses-[\w-]+|behaviour(-answer|-text)?|together"
)
_WHAT = {"adapter": "LoRA adapter", "store": "Store of stacks", "model": "MLX model"}


def write_card(
    kind: Kind, source: Path, staged: Path, manifest: Manifest | None, settings: PushSettings
) -> bool:
    """Write README.md to `staged`, which holds the thing's files already, from what lies in
    `source`. manifest: a store's, as it is uploaded. Returns whether the base's hub id is on it.

    Raises: InputError: a config that cannot be read, a base that is no hub id.
    """
    measured = list_store(StacksListSettings(store_path=str(staged))) if manifest else None
    notes: tuple[str, ...] = ()
    if manifest is None and (source / RESULT).exists():
        measured, notes = _result_of(source)
    config = read_config(source / CONFIG) if kind == "adapter" else {}
    recorded = _base_of(config, manifest, measured)
    base: str = settings.base_model or (recorded and without_paths(base_name(recorded)))
    if settings.base_model and not may_be_hub_id(base):
        raise InputError(f"base_model: got {base[:200]!a}; give a hub id, as in owner/name")
    data = [domain.data for domain in manifest.domains] if manifest else []
    if measured is not None:
        data += [measured.data.get("data") or {}, measured.settings.get("data") or {}]
    name = (settings.repo_id or "").rpartition("/")[2]
    tables: list[Table] = [
        Table.of_facts("about", "What it is", _facts(kind, config, manifest, base)),
        *_data_table(data),
        *(
            block for block in (measured.blocks if measured else ())
            if isinstance(block, Table) and _MEASURED.fullmatch(block.id)
        ),
    ]  # fmt: skip
    verdict = "Not measured: no result lies next to its files."
    page = Result(
        kind="push", title=name, status="done", blocks=tuple(tables), notes=notes,
        verdict=measured.verdict if measured else verdict,
    )  # fmt: skip
    if measured is not None:
        page = page.model_copy(
            update={"settings": measured.settings, "environment": measured.environment}
        )
    text = to_markdown(Result.from_json(without_paths(page.as_json(), within=True)))
    on_hub = "/" in base and may_be_hub_id(base)
    commands = "\n".join(_commands(kind, staged, manifest, base if on_hub else "BASE", settings))
    text += f"\n## How to run it\n\n```bash\n{commands}\n```\n"
    licensed = settings.license or _license([source, *([user_path(recorded)] if recorded else [])])
    head = _head(kind, base if on_hub else None, {*_datasets(data)}, licensed)
    (staged / CARD).write_text(f"---\n{head}\n---\n\n{text}", encoding="utf-8")
    return on_hub


def _result_of(source: Path) -> tuple[Result, tuple[str, ...]]:
    """The result of a command, without its numbers where it is not of these files."""
    stored = Result.read(source / RESULT)
    checked = stored.checked(source.absolute())
    other = [why for why in checked.standing.reasons if why not in stored.standing.reasons]
    notes = tuple(f"EXPLORATORY: {reason}" for reason in stored.standing.reasons)
    if other:
        verdict = "Not shown: the files are not those that were measured."
        checked = checked.model_copy(update={"verdict": verdict, "blocks": ()})
        notes = tuple(other)
    return checked, notes


def _base_of(config: Mapping[str, Any], manifest: Manifest | None, measured: Result | None) -> str:
    """The base as it was given, which may be a path; "" where nothing names one."""
    if manifest is not None:
        return manifest.base_model
    of_run = measured.settings.get("model") if measured else None
    named = [config.get("base_model_name_or_path"), config.get("model"), of_run]
    return next((name for name in named if isinstance(name, str)), "")


def _facts(
    kind: Kind, config: Mapping[str, Any], manifest: Manifest | None, base: str
) -> dict[str, Cell]:
    facts: dict[str, Cell] = {"kind": _WHAT[kind], "base": base or "not named"}
    if manifest is not None:
        if manifest.holds_blocks:
            facts["kind"] = "Store of capability blocks"
        facts["fingerprint of the base"] = manifest.base_fingerprint
        facts["domains"] = ", ".join(domain.name for domain in manifest.domains)
        facts["router"] = "yes" if manifest.router else "no"
    elif kind == "adapter":
        lora = config.get("lora_parameters")
        lora = lora if isinstance(lora, Mapping) else {}
        facts["format"] = "PEFT" if "peft_type" in config else "mlx-lm"
        facts["rank"] = str(config.get("r", lora.get("rank", "not named")))
    return facts


def _data_table(data: Iterable[Any]) -> list[Table]:
    """Names and rows of the sources that reports on data list."""
    rows = [
        (str(without_paths(source["source"])), source.get("rows_kept"))
        for report in data if isinstance(report, Mapping)
        for source in report.get("sources") or ()
        if isinstance(source, Mapping) and isinstance(source.get("source"), str)
    ]  # fmt: skip
    columns = {"source": "text", "rows": "count"}
    return [Table.of("data", "Data", columns, rows)] if rows else []  # type: ignore[arg-type]


def _datasets(value: Any) -> Iterator[str]:
    """Hub ids of data sets that settings name, at any depth."""
    if isinstance(value, Mapping):
        named = value.get("dataset")
        if isinstance(named, str) and may_be_hub_id(named):
            yield named
        for inner in value.values():
            yield from _datasets(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _datasets(inner)


def _commands(
    kind: Kind, staged: Path, manifest: Manifest | None, base: str, settings: PushSettings
) -> Iterator[str]:
    repo, hello = settings.repo_id or "", {"prompt": "Hello"}
    name = repo.rpartition("/")[2]
    yield command_line("mlxstacks pull", repo, save_path=name, revision=settings.revision)
    if manifest is not None:
        how = {"routed": True} if manifest.router else {"ungated": True}
        yield command_line("mlxstacks chat", model=base, store_path=name, **how)
    elif kind == "model":
        yield command_line("mlxstacks chat", model=name)
        yield command_line("mlx_lm.generate", model=name, **hello)
    else:
        yield command_line("mlxstacks chat", model=base, adapter_path=name)
        if (staged / WEIGHTS).exists():
            yield command_line("mlx_lm.generate", model=base, adapter_path=name, **hello)


def _head(kind: Kind, base: str | None, datasets: set[str], license: str | None) -> str:
    tags = {"adapter": ["lora"], "store": ["lora", "moe-lora"], "model": []}[kind]
    head = ModelCardData(
        base_model=base, datasets=sorted(datasets) or None,
        library_name="mlx", pipeline_tag="text-generation", tags=["mlx", "mlxstacks", *tags],
        license=license,
    )  # fmt: skip
    return head.to_yaml()


def _license(places: Iterable[Path]) -> str | None:
    """What the head of a card says that lies with the files or with their base."""
    for place in places:
        try:
            named = (metadata_load(place / CARD) or {}).get("license")
        except (OSError, ValueError, AttributeError, yaml.YAMLError):
            continue
        if isinstance(named, str):
            return named
    return None
