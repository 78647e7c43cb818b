"""Where frozen stacks write: spectra of their deltas, and angles between domains.

What a stack can write is the matrix M of layers/spectrum.py.

The tables at the end are of directions from the weights alone (what a domain's stacks can write)
and from data (what they do write on the domain's own rows, one mean row a prompt, not centred, as
protected directions are made).

Letters: N output dims, K input dims, k directions. All of it is NumPy in float64.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import fmean
from typing import Any

import numpy as np

from mlxstacks.errors import InputError
from mlxstacks.layers.nullspace import right_singular_vectors
from mlxstacks.layers.packed import FrozenStack
from mlxstacks.layers.spectrum import Block, Spectrum, blocks_of, spectrum_of
from mlxstacks.stats import mean_interval

# A published figure names the 16th singular value of stacks of rank 16.
NAMED_VALUE = 16

# Path -> the leading output directions there, (N, k).
Directions = dict[str, np.ndarray]

CHANCE_DRAWS = 64


def leading(spectrum: Spectrum, k: int) -> np.ndarray:
    """The k leading output directions (N, k'); fewer where the delta has fewer."""
    return spectrum.vectors[:, : min(k, int(np.sum(spectrum.normalised() > 1e-6)))]


@dataclass(frozen=True)
class Cosine:
    """Two domains at one projection.

    largest: the largest |cosine| between a direction of one and a direction of the other, as in the
    published table. subspace: the cosine of the smallest angle between the spans. chance: what
    `largest` is on average for random directions.
    """

    path: str
    domains: tuple[str, str]
    largest: float
    subspace: float
    chance: float


def cosines(directions: Mapping[str, Mapping[str, np.ndarray]]) -> list[Cosine]:
    """Every pair of domains at every path. directions: path -> domain -> (N, k) orthonormal.

    A domain without any direction at a path is left out there.
    """
    pairs = []
    for path, by_domain in directions.items():
        names = [name for name, vectors in by_domain.items() if vectors.shape[1]]
        for index, first in enumerate(names):
            for second in names[index + 1 :]:
                a, b = by_domain[first], by_domain[second]
                between = a.T @ b
                pairs.append(Cosine(
                    path, (first, second), float(np.abs(between).max()),
                    min(1.0, float(np.linalg.svd(between, compute_uv=False)[0])),
                    chance_cosine(a.shape[0], a.shape[1], b.shape[1]),
                ))  # fmt: skip
    return pairs


@lru_cache(maxsize=256)
def chance_cosine(width: int, first: int, second: int) -> float:
    """Mean of the largest |cosine| between random orthonormal frames of `first` and `second`
    directions in `width` dims.

    One frame may stand still: then the cosines are the first rows of the other.
    """
    rng = np.random.default_rng(width * 65537 + first * 257 + second)
    largest = []
    for _ in range(CHANCE_DRAWS):
        frame, _ = np.linalg.qr(rng.standard_normal((width, second)))
        largest.append(np.abs(frame[:first]).max())
    return float(np.mean(largest))


def projection_name(path: str) -> str:
    """`model.layers.3.self_attn.q_proj` -> `self_attn.q_proj`: the same in every layer."""
    match = re.search(r"(?:^|\.)layers\.\d+\.(.+)$", path)
    return match[1] if match else path


def by_name(paths: Iterable[str]) -> dict[str, list[str]]:
    """Name inside a layer -> its paths, in the order they come."""
    groups: dict[str, list[str]] = {}
    for path in paths:
        groups.setdefault(projection_name(path), []).append(path)
    return groups


def mean_spectrum(spectra: Iterable[Spectrum]) -> list[float]:
    """Mean of normalised spectra, as far as all of them reach; those of zero deltas left out."""
    normalised = [s.normalised() for s in spectra if s.energy > 0]
    if not normalised:
        return []
    shortest = min(len(values) for values in normalised)
    return [float(v) for v in np.mean([values[:shortest] for values in normalised], axis=0)]


def energy_inside(blocks: Sequence[Block], vectors: np.ndarray) -> float | None:
    """Share of the energy of M that lies in the span of vectors (N, k), orthonormal; None of 0."""
    inside = whole = 0.0
    for left, right in blocks:
        gram = right @ right.T  # (R, R)
        turned = vectors.T @ left  # (k, R)
        inside += float(np.sum((turned @ gram) * turned))
        whole += float(np.sum((left @ gram) * left))
    return inside / whole if whole > 0 else None


def overlaps(
    stacks: Mapping[str, Sequence[FrozenStack]], domain: str, k: int
) -> dict[str, dict[str, float]]:
    """Earlier domain -> share: of what the stacks of `domain` can write, so much lies in the k
    leading directions of the earlier one's, mean over projections; chance: of random directions.

    stacks: path -> all that are served there.
    """
    found: dict[str, list[tuple[float, float]]] = {}
    for of_path in stacks.values():
        blocks: dict[str, list[Block]] = {}
        for stack in of_path:
            blocks.setdefault(stack.id.domain, []).extend(blocks_of(stack))
        own = blocks.pop(domain, [])
        for name, earlier in blocks.items() if own else ():
            vectors = leading(spectrum_of(earlier), k)
            share = energy_inside(own, vectors)
            if share is not None:
                found.setdefault(name, []).append((share, vectors.shape[1] / vectors.shape[0]))
    return {
        name: {"share": fmean(s for s, _ in pairs), "chance": fmean(c for _, c in pairs)}
        for name, pairs in found.items()
    }


# --- tables ---------------------------------------------------------------------------------------


def weights_of(
    stacks: Mapping[str, Mapping[str, FrozenStack]], k: int, seed: int = 0
) -> tuple[dict[str, dict[str, Spectrum]], Directions]:
    """(stack -> path -> its spectrum, without vectors; path -> the k leading directions of all
    stacks together) of a domain's stacks, name -> path -> part.
    """
    spectra: dict[str, dict[str, Spectrum]] = {}
    directions: Directions = {}
    for path in dict.fromkeys(path for parts in stacks.values() for path in parts):
        blocks = {name: blocks_of(parts[path]) for name, parts in stacks.items() if path in parts}
        by_stack = {name: spectrum_of(of_stack, seed) for name, of_stack in blocks.items()}
        together = next(iter(by_stack.values()))
        if len(by_stack) > 1:
            together = spectrum_of([b for of_stack in blocks.values() for b in of_stack], seed)
        directions[path] = leading(together, k)
        for name, spectrum in by_stack.items():
            spectra.setdefault(name, {})[path] = replace(spectrum, vectors=spectrum.vectors[:, :0])
    return spectra, directions


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
    pairs = cosines({
        path: {d: of_domain[path] for d, of_domain in directions.items() if path in of_domain}
        for path in paths
    })  # fmt: skip
    names = list(directions)
    return {
        "directions": k,
        "matrix": _square(pairs, names, "largest", diagonal=1.0),
        "chance": _square(pairs, names, "chance", diagonal=None),
        "subspace": _square(pairs, names, "subspace", diagonal=1.0),
        **_means(pairs),
        "by_projection": {
            name: _means([c for c in pairs if projection_name(c.path) == name])
            for name in by_name(c.path for c in pairs)
        },
    }


def path_at(paths: Iterable[str], layer: int, projection: str) -> str:
    """The one path of a projection, given by a suffix, in a layer.

    Raises: InputError: none, or several.
    """
    there = [path for path in paths if re.search(rf"(?:^|\.)layers\.{layer}\.", path)]
    found = [path for path in there if f".{path}".endswith(f".{projection}")]
    if len(found) != 1:
        names = ", ".join(sorted(by_name(found or there))) or "none"
        raise InputError(
            f"layer {layer}: {'several' if found else 'no'} projections named {projection} with "
            f"stacks; there are: {names}"
        )
    return found[0]


def plane_json(directions: Mapping[str, Directions], path: str) -> dict[str, Any]:
    """The plane that holds most of the squared lengths of domains' directions at a path.

    points: of each domain, where its directions lie there, the strongest first; a direction has no
    sign, so x is not negative. inside: the share of all squared lengths in the plane;
    inside_chance: that of as many random directions, on average.
    """
    there = {d: of[path] for d, of in directions.items() if path in of and of[path].shape[1]}
    if not there:
        return {"points": {}, "inside": None, "inside_chance": None}
    frames = list(there.values())
    rng = np.random.default_rng(0)
    plane, inside = _plane(frames)
    chance = [
        _plane([np.linalg.qr(rng.standard_normal(frame.shape))[0] for frame in frames])[1]
        for _ in range(CHANCE_DRAWS)
    ]
    points = {domain: frame.T @ plane for domain, frame in there.items()}
    return {
        "points": {d: np.where(p[:, :1] < 0, -p, p).tolist() for d, p in points.items()},
        "inside": inside,
        "inside_chance": fmean(chance),
    }


def _plane(frames: Sequence[np.ndarray]) -> tuple[np.ndarray, float]:
    rows = np.concatenate(frames, axis=1).T
    vectors, values = right_singular_vectors(rows, len(rows))
    plane = np.pad(vectors[:, :2], ((0, 0), (0, max(0, 2 - len(values)))))
    return plane, float(np.sum(values[:2] ** 2) / len(rows))


def _means(pairs: Sequence[Cosine]) -> dict[str, Any]:
    """Over pairs and projections; None without any."""
    if not pairs:
        return {"pairs": 0, "mean": None, "lowest": None, "highest": None, "mean_chance": None}
    largest = [c.largest for c in pairs]
    return {
        "pairs": len(pairs),
        "mean": fmean(largest),
        "lowest": min(largest),
        "highest": max(largest),
        "mean_chance": fmean(c.chance for c in pairs),
    }


def _square(
    pairs: Sequence[Cosine], names: Sequence[str], what: str, diagonal: float | None
) -> dict[str, dict[str, float | None]]:
    """Domain -> domain -> mean over projections; None for a pair that shares no projection."""
    table: dict[str, dict[str, float | None]] = {a: dict.fromkeys(names) for a in names}
    for a in names:
        table[a][a] = diagonal
        for b in names:
            values = [getattr(c, what) for c in pairs if set(c.domains) == {a, b}]
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
        name: {
            "domain": domains[name],
            "norm": sum(s.energy for s in by_path.values()) ** 0.5,
            **_ranks(list(by_path.values())),
            "by_projection": {
                projection: {
                    "layers": len(paths),
                    "values": mean_spectrum(by_path[path] for path in paths),
                    **_ranks([by_path[path] for path in paths]),
                }
                for projection, paths in by_name(by_path).items()
            },
        }
        for name, by_path in spectra.items()
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
