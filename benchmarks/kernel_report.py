"""What the kernel benchmark says: the machine's card, the tables, the bars beside each figure."""

import math
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

import mlxstacks
from benchmarks.timing import Spread, machine
from mlxstacks import memory
from mlxstacks.memory import bytes_in_words

NOT_MEASURED = "not measured"
REFUSED = "no speed: results differ"
NO_RESULT = "no result, see below"


@dataclass(frozen=True)
class Row:
    """One kernel at one shape.

    ran_on: "metal", "cuda", the name of a substitute such as "emulator", or None.
    agrees: whether its result equals the reference, up to `allowed_error`, which is relative; None
        where there is no result, `unchecked` says why. differs: what does not agree.
    kernel_*: of the kernel on the device; None where it was not measured.
    composition_*: of the same work in MLX operations, on `composition_on`.
    *_peak_bytes: what MLX held at most beyond the inputs, results included.
    """

    kernel: str
    case: str
    ran_on: str | None
    agrees: bool | None
    largest_error: float | None
    relative_error: float | None
    allowed_error: float | None
    differs: tuple[str, ...]
    unchecked: str | None
    needed_bytes: int
    input_bytes: int
    kernel_seconds: Spread | None
    kernel_alone_seconds: Spread | None
    kernel_peak_bytes: int | None
    composition: str
    composition_on: str
    composition_seconds: Spread | None
    composition_alone_seconds: Spread | None
    composition_peak_bytes: int | None
    copy_bytes_per_second: float
    barred: bool

    @property
    def failed(self) -> bool:
        """Whether the kernel gave a wrong result, or none where it should run, or nothing ran."""
        return (self.ran_on is not None and not self.agrees) or self.composition_seconds is None

    @property
    def bytes_per_second(self) -> float | None:
        return self.needed_bytes / self.kernel_seconds.median if self.kernel_seconds else None

    @property
    def share_of_copy(self) -> float | None:
        rate = self.bytes_per_second
        return rate / self.copy_bytes_per_second if rate else None

    @property
    def speed_ratio(self) -> float | None:
        """How many times faster than the composition."""
        if self.kernel_seconds is None or self.composition_seconds is None:
            return None
        return self.composition_seconds.median / self.kernel_seconds.median

    @property
    def peak_ratio(self) -> float | None:
        """Peak memory as a share of the composition's."""
        if self.kernel_peak_bytes is None or self.composition_peak_bytes is None:
            return None
        return self.kernel_peak_bytes / self.composition_peak_bytes

    def error_in_words(self) -> str:
        """The largest error beside the largest that is allowed."""
        if self.relative_error is None:
            return f"{self.largest_error:.3g} (allowed 0)"
        return f"{self.relative_error:.2g} (allowed {self.allowed_error:.2g})"

    def verdict(self) -> str:
        """Why it failed, in a line or, where a compiler speaks, in several."""
        if self.agrees is None:
            return f"no result: {self.unchecked}"
        what = ", ".join(self.differs)
        return f"differs from the reference in {what}; largest error {self.error_in_words()}"

    def bars(self) -> dict[str, str]:
        """Each bar that this row has, with "met", "not met" or "not measured"."""
        if self.kernel == "dequant":
            return {"copy >= 60%": self._verdict(self.share_of_copy, 0.60, True)}
        if self.kernel != "requant" or self.case.startswith("refit"):
            return {}
        return {
            "speed >= 3x": self._verdict(self.speed_ratio, 3.0, True),
            "copy >= 20%": self._verdict(self.share_of_copy, 0.20, True),
            "peak <= 1/4": self._verdict(self.peak_ratio, 0.25, False),
        }

    def _verdict(self, value: float | None, bar: float, at_least: bool) -> str:
        # A bar is about the shapes of a real model: small ones measure launches.
        if value is None or not self.barred:
            return NOT_MEASURED
        return "met" if (value >= bar if at_least else value <= bar) else "not met"

    def as_json(self) -> dict[str, Any]:
        derived = ("bytes_per_second", "share_of_copy", "speed_ratio", "peak_ratio")
        row = {
            **asdict(self),
            **{name: getattr(self, name) for name in derived},
            "bars": self.bars(),
        }
        # An error may be NaN or infinite, and JSON has neither.
        return {
            k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()
        }


