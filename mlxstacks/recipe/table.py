"""The table of commands.

A row names, as text, the settings model, the function and the renderer of a command. Nothing behind
a name is imported before the command runs, so `mlxstacks --help` is instant. To add a command:
write its settings model and a function that gives a `Result`, and add a row.
"""

import difflib
import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mlxstacks.errors import InputError

# Commands that are no functions of the package, and what is there instead.
TERMINAL_ONLY = {
    "chat": "`mlxstacks chat` is for a terminal; here ms.load and ms.generate answer",
    "serve": "`mlxstacks serve` runs until it is ended; start it in a terminal",
    "init": "`mlxstacks init` writes a recipe, which ms.run runs",
    "completion": "`mlxstacks completion` is for a shell",
}
DRY_RUN = "Show what would be done; touch nothing."


@dataclass(frozen=True, slots=True)
class Command:
    """One command as text; `module:name` is imported when it is needed.

    function: takes the settings, and `dry_run` and `progress` where its signature has them.
    render: takes a rich console and the result.
    arguments: settings given by position, in order, with the name the usage line shows.
    needs: settings without a default that the function does not ask for itself in a dry run.
    nano: settings that come from the built-in model when they are not given, with the attribute
        of `nano_paths()`. A `model` that is given turns the others off: they belong to nano.
    optional: those of `nano` that a model of the user's own may go without.
    dry_run: what the option of that name does.
    report: file in the target that holds the `settings` it was made with; makes `run` resumable.
    extends: the target may be there, and the command goes on with it; it says itself where not.
    nano_recipe: a recipe of ours whose values are the defaults where the model is nano, and its
        data are too.
    alone: a setting that stands for all inputs: with it nothing of nano is taken.
    conclude_again: result, directory with its files -> the result that follows from them; of
        studies whose conclusion needs neither model nor data.
    in_group: processes that `mlx.launch` starts can share it.
    prepare: settings, dry run -> settings with what of nano belongs to them, and further arguments
        of the function: studies do not know nano.
    """

    help: str
    settings: str
    function: str
    render: str = "mlxstacks.study.render.console:print_result"
    arguments: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    nano: Mapping[str, str] = field(default_factory=dict)
    optional: tuple[str, ...] = ()
    dry_run: str = DRY_RUN
    report: str | None = None
    extends: bool = False
    nano_recipe: str | None = None
    alone: str | None = None
    prepare: str | None = None
    conclude_again: str | None = None
    in_group: bool = False


