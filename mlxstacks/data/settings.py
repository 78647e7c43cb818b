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
    "pubmedqa", "preference", "prompt", "fallback",
]  # fmt: skip
Template = Literal["chat", "alpaca"]
Decontaminate = Literal["off", "words", "substrings"]


class SourceSettings(Settings):
    """One source of rows: a file or directory here, or a Hugging Face data set."""

    path: str | None = Field(
        None,
        description="JSONL file, JSON array, parquet file, directory of parquet files, "
        "directory written by datasets' save_to_disk, .csv file, or .txt file, whose paragraphs "
        "make rows of about 1,000 characters",
    )
    dataset: str | None = Field(
        None, description="id of a Hugging Face data set, read from the cache"
    )
    download: bool = Field(
        False, description="download the needed files of a data set that is not in the cache"
    )
    name: str | None = Field(None, description="configuration of the Hugging Face data set")
    split: str = Field("train", description="split to read, if there are several")
    files: str | None = Field(
        None, description="pattern of files to download instead of the split's own"
    )
    fields: dict[str, str | list[str]] = Field(
        {},
        description="maps a key of the format to the column that holds it, or to columns whose "
        "values form a list; other columns are ignored. Default: columns are named like keys",
    )
    format: FormatName = Field("auto", description="row format; auto: detect it from the keys")
    filter: Literal["code"] | None = Field(
        None, description="code: keep only rows that contain signs of program code"
    )
    cap: int | None = Field(
        None, ge=1, description="maximum rows, drawn from the first 2 x cap rows"
    )
    seed: int | None = Field(
        None, ge=0, description="seed for the draw under a cap; default: the domain's seed"
    )
    part: Literal["train", "validation"] | None = Field(
        None,
        description="use these rows only to train on, or only as candidates for validation; "
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
        description="where the rows come from: sources, plain paths, or mix:NAME for published "
        "data of that name",
    )
    validation_fraction: float = Field(
        0.02, gt=0, lt=1, description="share of rows held out for validation, by content hash"
    )
    validation_rows: int | None = Field(
        None, ge=1, description="number of validation rows, instead of a share"
    )
    split_by: Literal["prompt", "row"] = Field(
        "prompt",
        description="what must not be on both sides of the split: prompt (a prompt with any "
        "answer, a passage with any question), or row (only a whole row)",
    )
    seed: int = Field(42, ge=0, description="seed for the split and for draws under a cap")
    strip_markers: bool = Field(
        True,
        description="remove chat markers and special tokens written in the rows; other text does "
        "not change",
    )
    minimum_characters: int = Field(
        10,
        ge=0,
        description="drop rows of published formats with a shorter prompt or answer; of formats "
        "text, prompt_completion and chat, drop only empty rows",
    )
    answer_characters: int | None = Field(
        2000,
        ge=1,
        description="truncate longer answers (not in text and chat rows), counting a run of "
        "whitespace once; none: no limit",
    )
    template: Template = Field(
        "chat", description="chat: the tokenizer's own; alpaca: instruction, input, response"
    )
    mask_prompt: bool | None = Field(
        None,
        description="true: compute the loss on answers only; false: on every token. Default: "
        "answers only. Plain text always counts in full.",
    )
    thinking: Thinking = "auto"
    allow_special: AllowSpecial = False
    decontaminate: Decontaminate = Field(
        "off",
        description="move rows that read like another trained domain (code, medical, math) to it; "
        "match keywords as whole words or as substrings",
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


# A plain path, or several, stand for data of these sources.
DomainData = Annotated[
    DomainDataSettings,
    BeforeValidator(
        lambda value: {"sources": value} if isinstance(value, str | list | tuple) else value,
        json_schema_input_type=DomainDataSettings | str | list[str],
    ),
]


class TrainDataSettings(DomainDataSettings):
    """The data of `mlxstacks train`. As in mlx-lm, rows stay as they are written, long or short."""

    strip_markers: bool = Field(
        False, description="remove chat markers and special tokens written in the rows"
    )
    minimum_characters: int = Field(
        0,
        ge=0,
        description="drop rows of published formats with a shorter prompt or answer, as stack "
        "does; never of formats text, prompt_completion and chat",
    )
    answer_characters: int | None = Field(
        None, ge=1, description="truncate longer answers, as stack does; none: no limit"
    )
