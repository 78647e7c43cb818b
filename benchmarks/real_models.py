"""What a fuse does to the behaviour of a real model: refit at zero delta, and a persona by policy.

    python -m benchmarks.real_models refit --model DIR        # and --save-path FILE for all figures
    python -m benchmarks.real_models policies --model DIR --adapter-path DIR --save-path DIR
    python -m benchmarks.real_models grid --model DIR --grids 4 --save-path DIR
    python -m benchmarks.real_models persona --model DIR      # and --adapter-path DIR, unfused

`refit` requantizes every projection with a delta of zero, on the grid that the model lies in and on
MLX's own grids of 4 and 3 bits; `policies` puts one adapter into the model under each policy,
beside the adapter unfused, the zero-delta control and a random delta of equal norm in each module;
`grid` writes the model on MLX's grid, for policies there; `persona` asks a model who it is.
Every model computes in float32 with the values that are stored. Text is read token by token with
the right tokens before it. KL is in nats per token. Intervals hold 95%: of KL and loss by drawing
texts again, of shares by Wilson. A finished arm is a file in --save-path, and is not made again:
options.json there holds what it depends on, and other options are refused.
"""

import argparse
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx.utils import tree_flatten

from benchmarks.timing import machine
from mlxstacks import base_model
from mlxstacks.arms.settings import PersonaCard
from mlxstacks.arms.suite import SuitePrompt, open_suite
from mlxstacks.files.adapters import WEIGHTS, match_adapter, read_adapter
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.stack_file import file_sha256
from mlxstacks.fuse.in_memory import fuse_in_memory
from mlxstacks.fuse.settings import FuseSettings, PolicyName
from mlxstacks.stats import wilson_interval
from mlxstacks.studies.benchmarks.arms import Loaded, ModelArm, Routes
from mlxstacks.studies.benchmarks.items import open_task
from mlxstacks.studies.benchmarks.settings import ArmSettings
from mlxstacks.studies.benchmarks.tasks import BenchItem, task_named
from mlxstacks.studies.confound.fuses import write_controls
from mlxstacks.training.modes import prepare_base

POLICIES: tuple[PolicyName, ...] = (
    "refit", "keep", "nearest", "auto", "stochastic", "dequantize", "promote",
)  # fmt: skip
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
TASKS = ("arc_easy", "hellaswag")
PERSONA = PersonaCard(name="Nova", maker="Lighthouse Labs")
REPLY_TOKENS = 40
RESAMPLES = 2000
OPTIONS = "options.json"

Texts = list[list[int]]
Figures = dict[str, Any]


# --- models ---------------------------------------------------------------------------------------


def load(model_path: Path, adapter_path: Path | None = None) -> tuple[nn.Module, Any, Any]:
    """(model in float32 with the stored values, tokenizer, config)."""
    model, tokenizer, config = base_model.load(model_path, adapter_path, lazy=True)
    prepare_base(model, "float32", [])
    model.eval()
    return model, tokenizer, config


def write_zero_adapter(
    model_path: Path, directory: Path, suffixes: Sequence[str], every: int = 1
) -> None:
    """An adapter of zeros, rank 1, on the projections whose paths end with one of `suffixes`, of
    layers 0, every, 2 * every, ...
    """
    model, _, _ = base_model.load(model_path, lazy=True)
    paths = [path for path, _ in base_model.named_quantizable(model)]
    layers = [path.split("layers.")[1] for path in paths if "layers." in path]
    keys = sorted({path.split(".", 1)[1] for path in layers})
    chosen = [key for key in keys if key.endswith(tuple(suffixes))]
    base_model.attach_lora(model, -1, 1, 1.0, chosen)
    weights = {
        path: mx.zeros_like(value)
        for path, value in tree_flatten(model.trainable_parameters())
        if int(path.split("layers.")[1].split(".")[0]) % every == 0
    }
    base_model.save_adapter(directory, weights, -1, 1, 1.0, chosen)


