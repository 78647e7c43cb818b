"""Tables of a store's geometry: spectra of its stacks, cosines between its domains.

Directions come from the weights alone (what a domain's stacks can write) and from data (what they
do write on the domain's own rows, one mean row a prompt, not centred, as protected directions are
made).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import numpy as np

from mlxstacks.layers.nullspace import right_singular_vectors
from mlxstacks.layers.packed import FrozenStack
from mlxstacks.stats import mean_interval
from mlxstacks.studies.stack.geometry import (
    Cosine,
    Spectrum,
    blocks_of,
    by_name,
    cosines,
    leading,
    mean_spectrum,
    projection_name,
    spectrum_of,
)

# A published figure names the 16th singular value of stacks of rank 16.
NAMED_VALUE = 16

# Path -> the leading output directions there, (N, k).
Directions = dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class DomainWeights:
    """spectra: stack -> path -> its spectrum, without vectors. directions: of all of the domain's
    stacks together.
    """

    spectra: dict[str, dict[str, Spectrum]]
    directions: Directions


def weights_of(
    stacks: Mapping[str, Mapping[str, FrozenStack]], k: int, seed: int = 0
) -> DomainWeights:
    """Spectra and k leading directions of a domain's stacks (name -> path -> part)."""
    spectra: dict[str, dict[str, Spectrum]] = {}
    directions: Directions = {}
    for path in dict.fromkeys(path for parts in stacks.values() for path in parts):
        blocks = {name: blocks_of(parts[path]) for name, parts in stacks.items() if path in parts}
        found = {name: spectrum_of(of_stack, seed) for name, of_stack in blocks.items()}
        together = next(iter(found.values()))
        if len(found) > 1:
            together = spectrum_of([b for of_stack in blocks.values() for b in of_stack], seed)
        directions[path] = leading(together, k)
        for name, spectrum in found.items():
            spectra.setdefault(name, {})[path] = replace(spectrum, vectors=spectrum.vectors[:, :0])
    return DomainWeights(spectra, directions)


def data_directions(
    deltas: Mapping[str, Mapping[str, np.ndarray]], k: int
) -> tuple[dict[str, Directions], dict[str, dict[str, float]]]:
    """From delta rows (path -> domain -> (n, N)): domain -> path -> the k leading directions, and
    domain -> path -> the share of the rows' energy that lies in them (absent where all is zero).
    """
    directions: dict[str, Directions] = {}
    shares: dict[str, dict[str, float]] = {}
    for path, by_domain in deltas.items():
        for domain, rows in by_domain.items():
            data = rows.astype(np.float64)
            # Asked for all of them it is exact: prompts are few.
            vectors, values = right_singular_vectors(data, len(data))
            directions.setdefault(domain, {})[path] = vectors[:, :k]
            energy = float(np.sum(data**2))
            if energy > 0:
                shares.setdefault(domain, {})[path] = float(np.sum(values[:k] ** 2)) / energy
    return directions, shares


def cosines_json(directions: Mapping[str, Directions], k: int) -> dict[str, Any]:
    """The published table, with chance beside it: for each pair of domains the mean over all
    projections of the largest cosine between their k leading directions.
    """
    paths = dict.fromkeys(path for of_domain in directions.values() for path in of_domain)
    found = cosines({
        path: {d: of_domain[path] for d, of_domain in directions.items() if path in of_domain}
        for path in paths
    })  # fmt: skip
    names = list(directions)
    return {
        "directions": k,
        "matrix": _square(found, names, "largest", diagonal=1.0),
        "chance": _square(found, names, "chance", diagonal=None),
        "subspace": _square(found, names, "subspace", diagonal=1.0),
        **_means(found),
        "by_projection": {
            name: _means([c for c in found if projection_name(c.path) == name])
            for name in by_name(c.path for c in found)
        },
    }


def _means(found: Sequence[Cosine]) -> dict[str, Any]:
    """Over pairs and projections; None without any."""
    if not found:
        return {"pairs": 0, "mean": None, "lowest": None, "highest": None, "mean_chance": None}
    largest = [c.largest for c in found]
    return {
        "pairs": len(found),
        "mean": fmean(largest),
        "lowest": min(largest),
        "highest": max(largest),
        "mean_chance": fmean(c.chance for c in found),
    }


def _square(
    found: Sequence[Cosine], names: Sequence[str], what: str, diagonal: float | None
) -> dict[str, dict[str, float | None]]:
    """Domain -> domain -> mean over projections; None for a pair that shares no projection."""
    table: dict[str, dict[str, float | None]] = {a: dict.fromkeys(names) for a in names}
    for a in names:
        table[a][a] = diagonal
        for b in names:
            values = [getattr(c, what) for c in found if set(c.domains) == {a, b}]
            if a != b and values:
                table[a][b] = fmean(values)
    return table


def spectra_json(
    spectra: Mapping[str, Mapping[str, Spectrum]], domains: Mapping[str, str]
) -> dict[str, Any]:
    """Stack -> its spectra by projection, means over the layers; values are over the largest.

    domains: of each stack.
    """
    return {
        name: {"domain": domains[name], **_stack_spectra(by_path)}
        for name, by_path in spectra.items()
    }


def _stack_spectra(by_path: Mapping[str, Spectrum]) -> dict[str, Any]:
    every = list(by_path.values())
    return {
        "norm": sum(s.energy for s in every) ** 0.5,
        **_ranks(every),
        "by_projection": {
            name: {
                "layers": len(paths),
                "values": mean_spectrum(by_path[path] for path in paths),
                **_ranks([by_path[path] for path in paths]),
            }
            for name, paths in by_name(by_path).items()
        },
    }


def _ranks(spectra: Sequence[Spectrum]) -> dict[str, Any]:
    """Means over projections, with the spread over them as an interval."""
    named = [
        float(s.normalised()[NAMED_VALUE - 1])
        for s in spectra
        if len(s.normalised()) >= NAMED_VALUE
    ]
    return {
        "effective_rank": _interval(s.effective_rank() for s in spectra),
        "stable_rank": _interval(s.stable_rank() for s in spectra),
        f"value_{NAMED_VALUE}": _interval(named),
    }


def _interval(values: Iterable[float | None]) -> dict[str, Any] | None:
    known = [value for value in values if value is not None]
    return mean_interval(known).as_json() if known else None


def shares_json(shares: Mapping[str, Mapping[str, float]], k: int) -> dict[str, Any]:
    """Domain -> share of its delta rows' energy in its k leading directions, over projections."""
    return {
        domain: {"directions": k, "energy_share": _interval(by_path.values())}
        for domain, by_path in shares.items()
    }
