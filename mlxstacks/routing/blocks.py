"""Capability blocks with their router: prompts in, answers out, each with the blocks it needs.

blocks = RoutedBlocks.load("base", "store")
print(blocks.route("How much is 2 and 3?").weights)
print(blocks.generate("How much is 2 and 3?"))
"""

from pathlib import Path
from typing import Any, Self

import mlx.nn as nn

from mlxstacks import base_model
from mlxstacks.data.chat import prompt_tokens
from mlxstacks.errors import OtherBaseError
from mlxstacks.files.block_store import read_store
from mlxstacks.files.checkpoint import fingerprint, open_checkpoint
from mlxstacks.files.disk import user_path
from mlxstacks.files.router_file import read_router
from mlxstacks.layers.blocks import attach_blocks, load_block
from mlxstacks.routing.router import ROUTER_FILE, PromptRouter, Route, features_for, network_of


class RoutedBlocks:
    """model: an mlx-lm model with blocks beside it; it generates as any other."""

    def __init__(self, model: nn.Module, tokenizer: Any, router: PromptRouter) -> None:
        self.model, self.tokenizer, self.router = model, tokenizer, router

    @classmethod
    def load(cls, base: str | Path, store: str | Path) -> Self:
        """A base and the store of blocks that was trained beside it, with its router.

        Raises: OtherBaseError. StoreError: a changed file. CheckpointError: no base there.
        """
        directory, path = user_path(base), user_path(store)
        blocks = read_store(path)
        if fingerprint(open_checkpoint(directory)) != blocks.base_fingerprint:
            raise OtherBaseError(f"{path}: its blocks were trained beside another base than {base}")
        file = read_router(path / ROUTER_FILE)
        model, tokenizer, _ = base_model.load(directory)
        blocked = attach_blocks(model)
        for name in file.header.domains:
            blocked.blocks[name] = load_block(path, blocks, name)
        model.eval()
        features = features_for(file.header, model, tokenizer)
        return cls(model, tokenizer, PromptRouter(network_of(file), file.header, features))

    def route(self, prompt: str) -> Route:
        """Choose the blocks of a prompt for the calls that follow. Raises: InputError: empty."""
        self.model.model.select({})
        (route,) = self.router.routes([prompt])
        self.model.model.select(route.weights)
        return route

    def generate(self, prompt: str, max_tokens: int = 100) -> str:
        """The greedy answer, with the blocks that the router chooses."""
        self.route(prompt)
        tokens = prompt_tokens([{"role": "user", "content": prompt}], self.tokenizer)
        answer = base_model.greedy_tokens(self.model, self.tokenizer, tokens, max_tokens)
        text: str = self.tokenizer.decode(answer)
        return text.removesuffix(self.tokenizer.eos_token)
