"""One filled record of every result file, for the laws over them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from tests import straight_audit
from tests.decide.drift.made_up_run import made_up_drift, made_up_run
from zloss.decide.decided_results import decide_results
from zloss.decide.decision_map import with_decisions
from zloss.results.audit import AuditReport, QuantileBound
from zloss.results.comparison import Comparison, HeadSummaries, RouterVariant, RouterVariants
from zloss.results.decision import DecisionMaps
from zloss.results.files import read_record
from zloss.results.loss_audit import LossAudit
from zloss.results.router import MeasuredScale, RouterFindings, RouterLayer, RouterTail
from zloss.results.router_scale import RouterScaleTable
from zloss.results.schema import ResultRecord
from zloss.source.router.scale_table import router_scale_table

DOCUMENTED = Path(__file__).parents[2] / "docs/results"
TAIL = RouterTail(0.5, 0.25, 1.5, 2.5)
ROUTERS = RouterFindings(
    scoring="softmax", softmax_normalizer=True, layers=1, model_layers=2, experts=4, top_k=2, decisions=96, nonfinite=0,
    coef=1e-3, convention="token_layer_mean", target=1.386, absolute=1e-5, relative=1.0, log_z=TAIL, violation=TAIL,
    entropy=1.2, load_cv=0.3, correction_norm=1e-6, per_layer=(RouterLayer("layers.0.gate", 1.5, 1.2, 0.3),),
    applied=MeasuredScale(1e-3, 0.0, (1e-5,), 2.0, 2.0, (2.0,), 0.0, 1e-7), reasons=("no labels",),
)  # fmt: skip
VARIANT = RouterVariant(
    convention="active_route_sum", coef=1e-3, applied_coef=1e-3, s_rel=2.0, absolute=1e-5, seeds=(1, 2), ce=(5.5, None),
    entropy=(1.2, 1.3), load_cv=(0.3, 0.4), load_balance=(2.0, 2.1), max_loss_difference=(1e-3, None),
    first_difference=(1, None),
)  # fmt: skip


@cache
def example_results() -> dict[str, ResultRecord]:
    """Schema → record; every optional section is there, and lists have a member."""
    bare = straight_audit.tiny_report(blocks=8)
    assert bare.figures.geometry is not None
    columns = {name: value[:3] for name, value in vars(bare.figures.geometry).items() if isinstance(value, tuple)}
    audit: AuditReport = with_decisions(
        replace(
            bare,
            router=ROUTERS,
            quantile_bounds={"heads.raw.p_z_999": QuantileBound(1.0, 1.5, 10**8)},
            reasons={"figures": "a reason"},
            figures=replace(
                bare.figures,
                histograms=bare.figures.histograms[:1],
                geometry=replace(bare.figures.geometry, **columns),
            ),
            extreme_tokens=bare.extreme_tokens[:1],
        )
    )
    tokens, _, _ = straight_audit.run_tiny(straight_audit.tiny_model())
    loss: LossAudit = straight_audit.loss_audit(tokens, torch.bfloat16)
    compared = read_record(DOCUMENTED / "matched_smollm2.json", Comparison)
    # The second method has everything: differences, trajectories, a verdict. One quantity stands for all.
    method = compared.methods[1]
    assert method.paired is not None
    method = replace(
        method,
        metrics={"ppl": method.metrics["ppl"]},
        heads=HeadSummaries({"a_p_99": method.heads.raw["a_p_99"]}, {"a_p_99": method.heads.centered["a_p_99"]}),
        paired=replace(method.paired, deployed={"ppl": method.paired.deployed["ppl"]}),
    )
    compared = replace(
        compared,
        methods=(method,),
        router=RouterVariants("token_layer_mean", (VARIANT,), (VARIANT,)),
        unpaired=("standard-0.3-s3",),
        unfinished=("standard-0.3-s4",),
        curves=compared.curves[:1],
    )
    maps = DecisionMaps(("a/report.json",), decide_results((audit,), (loss,), (compared,)).maps)
    scales: RouterScaleTable = router_scale_table(1e-3, "megatron", layers=16, top_k=8, tokens=4096)
    drift = made_up_drift([2.0, 2.0, 9.0])
    kept = made_up_run([2.0])[0]
    blocks = replace(kept.blocks, tails={"shift.raw": ((2.0, 1.0),)})
    return {
        record.SCHEMA: record for record in (audit, loss, compared, maps, scales, drift, replace(kept, blocks=blocks))
    }
