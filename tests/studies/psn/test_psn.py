"""`psn stacks` and `psn blocks` on decoders of a few thousand weights, stopped and resumed.

Run: pytest tests/studies/psn/test_psn.py
"""

import json
from pathlib import Path
from typing import Any

import pytest

import mlxstacks as ms
from mlxstacks import base_model
from mlxstacks.data.chat import prompt_tokens
from mlxstacks.data.rows import row_of
from mlxstacks.errors import InputError, StoreError
from mlxstacks.files.settings import StacksVerifySettings
from mlxstacks.files.store import Store
from mlxstacks.files.store_verify import verify_store
from mlxstacks.studies.psn import blocks, stacks
from mlxstacks.studies.psn.report import concluded
from mlxstacks.studies.psn.settings import PsnBlocksSettings, PsnStacksSettings
from mlxstacks.study.result import Result
from tests.studies.train_cases import write_rows

PRETRAIN: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 270,
    "max_seq_length": 64, "batch_size": 4, "warmup": 2, "iters": 6, "learning_rate": 1e-2,
}  # fmt: skip


@pytest.fixture
def data(tmp_path: Path) -> dict[str, str]:
    """A story corpus and two domains, each with an answer of its own kind."""
    files = {
        "stories": [{"text": f"The fox number {i} ran over hill {i % 7} and was happy."}
                    for i in range(120)],
        "code": [{"prompt": f"Add {i} please", "answer": f"def f(x): return x + {i}"}
                 for i in range(60)],
        "math": [{"prompt": f"How much is {i} and {i}?", "answer": f"<<{i}+{i}={2 * i}>> done"}
                 for i in range(60)],
    }  # fmt: skip
    return {n: str(write_rows(tmp_path / f"{n}.jsonl", rows)) for n, rows in files.items()}


def domains(data: dict[str, str]) -> list[dict[str, Any]]:
    return [{"name": name, "data": data[name]} for name in ("code", "math")]


class StopError(Exception):
    pass


def stopping_at(word: str) -> Any:
    def progress(done: float, total: float, what: str = "") -> None:
        if word in what:
            raise StopError

    return progress


