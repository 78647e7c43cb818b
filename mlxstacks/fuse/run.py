"""Fuse adapters into a checkpoint on disk: match, decide, write, report."""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from mlxstacks import base_model
from mlxstacks.errors import InputError
from mlxstacks.files.checkpoint import check_unchanged, fingerprint, open_checkpoint
from mlxstacks.files.disk import existing_ancestor, user_path
from mlxstacks.files.hub import resolve_model
from mlxstacks.files.outputs import check_target, staged_directory, write_json
from mlxstacks.files.shards import read_header
from mlxstacks.files.side_files import SideFile, can_clone, copy_side_files, side_files
from mlxstacks.files.stored_weight import config_key
from mlxstacks.fuse.blocks import Decision
from mlxstacks.fuse.decide import Choice, decide, estimate_alternative
from mlxstacks.fuse.fidelity import Fidelity, Sums
from mlxstacks.fuse.module import Module, gather_modules
from mlxstacks.fuse.report import (
    Alternative,
    FuseReport,
    entries_bytes,
    result_of,
    shortfall_notes,
    stage_report,
    tensor_bytes,
    together,
    verdict,
)
from mlxstacks.fuse.rewrite import (
    ModuleWork,
    keeps_its_form,
    measure_module,
    module_works,
    new_entries,
    touched_files,
    write_shards,
)
from mlxstacks.fuse.settings import FuseSettings
from mlxstacks.ops.gptq import Moments
from mlxstacks.ops.kernels import backend
from mlxstacks.study.result import Result
from mlxstacks.study.write import write_result

_INDEX_NAME = "model.safetensors.index.json"
_MOST_WORKERS = 8  # beyond this the interpreter lock, not the cores, is the limit

# (weights, figures, extra bytes) of a module under another policy.
Estimate = tuple[int, Fidelity, int]
# What is told of the work: (weights done, weights in all).
ProgressCallback = Callable[[int, int], None]


def run(
    settings: FuseSettings, *, dry_run: bool = False, progress: ProgressCallback | None = None
) -> FuseReport:
    """Fuse `settings.adapter_path` into `settings.model` and write it to `settings.save_path`.

    Memory stays at a few blocks of one tensor, whatever the model's size. The result holds what
    mlx-lm needs to load it, and `result.json`. A dry run decides and counts, and writes nothing.

    Raises:
        InputError: the model, an adapter, an option or the target cannot be used; nothing is
            left behind.
    """
    return _Fuse(settings, progress).run(dry_run)[0]


def run_command(
    settings: FuseSettings,
    moments: Mapping[str, Moments] | None = None,
    notes: Sequence[str] = (),
    *,
    dry_run: bool = False,
    progress: ProgressCallback | None = None,
) -> Result:
    """`mlxstacks fuse`: the same as `run`, and what it wrote as `result.json`.

    moments: see `Module`. notes: for the result, on them.
    """
    fuse = _Fuse(settings, progress, moments)
    fuse.notes += notes
    return fuse.run(dry_run)[1]


