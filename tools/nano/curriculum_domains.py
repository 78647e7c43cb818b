"""The curriculum's five domains: what the base was never taught, each with a form of its own.

letters   a persona's letters: names and things copied into a set form, and a time for each place
queries   a sentence turned into a query: an answer in a strict format, slots copied
tolu      an invented language of 18 words, adjectives behind nouns, both ways
islands   facts of 16 invented islands, each asked for in seven wordings
music     notes so many steps apart, and strings of instruments

A generator takes a `random.Random` and returns one `Question`, as nano's own domains do. Questions
of a kind differ in wording, and the wordings do not change the answer: what is asked in validation
or in an item was trained in other words (islands, times of letters, strings) or follows from what
was trained (the rest).
"""

import random
from collections.abc import Callable

from tools.nano.words import COLOURS, FOODS, NAMES, OBJECTS, PLACES, Question, frame

Generator = Callable[[random.Random], Question]

SIGNED = "Z"
TIMES = ("at ten", "at six", "at two", "at four")
# Which time belongs to a place is a fact to learn; neighbours in the list differ.
TIME_OF_PLACE = {place: TIMES[(3 * i + i // 4) % 4] for i, place in enumerate(PLACES)}
LETTER_KINDS: dict[str, tuple[tuple[str, ...], str]] = {
    "thanks": (("Write {n}: I have the {o}.", "Write to {n}: the {o} is here.",
                "Write {n}: the {o} came.", "Write {n}, I like the {o}."),
               "Hello {n}, nice {o}."),
    "lost": (("Write {n}: I lost the {o}.", "Write to {n}: the {o} is lost.",
              "Write {n}: the {o} is not here.", "Write {n}, I need a {o}."),
             "Hello {n}, I have no {o}."),
    "invite": (("Write {n}: come to the {o}.", "Write to {n}: we meet in the {o}.",
                "Write {n}: go to the {o}.", "Write {n}, I am in the {o}."),
               "Hello {n}, come {t}."),
}  # fmt: skip


def _letter(rng: random.Random) -> Question:
    kind, name = rng.choice(list(LETTER_KINDS)), rng.choice(NAMES)
    topics = PLACES if kind == "invite" else OBJECTS
    topic = rng.choice(topics)
    frames, _ = LETTER_KINDS[kind]
    right = _letter_text(kind, name, topic)
    other_name = rng.choice([n for n in NAMES if n != name])
    other_topic = rng.choice([t for t in topics if t != topic])
    wrong = [_letter_text(kind, other_name, topic), _letter_text(kind, name, other_topic)]
    if kind == "invite":
        wrong += [right.replace(TIME_OF_PLACE[topic], t) for t in TIMES]
    else:
        swapped = "lost" if kind == "thanks" else "thanks"
        wrong.append(_letter_text(swapped, name, topic))
    options = tuple(text for text in dict.fromkeys(wrong) if text != right)
    return Question("letters", frame(rng, frames, n=name, o=topic), right, options)


def _letter_text(kind: str, name: str, topic: str) -> str:
    form = LETTER_KINDS[kind][1]
    return f"{form.format(n=name, o=topic, t=TIME_OF_PLACE.get(topic, ''))} {SIGNED}"


TABLES = ("books", "coins", "cups", "pens", "maps")
SHOWN = ("name", "colour", "key")
MEASURED = ("dose", "number", "day")
SIGNS = {"above": ">", "below": "<", "like": "="}
QUERY_FRAMES = ("Which {s} have {t} with {m} {w} {k}?", "Tell the {s} of {t} with {m} {w} {k}.",
                "The {t} with {m} {w} {k}: {s}?", "My {t} with {m} {w} {k}: the {s}?")  # fmt: skip


def _query(rng: random.Random) -> Question:
    table, shown, measured = rng.choice(TABLES), rng.choice(SHOWN), rng.choice(MEASURED)
    word, k = rng.choice(list(SIGNS)), rng.randrange(2, 100)

    def text(s: str = shown, m: str = measured, w: str = word, k: int = k) -> str:
        return f"Take {table}: {m} {SIGNS[w]} {k}: {s}"

    wrong = [text(s=s) for s in SHOWN if s != shown] + [
        text(m=m) for m in MEASURED if m != measured
    ]
    wrong += [text(w=w) for w in SIGNS if w != word] + [text(k=k + 1), text(k=k + 10)]
    rng.shuffle(wrong)
    prompt = frame(rng, QUERY_FRAMES, s=shown, t=table, m=measured, w=word, k=str(k))
    return Question("queries", prompt, text(), tuple(wrong))


def _invent_words(english: list[str], ending: str) -> dict[str, str]:
    """Words of two syllables, always the same; the last letter tells nouns from adjectives."""
    rng = random.Random(f"tolu {ending}")
    first = [c + v for c in "bdfgklmnprstvz" for v in "aeiou"]
    return {
        word: stem + rng.choice("klmnrstv") + ending
        for word, stem in zip(english, rng.sample(first, len(english)), strict=True)
    }


TOLU_NOUNS = _invent_words(OBJECTS, "o")
TOLU_ADJECTIVES = _invent_words(COLOURS, "i")
TO_TOLU = ("Say {e} in Tolu.", "What is {e} in Tolu?", "Tolu for {e}?", "Put {e} into Tolu.")
FROM_TOLU = ("What is {e}?", "Tell me what {e} is.", "{e}, what is this?", "Tolu {e} is what?")


def _tolu(rng: random.Random) -> Question:
    noun, colour = rng.choice(OBJECTS), rng.choice([*COLOURS, None])
    to_tolu = rng.random() < 0.5
    swaps = [(n, colour) for n in OBJECTS if n != noun]
    if colour is not None:
        swaps += [(noun, c) for c in COLOURS if c != colour]
    rng.shuffle(swaps)
    asked, answer = _phrases(noun, colour) if to_tolu else _phrases(noun, colour)[::-1]
    wrong = tuple(_phrases(n, c)[int(to_tolu)] + "." for n, c in swaps)
    return Question("tolu", frame(rng, TO_TOLU if to_tolu else FROM_TOLU, e=asked),
                    f"{answer}.", wrong)  # fmt: skip


def _phrases(noun: str, colour: str | None) -> tuple[str, str]:
    """(English, Tolu)."""
    if colour is None:
        return noun, TOLU_NOUNS[noun]
    return f"{colour} {noun}", f"{TOLU_NOUNS[noun]} {TOLU_ADJECTIVES[colour]}"


ISLANDS = ("Aldoa", "Bruna", "Corva", "Delmi", "Estia", "Falur", "Gondo", "Hesta",
           "Ilmar", "Jorna", "Kesto", "Lurba", "Marok", "Nilba", "Orsta", "Pelgo")  # fmt: skip
ISLAND_KINDS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "king": (("Who is king of {i}?", "Who is the king on {i}?", "Name the king of {i}.",
              "{i}: who is king?", "On {i}: who is king?", "Tell me the king of {i}.",
              "The king of {i} is who?"),
             "King {v}.", tuple(NAMES[:16:2])),
    "food": (("Which food has {i}?", "What is the food on {i}?", "Name the food of {i}.",
              "{i}: which food?", "On {i}: the food?", "Tell me the food of {i}.",
              "The food of {i} is what?"),
             "They like {v}.", tuple(FOODS[:8])),
    "wind": (("Which wind has {i}?", "What is the wind on {i}?", "Name the wind of {i}.",
              "{i}: which wind?", "On {i}: the wind?", "Tell me the wind of {i}.",
              "The wind of {i} is what?"),
             "It comes from {v}.", ("north", "south", "east", "west")),
    "flag": (("Which flag has {i}?", "What is the flag on {i}?", "Name the flag of {i}.",
              "{i}: which flag?", "On {i}: the flag?", "Tell me the flag of {i}.",
              "The flag of {i} is what?"),
             "A {v} flag.", tuple(COLOURS)),
}  # fmt: skip


def _invent_islands() -> dict[str, dict[str, str]]:
    """Island -> kind -> fact. Every value of a kind is true of equally many islands."""
    rng = random.Random("nano islands")
    world: dict[str, dict[str, str]] = {island: {} for island in ISLANDS}
    for kind, (_, _, values) in ISLAND_KINDS.items():
        shared_out = list(values) * (len(ISLANDS) // len(values))
        rng.shuffle(shared_out)
        for island, value in zip(ISLANDS, shared_out, strict=True):
            world[island][kind] = value
    return world


ISLAND_FACTS = _invent_islands()


def _island(rng: random.Random) -> Question:
    island, kind = rng.choice(ISLANDS), rng.choice(list(ISLAND_KINDS))
    frames, form, values = ISLAND_KINDS[kind]
    right = ISLAND_FACTS[island][kind]
    wrong = tuple(
        form.format(v=value) for value in rng.sample(values, len(values)) if value != right
    )
    return Question("islands", frame(rng, frames, i=island), form.format(v=right), wrong)


NOTES = ("do", "re", "mi", "fa", "sol", "la", "ti")
STEPS = ("one", "two", "three", "four", "five", "six")
STRINGS = {"lute": 6, "harp": 9, "fiddle": 4, "zither": 8, "lyre": 7, "viol": 5}
NOTE_FRAMES = ("Which note is {k} {w} {n}?", "Play the note {k} {w} {n}.", "Note {k} {w} {n}?",
               "Tell me the note {k} {w} {n}.", "What note is {k} {w} {n}?",
               "I want the note {k} {w} {n}.")  # fmt: skip
STRING_FRAMES = ("How many strings has a {s}?", "The strings of a {s}?", "A {s}: how many strings?",
                 "Tell me the strings of a {s}.", "A {s} has how many strings?",
                 "What is on a {s}, how many strings?")  # fmt: skip


def _music(rng: random.Random) -> Question:
    if rng.random() < 0.2:
        name = rng.choice(list(STRINGS))
        wrong = [f"It has {n}." for n in range(4, 10) if n != STRINGS[name]]
        rng.shuffle(wrong)
        prompt = frame(rng, STRING_FRAMES, s=name)
        return Question("music", prompt, f"It has {STRINGS[name]}.", tuple(wrong))
    note, steps, up = rng.randrange(7), rng.randrange(1, 7), rng.random() < 0.5
    right = NOTES[(note + (steps if up else -steps)) % 7]
    prompt = frame(
        rng, NOTE_FRAMES, k=STEPS[steps - 1], w="above" if up else "below", n=NOTES[note]
    )
    others = tuple(f"Play {n}." for n in rng.sample(NOTES, 7) if n != right)
    return Question("music", prompt, f"Play {right}.", others)


GENERATORS: dict[str, Generator] = {
    "letters": _letter,
    "queries": _query,
    "tolu": _tolu,
    "islands": _island,
    "music": _music,
}
