"""What the settings of `mlxstacks route` commands begin with. Imports neither mlx nor numpy."""

from pydantic import BaseModel, ConfigDict, Field


class RouteSettings(BaseModel):
    """A store of stacks, and the base that they belong to."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    store_path: str | None = Field(
        None, description="Directory of the store. Default: nano's sample store."
    )
    model: str | None = Field(
        None,
        description="Model directory or Hugging Face id of the base. Default: what the store "
        "names.",
    )
