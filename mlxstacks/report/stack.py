"""What a store of stacks says: losses of its domains, and what later ones did to earlier ones."""

from collections.abc import Iterable
from functools import partial

from mlxstacks.report.content import Block, Cell, Content, Mark, Plot, table
from mlxstacks.report.train import loss_plot
from mlxstacks.report.values import Value, bounds
from mlxstacks.study.render.drawings import draw_heat_map
from mlxstacks.study.render.words import fixed, listed, nbytes, number, percent

Matrix = dict[str, dict[str, float | None]]
MODES = {
    "ungated": "every stack on",
    "prefix": "the stacks up to its own",
    "isolated": "its own stacks alone",
}


def store_content(document: Value, mark: Mark) -> Content:
    """Of manifest.json, and of the report of its last training where that is beside it."""
    domains = document["domains"].each()
    order = [domain["name"].text or "?" for domain in domains]
    trained = document["trained"]
    blocks = [*matrix_blocks(document["matrix"], order, mark)]
    rows: list[list[Cell]] = []
    for domain in domains:
        stacks = domain["stacks"].each()
        losses = domain["losses"].numbers()
        rows.append([
            domain["name"].text, "on" if domain["enabled"].flag else "off", len(stacks),
            number(_sum(stack["parameters"] for stack in stacks)),
            nbytes(_sum(stack["file"]["nbytes"] for stack in stacks)),
            fixed(losses[0] if losses else None), fixed(domain["final_loss"].number),
        ])  # fmt: skip
    blocks.append(
        table(
            mark("Domains, in the order of training"),
            ("domain", "served", "stacks", "parameters", "size", "loss before", "loss after"),
            rows, note="Validation losses in nats a token.",
        )
    )  # fmt: skip
    worst = _worst_rise(matrix_of(document["matrix"]["ungated"], order), order)
    count = sum(len(domain["stacks"].each()) for domain in domains)
    verdict = trained["verdict"].text or _verdict(len(domains), count, worst)
    outcome = f"{len(domains)} domains, {count} stacks"
    if worst:
        outcome += f", {worst[0]} {worst[1]:+.3f} ungated"
    return Content(outcome, verdict, tuple(blocks))


def stack_content(document: Value, mark: Mark) -> Content:
    """Of stack_report.json without a store beside it."""
    order = document["domains"].names()
    rows: list[list[Cell]] = [
        [
            name, domain["status"].text, len(domain["stacks"].each()),
            number(domain["parameters"].number), nbytes(domain["bytes"].number),
            listed(f"{loss:.3f}" for loss in domain["losses"].numbers() if loss is not None),
        ]
        for name, domain in document["domains"].items()
    ]  # fmt: skip
    columns = ("domain", "status", "stacks", "parameters", "size", "losses, nats a token")
    blocks = [
        *matrix_blocks(document["matrix"], order, mark), table(mark("Domains"), columns, rows)
    ]  # fmt: skip
    return Content(f"{len(order)} domains", document["verdict"].text or "", tuple(blocks))


def analysis_content(document: Value, mark: Mark) -> Content:
    """Of analysis_report.json: matrix, cosines beside chance, gates, separation."""
    domains = document["domains"].each()
    order = [domain["name"].text or "?" for domain in domains]
    blocks = [*matrix_blocks(document["matrix"], order, mark)]
    curves = {domain["name"].text or "?": _curve(domain["curve"]) for domain in domains}
    curves = {name: points for name, points in curves.items() if points}
    if curves:
        blocks.append(loss_plot("curves", mark("Validation loss by domain"), curves))
    geometry, routing = document["geometry"], document["routing"]
    rows: list[list[Cell]] = [
        [what, fixed(geometry[what]["mean"].number), fixed(geometry[what]["mean_chance"].number)]
        for what in ("weights", "data")
    ]
    columns = ("directions from", "mean largest cosine", "of random directions")
    blocks.append(table(mark("Do domains share directions?"), columns, rows))
    found = routing["points"]["separation"]
    random = routing["points"]["separation_of_random_routers"]
    blocks.append(
        table(
            mark("Is a prompt's domain told from its routing?"),
            ("routers", "accuracy", "95% interval", "chance", "silhouette"),
            [
                [name, percent(one["accuracy"].number), bounds(one["interval"], 1, scale=100),
                 percent(one["chance"].number), fixed(one["silhouette"].number, 2)]
                for name, one in (("trained", found), ("random", random))
            ],
            note=f"n = {number(found['n'].number) or 'unknown'} prompts.",
        )
    )  # fmt: skip
    cosine = fixed(geometry["weights"]["mean"].number) or "not measured"
    return Content(f"cosine {cosine}", document["verdict"].text or "", tuple(blocks))


