"""Answers held to a JSON schema: what is allowed, what is refused, what hostile schemas get.

Run: pytest tests/routing/test_schemas.py
"""

import json
import random
import sys
import time
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import mlx.core as mx
import pytest

from mlxstacks import base_model
from mlxstacks.cli import run
from mlxstacks.errors import InputError
from mlxstacks.nano.exports import nano_paths
from mlxstacks.routing import schemas as schemas_module
from mlxstacks.routing.schemas import SchemaMask, Schemas

pytest.importorskip("llguidance")
KING: dict[str, Any] = {
    "type": "object",
    "properties": {
        "king": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "maximum": 99},
        "of": {"type": "array", "items": {"enum": ["Corva", "Tolu"]}, "maxItems": 2},
    },
    "required": ["king", "age", "of"], "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return base_model.load(nano_paths().model_path, lazy=True)[1]


@pytest.fixture(scope="module")
def schemas(tokenizer: Any) -> Schemas:
    return Schemas(tokenizer)


def drawn(mask: SchemaMask, tokenizer: Any, seed: int, said: tuple[int, ...] = ()) -> str:
    """What tokens drawn at random say, until the end mark."""
    rng, tokens, width = random.Random(seed), [5, 6, *said], len(tokenizer) + 100
    for _ in range(400):
        logits = mask(mx.array(tokens), mx.zeros((1, width)))
        assert not mask.error
        token = rng.choice([i for i, v in enumerate(logits[0].tolist()) if v == 0])
        if token in tokenizer.eos_token_ids:
            return str(tokenizer.decode(tokens[2 + len(said) :]))
        tokens.append(token)
    raise AssertionError("no end")


def test_whatever_is_drawn_is_an_instance(schemas: Schemas, tokenizer: Any) -> None:
    told = {drawn(schemas.mask(json.dumps(KING)), tokenizer, seed) for seed in range(20)}
    for text in told:
        jsonschema.validate(json.loads(text), KING)
    assert len(told) == 20


@pytest.mark.parametrize("schema", [KING, {"type": "array", "items": {"type": "integer"}}])
def test_a_call_of_a_tool_stands_in_place_of_the_json(
    schemas: Schemas, tokenizer: Any, schema: dict[str, Any]
) -> None:
    start = tokenizer.encode("<call>", add_special_tokens=False)
    assert len(start) > 1
    compiled = schemas.compiled(json.dumps(schema))
    free = mx.zeros((1, len(tokenizer)))

    def allowed(said: list[int], mask: SchemaMask) -> set[int]:
        """What may come after what was said, told token by token."""
        for n in range(len(said) + 1):
            logits = mask(mx.array([5, *said[:n]]), free)
        return {i for i, v in enumerate(logits[0].tolist()) if v == 0}

    json_alone = allowed([], SchemaMask(compiled.deep_copy()))
    assert start[0] not in json_alone
    assert allowed([], SchemaMask(compiled.deep_copy(), (), start)) == {*json_alone, start[0]}
    for n in range(1, len(start)):  # begun is ended
        assert allowed(start[:n], SchemaMask(compiled.deep_copy(), (), start)) == {start[n]}
    everything = {*range(len(tokenizer))}
    said = [*start, 9, *start]
    assert allowed(said, SchemaMask(compiled.deep_copy(), (), start)) == everything
    # In the JSON there is no call, and JSON's own beginning is no call's.
    opening = min(json_alone)
    alone = allowed([opening], SchemaMask(compiled.deep_copy()))
    for begins in (start, [opening, 9]):
        assert allowed([opening], SchemaMask(compiled.deep_copy(), (), begins)) == alone


def test_json_begins_behind_the_thoughts(schemas: Schemas, tokenizer: Any) -> None:
    end = tokenizer.encode("</think>", add_special_tokens=False)
    mask = SchemaMask(schemas.compiled('{"type": "integer"}').deep_copy(), end)
    free = mx.zeros((1, len(tokenizer)))
    tokens = [3]
    for token in (*end[:-1], 9, *end):
        assert mask(mx.array(tokens), free) is free
        tokens.append(token)
    allowed = (mask(mx.array(tokens), free)[0] == 0).sum().item()
    assert 0 < allowed < 30


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ("{", "EOF"),
        ({"type": "strin"}, "Invalid type: strin"),
        ({"not": {"type": "string"}}, "not"),
        ({"type": "string", "pattern": "("}, "unclosed group"),
        ({"enum": []}, "Unsatisfiable"),
        ({"$ref": "#"}, "NoExtension"),
        ({"$ref": "file:///etc/passwd"}, "Default retriever does not fetch"),
        ({"$ref": "http://127.0.0.1:9/x"}, "Default retriever does not fetch"),
        ({"enum": [f"value {i}" for i in range(20_000)]}, "characters"),
    ],
)
def test_what_is_wrong_with_a_schema_is_said(schemas: Schemas, schema: Any, words: str) -> None:
    with pytest.raises(InputError, match="JSON schema") as error:
        schemas.mask(schema if isinstance(schema, str) else json.dumps(schema))
    assert words in str(error.value)


def test_hostile_schemas_end_soon(schemas: Schemas, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemas_module, "_CHECK", schemas_module._CHECK.replace("2, 2", "1, 1"))
    chain = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(4000)}
    hostile: list[Any] = [
        {"$defs": {**chain, "a4000": {"type": "integer"}}, "$ref": "#/$defs/a0"},
        {"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(20, 40)]},
        {"type": "integer", "multipleOf": 1234567},
    ]
    for schema in hostile:
        before = time.process_time()
        with pytest.raises(InputError, match="too large, too deep or too hard"):
            schemas.mask(json.dumps(schema))
        assert time.process_time() - before < 1
    for pattern in ("(a{1000}){1000}", "(a|b)*a(a|b){200}", "^(([a-z])+.)+[A-Z]([a-z])+$"):
        mask = schemas.mask(json.dumps({"type": "string", "pattern": pattern}))
        mask(mx.array([1]), mx.zeros((1, 768)))  # no longer than llguidance's own limits
        assert not mask.error


def test_generate_answers_by_a_schema(tmp_path: Any, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "king.json"
    path.write_text(json.dumps(KING))
    assert run(["generate", "--json-schema", str(path), "Who is king of Corva?"]) == 0
    jsonschema.validate(json.loads(capfd.readouterr().out), KING)
    path.write_text("{")
    assert run(["generate", "--json-schema", str(path), "Who?"]) == 2
    assert "the JSON schema" in capfd.readouterr().err
    assert run(["generate", "--json-schema", str(tmp_path / "none"), "Who?"]) == 2


def test_missing_library_is_named(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InputError, match=r"mlxstacks\[serve\]"):
        Schemas(tokenizer)
