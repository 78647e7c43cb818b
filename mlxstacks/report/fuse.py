"""What a fuse says: what of the adapter is in each module, and what the fuse adds by itself."""

from functools import partial

from mlxstacks.report.content import Block, Cell, Content, Mark, Plot, table
from mlxstacks.report.values import Value
from mlxstacks.study.render.drawings import draw_series
from mlxstacks.study.render.words import fixed, nbytes, number, percent

_COLUMNS = (
    "module", "policy", "bits", "delta, steps", "correlation", "survival", "noise", "artifact",
    "codes changed", "at zero delta",
)  # fmt: skip
_LEGEND = (
    "The worst modules first. delta: the trained change D in quantization steps. correlation: of "
    "the fused change F with D. survival: <F,D>/<D,D>. noise: in sizes of D. artifact: change of "
    "the weights at zero delta, in their own size. codes changed: share of all codes."
)


def fuse_content(document: Value, mark: Mark) -> Content:
    zero = bool(document["zero_delta"].flag)
    total = document["total"]
    blocks: list[Block] = []
    stages = document["stages"].each()
    for place, stage in enumerate(stages, start=1):
        which = f" (stage {place} of {len(stages)})" if len(stages) > 1 else ""
        blocks += _stage(stage, zero, which, mark, f"fidelity-{place}")
    if len(stages) > 1:
        row: list[Cell] = ["sum of the adapters", "", "", *_figures(total)]
        blocks.insert(0, table(mark("Fidelity of all stages together"), _COLUMNS, [row]))
    blocks.append(_files(document))
    return Content(_outcome(total, zero), document["verdict"].text or "", tuple(blocks))


def _outcome(total: Value, zero: bool) -> str:
    artifact, survival = total["artifact"].number, total["survival"].number
    if zero or survival is None:
        if artifact is None:
            return "not measured"
        return f"the fuse alone moves weights by {percent(artifact)}" if artifact else "no artifact"
    words = f"correlation {fixed(total['correlation'].number)}, survival {percent(survival)}"
    words += f", noise {number(total['noise'].number, 2)}"
    return f"{words}, artifact {percent(artifact)}" if artifact else words


def _stage(stage: Value, zero: bool, which: str, mark: Mark, name: str) -> list[Block]:
    modules = sorted(stage["modules"].each(), key=_worst_first)
    names = [module["module"].text or "?" for module in modules]
    prefix = _common_prefix(names)
    adapter = stage["adapter"].text or "unknown"
    note = f"Adapter: {adapter}. {_LEGEND}"
    if prefix:
        note += f" All modules begin with {prefix}"
    rows = [
        _row(named.removeprefix(prefix), module)
        for named, module in zip(names, modules, strict=True)
    ]
    total: list[Cell] = ["total", "", "", *_figures(stage["total"])]
    blocks: list[Block] = [
        table(mark(f"Fidelity by module{which}"), _COLUMNS, [total, *rows], note=note)
    ]
    if modules:
        blocks.insert(0, _plot(modules, names, prefix, zero, which, mark, name))
    tried = [
        [named.removeprefix(prefix), policy, *_figures(found)]
        for named, module in zip(names, modules, strict=True)
        for policy, found in module["estimates"].items()
    ]
    if tried:
        blocks.append(
            table(
                mark(f"What other policies would give, estimated{which}"),
                ("module", "policy", *_COLUMNS[3:]), tried, folded=True,
            )
        )  # fmt: skip
    return blocks


def _worst_first(module: Value) -> tuple[float, float]:
    """By correlation; where there is none, as at zero delta, by what the fuse itself changed."""
    correlation = module["fidelity"]["correlation"].number
    if correlation is None:
        return 2.0, -(module["fidelity"]["artifact"].number or 0.0)
    return correlation, 0.0


def _row(name: str, module: Value) -> list[Cell]:
    before, after = module["bits_before"].count, module["bits_after"].count
    bits = str(before or "none")
    if after != before:
        bits += f" to {after or 'none'}"
    return [name, module["policy"].text, bits, *_figures(module["fidelity"])]


def _figures(found: Value) -> list[Cell]:
    return [
        fixed(found["delta_over_step"].number), fixed(found["correlation"].number),
        percent(found["survival"].number), fixed(found["noise"].number),
        percent(found["artifact"].number, 2), percent(found["codes_changed"].number),
        percent(found["codes_changed_at_zero"].number),
    ]  # fmt: skip


def _plot(
    modules: list[Value], names: list[str], prefix: str, zero: bool, which: str, mark: Mark,
    name: str,
) -> Plot:  # fmt: skip
    """Correlation and survival, the worst module first; of a control what the fuse changed."""
    keys = {"correlation": "correlation with the delta", "survival": "survival, <F,D>/<D,D>"}
    if zero:
        keys = {
            "artifact": "artifact, |change| / |weights|",
            "codes_changed_at_zero": "codes changed",
        }
    series = {
        said: [module["fidelity"][key].number for module in modules] for key, said in keys.items()
    }
    title = mark(f"{'Change at zero delta' if zero else 'Fidelity'} by module{which}")
    short = [named.removeprefix(prefix) for named in names]
    spans = []
    for said, values in series.items():
        found = [value for value in values if value is not None]
        if found:
            spans.append(f"{said}: {number(min(found), 3)} to {number(max(found), 3)}")
    alt = f"{title}: a dot for each of {len(modules)} modules. {'; '.join(spans) or 'No figures'}."
    references = {} if zero else {"all of the delta": 1.0}
    draw = partial(
        draw_series, labels=_endings(short), series=series,
        xlabel="share" if zero else "correlation or survival",
        title=title, references=references,
    )  # fmt: skip
    return Plot(name, title, alt, draw)


def _endings(names: list[str]) -> list[str]:
    """`3.mlp.switch_mlp.down_proj` as `3 down_proj`, where that still tells them apart."""
    ends = [f"{name.split('.')[0]} {name.split('.')[-1]}" for name in names]
    return ends if len(set(ends)) == len(names) else names


def _common_prefix(names: list[str]) -> str:
    """What all names share, up to a dot before a layer's number."""
    parts = [name.split(".") for name in names]
    shared = 0
    while parts and all(len(p) > shared + 1 and p[shared] == parts[0][shared] for p in parts):
        if parts[0][shared].isdigit():
            break
        shared += 1
    return ".".join([*parts[0][:shared], ""]) if shared else ""


def _files(document: Value) -> Block:
    rows: list[list[Cell]] = [
        [file["name"].text, file["how"].text, nbytes(file["written_bytes"].number)]
        for file in document["files"].each()
    ]
    more, written = document["extra_bytes"].number, document["written_bytes"].number
    note = (
        f"The model grows by {nbytes(more) or 'an unknown size'}; {nbytes(written)} were written."
    )
    return table("Files of the model", ("file", "how", "written"), rows, note=note, folded=True)
