"""What `guard --hosts` counts from a config is what two processes send.

Run: pytest tests/guard/test_hosts.py
"""

import json
import os
import socket
import struct
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from mlxstacks import base_model
from mlxstacks.errors import InputError
from mlxstacks.guard.build import adapted_model
from mlxstacks.guard.hosts import count_token
from mlxstacks.guard.run import run_command
from mlxstacks.guard.settings import GuardSettings
from mlxstacks.layers.sharded import shard
from mlxstacks.processes import current_group
from mlxstacks.study.document import Table
from tests.groups import in_group, needs_group
from tests.tiny_models import qwen_moe_config, write_model

BYTES_ACKED = 120  # of struct tcp_info


def sent_bytes() -> int:
    """On all connections of this process."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as opened:
                info = opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            continue
        total += struct.unpack_from("Q", info, BYTES_ACKED)[0] if len(info) > BYTES_ACKED else 0
    return total


def settings_of(config: Path) -> GuardSettings:
    return GuardSettings(model=str(config), rank=2, hosts=4, keys=("q_proj", "o_proj", "down_proj"))


def main() -> None:
    """MODEL: bytes that a token sends, printed."""
    directory = Path(sys.argv[1])
    config = json.loads((directory / "config.json").read_text())
    model, _ = adapted_model(config, settings_of(directory))
    group = current_group()
    assert group is not None
    shard(model, group)
    cache = base_model.make_prompt_cache(model)
    mx.eval(model.parameters(), model(mx.zeros((1, 1), mx.int32), cache=cache))
    before = sent_bytes()
    mx.eval(model(mx.zeros((1, 1), mx.int32), cache=cache))
    mx.eval(mx.distributed.all_sum(mx.array(1.0), group=group))  # what came before is acknowledged
    print(sent_bytes() - before)


if __name__ == "__main__":
    main()


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("hosts") / "model"
    return write_model(place, qwen_moe_config(), bits=4, group_size=32, shards=1, dtype="float32")


@needs_group
def test_two_processes_send_what_is_counted(directory: Path, tmp_path: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    counted = count_token(adapted_model(config, settings_of(directory))[0], 2).ring_bytes
    assert in_group(tmp_path, str(directory), module=__name__) == [0, 0], (
        tmp_path / "0"
    ).read_text()
    of_last_sum = 8  # one number, there and back
    assert int((tmp_path / "0").read_text()) - of_last_sum == counted


def test_hosts_are_planned_or_told_why_not(directory: Path) -> None:
    """Four hosts would have half a head of the recurrence each."""
    result = run_command(settings_of(directory))
    one, two, four = result.data["hosts"]
    assert (one["messages"], one["ring_bytes"], one["mesh_bytes"]) == (0, 0, 0)
    assert two["weights_bytes"] < one["weights_bytes"]
    assert two["messages"] > two["adapter_messages"] > 0
    assert two["ring_tokens_per_second"] < two["mesh_tokens_per_second"]
    assert "cannot be split over 4 processes" in four["problem"]
    captions = [block.caption for block in result.blocks if isinstance(block, Table)]
    assert any("Assumed, not measured" in caption for caption in captions)


def test_what_one_host_was_measured_to_write_counts_on_every_host(directory: Path) -> None:
    free = run_command(settings_of(directory)).data["hosts"]
    slow = settings_of(directory).model_copy(update={"tokens_per_second": 100.0})
    one, two, _ = run_command(slow).data["hosts"]
    assert one["ring_tokens_per_second"] == pytest.approx(100)
    computing = 1 / 100 - 1 / free[0]["ring_tokens_per_second"]
    expected = 1 / (computing + 1 / free[1]["mesh_tokens_per_second"])
    assert two["mesh_tokens_per_second"] == pytest.approx(expected)
    fast = slow.model_copy(update={"tokens_per_second": 1e9})
    with pytest.raises(InputError, match="memory_gbps 546 allows at most"):
        run_command(fast)
