"""Chat templates of others: Jinja in a sandbox that also bounds time and memory.

A template that never ends, or that makes gigabytes of text, ends in a TemplateRuntimeError. What is
counted: CPU time, looked at with every turn of a loop and every call; the text and lists that are
made, as they are made; and what one operation could make, before it is carried out. Everything a
template can name goes through `LimitedEnvironment`, so this holds without a second process, which
macOS could not give a memory limit.
"""

import functools
import itertools
import re
import sys
import time
from collections.abc import Callable
from types import BuiltinMethodType
from typing import Any

from jinja2 import Environment, Template, TemplateRuntimeError, TemplateSyntaxError, nodes
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MOST_SECONDS = 5.0
MOST_MADE = 1 << 28  # characters, or bytes of lists
MOST_SOURCE = 1_000_000
_MOST_BITS = 4096
_NODE_BYTES = 256  # of a list or dictionary, in whatever it holds
_ITEM_BYTES = 64  # of a text of a few characters, as Python has it
_LAZY_SIZE = 1 << 20  # more than a list may hold
# Names that no template can write.
_STEP, _MADE, _TEXT = "a step", "a value", "a text"
_TRANSFORMERS, _SANDBOX = "transformers.utils.chat_template_utils", "ImmutableSandboxedEnvironment"
_TEXTS = (str, bytes)
_EMPTY: dict[Any, Any] = {}
_VIEWS = (type(_EMPTY.keys()), type(_EMPTY.values()), type(_EMPTY.items()))
_CONTAINERS = (list, tuple, dict, *_VIEWS, Namespace)
_QUADRATIC = ("round", "wordwrap")  # ten to a precision, a line of one word
_CODECS = {"utf-8", "utf8", "ascii", "latin-1", "strict", "ignore", "replace"}  # others are slow
_PASSED = (Environment, Context, nodes.EvalContext)  # what Jinja puts first for some filters
_FORMATS = ("%", "format", "format_map", "strftime_now")
_SEARCHES = ("strip", "lstrip", "rstrip", "trim", "rfind", "rindex", "rsplit", "rpartition")
_GATHERING = ("join", "sort", "groupby")  # copies of all items at once
_PADDING = ("center", "ljust", "rjust", "zfill")
# They give, or walk, the items of a text: each takes _NODE_BYTES, not the one of a character.
_ITEMS = {
    "list", "sort", "unique", "groupby", "min", "max", "map", "select", "selectattr", "reject",
    "rejectattr", "batch", "slice", "sum", "join", "title", "wordcount", "pprint", "urlencode",
    "translate", "split", "rsplit", "splitlines", "indent",
}  # fmt: skip
_LINE_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
# What they make, and take, is no more than what they are given, a text's items counted as items.
_LINEAR = {
    "startswith", "endswith", "removeprefix", "removesuffix", "find", "index", "split", "partition",
    "truncate", "count", "length", "first", "last", "default", "d", "get", "attr", "items", "keys",
    "values", "map", "select", "selectattr", "reject", "rejectattr", "sort", "unique", "groupby",
}  # fmt: skip
# For pages of HTML, some of them slow; and text without end.
_LEFT_OUT = ("urlize", "striptags", "xmlattr", "lipsum")
# A width of six digits, a width from outside.
_WIDE_FORMAT = re.compile(r"\d{6}|\{[^{}]*\{|%[^%a-zA-Z]*\*")
# Arguments in which Jinja passes what was set in the loop or block around a call.
_SCOPES = ("_loop_vars", "_block_vars")


def limit_templates() -> None:
    """Have transformers, where it is imported, compile templates with these limits."""
    module: Any = sys.modules.get(_TRANSFORMERS)
    if getattr(module, _SANDBOX, LimitedEnvironment) is not LimitedEnvironment:
        setattr(module, _SANDBOX, LimitedEnvironment)
        for name in ("_compile_jinja_template", "_cached_compile_jinja_template"):
            forget = getattr(getattr(module, name, None), "cache_clear", None)
            if forget is not None:  # templates that were compiled without
                forget()


