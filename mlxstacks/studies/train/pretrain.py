"""`mlxstacks pretrain`: a small decoder from scratch, as a model that mlx-lm loads.

It is a run of `train` on every weight: the same core, state, log and resumption, alone or under
`mlx.launch`. The decoder is mlx-lm's own Llama. Texts are laid end to end and cut into rows of
`max_seq_length` tokens, whose last token is the first of the next row, so each is predicted once.
"""

import hashlib
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxstacks import base_model
from mlxstacks.command_line import command_line
from mlxstacks.data import (
    DomainData,
    EncodedRows,
    Row,
    data_notes,
    encode_examples,
    read_train_data,
    train_data_settings,
)
from mlxstacks.data.chat import strings_of
from mlxstacks.data.rows import row_of
from mlxstacks.errors import InputError
from mlxstacks.files.checkpoint import open_checkpoint
from mlxstacks.files.disk import mlx_write_errors
from mlxstacks.files.hub import resolve_model
from mlxstacks.files.outputs import PLACES, write_file, write_json
from mlxstacks.layers.settings import LoRASettings
from mlxstacks.memory import bytes_in_words
from mlxstacks.studies.train.report import TrainReport, document_of, measured_facts
from mlxstacks.studies.train.run import TrainRun, train_with
from mlxstacks.studies.train.setup import (
    GuardedRun,
    StackOfStore,
    TrainSetup,
    most_validated,
    optimizer_settings,
)
from mlxstacks.study.document import Table, counted
from mlxstacks.study.result import Result
from mlxstacks.training.batches import BatchPlan, choose_widths
from mlxstacks.training.initial import set_initial_weights
from mlxstacks.training.settings import LOGGING, PretrainSettings, TrainSettings
from mlxstacks.training.tokenizer import TOKENIZER_FILES, train_tokenizer

MODEL_FILES = ("model.safetensors", "config.json", *TOKENIZER_FILES)


def run(
    settings: PretrainSettings,
    *,
    dry_run: bool = False,
    progress: Callable[..., None] | None = None,
) -> Result:
    """Train, and write model, result, log and recipe to `settings.save_path`.

    Raises: as `train`; InputError for a model that is quantized, or text too short for the
        vocabulary.
    """
    return train_with(PretrainRun, cast(TrainSettings, settings), dry_run, progress)[1]


