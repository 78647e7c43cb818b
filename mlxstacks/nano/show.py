"""`nano`: what the built-in model is and where it lies."""

import json
from dataclasses import dataclass
from typing import Any

from mlxstacks.nano.exports import ASSETS, NanoPaths, nano_paths
from mlxstacks.nano.settings import ShowSettings

MANIFEST = ASSETS / "manifest.json"


@dataclass(frozen=True, slots=True)
class NanoInfo:
    """Paths of the built-in model and the figures measured when it was built."""

    paths: NanoPaths
    manifest: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return {**self.paths.as_json(), "manifest": self.manifest}


def read_manifest() -> dict[str, Any]:
    """The manifest that ships with the model."""
    manifest: dict[str, Any] = json.loads(MANIFEST.read_text(encoding="utf-8"))
    return manifest


def show(settings: ShowSettings | None = None) -> NanoInfo:
    """Paths (the export is made in the cache when it is not there) and manifest."""
    bits = (settings or ShowSettings()).bits
    return NanoInfo(nano_paths(bits), read_manifest())
