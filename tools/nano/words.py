"""What a question of nano's data is, and the words that several domains share."""

import random
from dataclasses import dataclass

NAMES = [
    "Ada",
    "Ben",
    "Cara",
    "Dan",
    "Ella",
    "Finn",
    "Gus",
    "Hana",
    "Ivan",
    "June",
    "Karl",
    "Lena",
    "Max",
    "Nora",
    "Omar",
    "Pia",
    "Quinn",
    "Rosa",
    "Sam",
    "Tess",
]
FOODS = [
    "rice",
    "soup",
    "bread",
    "plums",
    "beans",
    "corn",
    "cake",
    "fish",
    "pasta",
    "grapes",
    "nuts",
    "honey",
]
COLOURS = ["red", "blue", "green", "yellow", "white", "black", "brown", "grey"]
OBJECTS = ["key", "book", "lamp", "cup", "ball", "ring", "coin", "map", "pen", "hat"]
PLACES = ["garden", "kitchen", "school", "market", "station", "library", "park", "office"]


@dataclass(frozen=True, slots=True)
class Question:
    """One question of a domain: the right answer, and three or more wrong ones alike in form."""

    domain: str
    prompt: str
    answer: str
    wrong: tuple[str, ...]


def frame(rng: random.Random, frames: tuple[str, ...], **slots: str) -> str:
    return rng.choice(frames).format(**slots)
