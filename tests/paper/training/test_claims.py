"""Claims about training tables: they hold on the paper's numbers and fail on wrong ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.paper.training.labels import TRAINING
from zloss_paper.engine.claim import FAILS, HOLDS, OPEN
from zloss_paper.engine.paper_methods import CE, CENTERED, CENTERED_HEAD, FACTORIZED, GAIN_AWARE, STANDARD
from zloss_paper.engine.registry import find_recipe
from zloss_paper.engine.table import Cell, Key, Table

Change = Callable[[float], float]


def times(factor: float) -> Change:
    return lambda value: value * factor


def own(label: str) -> Table:
    paper = find_recipe(label).paper
    assert paper is not None
    return paper.table


def verdict(label: str, claim: str, table: Table) -> str:
    (found,) = (one for one in find_recipe(label).claims if one.id == claim)
    return found.check(table).verdict


def changed(table: Table, column: str, change: Change, **key: Key) -> Table:
    touched = table.find(**key)
    assert touched
    return Table(
        tuple(
            replace(line, cells={**line.cells, column: Cell(change(line.cells[column].value))})
            if line in touched
            else line
            for line in table
        )
    )


LOW = [
    ("standard_lowers_tail", "p_z_999", times(20), STANDARD),
    ("standard_keeps_gain", "a_p_99", times(0.6), STANDARD),
    ("centered_head_lowers_both", "a_p_99", times(20), CENTERED_HEAD),
    ("centered_head_lowers_both", "p_z_999", times(30), CENTERED_HEAD),
    ("centered_joint", "a_p_99", times(1.2), CENTERED),
    ("centered_joint", "p_z_999", times(2), CENTERED),
]
"""Claims that the low-coefficient tables share."""
WRONG: dict[str, list[tuple[str, str, Change, str]]] = {
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
    ],
}
CASES = [(label, *wrong) for label, wrongs in WRONG.items() for wrong in wrongs]


@pytest.mark.parametrize(("label", "claim", "column", "change", "method"), CASES)
def test_a_claim_fails_on_wrong_numbers(label: str, claim: str, column: str, change: Change, method: str) -> None:
    table = own(label)
    if label == "text:paired_differences":
        # Only the lines that print a gain difference can have a wrong one.
        table = Table(tuple(line for line in table if column in line.cells))
    assert verdict(label, claim, table) == HOLDS
    assert verdict(label, claim, changed(table, column, change, method=method)) == FAILS


def test_every_claim_has_a_wrong_table() -> None:
    tested = {(label, claim) for label, claim, *_ in CASES}
    claims = {(label, claim.id) for label in TRAINING for claim in find_recipe(label).claims}
    # Compared with the very numbers they quote; and a run without printed numbers, whose claims other tables share.
    apart = {("text:paired_differences", "quoted")}
    apart |= {(label, claim) for label, claim in claims if label == "text:fineweb_medium_2400"}
    assert tested == claims - apart


def test_a_changed_quoted_difference_is_noticed() -> None:
    label = "text:paired_differences"
    assert verdict(label, "quoted", own(label)) == HOLDS
    wrong = changed(own(label), "delta_ppl", times(1.5), method="Standard Z-loss")
    assert verdict(label, "quoted", wrong) == FAILS


def test_claims_of_the_described_run_fail_on_wrong_numbers() -> None:
    """Its own numbers are not printed; those of the run it is a shorter form of have the same columns."""
    label, printed = "text:fineweb_medium_2400", own("tab:fineweb_medium_ft")
    for claim, column, method in (
        ("centered_variants_lower_gain", "a_p_99", CENTERED),
        ("standard_lowers_tail", "p_z_999", STANDARD),
        ("standard_keeps_gain", "a_p_99", STANDARD),
    ):
        assert verdict(label, claim, printed) == HOLDS
        assert verdict(label, claim, changed(printed, column, times(20), method=method)) == FAILS


@pytest.mark.parametrize("label", TRAINING)
def test_a_method_that_was_not_run_leaves_its_claims_open(label: str) -> None:
    for claim in find_recipe(label).claims:
        assert claim.check(Table(())).verdict == OPEN
        if label in WRONG:
            only_ce = Table(own(label).find(method=CE))
            assert claim.check(only_ce).verdict == OPEN, claim.id