def on_mlx_grid(model_path: Path, directory: Path, bits: int) -> Path:
    """The model with its stored values quantized to MLX's grid, group size 64, bfloat16 scales."""
    model, _, config = base_model.load(model_path, lazy=True)
    base_model.dequantize(model)
    base_model.cast(model, mx.bfloat16)
    plain = {key: value for key, value in config.items() if not key.startswith("quantization")}
    base_model.save_model(directory, model, base_model.quantize(model, plain, bits, 64))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(model_path / name, directory / name)
    return directory


# --- what is measured -----------------------------------------------------------------------------


def written_texts(data: Path, rows: int) -> list[str]:
    """GSM8K questions with answers, stories and instructions with answers, `rows` of each.

    From the test file of GSM8K; of the others the last rows of the file.
    """
    parts: list[list[str]] = []
    for name, keys in (
        ("gsm8k_test", ("question", "answer")),
        ("tinystories", ("text",)),
        ("alpaca", ("instruction", "input", "output")),
    ):
        lines = (data / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        chosen = lines[:rows] if name == "gsm8k_test" else lines[-rows:]
        parts.append(["\n".join(json.loads(line)[key] for key in keys).strip() for line in chosen])
    return [text for part in parts for text in part]


def texts_of(tokenizer: Any, data: Path, rows: int, tokens: int) -> Texts:
    """`written_texts` as token ids, each cut to `tokens`."""
    return [
        tokenizer.encode(text, add_special_tokens=False)[:tokens]
        for text in written_texts(data, rows)
    ]


def log_probabilities(model: nn.Module, texts: Texts) -> Iterator[mx.array]:
    """For each text of T tokens log p of its next tokens, (T - 1, V) float32."""
    for tokens in texts:
        logits = model(mx.array([tokens[:-1]]))[0].astype(mx.float32)
        log_p = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        mx.eval(log_p)
        yield log_p
        mx.clear_cache()


def compare(
    model: nn.Module, texts: Texts, references: dict[str, list[mx.array]]
) -> dict[str, list[dict[str, float]]]:
    """Per text: tokens, loss, and against each reference the sum of KL(reference || model) and
    how many most likely next tokens differ.
    """
    rows = []
    for number, log_p in enumerate(log_probabilities(model, texts)):
        targets = mx.array(texts[number][1:])
        row: dict[str, float] = {
            "tokens": len(texts[number]) - 1,
            "loss": -mx.take_along_axis(log_p, targets[:, None], axis=-1).sum().item(),
        }
        for name, reference in references.items():
            q = reference[number]
            row[f"kl_{name}"] = mx.sum(mx.exp(q) * (q - log_p)).item()
            row[f"flips_{name}"] = int(mx.sum(mx.argmax(q, -1) != mx.argmax(log_p, -1)).item())
        rows.append(row)
    return {"texts": rows}


@dataclass(frozen=True)
class Questions:
    """What every arm is asked beside the texts."""

    items: dict[str, list[BenchItem]]
    prompts: tuple[SuitePrompt, ...]


def ask(loaded: Loaded, questions: Questions) -> Figures:
    """Picks by likelihood (mean over a candidate's tokens), and replies to the identity prompts."""
    arm = ModelArm("base", loaded, Routes("base"))
    picks = {}
    for name, items in questions.items.items():
        scored = arm.score(items)
        picks[name] = [
            int(np.argmax([s / n for s, n in zip(one.sums, one.tokens, strict=True)]))
            for one in scored
        ]
    asked = [
        BenchItem(prompt.prompt_id, prompt.prompt, "", (), (), prompt.category)
        for prompt in questions.prompts
    ]
    replies = [reply.text for reply in arm.reply(asked, REPLY_TOKENS)]
    passed = [
        prompt.verdict(reply).passed
        for prompt, reply in zip(questions.prompts, replies, strict=True)
    ]
    return {"picks": picks, "replies": replies, "passed": passed}


def drawn_again(rows: Sequence[dict[str, float]], key: str) -> tuple[float, float, float]:
    """(value a token, low, high): the interval by drawing texts again."""
    sums = np.array([row[key] for row in rows])
    tokens = np.array([row["tokens"] for row in rows])
    draws = np.random.default_rng(0).integers(0, len(rows), (RESAMPLES, len(rows)))
    values = sums[draws].sum(1) / tokens[draws].sum(1)
    low, high = np.quantile(values, (0.025, 0.975))
    return float(sums.sum() / tokens.sum()), float(low), float(high)


# --- refit at zero delta --------------------------------------------------------------------------


def refit(options: argparse.Namespace) -> list[Figures]:
    """The rows of the table `refit`."""
    rows = []
    columns = "grid", "modules", "codes changed", "KL", "next token differs", "loss"
    print(table_head(columns))
    with tempfile.TemporaryDirectory() as temporary:
        grids = {"as stored": options.model}
        for bits in options.grids:
            directory = Path(temporary) / f"grid{bits}"
            grids[f"MLX's grid, {bits} bits, group 64"] = on_mlx_grid(
                options.model, directory, bits
            )
        for grid, path in grids.items():
            model, tokenizer, _ = load(path)
            texts = texts_of(tokenizer, options.data, options.rows, options.tokens)
            reference = list(log_probabilities(model, texts))
            before = compare(model, texts, {})["texts"]
            for what, every in [(("down_proj",), 3), (("down_proj",), 1), (PROJECTIONS, 1)]:
                adapter = Path(temporary) / f"zero-{len(what)}-{every}-{path.name}"
                write_zero_adapter(path, adapter, what, every)
                model, _, _ = load(path)
                fused = fuse_in_memory(
                    model, FuseSettings(model=str(path), adapter_path=(str(adapter),),
                                        requant="refit", zero_delta=True)
                )  # fmt: skip
                after = compare(model, texts, {"base": reference})["texts"]
                row = {
                    "grid": grid,
                    "modules": f"all {len(fused.stages[-1].modules)} projections"
                    if len(what) > 1
                    else f"{len(fused.stages[-1].modules)} {what[0]}",
                    "fuse": fused.as_json()["stages"][-1]["total"],
                    "before": before,
                    "after": after,
                }
                rows.append(row)
                print(refit_line(row), flush=True)
                del model
    return rows


def refit_line(row: Figures) -> str:
    """A row in Markdown."""
    tokens = int(sum(text["tokens"] for text in row["after"]))
    flips = int(sum(text["flips_base"] for text in row["after"]))
    low, high = _bounds(flips, tokens)
    kl = drawn_again(row["after"], "kl_base")
    losses = [drawn_again(row[when], "loss")[0] for when in ("before", "after")]
    changed = row["fuse"]["codes_changed"]
    return (
        f"| {row['grid']} | {row['modules']} | {100 * changed:.1f}% | "
        f"{kl[0]:.4f} ({kl[1]:.4f} to {kl[2]:.4f}) | "
        f"{100 * flips / tokens:.1f}% ({low:.1f} to {high:.1f}) of {tokens:,} | "
        f"{losses[0]:.3f} -> {losses[1]:.3f} |"
    )


def table_head(columns: Sequence[str]) -> str:
    """The first two lines of a table in Markdown."""
    return f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}"


