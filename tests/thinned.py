"""Sweeps over many cases: some of them in the quick suite, all of them by `make test-all`."""

import os

ALL = bool(os.environ.get("BRAINTRACE_ALL"))


def some(cases, every: int) -> list:
    """One in so many of them, or all."""
    return list(cases)[:: 1 if ALL else every]


def examples(count: int) -> int:
    """How many random cases to draw: a quarter, or all."""
    return count if ALL else -(-count // 4)


# Tests that repeat one claim over many models or rules, and how many of their cases the quick suite
# runs, evenly spread; chosen by `pytest --durations`. `make test-all` runs all of them.
FEW = {
    "checkpoint/test_checkpoint.py": {
        "test_resumed_training_is_bit_for_bit": 1,
    },
    "cli/test_compare.py": {
        "test_cells_advance_and_reset": 3,
        "test_element_wise_cells_are_exact": 1,
    },
    "engine/test_run_block.py": {
        "test_blocks_of_any_size_have_the_same_gradient": 2,
        "test_traces_are_named_and_reset_by_their_rule": 3,
        "test_windows_of_one_block_are_windows_of_several": 2,
    },
    "export/test_c.py": {
        "test_200_updates_in_double_are_those_of_train": 4,
        "test_each_step_in_float_is_that_of_jax": 2,
    },
    "export/test_cells.py": {
        "test_200_updates_of_a_cell_in_c_are_those_in_jax": 3,
        "test_each_step_of_a_cell_in_float_is_that_of_jax": 2,
    },
    "fuzz/test_chains.py": {
        "test_rules_are_their_definitions": 1,
    },
    "graph/test_fold.py": {
        "test_chained_features_are_the_derived_ones": 2,
        "test_factor_that_no_state_enters_is_exact": 2,
        "test_recurrent_weight_with_a_factor_is_the_rule": 2,
    },
    "graph/test_influence.py": {
        "test_influence_of_a_choice_misses_nothing": 6,
        "test_influence_of_a_state_is_the_pattern_of_its_transition": 2,
        "test_influence_of_an_operator_is_the_pattern_of_its_tail": 2,
    },
    "graph/test_policy.py": {
        "test_rule_takes_a_policy": 4,
    },
    "graph/test_samples.py": {
        "test_few_samples_give_the_graph_of_all": 9,
    },
    "graph/test_slots.py": {
        "test_slots_of_several_destinations_give_the_exact_gradient": 1,
    },
    "learner/test_batching.py": {
        "test_batching_modes_agree_on_states_and_gradients": 2,
        "test_batching_modes_drive_sequences": 1,
    },
    "learner/test_blocks.py": {
        "test_blocks_equal_steps_for_every_model": 1,
        "test_blocks_equal_steps_for_every_rule": 2,
        "test_masks_in_blocks": 2,
        "test_nan_of_uncounted_steps_reaches_no_gradient": 2,
        "test_sequence_shorter_than_a_block": 2,
        "test_sequences_of_another_length_with_the_same_learner": 1,
        "test_side_effects_happen_once_per_step_and_in_order": 1,
        "test_traces_that_are_not_kept_are_zero": 2,
        "test_loops_through_the_step_function_run_in_blocks": 4,
        "test_what_is_around_the_learner_runs_in_blocks": 4,
    },
    "learner/test_blocks_cost.py": {
        "test_blocks_under_transformations": 2,
        "test_progress_bar_reaches_its_end": 2,
        "test_small_traces_are_closer_in_larger_blocks": 1,
    },
    "learner/test_callbacks.py": {
        "test_callback_in_the_step_that_cannot_be_mapped": 2,
    },
    "learner/test_config.py": {
        "test_a_modulator_for_samples_units_or_both": 2,
        "test_a_preset_is_made_again_from_its_coordinates": 1,
        "test_a_signal_of_its_own_also_trains": 1,
    },
    "learner/test_errors.py": {
        "test_inputs_of_another_real_type_are_promoted": 1,
    },
    "learner/test_errors_transforms.py": {
        "test_learner_inside_of_a_transformation_of_jax_is_refused": 1,
        "test_second_derivative_through_a_learner_is_refused": 1,
    },
    "learner/test_gradients.py": {
        "test_gradient_over_many_calls_is_the_sum_of_online_gradients": 1,
    },
    "learner/test_mapped_blocks.py": {
        "test_gradients_of_blocks_are_those_of_single_calls": 1,
        "test_weights_learn_while_the_sequence_runs": 1,
    },
    "learner/test_outside.py": {
        "test_a_jitted_call_works_in_a_driver_and_outside": 1,
        "test_whatever_is_called_exact_is_exact": 5,
    },
    "learner/test_programs.py": {
        "test_choice_gradient_is_bptt_with_the_recurrent_entry_cut": 1,
        "test_lif_with_units_and_surrogate_spike_equals_bptt": 2,
        "test_sliced_product_is_connected_and_equals_bptt": 1,
    },
    "learner/test_reset.py": {
        "test_reset_of_a_batch_with_an_elementwise_parameter": 2,
        "test_reset_of_a_module_with_init_state_only_keeps_its_state": 2,
        "test_reset_starts_the_sequence_anew": 2,
    },
    "learner/test_sequences.py": {
        "test_etrace_evolve_in_windows_equals_steps": 1,
        "test_windows_of_any_size_cover_a_sequence_of_any_length": 1,
        "test_windows_stack_auxiliary_values_per_step_and_per_window": 1,
        "test_windows_stack_summaries_of_windows": 2,
    },
    "learner/test_states.py": {
        "test_shape_as_an_example_with_a_batch": 2,
        "test_state_of_a_float_and_an_integer_leaf_is_exact": 2,
        "test_state_of_a_float_and_an_integer_leaf_with_a_batch": 1,
    },
    "learner/test_steps.py": {
        "test_an_operator_registered_again_is_the_one_a_learner_uses": 1,
        "test_small_types_are_kept": 1,
        "test_unusual_steps_equal_bptt": 3,
    },
    "learner/test_surroundings.py": {
        "test_environment_values_are_those_of_an_eager_call": 2,
        "test_failed_call_leaves_the_learner_usable": 3,
    },
    "learner/test_train.py": {
        "test_masks_while_training": 1,
        "test_optax_transformations": 1,
        "test_optimizers_of_braintools": 1,
        "test_sequences_of_another_length_with_the_same_learner": 1,
        "test_training_by_every_rule": 1,
        "test_training_equals_gradients_and_updates_in_turn": 1,
        "test_training_in_windows": 1,
        "test_training_of_an_operator_that_is_not_linear_in_its_weight": 1,
        "test_training_of_chosen_weights": 1,
        "test_training_of_every_kind_of_model": 1,
        "test_loops_through_the_step_function_are_trained": 1,
        "test_what_is_around_the_learner_is_trained": 1,
    },
    "limits/test_limits.py": {
        "test_what_to_do_instead_is_exact": 2,
    },
    "nn/test_cells.py": {
        "test_cell_keeps_the_precision_of_the_environment": 1,
        "test_gradients_are_finite_at_the_edges_in_float32": 1,
    },
    "nn/test_conv.py": {
        "test_window_is_that_of_lax": 4,
    },
    "nn/test_online.py": {
        "test_layer_follows_its_formula_with_any_leading_axes": 5,
        "test_layer_is_learned_exactly_before_a_state_and_after_it": 2,
    },
    "nn/test_samples.py": {
        "test_few_samples_give_the_graph_of_all": 8,
    },
    "nn/test_sparse.py": {
        "test_every_format_starts_with_its_own_numbers": 5,
    },
    "nn/test_spiking.py": {
        "test_both_weights_of_a_recurrent_cell_are_traced": 2,
        "test_physical_units_change_nothing_but_the_unit": 1,
        "test_rtrl_is_bptt_and_d_rtrl_without_recurrence": 1,
    },
    "nn/test_table.py": {
        "test_element_wise_cells_are_exact": 2,
        "test_row_is_what_is_measured": 2,
    },
    "online/test_hard_cells.py": {
        "test_blocks_are_steps_are_the_gradient_of_a_scan": 1,
        "test_d_rtrl_is_its_definition": 1,
        "test_mapped_over_samples_is_a_batch": 1,
        "test_rtrl_is_bptt": 1,
        "test_what_is_called_exact_is_exact_and_nothing_else": 2,
    },
    "online/test_libraries.py": {
        "test_blocks_are_steps_are_the_gradient_of_a_scan": 1,
        "test_d_rtrl_is_exact_where_it_says_so_and_nowhere_else": 2,
        "test_d_rtrl_is_its_definition": 1,
        "test_rtrl_is_bptt": 1,
    },
    "online/test_packed.py": {
        "test_every_rule_follows_them": 1,
        "test_states_in_one_array_are_followed_like_separate_ones": 1,
    },
    "online/test_sparse.py": {
        "test_the_entries_of_a_sparse_matrix_are_traced": 1,
        "test_the_matrices_of_a_ragged_product_are_traced": 1,
    },
    "online/test_online.py": {
        "test_blocks_are_steps": 2,
        "test_training_is_gradients_and_updates": 1,
        "test_updates_have_gradients_in_blocks": 1,
        "test_windows_end_where_the_sequence_ends": 2,
    },
    "online/test_unmarked.py": {
        "test_a_layer_without_recurrent_weights_is_exact": 4,
        "test_a_plain_model_learns_like_its_marked_twin": 1,
        "test_what_stays_plain_keeps_its_gradient_within_the_step_and_has_a_line": 2,
    },
    "ops/test_operator.py": {
        "test_operator_features_equal_the_derived_ones": 14,
        "test_operator_gives_the_jacobian": 14,
        "test_operator_keeps_its_dtype": 9,
        "test_operator_record_holds": 16,
        "test_operator_record_holds_for_mixed_complex": 9,
        "test_operator_record_holds_under_vmap": 5,
        "test_operator_survives_vmap": 14,
        "test_operator_takes_numpy": 5,
        "test_operator_takes_spikes_as_integers": 9,
        "test_operator_value_and_derivatives_are_those_of_the_formula": 16,
        "test_vmap_over_the_input_keeps_one_shared_weight": 10,
        "test_vmap_over_the_last_axis_equals_moving_it_first": 5,
    },
    "rules/test_table.py": {
        "test_compile_takes_a_rule_that_is_a_value": 4,
    },
    "tasks/test_tasks.py": {
        "test_task_batches_differ_by_key_and_tests_do_not": 5,
        "test_task_chance_is_that_of_the_best_constant_answer": 3,
        "test_task_has_the_shapes_it_says": 5,
    },
    "tests/test_examples.py": {
        "test_example_runs": 2,
    },
    "tests/test_public.py": {
        "test_public_names_come_with_their_first_use": 4,
    },
    "truth/test_arrival.py": {
        "test_d_rtrl_says_which_parameters_never_learn": 3,
        "test_other_rules_say_which_parameters_never_learn": 2,
    },
    "truth/test_brainpy.py": {
        "test_compile_and_reset_bring_a_network_to_its_start": 2,
        "test_d_rtrl_of_a_driven_neuron_is_bptt": 2,
        "test_d_rtrl_of_a_feedforward_synapse_is_bptt": 2,
        "test_d_rtrl_of_a_network_is_its_definition": 1,
        "test_networks_spike_and_rest": 4,
        "test_one_window_over_a_network_is_bptt": 2,
        "test_pp_prop_of_a_network_is_its_definition": 2,
    },
    "truth/test_certificate.py": {
        "test_claim_is_the_truth": 2,
        "test_exact_in_spite_of_appearances": 4,
    },
    "truth/test_crossing.py": {
        "test_batch_is_the_sum_of_its_samples_however_it_is_made": 1,
        "test_d_rtrl_is_called_exact_where_it_is": 2,
        "test_d_rtrl_is_called_exact_where_nothing_is_dropped": 6,
        "test_delays": 1,
        "test_everything_is_exact_under_rtrl": 2,
        "test_jit_and_scan_over_steps": 1,
        "test_low_precision_traces_of_snap": 1,
        "test_pp_prop_is_never_called_exact_for_a_traced_weight": 2,
        "test_reset_starts_again": 1,
        "test_rtrl_in_windows_is_bptt": 2,
        "test_rtrl_is_bptt": 6,
        "test_snap_1_is_d_rtrl_where_nothing_is_dropped": 2,
        "test_snap_in_windows_is_its_definition": 1,
        "test_snap_is_called_exact_where_it_is": 2,
        "test_snap_is_its_definition": 2,
        "test_snap_of_high_order_is_bptt": 3,
        "test_snap_of_high_order_is_not_bptt_where_a_weight_has_no_trace": 1,
    },
    "truth/test_exact.py": {
        "test_d_rtrl_is_its_definition": 3,
        "test_definition_is_bptt_where_everything_is_kept": 6,
        "test_definition_is_not_bptt_where_something_is_dropped": 3,
        "test_dense_window_of_all_steps_is_bptt": 3,
        "test_pp_prop_depends_on_its_decays": 1,
        "test_pp_prop_is_its_definition": 3,
        "test_pp_prop_windows_are_their_definition": 1,
        "test_windows_are_their_definition": 2,
        "test_windows_of_any_length_are_their_definition": 2,
    },
    "truth/test_penalties.py": {
        "test_a_penalty_of_a_state_that_only_the_loss_reads_counts_once_under_a_mask": 1,
        "test_a_penalty_that_counts_beside_one_that_no_loss_depends_on": 2,
        "test_around_the_learner": 1,
        "test_rules_are_their_definition": 2,
        "test_what_is_called_exact_is_bptt": 2,
        "test_which_rules_add_something": 3,
    },
    "truth/test_random_rules.py": {
        "test_kf_rtrl_is_its_definition_for_some_signs": 1,
        "test_random_operands_on_the_way_back": 2,
        "test_signs_belong_to_the_key": 1,
        "test_square_feedback_without_a_readout": 2,
        "test_the_mean_is_that_of_the_reference": 1,
    },
    "truth/test_records.py": {
        "test_transition_and_tails_compute_the_step_and_its_kept_jacobian": 1,
    },
    "truth/test_rule_definitions.py": {
        "test_equal_rules": 1,
        "test_random_operand_of_a_readout_by_hand": 1,
        "test_synthetic_gradients_by_hand": 1,
    },
    "truth/test_rules.py": {
        "test_a_batch_is_the_sum_of_its_samples": 1,
        "test_blocks": 2,
        "test_blocks_of_windows": 1,
        "test_compare_knows_the_rule": 2,
        "test_dni_in_windows": 1,
        "test_mapped_samples_are_a_batch": 1,
        "test_masks_choose_steps": 1,
        "test_one_gradient_through_a_scan_of_calls": 1,
        "test_reset_to_another_batch_size": 1,
        "test_sharing_a_trace_is_not_transitive": 1,
        "test_single_step": 1,
        "test_states_are_all_that_is_remembered": 1,
        "test_steps_add_up_and_are_compiled_once": 1,
        "test_traces_in_low_precision": 2,
        "test_windows": 2,
    },
    "truth/test_verify.py": {
        "test_bptt_is_what_finite_differences_see": 2,
    },
    "truth/test_verify_definitions.py": {
        "test_a_while_is_differentiated_forward": 1,
        "test_compare_knows_snap_and_rtrl": 1,
        "test_enough_crossings_are_rtrl_and_bptt": 1,
        "test_operators_in_a_scan_are_those_of_the_turns": 1,
    },
    "zoo/test_channels.py": {
        "test_equation_that_keeps_units_apart_is_followed": 1,
        "test_short_convolution_in_front_of_a_matrix_state": 1,
    },
    "zoo/test_choices.py": {
        "test_choice": 2,
        "test_choice_with_crossings": 1,
        "test_dead_branch": 2,
    },
    "zoo/test_control_transforms.py": {
        "test_dead_branch_of_one_sample_among_others": 1,
        "test_jit_inside_and_outside": 1,
        "test_mapped_by_compile": 1,
        "test_mapped_with_crossings": 1,
    },
    "zoo/test_loops.py": {
        "test_loop": 2,
        "test_loop_with_crossings": 2,
        "test_program_and_traces_are_flat_in_the_number_of_turns": 2,
        "test_substeps": 2,
    },
    "zoo/test_norms.py": {
        "test_norm_of_both": 2,
        "test_norm_of_input_and_output": 2,
        "test_norm_of_the_recurrence": 2,
        "test_norm_of_the_tail": 2,
    },
    "zoo/test_shapes.py": {
        "test_convolution_and_pooling": 1,
        "test_function_of_one_unit": 2,
        "test_move_of_the_state": 3,
        "test_move_of_the_state_by_data": 1,
        "test_tail": 2,
    },
    "zoo/test_weights.py": {
        "test_low_precision": 1,
        "test_operand_made_of": 2,
        "test_stop_gradient": 2,
    },
    "zoo/test_whiles.py": {
        "test_operator_inside_a_while_is_refused": 2,
        "test_while_of_pure_dynamics": 1,
        "test_while_that_mixes_units_is_the_loop_that_does": 1,
    },
    "learner/test_function.py": {
        "test_function_has_the_gradient_of_the_same_module": 1,
    },
    "online/test_blocks_memory.py": {
        "test_estimate_of_a_step_is_what_it_takes": 2,
    },
    "online/test_advice.py": {
        "test_the_advised_rule_is_exact_and_stores_what_it_says": 1,
    },
    "learner/test_unmarked.py": {
        "test_cells_of_brainstate": 1,
        "test_cells_of_brainstate_by_definition": 1,
    },
    "zoo/test_states.py": {
        "test_ring_buffer": 1,
    },
    "pytorch/test_cells.py": {
        "test_rtrl_is_bptt_and_the_certificate_is_true": 12,
        "test_a_rule_is_that_of_the_same_cell_in_jax": 2,
    },
}


def surplus(items: list, filtered: bool) -> list:
    """The cases that the quick suite leaves out, of all tests of some files or of fewer."""
    cases: dict[tuple[str, str], list] = {}
    for item in items:
        file = "/".join(item.path.parts[-2:])
        cases.setdefault((file, item.originalname), []).append(item)
    there = {file for file, _ in cases}
    gone = [(f, t) for f in FEW for t in FEW[f] if f in there and (f, t) not in cases]
    assert filtered or not gone, f"tests/thinned.py: no such tests: {gone}"
    out = []
    for (file, test), of_one in cases.items():
        kept = spread(len(of_one), FEW.get(file, {}).get(test, len(of_one)))
        out += [item for i, item in enumerate(of_one) if i not in kept]
    return [] if ALL else out


def spread(length: int, count: int) -> set[int]:
    """So many places of a list, not always the same one of a period: cases are often products."""
    count = min(length, count)
    return {i * length // count + i % (length // count) for i in range(count)}
