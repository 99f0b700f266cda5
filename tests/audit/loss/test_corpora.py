"""A sample of every corpus gets the answer that is written next to it; `python -m tests.audit.loss.table` runs them all."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tests.audit.loss.styles import STYLES
from tests.audit.loss.table import Row, cases, of_case, of_zoo, verdict_on, wrong_with
from tests.audit.loss.zoo import ZOO, Answer, exact, no_z, one_class_weighted
from zloss.audit.loss.audit import audit_loss
from zloss.results.loss_audit import LossAudit

ROWS = list(cases())
EVERY = {"zoo": 60, "trap": 30, "further": 45, "unseen": 20, "styles": 12, "drawn": 200}
"""One loss in so many of a corpus; compiled ones, heads and large vocabularies take seconds each and are left to the table."""
SAMPLE = [
    row
    for group, every in EVERY.items()
    for row in [row for row in ROWS if row[0] == group and not row[3].keys() & {"linear", "vocab"}][3::every]
]
OF_16_BITS = (
    "log Z of rounded logits",
    "filtered",
    "confident tokens dropped",
    "dW in 16 bits over chunks",
    "stored in 16 bits",
)


@pytest.mark.parametrize("row", SAMPLE, ids=lambda row: f"{row[0]}: {row[1]}")
def test_the_answer_is_right(row: Row) -> None:
    verdict, reasons, audit = verdict_on(row)
    assert verdict == "right", reasons
    if audit is not None:
        plain = audit.to_dict()
        json.dumps(plain, allow_nan=False)
        assert LossAudit.from_dict(plain).to_dict() == plain


@pytest.mark.usefixtures("bf16_only")
@pytest.mark.parametrize("name", OF_16_BITS)
def test_causes_of_another_row_sum_are_told_apart_with_16_bit_inputs(name: str) -> None:
    verdict, reasons, _ = verdict_on(next(row for row in ROWS if row[1] == f"{name}, λ = 0.0001"))
    assert verdict == "right", reasons


def test_the_comparisons_of_the_table_can_fail() -> None:
    loss, options, _ = ZOO["class weights"]
    audit = audit_loss(loss, **options)
    assert all(wrong_with(audit, one) for one in (no_z(), exact(coef=1.01e-3), exact(target=0.01), Answer(None)))
    assert of_zoo(audit, no_z())[0] == "wrong"
    case = next(case for case in STYLES if case.name == "world_size_scaled")
    audit = audit_loss(case.loss, **case.call)
    assert of_case(audit, case) == ("right", [])
    assert case.truth is not None
    changes = ({"coef": 8.1e-4}, {"target": 0.1}, {"has_z": False}, {"ce_scale": 1.0}, {"z_denominator": "all"})
    for change in changes:
        assert of_case(audit, replace(case, truth=replace(case.truth, **change)))[0] == "wrong", change
    assert of_case(audit, replace(case, defects=frozenset({"overflow"})))[0] == "open"


@pytest.mark.parametrize("index", [2, 95])
def test_one_class_that_weighs_differently_had_four_answers_by_its_number(index: int) -> None:
    audit = audit_loss(one_class_weighted(index, 1.3, normalised=True))
    assert wrong_with(audit, exact(ce_weights="class")) == []
    assert {one.id for one in audit.found} == set()


@pytest.mark.parametrize("name", ["class 50 weighs 4", "raw and centered"])
def test_another_seed_gives_the_same_answer(name: str) -> None:
    loss, options, answer = ZOO[name]
    assert wrong_with(audit_loss(loss, seed=1, **options), answer) == []
