"""Features against hidden states worked out layer by layer, and what must not change them.

Run: pytest tests/routing/test_features.py
"""

from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

from mlxstacks import base_model
from mlxstacks.errors import InputError, TargetError
from mlxstacks.layers.attach import add_active, attach_stacks
from mlxstacks.layers.freezing import freeze_active
from mlxstacks.layers.selection import ungated
from mlxstacks.layers.settings import StackSettings, TargetSettings
from mlxstacks.layers.stacked import set_mode, stacked_layers
from mlxstacks.layers.targets import find_targets
from mlxstacks.routing.features import FeatureTable, PromptFeatures, without_stacks
from tests.tiny_models import llama_config, write_llama, write_model, write_qwen_moe

TEXTS = ["what is seven times six?", "a", "def f(x):\n    return x + 1\n" * 3]
Loaded = tuple[nn.Module, Any]


def loaded(path: Path) -> Loaded:
    model, tokenizer, _ = base_model.load(path)
    return model, tokenizer


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Loaded]:
    root = tmp_path_factory.mktemp("models")
    four = {**llama_config(64), "num_hidden_layers": 4}
    return {
        "llama": loaded(write_llama(root / "llama", bits=None, dtype="float32", hidden_size=64)),
        "tied": loaded(write_llama(root / "tied", bits=4, hidden_size=64, tied=True)),
        "four": loaded(write_model(root / "four", four, bits=4, group_size=64, shards=1)),
        "moe": loaded(write_qwen_moe(root / "moe", bits=4, dtype="float32")),
    }


def residuals(model: nn.Module, tokens: list[int]) -> list[mx.array]:
    """H[0] ... H[L] of a dense Llama, by its own layers; the last one after the norm."""
    body = model.model
    hidden = [body.embed_tokens(mx.array([tokens]))]
    for layer in body.layers:
        hidden.append(layer(hidden[-1], "causal"))
    return [*hidden[:-1], body.norm(hidden[-1])]


def test_special_tokens_in_a_prompt_are_text_and_long_prompts_are_cut(
    models: dict[str, Loaded],
) -> None:
    features = PromptFeatures(*models["llama"], max_tokens=16)
    assert features.tokens("a<|end|>") == list(b"a<|end|>")
    assert features.tokens("a<|end|>" * 10_000) == list(b"a<|end|>a<|end|>")


@pytest.mark.parametrize("name", ["llama", "tied", "four"])
def test_features_are_the_weighted_middle_and_last_hidden_states(
    models: dict[str, Loaded], name: str
) -> None:
    model, tokenizer = models[name]
    features = PromptFeatures(model, tokenizer)
    (found,) = features.of(TEXTS[:1])
    hidden = [h.astype(mx.float32) for h in residuals(model, features.tokens(TEXTS[0]))]
    middle = {"llama": 1, "tied": 1, "four": 2}[name]  # floor((L + 1) / 2)
    wanted = np.array(0.45 * hidden[middle] + 0.55 * hidden[-1])[0]
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_the_middle_of_one_layer_is_its_end(tmp_path: Path) -> None:
    config = {**llama_config(64), "num_hidden_layers": 1}
    model, tokenizer = loaded(write_model(tmp_path, config, bits=4, group_size=64, shards=1))
    (found,) = PromptFeatures(model, tokenizer).of(["abc"])
    last = residuals(model, [97, 98, 99])[-1].astype(mx.float32)
    np.testing.assert_allclose(found, np.array(last)[0] * (0.45 + 0.55), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["llama", "moe"])
def test_neighbours_in_a_batch_and_padding_change_nothing(
    models: dict[str, Loaded], name: str
) -> None:
    features = PromptFeatures(*models[name])
    together = features.of(TEXTS)
    assert [row.shape[0] for row in together] == [len(features.tokens(text)) for text in TEXTS]
    for text, row in zip(TEXTS, together, strict=True):
        np.testing.assert_allclose(features.of([text])[0], row, rtol=2e-2, atol=2e-2)


def test_normalised_features_do_not_depend_on_the_scale_of_the_middle(
    models: dict[str, Loaded],
) -> None:
    model, tokenizer = models["llama"]
    (found,) = PromptFeatures(model, tokenizer, normalise=True, last_weight=0).of(TEXTS[:1])
    np.testing.assert_allclose(np.sqrt((found**2).mean(axis=1)), 0.45, rtol=1e-3)


