"""One count over all parts of a run, so that one bar goes once from nothing to all."""

from mlxstacks.study.answer_log import Progress


class WholeProgress:
    """What a run's parts report, as shares of `total`, in whatever unit the parts are sized in.

    A total that nobody knows before some parts are done is estimated: a part takes its size of the
    bar however much it turns out to be. A part beyond the estimate takes half of what is left.
    """

    def __init__(self, progress: Progress | None, total: float) -> None:
        self._progress, self._total, self._done = progress, total, 0.0
        self._starts: dict[str, float] = {}

    def part(self, size: float, what: str) -> Progress:
        """The callback of the next part, `size` of the whole; its own counts are scaled to that.

        A part that is begun again, as answers that two steps need, adds nothing and says nothing.
        """
        again = what in self._starts
        start = self._starts.setdefault(what, self._done)
        if start + size > self._total * (1 + 1e-9):
            size = (self._total - start) / 2
        self._done = max(self._done, start + size)

        def step(done: float, total: float, detail: str = "") -> None:
            if self._progress and total and not again:
                self._progress(start + size * min(1.0, done / total), self._total, what)

        return step
