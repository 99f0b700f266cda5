"""Matched runs side by side: mean ± std over seeds, paired differences, curves, and a verdict on every method."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from zloss.decide.thresholds import Thresholds
from zloss.decide.verdict import DIAGNOSED, STANDARD, method_verdict, with_tolerance
from zloss.errors import InputError
from zloss.results.comparison import (
    ComparedMethod,
    ComparedProvenance,
    Comparison,
    Curve,
    HeadDifferences,
    HeadSummaries,
    MethodCurves,
    NormTail,
    PairedDifferences,
    Quality,
    RouterVariant,
    RouterVariants,
    SeedDifference,
    SeedSummary,
    TokenBudget,
    Trajectory,
)
from zloss.results.run_config import OFF
from zloss.results.steps import StepRecord
from zloss.train.finished import FinishedRun, Pairing, baseline_runs, pair_runs

NOT_METRICS = ("coef", "seed", "steps", "diag_coef", "valid_predictions")
"""Numbers of metrics.json that are settings."""
POINTS = 300
"""Maximum number of points in a curve."""
DENSE = ("p_z_999",)
ROUTED = ("entropy", "load_cv", "router_log_z_p999")
"""Telemetry in `curves`, in addition to the training cross-entropy: of the head, or of the routers if there are any."""


def compare_runs(
    runs: Sequence[FinishedRun],
    *,
    baseline: str | None = None,
    tolerance_ppl: float | None = None,
    diagnosed: str | None = None,
    unfinished: Sequence[str] = (),
    thresholds: Thresholds | None = None,
) -> Comparison:
    """Pair by seed, reject what is not matched, and evaluate every method.

    The default `baseline` is CE, and the token-layer mean among router variants. `diagnosed` replaces the quantity that
    each method is meant to lower.
    """
    limits = thresholds or Thresholds()
    base = baseline_runs(runs, baseline)
    pairings = pair_runs(runs, base)
    others = [pairing for pairing in pairings if pairing.key != base[0].key]
    if tolerance_ppl is not None and not math.isfinite(tolerance_ppl):
        raise InputError(f"`tolerance_ppl` is expected to be a finite number, but got {tolerance_ppl!r}.")
    if tolerance_ppl is None and all(run.record.ppl is None for run in base):
        raise InputError("the baseline's PPL is not a number in any run.")
    seeds, first = {run.seed for run in base}, base[0].record
    comparison = Comparison(
        model=base[0].model,
        baseline=base[0].method,
        baseline_coef=base[0].coef,
        seeds=tuple(sorted(seeds)),
        steps=first.training.steps,
        methods=tuple(_compared_method(pairing, paired=pairing in others) for pairing in pairings),
        quality=Quality(
            tolerance_ppl=tolerance_ppl,
            tolerance="stated",
            diagnosed=diagnosed or DIAGNOSED,
            seed_varies=_seed_varies(base),
        ),
        router=_router_variants(pairings) if any(run.moe is not None for run in runs) else None,
        tokens=TokenBudget(available=first.tokens_available, consumed=first.tokens_consumed, reuse=first.reuse),
        unpaired=tuple(run.folder.name for pairing in others for run in pairing.runs if run.seed not in seeds),
        unfinished=tuple(unfinished),
        provenance=_provenance(runs),
        curves=training_curves(runs),
    )
    comparison = with_tolerance(comparison, limits)
    verdicts = tuple(
        method_verdict(
            comparison,
            method,
            [(base.record, run.record) for base, run in pairing.pairs],
            standard=[run.record for run in runs if run.key == (STANDARD, pairing.key[1])],
            diagnosed=diagnosed,
            target=pairing.runs[0].config.get("target"),
            thresholds=limits,
        )
        for pairing, method in zip(pairings, comparison.methods, strict=True)
        if pairing in others
    )
    return replace(comparison, quality=replace(comparison.quality, methods=verdicts))


def _seed_varies(base: Sequence[FinishedRun]) -> str:
    """What two seeds of this experiment differ in."""
    run = base[0]
    if not run.seed_matters:
        return "dropout alone, where there is any: every step trains on all blocks, from the same weights"
    pretrained = run.config.get("from_config") is None and run.moe is None
    if pretrained and len({other.config.get("initial_weights") for other in base}) == 1:
        return "the order of the data and dropout, not the initial weights"
    return "the initial weights, the order of the data and dropout"


def _provenance(runs: Sequence[FinishedRun]) -> ComparedProvenance | None:
    """How the runs were produced; None if it is missing for any of them."""
    known = [run.provenance for run in runs if run.provenance is not None]
    if len(known) < len(runs):
        return None
    return ComparedProvenance(
        runs=len(known),
        commands=tuple(dict.fromkeys(made.command for made in known)),
        seconds=sum(made.seconds for made in known),
        threads=max(made.threads for made in known),
        zloss=", ".join(dict.fromkeys(made.zloss for made in known)),
        torch=", ".join(dict.fromkeys(made.torch for made in known)),
    )


def _compared_method(pairing: Pairing, *, paired: bool) -> ComparedMethod:
    """Deployed metrics over the seeds that have a partner, and both coordinates of the head."""
    shown = [run for _, run in pairing.pairs] or list(pairing.runs)
    metrics, raw, centered = zip(*map(_numbers, shown), strict=True)
    return ComparedMethod(
        method=pairing.key[0],
        coef=pairing.key[1],
        coordinate=shown[0].record.coordinate,
        seeds=tuple(run.seed for run in shown),
        metrics=_summaries(metrics),
        heads=HeadSummaries(_summaries(raw), _summaries(centered)),
        paired=_paired_differences(pairing) if paired else None,
    )


def _paired_differences(pairing: Pairing) -> PairedDifferences:
    """Method minus baseline, seed by seed: deployed values, the head in each coordinate, and the loss trajectories."""
    pairs = [(_numbers(base), _numbers(run)) for base, run in pairing.pairs]
    deployed, raw, centered = (_differences([(base[part], run[part]) for base, run in pairs]) for part in range(3))
    return PairedDifferences(
        pairs=len(pairs),
        deployed=deployed,
        same_coordinate=HeadDifferences(raw, centered),
        trajectory=tuple(_trajectory(base, run) for base, run in pairing.pairs),
    )


Numbers = dict[str, float | None]


def _numbers(run: FinishedRun) -> tuple[Numbers, Numbers, Numbers]:
    """The flat numbers of metrics.json in its order, those of the raw head, and those of the centered head."""

    def numeric(values: dict[str, Any]) -> Numbers:
        kept = {key: value for key, value in values.items() if not isinstance(value, (dict, list, str, bool))}
        return {key: None if value is None else float(value) for key, value in kept.items() if key not in NOT_METRICS}

    heads = run.record.heads
    return numeric(run.metrics), numeric(vars(heads.raw)), numeric(vars(heads.centered))


def _summaries(runs: Sequence[Numbers]) -> dict[str, SeedSummary]:
    """Mean and std over runs of every number that one of them has."""
    found = {}
    for key in runs[0]:
        by_seed = tuple(run.get(key) for run in runs)
        numbers = [value for value in by_seed if value is not None]
        if numbers:
            found[key] = SeedSummary(statistics.fmean(numbers), _std(numbers), len(numbers), by_seed)
    return found


def _differences(pairs: Sequence[tuple[Numbers, Numbers]]) -> dict[str, SeedDifference]:
    """Mean and std of method − baseline, and the mean ratio, of every number that all runs have."""
    found = {}
    for key in pairs[0][1] if pairs else ():
        listed = [(base.get(key), run.get(key)) for base, run in pairs]
        complete = [(before, after) for before, after in listed if before is not None and after is not None]
        if len(complete) < len(listed):
            continue
        gaps = [after - before for before, after in complete]
        ratios = [after / before for before, after in complete if before]
        ratio = statistics.fmean(ratios) if len(ratios) == len(complete) else None
        found[key] = SeedDifference(statistics.fmean(gaps), _std(gaps), tuple(gaps), ratio)
    return found


def _std(numbers: Sequence[float]) -> float | None:
    return statistics.stdev(numbers) if len(numbers) > 1 else None


def _trajectory(base: FinishedRun, run: FinishedRun) -> Trajectory:
    """How far apart the training losses and CE of two matched runs are, step by step."""
    pairs = list(zip(base.steps, run.steps, strict=False))
    gaps = [abs(a.cross_entropy - b.cross_entropy) for a, b in pairs]
    differ = (a.step for a, b in pairs if (a.cross_entropy, a.grad_norm) != (b.cross_entropy, b.grad_norm))
    finite = [gap for gap in gaps if math.isfinite(gap)]
    losses = [abs(a.loss - b.loss) for a, b in pairs]
    return Trajectory(
        seed=run.seed,
        steps=len(pairs),
        first_difference=next(differ, None),
        max_loss_difference=max(losses, default=None) if all(map(math.isfinite, losses)) else None,
        max_ce_difference=max(finite, default=None),
        mean_ce_difference=statistics.fmean(finite) if finite else None,
    )


def _router_variants(pairings: Sequence[Pairing]) -> RouterVariants:
    """Scale and routing of every router variant, and how far its training losses are from the baseline's, which is first."""
    # Matched runs share everything but the router loss, so the first run represents all of them.
    routing = pairings[0].runs[0].record.routing
    return RouterVariants(
        baseline=pairings[0].key[0],
        conventions=tuple(_router_variant(pairing) for pairing in pairings if pairing.key[0] != OFF),
        off=tuple(_router_variant(pairing) for pairing in pairings if pairing.key[0] == OFF),
        top_k=None if routing is None else routing.router.top_k,
        decisions=None if routing is None else routing.router.decisions,
    )


