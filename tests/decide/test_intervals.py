"""The interval has the coverage it promises, on data whose truth is known, and the parts of a verdict follow from it."""

from __future__ import annotations

import math

import numpy as np
import pytest

from zloss.decide.intervals import (
    BlockValues,
    contiguous_groups,
    effect_interval,
    judged_level,
    paired_interval,
    quality_interval,
    student_quantile,
)
from zloss.decide.verdict_parts import EndpointLimit, judge_effect, judge_endpoints, judge_quality
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
    # As in a table of Student's t.
    assert student_quantile(1) == pytest.approx(6.3138, abs=1e-3)
    assert student_quantile(31) == pytest.approx(1.6955, abs=1e-3)
    assert contiguous_groups(64).tolist() == [block // 2 for block in range(64)]
    assert contiguous_groups(20).tolist() == list(range(20))
    identical = paired_interval([0.0, 0.0], 0.0, 32)
    assert (identical.half_width, identical.seeds_to_settle(0.01)) == (0.0, 2)


@pytest.mark.parametrize(("seed_sd", "text_sd"), [(0.01, 0.0), (0.0, 0.05), (0.01, 0.05), (1e-4, 1e-4)])
def test_no_side_is_wrong_more_often_than_its_level(seed_sd: float, text_sd: float) -> None:
    rng = np.random.default_rng(1)
    trials, too_low, too_high = 400, 0, 0
    for _ in range(trials):
        interval = quality_interval(cross_entropies(rng, 3, 0.0, seed_sd, text_sd))
        too_low += interval.upper < 0
        too_high += interval.lower > 0
    # One-sided 5 %: more than 8 % in 400 trials would come by chance once in two hundred.
    assert too_low / trials < 0.08
    assert too_high / trials < 0.08


def test_quality_holds_fails_or_says_what_would_settle_it() -> None:
    rng = np.random.default_rng(4)
    within, beyond, unclear, alone = (
        quality(cross_entropies(rng, *given))
        for given in ((4, 0.0, 1e-3, 1e-3), (4, 0.05, 1e-3, 1e-3), (2, 0.0, 5e-3, 1e-4), (1, 5.0, 0.0, 0.0))
    )
    assert [part.state for part in (within, beyond, unclear, alone)] == ["holds", "fails", "open", "open"]
    assert unclear.numbers["seeds_to_settle"] > 2
    assert "one seed" in alone.reason
    # The smallest tolerance that would hold does hold.
    smallest = within.numbers["smallest_tolerance_ppl"]
    assert within.reason.endswith(f"; the smallest tolerance that still holds is {smallest:+.3g} PPL.")
    at_edge = cross_entropies(np.random.default_rng(4), 4, 0.0, 1e-3, 1e-3)
    assert quality(at_edge, smallest + 1e-9).state == "holds"


def test_few_groups_never_hold() -> None:
    rng = np.random.default_rng(3)
    baseline = rng.normal(3.0, 0.3, (4, 7))
    part = quality(blocks_of(baseline, baseline - 0.5 + rng.normal(0, 1e-4, (4, 7))))
    assert part.state == "open"
    assert "7 groups" in part.reason


def kept(values: np.ndarray) -> BlockValues:
    threshold = np.quantile(values, 0.95)
    return BlockValues(tuple(tuple(row[row > threshold]) for row in values), (values.shape[1],) * len(values))


def tails(rng: np.random.Generator, factor: float, seed_sd: float) -> tuple[BlockValues, BlockValues]:
    """Baseline and method whose token quantity is `factor` times as large, with a deviation of the seed."""
    base = rng.lognormal(1.0, 0.5, (64, 256))
    method = base * factor * math.exp(rng.normal(0, seed_sd)) * np.exp(rng.normal(0, 0.01, base.shape))
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
    values = np.random.default_rng(6).lognormal(0, 1, (64, 256))
    for level in (0.95, 0.99, 0.999):
        assert kept(values).quantile(level) == pytest.approx(np.quantile(values, level, method="higher"), rel=2e-2)


@pytest.mark.parametrize(
    ("tokens", "level"), [(50_000, 0.999), (49_000, 0.99), (8192, 0.99), (4000, 0.95), (900, None)]
)
def test_a_quantile_needs_fifty_tokens_beyond_it(tokens: int, level: float | None) -> None:
    assert judged_level(tokens) == level


def test_means_are_resampled_too() -> None:
    rng = np.random.default_rng(7)
    pairs = []
    for _ in range(3):
        means = rng.normal(10, 1, 64)
        pairs.append(
            (
                BlockValues(tuple((m,) for m in means), (256,) * 64),
                BlockValues(tuple((0.9 * m,) for m in means), (256,) * 64),
            )
        )
    interval = effect_interval(pairs, None)
    assert math.exp(interval.difference) == pytest.approx(0.9)
    assert interval.group_part < 1e-12


LIMITS = (
    EndpointLimit("grad_norm_p99", "p99 ‖g‖₂", "ratio", 2.0),
    EndpointLimit("phi_10", "Φ_10", "increase", 0.01),
    EndpointLimit("nonfinite_gradient", "nonfinite gradients", "increase", 0.0),
)


CALM, WILD = {"grad_norm_p99": 1.0, "phi_10": 0.0}, {"grad_norm_p99": 5.3, "phi_10": 0.2}


@pytest.mark.parametrize(
    ("pairs", "state", "said"),
    [
        # tab:fineweb_update_outlier: Standard's p99 pre-clip norm is 5.3 times CE's.
        ([(CALM, WILD)] * 2, "fails", "× 5.3"),
        ([(CALM, CALM), (CALM, WILD)], "open", "on 1 of 2 seeds; more seeds would settle it"),
        ([(CALM, CALM)] * 2, "holds", "all 2 endpoints"),
        ([({}, {})], "open", "no optimizer-facing endpoint"),
    ],
)
def test_an_endpoint_beyond_its_limit_on_every_seed_fails_and_on_some_is_open(
    pairs: list[tuple[dict[str, float], dict[str, float]]], state: str, said: str
) -> None:
    part = judge_endpoints(LIMITS, pairs)
    assert part.state == state
    assert said in part.reason


@pytest.mark.parametrize(
    ("limit", "before", "after", "passed", "said"),
    [
        (EndpointLimit("g", "g", "ratio", 2.0), 1.0, 2.0, False, "g × 2 (limit × 2)"),
        (EndpointLimit("g", "g", "ratio", 2.0), 0.0, 0.1, True, "g 0 → 0.1 (limit × 2)"),
        (EndpointLimit("g", "g", "increase", 0.01), 0.1, 0.12, True, "g 0.1 → 0.12 (limit +0.01)"),
        (EndpointLimit("g", "g", "increase", 0.0), 0.01, 0.01, False, "g 0.01 → 0.01 (limit +0)"),
        (EndpointLimit("nonfinite_gradient", "g", "increase", 0.0), 0.0, 0.01, True, "g 0 → 0.01 (limit +0)"),
        (EndpointLimit("g", "g", "falls", 3.0), 6.0, 0.0, True, "g 6 → 0 (limit ÷ 3)"),
    ],
)
def test_when_an_endpoint_is_beyond_its_limit(
    limit: EndpointLimit, before: float, after: float, passed: bool, said: str
) -> None:
    assert limit.passed(before, after) is passed
    assert limit.sentence(before, after) == said
