"""Where the folders `kernels` and `recipes` are: next to the package, or inside it in a wheel."""

from pathlib import Path

NAMES = ("kernels", "recipes")


def resource_dir(name: str) -> Path:
    """The folder of a top-level resource, whether the package is installed or run from a clone.

    Raises:
        ValueError: `name` is not one of NAMES.
        FileNotFoundError: the installation is damaged: neither place exists.
    """
    if name not in NAMES:
        raise ValueError(f"resource {name!r}: allowed are {', '.join(NAMES)}")
    package = Path(__file__).resolve().parent
    places = (package / f"_{name}", package.parent / name)
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(
        f"{name}/ is at neither {places[0]} nor {places[1]}: install mlxstacks again"
    )
