"""The models of an identity run: a condition under a policy, fused when it is first asked for.

A model of a second adapter is fused from the persona's model of the same policy. What a fuse did to
the weights is kept when its model goes.
"""

from pathlib import Path
from typing import Any

from mlxstacks.files.adapter_commands import convert_adapter
from mlxstacks.files.adapters import WEIGHTS
from mlxstacks.files.settings import AdapterConvertSettings
from mlxstacks.files.strict_json import read_object
from mlxstacks.fuse.run import run as fuse
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.studies.identity.conditions import (
    BASE,
    CONDITIONS,
    PERSONA,
    REFERENCE,
    arm,
)
from mlxstacks.studies.identity.settings import IdentitySettings
from mlxstacks.study.document import RESULT
from mlxstacks.study.integrity import read_sealed, write_sealed
from mlxstacks.study.provenance import MadeFrom, of_bytes
from mlxstacks.study.run_directory import discard

_KEPT_FIGURES = ("total", "extra_bytes", "verdict", "zero_delta")


class Models:
    """Under `work`: models/ARM, fuse/ARM.json, and the adapters by their names.

    persona: the adapter's directory, or the model that has the persona already.
    """

    def __init__(
        self, settings: IdentitySettings, work: Path, base: Path, persona: Path, has_adapter: bool
    ) -> None:
        self.settings, self.work, self.base = settings, work, base
        self.persona, self.has_adapter = persona, has_adapter

    def adapter(self, name: str) -> Path:
        """persona, factual or factual_second. A PEFT persona is written in mlx-lm's format first,
        the only one that can run beside the base.
        """
        if name != PERSONA or (self.persona / WEIGHTS).is_file():
            return self.persona if name == PERSONA else self.work / name
        converted = self.work / "persona_mlx"
        if not converted.exists():
            convert_adapter(
                AdapterConvertSettings(
                    adapter_path=str(self.persona), save_path=str(converted), to="mlx",
                    model=str(self.base),
                )
            )  # fmt: skip
        return converted

    def model(self, kind: str, policy: str) -> Path:
        """The model of a condition, fused now if it is not there."""
        condition, name = CONDITIONS[kind], arm(kind, policy)
        if kind == REFERENCE and not self.has_adapter:
            return self.persona
        target = self.work / "models" / name
        if not target.exists():
            onto_base = condition.source == BASE
            target.parent.mkdir(exist_ok=True)
            fuse(
                FuseSettings(
                    model=str(self.base if onto_base else self.model(REFERENCE, policy)),
                    adapter_path=(str(self.adapter(condition.adapter)),),
                    save_path=str(target),
                    requant=policy,
                    zero_delta=condition.zero,
                    target_correlation=self.settings.target_correlation,
                    # The conditions are fuses onto other models than the adapters were trained on.
                    allow_base=condition.adapter != PERSONA or not onto_base,
                    seed=self.settings.seed,
                )
            )
        self._keep_figures(target, name)
        return target

    def drop(self, kind: str, policy: str) -> None:
        """Remove a model that has answered, unless models are kept."""
        if not self.settings.keep_models:
            discard(self.work / "models" / arm(kind, policy))

    def figures(self) -> tuple[dict[str, dict[str, Any]], MadeFrom]:
        """Arm -> correlation and artifact of its last fuse, as its result has them; and the
        files that they are from. Raises: InputError for one that was changed.
        """
        figures: dict[str, dict[str, Any]] = {}
        made_from: MadeFrom = {}
        for file in sorted((self.work / "fuse").glob("*.json")):
            # Its model may be gone, and with it what it could be made from again.
            figures[file.stem], data = read_sealed(file, "--no-resume starts anew")
            made_from[f"fuse/{file.name}"] = of_bytes(data)
        return figures, made_from

    def _keep_figures(self, model: Path, name: str) -> None:
        path = self.work / "fuse" / f"{name}.json"
        if not path.is_file():
            result = read_object((model / RESULT).read_bytes())
            figures = result["data"] | {"verdict": result["verdict"]}
            write_sealed(path, {key: figures[key] for key in _KEPT_FIGURES})