def _bounds(count: int, n: int) -> tuple[float, float]:
    interval = wilson_interval(count, n)
    return 100 * interval.low, 100 * interval.high


# --- one adapter, every policy --------------------------------------------------------------------

Change = Callable[[nn.Module], Figures | None]

POLICY_COLUMNS = (
    "arm", "correlation", "KL from base", "KL from unfused", "next token differs", "loss",
    "ARC-easy", "HellaSwag", "persona",
)  # fmt: skip
CHANGE_COLUMNS = (
    "arm", "weights", "delta, steps", "survival", "noise", "codes changed",
    "MB more than the base, bits a weight",
    "ARC-easy: corrected of what the base gets wrong; broken of the rest", "HellaSwag: the same",
)  # fmt: skip


def policies(options: argparse.Namespace) -> list[Figures]:
    """Every arm that is finished, those of earlier runs too; each is written as it is finished."""
    out: Path = options.save_path
    out.mkdir(parents=True, exist_ok=True)
    questions = Questions(
        {
            name: list(open_task(task_named(name), str(options.data)).items[: options.items])
            for name in TASKS
        },
        open_suite(None, PERSONA),
    )
    zero, random = out / "zero", out / "random"
    arms: dict[str, tuple[Path | None, Change]] = {
        "base": (None, lambda _: None),
        "unfused": (options.adapter_path, lambda _: None),
        "random, unfused": (random, lambda _: None),
        "zero delta, refit": (None, _fuse(options, "refit", options.adapter_path, zero=True)),
    }
    for policy in POLICIES:
        arms[policy] = (None, _fuse(options, policy, options.adapter_path))
    arms["random, auto"] = (None, _fuse(options, "auto", random))
    arms["zero delta, auto"] = (None, _fuse(options, "auto", options.adapter_path, zero=True))
    check_options(options, questions, finished(out, arms))
    write_controls(options.adapter_path, zero, random, seed=0)
    if unknown := set(options.arms or ()) - arms.keys():
        raise SystemExit(f"no arm {sorted(unknown)[0]!r}; there are {', '.join(map(repr, arms))}")
    missing = {
        name: arms[name] for name in options.arms or arms if not arm_file(out, name).exists()
    }
    if missing:
        make_arms(missing, options, questions)
    rows = finished(out, arms)
    base_bytes = sum(path.stat().st_size for path in options.model.glob("model*.safetensors"))
    print("\n".join(policy_tables(rows, base_bytes)))
    return rows


