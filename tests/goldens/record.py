"""What the nano recipes give, as small files: digests of answers and weights, and every figure.

    python -m tests.goldens.record DIRECTORY            # run the recipes, write the records
    python -m tests.goldens.record DIRECTORY --check    # run them and list what differs by more
                                                        # than rounding

The recipes run one after the other in DIRECTORY, so that the stacks of one are there for the next;
one that is done there is not run again. About 45 minutes of a core. Bits depend on the kernels of
the BLAS: `OPENBLAS_CORETYPE=Haswell` gives the same ones on every x86 processor with AVX2, so the
records hold for OpenBLAS with that setting, one thread, and the versions that they name.
"""

import hashlib
import json
import math
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

RECORDS = Path(__file__).parent
SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
OPENBLAS = Path(f"/usr/lib/{platform.machine()}-linux-gnu/openblas-pthread/libblas.so.3")
ENVIRONMENT = {
    "LD_PRELOAD": str(OPENBLAS), "OPENBLAS_CORETYPE": "Haswell", "OPENBLAS_NUM_THREADS": "1",
}  # fmt: skip

# In this order: what reads a store comes after the run that makes it.
RECIPES = (
    "adapter-convert", "adapter-show", "adapter-zero", "convert", "fuse-auto", "fuse-refit",
    "fuse-zero-delta", "generate-routed", "guard", "nano", "nano-export", "route-explain", "train",
    "stack", "stacks-list", "stacks-verify", "stacks-analyse", "stacks-import", "stacks-export",
    "stacks-diff", "stacks-disable", "stacks-enable", "profile-nano", "route-check",
    "route-discover", "route-train", "route-evaluate", "eval-nano", "eval-local-benchmarks",
    "confound-nano", "confound-nano-null", "identity-nano", "sweep-nano", "compare-boosting-nano",
    "compare-building-block-nano", "compare-null-space-nano",
)  # fmt: skip
NEED_SHARED_DATA = {"eval-local-benchmarks"}

# What another machine, hour or directory changes.
VOLATILE = re.compile(
    r"seconds|versions|device|_path$|^path$|created|written_at|time$|resident|peak_bytes|per_second"
    r"|cache_bytes|active_bytes|working_set|processes|_sha256|package|notes|^plots"
    r"|fingerprint|checksum|^digest$|^made_from$"
)
_HASH = re.compile(r"(full:)?[0-9a-f]{64}")
# Stacks are called by a hash of their header, which names the base's fingerprint.
_HASH_IN_NAME = re.compile(r"-[0-9a-f]{12}(?=\.safetensors)")
MANY = 40
ROUNDING = 1e-9
_OF_A_RESULT = {
    "data", "blocks", "title", "question", "schema_version", "outcome", "standing", "environment",
    "provenance", "seal", "failed_gate",
}  # fmt: skip
# What the head of a result has and the report of that kind had not.
_NEW_IN_THE_HEAD = {
    "fuse": {"kind"}, "guard": {"kind"}, "train": {"kind", "verdict"},
    "convert": {"kind", "verdict"},
}  # fmt: skip
# What the report of a kind held at the top, and its result holds in the head.
_IN_THE_HEAD = {
    "confound": {"standing"}, "identity": {"standing"}, "sweep": {"failed_gate"},
}  # fmt: skip


# What a kind of result said of itself otherwise, or not at all, before it was a `Result`.
FORMER: dict[str, dict[str, Any]] = {
    "route train": {"status": "trained"},
    "route explain": {"status": None, "settings": None},
}
# Of a result's head, what former documents of some commands had no word for.
_OF_THE_HEAD = ("kind", "status", "verdict", "settings.")


def pruned(value: Any) -> Any:
    """A JSON document without what is volatile; of a long list of records the digest alone."""
    if isinstance(value, dict):
        kept = {key: part for key, part in value.items() if not VOLATILE.search(key)}
        return {Path(key).name: pruned(part) for key, part in kept.items()}
    if isinstance(value, list):
        parts = [pruned(part) for part in value]
        if len(parts) > MANY:
            return f"{len(parts)} with digest {digest(json.dumps(parts).encode())}"
        return parts
    is_words = isinstance(value, str) and ("/" in value or len(value) > 200)
    is_hash = isinstance(value, str) and _HASH.fullmatch(value) is not None
    return None if is_words or is_hash else value


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, number or text) of a JSON document."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from leaves(part, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for place, part in enumerate(value):
            yield from leaves(part, f"{path}[{place}]")
    else:
        yield path, value


