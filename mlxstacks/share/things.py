"""What can be shared: adapters, stores and models, each known by its files and made of no others.

The same lists serve both ways. `push` copies the files of a thing and nothing that lies next to
them (optimizer states, logs, results, recipes); `pull` downloads them and nothing else. What is
neither safetensors nor text of a known name, as pickles and code, is on no list. The token is
found, and sent, by huggingface_hub alone.
"""

import json
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePath
from typing import Any, Literal

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

from mlxstacks.errors import CheckpointError, InputError, StoreError
from mlxstacks.files.adapters import WEIGHTS
from mlxstacks.files.checkpoint import open_checkpoint, read_json_object
from mlxstacks.files.lora_modules import CONFIG, open_weights, read_config
from mlxstacks.files.manifest import Manifest
from mlxstacks.files.peft_config import PEFT_WEIGHTS
from mlxstacks.files.settings import StacksVerifySettings
from mlxstacks.files.shards import read_header
from mlxstacks.files.store import base_name
from mlxstacks.files.store_files import MANIFEST
from mlxstacks.files.store_verify import verify_store
from mlxstacks.regular_files import check_regular

Kind = Literal["adapter", "store", "model"]

CARD = "README.md"
MODEL_CONFIG = "config.json"
MAX_FILES = 10_000
# Of the base, and the same in every copy of it; its texts may look like paths.
VOCABULARY = ("tokenizer.json", "vocab.json", "merges.txt")
_OF_A_MODEL = re.compile(
    r"(config|generation_config|tokenizer|tokenizer_config|special_tokens_map|added_tokens|vocab"
    r"|chat_template|(|image_|video_|pre)processor_config|model[\w.-]*\.safetensors\.index)\.json"
    r"|merges\.txt|chat_template\.jinja|[\w.-]+\.tiktoken|tokenizer\.model"
    r"|(?!\.|adapter|checkpoint|consolidated|optimizer)[\w.-]+\.safetensors",
    re.ASCII,
)
_BESIDE = re.compile(r"README\.md|(LICENSE|NOTICE)(\.md|\.txt)?")
# A text that is an absolute path as a whole, and one within other text: not behind a letter, a
# slash or a colon, as in `and/or` and URLs.
_PATH = re.compile(r"(~[\w.-]*/|/[^/\n]+/|file:/|[A-Za-z]:\\)[^\n]*")
_PATH_IN_TEXT = re.compile(r"(?<![\w.:/<~\\-])(?:~[\w.-]*|/[\w.@+-]+)(?:/[\w.@+-]+)+/?")


def kind_of(names: Collection[str], where: str) -> Kind:
    """What the files of a directory or repository are. names: paths below it.

    Raises: InputError naming what is there instead.
    """
    if MANIFEST in names and MODEL_CONFIG not in names:
        return "store"
    if CONFIG in names and not {WEIGHTS, PEFT_WEIGHTS}.isdisjoint(names):
        return "adapter"
    weights = any(re.fullmatch(r"model[\w.-]*\.safetensors", name) for name in names)
    if MODEL_CONFIG in names and weights:
        return "model"
    some = ", ".join(ascii(name)[1:-1][:80] for name in sorted(names)[:5]) or "nothing"
    raise InputError(
        f"{where}: neither an adapter, a store nor a model in safetensors: it holds {some}; "
        "pickles and code are not shared"
    )


def own_files(kind: Kind, names: Collection[str], manifest: Manifest | None = None) -> list[str]:
    """Which of the files of a directory or repository are the thing's, in order.

    manifest: a store's, whose files they are, there or not.
    """
    if manifest is not None:
        return sorted({MANIFEST, *(record.file for record in manifest.files())})
    own = _OF_A_MODEL
    if kind == "adapter":
        weights = WEIGHTS if WEIGHTS in names else PEFT_WEIGHTS
        own = re.compile(f"{re.escape(CONFIG)}|{re.escape(weights)}")
    return sorted(n for n in names if own.fullmatch(n) or _BESIDE.fullmatch(n))


def check_plain(directory: Path, names: Iterable[str]) -> None:
    """Raises: InputError naming a link, in place of a file or of its folder, or what is no file."""
    for name in names:
        for path in (directory / name, *(directory / name).parents):
            if path == directory:
                break
            if path.is_symlink():
                raise InputError(f"{path}: is a link; only plain files are shared")
        check_regular(directory / name)