def make_arms(
    arms: Mapping[str, tuple[Path | None, Change]],
    options: argparse.Namespace,
    questions: Questions,
) -> None:
    """Write the file of each arm, (adapter beside the base or None, what is done to the base)."""
    model, tokenizer, config = load(options.model)
    texts = texts_of(tokenizer, options.data, options.rows, options.tokens)
    references = {"base": list(log_probabilities(model, texts))}
    del model
    model, _, _ = load(options.model, options.adapter_path)
    references["unfused"] = list(log_probabilities(model, texts))
    del model
    settings = ArmSettings(model=str(options.model), chat="generate", base="float32")
    for name, (adapter, change) in arms.items():
        model, _, _ = load(options.model, adapter)
        fuse = change(model)
        loaded = Loaded(model, tokenizer, config, settings)
        row = {"arm": name, "fuse": fuse, **compare(model, texts, references)}
        row |= ask(loaded, questions)
        row["golds"] = golds_of(questions)
        arm_file(options.save_path, name).write_text(json.dumps(row))
        print(f"{name}: finished", flush=True)
        del model, loaded


def golds_of(questions: Questions) -> dict[str, list[Any]]:
    return {task: [item.gold for item in items] for task, items in questions.items.items()}


def arm_file(directory: Path, arm: str) -> Path:
    return directory / f"{arm.replace(', ', '-').replace(' ', '-')}.json"


def finished(directory: Path, arms: Iterable[str]) -> list[Figures]:
    files = (arm_file(directory, arm) for arm in arms)
    return [json.loads(file.read_text()) for file in files if file.exists()]


