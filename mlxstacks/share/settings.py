"""Settings of `push` and `pull`. Imports neither mlx nor numpy."""

from typing import Annotated

from pydantic import Field

from mlxstacks.settings import Force, Settings, output_path

RepoId = Annotated[
    str | None,
    Field(description="Repository on the Hugging Face hub, as in name/my-adapter."),
]


class PushSettings(Settings):
    """`push`: an adapter, a store or a model as a repository with a model card."""

    target: str | None = Field(
        None,
        description="Directory to upload: an adapter (mlx-lm or PEFT), a store, or a fused or "
        "converted model. Default: nano's sample stacks.",
    )
    repo_id: RepoId = None
    save_path: str | None = Field(
        None,
        description="Directory for the files to upload, which stay there. "
        "Default: ./mlxstacks-out/push.",
    )
    domains: tuple[str, ...] = Field(
        (), description="Domains of a store to upload. Repeatable. Default: the whole store."
    )
    private: bool = Field(False, description="Make the repository private.")
    revision: str | None = Field(
        None, description="Branch to upload to, made if it is not there. Default: main."
    )
    base_model: str | None = Field(
        None, description="Hub id of the base, for the card. Default: the recorded one."
    )
    license: str | None = Field(
        None, description="License for the card, as in apache-2.0. Default: the base's, if known."
    )
    card: bool = Field(True, description="Upload the card, README.md.")
    force: Force = False


class PullSettings(Settings):
    """`pull`: an adapter, a store or a model from the hub, checked before it appears."""

    repo_id: RepoId = None
    save_path: str | None = output_path("pull")
    revision: str | None = Field(
        None, description="Branch, tag or commit to download. Default: main."
    )
    max_bytes: int = Field(
        100_000_000_000, ge=1, description="Refuse a download of more bytes than this."
    )
    force: Force = False
