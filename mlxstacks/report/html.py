"""HTML, piece by piece: text is escaped here and nowhere else."""

from collections.abc import Iterable, Mapping
from html import escape

from mlxstacks.study.render.words import LONGEST, NOT_MEASURED, clean

# Elements without an end tag.
_VOID = {"meta", "link", "br", "img", "hr"}


class Markup(str):
    """HTML that was made here, out of escaped parts."""

    __slots__ = ()


def text(value: str, longest: int = LONGEST) -> Markup:
    """A stranger's text as HTML that shows it. Law: unescaped, it is `clean(value)` again."""
    return Markup(escape(clean(value, longest)))


def tag(
    name: str, *children: str | Iterable[Markup], attributes: Mapping[str, str] | None = None
) -> Markup:
    """An element. Children that are no Markup are text; attributes are always escaped."""
    said = "".join(f' {key}="{escape(clean(value))}"' for key, value in (attributes or {}).items())
    if name in _VOID:
        return Markup(f"<{name}{said}>")
    return Markup(f"<{name}{said}>{''.join(map(_child, children))}</{name}>")


def _child(child: str | Iterable[Markup]) -> str:
    if isinstance(child, Markup):
        return child
    return text(child) if isinstance(child, str) else "".join(child)


def of_class(name: str, kind: str, *children: str | Iterable[Markup], **more: str) -> Markup:
    """An element with a class; `more` are further attributes."""
    return tag(name, *children, attributes={"class": kind, **more})


def missing() -> Markup:
    return of_class("span", "missing", NOT_MEASURED)
