"""Validation losses of a store's training, from the events of its log."""

import json
from pathlib import Path
from typing import Any

from mlxstacks.files.store_files import LOG

# (round, step) -> validation loss.
_Curve = dict[tuple[int, int], float]


def curves_of(store: Path) -> dict[str, list[dict[str, Any]]]:
    """Domain -> [{round, step, validation_loss}], by round and step; empty without a log.

    Lines of other events are passed over, as is what a killed process left half written. Of a round
    that was trained again the last training counts.
    """
    try:
        lines = (store / LOG).read_bytes().splitlines()
    except FileNotFoundError:
        return {}
    curves: dict[str, _Curve] = {}
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            _take(curves, event)
    return {
        domain: [
            {"round": number, "step": step, "validation_loss": loss}
            for (number, step), loss in sorted(curve.items())
        ]
        for domain, curve in curves.items()
    }


def _take(curves: dict[str, _Curve], event: dict[str, Any]) -> None:
    """One `validation` event; others say nothing of the curve."""
    domain, number, step, loss = (
        event.get(key) for key in ("domain", "round", "step", "validation_loss")
    )
    if event.get("event") != "validation" or not isinstance(domain, str):
        return
    if not isinstance(number, int) or not isinstance(step, int) or not isinstance(loss, float):
        return
    curve = curves.setdefault(domain, {})
    if step == 0:  # trained again: what later steps said before no longer counts
        for key in [key for key in curve if key >= (number, 0)]:
            del curve[key]
    curve[number, step] = loss