def card(copy: Spread, backend: str, console: Console) -> dict[str, Any]:
    """Print what the numbers depend on; the same as a dictionary."""
    device = memory.device()
    facts: dict[str, Any] = {
        **machine(),
        "mlxstacks": mlxstacks.__version__,
        "system": f"{platform.system()} {platform.mac_ver()[0] or platform.release()}",
        "backend": backend,
        **{f"device_{key}": value for key, value in asdict(device).items()},
        "copy_bytes_per_second": asdict(copy),
    }
    table = Table(box=None, show_header=False, pad_edge=False)
    for name, text in (
        ("device", f"{device.name} ({device.architecture}), MLX backend {backend}"),
        ("memory", _bytes(device.memory_bytes)),
        ("working set limit", _bytes(device.working_set_bytes)),
        ("largest buffer", _bytes(device.max_buffer_bytes)),
        (
            "live buffer limit",
            f"{device.resource_limit:,}" + ("" if device.resource_limit_known else " (assumed)"),
        ),
        ("system", f"{facts['system']} {platform.machine()}, Python {facts['python']}"),
        ("versions", f"mlxstacks {facts['mlxstacks']} at {facts['commit']}, MLX {facts['mlx']}"),
        ("copy", f"{_rate(copy.median)} ({_rate(copy.p20)} to {_rate(copy.p80)}) read and written"),
    ):
        table.add_row(name, text)
    console.print(table)
    return facts


def print_rows(rows: Sequence[Row], backend: str, console: Console) -> None:
    """Two tables: how fast, and how right and at what memory. Bars stand beside their figures."""
    speed = Table(
        title=f"Speed on {backend} (median, p20 to p80)",
        caption="ms: of one call in a long row of calls; alone: with its own launch and wait. "
        "GB/s: of the bytes that any implementation has to move.",
        title_justify="left",
        caption_justify="left",
    )
    for name in ("kernel", "case", "kernel ms", "alone ms", "GB/s", "of copy"):
        speed.add_column(name, no_wrap=name == "kernel")
    speed.add_column(f"MLX operations ms, {rows[0].composition_on if rows else backend}")
    speed.add_column("speed")
    checks = Table(
        title="Results and memory",
        caption="largest error: of the weights that the codes stand for, 0 is asked of them; of "
        "outputs as a share of each. Many experts are compared at four of them. peak: beyond the "
        "inputs.",
        title_justify="left",
        caption_justify="left",
    )
    for name in ("kernel", "case", "largest error", "checked on"):
        checks.add_column(name, no_wrap=name == "kernel")
    for name in ("kernel peak", "MLX operations' peak", "ratio"):
        checks.add_column(name)
    for row in rows:
        speed.add_row(row.kernel, row.case, *_speed_cells(row))
        checks.add_row(row.kernel, row.case, *_check_cells(row))
    console.print(speed)
    console.print(checks)


def _speed_cells(row: Row) -> list[str]:
    composition = _milliseconds(row.composition_seconds)
    if row.agrees is False:
        return [REFUSED, "", "", "", composition, ""]
    if row.kernel_seconds is None:
        cells = ["", "", _bar(row, "copy"), composition, _bar(row, "speed")]
        return [NO_RESULT if row.failed else NOT_MEASURED, *cells]
    rate, share, ratio = row.bytes_per_second, row.share_of_copy, row.speed_ratio
    assert rate is not None
    assert share is not None
    assert ratio is not None
    return [
        _milliseconds(row.kernel_seconds),
        _milliseconds(row.kernel_alone_seconds),
        f"{rate / 1e9:.4g}",
        f"{100 * share:.1f}% {_bar(row, 'copy')}".strip(),
        composition,
        f"{ratio:.3g}x {_bar(row, 'speed')}".strip(),
    ]


def _check_cells(row: Row) -> list[str]:
    if row.agrees is None:
        why = "" if row.failed else row.unchecked or ""
        return [NO_RESULT if row.failed else "not checked", why, NOT_MEASURED, *_peak_cells(row)]
    error = row.error_in_words() + ("" if row.agrees else f" DIFFERS: {', '.join(row.differs)}")
    peak = NOT_MEASURED if row.kernel_peak_bytes is None else bytes_in_words(row.kernel_peak_bytes)
    return [error, row.ran_on or "", peak, *_peak_cells(row)]


def _peak_cells(row: Row) -> list[str]:
    ratio = "" if row.peak_ratio is None else f"{row.peak_ratio:.2f}"
    composition = row.composition_peak_bytes
    words = NOT_MEASURED if composition is None else bytes_in_words(composition)
    return [words, f"{ratio} {_bar(row, 'peak')}".strip()]


def _bar(row: Row, about: str) -> str:
    """The bar of a row about one figure: "(>= 20%: met)"."""
    for name, verdict in row.bars().items():
        if name.startswith(about):
            return f"({name.removeprefix(about + ' ')}: {verdict})"
    return ""


def _milliseconds(seconds: Spread | None) -> str:
    if seconds is None:
        return NOT_MEASURED
    median, low, high = (1e3 * value for value in (seconds.median, seconds.p20, seconds.p80))
    return f"{median:.3g} ({low:.3g} to {high:.3g})"


def _rate(bytes_per_second: float) -> str:
    return f"{bytes_per_second / 1e9:.4g} GB/s"


def _bytes(count: int | None) -> str:
    return "not told by this backend" if count is None else bytes_in_words(count)
