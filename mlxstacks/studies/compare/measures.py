"""What a comparison measures of a cell, from the report of its run of `stack`. Nats a token.

    task_loss         validation loss of each domain right after its training, with the stacks up
                      to its own: cross entropy alone, without the balance of experts
    later_task_loss   the same of all domains but the first
    ungated           loss at the end with every stack on; ungated_earlier: without the last domain
    ungated_rise      how much that lies above task_loss, earlier domains
    prefix, isolated  loss at the end with the stacks up to its own, with its own alone

These are means over domains, followed by the values of each. Beside them:

    train_loss, balance_loss   of the last step that was logged, the balance for each projection
    parameters, steps, seconds what was kept, what was done, processor time of the whole run
"""

from collections.abc import Mapping
from statistics import fmean
from typing import Any

# In this order in tables; name -> how it is called there.
SUMMARY = {
    "task_loss": "task loss",
    "later_task_loss": "of later domains",
    "ungated": "ungated",
    "ungated_earlier": "ungated, earlier domains",
    "ungated_rise": "ungated rise",
    "isolated": "isolated",
    "train_loss": "loss in training",
    "balance_loss": "balance loss",
    "parameters": "parameters kept",
    "steps": "steps",
    "seconds": "CPU seconds",
}
Rows = Mapping[str, Mapping[str, float]]


def measures(report: Mapping[str, Any], seconds: float | None) -> dict[str, float | None]:
    """Name -> value; None where a run has none (balance without a router). `NAME of DOMAIN` for
    the losses of each domain.

    report: `data` of the result of a run that is complete. seconds: of its process, None where
    it was stopped on the way.
    """
    domains: Mapping[str, Mapping[str, Any]] = report["domains"]
    own = {name: float(domain["final_loss"]) for name, domain in domains.items()}
    last = list(own)[-1]
    at_end = {mode: _last_row(rows) for mode, rows in report["matrix"].items()}
    ungated = at_end.get("ungated", {})
    earlier = [name for name in ungated if name != last]
    found: dict[str, float | None] = {
        "task_loss": fmean(own.values()),
        "later_task_loss": _mean(list(own.values())[1:]),
        "ungated": _mean(ungated.values()),
        "ungated_earlier": _mean([ungated[name] for name in earlier]),
        "ungated_rise": _mean([ungated[name] - own[name] for name in earlier]),
        "prefix": _mean(at_end.get("prefix", {}).values()),
        "isolated": _mean(at_end.get("isolated", {}).values()),
        "train_loss": _mean([_last_logged(d, "task_loss") for d in domains.values()]),
        "balance_loss": _mean([d.get("balance_loss_per_projection") for d in domains.values()]),
        "parameters": sum(domain["parameters"] for domain in domains.values()),
        "steps": sum(domain["steps"] for domain in domains.values()),
        "seconds": seconds,
    }
    for name, loss in own.items():
        found[f"task_loss of {name}"] = loss
    for mode, row in at_end.items():
        found |= {f"{mode} of {name}": loss for name, loss in row.items()}
    return found


def _last_row(rows: Rows) -> dict[str, float]:
    return dict(list(rows.values())[-1]) if rows else {}


def _last_logged(domain: Mapping[str, Any], name: str) -> float | None:
    """Of the last logged step of a domain's last round; `loss` where nothing was added to it."""
    history = [record for one in domain.get("rounds", []) for record in one["history"]]
    if not history:
        return None
    found = history[-1].get(name, history[-1].get("loss"))
    return None if found is None else float(found)


def _mean(values: Any) -> float | None:
    """None where a value is missing, or all are."""
    listed = list(values)
    return fmean(listed) if listed and None not in listed else None
