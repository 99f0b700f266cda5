"""Every claim holds on the paper's own numbers, fails on wrong ones, and is open where its numbers are missing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.paper.claim_tables import Change, changed, own, times, verdict
from zloss_paper.engine.claims import FAILS, HOLDS, OPEN
from zloss_paper.engine.inputs import CE, CENTERED, CENTERED_HEAD, FACTORIZED, GAIN_AWARE, STANDARD
from zloss_paper.engine.recipe import find_recipe, labels
from zloss_paper.engine.table import Key, Line, Table, cells_of

JUDGED = [(label, claim.id) for label in labels() for claim in find_recipe(label).claims]
NOT_PRINTED = {
    # The paper speaks of the shift on FineWeb-Edu without printing it, and its figure's token sample is not a table.
    ("tab:fineweb_pretrained", "shift_removed"),
    ("text:gradient_geometry", "one_translation"),
    ("text:gradient_geometry", "gain_identity"),
    # Of its top-2 runs the paper prints the scales only.
    ("text:moe_top2", "matched_recovery"),
    ("text:moe_top2", "mean_lowers_entropy"),
    ("text:moe_top2", "sum_raises_entropy"),
    ("text:moe_top2", "similar_ce"),
    # The paper names the two paths, every matched run and the norm of the direction without printing their numbers.
    ("tab:gpt2_diag", "two_paths"),
    ("tab:medium_long", "centered_better_every_run"),
    ("tab:adam_state_stress", "direction_norm_damped"),
    # Of fp16 and fp32 it gives bounds, not numbers.
    ("text:pytorch_backward_audit", "fp16_bound"),
    ("text:pytorch_backward_audit", "fp32_zero"),
    # A run that is described only.
    *(("text:fineweb_medium_2400", claim.id) for claim in find_recipe("text:fineweb_medium_2400").claims),
}
SYMMETRIC = {
    # True of the swapped table too: equality, existence, and numbers of one coordinate.
    ("tab:pretrained", "ppl_preserved"),
    ("tab:pretrained", "gain_may_rise"),
    ("tab:fineweb_pretrained", "ppl_preserved"),
    ("tab:fineweb_pretrained", "gain_may_rise"),
    ("tab:spectral_audit", "anisotropic_heads"),
    ("tab:spectral_audit", "pattern_gain_share"),
    ("text:gradient_geometry", "rank_16_tracks"),
}
HEADS = ("tab:pretrained", "tab:fineweb_pretrained", "tab:spectral_audit", "text:gradient_geometry")
SWAPPED = [pair for pair in JUDGED if pair[0] in HEADS and pair not in NOT_PRINTED]


@pytest.mark.parametrize(("label", "claim"), JUDGED)
def test_a_claim_holds_on_the_papers_own_numbers(label: str, claim: str) -> None:
    assert verdict(label, claim, own(label)) == (OPEN if (label, claim) in NOT_PRINTED else HOLDS)


def swapped(table: Table) -> Table:
    """Raw and centered exchanged: the mutation a sign error or a mixed-up coordinate would make."""
    other = {"raw": "centered", "centered": "raw"}
    return Table(tuple(replace(line, key={**line.key, "head": other[str(line.key["head"])]}) for line in table))


@pytest.mark.parametrize(("label", "claim"), SWAPPED)
def test_swapped_raw_and_centered_is_noticed(label: str, claim: str) -> None:
    found = verdict(label, claim, swapped(own(label)))
    if (label, claim) in SYMMETRIC:
        assert found == HOLDS
    elif claim == "top_1_pythia_160m":
        assert found == OPEN  # the one printed share is then the centered head's, and the raw one's is missing
    else:
        assert found == FAILS


WITHIN_ROUNDING: list[tuple[str, str, str, float, dict[str, Key]]] = [
    # label, claim, column, factor, lines that change; their cells stay rounded as printed
    ("tab:pretrained", "ppl_preserved", "ppl", 1.001, {"head": "centered", "model": "GPT-2"}),
    ("tab:pretrained", "gain_may_rise", "a_p_99", 0.5, {"head": "centered"}),
    ("tab:fineweb_pretrained", "ppl_preserved", "ppl", 0.99, {"head": "raw"}),
    ("tab:spectral_audit", "anisotropic_heads", "f_16", 0.3, {"head": "raw"}),
    ("tab:fineweb_pretrained", "gain_may_rise", "a_p_99", 0.5, {"head": "centered"}),
    ("tab:spectral_audit", "pattern_gain_share", "f_16", 0.1, {"head": "raw"}),
    ("tab:spectral_audit", "top_1_pythia_160m", "e_1", 0.9, {}),
    ("text:gradient_geometry", "rank_16_tracks", "rho_16", 0.5, {"head": "centered"}),
    ("text:tied_paths", "nearly_orthogonal", "aux_ce_cosine", 20.0, {}),
    ("text:tied_paths", "two_paths", "input_path_norm", 0.01, {}),
    ("text:tied_paths", "paths_nearly_orthogonal", "input_output_cosine", 20.0, {}),
    ("text:tied_paths", "pythia_budget", "aux_ce_cosine", -1.0, {}),
    ("text:tied_paths", "pythia_budget", "r_z", 0.1, {"model": "Pythia-160M"}),
    ("tab:router", "relative_scales", "s_rel", 2.0, {"convention": "active-route mean"}),
    ("tab:router", "norms_follow_the_scale", "delta_h_norm_mean", 1.1, {"convention": "active-route sum", "top_k": 4}),
    ("text:tied_paths", "pattern_nearly_orthogonal", "aux_ce_cosine", 20.0, {}),
    ("tab:moe", "relative_scales", "s_rel", 2.0, {"router_loss": "active-route mean"}),
    ("tab:moe", "matched_recovery", "entropy", 1.01, {"router_loss": "active-route sum matched"}),
    ("tab:moe", "matched_recovery", "ce", 1.0002, {"router_loss": "active-route mean matched"}),
    ("tab:moe", "mean_lowers_entropy", "entropy", 1.02, {"router_loss": "active-route mean"}),
    ("tab:moe", "sum_raises_entropy", "entropy", 0.95, {"router_loss": "active-route sum"}),
    ("tab:moe", "similar_ce", "ce", 1.01, {"router_loss": "none"}),
]
IMPLEMENTATIONS: list[tuple[str, str, str, Change, dict[str, Key]]] = [
    # label, claim, column, change, lines that change
    ("tab:source_audit", "forward_understates", "delta_src", times(1e-3), {}),
    ("tab:source_audit", "forward_below", "rel_forward_error", times(5), {"storage": "bf16"}),
    ("tab:source_audit", "grows_with_scale", "delta_src", times(0.1), {"logit_scale": 4}),
    ("tab:source_audit", "fp16_smaller", "delta_src", times(8), {"storage": "fp16"}),
    ("text:source_audit_fineweb", "forward_below", "rel_forward_error_upper_bound", times(2), {}),
    ("text:source_audit_fineweb", "grows_with_scale", "delta_src", times(0.1), {"logit_scale": 4}),
    ("text:source_audit_medium", "forward_understates", "delta_src", times(1e-3), {}),
    ("text:source_audit_medium", "grows_with_scale", "delta_src", times(0.1), {"logit_scale": 4}),
    ("text:pytorch_backward_audit", "close", "delta_total", times(10), {}),
    ("tab:triton_fused", "fp32_consistent", "delta_z", times(10), {"storage": "fp32"}),
    ("tab:triton_fused", "bf16_material", "delta_z", times(1e-3), {}),
    ("tab:triton_fused", "total_smaller", "delta_total", times(10), {}),
    ("tab:triton_fused", "fp16_smaller", "delta_z", times(8), {"storage": "fp16"}),
    ("text:fused_audit_medium", "grows_with_scale", "delta_z", times(0.1), {"logit_scale": 4}),
    ("tab:update_audit", "visible_after_transport", "grad_rel_error", times(0.01), {}),
    ("tab:update_audit", "adam_magnifies", "adam_dir_rel_error", times(0.1), {}),
    ("tab:update_audit", "grows_with_scale", "grad_rel_error", times(0.1), {"logit_scale": 4}),
    ("text:update_audit_fp16", "small", "grad_rel_error_max", times(10), {}),
    ("text:update_audit_fp16", "grows_with_scale", "grad_rel_error_max", times(0.1), {"logit_scale": 4}),
    ("tab:overflow_audit", "standard_takes_room", "kappa_min", times(100), {"method": "Standard Z-loss"}),
    ("tab:overflow_audit", "raw_take_room", "kappa_min", times(10), {"method": "Factorized Z-loss"}),
    ("tab:overflow_audit", "raw_take_room", "kappa_min", times(10), {"method": "Gain-aware Z-loss"}),
    ("tab:overflow_audit", "centered_stays", "grad_norm_mean", times(2), {"method": "Centered Z-loss"}),
    ("tab:overflow_audit", "centered_head_is_ce", "kappa_min", times(1.01), {"method": "Centered head"}),
    ("tab:overflow_audit", "overflow_at_4096", "psi_4096", lambda x: 0.5, {"method": "Standard Z-loss"}),
    ("tab:overflow_audit", "overflow_at_4096", "psi_4096", lambda x: 0.5, {"method": "CE baseline"}),
]
LOW = [
    ("standard_lowers_tail", "p_z_999", times(20), STANDARD),
    ("standard_keeps_gain", "a_p_99", times(0.6), STANDARD),
    ("centered_head_lowers_both", "a_p_99", times(20), CENTERED_HEAD),
    ("centered_head_lowers_both", "p_z_999", times(30), CENTERED_HEAD),
    ("centered_joint", "a_p_99", times(1.2), CENTERED),
    ("centered_joint", "p_z_999", times(2), CENTERED),
]
"""Claims that the low-coefficient tables share."""
TRAINED: dict[str, list[tuple[str, str, Change, str]]] = {
    "tab:finetune": [
        *LOW,
        ("small_ppl_differences", "ppl", times(1.02), STANDARD),
        ("centered_head_keeps_ppl", "ppl", times(1.01), CENTERED_HEAD),
        ("quoted", "ppl", times(1.002), CENTERED),
    ],
    "tab:fineweb_ft": [
        *LOW,
        ("small_ppl_differences", "ppl", times(0.98), CENTERED),
        ("centered_head_keeps_ppl", "ppl", times(0.99), CENTERED_HEAD),
        ("standard_ppl_worse", "ppl", times(0.99), STANDARD),
        ("quoted", "p_z_999", times(1.2), CE),
    ],
    "tab:fineweb_medium_ft": [
        *LOW[1:],
        ("small_ppl_differences", "ppl", times(1.02), CENTERED),
        ("centered_head_keeps_ppl", "ppl", times(1.01), CENTERED_HEAD),
        ("standard_scalar_and_norm", "diag_z", times(10), STANDARD),
        ("standard_scalar_and_norm", "grad_norm_p99", times(3), STANDARD),
        ("quoted", "a_p_99", times(1.2), CENTERED_HEAD),
    ],
    "tab:gpt2_diag": [
        ("auxiliary_gradient_is_small_but_there", "r_aux", times(0), STANDARD),
        ("auxiliary_gradient_is_small_but_there", "r_aux", times(10), CENTERED),
        ("cosine_slightly_negative", "c_aux", times(-1), CENTERED),
        *LOW[:2],
        ("centered_lowers_both", "a_p_99", times(2), CENTERED),
        ("centered_lowers_both", "p_z_999", times(20), CENTERED),
    ],
    "tab:medium_ft": [
        *LOW,
        ("standard_improves_ppl", "ppl", times(1.01), STANDARD),
        ("centered_best_ppl", "ppl", times(1.01), CENTERED),
        ("quoted", "a_p_99", times(1.2), CENTERED),
    ],
    "tab:medium_long": [
        *LOW,
        ("both_improve_ppl", "ppl", times(1.02), CENTERED),
        ("both_improve_ppl", "ppl", times(1.02), STANDARD),
        ("quoted", "ppl", times(1.01), CENTERED),
    ],
    "tab:pythia_ft": [
        *LOW[2:],
        ("centered_head_ppl_below", "ppl", times(1.1), CENTERED_HEAD),
        ("centered_lowers_gradient", "grad_norm_p99", times(2), CENTERED),
        ("standard_vanishing_scalar", "diag_z", times(100), STANDARD),
        ("standard_vanishing_scalar", "p_z_999", times(100), STANDARD),
        ("standard_worse_update", "ppl", times(0.5), STANDARD),
        ("standard_worse_update", "a_p_99", times(0.5), STANDARD),
        ("standard_worse_update", "grad_norm_p99", times(0.1), STANDARD),
        ("quoted", "grad_norm_p99", times(1.3), CENTERED),
    ],
    "tab:stress_diag": [
        ("raw_lower_tail_keep_gain", "p_z_999", times(30), GAIN_AWARE),
        ("raw_lower_tail_keep_gain", "a_p_99", times(0.5), STANDARD),
        ("raw_gradient_tails", "grad_norm_p99", times(0.2), GAIN_AWARE),
        ("centered_joint_at_ce_norm", "grad_norm_p99", times(3), CENTERED),
        ("centered_joint_at_ce_norm", "a_p_99", times(3), CENTERED),
        ("centered_improves_ppl", "ppl", times(1.01), CENTERED),
        ("gain_aware_improves_ppl", "ppl", times(1.01), GAIN_AWARE),
        ("standard_small_ppl_rise", "ppl", times(0.99), STANDARD),
        ("standard_small_ppl_rise", "ppl", times(1.05), STANDARD),
        ("raw_rare_events", "clip_rate", times(20), STANDARD),
        ("clip_rates", "clip_rate", times(10), GAIN_AWARE),
        ("clip_rates", "clip_rate", times(0.9), CENTERED),
        ("raw_clip_rate_quoted", "clip_rate", times(1.3), STANDARD),
        ("only_centered", "ppl", times(1.01), CENTERED),
        ("only_centered", "a_p_99", times(1.3), CENTERED),
        ("only_centered", "grad_norm_p99", times(2), CENTERED),
    ],
    "tab:fineweb_noclip_stress": [
        ("standard_smallest_tail", "p_z_999", times(2), STANDARD),
        ("raw_lower_tail_keep_gain", "p_z_999", times(20), FACTORIZED),
        ("raw_lower_tail_keep_gain", "a_p_99", times(0.5), GAIN_AWARE),
        ("raw_gradient_tails", "grad_norm_max", times(0.1), FACTORIZED),
        ("raw_gradient_tails", "grad_norm_p99", times(0.1), STANDARD),
        ("centered_joint_at_ce_norm", "grad_norm_max", times(3), CENTERED),
        ("centered_ppl_cost", "ppl", times(0.98), CENTERED),
        ("centered_head_keeps_ppl", "ppl", times(0.99), CENTERED_HEAD),
        *LOW[2:4],
        ("centered_head_no_outliers", "grad_norm_max", times(3), CENTERED_HEAD),
        ("quoted", "grad_norm_p99", times(2), STANDARD),
    ],
    "tab:fineweb_update_outlier": [
        ("raw_improve_ppl_and_tail", "ppl", times(1.1), FACTORIZED),
        ("raw_improve_ppl_and_tail", "p_z_999", times(10), GAIN_AWARE),
        ("raw_gradient_tails", "grad_norm_p99", times(0.1), STANDARD),
        ("gain_aware_milder", "grad_norm_max", times(2), GAIN_AWARE),
        ("raw_events", "phi_100", times(0), GAIN_AWARE),
        ("raw_events", "phi_10", lambda value: 0.1, CENTERED_HEAD),
        ("quoted", "grad_norm_max", times(1.5), STANDARD),
    ],
    "tab:adam_state_stress": [
        ("raw_improve_ppl_and_tail", "ppl", times(1.1), STANDARD),
        ("raw_second_moment", "v_max_ratio_to_ce", times(0.1), GAIN_AWARE),
        ("direction_rises_slightly", "d_inf_p99", times(2), STANDARD),
        ("direction_rises_slightly", "d_inf_p99", times(0.9), FACTORIZED),
        ("centered_second_moment", "v_max_ratio_to_ce", times(2), CENTERED),
        ("centered_no_events", "phi_100", lambda value: 0.1, CENTERED),
        ("centered_ppl_cost", "ppl", times(0.9), CENTERED),
    ],
    "tab:fineweb_update_outlier_sweep": [
        ("raw_events_fall_with_coefficient", "grad_norm_max", lambda value: 20 - value, FACTORIZED),
        ("raw_near_ce_at_least", "ppl", times(1.1), STANDARD),
        ("raw_near_ce_at_least", "phi_10", lambda value: 0.1, GAIN_AWARE),
        ("raw_keep_gain", "a_p_99", times(0.5), GAIN_AWARE),
        ("centered_no_events", "phi_10", lambda value: 0.1, CENTERED),
        ("centered_ppl_cost", "ppl", times(0.9), CENTERED),
        ("centered_recovers", "a_p_99", times(3), CENTERED),
        ("centered_recovers", "ppl", times(1.1), CENTERED),
    ],
    "text:raw_sweep_1e3": [
        ("events_fall_with_coefficient", "grad_norm_max", lambda value: -value, STANDARD),
        ("tail_rises_as_coefficient_falls", "p_z_999", lambda value: -value, GAIN_AWARE),
    ],
    "text:paired_differences": [
        ("different_failure_modes", "delta_a_p_99", lambda value: -5.0, STANDARD),
        ("different_failure_modes", "delta_a_p_99", times(-1), CENTERED_HEAD),
        ("quoted", "delta_ppl", times(1.5), STANDARD),
    ],
}
CASES = [
    *((label, claim, column, times(factor), key, True) for label, claim, column, factor, key in WITHIN_ROUNDING),
    *((*case, False) for case in IMPLEMENTATIONS),
    *(
        (label, claim, column, change, {"method": method}, False)
        for label, wrong in TRAINED.items()
        for claim, column, change, method in wrong
    ),
]


@pytest.mark.parametrize(("label", "claim", "column", "change", "key", "rounded"), CASES)
def test_a_claim_fails_on_wrong_numbers(
    label: str, claim: str, column: str, change: Change, key: dict[str, Key], rounded: bool
) -> None:
    assert verdict(label, claim, own(label)) == HOLDS
    assert verdict(label, claim, changed(own(label), column, change, key, rounded=rounded)) == FAILS


def test_every_claim_has_a_wrong_table() -> None:
    tested = {(label, claim) for label, claim, *_ in CASES} | set(SWAPPED) - SYMMETRIC
    # Not of the form that a table prints: below. The claims of top-2 are those of top-4.
    elsewhere = {pair for pair in JUDGED if pair[1] == "all_finite"} | NOT_PRINTED
    elsewhere |= {("text:tied_paths", "no_input_path"), ("text:moe_top2", "relative_scales")}
    assert set(JUDGED) - tested == elsewhere


@pytest.mark.parametrize(
    ("label", "quoted", "general", "deviating"),
    [
        ("tab:pretrained", "p_z_999_factor_gpt-2", "gpt2_large_diag_rises", {}),
        ("tab:stress_diag", "raw_clip_rate_quoted", "clip_rates", {}),
        ("tab:spectral_audit", "energy_gpt2", "sigma_1_falls", {"model": "GPT-2 Medium"}),  # one of its two models
    ],
)
def test_a_quoted_number_is_not_evaluated_on_another_setting(
    label: str, quoted: str, general: str, deviating: dict[str, Key]
) -> None:
    table = own(label)
    touched = table.find(**deviating)
    other = Table(tuple(replace(line, deviations=("32 blocks",)) if line in touched else line for line in table))
    found = [verdict(label, quoted, table), verdict(label, quoted, other), verdict(label, general, other)]
    assert found == [HOLDS, OPEN, HOLDS]


def test_other_models_leave_named_claims_open() -> None:
    table = Table(
        tuple(replace(line, key={**line.key, "model": "other"}) for line in own("tab:pretrained").find(model="GPT-2"))
    )
    open_claims = {claim.id for claim in find_recipe("tab:pretrained").claims if claim.judge(table).verdict == OPEN}
    assert {"pythia_1b_contrast", "tail_falls_for_several", "gain_may_rise"} <= open_claims
    assert {"ppl_preserved", "shift_removed"}.isdisjoint(open_claims)


def test_an_empty_table_decides_nothing() -> None:
    for label in labels():
        for claim in find_recipe(label).claims:
            assert claim.judge(Table(())).verdict == OPEN


def with_runs(table: Table, quantity: str, numbers: dict[str, tuple[float, ...]]) -> Table:
    """The lines of some methods with the numbers of their runs."""
    return Table(
        tuple(
            replace(line, by_seed={**line.by_seed, quantity: numbers[str(line.key["method"])]})
            if line.key["method"] in numbers
            else line
            for line in table
        )
    )


@pytest.mark.parametrize("label", [label for label, claim in JUDGED if claim == "all_finite"])
def test_one_nonfinite_event_of_one_run_is_noticed(label: str) -> None:
    table = own(label)
    assert verdict(label, "all_finite", table) == HOLDS
    hurt = with_runs(table, "nonfinite_gradient", {STANDARD: (0.0, 1 / 600, 0.0)})
    assert verdict(label, "all_finite", hurt) == FAILS
    if label != "tab:fineweb_noclip_stress":  # where the paper speaks of micro-batches too
        hurt = with_runs(table, "nonfinite_microbatch", {STANDARD: (0.0, 0.0, 1 / 600)})
        assert verdict(label, "all_finite", hurt) == FAILS
    bare = Table(tuple(replace(line, by_seed={}) for line in table))
    assert verdict(label, "all_finite", bare) == OPEN


@pytest.mark.parametrize("label", TRAINED)
def test_a_method_that_was_not_run_leaves_its_claims_open(label: str) -> None:
    only_ce = Table(own(label).find(method=CE))
    for claim in find_recipe(label).claims:
        assert claim.judge(only_ce).verdict == OPEN, claim.id


def line(key: dict[str, Key], **values: float) -> Line:
    return Line(key, cells_of(values))


def pair(**values: float) -> Table:
    """A raw and a centered line with the same numbers."""
    return Table(tuple(line({"model": "m", "head": head}, **values) for head in ("raw", "centered")))


def with_cells(table: Table, **values: float) -> Table:
    """The lines with further numbers."""
    return Table(tuple(replace(one, cells={**one.cells, **cells_of(values)}) for one in table))


def ppl_of_runs(*centered: float) -> Table:
    return with_runs(own("tab:medium_long"), "ppl", {CE: (20.33, 20.34, 20.31), CENTERED: centered})


def direction_of_runs(gain_aware: float) -> Table:
    runs = dict.fromkeys((CE, STANDARD, FACTORIZED), (0.4,) * 3) | {GAIN_AWARE: (gain_aware,) * 3}
    return with_runs(own("tab:adam_state_stress"), "adam_d_ratio_p99", runs)


def tied_paths(into: float) -> Table:
    paths = {"output_path_norm": 0.4, "input_path_norm": into, "input_output_cosine": -0.01}
    return with_cells(own("tab:gpt2_diag"), **paths)


def gain_aware_like_centered() -> Table:
    table = own("tab:stress_diag")
    (centered,) = table.find(method=CENTERED)
    for column in ("p_z_999", "a_p_99", "grad_norm_p99"):
        table = changed(table, column, lambda _, column=column: centered.cells[column].value, {"method": GAIN_AWARE})
    return table


def without_tail_and_scalar() -> Table:
    """Standard has a large Diag Z, and its tail was not measured."""
    table = changed(own("tab:pythia_ft"), "diag_z", times(100), {"method": STANDARD})
    return Table(
        tuple(
            replace(one, cells={column: one.cells[column] for column in one.cells if column != "p_z_999"})
            for one in table
        )
    )


def stored(storage: str, *differences: float) -> Table:
    return Table(
        tuple(
            line({"model": "m", "storage": storage, "logit_scale": scale}, delta_total=value)
            for scale, value in enumerate(differences, 1)
        )
    )


def entropies(**seeds: tuple[float, float]) -> Table:
    """Router entropies of the active-route mean and the token-layer mean by seed."""
    return Table(
        tuple(
            line({"router_loss": name, "seed": seed}, entropy=value)
            for seed, values in seeds.items()
            for name, value in zip(("active-route mean", "token-layer mean"), values, strict=True)
        )
    )


DRIFTED = with_cells(own("tab:moe"), max_loss_difference=2e-6)
FRESH = own("tab:fineweb_medium_ft")
"""The numbers of text:fineweb_medium_2400 are not printed; those of this longer run have the same columns."""
MEASURED: list[tuple[str, str, Table, str]] = [
    ("text:tied_paths", "no_input_path", Table((line({"model": "m", "table": "untied"}, input_path_norm=0.2),)), FAILS),
    ("text:gradient_geometry", "gain_identity", pair(identity_error=0.02), FAILS),
    ("text:gradient_geometry", "one_translation", pair(translation_error=0.5), FAILS),
    # In both, Centered has the lower mean; in the second, one of its runs is worse than CE.
    ("tab:medium_long", "centered_better_every_run", ppl_of_runs(20.06, 20.07, 20.05), HOLDS),
    ("tab:medium_long", "centered_better_every_run", ppl_of_runs(20.06, 20.35, 19.05), FAILS),
    ("tab:medium_long", "both_improve_ppl", ppl_of_runs(20.06, 20.35, 19.05), HOLDS),
    # The gradient norm of Gain-aware is × 11.9 of CE: a direction that rises × 15 is not damped.
    ("tab:adam_state_stress", "direction_norm_damped", direction_of_runs(0.4), HOLDS),
    ("tab:adam_state_stress", "direction_norm_damped", direction_of_runs(6.0), FAILS),
    ("tab:gpt2_diag", "two_paths", tied_paths(0.5), HOLDS),
    ("tab:gpt2_diag", "two_paths", tied_paths(0.001), FAILS),
    ("tab:gpt2_diag", "two_paths", tied_paths(0.0), FAILS),
    ("tab:stress_diag", "only_centered", gain_aware_like_centered(), FAILS),
    ("text:pytorch_backward_audit", "fp16_bound", stored("fp16", 2.7e-4, 2.7e-4), HOLDS),
    ("text:pytorch_backward_audit", "fp16_bound", stored("fp16", 2.7e-4, 2.9e-4), FAILS),
    ("text:pytorch_backward_audit", "fp32_zero", stored("fp32", 0.0, 0.0), HOLDS),
    ("text:pytorch_backward_audit", "fp32_zero", stored("fp32", 0.0, 1e-5), FAILS),
    # About GPT-2 only: open for other models.
    ("tab:overflow_audit", "overflow_at_4096", Table((line({"model": "mine", "method": CE}, psi_4096=1.0),)), OPEN),
    ("tab:moe", "matched_recovery", DRIFTED, FAILS),
    ("tab:moe", "matched_recovery", Table(own("tab:moe").find(router_loss="none")), OPEN),
    ("tab:moe", "mean_lowers_entropy", entropies(mean=(1.70, 1.71), one=(1.6, 1.7)), HOLDS),
    ("tab:moe", "mean_lowers_entropy", entropies(mean=(1.70, 1.71), one=(1.6, 1.7), two=(1.80, 1.72)), FAILS),
    # One part fails and the other was not measured: not open.
    ("tab:pythia_ft", "standard_vanishing_scalar", without_tail_and_scalar(), FAILS),
    *(
        case
        for claim, column, method in (
            ("centered_variants_lower_gain", "a_p_99", CENTERED),
            ("standard_lowers_tail", "p_z_999", STANDARD),
            ("standard_keeps_gain", "a_p_99", STANDARD),
        )
        for case in (
            ("text:fineweb_medium_2400", claim, FRESH, HOLDS),
            ("text:fineweb_medium_2400", claim, changed(FRESH, column, times(20), {"method": method}), FAILS),
        )
    ),
]


@pytest.mark.parametrize(("label", "claim", "table", "expected"), MEASURED)
def test_claims_on_numbers_that_the_paper_does_not_print(label: str, claim: str, table: Table, expected: str) -> None:
    assert verdict(label, claim, table) == expected
