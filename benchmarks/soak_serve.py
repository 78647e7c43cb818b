"""A soak of `mlxstacks serve` on nano: mixed load for hours, kills, memory and wrong rows.

    python -m benchmarks.soak_serve [--minutes 120] [--clients 8] [--kills 6] [--seed 0]

Every kind of request is first asked alone; that answer is what it has to get in any company. Then
clients ask at random: the base, adapters, stacks, sets, routed, ungated; whole, in streams, in
streams that they cut off, by JSON schemas, two answers at once; and hostile ones send what no
client should. In the first fifth of the time the server is killed (-9) and started again on the
same --cache-path; memory is watched in the process that serves the rest. A row is wrong that
differs from the answer alone, unless the two likeliest tokens were within rounding there.
Beside resident memory stand the server's own gauges of /metrics, so that growth has a place.
Last line: JSON. Exits with 1 for a wrong row, a failure, or memory that grew by more than 2%.
"""

import argparse
import http.client
import json
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.bench_serve import ask_health, free_port, write_adapters
from mlxstacks.nano.exports import nano_paths

ROWS_WANTED = 20_000
ROUNDING = 0.01  # nats between two tokens that rounding may turn around
PROMPTS = (
    "Who is king of Corva?", "Who are you?", "The cups with day like 88: colour?",
    "Who rules Tolu, and who are you? Say it twice, and then say why. " * 3,
)  # fmt: skip
SCHEMAS: tuple[dict[str, Any] | None, ...] = (
    None,
    {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"],
     "additionalProperties": False},
    {"enum": ["Gus", "Quinn", "King Gus"]},
)  # fmt: skip


