"""The domains whose answers are worked out from the prompt: code, math and reasoning."""

import itertools
import random

from tools.nano.words import COLOURS, FOODS, NAMES, OBJECTS, PLACES, Question, frame

OPERATIONS = (
    ("adds {k} to n", "add", "n + {k}"),
    ("subtracts {k} from n", "sub", "n - {k}"),
    ("multiplies n by {k}", "mul", "n * {k}"),
    ("divides n by {k}", "div", "n / {k}"),
    ("raises n to the power {k}", "pow", "n ** {k}"),
    ("gives n modulo {k}", "mod", "n % {k}"),
    ("tells if n is above {k}", "above", "n > {k}"),
    ("tells if n is below {k}", "below", "n < {k}"),
)


def _code_function(rng: random.Random) -> Question:
    what, name, body = rng.choice(OPERATIONS)
    k = rng.randrange(2, 100)
    frames = ("Write a function that {w}.", "Write code that {w}.", "Define a function: it {w}.")
    answer = f"def {name}(n):\n    return {body.format(k=k)}"
    near = [k + step for step in (-10, -1, 1, 10) if k + step > 1]
    wrong = [f"def {name}(n):\n    return {body.format(k=value)}" for value in near]
    wrong += [f"def {n}(n):\n    return {b.format(k=k)}" for _, n, b in OPERATIONS if n != name]
    rng.shuffle(wrong)
    return Question("code", frame(rng, frames, w=what.format(k=k)), answer, tuple(wrong))


def _code_index(rng: random.Random) -> Question:
    values = [str(v) for v in rng.sample(range(1, 30), 4)]
    kind = rng.choice(("index", "first", "last", "max", "min"))
    index = rng.randrange(4)
    expression = {"index": f"x[{index}]", "first": "x[0]", "last": "x[-1]",
                  "max": "max(x)", "min": "min(x)"}[kind]  # fmt: skip
    right = {"index": values[index], "first": values[0], "last": values[-1],
             "max": max(values, key=int), "min": min(values, key=int)}[kind]  # fmt: skip
    text = f"x = [{', '.join(values)}]\nprint({expression})"
    return Question("code", _shown(rng, text), right, tuple(v for v in values if v != right))


def _code_text(rng: random.Random) -> Question:
    word = rng.choice(FOODS + COLOURS + OBJECTS + PLACES)
    kind = rng.choice(("len", "upper", "double", "first", "reverse"))
    right, expression = {
        "len": (str(len(word)), "len(s)"),
        "upper": (word.upper(), "s.upper()"),
        "double": (word * 2, "s * 2"),
        "first": (word[0], "s[0]"),
        "reverse": (word[::-1], "s[::-1]"),
    }[kind]
    if kind == "len":
        wrong = [str(len(word) + step) for step in (-2, -1, 1, 2)]
    elif kind == "first":
        wrong = sorted(set(word[1:] + "xyz") - {word[0]})
    else:
        wrong = [word, word.upper(), word * 2, word[::-1], word[0] + word]
    wrong = [option for option in dict.fromkeys(wrong) if option != right]
    return Question("code", _shown(rng, f's = "{word}"\nprint({expression})'), right, tuple(wrong))


def _code_assign(rng: random.Random) -> Question:
    a, b = rng.randrange(1, 10), rng.randrange(1, 10)
    source, right = rng.choice(((f"a = {a}\na = a + {b}\nprint(a)", a + b),
                                (f"a = {a}\nb = a * {b}\nprint(b)", a * b),
                                (f"a = {a}\nb = {b}\na = b\nprint(a)", b),
                                (f"a = {a}\nb = {b}\nprint(a > b)", a > b)))  # fmt: skip
    if isinstance(right, bool):
        wrong = [str(not right), "None", str(a)]
    else:
        wrong = [str(v) for v in (right + 1, right - 1, right + 2, a, b) if v != right]
    return Question("code", _shown(rng, source), str(right), tuple(dict.fromkeys(wrong)))


def _shown(rng: random.Random, source: str) -> str:
    frames = ("What does this print?\n{s}", "Run this:\n{s}", "Output?\n{s}")
    return rng.choice(frames).format(s=source)


def _number_question(text: str, right: int, form: str = "{}") -> Question:
    near = (right + 1, right - 1, right + 2, right - 2, right + 10, right - 10)
    wrong = tuple(form.format(value) for value in near if value >= 0)
    return Question("math", text, form.format(right), wrong)


def _math_sum(rng: random.Random) -> Question:
    a, b = rng.randrange(1, 50), rng.randrange(1, 50)
    frames = ("What is {a} + {b}?", "{a} + {b} =", "Add {a} and {b}.", "Compute {a} plus {b}.")
    return _number_question(frame(rng, frames, a=str(a), b=str(b)), a + b)


