"""What of nano a command gets where its store or its model is nano's: studies know no nano.

Each takes the settings of its command and whether they are only planned, and returns the settings
to run and further arguments of the command's function. See `Command.prepare`.
"""

from pathlib import Path
from typing import Any

Prepared = tuple[Any, dict[str, Any]]


def _holds_its_domains(store_path: str) -> bool:
    """Whether nano's data has rows of each domain of a store; others bring their own."""
    from mlxstacks.files.store import Store
    from mlxstacks.nano.exports import nano_paths

    rows = {path.stem for path in nano_paths().routing_path.glob("*.jsonl")}
    return {domain.name for domain in Store.open(store_path).manifest.domains} <= rows


def route(settings: Any, dry_run: bool = False) -> Prepared:
    """nano's model for a store whose base is nano, where no model is named; and nano's routing data
    and its held-out domain, where the command reads such and none are given.
    """
    from mlxstacks.data.settings import SourceSettings
    from mlxstacks.files.store import Store
    from mlxstacks.nano.exports import nano_model, nano_paths
    from mlxstacks.nano.settings import HELD_OUT, HELD_OUT_DIRECTORY

    values = vars(settings)
    model = None if values["model"] else nano_model(values["store_path"])
    if model is None:
        return settings, {}
    update: dict[str, Any] = {"model": str(model)}
    is_read = "sources" in values and not (values["data"] or values["sources"])
    if is_read and _holds_its_domains(settings.store_path):
        update["data"] = str(nano_paths().routing_path)
        if "unseen" in values and not values["unseen"]:
            trained = Store.open(values["store_path"]).manifest.domain_named(HELD_OUT)
            file = nano_paths().curriculum_path / HELD_OUT_DIRECTORY / f"{HELD_OUT}.jsonl"
            update["unseen"] = () if trained else (SourceSettings(path=str(file)),)
    return settings.model_copy(update=update), {}


def route_train(settings: Any, dry_run: bool = False) -> Prepared:
    """As `route`; nano's own store, which lies in the package, is read and not changed."""
    from mlxstacks.files.disk import user_path
    from mlxstacks.nano.exports import ASSETS

    options = {}
    if settings.store_path and settings.install:
        store = Path(user_path(settings.store_path)).resolve()
        if store.is_relative_to(ASSETS.resolve()):
            settings = settings.model_copy(update={"install": False})
            note = "nano's own store is not changed; the router is in the save path alone."
            options = {"notes": (note,)}
    return route(settings)[0], options


def distill(settings: Any, dry_run: bool = False) -> Prepared:
    """Of a store of nano's: nano as the teacher and, unless another is named, as the student; and
    its routing data where none are given.
    """
    from mlxstacks.nano.exports import nano_model, nano_paths

    model = nano_model(settings.store_path)
    if model is None:
        return settings, {}
    given = {"model": settings.model or str(model), "teacher": settings.teacher or str(model)}
    if not settings.data and _holds_its_domains(settings.store_path):
        given["data"] = str(nano_paths().routing_path)
    return settings.model_copy(update=given), {}


def grow(settings: Any, dry_run: bool = False) -> Prepared:
    """Of a store of nano's: nano, its routing data and curriculum where no others are given."""
    from mlxstacks.nano.exports import nano_model, nano_paths

    model = None if settings.model else nano_model(settings.store_path)
    if model is None:
        return settings, {}
    given = {"model": str(model)}
    if _holds_its_domains(settings.store_path):
        given["routing_data"] = settings.routing_data or str(nano_paths().routing_path)
        given["stored_data"] = settings.stored_data or str(nano_paths().curriculum_path)
    return settings.model_copy(update=given), {}


def stacks_analyse(settings: Any, dry_run: bool = False) -> Prepared:
    """nano and its curriculum stand in where the store was trained on them."""
    from mlxstacks.nano.exports import nano_model, nano_paths

    unsaid = settings.store_path and not (settings.model or settings.weights_only or dry_run)
    model = nano_model(settings.store_path) if unsaid else None
    if model is None:
        return settings, {}
    update = {"model": str(model)}
    if not settings.data and _holds_its_domains(settings.store_path):
        update["data"] = str(nano_paths().curriculum_path)
    return settings.model_copy(update=update), {}


def sweep(settings: Any, dry_run: bool = False) -> Prepared:
    """nano is exported at whatever widths are needed; a model of one's own has {bits} in its name
    wherever there are bits.
    """
    from mlxstacks.nano.exports import nano_paths

    if not settings.bits or settings.model != str(nano_paths().model_path):
        return settings, {}
    return settings, {"base_at": lambda bits: str(nano_paths(bits).model_path)}
