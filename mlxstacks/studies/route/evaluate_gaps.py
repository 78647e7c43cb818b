"""How often gaps are seen where they are, and where they are not.

Two tests: scores (every raw score is below the threshold; what the chat uses) and loss (no set of
domains lowers the loss of the known answer enough). A rate comes with Wilson's interval over rows.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from mlxstacks.routing.router_metrics import rate_json
from mlxstacks.studies.route.evaluate_rows import OTHER, UNSEEN


def gap_summary(flags: Mapping[str, Sequence[bool]]) -> dict[str, Any]:
    """flags: group -> whether each of its rows is a gap by one test.

    detection: over rows of unseen domains. false_alarms: over rows of the store's domains and mixed
    ones. others: prompts that are nobody's, where a gap is no mistake but the base can do without.
    """
    kinds: dict[str, list[bool]] = {"detection": [], "false_alarms": [], "others": []}
    for group, values in flags.items():
        kinds[_kind(group)] += values
    found = {kind: _rate(values) for kind, values in kinds.items()}
    return {**found, "by_group": {group: _rate(values) for group, values in flags.items()}}


def _rate(flags: Sequence[bool]) -> dict[str, Any] | None:
    return rate_json(sum(flags), len(flags))


def _kind(group: str) -> str:
    if group.startswith(UNSEEN):
        return "detection"
    return "others" if group == OTHER else "false_alarms"
