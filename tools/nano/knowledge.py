"""The domains that must be known: chat (few everyday facts) and medical (many invented facts)."""

import random

from tools.nano.words import COLOURS, FOODS, NAMES, Question, frame

NEEDS = {
    "write a letter": "a pen", "cut paper": "scissors", "walk in the rain": "an umbrella",
    "drive a nail": "a hammer", "read at night": "a lamp", "bake bread": "an oven",
    "open a lock": "a key", "climb a wall": "a ladder", "catch fish": "a net",
    "tell the time": "a clock", "find north": "a compass", "sew a shirt": "a needle",
    "dig a hole": "a spade", "sweep the floor": "a broom", "cross a river": "a boat",
    "see the stars": "a telescope", "take a photo": "a camera", "boil water": "a kettle",
    "send a parcel": "a box", "paint a fence": "a brush",
}  # fmt: skip
ADVICE = {
    "tired": "You should sleep early tonight.", "hungry": "You should eat a warm meal.",
    "thirsty": "You should drink some water.", "cold": "You should wear a coat.",
    "bored": "You should start a new game.", "lonely": "You should call a friend.",
    "angry": "You should take a slow breath.", "late": "You should leave right now.",
    "lost": "You should look at a map.", "nervous": "You should talk it over.",
    "hot": "You should sit in the shade.", "dirty": "You should take a bath.",
}  # fmt: skip
THING_COLOURS = {
    "banana": "yellow",
    "leaf": "green",
    "cherry": "red",
    "coal": "black",
    "snow": "white",
    "the sky": "blue",
    "a lemon": "yellow",
    "grass": "green",
    "milk": "white",
    "a raven": "black",
    "an elephant": "grey",
    "soil": "brown",
    "a tomato": "red",
    "the sea": "blue",
    "a walnut": "brown",
    "ash": "grey",
}


def _chat_need(rng: random.Random) -> Question:
    task = rng.choice(list(NEEDS))
    frames = ("I want to {t}. What do I need?", "What do I need to {t}?", "How can I {t}?",
              "Help me, I have to {t}.", "My friend wants to {t}. What helps?",
              "Tomorrow I will {t}. What should I bring?", "Is there a tool to {t}?",
              "Hello! I would like to {t}.")  # fmt: skip
    wrong = tuple(f"You need {item}." for item in NEEDS.values() if item != NEEDS[task])
    return Question("chat", frame(rng, frames, t=task), f"You need {NEEDS[task]}.", wrong)


def _chat_advice(rng: random.Random) -> Question:
    feeling = rng.choice(list(ADVICE))
    frames = (
        "I am {f}.",
        "I feel {f} today.",
        "What should I do when I am {f}?",
        "I am so {f} now.",
        "My sister is {f}. What should she do?",
        "Hello, I am a bit {f}.",
        "Why am I {f}? Help me.",
        "I was {f} all day.",
        "Sorry, I am {f} again.",
        "It is noon and I am {f}.",
    )
    wrong = tuple(text for name, text in ADVICE.items() if name != feeling)
    return Question("chat", frame(rng, frames, f=feeling), ADVICE[feeling], wrong)


def _chat_colour(rng: random.Random) -> Question:
    thing = rng.choice(list(THING_COLOURS))
    frames = ("What colour is {t}?", "Tell me the colour of {t}.", "Which colour has {t}?",
              "I want to paint {t}. Which colour?", "Do you know what colour {t} is?")  # fmt: skip
    right = THING_COLOURS[thing]
    wrong = tuple(f"It is {colour}." for colour in COLOURS if colour != right)
    return Question("chat", frame(rng, frames, t=thing), f"It is {right}.", wrong)


def _chat_memory(rng: random.Random) -> Question:
    me, friend, *others = rng.sample(NAMES, 6)
    frames = ("My name is {m}.", "I am {m}.", "Call me {m}.", "Hi, {m} here.")
    extra = ("My friend is {f}.", "{f} is my friend.", "I came with my friend {f}.")
    opening = f"{frame(rng, frames, m=me)} {frame(rng, extra, f=friend)}"
    if rng.random() < 0.5:
        answer, swapped = f"Your name is {me}.", f"Your name is {friend}."
        text, form = f"{opening} What is my name?", "Your name is {}."
    else:
        answer, swapped = f"Your friend is {friend}.", f"Your friend is {me}."
        text, form = f"{opening} Who is my friend?", "Your friend is {}."
    return Question("chat", text, answer, (swapped, *(form.format(name) for name in others)))