def figures_of(document: dict[str, Any]) -> dict[str, Any]:
    """The figures of a report, at places that are the same in `result.json` and in what was before:
    those of `data` stand at the top, and what is drawn of them is left out.
    """
    if "seal" in document:
        kind, data = document["kind"], document["data"]
        left_out = _OF_A_RESULT - _IN_THE_HEAD.get(kind, set()) | _NEW_IN_THE_HEAD.get(kind, set())
        head = {k: v for k, v in document.items() if k not in left_out}
        document = head | data | FORMER.get(kind, {})
    figures: dict[str, Any] = pruned(document)
    return figures


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def record(target: Path, printed: str) -> dict[str, Any]:
    """Of one run: the figures of what it prints and of its reports, and the digests of its rows and
    tensors.
    """
    figures = figures_of(json.loads(printed))
    digests = {}
    for file in sorted(target.rglob("*")) if target.is_dir() else ():
        name = _HASH_IN_NAME.sub("", str(file.relative_to(target)))
        if file.suffix == ".jsonl":
            rows = [pruned(json.loads(line)) for line in file.read_text().splitlines()]
            digests[name] = digest(json.dumps(rows).encode())
        elif file.suffix == ".safetensors" and not file.name.startswith("checkpoint"):
            digests[name] = _tensors_digest(file)
        elif file.name.endswith(("report.json", "result.json")):
            figures |= figures_of(json.loads(file.read_text()))
        elif file.suffix == ".json" and not file.name.startswith("."):
            document = pruned(json.loads(file.read_text()))
            digests[name] = digest(json.dumps(document).encode())
    return {"figures": figures, "digests": digests}


def _tensors_digest(file: Path) -> str:
    """Of the tensors alone: headers hold settings and paths."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header.pop("__metadata__", None)
    return digest(json.dumps(header, sort_keys=True).encode() + data[8 + length :])


def run(name: str, directory: Path) -> dict[str, Any]:
    """Run a recipe in `directory`, unless it is done there. Raises: ClickException: it fails."""
    printed = directory / f"{name}.out"
    if not printed.is_file():
        command = [sys.executable, "-m", "mlxstacks", "run", name, "--json"]
        if name in NEED_SHARED_DATA:
            command += ["--set", f"data={SHARED}"]
        done = subprocess.run(
            command, cwd=directory, env=os.environ | ENVIRONMENT, capture_output=True, text=True
        )
        if done.returncode not in (0, 3):
            raise click.ClickException(f"{name}: exit {done.returncode}\n{done.stderr}")
        printed.write_text(done.stdout)
    return record(directory / "mlxstacks-out" / name, printed.read_text())


def read_record(name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((RECORDS / f"{name}.json").read_text())
    return record


def differences(old: dict[str, Any], new: dict[str, Any]) -> tuple[list[str], float]:
    """(a line for each figure or digest that is gone, new or another; the largest change, in shares
    of the figure, among those that are called the same: of rounding, by another library).
    """
    lines, largest = [], 0.0
    # The head of a result, of commands whose report had none.
    added = {"kind", "settings", "status", "verdict"} - old["figures"].keys()
    figures = {key: value for key, value in new["figures"].items() if key not in added}
    new = {**new, "figures": figures}
    for part in ("figures", "digests"):
        old_leaves, new_leaves = dict(leaves(old[part])), dict(leaves(new[part]))
        for key in sorted(old_leaves.keys() | new_leaves.keys()):
            before, after = old_leaves.get(key), new_leaves.get(key)
            if before == after or _both_nan(before, after):
                continue
            if key not in old_leaves and key.startswith(_OF_THE_HEAD):
                continue
            if isinstance(before, float) and isinstance(after, float):
                share = abs(after - before) / max(abs(before), abs(after))
                if share <= ROUNDING:
                    largest = max(largest, share)
                    continue
            lines.append(f"{key}: {before!r} -> {after!r}")
    return lines, largest


def _both_nan(*values: Any) -> bool:
    return all(isinstance(value, float) and math.isnan(value) for value in values)


@click.command()
@click.argument("directory", type=click.Path(file_okay=False, path_type=Path))
@click.option("--check", is_flag=True, help="Compare with the records instead of writing them.")
@click.option("--only", multiple=True, help="A recipe; may be given again.")
def main(directory: Path, check: bool, only: tuple[str, ...]) -> None:
    """Run the nano recipes in DIRECTORY and record what they give, or compare with the records."""
    if not OPENBLAS.is_file():
        raise click.ClickException(f"{OPENBLAS}: not there; apt-get install libopenblas0-pthread")
    directory.mkdir(parents=True, exist_ok=True)
    versions = {name: version(name) for name in ("mlx", "mlx-lm", "numpy")}
    differing = 0
    for name in only or RECIPES:
        if name in NEED_SHARED_DATA and not SHARED.is_dir():
            continue
        new = {"versions": versions} | run(name, directory)
        file = RECORDS / f"{name}.json"
        if not check:
            file.write_text(json.dumps(new, indent=0, sort_keys=True, separators=(",", ":")) + "\n")
            continue
        lines, largest = differences(read_record(name), new)
        differing += len(lines)
        click.echo(
            f"{name}: {len(dict(leaves(new['figures'])))} figures, {len(lines)} differ, "
            f"rounding {largest:.1g}"
        )
        for line in lines:
            click.echo(f"  {line}")
    sys.exit(differing > 0)


if __name__ == "__main__":
    main()