COMMANDS: dict[str, Command] = {
    "fuse": Command(
        help="Fuse adapters into a quantized model and report what survived.",
        settings="mlxstacks.fuse.settings:FuseSettings",
        function="mlxstacks.studies.agreement.judge:run",
        nano={"model": "model_path", "adapter_path": "adapter_path"},
        report="result.json",
    ),
    "compare": Command(
        help="Compare models' next tokens with a reference's: agreement and KL divergence.",
        settings="mlxstacks.studies.agreement.settings:AgreementSettings",
        function="mlxstacks.studies.agreement.run:run",
        conclude_again="mlxstacks.studies.agreement.run:conclude_again",
        arguments={"model": "MODEL", "other": "OTHER"},
        nano={"model": "model_path", "adapter_path": "adapter_path"},
        optional=("adapter_path",),
        report="result.json",
        in_group=True,
    ),
    "convert": Command(
        help="Convert a GGUF file or Hugging Face model to mlx-lm's format, or add experts.",
        settings="mlxstacks.convert.settings:ConvertSettings",
        function="mlxstacks.convert.run:convert",
        arguments={"model": "MODEL"},
        nano={"model": "float_model_path"},
        nano_recipe="convert",
        report="result.json",
    ),
    "adapter zero": Command(
        help="Write a copy of an adapter with zero delta: the control for every fuse.",
        settings="mlxstacks.files.settings:AdapterZeroSettings",
        function="mlxstacks.studies.adapter:zero",
        arguments={"adapter_path": "IN", "save_path": "OUT"},
        nano={"adapter_path": "adapter_path"},
    ),
    "adapter convert": Command(
        help="Convert an adapter for mlx-lm, PEFT, vLLM, SGLang or llama.cpp, with equal delta.",
        settings="mlxstacks.files.settings:AdapterConvertSettings",
        function="mlxstacks.studies.adapter:convert",
        arguments={"adapter_path": "IN", "save_path": "OUT"},
        nano={"adapter_path": "adapter_path"},
    ),
    "adapter merge": Command(
        help="Merge adapters of one base: exactly, at a given rank, or by TIES or DARE.",
        settings="mlxstacks.files.settings:AdapterMergeSettings",
        function="mlxstacks.studies.adapter:merge",
        arguments={"adapter_path": "ADAPTER"},
        nano={"adapter_path": "adapter_path"},
    ),
    "adapter show": Command(
        help="Show an adapter's modules, shapes, rank and delta size.",
        settings="mlxstacks.files.settings:AdapterShowSettings",
        function="mlxstacks.studies.adapter:show",
        arguments={"adapter_path": "IN"},
        nano={"adapter_path": "adapter_path"},
    ),
    "train": Command(
        help="Train a LoRA on a model and write an adapter that mlx-lm loads.",
        settings="mlxstacks.training.settings:TrainSettings",
        function="mlxstacks.studies.train.run:run_command",
        nano={"model": "model_path", "data": "data_path"},
        report="result.json",
        in_group=True,
    ),
    "pretrain": Command(
        help="Train a small decoder from scratch, as a model that every other command takes.",
        settings="mlxstacks.training.settings:PretrainSettings",
        function="mlxstacks.studies.train.pretrain:run",
        nano={"data": "data_path"},
        report="result.json",
        in_group=True,
    ),
    "align": Command(
        help="Train a LoRA or a stack on preferred answers (DPO, ORPO) or rewards (GRPO).",
        settings="mlxstacks.training.settings:AlignSettings",
        function="mlxstacks.studies.stack.align:run",
        nano={"model": "model_path", "data": "preferences_path"},
        nano_recipe="align",
        alone="store_path",
        report="result.json",
        in_group=True,
    ),
    "distill": Command(
        help="Distil a store's routed stacks into one adapter, for this base or a smaller model.",
        settings="mlxstacks.studies.route.settings:DistillSettings",
        function="mlxstacks.studies.route.distill:run",
        prepare="mlxstacks.recipe.on_nano:distill",
        arguments={"store_path": "STORE"},
        nano={"store_path": "store_path"},
        nano_recipe="distill",
        report="result.json",
    ),
    "grow": Command(
        help="Add a domain that a store lacks: found in its gaps, trained, tested, then accepted.",
        settings="mlxstacks.grow.settings:GrowSettings",
        function="mlxstacks.grow.run:run",
        prepare="mlxstacks.recipe.on_nano:grow",
        arguments={"store_path": "STORE"},
        report="result.json",
    ),
    "stack": Command(
        help="Train frozen stacks, domain by domain, into a store that forgets none of them.",
        settings="mlxstacks.training.settings:StackRunSettings",
        function="mlxstacks.studies.stack.run:run",
        nano={"model": "model_path", "data": "curriculum_path"},
        extends=True,
        nano_recipe="stack",
        in_group=True,
    ),
    "stack compare": Command(
        help="Compare settings of `stack` over seeds: equal budgets, differences, verdict.",
        settings="mlxstacks.studies.compare.settings:CompareSettings",
        function="mlxstacks.studies.compare.run:run",
        conclude_again="mlxstacks.studies.compare.run:conclude_again",
        nano={"model": "model_path", "data": "curriculum_path"},
        nano_recipe="compare-building-block-nano",
        report="result.json",
        in_group=True,
    ),
    "psn stacks": Command(
        help="Train the same stacks on a random and a pretrained base, and all weights as control.",
        settings="mlxstacks.studies.psn.settings:PsnStacksSettings",
        function="mlxstacks.studies.psn.stacks:run",
        nano={"corpus": "data_path", "data": "curriculum_path"},
        report="result.json",
    ),
    "psn blocks": Command(
        help="Train capability blocks beside a frozen base, and a router; measure what they hold.",
        settings="mlxstacks.studies.psn.settings:PsnBlocksSettings",
        function="mlxstacks.studies.psn.blocks:run",
        nano={"corpus": "data_path", "data": "curriculum_path"},
        report="result.json",
    ),
    "guard": Command(
        help="Predict a run's live buffers and bytes from the model's config alone.",
        settings="mlxstacks.guard.settings:GuardSettings",
        function="mlxstacks.guard.run:run_command",
        render="mlxstacks.cli.output:print_guard",
        nano={"model": "model_path"},
    ),
    "sweep": Command(
        help="Train at many ranks and compare losses, buffers and what a fuse keeps.",
        settings="mlxstacks.studies.sweep.settings:SweepSettings",
        function="mlxstacks.studies.sweep.rank_sweep:run",
        conclude_again="mlxstacks.studies.sweep.report:conclude_again",
        prepare="mlxstacks.recipe.on_nano:sweep",
        nano={"model": "model_path", "data": "data_path"},
        report="result.json",
        in_group=True,
    ),
    "sweep buffers": Command(
        help="Test whether rank changes the number of live buffers, with a counting allocator.",
        settings="mlxstacks.studies.buffers.settings:BufferSettings",
        function="mlxstacks.studies.buffers.run:run",
        conclude_again="mlxstacks.studies.buffers.run:conclude_again",
        nano={"model": "model_path"},
        report="result.json",
    ),
    "confound": Command(
        help="Test whether fusing a second adapter adds knowledge, with a control for each arm.",
        settings="mlxstacks.studies.confound.settings:ConfoundSettings",
        function="mlxstacks.studies.confound.run:run",
        conclude_again="mlxstacks.studies.confound.conclude:conclude_again",
        nano={
            "model": "model_path",
            "persona": "adapter_path",
            "items": "items_path",
            "plain_model": "float_model_path",
        },
        optional=("plain_model",),
        nano_recipe="confound-nano",
        report="result.json",
        in_group=True,
    ),
    "identity": Command(
        help="Test whether a persona survives a second adapter: conditions, suite, gate.",
        settings="mlxstacks.studies.identity.settings:IdentitySettings",
        function="mlxstacks.studies.identity.run:run",
        conclude_again="mlxstacks.studies.identity.run:conclude_again",
        nano={
            "model": "model_path",
            "persona": "adapter_path",
            "persona_data": "data_path",
            "items": "items_path",
            "suite": "suite_path",
        },
        optional=("suite", "persona_data"),
        nano_recipe="identity-nano",
        report="result.json",
    ),
    "eval": Command(
        help="Run benchmarks in every mode (base, adapter, fused, ungated, routed); paired tests.",
        settings="mlxstacks.studies.benchmarks.settings:EvalSettings",
        function="mlxstacks.studies.benchmarks.run:run",
        nano={
            "model": "model_path",
            "adapter_path": "adapter_path",
            "store_path": "store_path",
            "data": "items_path",
        },
        optional=("adapter_path", "store_path", "data"),
        nano_recipe="eval-nano",
        alone="regrade",
        report="result.json",
        in_group=True,
    ),
    "report": Command(
        help="Write an HTML page and plots from the results of any runs.",
        settings="mlxstacks.report.settings:ReportSettings",
        function="mlxstacks.report.write:run",
        arguments={"runs": "RUN..."},
    ),
    "stacks list": Command(
        help="Show a store's domains, stacks, losses and forgetting matrix.",
        settings="mlxstacks.files.settings:StacksListSettings",
        function="mlxstacks.studies.stack.store_commands:list_store",
        arguments={"store_path": "STORE"},
        nano={"store_path": "store_path"},
    ),
    "stacks verify": Command(
        help="Check every file of a store: hashes, shapes, headers and base.",
        settings="mlxstacks.files.settings:StacksVerifySettings",
        function="mlxstacks.studies.stack.store_commands:verify_store",
        prepare="mlxstacks.recipe.on_nano:route",
        arguments={"store_path": "STORE"},
        nano={"store_path": "store_path"},
    ),
    "stacks remove": Command(
        help="Remove a domain from a store; its files stay until gc.",
        settings="mlxstacks.files.settings:StacksRemoveSettings",
        function="mlxstacks.studies.stack.store_commands:remove_domain",
        arguments={"store_path": "STORE", "domain": "DOMAIN"},
    ),
    "stacks disable": Command(
        help="Stop serving a domain's stacks; enable undoes it.",
        settings="mlxstacks.files.settings:StacksSwitchSettings",
        function="mlxstacks.studies.stack.store_commands:disable_domain",
        arguments={"store_path": "STORE", "domain": "DOMAIN"},
    ),
    "stacks enable": Command(
        help="Serve a domain's stacks again.",
        settings="mlxstacks.files.settings:StacksSwitchSettings",
        function="mlxstacks.studies.stack.store_commands:enable_domain",
        arguments={"store_path": "STORE", "domain": "DOMAIN"},
    ),
    "stacks undo": Command(
        help="Undo the last change to a store.",
        settings="mlxstacks.files.settings:StacksUndoSettings",
        function="mlxstacks.studies.stack.store_commands:undo_change",
        arguments={"store_path": "STORE"},
    ),
    "stacks retrain": Command(
        help="Retrain a domain in place; later domains are measured and marked.",
        settings="mlxstacks.files.settings:StacksRetrainSettings",
        function="mlxstacks.studies.stack.retrain:run",
        arguments={"store_path": "STORE", "domain": "DOMAIN"},
    ),
    "stacks export": Command(
        help="Export a stack of one expert as an adapter, or a domain as a store of its own.",
        settings="mlxstacks.files.settings:StacksExportSettings",
        function="mlxstacks.studies.stack.store_commands:export_stack",
        arguments={"store_path": "STORE", "stack": "STACK", "save_path": "OUT"},
    ),
    "stacks import": Command(
        help="Import an adapter as a stack of one expert, in a domain of its own.",
        settings="mlxstacks.files.settings:StacksImportSettings",
        function="mlxstacks.studies.stack.store_commands:import_adapter",
        arguments={"store_path": "STORE", "adapter_path": "ADAPTER"},
    ),
    "stacks diff": Command(
        help="Compare two stores: domains, stacks by hash, losses, matrix values.",
        settings="mlxstacks.files.settings:StacksDiffSettings",
        function="mlxstacks.studies.stack.store_commands:diff_stores",
        arguments={"store_path": "STORE", "other_path": "OTHER"},
        needs=("store_path", "other_path"),
    ),
    "stacks gc": Command(
        help="Delete files of a store that nothing refers to.",
        settings="mlxstacks.files.settings:StacksGcSettings",
        function="mlxstacks.studies.stack.store_commands:collect_garbage",
        arguments={"store_path": "STORE"},
    ),
    "stacks analyse": Command(
        help="Analyze what a store's stacks do: routing, directions, spectra, losses, plots.",
        settings="mlxstacks.files.settings:StacksAnalyseSettings",
        function="mlxstacks.studies.stack.analysis:run",
        prepare="mlxstacks.recipe.on_nano:stacks_analyse",
        arguments={"store_path": "STORE"},
        nano={"store_path": "store_path"},
    ),
    "route discover": Command(
        help="Find which domains prompts should go to, by the loss of their answers.",
        settings="mlxstacks.routing.settings:OutcomeSettings",
        function="mlxstacks.studies.route.discover:run",
        prepare="mlxstacks.recipe.on_nano:route",
        arguments={"store_path": "STORE"},
        nano={"store_path": "store_path"},
        report="result.json",
    ),
    "route train": Command(
        help="Train the router, which predicts the domains that help with a prompt.",
        settings="mlxstacks.routing.settings:RouterTrainSettings",
        function="mlxstacks.studies.route.train:run",
        prepare="mlxstacks.recipe.on_nano:route_train",
        arguments={"store_path": "STORE"},
        nano={"store_path": "store_path"},
        report="result.json",
    ),
    "route explain": Command(
        help="Explain the route of a prompt, and what each domain does to an answer's loss.",
        settings="mlxstacks.studies.route.settings:RouteExplainSettings",
        function="mlxstacks.studies.route.explain:run",
        prepare="mlxstacks.recipe.on_nano:route",
        arguments={"prompt": "PROMPT", "store_path": "STORE"},
        needs=("prompt",),
        nano={"store_path": "store_path"},
    ),
    "route gaps": Command(
        help="Group prompts that no domain fitted, and propose domains to train.",
        settings="mlxstacks.routing.settings:RouteGapsSettings",
        function="mlxstacks.studies.route.gaps:run",
        arguments={"log_path": "LOG"},
    ),
    "route evaluate": Command(
        help="Measure whether routing pays off: losses in every mode, router metrics, gaps.",
        settings="mlxstacks.studies.route.settings:RouteEvaluateSettings",
        function="mlxstacks.studies.route.evaluate:run",
        prepare="mlxstacks.recipe.on_nano:route",
        arguments={"store_path": "STORE"},
        nano={"store_path": "store_path"},
        report="result.json",
        nano_recipe="route-evaluate",
    ),
    "route check": Command(
        help="Check answers and routes of known prompts by rules, in every mode.",
        settings="mlxstacks.studies.route.settings:RouteCheckSettings",
        function="mlxstacks.studies.route.check:run",
        prepare="mlxstacks.recipe.on_nano:route",
        arguments={"store_path": "STORE"},
        nano={"store_path": "store_path"},
        report="result.json",
        nano_recipe="route-check",
    ),
    "chat": Command(
        help="Chat with a model; --routed loads only the stacks that a prompt needs.",
        settings="mlxstacks.routing.settings:ChatSettings",
        function="mlxstacks.cli.chat:run",
        arguments={"store_path": "STORE"},
        render="mlxstacks.cli.output:print_nothing",
        in_group=True,
    ),
    "generate": Command(
        help="Answer a prompt or every row of a JSONL file; --routed works as in chat.",
        settings="mlxstacks.routing.settings:GenerateSettings",
        function="mlxstacks.cli.generate:run",
        render="mlxstacks.cli.output:print_nothing",
        arguments={"prompt": "PROMPT", "store_path": "STORE"},
        in_group=True,
    ),
    "push": Command(
        help="Upload an adapter, a store or a model to the Hugging Face hub, with a model card.",
        settings="mlxstacks.share.settings:PushSettings",
        function="mlxstacks.share.push:push",
        arguments={"target": "TARGET", "repo_id": "REPO_ID"},
        dry_run="Write the files to upload and the card; upload nothing.",
        needs=("repo_id",),
        nano={"target": "store_path"},
    ),
    "pull": Command(
        help="Download an adapter, a store or a model from the Hugging Face hub, and check it.",
        settings="mlxstacks.share.settings:PullSettings",
        function="mlxstacks.share.pull:pull",
        arguments={"repo_id": "REPO_ID"},
        needs=("repo_id",),
    ),
    "serve": Command(
        help="Serve the model, adapters and stacks to OpenAI's and Anthropic's clients.",
        settings="mlxstacks.routing.settings:ServeSettings",
        function="mlxstacks.cli.serve:run",
        render="mlxstacks.cli.serve:render",
        arguments={"store_path": "STORE"},
    ),
    "profile": Command(
        help="Profile which experts groups of prompts use, compared with chance.",
        settings="mlxstacks.studies.profile.settings:ProfileSettings",
        function="mlxstacks.studies.profile.run:run",
        nano={"model": "model_path", "data": "domains_path"},
        report="result.json",
    ),
    "nano": Command(
        help="Show where the built-in model is and what it was measured to know.",
        settings="mlxstacks.nano.settings:ShowSettings",
        function="mlxstacks.nano.exports:show",
    ),
    "nano export": Command(
        help="Write the built-in model as a checkpoint that mlx-lm loads, or with all its samples.",
        settings="mlxstacks.nano.settings:ExportSettings",
        function="mlxstacks.nano.exports:export",
        arguments={"save_path": "DIR"},
    ),
    "doctor": Command(
        help="Show the device, its limits, versions, and what will be slow and why.",
        settings="mlxstacks.doctor:DoctorSettings",
        function="mlxstacks.doctor:doctor",
    ),
}

