"""`mlxstacks route gaps`: what a log of gap events holds, in groups of like prompts."""

import os
from collections.abc import Sequence

from mlxstacks.routing.gaps import GapCluster, GapEvents, cluster_gaps, log_files, read_gaps
from mlxstacks.routing.settings import RouteGapsSettings
from mlxstacks.study.document import Table, counted
from mlxstacks.study.render.words import short
from mlxstacks.study.result import Result

# The table of cosines grows with the square of the events: 64 MB.
MOST_COMPARED = 8_000
_SHOWN_CHARACTERS = 60


def run(settings: RouteGapsSettings) -> Result:
    """Read, group, propose; nothing is written.

    Where no log was named and none is there, nothing was logged yet: that is a result.
    Raises: InputError: there is no log of that name, or it is no file.
    """
    is_named = "log_path" in settings.model_fields_set
    exists = any(os.path.lexists(file) for file in log_files(settings.log_path))
    log = read_gaps(settings.log_path) if is_named or exists else GapEvents((), 0, ())
    compared = [event for event in log.events if event.feature is not None][-MOST_COMPARED:]
    clusters = cluster_gaps(compared, settings.similarity, centre=settings.centre)
    without = sum(event.feature is None for event in log.events)
    too_old = len(log.events) - without - len(compared)
    notes = {
        f"left out: {counted(log.damaged, 'damaged line')}.": log.damaged,
        f"in no group, without a feature: {counted(without, 'event')}.": without,
        f"in no group, as the oldest: {counted(too_old, 'event')}.": too_old,
    }
    found = f"{counted(len(log.events), 'event')} in {counted(len(clusters), 'group')}"
    return Result(
        kind="route gaps", title="Gaps", question="Which prompts has no domain fitted?",
        status="done", outcome=found,
        settings=settings.model_dump(mode="json"),
        verdict=_verdict(settings, clusters, len(log.events)),
        data={
            "files": list(log.files),
            "events": len(log.events),
            "damaged_lines": log.damaged,
            "events_without_feature": without,
            "events_too_old": too_old,
            "clusters": [c.as_json(settings.samples, settings.minimum_events) for c in clusters],
        },
        blocks=(group_table(settings, clusters),) if clusters else (),
        notes=(*(f"Note: {note}" for note, count in notes.items() if count),
               f"{found}."),
    )  # fmt: skip


def _verdict(settings: RouteGapsSettings, clusters: Sequence[GapCluster], events: int) -> str:
    if not events:
        return (
            "no gap events: every prompt so far had a domain that fits, or none was logged "
            f"(routed answers of chat, generate and serve write {settings.log_path})."
        )
    sizes, least = [len(cluster.events) for cluster in clusters], settings.minimum_events
    proposed = sum(size >= least for size in sizes)
    if not proposed:
        return (
            "no domain is proposed: the largest group has "
            f"{counted(sizes[0] if sizes else 0, 'event')}, {least} are asked for."
        )
    groups = "group has" if proposed == 1 else "groups have"
    return (
        f"{proposed} {groups} {least} events or more: gather answers to prompts like these and "
        "train a domain on them (`mlxstacks stack`), then `mlxstacks route train`."
    )


def group_table(settings: RouteGapsSettings, clusters: Sequence[GapCluster]) -> Table:
    """The largest group first."""
    rows = []
    for number, cluster in enumerate(clusters, start=1):
        nearest = next(iter(cluster.mean_scores().items()), None)
        prompts = [short(text, _SHOWN_CHARACTERS) for text in cluster.prompts(settings.samples)]
        rows.append((
            number, len(cluster.events), cluster.cohesion,
            f"{nearest[0]} {nearest[1]:.2f}" if nearest else None,
            "\n".join(prompts) or "(text not kept)",
        ))  # fmt: skip
    return Table.of("groups", "Groups of like prompts", {
        "group": "count", "events": "count", "cosine": ("number", 2), "nearest domain": "text",
        "prompts": "text",
    }, rows)  # fmt: skip
