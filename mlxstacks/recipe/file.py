"""Recipe files: YAML with the key `command`, that command's settings, and a comment at the head."""

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxstacks.errors import InputError
from mlxstacks.recipe.table import ALIASES, COMMANDS, nearest
from mlxstacks.resources import resource_dir

# With the place of the schema after it; see recipe/schema.py.
EDITOR_LINE = "# yaml-language-server: $schema="
# PyYAML reads some 100,000 characters a second.
MOST_CHARACTERS = 250_000


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe file: its command, its settings as written, and the lines of the comment at its head
    (blank ones are "", indented ones keep their indentation).
    """

    path: Path
    command: str
    values: dict[str, Any]
    head: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def about(self) -> str:
        """The first paragraph of the head in one line: what the recipe is for."""
        return " ".join(itertools.takewhile(bool, self.head))

    def fact(self, name: str) -> str:
        """`Time` or another fact of the head, with the lines that are indented below it."""
        lines = iter(self.head)
        first = next((line for line in lines if line.startswith(f"{name}: ")), "")
        more = itertools.takewhile(lambda line: line.startswith("  "), lines)
        return " ".join([first.partition(":")[2].strip(), *map(str.strip, more)]).strip()


def recipe_names() -> list[str]:
    """Names of the recipes that come with mlxstacks."""
    return sorted(path.stem for path in resource_dir("recipes").glob("*.yaml"))


def find_recipe(name_or_path: str) -> Path:
    """The file of a recipe: a path, or the name of a shipped one. A path wins.

    Raises: InputError naming the nearest shipped recipe.
    """
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return path
    shipped = resource_dir("recipes") / f"{name_or_path}.yaml"
    looks_like_path = path.suffix in {".yaml", ".yml"} or len(path.parts) > 1
    if not looks_like_path and shipped.is_file():
        return shipped
    names = recipe_names()
    raise InputError(
        f"recipe {name_or_path!r}: no such file and no shipped recipe of this name"
        f"{nearest(path.stem, names)} (`mlxstacks recipes` lists them)"
    )


def load_recipe(name_or_path: str) -> Recipe:
    """Read a recipe. Raises InputError for YAML that is broken, unsafe or not a recipe."""
    path = find_recipe(name_or_path)
    try:
        text = path.read_text(encoding="utf-8")
        values = read_yaml(text)
    except (OSError, ValueError) as error:
        raise InputError(f"recipe {path}: {error}") from None
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise InputError(f"recipe {path}: must be a mapping of keys to values")
    named = values.get("command")
    if not isinstance(named, str):
        raise InputError(
            f"recipe {path}: the key `command` is missing; it names what to run: add "
            "`command: train`, or another of `mlxstacks --help`"
        )
    command = ALIASES.get(named, named)
    if command not in COMMANDS:
        raise InputError(
            f"recipe {path}: no command {command!r}{nearest(command, COMMANDS)} "
            f"(known: {', '.join(COMMANDS)})"
        )
    settings = {key: value for key, value in values.items() if key != "command"}
    if "force" in settings or _forces(settings):
        raise InputError(
            f"recipe {path}: `force` is no key of a recipe: what may be replaced is for whoever "
            "runs it to say; take it out, and give --force if you mean it"
        )
    comments = itertools.takewhile(lambda line: line.startswith("#"), text.splitlines())
    head = [
        line.lstrip("#").removeprefix(" ").rstrip()
        for line in comments
        if not line.startswith(EDITOR_LINE)
    ]
    return Recipe(path, command, settings, tuple(head))


def _forces(values: dict[str, Any]) -> bool:
    """Whether `force` is set at any depth; YAML's aliases make circles and endless lists."""
    seen: set[int] = set()
    left: list[Any] = [values]
    while left:
        value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            if value.get("force"):
                return True
            left += value.values()
        elif isinstance(value, list):
            left += value
    return False


def read_yaml(text: str) -> Any:
    """The value of a YAML text, by `yaml_loader`. Raises ValueError for text that is not YAML."""
    import yaml

    if len(text) > MOST_CHARACTERS:
        raise ValueError(f"has {len(text):,} characters; at most {MOST_CHARACTERS:,} are read")
    try:
        return yaml.load(text, Loader=yaml_loader())
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    # what PyYAML's own constructors let through: a date of month 99, `!!int abc`, `!!bool maybe`
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        raise ValueError(f"a value is not what it claims to be: {error}") from None


def yaml_loader() -> Any:
    """YAML's safe loader, without four surprises.

    A key given twice is an error; `on`, `off`, `yes`, `no` are text; `1e-3` is a number; `<<` takes
    no lists, by which a few lines become endless.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        def flatten_mapping(self, node: yaml.MappingNode) -> None:
            merged = [(k, v) for k, v in node.value if k.tag == "tag:yaml.org,2002:merge"]
            if len(merged) > 1 or any(not isinstance(v, yaml.MappingNode) for _, v in merged):
                raise yaml.constructor.ConstructorError(
                    "while reading a mapping", merged[0][0].start_mark, "<< takes one mapping"
                )
            super().flatten_mapping(node)

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: set[str] = set()
            for key, _ in node.value:
                if not isinstance(key, yaml.ScalarNode):
                    raise yaml.constructor.ConstructorError(
                        "while reading a mapping", node.start_mark, "a key must be text"
                    )
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        "while reading a mapping",
                        node.start_mark,
                        f"the key {key.value!r} is given twice",
                        key.start_mark,
                    )
                seen.add(key.value)
            return super().construct_mapping(node, deep)

    Loader.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in _REPLACED]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    Loader.add_implicit_resolver(_REPLACED[0], re.compile(r"^(true|false)$"), list("tf"))
    number = re.compile(r"^[-+]?(\d+\.\d*|\.\d+|\d+(?=[eE]))([eE][-+]?\d+)?$|^[-+]?\.(inf|nan)$")
    Loader.add_implicit_resolver(_REPLACED[1], number, list("-+.0123456789"))
    return Loader


_REPLACED = ("tag:yaml.org,2002:bool", "tag:yaml.org,2002:float")