def _router_variant(pairing: Pairing) -> RouterVariant:
    records = [run.record for run in pairing.runs]
    trajectories = [_trajectory(base, run) for base, run in pairing.pairs]
    first = records[0].routing

    def by_seed(name: str) -> tuple[float | None, ...]:
        return tuple(getattr(record.routing, name, None) for record in records)

    return RouterVariant(
        convention=pairing.key[0],
        coef=pairing.key[1],
        applied_coef=None if first is None else first.router.applied_coef,
        s_rel=None if first is None else first.s_rel,
        absolute=None if first is None else first.router_absolute,
        seeds=tuple(run.seed for run in pairing.runs),
        ce=tuple(record.ce for record in records),
        entropy=by_seed("entropy"),
        load_cv=by_seed("load_cv"),
        load_balance=by_seed("load_balance"),
        max_loss_difference=tuple(each.max_loss_difference for each in trajectories),
        first_difference=tuple(each.first_difference for each in trajectories),
    )


def training_curves(runs: Sequence[FinishedRun]) -> tuple[MethodCurves, ...]:
    """Curves and tails for the page, one record per method and coefficient, at most a few hundred points each.

    Seeds are averaged step by step in curves and pooled in tails. A group with a run without step records is left out.
    """
    ordered = sorted(runs, key=lambda run: (run.coef != 0, run.method, run.coef, run.seed))
    telemetry = ROUTED if any(run.moe is not None for run in runs) else DENSE
    return tuple(
        MethodCurves(
            name=name,
            curves={key: _thinned(step_means(seeds, key)) for key in ("cross_entropy", *telemetry)},
            norm_tail=_norm_tail([step.grad_norm for seed in seeds for step in seed]),
        )
        for name, seeds in _grouped(ordered, "{method} {coef:g}").items()
        if all(seeds)
    )