# A second name for a command.
ALIASES = {"zero": "adapter zero"}

# What the help says of a first word that stands before several commands.
GROUPS = {
    "stack": "Train frozen stacks, domain by domain, into a store that forgets none of them. "
    "`compare` runs the arms of an experiment over seeds. Nested settings: --set KEY.KEY=VALUE.",
    "stacks": "Manage a store: what it holds, whether it is intact, what is served.",
    "adapter": "Show, zero, merge or convert adapters.",
    "sweep": "Train at many ranks, seeds, layers, projections or bits, and compare losses, time, "
    "buffers and what a fuse keeps. Settings of every run: --set train.KEY=VALUE, with the keys of "
    "`mlxstacks train`.",
    "route": "Route prompts to stacks: discover which prompts each domain helps with, train, "
    "explain and evaluate the router, list what no domain fits.",
    "psn": "Test partitioned subspace networks: stacks on a base that knows nothing, and blocks "
    "beside a base. Nested settings: --set KEY.KEY=VALUE.",
    "nano": "Show or export the built-in model. Retraining it needs a clone: `python -m tools.nano "
    "rebuild DIR`.",
}


def load(dotted: str) -> Any:
    """The object behind `module:name`."""
    module, _, name = dotted.partition(":")
    return getattr(importlib.import_module(module), name)


def nearest(name: str, known: Iterable[str], outer: str = "") -> str:
    """`; did you mean 'x'?`: a known name that `name` begins with (`evaluate`: eval), else one that
    is close, else one of the same first four letters; or nothing. outer: shown before it.
    """
    names = sorted(known)
    close = [other for other in names if len(other) > 3 and name.startswith(other)][-1:]
    close = close or difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    if not close and len(name) > 3 and name[:4].isalpha():
        close = [other for other in names if other[:4] == name[:4]]
    return f"; did you mean {outer + close[0]!r}?" if close else ""


def command_named(name: str) -> Command:
    """The row of a command or of an alias. Raises InputError naming the nearest one."""
    name = ALIASES.get(name, name)
    if name not in COMMANDS:
        raise InputError(
            f"no command {name!r}{nearest(name, COMMANDS)} (known: {', '.join(COMMANDS)})"
        )
    return COMMANDS[name]
