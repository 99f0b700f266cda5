"""Matched runs side by side: mean ± std over seeds, paired differences, and the paper's rule of acceptance."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from zloss.errors import InputError
from zloss.results.comparison import ComparedProvenance, Comparison, Quality, TokenBudget
from zloss.results.record import from_plain
from zloss.train.compare.acceptance import judge
from zloss.train.compare.curves import training_curves
from zloss.train.compare.differences import compared_method, numbers_in
from zloss.train.compare.finished_run import FinishedRun
from zloss.train.compare.pairing import baseline_runs, pair_runs
from zloss.train.compare.provenance import made_by
from zloss.train.compare.routers import router_section

TOLERANCE_SHARE = 0.01
"""Tolerated rise of PPL where none is stated, as a share of the baseline's."""


def compare_runs(
    runs: Sequence[FinishedRun],
    *,
    baseline: str | None = None,
    tolerance_ppl: float | None = None,
    diagnosed: str = "p_z_999",
    unfinished: Sequence[str] = (),
) -> Comparison:
    """Pair by seed, refuse what is not matched, and judge every method.

    The default `baseline` is CE, and the token-layer mean among router variants.
    """
    base = baseline_runs(runs, baseline)
    pairings = pair_runs(runs, base)
    others = [pairing for pairing in pairings if pairing.key != base[0].key]
    if tolerance_ppl is not None and not math.isfinite(tolerance_ppl):
        raise InputError(f"`tolerance_ppl` is expected to be a finite number, but got {tolerance_ppl!r}.")
    stated = tolerance_ppl is not None
    if tolerance_ppl is None:
        tolerance_ppl = TOLERANCE_SHARE * _baseline_ppl(base)
    seeds = {run.seed for run in base}
    routed = any(run.moe is not None for run in runs)
    first = base[0].metrics
    made = made_by(runs)
    return Comparison(
        baseline=base[0].method,
        baseline_coef=base[0].coef,
        seeds=tuple(sorted(seeds)),
        steps=first.get("steps"),
        methods=tuple(compared_method(pairing, paired=pairing in others) for pairing in pairings),
        quality=Quality(
            tolerance_ppl=tolerance_ppl,
            tolerance="stated" if stated else f"{TOLERANCE_SHARE:.0%} of the baseline's PPL, as none was stated",
            diagnosed=diagnosed,
            methods=tuple(judge(pairing, diagnosed, tolerance_ppl) for pairing in others),
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


def _baseline_ppl(base: Sequence[FinishedRun]) -> float:
    known = numbers_in(run.metrics.get("ppl") for run in base)
    if not known:
        raise InputError("the ppl of the baseline is not a number in any run.")
    return statistics.fmean(known)
