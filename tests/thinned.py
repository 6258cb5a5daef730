"""Sweeps over many cases: some of them in the quick suite, all of them by `make test-all`."""

import os

import jax

# Options of XLA for programs that run once or twice: quicker to compile. Newer versions have none.
_CAN = jax.default_backend() == "cpu" and jax.__version_info__ < (0, 11)
QUICK = {"xla_cpu_use_fusion_emitters": False} if _CAN else {}


def some(cases, every: int) -> list:
    """One in so many of them, all if the environment says so."""
    return list(cases)[:: 1 if os.environ.get("BRAINTRACE_ALL") else every]


# Tests that repeat one claim over many models or rules, and how many of their cases the quick suite
# runs, evenly spread; chosen by `pytest --durations`. `make test-all` runs all of them.
FEW = {
    "fuzz/test_chains.py::test_rules_are_their_definitions": 1,
    "graph/test_fold.py::test_factor_that_no_state_enters_is_exact": 3,
    "graph/test_fold.py::test_recurrent_weight_with_a_factor_is_the_rule": 2,
    "graph/test_influence.py::test_influence_of_an_operator_is_the_pattern_of_its_tail": 2,
    "learner/test_blocks.py::test_blocks_equal_steps_for_every_model": 2,
    "learner/test_blocks.py::test_blocks_equal_steps_for_every_rule": 2,
    "learner/test_blocks.py::test_masks_in_blocks": 2,
    "learner/test_blocks.py::test_nan_of_uncounted_steps_reaches_no_gradient": 2,
    "learner/test_blocks.py::test_progress_bar_reaches_its_end": 2,
    "learner/test_blocks.py::test_traces_that_are_not_kept_are_zero": 2,
    "learner/test_callbacks.py::test_callback_in_the_step_that_cannot_be_mapped": 2,
    "learner/test_checkpoint.py::test_resumed_training_is_bit_for_bit": 1,
    "learner/test_config.py::test_a_modulator_for_samples_units_or_both": 2,
    "learner/test_config.py::test_a_preset_is_made_again_from_its_coordinates": 2,
    "learner/test_config.py::test_a_signal_of_its_own_also_trains": 2,
    "learner/test_errors.py::test_inputs_of_another_real_type_are_promoted": 2,
    "learner/test_batching.py::test_batching_modes_agree_on_states_and_gradients": 2,
    "learner/test_gradients.py::test_gradient_over_many_calls_is_the_sum_of_online_gradients": 2,
    "learner/test_reset.py::test_reset_of_a_module_with_init_state_only_keeps_its_state": 2,
    "learner/test_sequences.py::test_windows_stack_summaries_of_windows": 2,
    "learner/test_programs.py::test_lif_with_units_and_surrogate_spike_equals_bptt": 2,
    "learner/test_states.py::test_shape_as_an_example_with_a_batch": 2,
    "learner/test_states.py::test_state_of_a_float_and_an_integer_leaf_is_exact": 2,
    "learner/test_train.py::test_training_by_every_rule": 1,
    "learner/test_train.py::test_training_equals_gradients_and_updates_in_turn": 1,
    "learner/test_train.py::test_training_in_windows": 1,
    "nn/test_cells.py::test_gradients_are_finite_at_the_edges_in_float32": 2,
    "nn/test_online.py::test_layer_is_learned_exactly_before_a_state_and_after_it": 2,
    "nn/test_spiking.py::test_rtrl_is_bptt_and_d_rtrl_without_recurrence": 2,
    "nn/test_table.py::test_row_is_what_is_measured": 2,
    "online/test_online.py::test_blocks_are_steps": 2,
    "online/test_online.py::test_windows_end_where_the_sequence_ends": 2,
    "test_examples.py::test_example_runs": 2,
    "truth/test_brainpy.py::test_compile_and_reset_bring_a_network_to_its_start": 2,
    "truth/test_brainpy.py::test_d_rtrl_of_a_driven_neuron_is_bptt": 2,
    "truth/test_brainpy.py::test_d_rtrl_of_a_feedforward_synapse_is_bptt": 2,
    "truth/test_brainpy.py::test_d_rtrl_of_a_network_is_its_definition": 1,
    "truth/test_brainpy.py::test_one_window_over_a_network_is_bptt": 2,
    "truth/test_brainpy.py::test_pp_prop_of_a_network_is_its_definition": 2,
    "truth/test_certificate.py::test_claim_is_the_truth": 2,
    "truth/test_crossing.py::test_batch_is_the_sum_of_its_samples_however_it_is_made": 1,
    "truth/test_crossing.py::test_delays": 2,
    "truth/test_crossing.py::test_reset_starts_again": 2,
    "truth/test_crossing.py::test_snap_is_called_exact_where_it_is": 2,
    "truth/test_crossing.py::test_snap_is_its_definition": 2,
    "truth/test_exact.py::test_d_rtrl_is_its_definition": 3,
    "truth/test_exact.py::test_pp_prop_is_its_definition": 3,
    "truth/test_exact.py::test_pp_prop_windows_are_their_definition": 1,
    "truth/test_exact.py::test_windows_are_their_definition": 2,
    "truth/test_exact.py::test_windows_of_any_length_are_their_definition": 2,
    "truth/test_penalties.py::test_rules_are_their_definition": 2,
    "truth/test_penalties.py::test_what_is_called_exact_is_bptt": 2,
    "truth/test_random_rules.py::test_random_operands_on_the_way_back": 2,
    "truth/test_random_rules.py::test_the_mean_is_that_of_the_reference": 2,
    "truth/test_rule_definitions.py::test_equal_rules": 2,
    "truth/test_rule_definitions.py::test_synthetic_gradients_by_hand": 2,
    "truth/test_rules.py::test_blocks": 2,
    "truth/test_rules.py::test_blocks_of_windows": 2,
    "truth/test_rules.py::test_dni_in_windows": 2,
    "truth/test_rules.py::test_sharing_a_trace_is_not_transitive": 1,
    "truth/test_rules.py::test_single_step": 2,
    "truth/test_rules.py::test_windows": 3,
    "zoo/test_channels.py::test_equation_that_keeps_units_apart_is_followed": 2,
    "zoo/test_loops.py::test_loop": 2,
}


def surplus(items: list) -> list:
    """The cases that the quick suite leaves out."""
    if os.environ.get("BRAINTRACE_ALL"):
        return []
    cases: dict[str, list] = {}
    for item in items:
        name = item.nodeid.split("[")[0].removeprefix("tests/")
        if name in FEW:
            cases.setdefault(name, []).append(item)
    out = []
    for name, of_one in cases.items():
        step = max(1, -(-len(of_one) // FEW[name]))
        out += [item for i, item in enumerate(of_one) if i % step]
    return out
