"""The verdict on a method: what each method has to lower, and how verdict and quality follow from the parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.train.made_metrics import metrics_of
from zloss.decide.thresholds import Thresholds
from zloss.decide.verdict import coordinate_part, evaluated_comparison, method_verdict, quality_accepted, with_parts
from zloss.decide.verdict_parts import quality_part
from zloss.results.comparison import (
    ComparedMethod,
    Comparison,
    HeadDifferences,
    PairedDifferences,
    Quality,
    RouterVariant,
    RouterVariants,
    State,
    Verdict,
    VerdictPart,
    VerdictParts,
)
from zloss.results.run_metrics import RunMetrics, ValidationBlocks

BLOCKS, SIZE = 64, 128


def blocks_of(rng: np.random.Generator, scale: dict[str, float], ce: float = 3.0) -> ValidationBlocks:
    """Lognormal tails; `scale` multiplies the quantities it names."""
    tails, means = {}, {}
    for name in ("violation.raw", "violation.centered", "shift.raw", "shift.centered", "delta_u.raw",
                 "delta_u_gain_aware.raw"):  # fmt: skip
        values = rng.lognormal(1, 0.5, (BLOCKS, SIZE)) * scale.get(name, 1.0)
        threshold = np.quantile(values, 0.9)
        tails[name] = tuple(tuple(row[row > threshold].tolist()) for row in values)
    for coordinate in ("raw", "centered"):
        values = rng.normal(10, 1, (BLOCKS, SIZE)) * scale.get(f"log_z.{coordinate}", 1.0)
        for name, signed in (("log_z", values), ("minus_log_z", -values)):
            threshold = np.quantile(signed, 0.9)
            tails[f"{name}.{coordinate}"] = tuple(tuple(row[row > threshold].tolist()) for row in signed)
    for name in ("shift_squared.raw", "violation_squared.centered"):
        means[name] = tuple((rng.normal(10, 0.1, BLOCKS) * scale.get(name, 1.0)).tolist())
    base = np.linspace(-0.5, 0.5, BLOCKS) + ce
    return ValidationBlocks((SIZE,) * BLOCKS, tuple((base + rng.normal(0, 1e-3, BLOCKS)).tolist()), 500, tails, means)


def made(method: str, seed: int, scale: dict[str, float] | None = None, ce: float = 3.0) -> RunMetrics:
    return replace(
        metrics_of([], seed=seed),
        method=method,
        coef=0.0 if method in ("ce", "centered-head") else 1e-3,
        ce=ce,
        coordinate="centered" if method.startswith("centered") else "raw",
        validation_blocks=blocks_of(np.random.default_rng(seed), scale or {}, ce),
    )


def pairs_of(
    method: str, scale: dict[str, float], ce: float = 3.0, seeds: int = 3
) -> list[tuple[RunMetrics, RunMetrics]]:
    return [(made("ce", seed), made(method, seed, scale, ce)) for seed in range(1, seeds + 1)]


def lowered(
    method: str, scale: dict[str, float], diagnosed: str | None = None, *, seeds: int = 3, target: float | None = None
) -> VerdictPart:
    pairs = pairs_of(method, scale, seeds=seeds)
    return coordinate_part(method, 1e-3, pairs, (), diagnosed, target=target)


@pytest.mark.parametrize(
    ("method", "own", "other"),
    [
        ("centered-head", {"shift.centered": 1e-6}, {"violation.centered": 0.5, "shift.centered": 1.5}),
        ("standard", {"violation.raw": 0.8}, {"violation.centered": 0.8}),
        ("centered", {"violation.centered": 0.8}, {"violation.raw": 0.8}),
        (
            "registered",
            {"violation.raw": 0.8},
            {"violation.centered": 0.8},
        ),  # was "no penalty, so there is nothing to accept"
        ("factorized", {"shift_squared.raw": 0.8, "violation_squared.centered": 0.8}, {"shift_squared.raw": 0.1}),
    ],
)
def test_each_method_is_evaluated_by_its_own_quantity(
    method: str, own: dict[str, float], other: dict[str, float]
) -> None:
    part = lowered(method, own)
    assert (part.state, lowered(method, other).state) == ("holds", "fails")
    assert part.interval.upper <= 0.99


def test_the_p999_is_shown_next_to_the_quantile_that_is_tested() -> None:
    part = lowered("standard", {"violation.raw": 0.8})
    assert part.numbers["level"] == 0.99  # 8192 tokens leave 8 beyond the p99.9
    assert part.numbers["unjudged_level"] == 0.999
    assert part.numbers["unjudged_ratio"] == pytest.approx(0.8, rel=0.2)


def test_gain_aware_is_evaluated_against_standard_at_the_same_coefficient() -> None:
    assert lowered("gain-aware", {"delta_u_gain_aware.raw": 0.5}).state == "open"

    def with_norm(run: RunMetrics, norm: float) -> RunMetrics:
        return replace(run, training=replace(run.training, grad_norm_p99=norm))

    standard = [with_norm(made("standard", seed), 10.0) for seed in (1, 2, 3)]
    pairs = pairs_of("gain-aware", {"delta_u_gain_aware.raw": 0.5})
    calm, wild = (
        coordinate_part("gain-aware", 1e-3, [(base, with_norm(run, norm)) for base, run in pairs], standard)
        for norm in (3.0, 30.0)
    )
    assert (calm.state, wild.state) == ("holds", "fails")
    assert "‖g‖₂ against Standard" in wild.reason


def test_quality_is_read_block_by_block_and_needs_two_seeds() -> None:
    equal, worse = (quality_part(pairs_of("standard", {}, ce), 0.2) for ce in (3.0, 3.2))
    assert (equal.state, worse.state) == ("holds", "fails")
    assert equal.numbers["groups"] == 32
    assert quality_part(pairs_of("standard", {}, seeds=1), 0.2).state == "open"
    assert lowered("standard", {"violation.raw": 0.1}, seeds=1).state == "open"


@pytest.mark.parametrize("method", ["standard", "centered"])
def test_runs_with_another_target_are_evaluated_at_it(method: str) -> None:
    """Runs with c = 0, the target of most codebases, had no verdict: validation kept |log Z − log V| only."""
    own = "log_z.centered" if method == "centered" else "log_z.raw"
    lower, higher = (lowered(method, {own: scale, "violation.raw": 2.0 - scale}, target=0.0) for scale in (0.8, 1.2))
    assert (lower.state, higher.state) == ("holds", "fails")
    assert "at c = 0" in lower.reason
    assert lower.numbers["target"] == 0.0
    assert lowered(method, {own: 0.8}, target=50.0).state == "fails"  # farther from 50


def test_a_requested_quantity_is_evaluated_at_the_target_or_names_log_v() -> None:
    """`--diagnosed p_z_999` of runs with c = 0 was that of c = log V, without saying so."""
    part = lowered("standard", {"log_z.raw": 0.8}, "p_z_999", target=0.0)
    assert (part.state, part.numbers["target"]) == ("holds", 0.0)
    assert "‖δ_u‖ at c = log V" in lowered("standard", {}, "delta_u_99", target=0.0).reason


def test_another_target_is_open_where_it_was_not_validated() -> None:
    assert [lowered(method, {}, target=0.0).state for method in ("factorized", "gain-aware")] == ["open", "open"]
    assert lowered("centered-head", {"shift.centered": 1e-6}, target=0.0).state == "holds"
    pairs = [
        (replace(base, validation_blocks=replace(base.validation_blocks, tails={})), run)
        for base, run in pairs_of("standard", {})
    ]
    assert "run them again" in coordinate_part("standard", 1e-3, pairs, target=0.0).reason


def test_an_unkept_quantity_is_open() -> None:
    unkept = lowered("standard", {}, "a_p_99")
    stated = lowered("standard", {"shift.raw": 0.5}, "mu_abs_99")
    assert [part.state for part in (unkept, stated)] == ["open", "holds"]
    assert coordinate_part("ce", 0.0, pairs_of("ce", {})) is None


@pytest.mark.parametrize(("scale", "state"), [(1.0, "holds"), (4.0, "fails")])
def test_a_router_variant_is_evaluated_by_its_scale(scale: float, state: State) -> None:
    paired = PairedDifferences(1, {}, HeadDifferences(), ())
    method = ComparedMethod("active_route_sum", 1e-3, "raw", (1,), paired=paired)
    variant = RouterVariant("active_route_sum", 1e-3, s_rel=scale)
    comparison = Comparison(
        baseline="token_layer_mean",
        seeds=(1,),
        methods=(method,),
        quality=Quality(tolerance_ppl=0.2),
        router=RouterVariants("token_layer_mean", (variant,)),
    )
    verdict = method_verdict(comparison, method, pairs_of("ce", {}, seeds=1))
    assert verdict.parts.coordinate.state == state


@pytest.mark.parametrize(
    ("coordinate", "quality", "optimizer", "name", "accepted"),
    [
        ("holds", "holds", "holds", "accepted", True),
        ("open", "holds", "holds", "inconclusive", None),
        ("holds", "holds", None, "inconclusive", None),
        ("holds", "holds", "fails", "rejected", False),
        (None, "holds", "fails", None, None),
    ],
)
def test_any_part_that_fails_rejects_and_all_three_must_hold_to_accept(
    coordinate: State | None, quality: State | None, optimizer: State | None, name: str | None, accepted: bool | None
) -> None:
    given = {"coordinate": coordinate, "quality": quality, "optimizer": optimizer}
    parts = VerdictParts(**{key: VerdictPart(state, "why.") for key, state in given.items() if state is not None})
    verdict = with_parts(Verdict("standard", 1e-3, 0.0, accepted=True), parts)
    assert (verdict.verdict, verdict.accepted, verdict.parts) == (name, accepted, parts)
    deciding = {"accepted": "holds", "rejected": "fails", "inconclusive": "open", None: None}[name]
    order = ("quality", "coordinate", "optimizer")
    assert verdict.reasons == tuple(f"{key}: why." for key in order if given[key] and given[key] == deciding)


def acceptable(comparison: Comparison, tolerance: float | None, delta_ppl: float | None, stated: bool | None) -> bool:
    """Whether the quality of a method without parts is, where a file states `stated`."""
    verdict = Verdict("a", 0.1, delta_ppl, accepted=stated)
    quality = Quality(tolerance_ppl=tolerance, methods=(verdict,))
    found = evaluated_comparison(replace(comparison, quality=quality), Thresholds()).quality
    return quality_accepted(verdict, found.methods[0], found.tolerance_ppl)


@pytest.mark.parametrize(
    ("delta_ppl", "stated", "accepted"),
    [
        (0.5, None, True),
        (1.5, None, False),
        # The comparison's own verdict goes first.
        (99.0, True, True),
        (-1.0, False, False),
        # Nothing known is not accepted.
        (None, None, False),
    ],
)
def test_ppl_is_held_against_the_stated_tolerance(
    comparison: Comparison, delta_ppl: float | None, stated: bool | None, accepted: bool
) -> None:
    assert acceptable(comparison, 1.0, delta_ppl, stated) is accepted


def test_a_file_without_parts_is_never_accepted_and_the_limits_of_the_optimizer_reject(comparison: Comparison) -> None:
    """An older file, or one written by hand, that states "accepted" has no per-block validation."""
    stated = tuple(replace(one, accepted=True) for one in comparison.quality.methods)
    old = replace(comparison, quality=replace(comparison.quality, methods=stated))
    standard, heavy = evaluated_comparison(old, Thresholds()).quality.methods
    assert (standard.verdict, heavy.verdict) == ("inconclusive", "rejected")
    assert all("run them again" in reason for reason in standard.reasons)
    assert heavy.reasons[0].startswith("optimizer: p99 ‖g‖₂ × ")
    (strict, _) = evaluated_comparison(old, Thresholds(grad_tail_ratio=0.1)).quality.methods
    assert strict.verdict == "rejected"


def test_without_one_it_is_a_share_of_the_baseline(comparison: Comparison) -> None:
    quality = evaluated_comparison(comparison, Thresholds(quality_tolerance=0.2)).quality
    assert quality.tolerance_ppl == pytest.approx(0.2 * comparison.baseline_method.mean("ppl"))
    assert quality.tolerance == "20 % of the baseline's PPL, the default"
    nameless = replace(comparison, baseline="another")
    assert acceptable(nameless, None, 0.0, None) is False