def test_stacks_on_a_random_and_a_pretrained_base(tmp_path: Path, data: dict[str, str]) -> None:
    def settings_to(name: str) -> PsnStacksSettings:
        return PsnStacksSettings.model_validate({
            "corpus": data["stories"], "domains": domains(data), "seeds": [0, 1],
            "save_path": str(tmp_path / name), "pretrain": PRETRAIN,
            "stack": {"iters": 3, "rounds": 1, "max_seq_length": 64, "stack": {"rank": 2},
                      "validation_rows": 4, "patience": 100, "spike_threshold": 10.0,
                      "min_loss_delta": 0.0, "keep_plateau_stack": True, "modes": ["prefix"],
                      "null_space": {"directions": 2, "samples": 4}},
        })  # fmt: skip

    plan = stacks.run(settings_to("whole"), dry_run=True)
    rows = plan.table("plan").set_index("what")["value"]
    assert rows["domains"] == "code, math"
    assert "hidden_size 16" in rows["pretrain"]
    result = stacks.run(settings_to("whole"))
    figures = result.data["domains"]["math"]
    for arm in stacks.ARMS:
        assert figures[arm]["loss"]["mean"] < figures[arm]["loss_before"]["mean"]
        assert figures[arm]["delta_norm"]["mean"] > 0
    assert figures["on_random"]["captured_energy"]["mean"] <= 1 + 1e-6
    assert result.data["domains"]["code"]["on_random"]["captured_energy"] is None
    # the control costs as much: 4 P + 6 A operations a token against 6 P
    cell = result.data["cells"][0]["arms"]
    p, a = cell["control"]["code"]["parameters"], cell["on_random"]["code"]["parameters"]
    assert cell["control"]["code"]["steps"] == -(-3 * (4 * p + 6 * a) // (6 * p))
    with pytest.raises(StopError):
        stacks.run(settings_to("stopped"), progress=stopping_at("seed 1, all weights"))
    again = stacks.run(settings_to("stopped"))
    assert again.data["cells"] == result.data["cells"]
    assert Result.open(tmp_path / "stopped").verdict == result.verdict


def test_blocks_end_with_the_same_bytes_when_stopped(tmp_path: Path, data: dict[str, str]) -> None:
    def settings_to(name: str) -> PsnBlocksSettings:
        return PsnBlocksSettings.model_validate({
            "corpus": data["stories"], "domains": domains(data), "seeds": [3],
            "save_path": str(tmp_path / name), "pretrain": PRETRAIN, "iters": 12,
            "block": {"num_layers": 1, "stack": {"rank": 2}}, "batch_size": 4, "max_tokens": 3,
            "learning_rate": 1e-2, "validation_rows": 8, "directions": 2, "prompts": 4,
        })  # fmt: skip

    result = blocks.run(settings_to("whole"))
    (cell,) = result.data["cells"]
    assert cell["identical_at_0"]
    assert cell["story_loss"] == cell["story_loss_at_0"]
    assert cell["losses"]["code"]["code"] < cell["losses"]["base"]["code"] - 0.1
    assert cell["losses"]["code"]["stories"] != cell["story_loss"]
    # of the second block, and of every slice
    assert {*cell["orthogonality"]} == {"math", "code-slice", "math-slice"}
    assert all(m["folded"] < 1e-5 for m in cell["orthogonality"].values())
    assert cell["structure"]["math"]["reference answers"] == {"answers": 4, "in_format": 4}
    assert {*cell["structure"]["code"]} > {"base", "ungated", "routed", "code-shuffled"}
    assert sum(sum(row.values()) for row in cell["router"]["confusion"].values()) == 8
    with pytest.raises(StopError):
        blocks.run(settings_to("stopped"), progress=stopping_at("math: loss"))
    blocks.run(settings_to("stopped"))
    # the manifest names each file by its hash
    for file in ("base/model.safetensors", "store/manifest.json"):
        whole, stopped = (tmp_path / n / "cells/3" / file for n in ("whole", "stopped"))
        assert whole.read_bytes() == stopped.read_bytes()
    store = Store.open(stopped.parent, blocks=True)
    assert {domain.name: domain.enabled for domain in store.manifest.domains} == {
        "code": True, "math": True, "code-shuffled": False, "code-slice": False,
        "math-slice": False,
    }  # fmt: skip
    assert verify_store(StacksVerifySettings(store_path=str(store.path))).problems == ()
    figures = [Result.open(tmp_path / name).data["cells"] for name in ("whole", "stopped")]
    assert figures[0] == figures[1]
    # a finished run answers again: its router chooses, and its blocks answer
    cells = tmp_path / "whole" / "cells" / "3"
    prompt = "How much is 3 and 3?"
    model, tokenizer = ms.load(store=cells / "store", hard=True)
    answer = ms.generate(model, tokenizer, prompt, ungated=True, max_tokens=4)
    model.model.select({"code": 1.0, "math": 1.0})
    tokens = prompt_tokens([{"role": "user", "content": prompt}], tokenizer)
    alone = tokenizer.decode(base_model.greedy_tokens(model, tokenizer, tokens, 4))
    assert answer == alone.removesuffix(tokenizer.eos_token)
    (route,) = model.routed_model.router.routes([prompt])
    assert {*route.scores} == {"code", "math"}
    pretrained = cells / "base" / "model.safetensors"
    pretrained.write_bytes(pretrained.read_bytes()[:-4] + b"abcd")
    with pytest.raises(StoreError, match="use that base"):
        ms.load(cells / "base", store=cells / "store")


def test_shuffled_answers_keep_their_tokens_and_the_end_mark() -> None:
    row = row_of([1, 2, 3, 4, 5, 6, 7], [0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 1.0])
    shuffled = blocks.shuffled_answer(row, "a")
    assert shuffled.tokens[:2] == (1, 2)
    assert shuffled.tokens[-1] == 7
    assert sorted(shuffled.tokens) == sorted(row.tokens)
    assert shuffled.weights == row.weights
    assert blocks.shuffled_answer(row, "a") == shuffled != row


def a_cell(**changes: Any) -> dict[str, Any]:
    """A seed where every condition holds."""
    losses = {"base": {"code": 5.0, "math": 5.0, "stories": 2.0},
              **{arm: {"code": 3.0, "math": 3.0, "stories": 2.5}
                 for arm in ("code", "math", "code-slice", "math-slice")}}  # fmt: skip
    answers = {
        arm: {"answers": 50, "in_format": count}
        for arm, count in {"base": 0, "ungated": 40, "routed": 45, "code-shuffled": 1}.items()
    }
    router = {
        "confusion": {"code": {"code": 60, "math": 0}, "math": {"code": 0, "math": 60}},
        "single": 120, "single_right": 120, "mixed": 40, "mixed_right": 39, "outcomes": {},
    }  # fmt: skip
    return {
        "seed": 0, "domains": ["code", "math"], "control": "code", "story_loss": 2.0,
        "story_loss_at_0": 2.0, "identical_at_0": True, "losses": losses, "router": router,
        "orthogonality": {"math": {"directions": 2, "captured_energy": 0.9, "folded": 1e-8,
                                   "output": 1e-7}},
        "structure": {"code": answers},
    } | changes  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "fails"),
    [
        ({}, ""),
        ({"story_loss_at_0": 2.0000001}, "(a) base bit for bit"),
        ({"router": a_cell()["router"] | {"single_right": 100}}, "(c) router right"),
        ({"router": a_cell()["router"] | {"mixed_right": 20}}, "(c) set match"),
        ({"structure": {"code": {**a_cell()["structure"]["code"],
                                 "code-shuffled": {"answers": 50, "in_format": 44}}}},
         "(e) shuffled block"),
    ],
)  # fmt: skip
def test_conditions_hold_or_fail_by_name(changes: dict[str, Any], fails: str) -> None:
    conditions = concluded([a_cell(**changes)])["data"]["conditions"]
    assert [n for n, c in conditions.items() if not c["holds"]] == [
        n for n in conditions if fails and n.startswith(fails)
    ]
    json.dumps(conditions)


