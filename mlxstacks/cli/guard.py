"""Prints what `mlxstacks guard` predicts: counts, bytes, who holds them, the verdict last."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from mlxstacks.cli import output
from mlxstacks.guard.report import GuardReport
from mlxstacks.memory import bytes_in_words

if TYPE_CHECKING:
    from rich.console import Console


def render(console: "Console", report: GuardReport) -> None:
    """With --apply only the settings that fit, as a recipe reads them."""
    if report.settings["apply"]:
        for key, value in report.apply.items():
            if value is not None:
                console.print(f"{key}: {_yaml(value)}", markup=False, soft_wrap=True)
        return
    limit = report.limit
    assumed = "" if limit.known else " (assumed)"
    facts: dict[str, output.Cell] = {
        "config": report.config,
        "row length": f"{report.settings['max_seq_length']:,} tokens",
        "live buffers": f"{report.buffers:,} of {limit.buffers:,}{assumed}",
        "each token": f"{report.buffers_per_token:,.1f} buffers",
        "longest row": f"{report.longest:,} tokens" if report.longest else "none",
    }
    if report.decode is not None:
        facts["generating"] = _decode_text(report)
    console.print(output.details(facts))
    console.print(output.table(["bytes at the peak", ""], _byte_rows(report)))
    total = sum(report.kinds.values()) or 1
    rows: list[list[output.Cell]] = [
        [name, count, f"{count / total:.0%}"] for name, count in report.kinds.items()
    ]
    console.print(output.table(["buffers of", "count", "share"], rows))
    for note in report.notes:
        console.print(note, markup=False, style="dim")
    if report.change is not None:
        console.print(_change_text(report), markup=False)
    console.print(f"Verdict: {report.verdict}.", markup=False, style="bold")


def _yaml(value: Any) -> str:
    """A value as YAML reads it; JSON is a part of YAML."""
    return json.dumps(value, ensure_ascii=False)


def _decode_text(report: GuardReport) -> str:
    decode = report.decode
    assert decode is not None
    text = f"{decode.buffers:,} buffers after {decode.tokens:,} tokens"
    if decode.leaked_per_token:
        text += f"; {decode.leaked_per_token} more each token, the limit after "
        text += f"{decode.tokens_until_limit:,}"
    return text


def _byte_rows(report: GuardReport) -> list[list[output.Cell]]:
    found = report.nbytes
    rows = {name: n for name, n in asdict(found).items() if n != 0} | {"in all": found.total}
    shown: list[list[output.Cell]] = [
        [name, "unknown" if n is None else bytes_in_words(n)] for name, n in rows.items()
    ]
    if report.limit.nbytes:
        shown.append(["to stay within", bytes_in_words(report.limit.nbytes)])
    return shown


def _change_text(report: GuardReport) -> str:
    change = report.change
    assert change is not None
    size = "" if change.nbytes is None else f", {bytes_in_words(change.nbytes)}"
    return f"Cheapest change: {change.words}: at most {change.buffers:,} buffers{size}."
