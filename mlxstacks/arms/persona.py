"""The persona of a study: an adapter to fuse into the base, or a model that has it already."""

from collections.abc import Callable
from pathlib import Path

from mlxstacks.errors import InputError
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.disk import user_path
from mlxstacks.files.hub import resolve_model
from mlxstacks.files.lora_modules import CONFIG
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.study.integrity import file_sha256


class Persona:
    """Base and persona as they are given. adapter: None where a model is given; speaker: the model
    whose tokenizer and chat template the persona has.

    Raises: InputError: the persona is neither an adapter nor a model.
    """

    def __init__(self, model: str, persona: str) -> None:
        self.base = resolve_model(model)
        given = user_path(persona)
        self.adapter: Path | None = given if is_adapter(given) else None
        self.speaker = self.base if self.adapter else resolve_model(persona)
        if not (self.speaker / "config.json").is_file():
            raise InputError(
                f"{self.speaker}: neither an adapter ({CONFIG}) nor a model (config.json) is in it"
            )

    def hashes(self, recorded: Callable[[str], str | None], key: str) -> dict[str, str]:
        """Of base, persona (under `key`) and tokenizer. recorded: what the plan of a run that is
        resumed says of the model of that name.
        """

        def model_sha256(path: Path, name: str) -> str:
            return fingerprint(open_checkpoint(path), recorded(name))

        hashes = {"base": model_sha256(self.base, "base")}
        if self.adapter:
            names = [CONFIG, *(path.name for path in self.adapter.glob("*.safetensors"))]
            hashes[key] = json_sha256({n: file_sha256(self.adapter / n) for n in names})
        else:
            hashes[key] = model_sha256(self.speaker, key)
        tokenizer = self.speaker / "tokenizer.json"
        return hashes | ({"tokenizer": file_sha256(tokenizer)} if tokenizer.is_file() else {})


def is_adapter(persona: Path) -> bool:
    return (persona / CONFIG).is_file()