def _curve(value: Value) -> list[tuple[float, float]]:
    """(step, loss), the steps of earlier rounds counted on."""
    found: list[tuple[float, float]] = []
    before, number = 0.0, None
    for one in value.each():
        step, loss = one["step"].number, one["validation_loss"].number
        if one["round"].number != number:
            number, before = one["round"].number, found[-1][0] if found else 0.0
        if step is not None and loss is not None:
            found.append((before + step, loss))
    return found


def matrix_of(value: Value, order: list[str]) -> Matrix:
    """Domain trained last -> domain measured -> loss, in the order of training."""
    return {
        row: {column: value[row][column].number for column in order if value[row][column]}
        for row in order
        if value[row]
    }


def matrix_blocks(value: Value, order: list[str], mark: Mark) -> list[Block]:
    """A heat map and a table for each mode that was measured."""
    blocks: list[Block] = []
    for mode, said in MODES.items():
        matrix = matrix_of(value[mode], order)
        if not matrix:
            continue
        title = mark(f"Forgetting matrix, {mode}: {said}")
        blocks.append(_heat_map(matrix, order, title, f"matrix-{mode}"))
        rows = [[row, *(fixed(columns.get(c)) for c in order)] for row, columns in matrix.items()]
        blocks.append(
            table(title, ("trained last", *order), rows, folded=True,
                  note="Validation loss of each domain, nats a token; below the diagonal: later.")
        )  # fmt: skip
    return blocks


def _heat_map(matrix: Matrix, order: list[str], title: str, name: str) -> Plot:
    values = [[columns.get(column) for column in order] for columns in matrix.values()]
    diagonal = [matrix[d].get(d) for d in order if d in matrix]
    last = list(matrix)[-1]
    alt = (
        f"{title}. Rows: the domain trained last; columns: the domain measured. "
        f"On the diagonal {listed(number(v) or 'not measured' for v in diagonal)}; "
        f"at the end {listed(number(v) or 'not measured' for v in matrix[last].values())} nats."
    )
    draw = partial(
        draw_heat_map, rows=list(matrix), columns=order, values=values, title=title,
        xlabel="domain measured", ylabel="domain trained last", unit="loss, nats a token",
    )  # fmt: skip
    return Plot(name, title, alt, draw)


def _worst_rise(matrix: Matrix, order: list[str]) -> tuple[str, float] | None:
    """The earlier domain that lost most from its own training to the end, and how much."""
    if len(matrix) < 2:
        return None
    last = matrix[list(matrix)[-1]]
    rises = {}
    for domain in order:
        before, after = matrix.get(domain, {}).get(domain), last.get(domain)
        if domain != list(matrix)[-1] and before is not None and after is not None:
            rises[domain] = after - before
    worst = max(rises, key=lambda name: rises[name], default=None)
    return None if worst is None else (worst, rises[worst])


def _verdict(domains: int, stacks: int, worst: tuple[str, float] | None) -> str:
    said = f"{domains} domains in {stacks} frozen stacks."
    if worst is None:
        return f"{said} None was measured after a later one, so forgetting is not measured."
    if worst[1] <= 0:
        return f"{said} With every stack on, no earlier domain lost anything."
    return f"{said} With every stack on, {worst[0]} lost most: {worst[1]:+.4f} nats a token."


def _sum(values: Iterable[Value]) -> float | None:
    found = [value.number for value in values]
    return None if any(one is None for one in found) else sum(one or 0.0 for one in found)
