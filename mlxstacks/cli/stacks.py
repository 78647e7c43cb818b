"""Prints what the store commands return."""

from typing import TYPE_CHECKING

from mlxstacks.cli import output

if TYPE_CHECKING:
    from rich.console import Console

    from mlxstacks.files.manifest import Manifest
    from mlxstacks.files.stack_export import Exported
    from mlxstacks.files.stack_import import Imported
    from mlxstacks.files.store_commands import Collected, StoreChanged, StoreListing
    from mlxstacks.files.store_diff import StoreDiff
    from mlxstacks.files.store_verify import Verified

_FORMATS = {"mlx": "mlx-lm", "peft": "PEFT"}
_LISTED = 12


def render_list(console: "Console", listing: "StoreListing") -> None:
    """Facts, one row a stack, the ungated matrix, notes."""
    manifest = listing.manifest
    facts: dict[str, output.Cell] = {
        "store": listing.store_path,
        "base": f"{manifest.base_model} ({manifest.base_fingerprint[:12]})",
        "domains": len(manifest.domains),
        "stacks": len(manifest.stacks),
        "size": output.bytes_text(listing.stack_bytes),
    }
    if manifest.router is not None:
        header = listing.router
        knows = "bad file" if header is None else f"for {', '.join(header.domains)}"
        facts["router"] = f"{knows} ({output.bytes_text(manifest.router.nbytes)})"
    console.print(output.details(facts))
    rows: list[list[output.Cell]] = [
        [
            stack.domain,
            stack.name,
            domain.enabled,
            stack.parameters,
            output.bytes_text(stack.file.nbytes),
            stack.loss_before,
            stack.loss_after,
        ]
        for domain in manifest.domains
        for stack in domain.stacks
    ]
    if rows:
        columns = ["domain", "stack", "served", "parameters", "size", "loss before", "after"]
        console.print(output.table(columns, rows))
    _render_matrix(console, manifest)
    _render_notes(console, listing.notes)


def _render_matrix(console: "Console", manifest: "Manifest") -> None:
    """One table a mode: a row for each domain trained, a column for each measured."""
    names = [domain.name for domain in manifest.domains]
    for mode, rows in manifest.matrix.items():
        columns = [name for name in names if any(name in row for row in rows.values())]
        table: list[list[output.Cell]] = [
            [row, *(rows[row].get(column) for column in columns)] for row in names if row in rows
        ]
        console.print(output.table(["after", *columns], table, title=f"losses, {mode}"))


def render_verified(console: "Console", verified: "Verified") -> None:
    """Every problem with its file, then a verdict."""
    for problem in verified.problems:
        console.print(f"{problem.kind}: {problem.message}", markup=False)
    _render_notes(console, verified.notes)
    base = {
        "not checked": "the base was not checked (--model DIR)",
        "same": "of the given base",
        "another": "NOT of the given base",
    }[verified.base]
    what = f"{verified.files} files, {output.bytes_text(verified.nbytes)}, {base}"
    verdict = "Damaged" if verified.problems else "Whole"
    console.print(f"{verdict}: {verified.stacks} stacks in {what}.", markup=False)


def render_changed(console: "Console", changed: "StoreChanged") -> None:
    """One sentence, what is served now, notes."""
    done = {"remove": "Removed", "disable": "Disabled", "enable": "Enabled"}[changed.action]
    stacks = ", ".join(changed.stacks) or "no stacks"
    served = ", ".join(changed.served) or "nothing but the base"
    if changed.status == "nothing to do":
        console.print(f"Nothing to do: {changed.domain} is {done.lower()} already.", markup=False)
        return
    planned = changed.status == "planned"
    verb = f"Would {changed.action}" if planned else done
    when = "then" if planned else "now"
    console.print(f"{verb} {changed.domain} ({stacks}); served {when}: {served}.", markup=False)
    _render_notes(console, changed.notes)


def render_exported(console: "Console", exported: "Exported") -> None:
    """One sentence: what was written, how large."""
    verb = "Would write" if exported.status == "planned" else "Wrote"
    console.print(
        f"{verb} {exported.stack} to {exported.save_path} in {_FORMATS[exported.format]} format: "
        f"{exported.modules} modules, {exported.parameters:,} parameters.",
        markup=False,
    )
    if exported.copies:
        console.print(
            f"{exported.copies} modules share one pair among all experts in the store; the adapter "
            "holds a copy for each.",
            markup=False,
        )
    _render_notes(console, exported.notes)


def render_imported(console: "Console", imported: "Imported") -> None:
    """One sentence: what came in, as what."""
    verb = "Would import" if imported.status == "planned" else "Imported"
    where = f"{imported.store_path} (new)" if imported.created else imported.store_path
    exact = "bit for bit" if imported.exact else "rounded"
    console.print(
        f"{verb} {imported.adapter_path} ({_FORMATS[imported.format]}) into {where} as "
        f"{imported.stack}: {imported.modules} modules, {imported.parameters:,} parameters, "
        f"{imported.storage}, {exact}; base {imported.base}.",
        markup=False,
    )
    _render_notes(console, imported.notes)


def render_diff(console: "Console", diff: "StoreDiff") -> None:
    """One row a difference, then a verdict."""
    rows: list[list[output.Cell]] = [
        [d.what, d.name, d.field, _cell(d.first), _cell(d.second)] for d in diff.differences
    ]
    if rows:
        console.print(output.table(["what", "name", "field", "first", "second"], rows))
    same = len(diff.equal_stacks)
    verdict = "Equal" if diff.equal else f"{len(rows)} differences"
    console.print(f"{verdict}; {same} stacks have the same bytes in both.", markup=False)


def render_collected(console: "Console", collected: "Collected") -> None:
    """What went, what stays and until when."""
    verb = "Would remove" if collected.status == "planned" else "Removed"
    console.print(
        f"{verb} {len(collected.removed)} files, {output.bytes_text(collected.removed_bytes)}.",
        markup=False,
    )
    for file in collected.removed[:_LISTED]:
        console.print(f"  {file}", markup=False)
    if collected.kept:
        console.print(
            f"Kept {len(collected.kept)} files, {output.bytes_text(collected.kept_bytes)}, that "
            f"were named until less than {collected.grace_seconds} seconds ago; "
            "--grace-seconds 0 removes them at once.",
            markup=False,
        )
    notes = tuple(f"{file}: no file of a store, left alone" for file in collected.strange)
    _render_notes(console, notes)


def _render_notes(console: "Console", notes: tuple[str, ...]) -> None:
    for note in notes[:_LISTED]:
        console.print(f"Note: {note}", markup=False)
    if len(notes) > _LISTED:
        console.print(f"and {len(notes) - _LISTED} more notes (--json has them all)", markup=False)


def _cell(value: object) -> output.Cell:
    return value if isinstance(value, str | int | float | bool | None) else str(value)[:200]
