"""Finds the operations that `mx.compile` fused into one.

A fused operation carries the names of its parts in its label, each part after its inputs:
`CompiledBroadcastMultiplyAdd`. Walking the trace from the fused result, every input is either a
part too, which then stands next in the label, or an input of the whole.
"""

from collections.abc import Callable, Sequence

from mlxstacks.guard.instances import Instance

# More tries than this and the label is left unread.
_MOST_TRIES = 20_000
# MLX fuses no deeper.
_DEPTH = 11
_Array = tuple[Instance, str]


class _TooManyTriesError(Exception):
    pass


def match_fused(
    label: str, inputs: Sequence[int], at: Instance, letter: str
) -> list[tuple[int, Instance, str]]:
    """Each of `inputs` with the array of the trace that it is, or nothing where none fit.

    (at, letter): the result of the fused operation in the trace. With several results the one that
    is made last gives a match; the others give none.
    """
    search = _Search(label.removeprefix("Compiled"), len(inputs))
    try:
        if not search.part((at, letter), 0, 0, search.complete):
            return []
    except _TooManyTriesError:
        return []
    return [(mine, *other) for mine, other in zip(inputs, search.solution, strict=True)]


class _Search:
    """Depth first, with a way back: `then` goes on with the rest of the label."""

    def __init__(self, text: str, count: int) -> None:
        self.text, self.count = text, count
        self.parts: set[tuple[int, str]] = set()
        self.inputs: list[_Array] = []
        self.solution: list[_Array] = []
        self.tries = 0

    def complete(self, position: int) -> bool:
        if position != len(self.text) or len(self.inputs) != self.count:
            return False
        self.solution = list(self.inputs)
        return True

    def part(self, array: _Array, depth: int, position: int, then: Callable[[int], bool]) -> bool:
        """Take `array` as a part: its inputs first, then its own name."""
        self.tries += 1
        if self.tries > _MOST_TRIES:
            raise _TooManyTriesError
        at, letter = array
        operation = at.graph.producer.get(letter, -1)
        if depth >= _DEPTH or operation < 0 or len(at.graph.outputs[operation]) != 1:
            return False
        name = at.graph.names[operation]
        if self.text.find(name, position) < 0:
            return False
        key = (id(at), letter)
        self.parts.add(key)

        def own_name(now: int) -> bool:
            return self.text.startswith(name, now) and then(now + len(name))

        given = at.graph.inputs[operation]
        arrays = [at.resolve(one) for one in given]
        if self.each(arrays, 0, depth + 1, position, own_name):
            return True
        self.parts.discard(key)
        return False

    def each(
        self,
        arrays: list[_Array],
        index: int,
        depth: int,
        position: int,
        then: Callable[[int], bool],
    ) -> bool:
        """Go through the inputs of a part, the first of them first."""
        if index == len(arrays):
            return then(position)

        def rest(now: int) -> bool:
            return self.each(arrays, index + 1, depth, now, then)

        array = arrays[index]
        # A broadcast is copied to each of its users; anything else occurs once.
        if (id(array[0]), array[1]) in self.parts and not _is_broadcast(array):
            return rest(position)
        known = any(array == other for other in self.inputs)
        if not known and self.part(array, depth, position, rest):
            return True
        if known:
            return rest(position)
        self.inputs.append(array)
        if len(self.inputs) <= self.count and rest(position):
            return True
        self.inputs.pop()
        return False


def _is_broadcast(array: _Array) -> bool:
    at, letter = array
    operation = at.graph.producer.get(letter, -1)
    return operation >= 0 and at.graph.names[operation] == "Broadcast"
