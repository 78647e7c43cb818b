"""Answers that are JSON: of what may come next by a schema, llguidance makes a mask over tokens.

    schemas = Schemas(tokenizer)
    mask = schemas.mask('{"type": "integer"}')  # the logits processor of one answer

A schema may come from anybody, and a hostile one takes minutes to compile, or overflows the stack
of the process. So each new one is compiled in a process of its own first, with little CPU time and
memory; masks have limits of llguidance's own.
"""

import functools
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from mlxstacks.errors import InputError

MOST_BYTES = 200_000
_SECONDS, _CHILD_BYTES, _STACK_BYTES = 2, 1 << 30, 1 << 20
_LIMITS: Any = {"max_lexer_states": 10_000, "max_grammar_size": 100_000, "max_items_in_row": 10_000}
_REMEMBERED = 16
# A weak model would write spaces without end.
_OPTIONS: Any = {"whitespace_pattern": r" ?|\n {0,20}"}

# Not this module: MLX would be loaded with it.
_CHECK = f"""
import resource, sys, threading
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_CPU, ({_SECONDS}, {_SECONDS}))
if sys.platform == "linux":
    resource.setrlimit(resource.RLIMIT_AS, ({_CHILD_BYTES}, {_CHILD_BYTES}))
grammar, limits = sys.stdin.read(), LLParserLimits(verbose_errors=False, **{_LIMITS})
threading.stack_size({_STACK_BYTES})  # less than there will be
def check():
    LLMatcher(LLTokenizer("byte"), grammar, log_level=0, limits=limits).compute_bitmask()
    print("done")
thread = threading.Thread(target=check)
thread.start()
thread.join()
"""


class Schemas:
    """For a tokenizer of mlx-lm; its methods may be called in any thread.

    Raises: InputError: llguidance is not installed, or cannot read the tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        try:
            from llguidance import LLTokenizer
        except ModuleNotFoundError:
            raise InputError(
                "answers by a JSON schema need llguidance: pip install 'mlxstacks[serve]'"
            ) from None
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise InputError("answers by a JSON schema need a tokenizer with a tokenizer.json")
        self._tokenizer = LLTokenizer(backend.to_str(), eos_token=sorted(tokenizer.eos_token_ids))
        self._thought_end = getattr(tokenizer, "think_end_tokens", None) or ()
        self._call_start = getattr(tokenizer, "tool_call_start_tokens", None) or ()
        self.compiled = functools.lru_cache(_REMEMBERED)(self._compile)

    def mask(self, schema: str, inside: bool = False, calls: bool = False) -> "SchemaMask":
        """For one answer. inside: it begins in the model's thoughts, and the JSON behind them.
        calls: it may call tools in place of the JSON, where the model has a mark for that.

        Raises: InputError: what is wrong with the schema, as JSON text.
        """
        ends = self._thought_end if inside else ()
        starts = self._call_start if calls else ()
        return SchemaMask(self.compiled(schema).deep_copy(), ends, starts)

    def _compile(self, schema: str) -> Any:
        from llguidance import LLMatcher, LLParserLimits

        if len(schema) > MOST_BYTES:
            raise InputError(f"the JSON schema has more than {MOST_BYTES:,} characters")
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=_OPTIONS)
        except ValueError as error:
            raise InputError(f"the JSON schema: {error}") from None
        command = [sys.executable, "-P", "-c", _CHECK]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            text=True,
        ) as child:  # fmt: skip
            told, _ = child.communicate(grammar)
        if told != "done\n":
            raise InputError("the JSON schema is too large, too deep or too hard to compile")
        limits = LLParserLimits(verbose_errors=False, **_LIMITS)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=limits)
        first = matcher.deep_copy()
        first.compute_bitmask()  # says what no answer can begin with
        if first.is_error():
            why = first.get_error().partition("\n<non-verbose")[0]
            raise InputError(f"the JSON schema: {why}")
        return matcher


class SchemaMask:
    """A logits processor: tokens that the schema does not allow next get -inf.

    matcher: llguidance's. thought_end: tokens behind which the JSON begins; (): at once.
    call_start: tokens that begin a call of a tool, which may stand in place of the JSON and is not
        masked; a first token that JSON of the schema can begin with begins the JSON.
    error: why the answer cannot go on; then logits are left as they are.
    """

    def __init__(
        self, matcher: Any, thought_end: Sequence[int] = (), call_start: Sequence[int] = ()
    ) -> None:
        self._matcher, self._awaited = matcher, list(thought_end)
        self._call_start, self._may_call = list(call_start), False
        self._call: list[int] | None = None  # what its start still lacks
        self._seen: int | None = None
        self._thoughts: list[int] = []
        self.error = ""

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        """tokens (T,), the first time those before the answer, then one more each time; logits
        (1, V) -> logits (1, V).
        """
        new = [] if self._seen is None else tokens[self._seen :].tolist()
        self._seen = tokens.size
        for token in new:
            if self._awaited:
                self._thoughts = [*self._thoughts, token][-len(self._awaited) :]
                self._awaited = [] if self._thoughts == self._awaited else self._awaited
            elif self._call is not None:
                self._call = self._call[1:]
            elif self._may_call and token == self._call_start[0]:
                self._call = self._call_start[1:]
            elif not self._matcher.is_stopped():
                self._call_start = []
                self._matcher.consume_token(token)
        if self._awaited or self._call == []:
            return logits
        allowed = np.zeros(logits.shape[-1], np.bool_)
        if self._call:
            allowed[self._call[0]] = True
        else:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
            self.error = self.error or self._matcher.get_error()
            if self.error:
                return logits
            known = np.unpackbits(bits, bitorder="little")[: allowed.size]
            allowed[: known.size] = known
            self._may_call = bool(self._call_start) and not allowed[self._call_start[0]]
            if self._may_call:
                allowed[self._call_start[0]] = True
        return mx.where(mx.array(allowed), logits, -mx.inf)
