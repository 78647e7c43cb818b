"""`mlxstacks stacks retrain`: one domain of a store trained again, in its place.

It is trained as it was, on the stacks before it, with the rows that its files have now. Then later
domains are served on top of it again, and their prefix losses before and after go into the manifest
(`prefix_changed`), in the same change as the new stacks. Stacks of other domains are not touched;
`stacks undo` takes the change back.
"""

from pathlib import Path

from mlxstacks.errors import InputError
from mlxstacks.files.disk import user_path
from mlxstacks.files.manifest import DomainRecord
from mlxstacks.files.settings import StacksRetrainSettings
from mlxstacks.files.store import Store, data_directories, find_base
from mlxstacks.files.store_commands import open_store
from mlxstacks.studies.stack.plan import data_settings_of, nowhere, run_settings_of
from mlxstacks.studies.stack.run import Progress
from mlxstacks.studies.stack.run import run as run_stack
from mlxstacks.study.result import Result
from mlxstacks.training.settings import DomainSettings, StackRunSettings


def run(
    settings: StacksRetrainSettings, *, dry_run: bool = False, progress: Progress | None = None
) -> Result:
    """Train `settings.domain` of the store again. A run that was stopped resumes.

    Raises: InputError: no such domain, one that was imported or is disabled, no data; training
        gained nothing. Else as `stack`.
    """
    store = open_store(settings.store_path, blocks=False)
    if settings.domain is None:
        known = ", ".join(domain.name for domain in store.manifest.domains) or "none"
        raise InputError(f"no domain given (there are: {known})")
    record = store.domain_named(settings.domain)
    if record.origin != "trained":
        raise InputError(
            f"{record.name} was imported, not trained here: remove it and import its new adapter"
        )
    if not record.enabled:
        raise InputError(f"{record.name} is disabled: `mlxstacks stacks enable` it first")
    return run_stack(
        stack_settings(store, record, settings), dry_run=dry_run, progress=progress,
        retrain=record.name, moved_above=settings.moved_above,
    )  # fmt: skip


def stack_settings(
    store: Store, record: DomainRecord, settings: StacksRetrainSettings
) -> StackRunSettings:
    """What the domain was trained with, but for what is given now."""
    of_run = {"rounds", "iters", "learning_rate"}
    known = run_settings_of(record) | settings.model_dump(include=of_run, exclude_none=True)
    rows = data_settings_of(record)
    files = [source.path for source in rows.sources if source.path is not None]
    roots = [user_path(settings.data)] if settings.data else [*data_directories(store), Path()]
    root = next((r for r in roots if all((r / file).exists() for file in files)), None)
    if root is None:
        raise InputError(f"{record.name}: {nowhere(files, roots)}")
    return StackRunSettings.model_validate({
        **known,
        "model": settings.model or str(find_base(store, None).directory),
        "data": str(root),
        "save_path": str(store.path),
        "domains": (DomainSettings(name=record.name, data=rows),),
        "guard": settings.guard,
        "resume": settings.resume,
    })  # fmt: skip