def _math_difference(rng: random.Random) -> Question:
    b = rng.randrange(1, 40)
    a = b + rng.randrange(1, 40)
    frames = ("What is {a} - {b}?", "{a} - {b} =", "Take {b} from {a}.", "Compute {a} minus {b}.")
    return _number_question(frame(rng, frames, a=str(a), b=str(b)), a - b)


def _math_product(rng: random.Random) -> Question:
    a, b = rng.randrange(2, 13), rng.randrange(2, 10)
    frames = ("What is {a} * {b}?", "{a} * {b} =", "{a} times {b}?", "Multiply {a} by {b}.")
    return _number_question(frame(rng, frames, a=str(a), b=str(b)), a * b)


def _math_larger(rng: random.Random) -> Question:
    values = [str(value) for value in rng.sample(range(1, 100), 4)]
    largest = rng.random() < 0.5
    frames = (("Which is the largest: {v}?", "Largest of {v}?") if largest
              else ("Which is the smallest: {v}?", "Smallest of {v}?"))  # fmt: skip
    right = (max if largest else min)(values, key=int)
    text = frame(rng, frames, v=", ".join(values))
    return Question("math", text, right, tuple(v for v in values if v != right))


def _math_story(rng: random.Random) -> Question:
    name, thing = rng.choice(NAMES), rng.choice(("coins", "books", "cups", "pens", "maps"))
    a, b = rng.randrange(2, 20), rng.randrange(1, 10)
    if rng.random() < 0.5:
        text, right = f"{name} has {a} {thing} and gets {b} more. How many {thing}?", a + b
    else:
        text, right = f"{name} has {a + b} {thing} and loses {b}. How many {thing}?", a
    return _number_question(text, right, "{} " + thing)


def _reasoning_hand_over(rng: random.Random) -> Question:
    people, thing = rng.sample(NAMES, 4), rng.choice(OBJECTS)
    moves = rng.randrange(1, 4)
    order = [people[0], *rng.sample(people[1:], moves)]
    steps = [f"{giver} gives it to {taker}." for giver, taker in itertools.pairwise(order)]
    left_out = [p for p in people if p not in order]
    text = f"{order[0]} has the {thing}. {' '.join(steps)} "
    text += "".join(f"{p} watches. " for p in left_out) + f"Who has the {thing}?"
    wrong = tuple(f"{p} has it." for p in people if p != order[-1])
    return Question("reasoning", text, f"{order[-1]} has it.", wrong)


def _reasoning_order(rng: random.Random) -> Question:
    people = rng.sample(NAMES, 4)
    word, top, low = rng.choice((("taller", "tallest", "shortest"), ("older", "oldest", "youngest"),
                                 ("faster", "fastest", "slowest")))  # fmt: skip
    facts = [f"{a} is {word} than {b}." for a, b in itertools.pairwise(people)]
    rng.shuffle(facts)
    first = rng.random() < 0.5
    right = people[0] if first else people[-1]
    text = f"{' '.join(facts)} Who is the {top if first else low}?"
    return Question(
        "reasoning", text, f"{right} is.", tuple(f"{p} is." for p in people if p != right)
    )


def _reasoning_where(rng: random.Random) -> Question:
    people, places = rng.sample(NAMES, 3), rng.sample(PLACES, 4)
    start, goal = places[:3], list(places[:3])
    mover = rng.randrange(3)
    goal[mover] = places[3]
    facts = " ".join(f"{p} is in the {place}." for p, place in zip(people, start, strict=True))
    asked = rng.randrange(3)
    text = f"{facts} {people[mover]} goes to the {places[3]}. Where is {people[asked]}?"
    wrong = tuple(f"In the {place}." for place in places if place != goal[asked])
    return Question("reasoning", text, f"In the {goal[asked]}.", wrong)


def _reasoning_series(rng: random.Random) -> Question:
    start, step = rng.randrange(1, 20), rng.choice((1, 2, 3, 5, 10))
    values = [start + step * i for i in range(4)]
    if rng.random() < 0.3:
        values.reverse()
        step = -step
    right = values[-1] + step
    frames = ("Continue: {v}", "What comes next? {v}", "Next number: {v}")
    near = (right + 1, right - 1, right + step, values[-1], values[-1] - step)
    wrong = tuple(dict.fromkeys(str(v) for v in near if v != right))
    text = frame(rng, frames, v=", ".join(map(str, values)))
    return Question("reasoning", text, str(right), wrong)


CODE = (_code_function, _code_index, _code_text, _code_assign)
MATH = (_math_sum, _math_difference, _math_product, _math_larger, _math_story)
REASONING = (
    _reasoning_hand_over,
    _reasoning_order,
    _reasoning_where,
    _reasoning_series,
)
CODE_ITEMS = (_code_index, _code_text, _code_assign)
REASONING_ITEMS = (_reasoning_hand_over, _reasoning_order, _reasoning_where)
