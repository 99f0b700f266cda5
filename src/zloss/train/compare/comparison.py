"""Matched runs side by side: mean ± std over seeds, paired differences, and a verdict on every method."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

from zloss.decide.thresholds import Thresholds
from zloss.decide.verdicts.diagnosed import STANDARD
from zloss.decide.verdicts.optimizer import judge_optimizer
from zloss.errors import InputError
from zloss.results.comparison import ComparedProvenance, Comparison, TokenBudget
from zloss.results.quality import Quality
from zloss.results.record import from_plain
from zloss.train.compare.acceptance import DIAGNOSED, judge
from zloss.train.compare.curves import training_curves
from zloss.train.compare.differences import compared_method, numbers_in
from zloss.train.compare.finished_run import FinishedRun
from zloss.train.compare.pairing import baseline_runs, pair_runs
from zloss.train.compare.provenance import made_by
from zloss.train.compare.routers import router_section


def compare_runs(
    runs: Sequence[FinishedRun],
    *,
    baseline: str | None = None,
    tolerance_ppl: float | None = None,
    diagnosed: str | None = None,
    unfinished: Sequence[str] = (),
    thresholds: Thresholds | None = None,
) -> Comparison:
    """Pair by seed, refuse what is not matched, and judge every method.

    The default `baseline` is CE, and the token-layer mean among router variants. `diagnosed` replaces the quantity that
    each method is meant to lower.
    """
    limits = thresholds or Thresholds()
    base = baseline_runs(runs, baseline)
    pairings = pair_runs(runs, base)
    others = [pairing for pairing in pairings if pairing.key != base[0].key]
    if tolerance_ppl is not None and not math.isfinite(tolerance_ppl):
        raise InputError(f"`tolerance_ppl` is expected to be a finite number, but got {tolerance_ppl!r}.")
    stated = tolerance_ppl is not None
    if tolerance_ppl is None:
        tolerance_ppl = limits.quality_tolerance * _baseline_ppl(base)
    seeds = {run.seed for run in base}
    routed = any(run.moe is not None for run in runs)
    first = base[0].metrics
    made = made_by(runs)
    comparison = Comparison(
        model=base[0].model,
        baseline=base[0].method,
        baseline_coef=base[0].coef,
        seeds=tuple(sorted(seeds)),
        steps=first.get("steps"),
        methods=tuple(compared_method(pairing, paired=pairing in others) for pairing in pairings),
        quality=Quality(
            tolerance_ppl=tolerance_ppl,
            tolerance="stated"
            if stated
            else f"{100 * limits.quality_tolerance:.3g}% of the baseline's PPL, as none was stated",
            diagnosed=diagnosed or DIAGNOSED,
            seed_varies=_seed_varies(base),
        ),
        router=router_section(pairings, base[0].method) if routed else None,
        tokens=TokenBudget(
            available=first.get("tokens_available"), consumed=first.get("tokens_consumed"), reuse=first.get("reuse")
        ),
        unpaired=tuple(run.folder.name for pairing in others for run in pairing.runs if run.seed not in seeds),
        unfinished=tuple(unfinished),
        provenance=None if made is None else from_plain(ComparedProvenance, made, path="provenance"),
        curves=training_curves(runs),
    )
    verdicts = []
    for pairing, method in zip(pairings, comparison.methods, strict=True):
        if pairing in others:
            standard = [run for run in runs if run.key == (STANDARD, pairing.coef)]
            optimizer = judge_optimizer(comparison, method, limits) if pairing.pairs else None
            verdicts.append(
                judge(
                    pairing,
                    optimizer,
                    tolerance=tolerance_ppl,
                    standard=standard,
                    diagnosed=diagnosed,
                    thresholds=limits,
                )
            )
    return replace(comparison, quality=replace(comparison.quality, methods=tuple(verdicts)))


def _seed_varies(base: Sequence[FinishedRun]) -> str:
    """What two seeds of this experiment differ in."""
    run = base[0]
    if not run.seed_matters:
        return "dropout alone, where there is any: every step trains on all blocks, from the same weights"
    pretrained = run.config.get("from_config") is None and run.moe is None
    if pretrained and len({other.config.get("initial_weights") for other in base}) == 1:
        return "the order of the data and dropout, not the initial weights"
    return "the initial weights, the order of the data and dropout"


def _baseline_ppl(base: Sequence[FinishedRun]) -> float:
    known = numbers_in(run.metrics.get("ppl") for run in base)
    if not known:
        raise InputError("the ppl of the baseline is not a number in any run.")
    return statistics.fmean(known)