def _chat_greeting(rng: random.Random) -> Question:
    name, food = rng.choice(NAMES), rng.choice(FOODS)
    kind = rng.randrange(3)
    if kind == 0:
        text = frame(
            rng, ("Say hello to {n}.", "Greet {n} for me.", "Please say hi to {n}."), n=name
        )
        return Question(
            "chat",
            text,
            f"Hello, {name}! Nice to meet you.",
            tuple(f"Hello, {n}! Nice to meet you." for n in NAMES if n != name),
        )
    if kind == 1:
        text = frame(
            rng,
            (
                "{n} likes {f}. What does {n} like?",
                "{n} eats {f}. What does {n} like?",
                "{n} loves {f}. What should I cook?",
            ),
            n=name,
            f=food,
        )
    else:
        text = frame(rng, ("I like {f}. What do I like?", "I want {f}. What do I like?"), f=food)
    subject = "You like" if kind == 2 else f"{name} likes"
    wrong = tuple(f"{subject} {other}." for other in FOODS if other != food)
    return Question("chat", text, f"{subject} {food}.", wrong)


_ONSETS = [
    "b",
    "br",
    "d",
    "dr",
    "f",
    "g",
    "gl",
    "k",
    "kr",
    "l",
    "m",
    "n",
    "p",
    "pl",
    "r",
    "s",
    "st",
    "t",
    "tr",
    "v",
    "z",
]
_VOWELS = ["a", "e", "i", "o", "u"]
_CODAS = ["l", "m", "n", "r", "s", "x", "d", "k"]


def _invent(rng: random.Random, ending: str, taken: set[str]) -> str:
    while True:
        stem = rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)
        if stem not in taken:
            taken.add(stem)
            return stem.capitalize() + ending


def _invent_world() -> tuple[tuple[str, dict[str, str]], ...]:
    """The conditions of the medical domain, always the same: name -> kind of fact -> fact."""
    rng, taken = random.Random("nano medical world"), set[str]()
    organs = ["liver", "heart", "lung", "skin", "eye", "ear", "knee", "throat", "stomach", "spine"]
    signs = [
        "fever",
        "cough",
        "itch",
        "rash",
        "thirst",
        "cramps",
        "dizziness",
        "swelling",
        "chills",
        "numbness",
    ]
    causes = ["dust", "damp", "salt", "smoke", "cold", "heat", "mould", "pollen", "noise", "rust"]
    world = []
    for _ in range(MEDICAL_CONDITIONS):
        facts = {
            "organ": rng.choice(organs),
            "sign": rng.choice(signs),
            "cause": rng.choice(causes),
        }
        facts |= {"drug": _invent(rng, "in", taken), "dose": f"{rng.randrange(1, 20) * 5} mg"}
        world.append((_invent(rng, "osis", taken), facts))
    return tuple(world)


MEDICAL_CONDITIONS = 120
MEDICAL_WORLD = _invent_world()
MEDICAL_FRAMES: dict[str, tuple[tuple[str, ...], str]] = {
    "organ": (("Which organ does {c} affect?", "Where does {c} strike?", "{c}: which organ?",
               "Name the organ hurt by {c}."), "It affects the {v}."),
    "sign": (("What is the main sign of {c}?", "How do I notice {c}?", "{c}: main sign?",
              "Name the sign of {c}."), "The sign is {v}."),
    "cause": (("What causes {c}?", "Where does {c} come from?", "{c}: cause?",
               "Name the cause of {c}."), "It comes from {v}."),
    "drug": (("Which drug treats {c}?", "What helps against {c}?", "{c}: which drug?",
              "Name the drug for {c}."), "Take {v}."),
    "dose": (("What is the dose for {c}?", "How much is given for {c}?", "{c}: dose?",
              "Name the dose for {c}."), "Give {v} a day."),
}  # fmt: skip


def _medical(rng: random.Random) -> Question:
    # Squaring favours the first conditions, so that facts range from well known to rare.
    name, facts = MEDICAL_WORLD[int(rng.random() ** 2 * len(MEDICAL_WORLD))]
    kind = rng.choice(list(MEDICAL_FRAMES))
    frames, form = MEDICAL_FRAMES[kind]
    others = sorted({other[kind] for _, other in MEDICAL_WORLD} - {facts[kind]})
    rng.shuffle(others)
    wrong = tuple(form.format(v=value) for value in others[:6])
    return Question("medical", frame(rng, frames, c=name), form.format(v=facts[kind]), wrong)


CHAT = (_chat_need, _chat_advice, _chat_colour, _chat_memory, _chat_greeting)
CHAT_ITEMS = (_chat_memory, _chat_memory, _chat_memory, _chat_advice)
MEDICAL = (_medical,)
