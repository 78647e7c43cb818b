"""Second moments of the inputs of modules, for `mlxstacks fuse --requant gptq`.

The model with its adapters unfused reads the rows of the calibration; of each adapted module
sum(x x^T) is kept. The modules that a token meets as one, such as q, k and v, share theirs, and so
do the experts of a layer: those that few tokens reach are rounded by what all of them are given.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxstacks import base_model
from mlxstacks.data import encode_examples, read_train_data, train_data_settings
from mlxstacks.errors import NonFiniteModelError
from mlxstacks.files.checkpoint import open_checkpoint
from mlxstacks.files.hub import resolve_model
from mlxstacks.fuse.module import gather_modules
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.ops.gptq import Moments
from mlxstacks.studies.agreement.allocate import Call, heard
from mlxstacks.training.modes import evaluating

_LONGEST_ROW = 512
_ROWS_AT_ONCE = 64  # are rendered, before it is known whether more are needed
Advance = Callable[[int, int], None]


def calibrate(
    settings: FuseSettings, model: nn.Module, tokenizer: Any, advance: Advance | None = None
) -> tuple[dict[str, Moments], list[str]]:
    """By module path, for the modules that the adapter of `settings` changes; notes.

    model: the base with this adapter unfused. A module that no token reached, or that only looks
    tokens up, has none.

    Raises: InputError: rows that cannot be used.
    """
    about = train_data_settings(str(settings.calibration))
    examples = read_train_data(about, Path(), tokenizer).train
    rows, left = list[Sequence[int]](), settings.calibration_tokens
    for start in range(0, len(examples), _ROWS_AT_ONCE):
        some = examples[start : start + _ROWS_AT_ONCE]
        for row in encode_examples(some, tokenizer, about, _LONGEST_ROW).rows:
            rows.append(row.tokens[:left])
            left -= len(rows[-1])
        if left <= 0:
            break
    rows = [row for row in rows if row]
    modules, _ = gather_modules(open_checkpoint(resolve_model(str(settings.model))), settings)
    paths = [module.path for module in modules]
    found = second_moments(model, paths, rows, advance)
    notes = [f"gptq read {sum(map(len, rows)):,} tokens of {len(rows):,} calibration rows."]
    if not settings.zero_delta:
        notes.append("Correlation, survival and noise are those of the modules' outputs on them.")
    if missing := [path for path in paths if path not in found]:
        notes.append(
            f"gptq: no input of {len(missing)} of {len(paths)} modules was seen, {missing[0]} for "
            "one; they are rounded to nearest."
        )
    return found, notes


def second_moments(
    model: nn.Module,
    paths: Sequence[str],
    rows: Sequence[Sequence[int]],
    advance: Advance | None = None,
) -> dict[str, Moments]:
    """sum(x x^T) of the inputs x of each module while `model` reads rows of token ids.

    Returns them by path; modules of the same inputs share theirs.
    """
    named = dict(model.named_modules())
    layers = [named[path] for path in paths]
    inputs: dict[int, tuple[mx.array, list[str]]] = {}  # of one row: id of x -> x, and who takes it
    sums: dict[tuple[str, ...], mx.array] = {}

    def hear(place: int, call: Call, y: mx.array) -> mx.array:
        x = call.args[0]
        if mx.issubdtype(x.dtype, mx.floating):  # ids that an embedding looks up are not
            inputs.setdefault(id(x), (x, []))[1].append(paths[place])
        return y

    with evaluating(model), base_model.gated_delta_installed(), heard(layers, hear):
        for number, tokens in enumerate(rows, 1):
            model(mx.array([tokens]))
            for x, takers in inputs.values():
                flat = x.reshape(-1, x.shape[-1]).astype(mx.float32)
                sums[tuple(takers)] = sums.get(tuple(takers), mx.array(0.0)) + flat.T @ flat
            inputs.clear()
            mx.eval(sums)
            if advance:
                advance(number, len(rows))
    found: dict[str, Moments] = {}
    for together, total in sums.items():
        moments = Moments(np.array(total))
        if not np.isfinite(moments.sums).all():
            raise NonFiniteModelError(f"the inputs of {together[0]}")
        if not moments.sums.any():  # zeros say as little as no input
            continue
        for path in dict.fromkeys(together):
            known = found.get(path)
            found[path] = moments if known is None else Moments(known.sums + moments.sums)
    return found
