"""Finds what an array in a trace really is, across the calls that were traced apart."""

from collections.abc import Sequence

from mlxstacks.guard.pieces import PASSED_ON, Piece


class Instance:
    """One call of a piece: where its inputs come from, and the calls inside it."""

    def __init__(self, piece: Piece, outside: "Instance | None", given: Sequence[str]) -> None:
        self.piece, self.graph = piece, piece.graph
        self.outside, self.given = outside, given
        self.indirect = piece.indirect
        self._inside: dict[int, Instance] = {}
        self._resolved: dict[str, tuple[Instance, str]] = {}

    def resolve(self, letter: str) -> "tuple[Instance, str]":
        """Where an array is really made: inside a call, or outside of this one."""
        if letter not in self.indirect:
            return self, letter
        found = self._resolved.get(letter)
        if found is None:
            at, other = self.jump(letter)
            while (passed := at.passed_on(other)) is not None:
                at, other = at.jump(passed)
            found = self._resolved[letter] = (at, other)
        return found

    def jump(self, letter: str) -> "tuple[Instance, str]":
        """From the results and inputs of calls to what they are."""
        at = self
        while True:
            if letter in at.piece.inner:
                number, index = at.piece.inner[letter]
                at = at.inside(number)
                letter = at.graph.results[index]
            elif at.outside is not None and letter in at.piece.inputs:
                letter = at.given[at.piece.inputs[letter]]
                at = at.outside
            else:
                return at, letter

    def passed_on(self, letter: str) -> str | None:
        operation = self.graph.producer.get(letter, -1)
        if operation < 0 or self.graph.names[operation] not in PASSED_ON:
            return None
        return self.graph.inputs[operation][self.graph.outputs[operation].index(letter)]

    def inside(self, number: int) -> "Instance":
        if number not in self._inside:
            call = self.piece.calls[number]
            self._inside[number] = Instance(call.piece, self, call.given)
        return self._inside[number]
