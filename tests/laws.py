"""What mlxstacks promises, and the tests that hold each promise: the documentation's page Laws.

A test is `file::name` below tests/. `laws_page` fails where one is gone, so a promise cannot
outlive what holds it.
"""

import ast
from functools import cache
from pathlib import Path

TESTS = Path(__file__).parent

LAWS: dict[str, dict[str, tuple[str, ...]]] = {
    "A fuse": {
        "A fuse of a zero delta by `keep`, `nearest`, `stochastic` or `auto` keeps every byte.": (
            "fuse/test_fuse_run.py::test_zero_delta_keeps_every_byte",
        ),
        "The control takes the decisions that the trained adapter led to.": (
            "fuse/test_fuse_run.py::test_zero_delta_takes_the_trained_decisions",
        ),
        "A fuse by `gptq` rounds as the formula does; a zero delta keeps every byte.": (
            "ops/test_gptq.py::test_codes_are_those_of_the_formula",
            "ops/test_gptq.py::test_what_is_on_the_grid_stays",
            "fuse/test_gptq_fuse.py::test_zeros_change_nothing",
        ),
        "A fuse in memory has the bytes of a fuse to disk.": (
            "fuse/test_in_memory.py::test_bytes_are_those_of_a_fuse_to_disk",
        ),
        "Only the first fuse of an adapter asks it unfused; damaged answers of it are made anew.": (
            "studies/agreement/test_judge.py::test_a_second_fuse_asks_no_reference_and_says_the_same",
            "studies/agreement/test_judge.py::test_a_damaged_reference_is_made_anew",
        ),
        "A patched clone of a shard has the bytes of a shard that is written anew.": (
            "fuse/test_in_place.py::test_a_patched_shard_has_the_bytes_of_a_rewritten_one",
        ),
        "`refit` has the bytes of `mlx_lm.fuse` on the CPU device, in every quantization mode.": (
            "fuse/test_fuse_parity.py::test_refit_is_mlx_lm_fuse_to_the_bit",
            "fuse/test_float_modes.py::test_refit_is_mlx_lm_fuse_to_the_bit",
        ),
        "A streamed adapter is the one in memory, and holds one module at a time.": (
            "files/test_adapters.py::test_a_streamed_adapter_is_the_one_in_memory",
            "files/test_adapters.py::test_a_streamed_adapter_holds_one_module_at_a_time",
            "files/test_peft_adapters.py::test_a_streamed_adapter_holds_one_module_at_a_time",
            "files/test_gguf_adapters.py::test_a_streamed_adapter_holds_one_module_at_a_time",
        ),
        "An adapter of `--merge-ready grid` evaluates in training as its fuse does, to the bit.": (
            "layers/test_merge_ready.py::test_grid_fuses_to_the_bit",
        ),
        "A fuse of one of `--merge-ready pooled` changes biases only, by what they round to.": (
            "layers/test_merge_ready.py::test_pooled_is_what_mlx_lm_loads_and_fuses_by_biases",
            "ops/test_policies.py::test_shift_is_off_by_the_rounding_of_a_bias_at_most",
            "layers/test_merge_ready.py::test_pooled_models_compute_the_same_fused_and_unfused",
        ),
        "A kernel and NumPy give the same bytes.": (
            "fuse/test_fuse_kernels.py::test_zero_delta_is_that_of_numpy",
            "fuse/test_fuse_kernels.py::test_files_and_figures_are_those_of_numpy",
            "fuse/test_fuse_kernels.py::test_dequantize_by_its_kernel_is_that_of_numpy",
        ),
        "A model that changes during a fuse is refused.": (
            "files/test_swapped_model.py::test_a_model_that_changes_during_a_fuse_is_refused",
        ),
    },
    "From scratch": {
        "A pretraining that was killed resumes, and ends with the bytes of one that was not.": (
            "studies/train/test_pretrain.py::test_a_killed_run_ends_with_the_same_bytes",
        ),
        "Blocks at weight 0 leave the base's output as it is, bit for bit, row by row.": (
            "layers/test_blocks.py::test_at_weight_0_the_model_is_the_base_bit_for_bit",
        ),
        "Protected directions folded into a block keep its output, which stays out of them.": (
            "layers/test_blocks.py::test_folding_keeps_the_output_and_its_orthogonality",
        ),
        "A study of blocks that was stopped ends with the same blocks, to the byte.": (
            "studies/psn/test_psn.py::test_blocks_end_with_the_same_bytes_when_stopped",
        ),
    },
    "Sharing": {
        "What is pushed comes back to the byte, and nothing that lay next to it is uploaded.": (
            "share/test_share.py::test_what_is_pushed_comes_back_without_what_lay_next_to_it",
        ),
        "No absolute path of the machine is uploaded.": (
            "share/test_share.py::test_no_path_of_this_machine_is_uploaded",
            "share/test_share.py::test_json_without_paths",
        ),
        "Nothing of a hostile repository appears.": (
            "share/test_share.py::test_a_hostile_adapter_does_not_appear",
            "share/test_share.py::test_a_damaged_store_does_not_appear",
        ),
        "A logger that fails stops no training and changes no weight.": (
            "studies/train/test_metrics.py::test_a_logger_that_fails_stops_nothing",
        ),
    },
    "Files": {
        "A target appears whole or not at all, at whatever moment the process is killed.": (
            "files/test_outputs.py::test_killed_at_any_moment_the_target_is_whole",
            "files/test_store_processes.py::test_killed_at_any_moment_the_store_is_a_whole_one",
        ),
        "An existing target needs `--force`, which spares what mlxstacks did not write.": (
            "files/test_outputs.py::test_existing_target_needs_force",
            "files/test_outputs.py::test_force_spares_what_carries_no_mark",
        ),
        "A disk that is too small is refused before anything is written.": (
            "files/test_outputs.py::test_too_small_a_disk_is_refused_before_anything",
        ),
        "Damaged or forged headers are refused, or read as the safetensors library reads them.": (
            "files/test_fuzz_headers.py::test_mutated_headers_are_refused_or_read_as_the_library_does",
        ),
        "Code and pickles among a model's files stay behind.": (
            "files/test_outputs.py::test_everything_beside_the_shards_is_carried_but_code_and_pickles",
        ),
        "An adapter written for PEFT has the bytes that PEFT was shown to load.": (
            "files/test_peft_adapters.py::test_export_is_byte_for_byte_what_peft_verified",
        ),
    },
    "Training": {
        "A killed run, started again, ends with the bytes of one that was not killed.": (
            "studies/train/test_kill.py::test_a_killed_run_ends_with_the_bytes_of_one_that_was_not",
            "studies/stack/test_faults.py::test_killed_at_random_moments_it_ends_with_the_same_bytes",
        ),
        "A student that damages a domain is not written.": (
            "studies/route/test_distill.py::test_weights_that_damage_a_domain_are_not_written",
        ),
        "A stopped run of `distill` ends with the same bytes, and asks its teacher once.": (
            "studies/route/test_distill.py::test_a_run_that_was_stopped_ends_with_the_same_bytes",
        ),
        "Checkpointed layers train to the same bytes.": (
            "studies/train/test_run.py::test_checkpointed_layers_train_to_the_same_bytes",
        ),
        "Processes that share whole batches train to the bytes of one process.": (
            "training/test_group.py::test_whole_batches_give_the_bytes_of_one_process",
            "studies/train/test_pretrain.py::test_two_processes_train_like_one",
            "studies/stack/test_forms.py::test_two_processes_that_share_whole_batches_train_the_bytes_of_one",
            "studies/stack/test_align.py::test_two_processes_replace_it_by_what_one_does",
        ),
        "A run that does not fit is refused before anything is written.": (
            "studies/train/test_guard.py::test_a_run_that_does_not_fit_is_refused_before_anything_is_written",
        ),
    },
    "Stacks": {
        "A shared-outer adapter imported into a store computes what it does unfused, to the bit.": (
            "serve/test_engine.py::test_a_shared_outer_adapter_is_the_same_imported_and_fused",
        ),
        "Training a new stack keeps every byte of the base and of earlier stacks.": (
            "studies/stack/test_run.py::test_base_and_earlier_stacks_keep_every_byte",
        ),
        "A new stack keeps out of the protected directions.": (
            "studies/stack/test_run.py::test_a_frozen_stack_keeps_out_of_the_protected_directions",
        ),
        "A model on two processes answers as on one, with its adapters and stacks.": (
            "cli/test_group.py::test_two_processes_answer_as_one",
            "layers/test_sharded.py::test_logits_are_those_of_one_process",
        ),
        "Equal runs write equal stores.": (
            "files/test_store.py::test_equal_runs_write_equal_stores",
        ),
        "No damage to a stack passes its hash.": (
            "files/test_stack_file.py::test_no_damage_passes_the_hash",
        ),
        "A store takes a grown domain whole or not at all, and undo puts every byte back.": (
            "grow/test_grow.py::test_stage_by_stage_ends_as_all_at_once",
            "grow/test_grow.py::test_undo_puts_every_byte_back",
        ),
        "Answers that do not belong to their prompts make no domain.": (
            "grow/test_grow.py::test_answers_that_do_not_belong_to_their_prompts_are_refused",
        ),
        "A stack of another base is refused.": (
            "files/test_store.py::test_a_stack_of_another_base_is_refused",
        ),
    },
    "Studies": {
        "A plan is written before the first answer; results older than it are refused.": (
            "study/test_plan.py::test_results_that_are_older_than_the_plan_are_refused",
            "studies/profile/test_run.py::test_the_plan_is_written_first_and_the_result_refers_to_it",
        ),
        "Another plan in the same directory is refused.": (
            "study/test_engine.py::test_another_plan_is_refused_and_may_begin_again",
        ),
        "A stopped run ends with the bytes of one that was not stopped.": (
            "study/test_engine.py::test_a_stopped_run_ends_with_the_bytes_of_one_that_was_not",
        ),
        "Processes that share a study come to the end of one, and keep their work if one dies.": (
            "studies/test_group.py::test_two_processes_come_to_what_one_comes_to",
            "studies/test_group.py::test_where_one_dies_the_work_of_the_other_stays",
        ),
        "No byte of the answers can be changed without being noticed.": (
            "study/test_answer_log.py::test_no_byte_can_be_changed_unseen",
        ),
        "What is not as planned is EXPLORATORY, and says so in every title.": (
            "study/test_plan.py::test_what_is_not_as_planned_is_exploratory",
            "study/test_result.py::test_what_is_exploratory_says_so_in_every_title",
        ),
        "Planted effects are found, and shuffled labels are not.": (
            "studies/profile/test_measures.py::test_planted_layers_are_found_and_shuffled_labels_are_not",
        ),
    },
    "The code": {
        "Imports point downward, and only one file imports mlx_lm.": (
            "test_levels.py::test_imports_point_downward",
        ),
        "Every command in this documentation can be typed, and those without a mark are run.": (
            "test_readme.py::test_command_lines_can_be_typed",
            "test_docs.py::test_blocks_run",
        ),
    },
    "A server": {
        "A row of a batch of mixed routes is answered as alone; one without a route raises.": (
            "serve/test_rows.py::test_row_of_a_mixed_batch_is_answered_as_alone",
            "serve/test_rows.py::test_row_without_a_route_raises",
        ),
        "No buffer stays behind a token or a request.": (
            "serve/test_live_buffers.py::test_no_buffer_stays_behind_a_token_or_a_request",
        ),
        "Caches take no more than was predicted, stacks no more than the budget.": (
            "serve/test_engine.py::test_predicted_cache_bytes_are_enough",
            "serve/test_engine.py::test_memory_stays_within_the_budget",
        ),
        "An answer ends on the version of a stack that it began with.": (
            "serve/test_engine.py::test_row_under_way_keeps_the_version_that_it_began_with",
            "serve/test_engine.py::test_answer_under_way_ends_as_it_began",
        ),
        "Other machines need a key; half-open, endless and forged requests reach no model.": (
            "serve/test_app.py::test_key_is_asked_for_everywhere_but_at_health",
            "serve/test_app.py::test_slow_clients_are_let_go",
            "serve/test_app.py::test_hostile_body_is_refused",
        ),
    },
}  # fmt: skip