class _Spent:
    """What one rendering has used up."""

    def __init__(self) -> None:
        self.deadline = time.thread_time() + MOST_SECONDS
        self.look_at = time.monotonic() + MOST_SECONDS  # sooner it cannot have passed
        self.made = 0

    def step(self, characters: int) -> bool:
        """True, or an error."""
        self.made += characters
        if self.made > MOST_MADE:
            raise TemplateRuntimeError(f"it makes more than {MOST_MADE:,} characters")
        if time.monotonic() > self.look_at and time.thread_time() > self.deadline:
            raise TemplateRuntimeError(f"it takes more than {MOST_SECONDS:.3g} seconds")
        return True

    def value(self, value: Any) -> Any:
        """The value itself, its text or its places counted."""
        if isinstance(value, _TEXTS):
            self.step(len(value))
        elif isinstance(value, _CONTAINERS):
            _size(value)
            self.step(0 if isinstance(value, Namespace) else 8 * len(value))
        elif isinstance(value, int) and value.bit_length() > _MOST_BITS:
            raise TemplateRuntimeError("it counts with huge numbers")
        return value


def _size(value: Any) -> int:
    """Characters in a value, a number's and a list's own size included.

    Raises: TemplateRuntimeError: more than MOST_MADE, as lists have that hold one list many times.
    """
    if isinstance(value, _TEXTS):
        return len(value)
    if isinstance(value, int):
        return abs(value)
    if not isinstance(value, _CONTAINERS):
        return _LAZY_SIZE if _is_lazy(value) else 0
    total, left = 0, [value]
    while left:
        part = left.pop()
        if isinstance(part, _TEXTS):
            total += len(part)
        elif isinstance(part, dict):
            left += [*part, *part.values()]
        elif isinstance(part, Namespace):
            left += object.__getattribute__(part, "_Namespace__attrs").values()
        elif isinstance(part, _CONTAINERS):
            left += part
        total += _NODE_BYTES
        if total + _NODE_BYTES * len(left) > MOST_MADE:
            raise TemplateRuntimeError(f"it has a value of more than {MOST_MADE:,} characters")
    return total


def _is_lazy(value: Any) -> bool:
    return isinstance(value, range) or hasattr(value, "__next__")


def _drawn(value: Any) -> Any:
    """The items of an iterator or range, measured one by one; another value as it is."""
    if not _is_lazy(value):
        return value
    items, size = [], 0
    for item in value:
        items.append(item)
        size += _size([item])
        if size > MOST_MADE:
            raise TemplateRuntimeError(f"it gathers more than {MOST_MADE:,} characters")
    return items


def _check_operation(name: str, values: tuple[Any, ...], options: dict[str, Any]) -> int:
    """Before something is done with values: bytes that the items of a text will take.

    Raises: TemplateRuntimeError: it makes too much.
    """
    items = _item_count(name, values, options)
    if items * _NODE_BYTES > MOST_MADE:
        raise TemplateRuntimeError(f"{name} could make {items:,} items of a text")
    if name in _LINEAR:
        return items * _ITEM_BYTES
    if name in _LEFT_OUT:
        raise TemplateRuntimeError(f"{name} has no place in a chat template")
    others = (*values[1:], *options.values())
    if name in ("encode", "decode") and not {str(other).lower() for other in others} <= _CODECS:
        raise TemplateRuntimeError(f"{name}, allowed with: {', '.join(sorted(_CODECS))}")
    result_size = _result_size(name, values, options)
    if result_size > MOST_MADE:
        raise TemplateRuntimeError(f"{name} could make {result_size:,} characters")
    return items * _ITEM_BYTES