def test_raw_text_without_special_tokens_cut_at_the_right(models: dict[str, Loaded]) -> None:
    features = PromptFeatures(*models["llama"], max_tokens=5)
    assert features.tokens("abcdefgh") == list(b"abcde")
    whole = PromptFeatures(*models["llama"])
    # Causal: what was cut off has not changed what is left.
    np.testing.assert_allclose(
        features.of(["abcdefgh"])[0], whole.of(["abcdefgh"])[0][:5], rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("text", ["", "  \n\t"])
def test_an_empty_prompt_is_refused(models: dict[str, Loaded], text: str) -> None:
    with pytest.raises(InputError, match="empty"):
        PromptFeatures(*models["llama"]).of(["fine", text])


def test_a_model_whose_head_is_not_found_is_refused(models: dict[str, Loaded]) -> None:
    model, tokenizer = models["llama"]

    class Capped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def __call__(self, tokens: mx.array) -> mx.array:
            return mx.tanh(self.inner(tokens))

    with pytest.raises(InputError, match="softcap"):
        PromptFeatures(Capped(), tokenizer)


def test_looking_for_the_head_freezes_nothing(models: dict[str, Loaded]) -> None:
    model, tokenizer = models["llama"]
    before = set(dict(_flat(model.trainable_parameters())))
    PromptFeatures(model, tokenizer)
    assert before
    assert set(dict(_flat(model.trainable_parameters()))) == before


def _flat(tree: Any) -> list[tuple[str, mx.array]]:
    from mlx.utils import tree_flatten

    return list(tree_flatten(tree))


def with_stacks(model: nn.Module) -> None:
    """A frozen stack, and an active one, on every down projection; both change the output."""
    targets = find_targets(model, TargetSettings(projections=("down_proj",)))
    attach_stacks(model, targets)
    settings = StackSettings(rank=2, num_experts=2)
    for seed in (1, 2):
        add_active(model, settings, mx.random.key(seed))
        for _, layer in stacked_layers(model):
            assert layer.active is not None
            shape = layer.active.lora_b.shape
            layer.active.lora_b = 0.3 * mx.random.normal(shape, key=mx.random.key(seed))
        if seed == 1:
            freeze_active(model, "d-r1", "d")
    set_mode(model, ungated())


@pytest.mark.parametrize("kind", ["llama", "moe"])
def test_stacks_are_off_for_features_and_as_they_were_afterwards(tmp_path: Path, kind: str) -> None:
    write = write_llama if kind == "llama" else write_qwen_moe
    model, tokenizer = loaded(write(tmp_path / kind, bits=4, dtype="float32"))
    tokens = mx.array([list(b"which stacks answer?")])
    bare_logits, bare = model(tokens), PromptFeatures(model, tokenizer).of(TEXTS)
    with_stacks(model)
    model.eval()
    before = model(tokens)
    model.train()
    assert not mx.array_equal(before, bare_logits)
    found = PromptFeatures(model, tokenizer).of(TEXTS)
    assert all(np.array_equal(a, b) for a, b in zip(found, bare, strict=True))
    assert all(module.training for module in model.modules())
    model.eval()
    assert mx.array_equal(model(tokens), before)
    assert all(type(layer).__name__ == "StackedLayer" for _, layer in stacked_layers(model))


def test_installed_segments_survive_features_and_exceptions(tmp_path: Path) -> None:
    model, tokenizer = loaded(write_llama(tmp_path / "m", bits=4, dtype="float32"))
    with_stacks(model)
    tokens = mx.array([list(b"installed")])
    before = model(tokens)
    with pytest.raises(KeyError), without_stacks(model):
        raise KeyError
    assert mx.array_equal(model(tokens), before)
    for _, layer in stacked_layers(model):
        layer.drop_active()
        layer.install(())  # what is served now is not what the mode says
    before = model(tokens)
    PromptFeatures(model, tokenizer).of(TEXTS)
    assert mx.array_equal(model(tokens), before)


# --- the table ------------------------------------------------------------------------------------


class Counting(PromptFeatures):
    """Counts the prompts that go through the model."""

    seen = 0

    def of_tokens(self, prompts: Any, batch_size: int = 16) -> Any:
        self.seen += len(prompts)
        return super().of_tokens(prompts, batch_size)


@pytest.mark.parametrize("memory_bytes", [1 << 30, 0])
def test_table_holds_each_prompt_once_in_memory_or_in_a_file(
    models: dict[str, Loaded], tmp_path: Path, memory_bytes: int
) -> None:
    features = Counting(*models["llama"])
    texts = [f"prompt number {i} {'x' * (i % 7)}" for i in range(20)]
    table = FeatureTable(features, [*texts, *texts], directory=tmp_path, memory_bytes=memory_bytes)
    assert features.seen == 20
    assert table.input_dims == 64
    for text in texts:
        np.testing.assert_allclose(table.of(text), features.of([text])[0], rtol=1e-4, atol=1e-5)
    assert isinstance(table.of(texts[0]), np.memmap) == (memory_bytes == 0)
    assert not list(tmp_path.iterdir())  # the file has no name
    x, mask = table.padded(texts[:3])
    assert x.shape == (3, 32, 64)
    assert mask.sum() == sum(len(table.of(t)) for t in texts[:3])
    assert not x[~mask].any()
    with pytest.raises(KeyError):
        table.of("another")


def test_table_refuses_a_disk_that_is_too_small(
    models: dict[str, Loaded], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxstacks.files.disk.free_bytes", lambda path: 100)
    with pytest.raises(TargetError, match="bytes needed"):
        FeatureTable(PromptFeatures(*models["llama"]), TEXTS, directory=tmp_path, memory_bytes=0)


def test_table_names_the_prompt_that_the_base_cannot_take(tmp_path: Path) -> None:
    path = write_llama(tmp_path / "m", bits=None, dtype="float32", hidden_size=64)
    model, tokenizer = loaded(path)
    model.model.embed_tokens.weight[ord("z")] = float("nan")
    with pytest.raises(InputError, match="NaN or Inf for the prompt 'zebra'"):
        FeatureTable(PromptFeatures(model, tokenizer), ["fine", "zebra"])
