"""One filled record of every result file, for the property tests over them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import torch

from tests import straight_audit
from tests.decide.made_up_drift import made_up_drift, made_up_run
from tests.decide.made_up_recommendation import made_up_plan, made_up_recommendation
from zloss.decide.answer import decide_results
from zloss.decide.decision_map import with_decisions
from zloss.results.audit import AuditReport
from zloss.results.comparison import Comparison, HeadSummaries, RouterVariant, RouterVariants
from zloss.results.decision import DecisionMaps
from zloss.results.files import read_record
from zloss.results.implementation_audit import (
    AppliedLoss,
    Fp16Headroom,
    ImplementationAudit,
    StoredLogits,
    UpdateErrors,
)
from zloss.results.loss_audit import LossAudit, TargetModelSource
from zloss.results.record import ResultRecord
from zloss.results.reproduction import ReproductionRecord
from zloss.results.router import MeasuredScale, RouterFindings, RouterLayer, RouterScaleTable, RouterTail
from zloss.router.conventions import router_scale_table

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


def implementation_example(audit: AuditReport) -> ImplementationAudit:
    """A line in every section, on the model and text of `audit`."""
    return ImplementationAudit(
        model=audit.model,
        corpus=audit.corpus,
        coef=1e-4,
        target=4.0,
        source=(StoredLogits("bf16", 1.0, 96, 2e-4, 0.02, 0.05, 0.1, 0.9998),),
        implementations=(
            AppliedLoss("dense", "zloss, dense", "logits", "bf16", 16, False, 4.0, 1e-5, 0.01, 0.9999, 0.02, 0.999, 2e-3, 0.1),
        ),
        updates=(UpdateErrors("bf16", 1.0, "z", "all", 96, 5e-3, 0.9999, 0.08, 0.99),),
        overflow=(
            Fp16Headroom("ce", 0.0, 2, 1.5, 8.0, 8188.0, {"psi_65536": 1.0}),
            Fp16Headroom("standard", 1e-4, 2, 1.6, 9.0, 7278.0),
        ),
        provenance=audit.provenance,
        autocast="bf16",
        timings={"source": 1.5},
        reasons={"updates": "a reason"},
        notes=("Liger cross-entropy: not installed",),
    )  # fmt: skip


@cache
def example_results() -> dict[str, ResultRecord]:
    """Schema → record; every optional section is there, and lists have a member."""
    bare = AuditReport.from_dict(straight_audit.tiny_report(blocks=8))
    assert bare.figures.geometry is not None
    columns = {name: value[:3] for name, value in vars(bare.figures.geometry).items() if isinstance(value, tuple)}
    audit: AuditReport = with_decisions(
        replace(
            bare,
            router=ROUTERS,
            quantile_bounds={"heads.raw.p_z_999": {"lower": 1.0, "upper": 1.5, "count": 10**8}},
            reasons={"figures": "a reason"},
            figures=replace(
                bare.figures, histograms=bare.figures.histograms[:1], geometry=replace(bare.figures.geometry, **columns)
            ),
            extreme_tokens=bare.extreme_tokens[:1],
        )
    )
    tokens, _, _ = straight_audit.run_tiny(straight_audit.tiny_model())
    on_model = TargetModelSource(
        "tiny", "a text", 96, 2, "float32", 512, "logits", "z", 1e-8, 1e-6, reason="an example"
    )
    loss = replace(LossAudit.from_dict(straight_audit.loss_audit(tokens, torch.bfloat16)), target_model=on_model)
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
        model="smollm2",
        methods=(method,),
        router=RouterVariants("token_layer_mean", (VARIANT,), (VARIANT,), top_k=2, decisions=96),
        unpaired=("standard-0.3-s3",),
        unfinished=("standard-0.3-s4",),
        curves=compared.curves[:1],
    )
    maps = DecisionMaps(("a/report.json",), decide_results((audit,), (loss,), (compared,)).maps)
    scales: RouterScaleTable = router_scale_table(1e-3, "megatron", layers=16, top_k=8, tokens=4096)
    measured = MeasuredScale(1e-3, 0.0, (1e-5,), 2.0, 2.0, (2.0,), 0.0, 1e-7, name="a trainer")
    reproduced = read_record(DOCUMENTED / "tab_pretrained.json", ReproductionRecord)
    drift, kept = made_up_drift([2.0, 2.0, 9.0]), made_up_run([2.0])[0]
    kept = replace(kept, blocks=replace(kept.blocks, tails={"shift.raw": ((2.0, 1.0),) * len(kept.blocks.tokens)}))
    advice = made_up_recommendation()
    advice = replace(advice, stages=decide_results((audit,), (loss,), (compared,)).maps[0].decisions)
    protocols = (drift, kept, advice, made_up_plan())
    records = (audit, loss, compared, maps, scales, measured, reproduced, implementation_example(audit), *protocols)
    return {record.SCHEMA: record for record in records}
