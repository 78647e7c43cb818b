"""Settings of training data: sources, what is dropped, how rows are split. Imports no NumPy."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from mlxstacks.data.text_settings import AllowSpecial, Thinking
from mlxstacks.settings import Settings

# One name a reader (mlxstacks/data/formats.py), some readers under several.
FormatName = Literal[
    "auto", "text", "prompt_completion", "chat", "alpaca", "gsm8k", "messages", "nemotron_v2",
    "openassistant", "openthoughts", "sky_t1", "ultrafeedback_sft", "opencodereasoning",
    "openmath_cot", "openmath_tool", "numina_cot", "multiple_choice", "medqa", "medical_reasoning",
    "pubmedqa", "fallback",
]  # fmt: skip
Template = Literal["chat", "alpaca"]
Decontaminate = Literal["off", "words", "substrings"]


class SourceSettings(Settings):
    """One source of rows: a file or directory here, or a Hugging Face data set."""

    path: str | None = Field(
        None,
        description="JSONL file, JSON array, parquet file, directory of parquet files, or "
        "directory written by datasets' save_to_disk",
    )
    dataset: str | None = Field(
        None, description="Hugging Face data set by id; read from the cache"
    )
    download: bool = Field(
        False,
        description="of a data set that is not in the cache, download the files that are read",
    )
    name: str | None = Field(None, description="configuration of the Hugging Face data set")
    split: str = Field("train", description="split of a data set that has several")
    files: str | None = Field(
        None, description="pattern of the files to download, in place of the split's own"
    )
    fields: dict[str, str | list[str]] = Field(
        {},
        description="key that a format knows -> column that holds it, or columns whose values "
        "become a list; other columns are left out. Default: keys are columns",
    )
    format: FormatName = Field("auto", description="what the keys of a row mean; auto: by the keys")
    filter: Literal["code"] | None = Field(
        None, description="code: keep the rows in which a mark of program code occurs"
    )
    cap: int | None = Field(
        None, ge=1, description="at most so many rows, drawn from the first 2 x cap rows"
    )
    seed: int | None = Field(
        None, ge=0, description="of the draw under a cap; default: the domain's seed"
    )
    part: Literal["train", "validation"] | None = Field(
        None,
        description="in training, rows only to train on, or only to hold validation rows out of; "
        "default: both",
    )

    @model_validator(mode="after")
    def _check(self) -> Self:
        if bool(self.path) == bool(self.dataset):
            raise ValueError("give path (a file or directory) or dataset (a Hugging Face id)")
        if self.path and self.name:
            raise ValueError("name goes with dataset: a path has no configurations")
        if not self.dataset and (self.download or self.files):
            raise ValueError("download goes with dataset")
        if self.files and not self.download:
            raise ValueError("files goes with download")
        return self

    @property
    def label(self) -> str:
        """How messages and reports name the source: as it was written in the settings."""
        return self.path or "/".join(filter(None, (self.dataset, self.name)))


MIX = "mix:"


@functools.cache
def _mixes() -> dict[str, list[dict[str, Any]]]:
    import yaml

    table: dict[str, list[dict[str, Any]]] = yaml.safe_load(
        (Path(__file__).parents[1] / "assets" / "mixes.yaml").read_text(encoding="utf-8")
    )
    return table


def mix(name: str) -> tuple[SourceSettings, ...]:
    """The sources of a named mix of published data (assets/mixes.yaml), each to be downloaded.

    Raises: ValueError: there is no such mix.
    """
    if name not in _mixes():
        raise ValueError(f"no mix {name!r}; there are {', '.join(_mixes())}")
    return tuple(SourceSettings(download=True, **source) for source in _mixes()[name])


def _each_source(value: Any) -> Any:
    """A list of sources from one or several, with mixes as the sources they stand for."""
    listed = [value] if isinstance(value, str | Mapping | SourceSettings) else value
    if not isinstance(listed, list | tuple):
        return listed
    sources: list[Any] = []
    for source in listed:
        is_mix = isinstance(source, str) and source.startswith(MIX)
        sources += mix(source.removeprefix(MIX)) if is_mix else [source]
    return sources


# A plain path stands for a source with all else at its default.
Source = Annotated[
    SourceSettings,
    BeforeValidator(
        lambda value: {"path": value} if isinstance(value, str) else value,
        json_schema_input_type=SourceSettings | str,
    ),
]


class DomainDataSettings(Settings):
    """The data of one domain."""

    sources: Annotated[
        tuple[Source, ...],
        BeforeValidator(_each_source, json_schema_input_type=tuple[Source, ...] | Source),
    ] = Field(
        min_length=1,
        description="where the rows come from; a plain path is a source too, and so is mix:NAME, "
        "the published data of that name",
    )
    validation_fraction: float = Field(
        0.02, gt=0, lt=1, description="share of the rows kept for validation, by content hash"
    )
    validation_rows: int | None = Field(
        None, ge=1, description="so many validation rows instead of a share"
    )
    split_by: Literal["prompt", "row"] = Field(
        "prompt",
        description="what may not be on both sides of the split: a prompt, whatever its answer, "
        "and a passage, whatever is asked about it; or only a whole row",
    )
    seed: int = Field(42, ge=0, description="of the split, and of draws under a cap")
    strip_markers: bool = Field(
        True,
        description="remove chat markers and special tokens that are written in the rows; nothing "
        "else of a text changes",
    )
    minimum_characters: int = Field(
        10,
        ge=0,
        description="rows of a published format with a shorter prompt or answer are dropped; in "
        "the forms text, prompt_completion and chat nothing but emptiness is",
    )
    answer_characters: int | None = Field(
        2000,
        ge=1,
        description="longer answers lose their end (not: text and chat rows); runs of blank space "
        "count once; none: answers stay whole",
    )
    template: Template = Field(
        "chat", description="chat: the tokenizer's own; alpaca: instruction, input, response"
    )
    mask_prompt: bool | None = Field(
        None,
        description="true: the loss counts answers only; false: every token. Default: answers "
        "only. Rows of plain text always count whole.",
    )
    thinking: Thinking = "auto"
    allow_special: AllowSpecial = False
    decontaminate: Decontaminate = Field(
        "off",
        description="move rows that read like another trained domain (code, medical, math) to "
        "it, by keywords as whole words or as substrings",
    )

    def rendered_as(self, run: Any) -> Self:
        """With the `thinking` and `allow_special` of a run's settings where none are said here."""
        names = sorted({"thinking", "allow_special"} - self.model_fields_set)
        return self.model_copy(update={name: getattr(run, name) for name in names})

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.template == "alpaca" and any(s.format == "chat" for s in self.sources):
            raise ValueError(
                "template alpaca holds one question and answer, format chat a whole conversation; "
                "use format messages (the first pair) or template chat"
            )
        return self


class TrainDataSettings(DomainDataSettings):
    """The data of `mlxstacks train`. As in mlx-lm, rows stay as they are written, long or short."""

    strip_markers: bool = Field(
        False, description="remove chat markers and special tokens that are written in the rows"
    )
    minimum_characters: int = Field(
        0,
        ge=0,
        description="rows of a published format with a shorter prompt or answer are dropped, as by "
        "stack; none of the forms text, prompt_completion and chat",
    )
    answer_characters: int | None = Field(
        None, ge=1, description="longer answers lose their end, as in stack; none: they stay whole"
    )
