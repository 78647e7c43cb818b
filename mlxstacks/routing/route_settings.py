"""What the settings of `mlxstacks route` commands begin with. Imports neither mlx nor numpy."""

from pydantic import Field

from mlxstacks.settings import Settings


class RouteSettings(Settings):
    """A store of stacks, and the base that they belong to."""

    store_path: str | None = Field(
        None, description="Directory of the store. Default: nano's sample store."
    )
    model: str | None = Field(
        None,
        description="Model directory or Hugging Face id of the base. Default: what the store "
        "names.",
    )
