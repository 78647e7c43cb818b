"""Groups of prompts for `mlxstacks profile`, with the same number of content tokens in each.

A row is a question with or without options (MMLU-Pro), or what `train` takes: messages, prompt and
answer, text. Answers are left out: prompt tokens only. Tokens of the chat template go through the
model and are not counted: they are the same in every prompt, so that short prompts, which have a
larger share of them, would seem to be routed differently.
"""

import random
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from mlxstacks.data import ChatTokenizer, Rendering, SourceSettings, as_messages
from mlxstacks.data.chat import content_mask
from mlxstacks.data.encode import begin_mark
from mlxstacks.data.sources import open_source
from mlxstacks.data.special_text import encode_text
from mlxstacks.errors import InputError
from mlxstacks.files.disk import user_path
from mlxstacks.files.strict_json import json_sha256
from mlxstacks.studies.profile.settings import ProfileSettings
from mlxstacks.study.plan import ids_sha256, rows_sha256

# Chance levels take 10,000 draws of all pairs of groups, for each number of top layers: of 200
# groups 3 seconds each (measured), of ten times as many a hundred times as long.
MOST_GROUPS = 200
_IDS = ("question_id", "id", "item_id")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt. item_id: of its row, or the hash of its text. is_content: of each token whether
    it is counted.
    """

    item_id: str
    tokens: tuple[int, ...]
    is_content: tuple[bool, ...]

    @property
    def length(self) -> int:
        """Tokens that are counted."""
        return sum(self.is_content)

    def first(self, count: int) -> Self:
        """The prompt, or where it has more than `count` content tokens, up to that one."""
        if count >= self.length:
            return self
        places = [place for place, counted in enumerate(self.is_content) if counted]
        end = places[count - 1] + 1
        return replace(self, tokens=self.tokens[:end], is_content=self.is_content[:end])


@dataclass(frozen=True)
class PromptGroup:
    """Prompts of one group, as many content tokens as every other group.

    available: rows it was drawn from. cut: prompts that were longer than max_seq_length. unused:
    drawn, but beyond the tokens.
    """

    name: str
    prompts: tuple[Prompt, ...]
    available: int
    cut: int
    unused: int

    @property
    def tokens(self) -> int:
        return sum(prompt.length for prompt in self.prompts)

    @property
    def sha256(self) -> str:
        """Of the token rows, in their order."""
        return rows_sha256(list(prompt.tokens) for prompt in self.prompts)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "available": self.available,
            "prompts": len(self.prompts),
            "tokens": self.tokens,
            "cut_prompts": self.cut,
            "unused_prompts": self.unused,
            "sha256": self.sha256,
        }


def items_sha256(groups: Sequence[PromptGroup]) -> str:
    """Of the ids of all prompts, whatever their order."""
    return ids_sha256(f"{g.name}/{prompt.item_id}" for g in groups for prompt in g.prompts)


def read_groups(settings: ProfileSettings, tokenizer: ChatTokenizer) -> list[PromptGroup]:
    """Read, draw, encode, and cut every group down to the same number of content tokens.

    Raises: InputError: rows that are no prompts, an id twice, fewer than two groups, a group of
        fewer than two prompts or with fewer tokens than asked for.
    """
    rows = _rows_by_group(settings)
    for name in rows:
        if any("\ud800" <= character <= "\udfff" for character in name):
            raise InputError(f"{settings.data}: {name!a} is no UTF-8; rename what is called so")
    if len(rows) > MOST_GROUPS:
        raise InputError(
            f"{settings.data}: {len(rows):,} groups by the key {settings.group_key!r}, allowed: "
            f"{MOST_GROUPS}, since all pairs are compared; name some with --groups, or the key of "
            f"larger ones with --group-key"
        )
    drawn: dict[str, list[Prompt]] = {}
    cut: dict[str, int] = {}
    for name, of_group in rows.items():
        chance = random.Random(f"{settings.seed}/{name}")
        chosen = chance.sample(of_group, min(len(of_group), settings.questions))
        every = [_encode(row, where, key, tokenizer, settings) for where, key, row in chosen]
        cut[name] = sum(is_cut for _, is_cut in every)
        drawn[name] = [prompt for prompt, _ in every]
    totals = {name: sum(p.length for p in prompts) for name, prompts in drawn.items()}
    smallest = min(totals, key=lambda name: totals[name])
    budget = settings.tokens or totals[smallest]
    if budget > totals[smallest]:
        raise InputError(
            f"tokens is {budget:,}, but {smallest} has {totals[smallest]:,} in "
            f"{len(drawn[smallest])} prompts; ask for fewer tokens or more questions"
        )
    groups = []
    for name, prompts in drawn.items():
        kept = first_tokens(prompts, budget)
        unused = len(prompts) - len(kept)
        groups.append(PromptGroup(name, tuple(kept), len(rows[name]), cut[name], unused))
    few = [group.name for group in groups if len(group.prompts) < 2]
    if few:
        raise InputError(
            f"{', '.join(few)}: one prompt alone has the {budget:,} tokens of a group; at least "
            "two prompts are needed: lower max_seq_length or give more rows"
        )
    return groups


def first_tokens(prompts: Sequence[Prompt], budget: int) -> list[Prompt]:
    """The first prompts with `budget` content tokens in all, so many at most; the last one may be
    cut.
    """
    kept, left = [], budget
    for prompt in prompts:
        if not left:
            break
        kept.append(prompt.first(left))
        left -= kept[-1].length
    return kept


# --- rows -----------------------------------------------------------------------------------------

# (where it stands, id, row)
_Row = tuple[str, str, dict[str, Any]]


def _rows_by_group(settings: ProfileSettings) -> dict[str, list[_Row]]:
    groups: dict[str, list[_Row]] = {}
    seen: dict[tuple[str, str], str] = {}
    for name, where, row in _named_rows(settings):
        if settings.groups and name not in settings.groups:
            groups.setdefault(name, [])
            continue
        key = _id_of(row, where)
        before = seen.setdefault((name, key), where)
        if before != where:
            raise InputError(f"{where}: id {key!r} of {name} is also at {before}; ids are unique")
        groups.setdefault(name, []).append((where, key, row))
    unknown = [name for name in settings.groups if name not in groups]
    if unknown:
        raise InputError(f"no group {', '.join(unknown)} in {settings.data}: {_some(groups)}")
    groups = {name: rows for name, rows in sorted(groups.items()) if rows}
    if len(groups) < 2:
        raise InputError(f"{settings.data}: {_some(groups)}; a profile compares two groups or more")
    few = [name for name, rows in groups.items() if len(rows) < 2]
    if few:
        raise InputError(f"{settings.data}: only one row of {', '.join(few)}; two are needed")
    return groups


def _some(groups: Mapping[str, Any]) -> str:
    names = list(groups)
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return f"there {'is' if len(names) == 1 else 'are'} {', '.join(names[:20]) or 'none'}{more}"


def _named_rows(settings: ProfileSettings) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """(group, where, row) of all rows."""
    data = str(settings.data)
    path = user_path(data)
    if path.is_dir():
        files = sorted(file for file in path.glob("*.jsonl") if file.is_file())
        if not files:
            raise InputError(f"{path}: no .jsonl file; a directory has one for each group")
        for file in files:
            for where, row in open_source(SourceSettings(path=str(file)), Path()).rows:
                yield file.stem, where, row
        return
    by_path = path.exists() or path.suffix in (".jsonl", ".json", ".parquet")
    source = SourceSettings(path=data) if by_path else SourceSettings(
        dataset=data, split=settings.split
    )  # fmt: skip
    for where, row in open_source(source, Path()).rows:
        name = row.get(settings.group_key)
        if not isinstance(name, str) or not name.strip():
            raise InputError(
                f"{where}: {settings.group_key} is {name!r}, it must name the row's group; the row "
                f"has the keys {sorted(row)} (--group-key)"
            )
        yield name.strip(), where, row


def _id_of(row: Mapping[str, Any], where: str) -> str:
    given = next((row[key] for key in _IDS if key in row), None)
    if given is None:
        return json_sha256(row)[:16]
    if isinstance(given, bool) or not isinstance(given, str | int):
        raise InputError(f"{where}: id is {given!r}, it must be text or a whole number")
    return str(given)


def _encode(
    row: Mapping[str, Any],
    where: str,
    key: str,
    tokenizer: ChatTokenizer,
    settings: ProfileSettings,
) -> tuple[Prompt, bool]:
    """(the prompt, whether it was cut to max_seq_length)."""
    try:
        messages = _prompt_messages(row, settings.options)
    except InputError as error:
        raise InputError(f"{where}: {error}") from None
    limit = settings.max_seq_length + 1  # one more says that a prompt is longer
    if isinstance(messages, list) and settings.chat_template and has_template(tokenizer):
        tokens, counted = content_mask(messages, tokenizer, Rendering.of(settings), limit)
    else:
        plain = messages if isinstance(messages, str) else "\n\n".join(
            message["content"] for message in messages
        )  # fmt: skip
        begin = begin_mark(tokenizer)
        text = encode_text(plain, tokenizer, settings.allow_special, limit)
        tokens, counted = [*begin, *text], [False] * len(begin) + [True] * len(text)
    most = settings.max_seq_length
    prompt = Prompt(key, tuple(tokens[:most]), tuple(counted[:most]))
    if not prompt.length:
        raise InputError(
            f"{where}: the prompt is empty, or the chat template leaves none of it in the first "
            f"{most} tokens; raise max_seq_length or use --no-chat-template"
        )
    return prompt, len(tokens) > most


def has_template(tokenizer: Any) -> bool:
    return bool(getattr(tokenizer, "chat_template", None))


def _prompt_messages(row: Mapping[str, Any], options: bool) -> list[dict[str, Any]] | str:
    """What is asked, without the answer; text rows as they are."""
    if "question" in row and "messages" not in row:
        return [{"role": "user", "content": _question(row, options)}]
    messages = as_messages(row)
    if messages is None:
        return str(row["text"])
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise InputError("no message but the assistant's; a prompt is needed")
    return messages


def _question(row: Mapping[str, Any], options: bool) -> str:
    """The question, then a line for each option with its letter."""
    question, given = row["question"], row.get("options")
    if not isinstance(question, str) or not question.strip():
        raise InputError(f"question is {question!r}, it must be text")
    if given is None or not options:
        return question
    # A list, or letters to options, as in MedQA.
    values = list(given.values()) if isinstance(given, dict) else given
    whole = isinstance(values, list) and all(isinstance(value, str) for value in values)
    if not whole or not 2 <= len(values) <= len(string.ascii_uppercase):
        raise InputError(f"options is {str(given)[:80]}; it must be a list of 2 to 26 texts")
    letters = string.ascii_uppercase
    lines = [f"{letter}. {value}" for letter, value in zip(letters, values, strict=False)]
    return "\n".join([question, *lines])
