"""What each method is judged by, from runs whose validation is made up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.made_metrics import metrics_of
from zloss.decide.thresholds import Thresholds
from zloss.results.routing_metrics import RoutingMetrics
from zloss.results.validation_blocks import ValidationBlocks
from zloss.train.compare.finished_run import FinishedRun
from zloss.train.compare.pairing import Pairing
from zloss.train.compare.verdict_parts import coordinate_part, quality_part

BLOCKS, SIZE = 64, 128


def blocks_of(rng: np.random.Generator, scale: dict[str, float], ce: float = 3.0) -> ValidationBlocks:
    """Lognormal tails; `scale` multiplies the quantities it names."""
    tails, means = {}, {}
    for name in ("violation.raw", "violation.centered", "shift.raw", "shift.centered", "delta_u.raw",
                 "delta_u_gain_aware.raw"):  # fmt: skip
        values = rng.lognormal(1, 0.5, (BLOCKS, SIZE)) * scale.get(name, 1.0)
        threshold = np.quantile(values, 0.9)
        tails[name] = tuple(tuple(row[row > threshold].tolist()) for row in values)
    for name in ("shift_squared.raw", "violation_squared.centered"):
        means[name] = tuple((rng.normal(10, 0.1, BLOCKS) * scale.get(name, 1.0)).tolist())
    base = np.linspace(-0.5, 0.5, BLOCKS) + ce
    return ValidationBlocks((SIZE,) * BLOCKS, tuple((base + rng.normal(0, 1e-3, BLOCKS)).tolist()), 500, tails, means)


def made(method: str, seed: int, scale: dict[str, float] | None = None, ce: float = 3.0, **config: Any) -> FinishedRun:
    rng = np.random.default_rng(seed)
    coef = 0.0 if method in ("ce", "centered-head") else 1e-3
    record = replace(
        metrics_of([], seed=seed),
        method=method,
        coef=coef,
        ce=ce,
        coordinate="centered" if method.startswith("centered") else "raw",
        validation_blocks=blocks_of(rng, scale or {}, ce),
    )
    return FinishedRun(Path(f"{method}-s{seed}"), {"method": method, "coef": coef, "seed": seed, **config}, record)


def pairing(method: str, scale: dict[str, float], ce: float = 3.0, seeds: int = 3, **config: Any) -> Pairing:
    pairs = tuple((made("ce", s), made(method, s, scale, ce, **config)) for s in range(1, seeds + 1))
    return Pairing(tuple(run for _, run in pairs), pairs)


@pytest.mark.parametrize(
    ("method", "own", "other"),
    [
        ("centered-head", {"shift.centered": 1e-6}, {"violation.centered": 0.5, "shift.centered": 1.5}),
        ("standard", {"violation.raw": 0.8}, {"violation.centered": 0.8}),
        ("centered", {"violation.centered": 0.8}, {"violation.raw": 0.8}),
        (
            "factorized",
            {"shift_squared.raw": 0.8, "violation_squared.centered": 0.8},
            {"shift_squared.raw": 0.1},
        ),
    ],
)
def test_each_method_is_judged_by_its_own_quantity(method: str, own: dict[str, float], other: dict[str, float]) -> None:
    lowered = coordinate_part(pairing(method, own), (), None, Thresholds())
    elsewhere = coordinate_part(pairing(method, other), (), None, Thresholds())
    assert lowered is not None
    assert elsewhere is not None
    assert (lowered.state, elsewhere.state) == ("holds", "fails")
    assert lowered.interval is not None
    assert lowered.interval.upper <= 0.99


def test_the_p999_is_shown_beside_the_quantile_that_is_judged() -> None:
    part = coordinate_part(pairing("standard", {"violation.raw": 0.8}), (), None, Thresholds())
    assert part is not None
    assert part.numbers["level"] == 0.99  # 8192 tokens leave 8 beyond the p99.9
    assert part.numbers["unjudged_level"] == 0.999
    assert part.numbers["unjudged_ratio"] == pytest.approx(0.8, rel=0.2)


def test_gain_aware_is_judged_against_standard_at_the_same_coefficient() -> None:
    pairs = pairing("gain-aware", {"delta_u_gain_aware.raw": 0.5})
    assert coordinate_part(pairs, (), None, Thresholds()).state == "open"  # type: ignore[union-attr]

    def with_norm(run: FinishedRun, norm: float) -> FinishedRun:
        return replace(run, record=replace(run.record, training=replace(run.record.training, grad_norm_p99=norm)))

    standard = [with_norm(made("standard", seed), 10.0) for seed in (1, 2, 3)]
    calm = replace(pairs, pairs=tuple((base, with_norm(run, 3.0)) for base, run in pairs.pairs))
    wild = replace(pairs, pairs=tuple((base, with_norm(run, 30.0)) for base, run in pairs.pairs))
    found = [coordinate_part(each, standard, None, Thresholds()) for each in (calm, wild)]
    assert [part and part.state for part in found] == ["holds", "fails"]
    assert "‖g‖₂ against Standard" in found[1].reason  # type: ignore[union-attr]


def test_quality_is_read_block_by_block_and_needs_two_seeds() -> None:
    equal, worse = (quality_part(pairing("standard", {}, ce), 0.2) for ce in (3.0, 3.2))
    assert (equal.state, worse.state) == ("holds", "fails")
    assert equal.numbers["groups"] == 32
    assert quality_part(pairing("standard", {}, 3.0, seeds=1), 0.2).state == "open"
    assert coordinate_part(pairing("standard", {"violation.raw": 0.1}, seeds=1), (), None, Thresholds()).state == "open"  # type: ignore[union-attr]


def test_another_target_and_an_unkept_quantity_are_open() -> None:
    moved = coordinate_part(pairing("standard", {"violation.raw": 0.1}, target=0.0), (), None, Thresholds())
    unkept = coordinate_part(pairing("standard", {}), (), "a_p_99", Thresholds())
    stated = coordinate_part(pairing("standard", {"shift.raw": 0.5}), (), "mu_abs_99", Thresholds())
    assert [part and part.state for part in (moved, unkept, stated)] == ["open", "open", "holds"]
    assert coordinate_part(pairing("ce", {}), (), None, Thresholds()) is None


def test_a_router_variant_is_judged_by_its_scale() -> None:
    fields = dict.fromkeys(RoutingMetrics.__dataclass_fields__)
    for scale, state in ((1.0, "holds"), (4.0, "fails")):
        routing = RoutingMetrics(**{**fields, "s_rel": scale})  # type: ignore[arg-type]
        run = made("ce", 1, moe={"router": "active_route_sum", "router_coef": 1e-3})
        run = replace(run, record=replace(run.record, routing=routing))
        part = coordinate_part(Pairing((run,), ((run, run),)), (), None, Thresholds())
        assert part is not None
        assert part.state == state
