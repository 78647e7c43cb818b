"""Settings of gap events and of `mlxstacks route gaps`. Imports neither mlx nor numpy."""

from pydantic import Field

from mlxstacks.settings import Settings

# Where chat and generate write, and `route gaps` reads, unless told otherwise.
DEFAULT_GAP_LOG = "mlxstacks-out/gaps.jsonl"
# As the setting `gap_log`: write none.
NO_GAP_LOG = "none"


class RouteGapsSettings(Settings):
    """Prompts that no domain fits, in groups of like ones; a large group is a domain to train."""

    log_path: str = Field(DEFAULT_GAP_LOG, description="Log of gap events; it is only read.")
    similarity: float = Field(
        0.8, gt=0, lt=1, description="Cosine above which two prompts are alike."
    )
    centre: bool = Field(
        False,
        description="Take the mean of all events off first: tells prompts apart in a model whose "
        "features all point one way. Cosines are then far lower: on nano try --similarity 0.3.",
    )
    minimum_events: int = Field(
        50, ge=1, description="Events of a group from which a domain is proposed."
    )
    samples: int = Field(3, ge=0, description="Prompts shown of a group.")
