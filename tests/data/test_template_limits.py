"""Hostile chat templates end in a message; the rest give the sandbox's text.

Run: pytest tests/data/test_template_limits.py
"""

import json
import time
from collections.abc import Iterator
from datetime import date
from typing import Any

import pytest
from jinja2 import Environment, TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mlxstacks.data import template_limits
from mlxstacks.data.chat import prompt_tokens
from mlxstacks.data.template_limits import LimitedEnvironment
from mlxstacks.errors import InputError
from tests.data.chat_tokenizers import CHATML, CLOSED, GEMMA, INST, chat_tokenizer
from tests.data.template_shapes import SHAPES

TURNS = [{"role": role, "content": f"{role} says"} for role in ("user", "assistant", "user")]
_LOOP = "{% for i in range(99999) %}"
_99_TIMES, _ENDS = "{% for i in range(99) %}", "{% endfor %}{{ n.x }}"
ENDLESS = [
    f"{_LOOP}{_LOOP}{{% endfor %}}{{% endfor %}}",
    "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for i in range(99999) if i in range(99998)|list %}{% endfor %}",
    "{{ range(99999)|select('in', range(99999)|list|reverse|list)|list }}",
    f"{_LOOP}{_LOOP}{{% if 'x' in 'y' %}}{{% endif %}}{{% endfor %}}{{% endfor %}}",
]
HUGE = [
    "{{ 'x' * 10**10 }}",
    "{{ (range(99999)|list) * 99999 }}",
    "{{ 9**9999 }}",
    "{% set n = namespace(x=9) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{% set n = namespace(x='a') %}{% for i in range(99) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "{% set n = namespace(x=1) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] %}{% endfor %}",
    "{% set n = namespace(x=1) %}{% for i in range(99) %}{% set n.x = {1:n.x,2:n.x} %}{% endfor %}",
    "{% set n = namespace(x=1) %}" + _99_TIMES + "{% set n.x = namespace(a=n.x, b=n.x) %}" + _ENDS,
    "{% set n = namespace(x={}) %}"
    + _99_TIMES
    + "{% set n.x = {1: n.x.items(), 2: n.x.items()} %}"
    + _ENDS,
    "{% set x %}" + "a" * 999 + "{% endset %}{% set y %}" + "{{ x }}" * 99 + "{% endset %}"
    "{% set z %}" + "{{ y }}" * 99 + "{% endset %}",
    "{% set x = 'a' * 99999 %}{{ " + "~".join(["x"] * 99) + " }}",
    "{% set x = 'a' * 99999 %}{% for i in range(999) %}{% set y = x[1:] %}{% endfor %}",
    _LOOP + "x" * 99999 + "{% endfor %}",
    "{{ 'x'|center(9999999999) }}",
    "{{ 1|center(9999999999) }}",
    "{{ 'x'.center(9999999999) }}",
    "{{ (1).to_bytes(10**10, 'big') }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '%*d' % (999999999, 1) }}",
    "{{ '%9999999999d'|format(1) }}",
    "{{ '{:>9999999999}'.format(1) }}",
    "{{ '{:>{w}}'.format(1, w=9999999999) }}",
    "{{ ('{0}' * 999).format('a' * 99999) }}",
    "{{ ('a' * 99999).replace('', 'b' * 99999) }}",
    "{{ ('b' * 99999).join(range(99999)|map('string')) }}",
    "{{ range(99999)|map('center', 99999)|join }}",
    "{{ range(99999)|map(attribute='none', default='a' * 99999)|join }}",
    "{{ ''.join(range(99999)|map(attribute='none', default='a' * 99999)) }}",
    "{{ range(99999)|join('a' * 99999) }}",
    "{{ range(99999)|map(attribute='none', default='A' * 99999)|sort|first }}",
    "{% set x = ['a' * 99999] * 9 %}{{ (" + "~".join(["x"] * 99) + ")[:1] }}",
    "{{ ('{0:>99999}' * 30000).format(1) }}",
    "{{ ['%9999999999d']|format(1) }}",
    "{{ ('x'|safe).center(9999999999) }}",
    "{{ ('a' * 99999)|safe|replace('', 'b' * 99999) }}",
    "{{ ('a' * 99999)|replace(new='b' * 99999, old='') }}",
    "{{ (('a' * 99999)|safe).replace('', 'b' * 99999) }}",
    "{{ ('a' * 99999).translate({97: 'b' * 99999}) }}",
    "{{ 'a'.ljust(9999999999) }}",
    "{{ '\t'.expandtabs(9999999999) }}",
    "{{ ('\n' * 99999)|indent('a' * 99999) }}",
    "{{ range(99)|batch(10**9, 'x')|list }}",
    "{{ range(99999)|map('replace', '', 'a' * 99999)|join }}",
    "{{ ('{0}' * 99999).format(9**999) }}",
    "{{ range(3999)|join(9**999) }}",
    "{{ strftime_now('%9999999999d') }}",
    "{{ ('a' * 99999)|wordwrap(1) }}",
    "{{ ('a' * 999999).encode().rfind(('a' * 99999 ~ 'b' ~ 'a' * 99999).encode()) }}",
    "{{ 2|round(-9999999) }}",
    "{{ ('a' * 9999).encode('punycode') }}",
    "{{ ('a' * 999999).rfind('a' * 99999 ~ 'b' ~ 'a' * 99999) }}",
    "{{ ('a' * 999999).strip('b' * 99999 ~ 'a') }}",
    "{{ (('a<' * 99999)|safe).striptags() }}",
    "{{ [[1]]|tojson(indent=10**9) }}",
    "{{ [1]|slice(10**9)|list }}",
    "{{ ([[1]] * 999)|sum(start=[]) }}",
    "{{ lipsum(n=10**9) }}",
    "{% for i in [1] %}" * 30 + "{% endfor %}" * 30,
    "{{ " + "[" * 3000 + "]" * 3000 + " }}",
    "x" * 1_000_001,
]