def laws_page() -> str:
    """The page in Markdown. Raises: LookupError naming the tests that are gone."""
    gone = [test for law in LAWS.values() for tests in law.values() for test in missing(tests)]
    if gone:
        raise LookupError(f"promises without their test; see tests/laws.py: {', '.join(gone)}")
    lines = [
        "# Laws", "",
        "What can be relied on, each with the test that holds it. `make test` runs them all, and",
        "this page cannot be built while one is missing.", "",
    ]  # fmt: skip
    for group, laws in LAWS.items():
        lines += [f"## {group}", "", "| promise | held by |", "|---|---|"]
        lines += [f"| {law} | {'<br>'.join(map(_shown, tests))} |" for law, tests in laws.items()]
        lines.append("")
    return "\n".join(lines)


def missing(tests: tuple[str, ...]) -> list[str]:
    """Those that are not there."""
    return [test for test in tests if test.partition("::")[2] not in names_in(test.split("::")[0])]


@cache
def names_in(file: str) -> frozenset[str]:
    """Functions that a file of tests defines."""
    path = TESTS / file
    if not path.is_file():
        return frozenset()
    nodes = ast.walk(ast.parse(path.read_text()))
    return frozenset(node.name for node in nodes if isinstance(node, ast.FunctionDef))


def _shown(test: str) -> str:
    file, _, name = test.partition("::")
    return f"`{name}` in `tests/{file}`"
