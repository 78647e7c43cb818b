"""What a training says: losses, sizes, and why it ended."""

from functools import partial

from mlxstacks.report.content import Block, Cell, Content, Mark, Plot, table
from mlxstacks.report.values import Value, plain
from mlxstacks.study.render.drawings import draw_curves
from mlxstacks.study.render.words import fixed, listed, nbytes, number

Curve = list[tuple[float, float]]


def train_content(document: Value, mark: Mark) -> Content:
    first, best = document["first_validation_loss"].number, document["best_validation_loss"].number
    curves = {
        "validation": curve(document["validation"], "validation_loss"),
        "training": curve(document["history"], "train_loss") or curve(document["history"], "loss"),
    }
    blocks: list[Block] = []
    if any(curves.values()):
        blocks.append(loss_plot("losses", mark("Loss in training"), curves))
    blocks.append(_facts(document))
    return Content(_outcome(first, best), _verdict(document, first, best), tuple(blocks))


def curve(records: Value, key: str) -> Curve:
    """(step, value) of the records that have both."""
    found = []
    for record in records.each():
        step, value = record["step"].number, record[key].number
        if step is not None and value is not None:
            found.append((step, value))
    return found


def loss_plot(name: str, title: str, curves: dict[str, Curve]) -> Plot:
    drawn = {said: points for said, points in curves.items() if points}
    spans = listed(
        f"{said} from {number(points[0][1])} to {number(points[-1][1])}"
        for said, points in drawn.items()
    )
    alt = f"{title} by step, nats a token: {spans}."
    return Plot(
        name, title, alt,
        partial(draw_curves, curves=drawn, xlabel="step", ylabel="loss, nats a token", title=title),
    )  # fmt: skip


def _outcome(first: float | None, best: float | None) -> str:
    if first is None or best is None:
        return "validation loss not measured"
    return f"validation loss {first:.3f} to {best:.3f}"


def _verdict(document: Value, first: float | None, best: float | None) -> str:
    step, status = document["step"].count, document["status"].text
    ended = "was stopped" if status == "stopped" else "ended as planned"
    if status == "planned":
        return "Planned only; nothing was trained."
    said = [f"Training {ended} at step {number(step) or 'unknown'}."]
    if reason := document["reason"].text:
        said.append(f"Why: {reason}.")
    if first is not None and best is not None:
        change = "fell" if best < first else "did not fall"
        at = document["best_step"].count
        said.append(f"Validation loss {change}: {first:.4f} before, {best:.4f} at step {at}.")
    if kept := document["kept"].text:
        said.append(f"The {kept} weights were written.")
    return " ".join(said)


def _facts(document: Value) -> Block:
    named: list[tuple[str, Cell]] = [
        ("trained parameters", number(document["trained_parameters"].number)),
        ("modules", number(document["modules"].number)),
        ("layers", listed(str(layer.count) for layer in document["layers"].each()) or None),
        ("rows to train on", number(document["train_rows"].number)),
        ("validation rows", number(document["validation_rows"].number)),
        ("steps", number(document["steps"].number)),
        ("padding", f"{fixed(document['padding_percent'].number, 1) or '?'}%"),
        ("adapter", nbytes(document["adapter_bytes"].number)),
        ("optimizer", nbytes(document["optimizer_bytes"].number)),
        ("highest memory", nbytes(document["peak_bytes"].number)),
        ("guard", plain(document["guard"]["verdict"])),
    ]
    return table("Sizes", ("what", "value"), named)