def strftime_now(format: str) -> str:
    """As transformers has it, of one day."""
    return date(2026, 1, 2).strftime(format)


@pytest.fixture
def little_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(template_limits, "MOST_SECONDS", 0.05)
    started = time.thread_time()
    yield
    assert time.thread_time() - started < 3


@pytest.mark.parametrize("source", ENDLESS)
def test_a_template_without_end_is_ended(source: str, little_time: None) -> None:
    with pytest.raises(TemplateError, match="it takes more than"):
        LimitedEnvironment().from_string(source).render()


@pytest.mark.parametrize("source", HUGE, ids=range(len(HUGE)))
def test_a_template_that_makes_too_much_is_ended(
    source: str, little_time: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_limits, "MOST_MADE", 1 << 20)
    monkeypatch.setattr(template_limits, "MOST_SECONDS", 60.0)
    with pytest.raises(TemplateError):
        LimitedEnvironment().from_string(source).render(strftime_now=strftime_now)


@pytest.mark.parametrize(
    "operation",
    [
        "|sort", "|list", "|unique|list", "|groupby('x', 1)", "|max", "|title", "|wordcount",
        "|reject('none')|list", "|map('upper')|list", "|batch(1)|list", "|join(1)", "|pprint",
        ".split()", ".split(' ')", ".rsplit(' ')", ".split(sep=' ')", ".encode().split()",
        ".splitlines()", "|indent(1)", "|urlencode",
    ],
)  # fmt: skip
def test_items_of_a_text_are_counted_before_they_are_made(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_limits, "MOST_MADE", 1 << 20)
    text = "a \n" * 5_000
    template = LimitedEnvironment().from_string(f"{{{{ text{operation} }}}}")
    template.render(text=text[:99])
    with pytest.raises(TemplateError, match=r"could make [\d,]+ items of a text"):
        template.render(text=text)


@pytest.mark.parametrize("operation", ["|list", "|sort", ".split()"])
def test_items_of_a_text_are_counted_as_often_as_they_are_made(
    operation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_limits, "MOST_MADE", 1 << 18)
    source = f"{{% for i in range(20) %}}{{% set x = text{operation} %}}{{% endfor %}}"
    with pytest.raises(TemplateError, match="it makes more than"):
        LimitedEnvironment().from_string(source).render(text="a " * 500)


@pytest.mark.parametrize("source", ["''.join(text)", "cycler(*text)", "1|default(*text)"])
def test_a_text_that_a_call_takes_apart_is_counted(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_limits, "MOST_MADE", 1 << 20)
    with pytest.raises(TemplateError, match="could make 10,000 items of a text"):
        LimitedEnvironment().from_string(f"{{{{ {source} }}}}").render(text="a" * 10_000)