class _Fuse:
    def __init__(
        self,
        settings: FuseSettings,
        progress: ProgressCallback | None,
        moments: Mapping[str, Moments] | None = None,
    ) -> None:
        if settings.model is None or settings.save_path is None or not settings.adapter_path:
            raise InputError("fuse needs model, adapter_path and save_path")
        self.settings = settings
        self.started = time.monotonic()
        self.workers = max(1, min(os.cpu_count() or 1, _MOST_WORKERS))
        self.checkpoint = open_checkpoint(resolve_model(settings.model, sidecars=True))
        self.base_fingerprint = fingerprint(self.checkpoint)
        self.modules, self.notes = gather_modules(self.checkpoint, settings, moments)
        gaps = base_model.loading_gaps(self.checkpoint.directory, self.checkpoint.config)
        self.notes += [f"mlx-lm cannot load the result: {gap}." for gap in gaps]
        if settings.zero_delta and settings.fail_under is not None:
            self.notes.append("--fail-under does not apply at zero delta: nothing is intended.")
        self.done_weights, self.progress = 0, progress
        self.target = user_path(settings.save_path)
        # The shards too: in a hub cache they are links to files of another directory.
        shards = [header.path for header in self.checkpoint.headers]
        adapters = map(user_path, settings.adapter_path)
        self.inputs = [self.checkpoint.directory, *shards, *adapters]
        # Sidecars that the index names and that were not downloaded, as mlx-lm does not.
        weight_map = (self.checkpoint.index or {}).get("weight_map", {})
        absent = [
            SideFile(name, reason=f"named in {_INDEX_NAME}, not in the directory")
            for name in sorted(set(weight_map.values()))
            if not fnmatchcase(name, "model*.safetensors")
            and not (self.checkpoint.directory / name).exists()
        ]
        self.side_files = [*side_files(self.checkpoint.directory, shards), *absent]
        # Told before anything slow begins; staged_directory asks again.
        check_target(self.target, force=settings.force, inputs=self.inputs)

    def run(self, dry_run: bool) -> tuple[FuseReport, Result]:
        with ThreadPoolExecutor(self.workers) as pool:

            def full_pass(module: Module, decisions: dict[int, Decision]) -> dict[int, Sums]:
                # By NumPy on every machine: no decision may hang on the last bit of a kernel's sum.
                work = ModuleWork(module, decisions)
                return measure_module(work, pool, self.workers, self.settings)

            choices = {
                module.path: decide(module, self.settings, full_pass, estimate_all=dry_run)
                for module in self.modules
            }
        works = module_works(self.modules, choices, self.settings, self.notes, check=not dry_run)
        alternatives = self._alternatives(choices)
        files = self._planned_files(works, clones=not dry_run and self._can_clone())
        if dry_run:
            report = self._report("planned", works, choices, {}, files, alternatives)
            return report, result_of(report)
        needed = sum(int(file["written_bytes"]) for file in files)
        shared = self._shares_bytes(self.checkpoint.directory)
        needed += sum(file.nbytes for file in self.side_files if file.how == "copied" or not shared)
        with staged_directory(
            self.target, force=self.settings.force, needed_bytes=needed, inputs=self.inputs
        ) as directory:
            sums, files = write_shards(
                self.checkpoint, works, directory, self.settings, self.workers, self._advance
            )
            self.side_files = copy_side_files(
                self.checkpoint.directory, directory, self.side_files, self.settings.copy_shards
            )
            check_unchanged(self.checkpoint.directory, self.base_fingerprint)
            self._write_config(directory, works)
            self._write_index(directory, works)
            report = self._report("fused", works, choices, sums, files, alternatives)
            # Shards are many gigabytes, and have been read once: config and index stand for them.
            small = [directory / "config.json", directory / _INDEX_NAME]
            result = write_result(result_of(report), directory, self.target, sources=small)
        return report, result

    def _alternatives(self, choices: dict[str, Choice]) -> tuple[str, dict[str, Estimate]]:
        """A policy that keeps more, and what it would give each module, estimated on samples."""
        wide = self.settings.requant in ("auto", "promote")
        policy = "dequantize" if wide else "promote"
        estimates: dict[str, Estimate] = {}
        if self.settings.requant in ("dequantize", "gptq") or self.settings.zero_delta:
            return policy, estimates
        for module in self.modules:
            choice = choices[module.path]
            target = self.settings.target_correlation
            if (estimate := estimate_alternative(module, choice, policy, target)) is not None:
                decision, figures = estimate
                chosen = choice.decisions[max(choice.decisions)]
                extra = tensor_bytes(module, decision) - tensor_bytes(module, chosen)
                estimates[module.path] = (module.weights, figures, extra)
        return policy, estimates

    def _advance(self, weights: int) -> None:
        self.done_weights += weights
        if self.progress:
            self.progress(self.done_weights, sum(module.weights for module in self.modules))

    def _can_clone(self) -> bool:
        shard = self.checkpoint.headers[0].path
        place = existing_ancestor(self.target.absolute())
        return self._shares_bytes(shard) and can_clone(shard, place)

    def _planned_files(self, works: list[ModuleWork], clones: bool) -> list[dict[str, Any]]:
        """clones: the file system has them; a dry run, which does not try, plans without."""
        touched = touched_files(works)
        files = []
        for header in self.checkpoint.headers:
            how, written = "shared", 0
            if header.path in touched and clones and keeps_its_form(header, works):
                infos = [info for work in works for info in work.module.tensors()]
                how = "patched"
                written = sum(info.nbytes for info in infos if info.file == header.path)
            elif header.path in touched:
                how, written = "rewritten", entries_bytes(new_entries(header, works))
            elif not self._shares_bytes(header.path):
                how, written = "copied", header.file_bytes
            files.append({"name": header.path.name, "how": how, "written_bytes": written})
        return files

    def _shares_bytes(self, source: Path) -> bool:
        """Whether clones and links do: neither leaves its file system."""
        device = existing_ancestor(self.target.absolute()).stat().st_dev
        return not self.settings.copy_shards and source.stat().st_dev == device

    def _write_config(self, directory: Path, works: list[ModuleWork]) -> None:
        """The config with an entry for every module whose bits changed, under both keys."""
        config = json.loads(json.dumps(self.checkpoint.config))
        for key in ("quantization", "quantization_config"):
            if not isinstance(config.get(key), dict):
                continue
            for work in works:
                stored = work.module.stored
                if (work.bits, work.mode) == (stored.bits, stored.mode):
                    continue
                entry: dict[str, Any] | bool = False
                if work.bits is not None:
                    entry = {"group_size": work.module.group_size(work.mode), "bits": work.bits}
                    if stored.mode != "affine":  # the model's own mode is another
                        entry["mode"] = work.mode
                name = config_key(config[key], work.module.path, work.module.stored.weight)
                config[key][name] = entry
        # NaN is not JSON, but some configs hold it; what was read goes back.
        write_json(directory / "config.json", config, allow_nan=True)

    def _write_index(self, directory: Path, works: list[ModuleWork]) -> None:
        weight_map, total = {}, 0
        for header in self.checkpoint.headers:
            for name, dtype, shape in new_entries(header, works):
                weight_map[name] = header.path.name
                total += entries_bytes([(name, dtype, shape)])
        index = self.checkpoint.index or {}
        indexed = index.get("weight_map", {})
        # Tensors that the index finds in sidecars, where a sidecar holds them and is carried.
        carried = {file.name for file in self.side_files if file.how is not None}
        sidecars = {
            name: read_header(self.checkpoint.directory / name).tensors
            for name in sorted(carried & set(indexed.values()))
        }
        for name, file in indexed.items():
            info = sidecars.get(file, {}).get(name)
            if info is not None and name not in self.checkpoint.tensors:
                where = info.file.relative_to(self.checkpoint.directory).as_posix()
                weight_map.setdefault(name, where)
                total += info.nbytes
        metadata = index.get("metadata")
        metadata = {**(metadata if isinstance(metadata, dict) else {}), "total_size": total}
        write_json(
            directory / _INDEX_NAME,
            {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))},
        )

    def _report(
        self,
        status: str,
        works: list[ModuleWork],
        choices: dict[str, Choice],
        sums: dict[str, dict[int, Sums]],
        files: list[dict[str, Any]],
        alternatives: tuple[str, dict[str, Estimate]],
    ) -> FuseReport:
        stages = [
            stage_report(index, adapter, works, choices, sums)
            for index, adapter in enumerate(self.settings.adapter_path)
        ]
        extra = sum(
            entries_bytes(work.outputs()) - sum(i.nbytes for i in work.module.tensors())
            for work in works
        )
        policy, estimates = alternatives
        alternative = Alternative.of(policy, list(estimates.values()))
        plain = {path: figures for path, (_, figures, _) in estimates.items()}
        settings = self.settings.model_dump(mode="json", exclude={"force", "save_path"})
        total = together(sums)
        report = FuseReport(
            status=status,
            model=str(self.settings.model),
            save_path=str(self.target),
            settings=settings,
            base_fingerprint=self.base_fingerprint,
            zero_delta=self.settings.zero_delta,
            kernels=backend() if any(work.by_kernel for work in works) else None,
            stages=stages,
            total=total,
            files=files,
            side_files=self.side_files,
            extra_bytes=extra,
            written_bytes=sum(int(file["written_bytes"]) for file in files),
            seconds=time.monotonic() - self.started,
            verdict=verdict(
                stages, total, self.settings, alternative, extra, self.checkpoint.nbytes
            ),
            notes=[*self.notes, *shortfall_notes(stages, self.settings, plain)],
            alternative=alternative,
        )
        return replace(report, failed_gate=self._failed_gate(report))

    def _failed_gate(self, report: FuseReport) -> str | None:
        """Why the gate is shut: one stage below the limit is enough, and so is all of them."""
        limit, failed = self.settings.fail_under, []
        if limit is None or self.settings.zero_delta:
            return None
        totals = {"": report.total}
        if len(report.stages) > 1:
            stages = {f" of stage {n}": stage.total for n, stage in enumerate(report.stages, 1)}
            totals = {**stages, " of all stages together": report.total}
        for where, total in totals.items():
            if total is None:  # nothing quantized
                continue
            if total.correlation is None:
                failed.append(f"the delta{where} is zero: no correlation for --fail-under {limit}")
            elif total.correlation < limit:
                failed.append(
                    f"total correlation{where} {total.correlation:.4f} is below "
                    f"--fail-under {limit}"
                )
        return "; ".join(failed) or None
