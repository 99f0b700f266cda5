"""The interval has the coverage it promises, on data whose truth is known, and the parts of a verdict follow from it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from zloss.decide.intervals import (
    BlockMean,
    BlockTail,
    contiguous_groups,
    effect_interval,
    judged_level,
    paired_interval,
    quality_interval,
    student_quantile,
)
from zloss.decide.verdict_parts import EndpointLimit, against_bound, judge_effect, judge_endpoints, judge_quality
from zloss.results.comparison import VerdictPart
from zloss.results.run_metrics import ValidationBlocks

Blocks = list[tuple[ValidationBlocks, ValidationBlocks]]
"""(baseline, method) of every seed."""


def blocks_of(baseline_SB: np.ndarray, method_SB: np.ndarray) -> Blocks:
    def kept(ce_B: np.ndarray) -> ValidationBlocks:
        return ValidationBlocks((256,) * len(ce_B), tuple(ce_B.tolist()))

    return [(kept(base), kept(method)) for base, method in zip(baseline_SB, method_SB, strict=True)]


def cross_entropies(rng: np.random.Generator, seeds: int, effect: float, seed_sd: float, text_sd: float) -> Blocks:
    """A method whose CE differs by `effect`, by a seed's own deviation, and by a deviation of each block."""
    baseline = rng.normal(3.0, 0.3, (seeds, 64))
    shift = effect + rng.normal(0, seed_sd, (seeds, 1)) + rng.normal(0, text_sd, (1, 64))
    return blocks_of(baseline, baseline + shift)


def quality(pairs: Blocks, tolerance_ppl: float = 0.2) -> VerdictPart:
    return judge_quality(quality_interval(pairs), baseline_ppl=20.0, tolerance_ppl=tolerance_ppl)


def test_student_quantiles_are_those_of_a_table() -> None:
    assert student_quantile(1) == pytest.approx(6.3138, abs=1e-3)
    assert student_quantile(31) == pytest.approx(1.6955, abs=1e-3)


def test_quality_that_holds_names_the_smallest_tolerance_in_words_read_once() -> None:
    part = quality(cross_entropies(np.random.default_rng(0), 3, 0.0, 1e-4, 1e-4))
    smallest = part.numbers["smallest_tolerance_ppl"]
    assert part.state == "holds"
    assert part.reason.endswith(f"; the smallest tolerance that still holds is {smallest:+.3g} PPL.")


def test_half_width_is_the_stated_formula() -> None:
    rng = np.random.default_rng(0)
    ce = cross_entropies(rng, 3, 0.01, 0.02, 0.03)
    interval = quality_interval(ce)
    gap = np.array([np.array(method.ce) - np.array(base.ce) for base, method in ce])
    by_seed = gap.mean(axis=1)
    by_group = gap.mean(axis=0).reshape(32, 2).mean(axis=1)
    seed = student_quantile(2) * by_seed.std(ddof=1) / math.sqrt(3)
    text = student_quantile(31) * by_group.std(ddof=1) / math.sqrt(32)
    assert interval.difference == pytest.approx(by_seed.mean())
    assert interval.half_width == pytest.approx(math.hypot(seed, text))


@pytest.mark.parametrize(("seed_sd", "text_sd"), [(0.01, 0.0), (0.0, 0.05), (0.01, 0.05), (1e-4, 1e-4)])
def test_no_side_is_wrong_more_often_than_its_level(seed_sd: float, text_sd: float) -> None:
    rng = np.random.default_rng(1)
    trials, too_low, too_high = 400, 0, 0
    for _ in range(trials):
        interval = quality_interval(cross_entropies(rng, 3, 0.0, seed_sd, text_sd))
        assert interval.upper is not None
        assert interval.lower is not None
        too_low += interval.upper < 0
        too_high += interval.lower > 0
    # One-sided 5 %: more than 8 % in 400 trials would come by chance once in two hundred.
    assert too_low / trials < 0.08
    assert too_high / trials < 0.08


def test_one_seed_is_open_whatever_the_numbers() -> None:
    part = quality(cross_entropies(np.random.default_rng(2), 1, 5.0, 0.0, 0.0))
    assert part.state == "open"
    assert "one seed" in part.reason


def test_few_groups_never_hold() -> None:
    rng = np.random.default_rng(3)
    baseline = rng.normal(3.0, 0.3, (4, 7))
    part = quality(blocks_of(baseline, baseline - 0.5 + rng.normal(0, 1e-4, (4, 7))))
    assert part.state == "open"
    assert "7 groups" in part.reason


