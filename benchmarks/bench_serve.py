"""`mlxstacks serve` beside `mlx_lm.server`: tokens a second and time to the first token.

    python -m benchmarks.bench_serve [--model DIR] [--clients 1,4,16] [--cases base,adapter]

Both serve the same float32 copy of the model (default: nano; SmolLM2 by its directory), answer the
same prompts of `/v1/completions`, greedily, from the same client in threads. Cases: the base; one
adapter; four adapters in turn, for which `mlx_lm.server` loads the model again. Each case runs
once to warm up, and then once for each repeat, both servers by turns; medians are shown. Only
ours: four adapters in one batch against the same load on one of them. Last line: JSON.

    python -m benchmarks.bench_serve --model DIR --store-path STORE --cases math,math+chat,routed

What stacks cost instead: each of these by our server, by turns with its base; the model as the
store has it.
"""

import argparse
import http.client
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxstacks import base_model
from mlxstacks.nano.exports import nano_paths

Fields = Sequence[dict[str, Any]]  # of requests, by turns
ByTurns = Mapping[str, tuple[tuple[int, int], Fields]]
"""Who answers -> the process and port of its server, and what its requests say."""
ADAPTERS, ATTENTION = 4, ("self_attn.q_proj", "self_attn.v_proj")
WORDS = ("islands", "trade", "red", "flags", "with", "a", "king", "who", "counts", "apples")


@dataclass(frozen=True)
class Load:
    """tokens a second of all clients together; first_ms: median time to the first token. cpu_ms: of
    the server, for a token: what says most on a machine that is shared; next_cpu_ms: for one that
    follows the first, where a client is alone.
    """

    tokens_per_second: float
    first_ms: float
    next_cpu_ms: float
    cpu_ms: float
    tokens: int


def float_copy(source: Path, target: Path) -> Path:
    """The model without quantization, in float32: what `serve` computes with on a CPU."""
    model, _, config = base_model.load(source)
    base_model.dequantize(model)
    base_model.cast(model, mx.float32)
    kept = {k: v for k, v in config.items() if not k.startswith("quantization")}
    base_model.save_model(target, model, kept)
    for path in source.iterdir():
        if path.name.startswith(("tokenizer", "generation", "special", "chat_template")):
            (target / path.name).write_bytes(path.read_bytes())
    return target


def write_adapters(
    model_path: Path, directory: Path, keys: Sequence[str] = ATTENTION
) -> list[Path]:
    """Random adapters of rank 8, of all layers."""
    paths = []
    for number in range(ADAPTERS):
        model, _, _ = base_model.load(model_path)
        layers = len(model.layers)
        base_model.attach_lora(model, layers, 8, 2.0, list(keys))
        weights = dict(tree_flatten(model.trainable_parameters()))
        for place, (name, value) in enumerate(sorted(weights.items())):
            key = mx.random.key(1000 * number + place)
            weights[name] = 0.02 * mx.random.normal(value.shape, key=key)
        target = directory / f"adapter{number}"
        base_model.save_adapter(target, weights, layers, 8, 2.0, list(keys))
        paths.append(target)
    return paths


@contextmanager
def running(command: Sequence[str], port: int) -> Iterator[int]:
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(600):
            assert process.poll() is None, f"{command[:4]} ended"
            try:
                ask_health(port)
                break
            except OSError:
                time.sleep(0.2)
        yield process.pid
    finally:
        process.terminate()
        process.wait(timeout=30)


def ask_health(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("GET", "/health")
    connection.getresponse().read()
    connection.close()


def cpu_seconds(pid: int) -> float:
    """That a process has used; Linux."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


Times = tuple[int, float, float]
"""Tokens of an answer, seconds to the first of them, and the server's CPU time from there on."""


def complete(server: tuple[int, int], prompt: str, tokens: int, fields: dict[str, Any]) -> Times:
    """An answer to a prompt. server: its process and its port."""
    pid, port = server
    body = {
        "model": "default_model", "prompt": prompt, "max_tokens": tokens, "temperature": 0,
        "stream": True, "stream_options": {"include_usage": True}, **fields,
    }  # fmt: skip
    began, first, said, before = time.perf_counter(), None, 0, cpu_seconds(pid)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    headers = {"content-type": "application/json"}
    connection.request("POST", "/v1/completions", json.dumps(body), headers)
    response = connection.getresponse()
    assert response.status == 200, response.read()
    for line in response:
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[6:])
        assert "choices" in event, event
        if first is None and any(choice.get("text") for choice in event["choices"]):
            first, before = time.perf_counter() - began, cpu_seconds(pid)
        if event.get("usage"):
            said = event["usage"]["completion_tokens"]
    connection.close()
    first = time.perf_counter() - began if first is None else first
    return said, first, cpu_seconds(pid) - before


def retried(ask: Callable[[], Times]) -> Times:
    """Again where a server's queue of connections was full: `http.server` has room for five."""
    for _ in range(100):
        try:
            return ask()
        except ConnectionError:
            time.sleep(0.05)
    raise ConnectionError("refused a hundred times")


