"""The table of commands.

A row names, as text, the settings model, the function and the renderer of a command. Nothing behind
a name is imported before the command runs, so `mlxstacks --help` is instant. To add a command:
write its settings model and its function, add a row, write its renderer in cli/.
"""

import difflib
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxstacks.errors import InputError


@dataclass(frozen=True, slots=True)
class Command:
    """One command as text; `module:name` is imported when it is needed.

    function: takes the settings, and `dry_run` and `progress` where its signature has them.
    render: takes a rich console and the result.
    arguments: settings given by position, in order, with the name the usage line shows.
    nano: settings that come from the built-in model when they are not given, with the attribute
        of `nano_paths()`. A `model` that is given turns the others off: they belong to nano.
    report: file in the target that holds the `settings` it was made with; makes `run` resumable.
    """

    help: str
    settings: str
    function: str
    render: str
    arguments: Mapping[str, str] = field(default_factory=dict)
    nano: Mapping[str, str] = field(default_factory=dict)
    report: str | None = None


COMMANDS: dict[str, Command] = {
    "fuse": Command(
        help="Fuse adapters into a quantized model and say what survived.",
        settings="mlxstacks.fuse.settings:FuseSettings",
        function="mlxstacks.fuse.run:run",
        render="mlxstacks.cli.fuse:render",
        nano={"model": "model_path", "adapter_path": "adapter_path"},
        report="fuse_report.json",
    ),
    "adapter zero": Command(
        help="Write a copy of an adapter whose delta is zero: the control of every fuse.",
        settings="mlxstacks.files.settings:AdapterZeroSettings",
        function="mlxstacks.files.adapter_commands:zero_adapter_command",
        render="mlxstacks.cli.adapter:render_written",
        arguments={"adapter_path": "IN", "save_path": "OUT"},
        nano={"adapter_path": "adapter_path"},
    ),
    "adapter convert": Command(
        help="Write an adapter in mlx-lm's or in PEFT's format, with the same delta.",
        settings="mlxstacks.files.settings:AdapterConvertSettings",
        function="mlxstacks.files.adapter_commands:convert_adapter",
        render="mlxstacks.cli.adapter:render_written",
        arguments={"adapter_path": "IN", "save_path": "OUT"},
        nano={"adapter_path": "adapter_path"},
    ),
    "adapter show": Command(
        help="Show what an adapter holds: modules, shapes, rank, size of the delta.",
        settings="mlxstacks.files.settings:AdapterShowSettings",
        function="mlxstacks.files.adapter_commands:show_adapter",
        render="mlxstacks.cli.adapter:render_summary",
        arguments={"adapter_path": "IN"},
        nano={"adapter_path": "adapter_path"},
    ),
    "train": Command(
        help="Train a LoRA on a model and write an adapter that mlx-lm loads.",
        settings="mlxstacks.training.settings:TrainSettings",
        function="mlxstacks.experiments.train_run:run",
        render="mlxstacks.cli.train:render",
        nano={"model": "model_path", "data": "data_path"},
        report="train_report.json",
    ),
    "guard": Command(
        help="Predict live buffers and bytes of a run from a config alone.",
        settings="mlxstacks.guard.settings:GuardSettings",
        function="mlxstacks.guard.run:guard",
        render="mlxstacks.cli.guard:render",
        nano={"model": "model_path"},
    ),
    "sweep": Command(
        help="Train at many ranks and compare: losses, buffers, what a fuse keeps.",
        settings="mlxstacks.experiments.settings:SweepSettings",
        function="mlxstacks.cli.sweep:run",
        render="mlxstacks.cli.sweep:render",
        nano={"model": "model_path", "data": "data_path"},
        report="sweep_report.json",
    ),
    "sweep buffers": Command(
        help="Test whether rank moves the number of live buffers, with a counting allocator.",
        settings="mlxstacks.experiments.buffer_settings:BufferSettings",
        function="mlxstacks.experiments.buffer_experiment:run",
        render="mlxstacks.cli.sweep:render_buffers",
        nano={"model": "model_path"},
        report="sweep_report.json",
    ),
    "nano": Command(
        help="Show the built-in model: where it is and what it was measured to know.",
        settings="mlxstacks.nano.settings:ShowSettings",
        function="mlxstacks.nano.show:show",
        render="mlxstacks.cli.nano:render_show",
    ),
    "nano rebuild": Command(
        help="Train and measure the built-in model again, from generated data.",
        settings="mlxstacks.nano.settings:RebuildSettings",
        function="mlxstacks.nano.build:rebuild",
        render="mlxstacks.cli.nano:render_rebuild",
        arguments={"save_path": "DIR"},
        report="manifest.json",
    ),
    "nano export": Command(
        help="Write the built-in model as a checkpoint that mlx-lm loads.",
        settings="mlxstacks.nano.settings:ExportSettings",
        function="mlxstacks.nano.exports:export",
        render="mlxstacks.cli.nano:render_export",
        arguments={"save_path": "DIR"},
    ),
    "doctor": Command(
        help="Show the device, its limits, versions, and what will be slow and why.",
        settings="mlxstacks.doctor:DoctorSettings",
        function="mlxstacks.doctor:doctor",
        render="mlxstacks.cli.doctor:render",
    ),
}

# A second name for a command.
ALIASES = {"zero": "adapter zero"}

# What the help says of a first word that stands before several commands.
GROUPS = {
    "adapter": "Adapters on their own: show, zero, convert between mlx-lm and PEFT.",
    "sweep": "Train at many ranks, seeds, layers, projections or bits and compare: losses, time, "
    "buffers, what a fuse keeps. Settings of every run: --set train.KEY=VALUE, with the keys of "
    "`mlxstacks train`.",
    "nano": "The built-in model: show it, export it, train it again.",
}


def load(dotted: str) -> Any:
    """The object behind `module:name`."""
    module, _, name = dotted.partition(":")
    return getattr(importlib.import_module(module), name)


def nearest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing when no known name is close."""
    close = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def command_named(name: str) -> Command:
    """The row of a command or of an alias. Raises InputError naming the nearest one."""
    name = ALIASES.get(name, name)
    if name not in COMMANDS:
        raise InputError(
            f"no command {name!r}{nearest(name, COMMANDS)} (known: {', '.join(COMMANDS)})"
        )
    return COMMANDS[name]