def test_quality_holds_fails_and_names_the_seeds_that_would_settle_it() -> None:
    rng = np.random.default_rng(4)
    within = quality(cross_entropies(rng, 4, 0.0, 1e-3, 1e-3))
    beyond = quality(cross_entropies(rng, 4, 0.05, 1e-3, 1e-3))
    unclear = quality(cross_entropies(rng, 2, 0.0, 5e-3, 1e-4))
    assert (within.state, beyond.state, unclear.state) == ("holds", "fails", "open")
    assert int(unclear.numbers["seeds_to_settle"] or 0) > 2
    # The smallest tolerance that would hold does hold.
    at_edge = float(within.numbers["smallest_tolerance_ppl"] or 0.0) + 1e-9
    assert quality(cross_entropies(np.random.default_rng(4), 4, 0.0, 1e-3, 1e-3), at_edge).state == "holds"


def test_groups_are_contiguous_and_of_equal_length() -> None:
    groups = contiguous_groups(64)
    assert groups.tolist() == [block // 2 for block in range(64)]
    assert contiguous_groups(20).tolist() == list(range(20))


def tails(rng: np.random.Generator, factor: float, seed_sd: float, tokens: int = 256) -> tuple[BlockTail, BlockTail]:
    """Baseline and method whose token quantity is `factor` times as large, with a deviation of the seed."""
    base = rng.lognormal(1.0, 0.5, (64, tokens))
    method = base * factor * math.exp(rng.normal(0, seed_sd)) * np.exp(rng.normal(0, 0.01, base.shape))

    def kept(values: np.ndarray) -> BlockTail:
        threshold = np.quantile(values, 0.95)
        return BlockTail(tuple(tuple(row[row > threshold]) for row in values), (tokens,) * 64)

    return kept(base), kept(method)


def test_a_tail_that_falls_holds_and_an_equal_one_has_no_effect() -> None:
    rng = np.random.default_rng(5)
    falls = judge_effect("|log Z − c|", [tails(rng, 0.8, 0.01) for _ in range(3)])
    equal = judge_effect("|log Z − c|", [tails(rng, 1.0, 1e-4) for _ in range(3)])
    assert falls.state == "holds"
    assert falls.numbers["ratio"] == pytest.approx(0.8, rel=0.03)
    assert equal.state == "fails"
    assert equal.reason.startswith("no effect")


def test_quantile_of_kept_tails_is_that_of_all_tokens() -> None:
    rng = np.random.default_rng(6)
    values = rng.lognormal(0, 1, (64, 256))
    kept = BlockTail(tuple(tuple(row[row > np.quantile(values, 0.95)]) for row in values), (256,) * 64)
    for level in (0.95, 0.99, 0.999):
        assert kept.quantile(level) == pytest.approx(np.quantile(values, level, method="higher"), rel=2e-2)


def test_a_quantile_needs_fifty_tokens_beyond_it() -> None:
    assert judged_level(50_000) == 0.999
    assert judged_level(49_000) == 0.99
    assert judged_level(8192) == 0.99
    assert judged_level(4000) == 0.95
    assert judged_level(900) is None


def test_means_are_resampled_too() -> None:
    rng = np.random.default_rng(7)
    pairs = []
    for _ in range(3):
        means = rng.normal(10, 1, 64)
        pairs.append((BlockMean(tuple(means), (256,) * 64), BlockMean(tuple(0.9 * means), (256,) * 64)))
    interval = effect_interval(pairs, None)
    assert interval is not None
    assert math.exp(interval.difference) == pytest.approx(0.9)
    assert interval.group_part < 1e-12


LIMITS = (
    EndpointLimit("grad_norm_p99", "p99 ‖g‖₂", "ratio", 2.0),
    EndpointLimit("phi_10", "Φ_10", "increase", 0.01),
    EndpointLimit("nonfinite_gradient", "nonfinite gradients", "increase", 0.0),
)


def test_the_update_outliers_of_the_paper_are_rejected_for_their_tails() -> None:
    # tab:fineweb_update_outlier: Standard's p99 pre-clip norm is 5.3 times CE's.
    base, run = {"grad_norm_p99": 1.0, "phi_10": 0.0}, {"grad_norm_p99": 5.3, "phi_10": 0.2}
    part = judge_endpoints(LIMITS, [(base, run)] * 2)
    assert part.state == "fails"
    assert "× 5.3" in part.reason


def test_an_endpoint_passed_on_some_seeds_is_open() -> None:
    calm, wild = {"grad_norm_p99": 1.0}, {"grad_norm_p99": 3.0}
    assert judge_endpoints(LIMITS, [(calm, calm), (calm, wild)]).state == "open"
    assert judge_endpoints(LIMITS, [(calm, calm), (calm, calm)]).state == "holds"
    assert judge_endpoints(LIMITS, [({}, {})]).state == "open"


def test_bounds_are_two_one_sided_tests() -> None:
    assert against_bound(-1.0, 1.0, 1.0) == "holds"
    assert against_bound(1.1, 2.0, 1.0) == "fails"
    assert against_bound(0.0, 2.0, 1.0) == "open"


def test_identical_runs_have_no_spread_and_no_effect() -> None:
    interval = paired_interval([0.0, 0.0], 0.0, 32)
    assert interval.half_width == 0.0
    assert interval.seeds_to_settle(0.01) == 2