def router_curves(runs: Sequence[FinishedRun]) -> dict[str, dict[str, list[float]]]:
    """Entropy and load CV of every step, averaged over seeds: variant → quantity → values, in the order of the runs."""
    groups = _grouped(runs, "{method}, λ_R {coef:g}")
    return {name: {key: step_means(seeds, key) for key in ("entropy", "load_cv")} for name, seeds in groups.items()}


def _grouped(runs: Sequence[FinishedRun], name: str) -> dict[str, list[list[StepRecord]]]:
    """The steps of every seed by method and coefficient, under this name, or that of the method if it has no coefficient."""
    groups: dict[str, list[list[StepRecord]]] = {}
    for run in runs:
        groups.setdefault(name.format(method=run.method, coef=run.coef) if run.coef else run.method, []).append(
            run.steps
        )
    return groups


def step_means(seeds: Sequence[Sequence[StepRecord]], key: str) -> list[float]:
    """Mean over seeds of every step that all of them have: of a field or of the telemetry; NaN where one has no number."""

    def read(step: StepRecord) -> float:
        value = step.telemetry.get(key) if key not in vars(step) else getattr(step, key)
        return math.nan if value is None else float(value)

    return [statistics.fmean(map(read, steps)) for steps in zip(*seeds, strict=False)]


def _thinned(means: Sequence[float]) -> Curve:
    """Means over neighboring steps, so that at most POINTS remain."""
    length = len(means)
    width = max(1, math.ceil(length / POINTS))
    points: list[tuple[int, float]] = []
    for start in range(0, length, width):
        part = [value for value in means[start : start + width] if math.isfinite(value)]
        if part:
            points.append((min(start + width, length), statistics.fmean(part)))
    return Curve(tuple(step for step, _ in points), tuple(value for _, value in points))


def _norm_tail(norms: Sequence[float]) -> NormTail:
    """Pre-clip norms and the share of steps at or above each: all of the upper tail, every n-th step below it."""
    values = sorted(norm for norm in norms if math.isfinite(norm))
    stride = max(1, len(values) // POINTS)
    kept = [i for i in range(len(values)) if i % stride == 0 or i >= len(values) - POINTS // 3]
    return NormTail(tuple(values[i] for i in kept), tuple(1 - i / len(values) for i in kept))
