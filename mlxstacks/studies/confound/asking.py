"""Items put to an arm, which is loaded when it is first needed; answers are kept as they come."""

from collections.abc import Callable, Sequence

from mlxstacks.studies.confound.answers import Answer, AnswerFile, AnswerItems
from mlxstacks.studies.confound.items import Item

Progress = Callable[..., None]


def ask_missing(
    file: AnswerFile,
    count: int,
    batch_size: int,
    answer: AnswerItems,
    progress: Progress | None,
) -> list[Answer]:
    """The answers to the first `count` items of a file; only those that are missing are asked.

    progress: (done, count, name of the file), before each batch.
    Raises: InputError for a file of other answers.
    """
    done = len(file.answers())

    def told(items: Sequence[Item]) -> Sequence[Answer]:
        nonlocal done
        if progress:
            progress(done, count, file.path.stem)
        found = answer(items)
        done += len(found)
        return found

    return file.go_on(count, batch_size, told)