@pytest.mark.parametrize(
    "operation", ["split('</think>')", "split(None, 1)", "rsplit('a', 1)", "splitlines()"]
)
def test_a_long_text_of_few_parts_is_split(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MOST_MADE", 1 << 20)
    source = f"{{{{ text.{operation}|length }}}}"
    text = "a " * 50_000 + "\n</think>b"
    assert LimitedEnvironment().from_string(source).render(text=text) == "2"


@pytest.mark.parametrize(
    "source",
    [
        CHATML, GEMMA, INST, CLOSED,
        "{{ 1700000000|string }} {{ 1.5|round(1) }} {{ 2**10 }} {{ '%.2f' % 1.5 }} {{ 2 * 1.5 }}",
        "{{ '%d' % 1700000000 }} {{ '{}'.format(1700000000) }} {{ 7 % 3 }} {{ 3 * 'a' }}",
        "{{ messages|selectattr('role', 'equalto', 'user')|list|length }} {{ none }} {{ no }}",
        "{{ messages[::-1]|map(attribute='content')|join(', ')|upper }} {{ [1, 2]|sum }}",
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ loop.last }}{% endfor %}",
        "{% macro f(a) %}{{ a }}{{ caller() }}{% endmacro %}{% call f('y') %}z{% endcall %}",
        "{% for m in messages if m.role is in ['user'] %}{{ m.content }}{% endfor %}",
        "{% if x is defined %}{% elif 4 is divisibleby 2 %}even{% endif %}",
        "{% set x, y = 1, (2, 3) %}{{ x }}{{ y }}{% for x in [] %}{% else %}none{% endfor %}",
        "{{ '{name} {values}'.format(name=1, values=2) }} {{ [3, 1]|sort|join(',') }}",
        "{{ 'é'.encode('UTF-8', 'strict')|length }} {{ 'many words'|wordwrap(4) }}",
        "{{ 1700000000|round }} {{ 1700000000|tojson }} {{ range(9999)|join|length }}",
        "{{ '{} {{}} {a:>4}'.format('b', a=1) }} {{ ('ab' * 3)[1:3] ~ 1 }} {{ {'a': [1]}|tojson }}",
    ],
)  # fmt: skip
def test_other_templates_give_the_text_of_the_sandbox(source: str) -> None:
    texts = [
        environment(trim_blocks=True, lstrip_blocks=True)
        .from_string(source)
        .render(messages=TURNS, add_generation_prompt=True, bos_token="<s>", eos_token="</s>")
        for environment in (LimitedEnvironment, ImmutableSandboxedEnvironment)
    ]
    assert texts[0] == texts[1]


def _render(environment_class: type[Environment], source: str, **options: Any) -> str:
    environment = environment_class(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **rest: json.dumps(
        value, **{"ensure_ascii": False, **rest}
    )
    environment.globals["strftime_now"] = strftime_now
    return environment.from_string(source).render(bos_token="<s>", eos_token="</s>", **options)


def _long_chat(length: int) -> dict[str, Any]:
    line = "some words, <b> & more\n"
    text = "\n\n" + line * (length // len(line)) + "  \n"
    call = {"name": "look_up", "arguments": {"query": text, "pages": [1, {"of": "two"}]}}
    function = {
        "name": "look_up",
        "description": text,
        "parameters": {"properties": {"query": {"type": ["string", "null"]}}},
    }
    return {
        "tools": [{"type": "function", "function": function}],
        "messages": [
            {"role": "system", "content": f"{text}/no_think"},
            {"role": "user", "content": text},
            {"role": "assistant", "content": text, "tool_calls": [{"function": call}]},
            {"role": "tool", "content": text},
            {"role": "user", "content": text},
            {"role": "assistant", "content": text, "reasoning_content": text},
            {"role": "user", "content": text},
            {"role": "assistant", "content": f"<think>{text}</think>{text}"},
        ],
    }


@pytest.mark.parametrize("shape", SHAPES)
def test_long_turns_give_the_text_of_the_sandbox(
    shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns of 2 MB, scaled: bounds are products of a length and what does not grow with it."""
    monkeypatch.setattr(template_limits, "MOST_MADE", template_limits.MOST_MADE // 10)
    chat = _long_chat(200_000)
    plain, limited = (
        _render(environment, SHAPES[shape], **chat)
        for environment in (ImmutableSandboxedEnvironment, LimitedEnvironment)
    )
    assert limited == plain
    assert len(limited) > 200_000


def test_a_chat_is_rendered_within_the_limits(
    little_time: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = chat_tokenizer("chatml")
    for source, message in ((ENDLESS[0], "takes more than"), ("{{ 1 / 0 }}", "division by zero")):
        monkeypatch.setattr(tokenizer, "chat_template", source)
        with pytest.raises(InputError, match=f"chat template cannot be applied: .*{message}"):
            prompt_tokens(TURNS, tokenizer)


def test_a_template_that_is_no_python_is_refused_by_its_own_fault() -> None:
    with pytest.raises(TemplateSyntaxError, match=r"^.continue. not properly in loop"):
        LimitedEnvironment(extensions=["jinja2.ext.loopcontrols"]).from_string("{% continue %}")