def check_thing(kind: Kind, directory: Path, names: Iterable[str]) -> None:
    """Every file plain, every header and JSON whole, every hash of a store's manifest right.

    Raises: InputError naming the file and what is wrong with it.
    """
    check_plain(directory, names)
    for path in (directory / name for name in names):
        if path.suffix == ".safetensors":
            read_header(path)
        elif path.suffix == ".json":
            read_json_object(path, unique_keys=False)
    if kind == "adapter":
        read_config(directory / CONFIG)
        weights = WEIGHTS if (directory / WEIGHTS).exists() else PEFT_WEIGHTS
        if not open_weights(directory / weights).tensors:
            raise InputError(f"{directory / weights}: holds no tensors")
    elif kind == "model":
        if "model_file" in open_checkpoint(directory).config:
            raise CheckpointError(f"{directory / MODEL_CONFIG}: names code to run (model_file)")
    else:
        try:
            problems = verify_store(StacksVerifySettings(store_path=str(directory))).problems
        except StoreError as error:
            raise InputError(str(error)) from None
        if problems:
            lines = "".join(f"\n  {problem.message}" for problem in problems[:8])
            raise InputError(f"the store is damaged: {len(problems)} problems{lines}")


# --- paths of this machine ------------------------------------------------------------------------


def without_paths(value: Any, within: bool = False) -> Any:
    """JSON values with every absolute path as the name at its end, or as the hub id of a directory
    of the hub's cache. Two keys that would become one are told apart by a number.

    within: paths that are a part of a text too.
    Law: what it gives is its own fixed point.
    """
    if isinstance(value, str):
        if _PATH.fullmatch(value):
            return _public_name(value)
        return _PATH_IN_TEXT.sub(lambda path: _public_name(path[0]), value) if within else value
    if isinstance(value, Mapping):
        public: dict[str, Any] = {}
        for key, inner in value.items():
            name = without_paths(key, within)
            while name in public or (name != key and name in value):
                name += " (2)"
            public[name] = without_paths(inner, within)
        return public
    is_list = isinstance(value, list | tuple)
    return [without_paths(inner, within) for inner in value] if is_list else value


def _public_name(path: str) -> str:
    name = path
    with suppress(InputError, OSError):  # no usable path here: of another machine
        name = base_name(path)
    if _PATH.fullmatch(name):
        name = PurePath(name.replace("\\", "/")).name
    return name or "path"


def refuse_places(directory: Path, names: Iterable[str], source: Path) -> None:
    """A last look at what is to be uploaded, in all but vocabularies.

    Raises: InputError naming a file with a path of this machine: the home directory, the current
        one, the parent of `source`; in the metadata of safetensors any absolute path, because
        what a hash is of cannot be changed.
    """
    places = {str(p) for p in (Path.home(), Path.cwd(), source.resolve().parent)} - {"/"}
    for name in names:
        path = directory / name
        if name.endswith(".safetensors"):
            text = json.dumps(read_header(path).metadata, ensure_ascii=False)
            found = [match[0] for match in _PATH_IN_TEXT.finditer(text.replace("\\", ""))]
        else:
            is_vocabulary = name in VOCABULARY or path.suffix in (".model", ".tiktoken")
            text = "" if is_vocabulary else path.read_text(encoding="utf-8", errors="replace")
            # without the escapes of JSON and Markdown
            found = [place for place in places if f"{place}/" in text.replace("\\", "")]
        if found:
            raise InputError(
                f"{name}: holds a path of this machine ({found[0]}), which is not uploaded; write "
                "the file again without it"
            )


# --- what is asked of the hub ---------------------------------------------------------------------

# the HTTP library differs between versions of the hub client; its base error is here in all
_HTTP_ERROR: type[BaseException] = HfHubHTTPError.__bases__[0]
_REPO = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)


def check_repo(repo_id: str | None) -> str:
    """Raises: InputError for what is no id of a repository."""
    if repo_id is None or not _REPO.fullmatch(repo_id) or ".." in repo_id:
        raise InputError(f"repo_id: got {str(repo_id)[:200]!a}; give one as in name/my-adapter")
    return repo_id


@contextmanager
def asking(repo_id: str) -> Iterator[HfApi]:
    """An `HfApi`. Raises: InputError for whatever goes wrong with the hub in the block."""
    try:
        yield HfApi(library_name="mlxstacks")
    except InputError:
        raise
    except RepositoryNotFoundError:
        line = "there is no such repository for this user"
    # RuntimeError: of the transfer of large files
    except (_HTTP_ERROR, OSError, ValueError, RuntimeError) as error:
        line = " ".join(str(error).split()) or type(error).__name__
        line = f"the hub refused or was not reached: {line:.300}"
    else:
        return
    raise InputError(f"{repo_id}: {line}; to log in: `hf auth login`")
