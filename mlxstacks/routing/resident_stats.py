"""What `Resident` counts: hits, reads and bytes."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass
class ResidentStats:
    """Counts since the model was opened.

    hits, misses: domains asked for that were in memory, or were not. failures: misses that could
    not be read. unloads: domains that left memory. evictions: packed sets that were dropped for the
    budget. packed_hits, packed_built: sets asked for that were packed already, or were packed then.
    bytes_read, read_seconds: of stack files, checks included. bytes_hashed: what of it was read the
    first time in this process, and hashed. resident_bytes: held now. budget_bytes: the most that
    may be, None for no limit.
    """

    hits: int = 0
    misses: int = 0
    failures: int = 0
    unloads: int = 0
    evictions: int = 0
    packed_hits: int = 0
    packed_built: int = 0
    bytes_read: int = 0
    bytes_hashed: int = 0
    read_seconds: float = 0.0
    resident_bytes: int = 0
    budget_bytes: int | None = None

    @property
    def hit_rate(self) -> float | None:
        """Share of domains asked for that were in memory; None before the first."""
        asked = self.hits + self.misses
        return self.hits / asked if asked else None

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "hit_rate": self.hit_rate}
