"""Tests that `pytest` leaves out and `pytest -m slow` runs: repetitions of what the others prove.

Each promise is proven once without them: the output distribution for every rule, greedy equality
for every method, one family of each kind, resumption, sharding, several processes. A pattern is a
regular expression for the whole of `file::test[case]`, without the folder and `.py`.
"""

import re

PATTERNS = (
    r"test_bench::test_a_cache_and_an_output_that_refuse_lose_nothing\[(head -1|/dev/full)\]",
    r"test_bench::test_a_cache_that_refuses_is_a_line",
    r"test_bench::test_a_run_that_is_ended_leaves_its_rows",
    r"test_bench::test_candidates_that_no_process_can_hold_run_in_groups",
    r"test_bench_serve::test_a_server_of_its_own_is_measured",
    r"test_best_first::test_the_tree_is_that_of_a_plain_search\[(one level|a chain)\]",
    r"test_best_first::test_tokens_are_those_of_plain_decoding.*",
    r"test_bench::test_phases_of_a_step_are_positive_and_leave_the_request_whole",
    r"test_bundled::test_(tokens_are_those_of_plain_decoding|the_second_stage_drafts).*",
    r"test_certificate::test_a_biased_accept_probability_fails_the_distribution.*",
    r"test_certificate::test_noise_shared_by_rows_fails_the_distribution.*",
    r"test_certificate::test_another_token_fails_the_naive_part",
    r"test_decode::test_chosen_trees_give_the_tokens_of_plain_decoding\[text\]",
    r"test_decode::test_greedy_rows_equal_plain_decoding\[(unequal|stacked|random)\]",
    r"test_decode::test_naive_equals_plain_sampling_token_for_token\[(random|chain)\]",
    r"test_decode::test_stacked_and_unrolled_pools_draw_the_same",
    r"test_decode::test_greedy_rule_equals_multi_step_at_temperature_0",
    r"test_decode::test_rows_of_a_mixed_batch_equal_their_solo_runs\[pool-auto\]",
    r"test_decode::test_the_target_as_its_own_drafter_is_accepted_whole\[widths2\]",
    r"test_distributed::test_bench_measures_on_a_mesh_and_auto_tells_it_from_one_device",
    r"test_distributed::test_two_processes_with_rows_of_their_own_give_the_tokens_of_one",
    r"test_distributed::test_two_processes_write_a_model_by_shards",
    r"test_distributed::test_a_process_that_waits_times_out.*",
    r"test_engine::test_every_method_gives_the_texts_of_plain_decoding.*",
    r"test_engine_distribution::.*",
    r"test_engine::test_rows_may_be_copied_out_.*",
    r"test_engine::test_a_drafter_that_gives_no_numbers_.*",
    r"test_fuzz::.*",
    r"test_page::test_a_real_server_is_shown_as_it_works",
    r"test_generation::test_programs_are_as_many_as_buckets",
    r"test_generation::test_a_row_draws_alone_what_it_draws_beside_one_that_ended"
    r"\[(unsafe_rbg-.*|.*-(chain|plain))\]",
    r"test_generation::test_trees_of_any_topology_are_one_program\[(staged|hybrid)\]",
    r"test_growth::test_a_child_scores_below_its_parent_however_low_both_are\[[23]\]",
    r"test_hybrid::test_nothing_moves_at_the_end_of_the_cache",
    r"test_info::test_a_draft_with_rows_for_some_tokens_only_changes_no_.*\[shape[01].*",
    r"test_growth::test_a_child_scores_below_its_parent_however_low_both_are\[[23]\]",
    r"test_info::test_a_draft_with_rows_for_some_tokens_only_changes_no_text.*",
    r"test_info::test_padded_tables_draft_as_well_as_others\[same\]",
    r"test_kernel_bench::test_a_run_goes_on_where_it_stopped",
    r"test_loading::test_no_more_than_the_largest_tensor_is_held_beside_the_model.*",
    r"test_lowering::test_every_named_shape_is_lowered\[((llama-3.2-1b|bundled)-.*|.*-hopper)\]",
    r"test_memory::test_a_plan_is_what_the_program_takes_or_a_quarter_more"
    r""
    r"\[(pool|tree|chain|specexec|long texts|small vocabulary|tree, one row|chain, naive"
    r"|prefill of .*)\]",
    r"test_memory::test_a_prefills_program_and_memory_grow_no_faster_than_its_prompt",
    r"test_parity::test_decoding_and_trees_have_the_logits_of_transformers"
    r"\[(?!(gemma3|phi3_long|qwen3|gpt2|neox|plain)\]).*",
    r"test_parity::test_greedy_texts_are_those_of_transformers"
    r"\[(?!(gemma3|mistral)-).*",
    r"test_parity::test_trees_at_the_end_of_a_context_are_cut_off_there\[(neox|opt)\]",
    r"test_parity::test_a_draft_with_a_window_drafts_within_it",
    r"test_penalties::test_(the_distribution_under|nodes_that_forget|greedy_texts)_.*",
    r"test_prompt_lookup::test_trees_are_those_of_a_plain_search_before_and_after_steps"
    r"\[(least 2|at the table's mercy|no trust to spare)\]",
    r"test_profile::test_a_step_is_held_against_its_passes_alone\[.*",
    r"test_profile::test_bench_tells_the_parts_of_a_traced_step",
    r"test_readme::test_python_blocks_run\[(extending|generate|models|serving)-.*",
    r"test_readme::test_the_first_command_needs_no_extra",
    r"test_records::test_processes_that_remember_at_once_lose_nothing",
    r"test_roofline::test_a_pass_is_held_against_weights_and_cache_read_once",
    r"test_roofline::test_the_peer_says_what_we_say",
    r"test_roofline::test_the_command_measures_shapes_and_the_grown_pair",
    r"test_sampled_distribution::test_sampled_distribution_is_that_of_plain_decoding"
    r"\[(?!a block\]).*",
    r"test_sampled_distribution::test_sampled_distribution_.*_whatever_the_keys.*",
    r"test_sampled_distribution::test_trees_cut_off_by_the_context_.*\[(tree|from .*|a block)\]",
    r"test_sampled_distribution::test_a_wrong_step_is_caught.*",
    r"test_serve::test_(a_|what_is_refused).*",
    r"test_self_drafts::test_texts_are_the_targets_and_most_drafts_are_accepted\[specexec\]",
    r"test_self_drafts::test_families_draft_for_themselves\[(?!(gpt2|phi3_short)\]).*",
    r"test_self_drafts::test_the_command_line_takes_it",
    r"test_sharding::test_tokens_on_other_meshes_are_those_of_one_device.*",
    r"test_sharding::test_an_engine_on_a_mesh_.*",
    r"test_sharding::test_every_family_splits_over_two_devices",
    r"test_sharding::test_a_model_is_restored_onto_another_mesh",
    r"test_staged::test_stages_do_not_change_the_tree"
    r"\[(deep-both|small-(best first|both|hybrid|expansion|table|itself|text))\]",
    r"test_staged::test_guesses_of_the_whole_.*",
    r"test_staged::test_stages_do_not_change_the_tree\[one level-expansion\]",
    r"test_staged::test_few_beams_.*",
    r"test_staged::test_guesses_that_are_right_save_passes_of_a_chain",
    r"test_staged::test_a_second_stage_reads_what_the_draft_reads",
    r"test_streaming::test_texts_are_those_of_the_model_in_memory\[(pool|none|specexec-(2|1))-.*",
    r"test_streaming::test_families_stream\[(?!(gemma3|neox)\]).*",
    r"test_switching::test_chunks_are_measured_at_every_start_.*",
    r"test_switching::test_a_draft_of_no_numbers_changes_no_text",
    r"test_static::test_a_node_may_have_children_of_its_own_number\[.*",
    r"test_static::test_distinct_children_are_drawn_without_replacement.*",
    r"test_static::test_every_draft_may_have_a_tree_of_its_own\[.*",
    r"test_static::test_top_k_trees_take_the_most_likely_children_of_sampled_rows_too",
    r"test_static::test_stacked_drafts_may_have_a_tree_whose_nodes_differ",
    r"test_static::test_every_trial_is_what_a_plain_pass_of_its_draft_says\[.*",
    r"test_train::test_a_run_killed_in_every_stage_ends_with_the_same_bits",
    r"test_train::test_an_export_of_the_same_results_stays_and_of_others_goes",
    r"test_train::test_what_is_not_an_export_is_never_replaced",
    r"test_train::test_devices_share_the_rows_of_a_batch",
    r"test_train::test_exported_pool_is_lossless_for_the_exported_target",
    r"test_train::test_the_exported_pair_generates_from_the_command_line",
    r"test_train_evaluate::test_tables_are_kept_however_the_pair_is_spelled",
    r"test_train_evaluate::test_the_command_writes_all_tables_and_a_picture",
    r"test_train_from_checkpoint::test_the_pool_is_lossless_for_the_given_target",
    r"test_train_from_checkpoint::test_prompts_are_the_users_and_tokens_the_targets",
    r"test_train_from_checkpoint::test_the_pool_can_be_evaluated_beside_its_target",
    r"test_tree_attention::test_equals_the_definition\[.*bfloat16.*",
    r"test_tree_attention::test_plain_sequence_is_lower_triangular\[.*bfloat16.*",
    r"test_tree_attention::test_a_cache_of_8_bits\[.*bfloat16.*",
    r"test_tree_attention::test_long_sequences_are_a_loop_over_chunks\[.*-(900|1024)\]",
    r"test_tree_attention::test_long_sequences_are_a_loop_over_chunks\[(1|37|700)-1300\]",
    r"test_train_loop::test_the_last_finite_checkpoint_stays.*",
    r"test_train_losses::test_(distillation_loss|a_position_of_weight_zero).*\[(?!forward_kl).*",
    r"test_train_evaluate::test_figures_are_those_of_plain_generations",
    r"test_train_evaluate::test_every_pool_is_given_its_best_shape_within_a_budget",
    r"test_tune::test_positional_acceptance_is_that_of_plain_passes.*",
    r"test_tune::test_a_run_that_is_ended_leaves_what_it_found_beside_the_old_file",
    r"test_tune::test_what_tune_writes_is_what_the_other_verbs_take",
)
_WHOLE = re.compile("|".join(f"(?:{pattern})" for pattern in PATTERNS))


def is_slow(node: str) -> bool:
    """Whether a test, named `tests/file.py::test[case]`, is one of them."""
    return _WHOLE.fullmatch(node.removeprefix("tests/").replace(".py::", "::")) is not None
