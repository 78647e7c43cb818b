"""Steps with the loss in pieces, and with the whole: a table, and a process that counts them.

Pieces are short and the vocabulary wide, so that the logits are what fills the memory.
"""

import gc
import json
import sys
from dataclasses import dataclass
from typing import Any

from mlxstacks.guard.settings import GuardSettings
from mlxstacks.ops import token_loss
from tests.counting import Counter
from tests.guard.cases import Case, real_weights

VOCABULARY, PIECE = 8192, 16


@dataclass(frozen=True)
class LossCase(Case):
    """A run with wide logits."""

    loss: str = "pieces"
    tied: bool = False
    vocabulary: int = VOCABULARY

    def config(self) -> dict[str, Any]:
        config = super().config()
        config["text_config"] |= {"vocab_size": self.vocabulary, "tie_word_embeddings": self.tied}
        return config | {"tie_word_embeddings": self.tied}

    def settings(self) -> GuardSettings:
        return super().settings().model_copy(update={"loss": self.loss})


CASES = (
    LossCase(128, layers=2, interval=2, recurrence="chunked"),
    LossCase(100, layers=2, interval=2, recurrence="chunked", checkpointing="layers", tied=True),
    LossCase(200, 2, 2, recurrence="chunked", checkpointing="layers", bits=4, optimizer="adamw"),
    LossCase(64, layers=2, interval=2, recurrence="chunked", loss="whole"),
    LossCase(24, layers=2, interval=2, batch_size=3, keys="attention", bits=8, tied=True),
)


def short_pieces() -> None:
    token_loss.PIECE_LOGITS = PIECE * VOCABULARY


def main() -> None:
    from tests.guard.count_worker import run

    short_pieces()
    counter = Counter()
    for fields in json.load(sys.stdin):
        gc.collect()
        before = counter.live
        with LossCase(**fields).step() as step:
            real_weights(step)
            result = run(step, counter)
        print(json.dumps(result | {"before": before}), flush=True)
        del step


if __name__ == "__main__":
    main()