def _item_count(name: str, values: tuple[Any, ...], options: dict[str, Any]) -> int:
    """Most items that an operation makes of a text; 0 where it makes none."""
    # The method `join` walks its second value, the filter its first.
    lengths = [len(v) for v in values[: 1 + (name == "join")] if isinstance(v, _TEXTS)]
    if name not in _ITEMS or not lengths:
        return 0
    text, others = values[0], (*values[1:], *options.values())
    if name in ("splitlines", "indent") and isinstance(text, str):
        return 1 + sum(map(text.count, _LINE_BREAKS))
    if name not in ("split", "rsplit"):
        return max(lengths)
    separators = [other for other in others if isinstance(other, _TEXTS)]
    limits = [other for other in others if isinstance(other, int) and other >= 0]
    return 1 + min([text.count(*separators) if separators else len(text), *limits])


def _result_size(name: str, values: tuple[Any, ...], options: dict[str, Any]) -> int:
    """Most characters that an operation makes or compares: the product of the two largest values,
    where no closer bound is known.
    """
    values = (*values, *options.values())
    texts = [value for value in values if isinstance(value, str)]
    if name == "replace" and len(texts) == 3 and not options:
        text, old, new = texts
        return len(text) + text.count(old) * len(new)
    if name in _FORMATS:
        return _formatted_size(values)
    lists = [value for value in values if isinstance(value, _CONTAINERS)]
    if name == "join" and len(lists) == 1:
        separators = sum(len(str(value)) for value in values if value is not lists[0])
        return _size(lists[0]) + len(lists[0]) * separators
    if name in _SEARCHES:
        values = tuple(value for value in values if isinstance(value, _TEXTS))
    elif isinstance(values[0], int | float):  # of a number only what is done with it is large
        values = values[1:]
    elif name == "tojson":
        document, *others = values
        parts = [other if isinstance(other, list | tuple) else [other] for other in others]
        values = (document, *itertools.chain(*parts))  # the two separators come as a tuple
    *_, second, first = sorted((1, 1, *map(_size, values)))
    if name in _PADDING:
        return first + second
    return first * (first if name in _QUADRATIC else second)


def _formatted_size(values: tuple[Any, ...]) -> int:
    _size(values[0])
    text = str(values[0])
    if _WIDE_FORMAT.search(text.replace("{{", "")):
        raise TemplateRuntimeError("it formats with a width beyond measure")
    field_size = max(map(int, re.findall(r"\d+", text)), default=0) + _NODE_BYTES
    for value in values[1:]:
        field_size += value.bit_length() if isinstance(value, int) else _size(value)
    return len(text) + (text.count("%") + text.count("{")) * field_size


class _Counted(dict[str, Callable[..., Any]]):
    """Filters, or tests, that are counted, whoever puts them in."""

    def __init__(self, environment: "LimitedEnvironment", are_tests: bool) -> None:
        self._environment, self._are_tests = environment, are_tests

    def __setitem__(self, name: str, function: Callable[..., Any]) -> None:
        environment, is_test = self._environment, self._are_tests

        @functools.wraps(function)
        def counted(*arguments: Any, **options: Any) -> Any:
            environment.spent.step(0)
            if is_test:
                return function(*arguments, **options)
            if name in _GATHERING:
                arguments = tuple(map(_drawn, arguments))
            values = arguments[isinstance(arguments[0], _PASSED) :]
            environment.spent.step(_check_operation(name, values, options))
            starts = (*values[1:], *options.values())
            if name == "sum" and any(isinstance(value, list | tuple) for value in starts):
                raise TemplateRuntimeError("it adds up lists")
            return environment.spent.value(function(*arguments, **options))

        self.put(name, counted)

    def put(self, name: str, function: Callable[..., Any]) -> None:
        """As it is."""
        super().__setitem__(name, function)


