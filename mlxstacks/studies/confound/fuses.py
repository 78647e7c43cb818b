"""One policy's three fuses: the adapter, its zero-delta control, a random delta of equal norm.

All go through the same code with the adapter's own decisions, so that nothing but the delta
differs between them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlxstacks.files.checkpoint import open_checkpoint
from mlxstacks.files.shards import read_tensor
from mlxstacks.files.stored_weight import stored_weight
from mlxstacks.fuse.report import FuseReport
from mlxstacks.fuse.run import run as fuse
from mlxstacks.fuse.settings import FuseSettings, PolicyName
from mlxstacks.ops.affine import unpack

KINDS = ("a1", "a0", "random")


@dataclass(frozen=True)
class FusePlaces:
    """What is fused into what, and where the results go: `directory`/KIND."""

    model: Path
    trained: Path
    random: Path
    directory: Path

    def of(self, kind: str) -> Path:
        return self.directory / kind


def fuse_all(
    places: FusePlaces, policy: PolicyName, target_correlation: float, seed: int
) -> dict[str, Any]:
    """Fuse the three, those that are not there yet; returns the figures of each, and how many
    codes differ between them. Figures are as in a fuse's result.
    """
    common: dict[str, Any] = {
        "model": str(places.model), "requant": policy, "seed": seed,
        "target_correlation": target_correlation, "force": True,
    }  # fmt: skip
    trained = {**common, "adapter_path": (str(places.trained),)}
    a1 = fuse(FuseSettings(save_path=str(places.of("a1")), **trained))
    a0 = fuse(FuseSettings(save_path=str(places.of("a0")), zero_delta=True, **trained))
    # Promotion chooses bits by the delta; the random one gets those of the adapter.
    random = fuse(
        FuseSettings(
            save_path=str(places.of("random")), adapter_path=(str(places.random),),
            bits=_bits(a1) if policy in ("auto", "promote") else (), **common,
        )
    )  # fmt: skip
    after = {module.path: module.bits_after for module in a1.stages[-1].modules}
    codes = {
        "a1_and_a0": codes_that_differ(places.of("a1"), places.of("a0"), after),
        "a0_and_unfused": codes_that_differ(places.of("a0"), places.model, after),
    }
    figures = {kind: _figures(r) for kind, r in zip(KINDS, (a1, a0, random), strict=True)}
    return {**figures, "codes_that_differ": codes}


def _bits(report: FuseReport) -> tuple[str, ...]:
    return tuple(
        f"{module.path}={module.bits_after}"
        for module in report.stages[-1].modules
        if module.bits_after is not None
        and (report.settings["requant"] == "auto" or module.bits_after != module.bits_before)
    )


def _figures(report: FuseReport) -> dict[str, Any]:
    modules = report.stages[-1].modules
    return {
        "total": report.total.as_json() if report.total else None,
        "by_module": {m.path: m.fidelity.as_json() for m in modules if m.fidelity},
        "policies": {m.path: m.policy for m in modules},
        "bits": {m.path: m.bits_after for m in modules},
        "extra_bytes": report.extra_bytes,
        "verdict": report.verdict,
    }


def codes_that_differ(first: Path, second: Path, bits: Mapping[str, int | None]) -> float | None:
    """Share of the packed codes (plain weights: of the numbers) of some modules that differ.

    bits: module path -> its bits in `first`, None where it is plain. The result is None where a
    module lies at other bits in `second`: codes of two grids do not compare.
    """
    one, two = open_checkpoint(first), open_checkpoint(second)
    different = count = 0
    for module, width in bits.items():
        a, b = (stored_weight(checkpoint, module).weight for checkpoint in (one, two))
        if (a.dtype, a.shape) != (b.dtype, b.shape):
            return None
        raw = read_tensor(a), read_tensor(b)
        codes = raw if width is None else tuple(unpack(packed, width) for packed in raw)
        different += int(np.count_nonzero(codes[0] != codes[1]))
        count += codes[0].size
    return different / count
