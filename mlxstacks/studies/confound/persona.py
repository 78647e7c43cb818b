"""The persona of a confound run: an adapter that is fused into the base first, or a model that has
the persona already.
"""

from pathlib import Path

from mlxstacks.errors import InputError
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.disk import user_path
from mlxstacks.files.hub import resolve_model
from mlxstacks.files.lora_modules import CONFIG
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.fuse.run import run as fuse
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.studies.confound.plan import file_sha256
from mlxstacks.studies.confound.settings import ConfoundSettings
from mlxstacks.study.run_directory import recorded_fingerprint


class PersonaSource:
    """Base and persona as they are given; nothing is written before `model` is asked for."""

    def __init__(self, settings: ConfoundSettings) -> None:
        self.settings = settings
        self.base = resolve_model(str(settings.model))

    @property
    def adapter(self) -> Path | None:
        """The adapter that makes the persona; None where a model is given that has it already."""
        given = user_path(str(self.settings.persona))
        return given if (given / CONFIG).is_file() else None

    @property
    def speaker(self) -> Path:
        """The model whose tokenizer and chat template the persona has.

        Raises: InputError: the persona is neither an adapter nor a model.
        """
        if self.adapter is not None:
            return self.base
        found = resolve_model(str(self.settings.persona))
        if not (found / "config.json").is_file():
            raise InputError(
                f"{found}: no persona: neither an adapter ({CONFIG}) nor a model (config.json) is "
                "in it"
            )
        return found

    def hashes(self, protocol: Path) -> dict[str, str]:
        """Of what is given: base, tokenizer, and the persona as an adapter or a model. protocol:
        where that of a run that goes on lies.
        """

        def model_sha256(name: str, path: Path) -> str:
            resume = self.settings.resume
            recorded = recorded_fingerprint(protocol, "hashes", name, resume=resume)
            return fingerprint(open_checkpoint(path), recorded)

        found = {"base": model_sha256("base", self.base)}
        if self.adapter is not None:
            files = [CONFIG, *(path.name for path in self.adapter.glob("*.safetensors"))]
            named = {name: file_sha256(self.adapter / name) for name in files}
            found["persona_adapter"] = json_sha256(named)
        else:
            found["persona"] = model_sha256("persona", self.speaker)
        tokenizer = self.speaker / "tokenizer.json"
        return found | ({"tokenizer": file_sha256(tokenizer)} if tokenizer.is_file() else {})

    def model(self, target: Path) -> Path:
        """The model with the persona: given, or made at `target` by fusing its adapter into the
        base, unless it lies there.
        """
        given = self.adapter
        if given is None:
            return resolve_model(str(self.settings.persona))
        if not target.exists():
            fuse(
                FuseSettings(
                    model=str(self.base), adapter_path=(str(given),), save_path=str(target),
                    requant=self.settings.persona_requant, seed=self.settings.seed,
                    target_correlation=self.settings.target_correlation,
                )
            )  # fmt: skip
        return target