def test_what_cannot_be_used_is_refused(tmp_path: Path, data: dict[str, str]) -> None:
    with pytest.raises(InputError, match="two domains or more"):
        blocks.run(PsnBlocksSettings.model_validate({
            "corpus": data["stories"], "domains": domains(data)[:1], "save_path": str(tmp_path)
        }))  # fmt: skip
    with pytest.raises(ValueError, match="give NAME=REGEX"):
        PsnBlocksSettings(domains=("code",), formats=("math=x",))
    with pytest.raises(ValueError, match="give each once"):
        PsnBlocksSettings(seeds=(0, 0))
    texts = tmp_path / "rows"
    texts.mkdir()
    for name in ("a", "b"):
        rows = [{"prompt": f"{i}", "completion": "x"} for i in range(9)]
        write_rows(texts / f"{name}.jsonl", rows)
    usual: dict[str, Any] = {
        "corpus": data["stories"], "data": str(texts), "save_path": str(tmp_path / "out"),
        "pretrain": {"hidden_size": 32}, "validation_rows": 4,
    }  # fmt: skip
    for changes, message in (
        ({"control": "nope"}, "control nope: no domain; there are a, b"),
        ({"formats": ("c=x",)}, "give NAME=REGEX"),
        ({"block": {"stack": {"rank": 33}}}, "rank 33; allowed is 1 to 32"),
        ({"pretrain": {"hidden_size": 32, "max_seq_length": 12}}, "max_seq_length: at least 16"),
    ):
        with pytest.raises(InputError, match=message):
            blocks.run(PsnBlocksSettings.model_validate(usual | changes), dry_run=True)
    long = [{"prompt": f"{i} " * 40, "completion": "x"} for i in range(9)]
    write_rows(texts / "b.jsonl", long)
    short = {"hidden_size": 32, "max_seq_length": 16, "vocab_size": 270}
    with pytest.raises(InputError, match=r"^domain [ab]: none of .* cut to 16 .*_length sets"):
        blocks.run(PsnBlocksSettings.model_validate(usual | {"pretrain": short, "seeds": (0,)}))
    assert not [*tmp_path.glob(".out.work/cells/*/base*")]
    write_rows(texts / "a.jsonl", [{"text": f"{i} x"} for i in range(9)])
    with pytest.raises(InputError, match="domain a: its rows are texts; a router needs prompts"):
        blocks.run(PsnBlocksSettings.model_validate(usual), dry_run=True)
    write_rows(tmp_path / "one.jsonl", [{"text": "0"}])
    few = usual | {"corpus": str(tmp_path / "one.jsonl")}
    with pytest.raises(InputError, match="corpus: no row is held out"):
        blocks.run(PsnBlocksSettings.model_validate(few), dry_run=True)
    nowhere = {k: v for k, v in usual.items() if k != "validation_rows"} | {"domains": ("nope",)}
    with pytest.raises(InputError, match="no data for nope"):
        stacks.run(PsnStacksSettings.model_validate(nowhere), dry_run=True)
    stacked = nowhere | {"domains": (), "data": str(texts)}
    for stack, message in (
        ({"keys": ["up_porj"]}, "(?s)^stack: .*up_porj"),
        ({"layers": "7-9"}, "(?s)^stack: .*9"),
        ({"stack": {"rank": 99}}, "(?s)^stack: .*rank 99"),
    ):
        stacked_changes: dict[str, Any] = {"stack": {"validation_rows": 4, **stack}}
        with pytest.raises(InputError, match=message):
            stacks.run(PsnStacksSettings.model_validate(stacked | stacked_changes), dry_run=True)
    with pytest.raises(ValueError, match="set by the study"):
        PsnBlocksSettings.model_validate({"pretrain": {"seed": 4}})