class _Counting(NodeTransformer):
    """Puts a step into each body that can run more than once, and counts values that are made."""

    def _repeated(self, node: Any) -> Any:
        text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_filtered(nodes.Const(text + 1), _STEP)))
        if getattr(node, "test", None) is not None:  # what it leaves out has turns too
            node.test = nodes.And(_filtered(nodes.Const(0), _STEP), node.test)
        return node

    visit_For = visit_Macro = visit_CallBlock = _repeated  # noqa: N815  (names of Jinja's nodes)

    def _literal(self, node: Any) -> Any:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") == "store" else _filtered(node, _MADE)

    def _spread(self, node: Any) -> Any:
        self.generic_visit(node)
        if node.dyn_args is not None:  # a list before the call
            node.dyn_args = _filtered(node.dyn_args, "list")
        return node

    visit_Call = visit_Filter = visit_Test = _spread  # noqa: N815

    visit_List = visit_Dict = visit_Tuple = _literal  # noqa: N815

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        node.nodes = [_filtered(part, _TEXT) for part in node.nodes]
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filtered(node, _MADE) if isinstance(node.arg, nodes.Slice) else node


def _filtered(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None)


class _LimitedTemplate(Template):
    environment: "LimitedEnvironment"

    def new_context(self, *arguments: Any, **options: Any) -> Context:
        self.environment.spent = _Spent()
        return super().new_context(*arguments, **options)


class LimitedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the limits of this file.

    Law: a template that stays within them gives the text that the sandbox alone gives.
    """

    template_class = _LimitedTemplate
    intercepted_binops = frozenset(("+", "*", "%", "**"))

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.spent = _Spent()
        options |= {"optimized": False, "finalize": self._text}  # what is folded is not counted
        super().__init__(*arguments, **options)
        self.globals.pop("lipsum", None)
        filters, tests = _Counted(self, are_tests=False), _Counted(self, are_tests=True)
        for name, function in dict[str, Any](self.filters).items():
            if name not in _LEFT_OUT:
                filters[name] = function
        for name, test in dict[str, Any](self.tests).items():
            tests[name] = test
        filters.put(_STEP, lambda characters: self.spent.step(characters))
        filters.put(_MADE, lambda value: self.spent.value(value))
        filters.put(_TEXT, self._text)
        self.filters, self.tests = filters, tests  # type: ignore[assignment]

    def _text(self, value: Any) -> str:
        """What is put out of a value, counted."""
        if not isinstance(value, str):
            _size(value)
            value = str(value)
        self.spent.step(len(value))
        return value

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            if operator == "**" and right > 0 and left.bit_length() * right > _MOST_BITS:
                raise TemplateRuntimeError("it counts with huge numbers")
        elif operator in ("*", "%") and not isinstance(left, float):
            values = (right, left) if isinstance(left, int) else (left, right)
            _check_operation(operator, values, {})
        return self.spent.value(super().call_binop(context, operator, left, right))

    def call(self, context: Context, function: Any, /, *arguments: Any, **options: Any) -> Any:
        method = getattr(function, "__wrapped__", function)  # of str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        is_method = isinstance(method, BuiltinMethodType) or isinstance(owner, str)  # of Markup
        if is_method or name == "strftime_now":
            if name == "join":
                arguments = tuple(map(_drawn, arguments))
            values = (owner, *arguments) if is_method else arguments
            given = {key: value for key, value in options.items() if key not in _SCOPES}
            self.spent.step(_check_operation(name, values, given))
        self.spent.step(0)
        return self.spent.value(super().call(context, function, *arguments, **options))

    def compile(self, source: Any, *arguments: Any, **options: Any) -> Any:
        if isinstance(source, str) and len(source) > MOST_SOURCE:
            raise TemplateSyntaxError(
                f"{len(source):,} characters, allowed: {MOST_SOURCE:,}", lineno=1
            )
        try:
            return super().compile(source, *arguments, **options)
        # of the Python that it becomes: {% continue %} outside of a loop, or nested too deeply
        except SyntaxError as error:
            raise TemplateSyntaxError(str(error.msg), lineno=1) from None
        except (RecursionError, MemoryError) as error:
            raise TemplateSyntaxError(f"nested too deeply: {error}", lineno=1) from None

    def _generate(self, source: nodes.Template, *arguments: Any, **options: Any) -> str:
        return super()._generate(_Counting().visit(source), *arguments, **options)