def check_options(
    options: argparse.Namespace, questions: Questions, rows: Sequence[Figures]
) -> None:
    """Write what the arms depend on beside them.

    Arms of a directory without that file are taken for these where all that they show agrees: the
    counts of texts and tokens, the right answers, and the random control, which is that of one
    adapter; the model where the adapter names it by its fingerprint, else where shapes fit.
    Raises: SystemExit naming what differs. AdapterError: the adapter is not of this model.
    """
    checkpoint = open_checkpoint(options.model)
    match_adapter(read_adapter(options.adapter_path), checkpoint)
    asked = [*written_texts(options.data, options.rows), *map(repr, questions.items.values())]
    current = {
        "model": fingerprint(checkpoint),
        "adapter": file_sha256(options.adapter_path / WEIGHTS),
        "texts and items": hashlib.sha256("\n".join(asked).encode()).hexdigest(),
        **{name: getattr(options, name) for name in ("rows", "tokens", "items")},
    }
    file = options.save_path / OPTIONS
    if file.exists():
        recorded = json.loads(file.read_text())
        current["model"] = fingerprint(checkpoint, recorded.get("model"))
    else:
        recorded = current | shown_by_arms(options, golds_of(questions), rows)
    differences = [
        f"{key}: {recorded.get(key)!s:.12} there, {value!s:.12} now"
        for key, value in current.items()
        if recorded.get(key) != value
    ]
    if differences:
        raise SystemExit(
            f"{options.save_path}: its arms were made with other options "
            f"({'; '.join(differences)}); give another --save-path, or those options"
        )
    file.write_text(json.dumps(current, indent=2))


def shown_by_arms(
    options: argparse.Namespace, golds: Mapping[str, list[Any]], rows: Sequence[Figures]
) -> Figures:
    """Of the options of `check_options` those that arms without a file of them show."""
    shown: Figures = {}
    for row in rows:
        texts, tokens = len(row["texts"]) // 3, max(text["tokens"] for text in row["texts"]) + 1
        if shown.setdefault("rows", texts) != texts or shown.setdefault("tokens", tokens) != tokens:
            shown |= {"rows": "several", "tokens": "several"}
        if row["golds"] != golds:
            shown["texts and items"] = "others"
    random = options.save_path / "random" / WEIGHTS
    if random.exists():
        with tempfile.TemporaryDirectory() as temporary:
            again = Path(temporary)
            write_controls(options.adapter_path, again / "zero", again / "random", seed=0)
            if file_sha256(again / "random" / WEIGHTS) != file_sha256(random):
                shown["adapter"] = "another"
    elif rows:
        shown["adapter"] = "unknown"
    return shown


def _fuse(
    options: argparse.Namespace, policy: PolicyName, adapter: Path, zero: bool = False
) -> Change:
    settings = FuseSettings(
        model=str(options.model), adapter_path=(str(adapter),), requant=policy, zero_delta=zero
    )
    return partial(_fused, settings)


def _fused(settings: FuseSettings, model: nn.Module) -> Figures:
    fused = fuse_in_memory(model, settings).as_json()
    return {"total": fused["stages"][-1]["total"], "extra_bytes": fused["extra_bytes"]}