def load(
    server: tuple[int, int], clients: int, requests: int, tokens: int, fields: Fields, salt: str
) -> Load:
    """So many clients at once, each with so many requests. server: its process and its port."""
    pid, _ = server
    answers: list[Times] = []

    def client(number: int) -> None:
        for turn in range(requests):
            words = " ".join(WORDS[(number + turn) % 7 :] * 3)
            prompt = f"Story {salt} {number} {turn}, about {words}. Once upon a time, there"
            wanted = fields[(number + turn) % len(fields)]
            answers.append(retried(partial(complete, server, prompt, tokens, wanted)))

    threads = [threading.Thread(target=client, args=(n,)) for n in range(clients)]
    began, before = time.perf_counter(), cpu_seconds(pid)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    assert len(answers) == clients * requests
    said = sum(count for count, _, _ in answers)
    first = statistics.median(seconds for _, seconds, _ in answers)
    following = statistics.median(cpu / max(1, count - 1) for count, _, cpu in answers)
    cpu = cpu_seconds(pid) - before
    return Load(said / seconds, 1000 * first, 1000 * following, 1000 * cpu / said, said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=nano_paths().model_path)
    parser.add_argument("--clients", default="1,4,16")
    parser.add_argument("--cases", default="base,adapter,4 adapters")
    parser.add_argument("--store-path", type=Path)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--requests", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    if options.store_path is not None:
        stacks_beside_base(options)
        return
    with tempfile.TemporaryDirectory() as scratch:
        model = float_copy(options.model, Path(scratch, "model"))
        adapters = write_adapters(model, Path(scratch))
        ours, theirs = free_port(), free_port()
        serve = [sys.executable, "-m", "mlxstacks", "serve", "--model", str(model), "--port",
                 str(ours), "--concurrency", "32"]  # fmt: skip
        for path in adapters:
            serve += ["--adapter-path", str(path)]
        peer = [sys.executable, "-m", "mlx_lm", "server", "--model", str(model), "--port",
                str(theirs)]  # fmt: skip
        named = [{"model": path.name} for path in adapters]
        loaded = [{"adapters": str(path)} for path in adapters]
        cases: dict[str, tuple[Fields, Fields]] = {
            "base": ([{"model": "base"}], [{}]),
            "adapter": (named[:1], loaded[:1]),
            "4 adapters": (named, loaded),
        }
        results = []
        with running(serve, ours) as pid, running(peer, theirs) as their_pid:
            servers = (pid, ours), (their_pid, theirs)
            for clients in map(int, options.clients.split(",")):
                for case in options.cases.split(","):
                    ours_and_theirs = zip(servers, cases[case], strict=True)
                    by_turns = dict(zip(("mlxstacks", "mlx_lm"), ours_and_theirs, strict=True))
                    results.append(measured(options, clients, case, by_turns))
        print(json.dumps({"model": options.model.name, "rows": results}))


def stacks_beside_base(options: argparse.Namespace) -> None:
    """The cases are models that the server names; `+` between domains stands for its comma."""
    port, results = free_port(), []
    serve = [sys.executable, "-m", "mlxstacks", "serve", "--model", str(options.model), "--port",
             str(port), "--store-path", str(options.store_path)]  # fmt: skip
    with running(serve, port) as pid:
        for clients in map(int, options.clients.split(",")):
            for case in options.cases.split(","):
                model = case.replace("+", ",")
                by_turns: ByTurns = {
                    name: ((pid, port), [{"model": wanted}])
                    for name, wanted in (("stacks", model), ("base", "base"))
                }
                results.append(measured(options, clients, case, by_turns))
    print(json.dumps({"model": options.model.name, "rows": results}))


def measured(
    options: argparse.Namespace, clients: int, case: str, by_turns: ByTurns
) -> dict[str, Any]:
    """A case, each of two servers or models by turns."""
    runs: dict[str, list[Load]] = {name: [] for name in by_turns}
    for repeat in range(options.repeats + 1):
        for name, (server, fields) in by_turns.items():
            salt = f"{case} {clients} {repeat}"
            runs[name].append(load(server, clients, options.requests, options.tokens, fields, salt))
    return row(clients, case, runs)


def row(clients: int, case: str, runs: dict[str, list[Load]]) -> dict[str, Any]:
    """Medians of all runs but the first, printed."""
    found: dict[str, Any] = {"clients": clients, "case": case}
    for name, loads in runs.items():
        found[f"{name}_tokens_per_second"] = statistics.median(
            one.tokens_per_second for one in loads[1:]
        )
        for part in ("first_ms", "next_cpu_ms", "cpu_ms"):
            found[f"{name}_{part}"] = statistics.median(getattr(one, part) for one in loads[1:])
        found[f"{name}_tokens"] = loads[-1].tokens
    ours, other = runs
    found["ratio"] = found[f"{ours}_tokens_per_second"] / found[f"{other}_tokens_per_second"]
    for part in ("next_cpu_ms", "cpu_ms"):
        found[f"{part}_ratio"] = found[f"{other}_{part}"] / found[f"{ours}_{part}"]
    shown = {k: round(v, 2) if isinstance(v, float) else v for k, v in found.items()}
    print(re.sub(r"[{}']", "", str(shown)), flush=True)
    return found


if __name__ == "__main__":
    main()
