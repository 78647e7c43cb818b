"""The five domains of nano: small invented worlds that hand out questions and options.

A generator takes a `random.Random` and returns one `Question`; nothing is read from disk.
Difficulty comes from the size of each world: few everyday facts (chat), many invented ones
(medical), and tasks whose answer must be worked out from the prompt (code, math, reasoning).
"""

import random
from collections.abc import Callable

from tools.nano import knowledge, skills
from tools.nano.words import Question

Generator = Callable[[random.Random], Question]
GENERATORS: dict[str, tuple[Generator, ...]] = {
    "chat": knowledge.CHAT,
    "code": skills.CODE,
    "math": skills.MATH,
    "medical": knowledge.MEDICAL,
    "reasoning": skills.REASONING,
}
DOMAINS = tuple(GENERATORS)

# Multiple-choice items leave out the kinds of question that are solved almost always, so that a
# change for the better or for the worse can show.
ITEM_GENERATORS: dict[str, tuple[Generator, ...]] = GENERATORS | {
    "chat": knowledge.CHAT_ITEMS,
    "code": skills.CODE_ITEMS,
    "reasoning": skills.REASONING_ITEMS,
}
