"""Write the fused checkpoint: touched shards again, a block at a time; the others as they are.

A touched shard whose tensors keep their sizes is cloned, where the file system can, and patched.
Else it is written from its first byte, because a promoted tensor changes every offset behind it;
its untouched tensors are copied file to file while the workers compute.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from mlxstacks.files.checkpoint import Checkpoint, linking
from mlxstacks.files.disk import target_errors
from mlxstacks.files.shards import ShardHeader, ShardPatcher, ShardWriter
from mlxstacks.files.side_files import clone, clone_or_link
from mlxstacks.fuse.blocks import Decision
from mlxstacks.fuse.decide import Choice
from mlxstacks.fuse.fidelity import Sums
from mlxstacks.fuse.kernel_task import kernel_fault, run_kernel_task, takes_kernel, takes_pair
from mlxstacks.fuse.module import Done, Module, run_task, tasks
from mlxstacks.fuse.settings import FuseSettings

Progress = Callable[[int], None]
Entry = tuple[str, str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ModuleWork:
    """A module with its final decisions.

    by_kernel: the GPU kernel runs its tasks. low_rank: and multiplies the adapter's pair itself.
    """

    module: Module
    decisions: dict[int, Decision]
    by_kernel: bool = False
    low_rank: bool = False

    @property
    def bits(self) -> int | None:
        """Bits after the last stage, None when not quantized then."""
        return self.decisions[max(self.decisions)].bits

    @property
    def mode(self) -> str:
        """Its grid then."""
        return self.decisions[max(self.decisions)].mode

    def outputs(self) -> list[Entry]:
        return self.module.outputs(self.bits, self.mode)


def module_works(
    modules: Iterable[Module],
    choices: Mapping[str, Choice],
    settings: FuseSettings,
    notes: list[str],
    *,
    check: bool = True,
) -> list[ModuleWork]:
    """Each module with its decisions; by a kernel where one runs here and makes NumPy's bytes.

    check: each kernel is tried on its module first; one that fails is a note, and the last.
    """
    kernels, works = settings.kernels, []
    for module in modules:
        decisions = choices[module.path].decisions
        by_kernel = kernels and takes_kernel(module, decisions)
        low_rank = by_kernel and check and takes_pair(module, decisions)
        if by_kernel and check:
            fault = kernel_fault(module, decisions, settings.zero_delta, settings.seed, low_rank)
            if fault is not None:
                kernels = by_kernel = False  # a device that fails once is not asked again
                notes.append(f"{fault}; NumPy did the rest. Please report this device.")
        works.append(ModuleWork(module, decisions, by_kernel, by_kernel and low_rank))
    return works


def process(
    work: ModuleWork,
    pool: ThreadPoolExecutor,
    workers: int,
    settings: FuseSettings,
    keep: bool = True,
) -> Iterator[Done]:
    """Finished blocks of a module in order, with at most `workers` + 2 in flight."""
    zero = keep and settings.zero_delta  # decisions rest on the trained deltas
    waiting: deque[Future[Done]] = deque()
    on_device = any(decision.on_device for decision in work.decisions.values())
    for task in tasks(work.module, work.decisions, zero, settings.seed, work.low_rank):
        if on_device or work.by_kernel:  # MLX's streams belong to the thread that made them
            yield run_kernel_task(task) if work.by_kernel else run_task(task, keep)
            continue
        waiting.append(pool.submit(run_task, task, keep))
        if len(waiting) > workers + 1:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def measure_module(
    work: ModuleWork, pool: ThreadPoolExecutor, workers: int, settings: FuseSettings
) -> dict[int, Sums]:
    """Sums by stage over all rows of a module with the trained delta; nothing is written."""
    return total_sums(process(work, pool, workers, settings, keep=False))


def total_sums(blocks: Iterable[Done]) -> dict[int, Sums]:
    """By stage."""
    total = defaultdict[int, Sums](Sums)
    for done in blocks:
        for stage, sums in done.sums.items():
            total[stage] += sums
    return total


def touched_files(works: list[ModuleWork]) -> set[Path]:
    """The shards that hold a tensor of a touched module."""
    return {info.file for work in works for info in work.module.tensors()}


def new_entries(header: ShardHeader, works: list[ModuleWork]) -> list[Entry]:
    """Tensors of a rewritten shard, in the old order; tensors that disappear are left out, new ones
    stand behind the scales.
    """
    replaced = {i.name for work in works for i in work.module.tensors()}
    outputs = {entry[0]: entry for work in works for entry in work.outputs()}
    added = {
        work.module.stored.scales.name: entry
        for work in works
        for entry in work.outputs()
        if entry[0] not in replaced and work.module.stored.scales is not None
    }
    entries = []
    for info in header.tensors.values():
        if info.name in outputs:
            entries.append(outputs[info.name])
        elif info.name not in replaced:
            entries.append((info.name, info.dtype, info.shape))
        if info.name in added:
            entries.append(added[info.name])
    return entries


def keeps_its_form(header: ShardHeader, works: list[ModuleWork]) -> bool:
    """Whether all tensors of a shard stay as long as they are."""
    return new_entries(header, works) == [
        (info.name, info.dtype, info.shape) for info in header.tensors.values()
    ]


def _writer(
    header: ShardHeader, works: list[ModuleWork], directory: Path, settings: FuseSettings
) -> ShardWriter:
    target, entries = directory / header.path.name, new_entries(header, works)
    if not keeps_its_form(header, works):
        return ShardWriter(target, entries, header.metadata)
    with target_errors(target):
        if not settings.copy_shards and clone(header.path.resolve(), target):
            return ShardPatcher(target, header)
    return ShardWriter(target, entries, like=header)


def write_shards(
    checkpoint: Checkpoint,
    works: list[ModuleWork],
    directory: Path,
    settings: FuseSettings,
    workers: int,
    progress: Progress,
) -> tuple[dict[str, dict[int, Sums]], list[dict[str, object]]]:
    """Write all shards of the fused model into `directory`.

    Returns the sums by module path and stage, and for each file its name, how it came to be
    ("patched", "rewritten", "cloned", "linked", "copied") and the bytes that were written for it.
    """
    touched = touched_files(works)
    rewritten = [header for header in checkpoint.headers if header.path in touched]
    files: list[dict[str, object]] = []
    with linking([header.path for header in checkpoint.headers]):
        for header in checkpoint.headers:
            if header.path not in touched:
                target = directory / header.path.name
                how = clone_or_link(header.path, target, copy=settings.copy_shards)
                written = header.file_bytes if how == "copied" else 0
                files.append({"name": header.path.name, "how": how, "written_bytes": written})

    def copy_untouched(header: ShardHeader) -> None:
        replaced = {info.name for work in works for info in work.module.tensors()}
        for info in header.tensors.values():
            if info.name not in replaced:
                writers[header.path].copy(info)

    def written_blocks(work: ModuleWork) -> Iterator[Done]:
        for done in process(work, pool, workers, settings):
            for name, chunk in done.chunks.items():
                writers[home[name]].write(name, chunk)
            progress(done.weights)
            yield done

    home = {info.name: info.file for work in works for info in work.module.tensors()}
    for work in works:
        if (scales := work.module.stored.scales) is not None:
            home.setdefault(work.module.biases_name, scales.file)
    with ExitStack() as stack:
        copier = stack.enter_context(ThreadPoolExecutor(1))
        pool = stack.enter_context(ThreadPoolExecutor(workers))
        writers = {
            header.path: stack.enter_context(_writer(header, works, directory, settings))
            for header in rewritten
        }
        copying = [copier.submit(copy_untouched, header) for header in rewritten]
        sums = {work.module.path: total_sums(written_blocks(work)) for work in works}
        for future in copying:
            future.result()
        for path, writer in writers.items():
            how = "patched" if isinstance(writer, ShardPatcher) else "rewritten"
            files.append({"name": path.name, "how": how, "written_bytes": writer.close()})
    return sums, sorted(files, key=lambda file: str(file["name"]))
