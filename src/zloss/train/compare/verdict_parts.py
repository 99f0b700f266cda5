"""The three parts of a verdict, read from the runs of a method and the baseline's runs of the same seeds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import numpy as np

from zloss.decide.thresholds import Thresholds
from zloss.decide.verdicts.coordinate import BlockMean, BlockTail, BlockValues, judge_effect, judge_ratio
from zloss.decide.verdicts.diagnosed import DiagnosedQuantity, diagnosed_quantities, stated_quantity
from zloss.decide.verdicts.interval import paired_interval
from zloss.decide.verdicts.part import all_must_hold
from zloss.decide.verdicts.quality import BlockCrossEntropies, judge_quality, judge_quality_by_seed
from zloss.decide.verdicts.router_scale import judge_scale
from zloss.results.moe_config import OFF
from zloss.results.validation_blocks import ValidationBlocks
from zloss.results.verdict import VerdictPart
from zloss.train.compare.finished_run import FinishedRun
from zloss.train.compare.pairing import Pairing

Pairs = Sequence[tuple[FinishedRun, FinishedRun]]


def quality_part(pairing: Pairing, tolerance_ppl: float) -> VerdictPart:
    """CE on the same validation blocks, method minus baseline."""
    records = [(base.record, run.record) for base, run in pairing.pairs]
    values = [(base.ce, run.ce) for base, run in records]
    if any(base is None for base, _ in values):
        return VerdictPart("open", "the baseline's validation CE is not finite on some seed.")
    if any(run.ce is None or run.valid_nonfinite.nan or run.valid_nonfinite.inf for _, run in records):
        return VerdictPart("fails", "its validation CE is not finite on every token and seed.")
    finite = [(base, run) for base, run in values if base is not None and run is not None]
    baseline_ppl = math.exp(statistics.fmean(base for base, _ in finite))
    blocks = [(base.validation_blocks, run.validation_blocks) for base, run in records]
    both = [(base, run) for base, run in blocks if base is not None and run is not None]
    if len(both) < len(blocks) or any(base.tokens != run.tokens or None in base.ce + run.ce for base, run in both):
        gaps = [run - base for base, run in finite]
        return judge_quality_by_seed(gaps, baseline_ppl=baseline_ppl, tolerance_ppl=tolerance_ppl)
    ce = BlockCrossEntropies(
        np.array([base.ce for base, _ in both], dtype=np.float64),
        np.array([run.ce for _, run in both], dtype=np.float64),
        np.array(both[0][0].tokens, dtype=np.float64),
    )
    return judge_quality(ce, baseline_ppl=baseline_ppl, tolerance_ppl=tolerance_ppl)


def coordinate_part(
    pairing: Pairing, standard: Sequence[FinishedRun], stated: str | None, thresholds: Thresholds
) -> VerdictPart | None:
    """The quantity that the method is meant to lower; None for a method without one.

    `standard` are the runs of Standard at the method's λ; `stated` replaces the method's own quantity.
    """
    first = pairing.runs[0]
    if first.moe is not None:
        return _scale(pairing, thresholds)
    deployed = first.record.coordinate
    if stated is not None:
        quantity = stated_quantity(stated, deployed)
        if quantity is None:
            return VerdictPart("open", f"{stated} is not kept block by block, so its spread over text is unknown.")
        return _judge_quantity(quantity, pairing.pairs)
    if first.config.get("target") is not None:
        return VerdictPart("open", "the runs have a target of their own, and validation is measured about c = log V.")
    quantities = diagnosed_quantities(pairing.method, deployed, pairing.pairs[0][0].record.coordinate)
    if not quantities:
        return None
    if all(quantity.against == "baseline" for quantity in quantities):
        return all_must_hold([_judge_quantity(quantity, pairing.pairs) for quantity in quantities])
    references = {run.seed: run for run in standard}
    pairs = [(references[run.seed], run) for _, run in pairing.pairs if run.seed in references]
    if not pairs:
        return VerdictPart("open", f"no run of standard at λ {pairing.coef:g} is here to compare with; run it as well.")
    return all_must_hold([*(_judge_quantity(quantity, pairs) for quantity in quantities), _gradient_norm(pairs)])


def _judge_quantity(quantity: DiagnosedQuantity, pairs: Pairs) -> VerdictPart:
    found = [
        (
            _values(reference.record.validation_blocks, quantity.reference, quantity.quantile),
            _values(run.record.validation_blocks, quantity.method, quantity.quantile),
        )
        for reference, run in pairs
    ]
    complete = [(base, run) for base, run in found if base is not None and run is not None]
    if len(complete) < len(found) or any(base.tokens_B != run.tokens_B for base, run in complete):
        complete = []
    return judge_effect(quantity.name, complete, quantity.quantile or 0.999)


def _values(blocks: ValidationBlocks | None, key: str, quantile: float | None) -> BlockValues | None:
    if blocks is None:
        return None
    if quantile is not None:
        return BlockTail(blocks.tails[key], blocks.tokens) if key in blocks.tails else None
    means = blocks.means.get(key, ())
    known = tuple(mean for mean in means if mean is not None)
    return BlockMean(known, blocks.tokens) if known and len(known) == len(means) else None


def _gradient_norm(pairs: Pairs) -> VerdictPart:
    """p99 ‖g‖₂ over steps against Standard's, seed by seed; it has no spread over text."""
    name = "p99 ‖g‖₂ against Standard"
    norms = [(base.record.training.grad_norm_p99, run.record.training.grad_norm_p99) for base, run in pairs]
    logs = [math.log(run / base) for base, run in norms if base and run]
    if len(logs) < len(norms):
        return VerdictPart("open", f"{name} is zero or not finite on some seed.")
    return judge_ratio(name, paired_interval(logs, 0.0, 0), {"quantity": name})


def _scale(pairing: Pairing, thresholds: Thresholds) -> VerdictPart | None:
    """s_rel of a router variant, the same on every seed; None for the variant without a router loss."""
    if pairing.method.split(" + ")[0] == OFF:
        return None
    routing = pairing.runs[0].record.routing
    return judge_scale(None if routing is None else routing.s_rel, pairing.coef, thresholds.router_scale_tolerance)