def new_config(settings: PretrainSettings, vocab_size: int, **special: int) -> dict[str, Any]:
    """The config of a new decoder, as mlx-lm and transformers read it. special: ids of tokens."""
    width = settings.hidden_size
    return {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": width,
        "num_hidden_layers": settings.num_hidden_layers,
        "intermediate_size": settings.intermediate_size or 32 * -(-8 * width // 96),
        "num_attention_heads": settings.num_attention_heads,
        "num_key_value_heads": settings.num_attention_heads, "rms_norm_eps": 1e-5,
        "vocab_size": vocab_size, "max_position_embeddings": settings.max_seq_length,
        "rope_theta": 10000.0, "tie_word_embeddings": True, "torch_dtype": "float32",
        **special,
    }  # fmt: skip


def laid_end_to_end(rows: Iterable[Row], length: int) -> list[Row]:
    """Rows of `length` tokens, the last one of what is left; each begins with the last token of the
    one before, which is then no target.

    Law: every token but the very first is a target once, with its weight.
    """
    tokens: list[int] = []
    weights: list[float] = []
    for row in rows:
        tokens += row.tokens
        weights += row.weights
    return [
        row_of(tokens[start : start + length], weights[start : start + length])
        for start in range(0, len(tokens) - 1, length - 1)
    ]


def texts_of(data: DomainData) -> list[str]:
    """The rows to train on as a tokenizer may learn from them."""
    return ["\n".join(strings_of(example.record)) for example in data.train]


def pretrain_result(report: TrainReport) -> Result:
    """The document of a pretraining."""
    stack = command_line("mlxstacks stack", model=report.save_path)
    chat = command_line("mlxstacks chat", model=report.save_path)
    result = document_of(report, _table(report))
    return result.model_copy(update={
        "kind": "pretrain", "title": "Pretraining",
        "question": "How well does a decoder of this size predict such text?",
        "next_steps": {"Try it": chat, "Stack": stack} if result.next_steps else {},
    })  # fmt: skip


@dataclass(frozen=True, eq=False)
class PretrainSetup(TrainSetup):
    """What the model directory gets besides the weights. tokenizer_files: content by name."""

    config: dict[str, Any] = field(default_factory=dict)
    tokenizer_files: dict[str, bytes] = field(default_factory=dict)


class PretrainRun(TrainRun):
    """A training of every weight."""

    command = "pretrain"
    result_of = staticmethod(pretrain_result)
    written = MODEL_FILES
    keeps_state = False
    setup: PretrainSetup

    @classmethod
    def prepare(
        cls,
        settings: TrainSettings,
        target: Path,
        processes: int,
        plan_only: bool,
        active: StackOfStore | None,
    ) -> tuple[GuardedRun, TrainReport]:
        options, notes = cast(PretrainSettings, settings), list[str]()
        if options.data is None:
            raise InputError("pretrain needs data")
        about = train_data_settings(options.data).rendered_as(options)
        if about.mask_prompt is None:
            about = about.model_copy(update={"mask_prompt": False})
        data = read_train_data(about, Path())
        notes += data_notes("data", data.report)
        directory = Path()
        with tempfile.TemporaryDirectory() as scratch:
            if options.model is not None:
                checkpoint = open_checkpoint(resolve_model(options.model))
                directory = checkpoint.directory
                if "quantization" in checkpoint.config:
                    raise InputError(f"{directory}: quantized; its weights cannot be trained")
                model, tokenizer, config = base_model.load(directory)
                base_model.cast(model, mx.float32)
                vocabulary = directory
            else:
                vocabulary = Path(scratch) if options.tokenizer is None else resolve_model(
                    options.tokenizer
                )  # fmt: skip
                if options.tokenizer is None:
                    train_tokenizer(texts_of(data), options.vocab_size, vocabulary)
                tokenizer = base_model.load_tokenizer(vocabulary)
                config = new_config(
                    options, len(tokenizer), eos_token_id=tokenizer.eos_token_id,
                    pad_token_id=tokenizer.pad_token_id,
                )  # fmt: skip
                model = base_model.build_model(config)
                set_initial_weights(model, options.seed)
            tokenizer_files = {
                name: (vocabulary / name).read_bytes()
                for name in TOKENIZER_FILES
                if (vocabulary / name).is_file()
            }

        def rows_of(part: str) -> EncodedRows | None:
            examples = getattr(data, part)
            if not examples:
                return None
            encoded = encode_examples(examples, tokenizer, about)
            notes.extend(f"{part}: {note}" for note in encoded.notes)
            return EncodedRows(
                laid_end_to_end(encoded.rows, options.max_seq_length), encoded.ids, 0, encoded.empty
            )

        train, held = rows_of("train"), rows_of("validation")
        assert train is not None
        if held is not None:
            held = EncodedRows(held.rows[: most_validated(options)], held.ids, 0, held.empty)
        lengths = tuple(len(row.tokens) for row in train.rows)
        plan = BatchPlan(
            lengths, choose_widths(lengths, options.max_seq_length), options.batch_size,
            options.seed,
        )  # fmt: skip
        setup = PretrainSetup(
            model, directory, "", True, LoRASettings(), [], train, held, data.report, plan,
            optimizer_settings(options, plan.batches_per_epoch, notes), notes, tokenizer=tokenizer,
            config=config, tokenizer_files=tokenizer_files,
        )  # fmt: skip
        return GuardedRun(settings, setup), cls._planned(options, setup, target)

    @staticmethod
    def _planned(settings: PretrainSettings, setup: PretrainSetup, target: Path) -> TrainReport:
        digests = {n: hashlib.sha256(b).hexdigest() for n, b in setup.tokenizer_files.items()}
        tokens = sum(setup.plan.lengths) / setup.plan.batches_per_epoch
        iters = setup.optimizer.steps * settings.grad_accumulation_steps
        details = {
            "config": setup.config, "tokenizer_sha256": digests,
            "trained_parameters": setup.parameters, "train_rows": len(setup.train.rows),
            "validation_rows": len(setup.validation_rows), "data": setup.data, "iters": iters,
            "tokens": round(iters * tokens), "steps": setup.optimizer.steps,
            "batches_per_epoch": setup.plan.batches_per_epoch, "guard": None,
            "writes": [str(target)],
        }  # fmt: skip
        shown = settings.model_dump(mode="json", exclude=PLACES)
        return TrainReport("planned", str(target), shown, details, setup.notes)

    def _identity(self) -> dict[str, Any]:
        about_time = {"save_every", "steps_per_report", "count_buffers", *LOGGING}
        places = PLACES | {"model", "data", "tokenizer"}
        names = ("config", "tokenizer_sha256", "iters", "train_rows", "validation_rows")
        start = [f"{n} {mx.sum(w).item()!r}" for n, w in tree_flatten(self.model.parameters())]
        return {
            **self.settings.model_dump(mode="json", exclude=about_time | places),
            **{name: self.plan.plan[name] for name in names},
            "data_sha256": [source["sha256"] for source in self.setup.data["sources"]],
            "start_sha256": hashlib.sha256("\n".join(start).encode()).hexdigest(),
        }

    def _write_adapter(self, directory: Path, tensors: dict[str, mx.array]) -> None:
        weights = dict(sorted({**dict(tree_flatten(self.model.parameters())), **tensors}.items()))
        path = directory / "model.safetensors"
        with mlx_write_errors(path):
            base_model.save_arrays(path, weights, {"format": "mlx"})
        write_json(directory / "config.json", self.setup.config)
        for name, content in self.setup.tokenizer_files.items():
            write_file(directory / name, content)


def _table(report: TrainReport) -> Table:
    plan, config = report.plan, report.plan["config"]
    size = bytes_in_words(4 * plan["trained_parameters"])
    rows = {
        "model": f"{config['model_type']}, width {config['hidden_size']}, "
        f"{counted(config['num_hidden_layers'], 'layer')}, {config['vocab_size']:,} tokens",
        "trained": f"{plan['trained_parameters']:,} parameters, {size}; as much twice more in the "
        "optimizer",
        "rows": f"{plan['train_rows']:,} to train, {plan['validation_rows']:,} to validate",
        "batches": f"{plan['iters']:,} in {counted(plan['steps'], 'optimizer step')}; "
        f"{counted(plan['tokens'], 'token')}",
    }
    return Table.of_facts("plan", "The run", rows | measured_facts(report))
