"""Answers after each domain: what a loss of 0.3 more means in words.

The prompts are those of the first validation rows of every domain, trained or not yet, the same
after each domain. A prompt is answered greedily by the base and in each mode of the matrix; with
`prefix` and `isolated` only once its domain is trained. Rows without a prompt (plain text, or where
every token counts) have nothing to answer.
"""

from collections.abc import Sequence
from typing import Any

from mlxstacks import base_model
from mlxstacks.data import Row
from mlxstacks.layers.selection import base, subset, ungated
from mlxstacks.layers.stacked import set_mode
from mlxstacks.routing.generation import Prompt, PromptCache, Sampling, generate
from mlxstacks.studies.stack.setup import StackSetup
from mlxstacks.study.document import Columns, Table
from mlxstacks.study.render.words import short
from mlxstacks.training.continual import Served, stacks_for

ANSWER_TOKENS = 48
_LONGEST = 200


def answered_samples(
    setup: StackSetup, served: Sequence[Served], count: int
) -> list[dict[str, Any]]:
    """domain, prompt, expected and answers (mode -> text) of `count` prompts, domains by turns.

    Law: afterwards every stack is on.
    """
    trained = [entry.domain for entry in served]
    samples = []
    for name, row in _rows(setup, count):
        start = _answer_begins(row)
        selections = {"base": base(), "ungated": ungated()}
        if name in trained:
            selections |= {m: subset(stacks_for(m, served, name)) for m in setup.settings.modes}
        answers = {}
        for mode, selection in selections.items():
            if mode == "base" or mode in setup.settings.modes:
                set_mode(setup.model, selection, setup.served_dtype)
                answers[mode] = _answer(setup, row.tokens[:start])
        prompt, expected = row.tokens[:start], row.tokens[start:]
        samples.append({
            "domain": name, "prompt": _text(setup, prompt), "expected": _text(setup, expected),
            "answers": answers,
        })  # fmt: skip
    set_mode(setup.model, ungated(), setup.served_dtype)
    return samples


def _rows(setup: StackSetup, count: int) -> list[tuple[str, Row]]:
    usable = {
        name: [row for row in rows.samples if _answer_begins(row) > 1]
        for name, rows in setup.rows.items()
    }
    most = max(map(len, usable.values()), default=0)
    turns = [(n, rows[i]) for i in range(most) for n, rows in usable.items() if i < len(rows)]
    return turns[:count]


def _answer_begins(row: Row) -> int:
    """Place of the first token whose loss counts; 0 where none does."""
    return next((place for place, weight in enumerate(row.weights) if weight > 0), 0)


def _answer(setup: StackSetup, tokens: Sequence[int]) -> str:
    pieces = generate(
        setup.model, setup.tokenizer, Prompt(tuple(tokens), len(tokens) - 1),
        PromptCache(lambda: base_model.make_prompt_cache(setup.model)),
        Sampling(max_tokens=ANSWER_TOKENS),
    )  # fmt: skip
    return "".join(piece.text for piece in pieces)


def _text(setup: StackSetup, tokens: Sequence[int]) -> str:
    return str(setup.tokenizer.decode(list(tokens), skip_special_tokens=True)).strip()


def samples_table(samples: dict[str, Sequence[dict[str, Any]]]) -> Table:
    """samples: domain trained last -> what `answered_samples` gives."""
    modes = list(dict.fromkeys(m for rows in samples.values() for s in rows for m in s["answers"]))
    columns: Columns = dict.fromkeys(("prompt", "of", "after", "expected", *modes), "text")
    rows = [
        (short(s["prompt"], _LONGEST), s["domain"], after, short(s["expected"], _LONGEST),
         *(short(s["answers"].get(mode, ""), _LONGEST) for mode in modes))
        for after, of_domain in samples.items()
        for s in of_domain
    ]  # fmt: skip
    # the answers to one prompt below each other
    order = list(dict.fromkeys(row[:2] for row in rows))
    rows.sort(key=lambda row: order.index(row[:2]))
    return Table.of("samples", "Answers after each domain", columns, rows, folded=True)