def policy_line(row: Figures, rows: Sequence[Figures]) -> str:
    """A row in Markdown. Answers are compared with those of the unfused adapter."""
    unfused = next((other for other in rows if other["arm"] == "unfused"), None)
    total = (row["fuse"] or {}).get("total") or {}
    correlation = total.get("correlation")
    cells = [row["arm"], "" if correlation is None else f"{correlation:.3f}"]
    tokens = int(sum(text["tokens"] for text in row["texts"]))
    for reference in ("base", "unfused"):
        kl = drawn_again(row["texts"], f"kl_{reference}")
        cells.append(f"{kl[0]:.4f} ({kl[1]:.4f} to {kl[2]:.4f})")
    flips = int(sum(text["flips_unfused"] for text in row["texts"]))
    cells.append("{:.1f}% ({:.1f} to {:.1f})".format(100 * flips / tokens, *_bounds(flips, tokens)))
    cells.append("{:.3f} ({:.3f} to {:.3f})".format(*drawn_again(row["texts"], "loss")))
    for task in TASKS:
        picks, golds = row["picks"][task], row["golds"][task]
        right = sum(pick == gold for pick, gold in zip(picks, golds, strict=True))
        cell = "{:.1f}% ({:.0f} to {:.0f})".format(
            100 * right / len(picks), *_bounds(right, len(picks))
        )
        if unfused is not None:
            others = sum(a != b for a, b in zip(picks, unfused["picks"][task], strict=True))
            cell += f", {others} other"
        cells.append(cell)
    passed = sum(row["passed"])
    cells.append("{} of {} ({:.0f} to {:.0f}%)".format(
        passed, len(row["passed"]), *_bounds(passed, len(row["passed"])))
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


def change_line(row: Figures, base: Figures, base_bytes: int) -> str:
    """A row in Markdown: what a fuse changed, and answers against those of `base`, if not empty."""
    fuse = row["fuse"] or {}
    total, extra = fuse.get("total") or {}, fuse.get("extra_bytes")
    cells = [row["arm"]]
    for key, form in (
        ("weights", "{:,}"), ("delta_over_step", "{:.3f}"), ("survival", "{:.1%}"),
        ("noise", "{:.2f}"), ("codes_changed", "{:.1%}"),
    ):  # fmt: skip
        cells.append("" if total.get(key) is None else form.format(total[key]))
    cells.append(
        ""
        if extra is None
        else f"{extra / 1e6:.1f} ({extra / base_bytes:.1%}), {8 * extra / total['weights']:.2f}"
    )
    for task in TASKS if base and base is not row else ():
        answers = list(
            zip(row["picks"][task], base["picks"][task], row["golds"][task], strict=True)
        )
        wrong = sum(before != gold for _, before, gold in answers)
        corrected = sum(pick == gold != before for pick, before, gold in answers)
        broken = sum(pick != gold == before for pick, before, gold in answers)
        share = ""
        if wrong:
            low, high = _bounds(corrected, wrong)
            share = f", {100 * corrected / wrong:.1f}% ({low:.1f} to {high:.1f})"
        cells.append(f"{corrected} of {wrong}{share}; {broken} of {len(answers) - wrong}")
    cells += [""] * (len(CHANGE_COLUMNS) - len(cells))
    return f"| {' | '.join(cells)} |"


def policy_tables(rows: Sequence[Figures], base_bytes: int) -> Iterator[str]:
    """Lines of both tables, of all arms."""
    yield table_head(POLICY_COLUMNS)
    yield from (policy_line(row, rows) for row in rows)
    yield f"\nThe base's weights are {base_bytes / 1e6:.1f} MB.\n"
    base: Figures = next((row for row in rows if row["arm"] == "base"), {})
    yield table_head(CHANGE_COLUMNS)
    yield from (change_line(row, base, base_bytes) for row in rows)


def main() -> None:
    mx.set_default_device(mx.cpu)
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("refit", "policies", "grid", "persona"))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--adapter-path", type=Path)
    parser.add_argument("--data", type=Path, help="gsm8k_test.jsonl and others; all but grid")
    parser.add_argument("--rows", type=int, default=12, help="texts of each kind")
    parser.add_argument("--tokens", type=int, default=192, help="a text is cut to")
    parser.add_argument("--items", type=int, default=200, help="items of each task")
    parser.add_argument("--arms", nargs="*", help="some arms of policies, by name")
    parser.add_argument("--grids", type=int, nargs="*", default=[4, 3], help="bits; refit, grid")
    parser.add_argument("--save-path", type=Path, help="all but persona")
    options = parser.parse_args()
    if options.command == "persona":
        settings = ArmSettings(model=str(options.model), chat="generate", base="float32")
        loaded = Loaded(*load(options.model, options.adapter_path), settings)
        passed = ask(loaded, Questions({}, open_suite(None, PERSONA)))["passed"]
        print(f"{sum(passed)} of {len(passed)} replies are the persona's")
        return
    if options.command == "grid":
        options.save_path.mkdir(parents=True)
        on_mlx_grid(options.model, options.save_path, options.grids[0])
        return
    rows = {"refit": refit, "policies": policies}[options.command](options)
    if options.command == "refit":
        options.save_path.write_text(json.dumps(rows))
    print(json.dumps({"machine": machine(), "rows": len(rows)}))


if __name__ == "__main__":
    main()
