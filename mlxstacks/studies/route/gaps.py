"""`mlxstacks route gaps`: what a log of gap events holds, in groups of like prompts."""

import os
from collections import Counter
from dataclasses import dataclass
from typing import Any

from mlxstacks.routing.gap_clusters import GapCluster, cluster_gaps
from mlxstacks.routing.gap_settings import RouteGapsSettings
from mlxstacks.routing.gaps import GapEvents, log_files, read_gaps

# The table of cosines grows with the square of the events: 64 MB.
MOST_COMPARED = 8_000


@dataclass(frozen=True)
class GapsReport:
    """clusters: the largest first. without_feature: events that cannot be compared. too_old: events
    that are left out of the groups, because there are more than MOST_COMPARED.
    """

    settings: RouteGapsSettings
    files: tuple[str, ...]
    events: int
    damaged: int
    without_feature: int
    too_old: int
    routers: dict[str, int]
    clusters: list[GapCluster]

    @property
    def proposed(self) -> list[GapCluster]:
        """Groups that are large enough for a domain of their own."""
        return [c for c in self.clusters if len(c.events) >= self.settings.minimum_events]

    @property
    def verdict(self) -> str:
        if not self.events:
            return (
                "no gap events: every prompt so far had a domain that fits, or none was logged "
                f"(chat and generate with --routed write {self.settings.log_path})."
            )
        least, found = self.settings.minimum_events, len(self.proposed)
        if not found:
            largest = len(self.clusters[0].events) if self.clusters else 0
            return (
                f"no domain is proposed: the largest group has {largest} events, {least} are asked "
                "for."
            )
        groups = "group has" if found == 1 else "groups have"
        return (
            f"{found} {groups} {least} events or more: gather answers to prompts like these and "
            "train a domain on them (`mlxstacks stack`), then `mlxstacks route train`."
        )

    def as_json(self) -> dict[str, Any]:
        samples, least = self.settings.samples, self.settings.minimum_events
        return {
            "kind": "route gaps",
            "settings": self.settings.model_dump(mode="json"),
            "files": list(self.files),
            "events": self.events,
            "damaged_lines": self.damaged,
            "events_without_feature": self.without_feature,
            "events_too_old": self.too_old,
            "events_by_router": self.routers,
            "clusters": [cluster.as_json(samples, least) for cluster in self.clusters],
            "verdict": self.verdict,
        }


def run(settings: RouteGapsSettings) -> GapsReport:
    """Read, group, propose; nothing is written.

    Where no log was named and none is there, nothing was logged yet: that is a result.
    Raises: InputError: there is no log of that name, or it is no file.
    """
    named = "log_path" in settings.model_fields_set
    there = any(os.path.lexists(file) for file in log_files(settings.log_path))
    found = read_gaps(settings.log_path) if named or there else GapEvents((), 0, ())
    compared = [event for event in found.events if event.feature is not None][-MOST_COMPARED:]
    clusters = cluster_gaps(compared, settings.similarity, centre=settings.centre)
    without = sum(event.feature is None for event in found.events)
    return GapsReport(
        settings,
        found.files,
        len(found.events),
        found.damaged,
        without,
        len(found.events) - without - len(compared),
        dict(Counter((event.router_sha256 or "unknown")[:12] for event in found.events)),
        clusters,
    )
