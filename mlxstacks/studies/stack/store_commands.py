"""The `stacks` commands as results: what a store holds, whether it is whole, what was changed."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlxstacks.errors import StoreError
from mlxstacks.files import stack_adapters, store_commands, store_verify
from mlxstacks.files.manifest import binding_notes
from mlxstacks.files.router_file import RouterHeader
from mlxstacks.files.settings import (
    StacksDiffSettings,
    StacksExportSettings,
    StacksGcSettings,
    StacksImportSettings,
    StacksListSettings,
    StacksRemoveSettings,
    StacksSwitchSettings,
    StacksUndoSettings,
    StacksVerifySettings,
)
from mlxstacks.memory import bytes_in_words
from mlxstacks.studies.stack.report import (
    domain_table,
    matrix_blocks,
    ordered_matrix,
    outcome,
    stored_json,
    verdict,
)
from mlxstacks.study.document import Block, Cell, Columns, Table, counted
from mlxstacks.study.result import Result

_FORMATS = {"mlx": "mlx-lm", "peft": "PEFT", "store": "store"}
_BASES = {
    "not checked": "the base was not checked (--model DIR)",
    "same": "the base is the one that they were trained on",
    "another": "the base is NOT the one that they were trained on",
}


def list_store(settings: StacksListSettings) -> Result:
    """Facts, domains, stacks, losses in every mode; domains that miss what they were trained on."""
    store = store_commands.open_store(settings.store_path)
    manifest, router = store.manifest, store.manifest.router
    header: RouterHeader | None = None
    notes = [
        *binding_notes(manifest.base_fingerprint), *store_commands.company_notes(manifest),
        *store_commands.router_notes(store),
    ]  # fmt: skip
    if router is not None:
        with suppress(StoreError):  # a note names it
            header = store.read_router().header
    stack_bytes = sum(stack.file.nbytes for stack in manifest.stacks)
    facts: dict[str, Cell] = {
        "store": str(store.path),
        "base": f"{manifest.base_model} ({manifest.base_fingerprint[:12]})",
        "domains": f"{len(manifest.domains)}",
        "stacks": f"{len(manifest.stacks)}",
        "size": bytes_in_words(stack_bytes),
    }
    if router is not None:
        knows = "bad file" if header is None else f"for {', '.join(header.domains)}"
        facts["router"] = f"{knows} ({bytes_in_words(router.nbytes)})"
    columns: Columns = {
        "stack": "text", "domain": "text", "served": "text", "parameters": "count",
        "size": "bytes", "loss before": ("number", 4), "loss after": ("number", 4),
    }  # fmt: skip
    data = {
        "store_path": str(store.path),
        **manifest.as_json(),
        "stack_bytes": stack_bytes,
        "enabled_stacks": [stack.name for stack in manifest.enabled_stacks()],
        "router_header": header and header.as_json(),
    }
    stacks = [
        (stack.name, domain.name, domain.enabled, stack.parameters, stack.file.nbytes,
         stack.loss_before, stack.loss_after)
        for domain in manifest.domains
        for stack in domain.stacks
    ]  # fmt: skip
    blocks = (
        Table.of_facts("store", "Store", facts),
        domain_table({domain.name: stored_json(domain) for domain in manifest.domains}),
        Table.of("stacks", "Stacks", columns, stacks), *matrix_blocks(ordered_matrix(manifest)),
    )  # fmt: skip
    return _result(
        "list", f"Store of {'blocks' if manifest.holds_blocks else 'stacks'}", data,
        verdict(manifest), notes, blocks,
        question="What does each domain gain, and what do later ones cost it?",
        outcome=outcome(manifest),
    )  # fmt: skip


def store_result(directory: Path) -> Result:
    """Of a store without the result of its training, as one that stacks were imported into."""
    listed = list_store(StacksListSettings(store_path=str(directory)))
    return listed.model_copy(update={"directory": str(directory)}).sealed()


def verify_store(settings: StacksVerifySettings, progress: Any = None) -> Result:
    """Every problem with its file; `failure` where there is one."""
    verified = store_verify.verify_store(settings, progress)
    rows = [(problem.file, problem.kind, problem.message) for problem in verified.problems]
    files = counted(verified.files, "file")
    size = f"{files}, {bytes_in_words(verified.nbytes)}, {_BASES[verified.base]}"
    whole = "Damaged" if verified.problems else "Whole"
    return _result(
        "verify", "Check of a store",
        {"status": "damaged" if verified.problems else "whole", **asdict(verified)},
        f"{whole}: {counted(verified.stacks, 'stack')} in {size}.", verified.notes,
        blocks=_table("problems", "Problems", ("file", "kind", "problem"), rows),
        failure=verified.failure, outcome=whole.lower(),
    )  # fmt: skip


def _change(action: str, past: str, changed: store_commands.StoreChanged) -> Result:
    stacks = ", ".join(changed.stacks) or "no stacks"
    served = ", ".join(changed.served) or "nothing but the base"
    words, notes = f"{past} {changed.domain} ({stacks}); served now: {served}.", changed.notes
    if changed.status == "planned":
        words = f"Would {action} {changed.domain} ({stacks}); served then: {served}."
    elif changed.status == "nothing to do":
        words, notes = f"Nothing to do: {changed.domain} is {past.lower()} already.", ()
    return _result(action, "Change of a store", asdict(changed), words, notes)


def remove_domain(settings: StacksRemoveSettings, dry_run: bool = False) -> Result:
    """See `files.store_commands.remove_domain`."""
    return _change("remove", "Removed", store_commands.remove_domain(settings, dry_run))


def disable_domain(settings: StacksSwitchSettings, dry_run: bool = False) -> Result:
    """See `files.store_commands.disable_domain`."""
    return _change("disable", "Disabled", store_commands.disable_domain(settings, dry_run))


def enable_domain(settings: StacksSwitchSettings, dry_run: bool = False) -> Result:
    """See `files.store_commands.enable_domain`."""
    return _change("enable", "Enabled", store_commands.enable_domain(settings, dry_run))


def undo_change(settings: StacksUndoSettings, dry_run: bool = False) -> Result:
    """See `files.store_commands.undo_change`."""
    changed = store_commands.undo_change(settings, dry_run)
    if changed.status == "nothing to do":
        return _result("undo", "Change of a store", asdict(changed), "Nothing to undo.")
    verb = "Would restore" if changed.status == "planned" else "Restored"
    words = f"{verb} what was before the last change (of {changed.domain or 'the router'}); "
    words += (
        f"served: {', '.join(changed.served) or 'nothing but the base'}. Done again, it goes back."
    )
    return _result("undo", "Change of a store", asdict(changed), words, changed.notes)


def export_stack(settings: StacksExportSettings, dry_run: bool = False) -> Result:
    """See `files.stack_adapters.export_stack`."""
    exported = stack_adapters.export_stack(settings, dry_run)
    verb = "Would write" if dry_run else "Wrote"
    what = f"{exported.parameters:,} parameters"
    if exported.format != "store":
        what = f"{counted(exported.modules, 'module')}, {what}"
    words = f"{verb} {exported.stack} to {exported.save_path} in {_FORMATS[exported.format]} "
    words += f"format: {what}."
    if exported.copies:
        words += (
            f" {counted(exported.copies, 'module')} with one pair for all experts in the store: "
            "the adapter holds a copy for each."
        )
    return _result("export", "Export of a stack", asdict(exported), words, exported.notes)


def import_adapter(settings: StacksImportSettings, dry_run: bool = False) -> Result:
    """See `files.stack_adapters.import_adapter`."""
    imported = stack_adapters.import_adapter(settings, dry_run)
    verb = "Would import" if dry_run else "Imported"
    where = f"{imported.store_path} (new)" if imported.created else imported.store_path
    words = (
        f"{verb} {imported.adapter_path} ({_FORMATS[imported.format]}) into {where} as "
        f"{imported.stack}: {counted(imported.modules, 'module')}, "
        f"{imported.parameters:,} parameters, {imported.storage}, "
        f"{'bit for bit' if imported.exact else 'rounded'}; base {imported.base}."
    )
    return _result("import", "Import of an adapter", asdict(imported), words, imported.notes)


def diff_stores(settings: StacksDiffSettings) -> Result:
    """A row for each difference."""
    diff = store_commands.diff_stores(settings)
    rows = [(d.what, d.name, d.field, *_told_apart(d.first, d.second)) for d in diff.differences]
    columns = ("what", "name", "field", "first", "second")
    equal = "Equal" if diff.equal else counted(len(rows), "difference")
    alike = counted(len(diff.equal_stacks), "stack")
    have = "has" if len(diff.equal_stacks) == 1 else "have"
    return _result(
        "diff", "Two stores", {"equal": diff.equal, **asdict(diff)},
        f"{equal}; {alike} {have} the same bytes in both.",
        blocks=_table("differences", "Differences", columns, rows), outcome=equal.lower(),
    )  # fmt: skip


def _told_apart(*values: Any) -> tuple[Cell, ...]:
    """As cells; numbers have four digits, or as many as show that they differ."""
    if all(isinstance(value, float) for value in values):
        rounded = ([f"{value:.{digits}g}" for value in values] for digits in range(4, 18))
        return next((tuple(texts) for texts in rounded if len({*texts}) > 1), values)
    return tuple(
        value if value is None or isinstance(value, bool)
        else f"{value:.4g}" if isinstance(value, float) else str(value)[:200]
        for value in values
    )  # fmt: skip


def collect_garbage(settings: StacksGcSettings, dry_run: bool = False) -> Result:
    """What went, what stays and until when."""
    collected = store_commands.collect_garbage(settings, dry_run)
    verb = "Would remove" if dry_run else "Removed"
    files = counted(len(collected.removed), "file")
    words = f"{verb} {files}, {bytes_in_words(collected.removed_bytes)}."
    if collected.kept:
        words += (
            f" Kept {counted(len(collected.kept), 'file')}, "
            f"{bytes_in_words(collected.kept_bytes)}, named until less than "
            f"{collected.grace_seconds} seconds ago; "
            "--grace-seconds 0 removes them at once."
        )
    notes = [f"{file}: no file of a store, left alone" for file in collected.strange]
    rows = [(file,) for file in collected.removed]
    table = _table("removed", "Files without a name in the manifest", ("file",), rows)
    return _result("gc", "Files that nothing names", asdict(collected), words, notes, table)


def _result(
    name: str,
    title: str,
    data: dict[str, Any],
    words: str,
    notes: Iterable[str] = (),
    blocks: Sequence[Block] = (),
    **head: Any,
) -> Result:
    planned = data.get("status") == "planned"
    return Result(
        kind=f"stacks {name}", title=title, status="planned" if planned else "done",
        verdict=words, data=data, blocks=tuple(blocks), notes=tuple(notes), **head,
    )  # fmt: skip


def _table(
    id: str, title: str, columns: Sequence[str], rows: Sequence[tuple[Cell, ...]]
) -> Sequence[Table]:
    """Of texts; none without rows."""
    return [Table.of(id, title, dict.fromkeys(columns, "text"), rows)] if rows else []
