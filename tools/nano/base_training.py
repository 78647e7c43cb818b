"""Training of nano's base: tokenizer, then every weight, in one process or in several."""

import hashlib
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlxstacks import base_model
from mlxstacks.data import batch_at, pack_rows
from mlxstacks.processes import current_group
from mlxstacks.training.initial import set_initial_weights
from mlxstacks.training.loop import TrainingState, load_state, new_state, save_state, train
from mlxstacks.training.step import cross_entropy_loss
from mlxstacks.training.tokenizer import train_tokenizer
from tools.nano.corpus import training_documents
from tools.nano.encode import encode_documents
from tools.nano.forward import forward_with_balance
from tools.nano.settings import RebuildSettings
from tools.nano.tokenizer import load_tokenizer, tokenizer_text

TOKENIZER_DOCUMENTS = 20_000
STATE_FILE = "base-state.safetensors"
WEIGHTS_FILE = "base-float32.safetensors"


def run_id(settings: RebuildSettings) -> str:
    """Names what the trained base depends on: all settings but paths and those of what comes after
    it.
    """
    after = {"adapter", "persona", "stacks", "outcomes", "router"}
    other = {"save_path", "force", "resume", "processes", *after}
    part = settings.model_dump_json(exclude=other)
    return hashlib.sha256(part.encode()).hexdigest()[:16]


def make_tokenizer(settings: RebuildSettings, directory: Path) -> Any:
    """Train and load the tokenizer; a function of the settings alone."""
    documents = training_documents(TOKENIZER_DOCUMENTS, settings.seed)
    texts = [tokenizer_text(document.prompt, document.answer) for document in documents]
    train_tokenizer(texts, settings.shape.vocab_size, directory)
    return load_tokenizer(directory)


def train_base(settings: RebuildSettings, work: Path, tokenizer: Any) -> nn.Module:
    """The base in float32; goes on from the state that an earlier run saved in `work`."""
    group = current_group()
    main = group is None or group.rank() == 0
    path, run = work / STATE_FILE, run_id(settings)
    optimizer = settings.optimizer
    model = base_model.build_model(settings.shape.config())
    set_initial_weights(model, settings.seed)
    model.train()
    state = new_state(optimizer)
    if settings.resume and path.exists():
        state = load_state(path, model, optimizer, run)
    if state.step >= optimizer.steps:
        return model

    def on_step(state: TrainingState, record: dict[str, float]) -> None:
        last = state.step == optimizer.steps
        if not main or (state.step % optimizer.log_every and not last):
            return
        rate = record["tokens"] / record["seconds"]
        place = f"step {state.step}/{optimizer.steps}"
        sys.stderr.write(f"{place}  loss {record['loss']:.4f}  {rate:,.0f} tokens/s\n")
        sys.stderr.flush()
        save_state(path, model, state, run)

    length = settings.row_length + 1
    documents = training_documents(settings.documents, settings.seed)
    rows = pack_rows(encode_documents(documents, tokenizer, settings.prompt_weight), length)
    train(
        model, cross_entropy_loss(forward_with_balance, settings.balance_weight),
        lambda step: [batch_at(rows, step, settings.batch_size, settings.seed, length)],
        optimizer, state, group=group, on_step=on_step,
    )  # fmt: skip
    return model


def load_trained(settings: RebuildSettings, work: Path) -> nn.Module:
    """The base as the training left it in `work`."""
    model = base_model.build_model(settings.shape.config())
    model.load_weights(str(work / WEIGHTS_FILE))
    model.eval()
    return model


def main() -> None:
    """One of the processes of the rebuild: settings as JSON, then the work directory."""
    settings, work = RebuildSettings.model_validate_json(sys.argv[1]), Path(sys.argv[2])
    model = train_base(settings, work, load_tokenizer(work / "tokenizer"))
    group = current_group()
    if group is None or group.rank() == 0:
        weights = dict(tree_flatten(model.parameters()))
        mx.save_safetensors(str(work / WEIGHTS_FILE), weights)


if __name__ == "__main__":
    main()
