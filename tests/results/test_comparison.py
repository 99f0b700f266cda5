"""comparison.json: keys that are written only sometimes, and its baseline."""

from __future__ import annotations

import json
from dataclasses import replace

from tests.laws.example_results import DOCUMENTED, VARIANT
from zloss.results.comparison import Comparison, RouterVariants, Verdict
from zloss.results.record import to_plain

TEXT = (DOCUMENTED / "matched_smollm2.json").read_text(encoding="utf-8")


def test_the_router_section_is_written_for_runs_with_routers_only() -> None:
    dense = Comparison.from_dict(json.loads(TEXT))
    assert "router" not in dense.to_dict()
    routed = replace(dense, router=RouterVariants("none", (VARIANT,)))
    assert list(routed.to_dict())[7:10] == ["quality", "router", "tokens"]
    assert Comparison.from_dict(routed.to_dict()) == routed


def test_a_verdict_without_a_pair_has_no_keys_of_one() -> None:
    lonely = Verdict("standard", 0.3, delta_ppl=None, accepted=None, reason="no seed in common")
    assert list(to_plain(lonely)) == ["method", "coef", "delta_ppl", "accepted", "reason"]
    # A pair whose PPL is not finite has all keys, with nulls.
    judged = Verdict("standard", 0.3, delta_ppl=None, coordinate="raw", accepted=False)
    pair = ["delta_ppl_std", "within_tolerance", "coordinate", "delta_diagnosed", "improves"]
    assert list(to_plain(judged)) == ["method", "coef", "delta_ppl", *pair, "accepted", "reason"]


def test_the_baseline_is_found_by_name_and_coefficient() -> None:
    comparison = Comparison.from_dict(json.loads(TEXT))
    assert comparison.baseline_method is comparison.methods[0]
    standard = next(method for method in comparison.methods if method.method == "standard")
    other = replace(standard, coef=0.5)
    both = replace(comparison, methods=(other, standard), baseline="standard", baseline_coef=standard.coef)
    assert both.baseline_method is standard
    assert replace(comparison, baseline="factorized").baseline_method is None