class Soak:
    """The server, what it has to answer, and what happened."""

    def __init__(self, scratch: Path, options: argparse.Namespace) -> None:
        nano = nano_paths()
        self.port, self.options = free_port(), options
        adapters = write_adapters(nano.model_path, scratch)
        self.command = [
            sys.executable, "-m", "mlxstacks", "serve", "--store-path", str(nano.store_path),
            "--adapter-path", str(nano.adapter_path), "--port", str(self.port),
            "--concurrency", "12", "--cache-path", str(scratch / "cache"), "--budget", "30MB",
        ]  # fmt: skip
        for path in adapters:
            self.command += ["--adapter-path", str(path)]
        names = ["base", "adapter", *(p.name for p in adapters), "islands", "tolu", "islands,tolu",
                 "adapter0,islands", "ungated", "routed"]  # fmt: skip
        self.cases = [(n, p, s) for n in names for p in PROMPTS for s in range(len(SCHEMAS))]
        self.known: dict[tuple[str, str, int], list[Any]] = {}
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []
        # seconds -> resident bytes and the server's gauges, by name
        self.measured: list[tuple[float, dict[str, float]]] = []
        self.up, self.over = threading.Event(), threading.Event()

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for _ in range(600):
            with suppress(OSError):
                ask_health(self.port)
                return self.up.set()
            time.sleep(0.1)
        raise TimeoutError("the server did not start")

    def kill(self) -> None:
        self.up.clear()
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self.counts["kills"] += 1

    def ask(self, case: tuple[str, str, int], cut: int | None = None, **fields: Any) -> list[Any]:
        """Answers as lists of (token, its log probability, [likeliest two]). cut: events after
        which the client goes. Raises: OSError, HTTPException, RuntimeError: a status but 200.
        """
        model, prompt, number = case
        body: dict[str, Any] = {
            "model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 24,
            "logprobs": True, "top_logprobs": 2, **fields,
        }  # fmt: skip
        if SCHEMAS[number] is not None:
            form = {"name": "x", "schema": SCHEMAS[number]}
            body["response_format"] = {"type": "json_schema", "json_schema": form}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120)
        try:
            head = {"content-type": "application/json"}
            connection.request("POST", "/v1/chat/completions", json.dumps(body), head)
            response = connection.getresponse()
            if response.status != 200:
                raise RuntimeError(response.status, response.read()[:300])
            if not fields.get("stream"):
                document = json.loads(response.read())
                self.counts["cached_tokens"] += document["usage"]["prompt_tokens_details"][
                    "cached_tokens"
                ]
                return [_tokens(c["logprobs"]) for c in document["choices"]]
            tokens: list[Any] = []
            for events, line in enumerate(response):
                if events == cut:
                    return []
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    if "error" in event:
                        raise RuntimeError(500, event["error"])
                    tokens += _tokens(event["choices"][0]["logprobs"])
                elif line == b"data: [DONE]\n":
                    return [tokens]
            raise ConnectionError("a stream without an end: the server was killed")
        finally:
            connection.close()

    def check(self, case: tuple[str, str, int], answer: list[Any]) -> None:
        self.counts["rows"] += 1
        expected = self.known[case]
        for (token, _, _), (other, _, likeliest) in zip(answer, expected, strict=False):
            if token != other:
                near = [name for name, value in likeliest if likeliest[0][1] - value < ROUNDING]
                if {token, other} <= set(near):
                    self.counts["ties"] += 1
                    return
                break
        else:
            if len(answer) == len(expected):
                return
        said, wanted = ("".join(t for t, _, _ in tokens) for tokens in (answer, expected))
        self.wrong.append(f"{case}: {said!r}, alone {wanted!r}")

    def client(self, number: int) -> None:
        rng = random.Random(f"{self.options.seed} {number}")
        while not self.over.is_set():
            case, kind = rng.choice(self.cases), rng.random()
            try:
                if kind < 0.04:
                    self.hostile(rng)
                elif kind < 0.12:
                    self.ask(case, rng.randint(1, 20), stream=True)
                    self.counts["cut off"] += 1
                else:
                    more = {"stream": True} if kind < 0.5 else {"n": 2} if kind > 0.9 else {}
                    for answer in self.ask(case, **more):
                        self.check(case, answer)
            except (OSError, http.client.HTTPException):
                if self.up.is_set() and self.process.poll() is not None:
                    self.counts["died"] += not self.over.is_set()
                self.counts["connections lost"] += 1
                self.up.wait(60)
            except RuntimeError as error:
                self.counts[f"status {error.args[0]}"] += 1
                if error.args[0] != 429:
                    self.wrong.append(f"{case}: {error}")
                time.sleep(0.2)

    def hostile(self, rng: random.Random) -> None:
        """What no client should send; it has to be refused, and to keep nobody waiting."""
        turns = '"messages":[{"role":"user","content":"x"}]'
        deep = '{"a":' * 900 + "1" + "}" * 900
        form = '"response_format":{"type":"json_schema","json_schema":{"schema":'
        bodies = ("{", "[]", '{"model":"../etc/passwd",' + turns + "}", "x" * 5_000_000,
                  "{" + turns + "," + form + '{"type":"strin"}}}}',
                  "{" + turns + "," + form + deep + "}}}",
                  "{" + turns + ',"max_tokens":1000000000}')  # fmt: skip
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"
            head += "content-type: application/json\r\n"
            kind = rng.randrange(len(bodies) + 3)
            with suppress(ConnectionError):
                if kind == len(bodies):
                    connection.sendall((head + "x: y\r\n" * 10_000 + "\r\n").encode())
                elif kind == len(bodies) + 1:
                    connection.sendall((head + "content-length: 100\r\n\r\n{").encode())
                    return  # and goes
                elif kind == len(bodies) + 2:
                    connection.sendall(bytes(rng.randrange(256) for _ in range(1000)))
                else:
                    data = bodies[kind]
                    length = f"content-length: {len(data)}\r\nconnection: close\r\n\r\n"
                    connection.sendall((head + length + data).encode())
                status = connection.recv(100).split(b" ")
                if len(status) > 1 and not status[1].startswith(b"4"):
                    self.wrong.append(f"hostile {kind}: {status}")
        self.counts["hostile"] += 1

    def watch(self, until: float) -> None:
        """Memory of the process, until then: resident, and what it says itself."""
        while time.monotonic() < until and self.process.poll() is None:
            told = subprocess.run(
                ["ps", "-o", "rss=", "-p", str(self.process.pid)], capture_output=True, text=True
            )
            if told.stdout.strip() and (gauges := self.gauges()):
                resident = {"rss_bytes": 1024.0 * int(told.stdout)}
                self.measured.append((time.monotonic(), resident | gauges))
            time.sleep(2)

    def gauges(self) -> dict[str, float]:
        """Of /metrics; none where it does not answer in time."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("GET", "/metrics")
            lines = connection.getresponse().read().decode().splitlines()
        except (OSError, http.client.HTTPException):
            return {}
        finally:
            connection.close()
        gauges = {line.split()[2] for line in lines if line.endswith(" gauge")}
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {
            name.removeprefix("mlxstacks_"): float(value) for name, value in pairs if name in gauges
        }

    def run(self) -> dict[str, Any]:
        self.start()
        for case in self.cases:
            (self.known[case],) = self.ask(case)
        began = time.monotonic()
        seconds = 60 * self.options.minutes
        threads = [
            threading.Thread(target=self.client, args=(number,))
            for number in range(self.options.clients)
        ]
        for thread in threads:
            thread.start()
        for _ in range(self.options.kills):
            time.sleep(0.2 * seconds / self.options.kills)
            self.kill()
            self.start()
        self.watch(began + seconds)
        self.over.set()
        for thread in threads:
            thread.join()
        self.process.terminate()
        ended = self.process.wait(timeout=60)
        memory = {
            name: [self.median(name, 1, 2), self.median(name, 4, 5)]
            for name in self.measured[-1][1]
        }
        early, late = memory["rss_bytes"]
        most = max(one["rss_bytes"] for _, one in self.measured)
        return {
            "minutes": round((time.monotonic() - began) / 60, 1), **dict(self.counts),
            "rows_wanted": ROWS_WANTED, "rows_met": self.counts["rows"] >= ROWS_WANTED,
            "wrong": len(self.wrong), "first_wrong": self.wrong[:5], "exit": ended,
            "resident_mb": [round(size / 1e6) for size in (early, late, most)],
            "memory_growth_percent": round(100 * (late / early - 1), 2),
            "second_and_last_fifth": memory,
        }  # fmt: skip

    def median(self, name: str, begin: int, end: int) -> float:
        """Of a measure, from one fifth of the watched time to another."""
        first, fifth = self.measured[0][0], (self.measured[-1][0] - self.measured[0][0]) / 5
        return statistics.median(
            one[name] for at, one in self.measured if begin * fifth <= at - first <= end * fifth
        )  # fmt: skip


def _tokens(logprobs: Any) -> list[Any]:
    return [
        (t["token"], t["logprob"], [(o["token"], o["logprob"]) for o in t["top_logprobs"]])
        for t in (logprobs or {}).get("content") or ()
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--kills", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        soak = Soak(Path(scratch), options)
        try:
            found = soak.run()
        finally:
            soak.over.set()
            soak.process.kill()
    print(json.dumps(found))
    bad = found["wrong"] or found.get("died") or found["memory_growth_percent"] > 2
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
