"""The verdict on the PPL of compared methods."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zloss.decide.quality import judge_comparison
from zloss.decide.thresholds import Thresholds
from zloss.results.comparison import Comparison
from zloss.results.quality import Quality, QualityVerdict


def judged(comparison: Comparison, tolerance: float | None, *verdicts: QualityVerdict) -> list[bool]:
    quality = Quality(tolerance_ppl=tolerance, methods=verdicts)
    return [item.accepted for item in judge_comparison(replace(comparison, quality=quality), Thresholds()).quality]


def test_ppl_is_held_against_the_stated_tolerance(comparison: Comparison) -> None:
    rises = (QualityVerdict("a", 0.1, 0.5, accepted=None), QualityVerdict("b", 0.1, 1.5, accepted=None))
    assert judged(comparison, 1.0, *rises) == [True, False]


def test_without_one_it_is_a_share_of_the_baseline(comparison: Comparison) -> None:
    base = comparison.baseline_method
    assert base is not None
    (item, *_) = judge_comparison(comparison, Thresholds(quality_tolerance=0.2)).quality
    assert item.tolerance == pytest.approx(0.2 * (base.mean("ppl") or 0.0))


def test_the_comparisons_own_verdict_goes_first(comparison: Comparison) -> None:
    stated = (QualityVerdict("a", 0.1, 99.0, accepted=True), QualityVerdict("b", 0.1, -1.0, accepted=False))
    assert judged(comparison, 1.0, *stated) == [True, False]


def test_nothing_known_is_not_accepted(comparison: Comparison) -> None:
    assert judged(comparison, 1.0, QualityVerdict("a", 0.1, None, accepted=None)) == [False]
    nameless = replace(comparison, baseline="another")
    assert judged(nameless, None, QualityVerdict("a", 0.1, 0.0, accepted=None)) == [False]
