"""A filled recommendation and plan without any run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from zloss.decide.decision_map import decide
from zloss.decide.recommend import with_verdict
from zloss.results.comparison import Comparison
from zloss.results.files import read_record
from zloss.results.provenance import Provenance
from zloss.results.recommendation import Arm, ArmResult, LeftOut, Paste, Recommendation, RecommendPlan, Tested

DOCUMENTED = Path(__file__).parents[2] / "docs/results"
TESTED = Tested("tiny <model>", "a text", 5e-5, 100, 12_800, assumed=("a cosine schedule", "a fresh Adam state"))


def made_up_recommendation() -> Recommendation:
    """Centered, confirmed; the verdicts are those of the committed comparison of SmolLM2, in which it is accepted."""
    compared = read_record(DOCUMENTED / "matched_smollm2.json", Comparison)
    (centered,) = (one for one in compared.quality.methods if (one.method, one.coef) == ("centered", 1e-3))
    accepted = replace(centered, verdict="accepted", accepted=True)
    found = Recommendation(
        action="",
        objective="centered",
        coef=1e-3,
        level="confirmed here",
        confidence="",
        why=("Centered on confirmation: quality holds.", "Source coordinate fired: p99 |μ| = 15.5."),
        cost=("Quality: ΔCE = +0.003 nat.",),
        not_guaranteed=("Source coordinate: a smaller A_p^99.",),
        stages=decide(None, comparisons=(compared,)),
        paste=(
            Paste("plain loop", "objective = zloss.CenteredZLoss(coef=0.001)", "mean over valid tokens"),
            Paste("Liger", "lse_square_scale=0.001", "cannot be expressed: its Z is λ(log Z)²", exact=False),
            Paste("Megatron-LM", "", "cannot be expressed: routers only", exact=False),
        ),
        tested=TESTED,
        arms=(
            ArmResult(
                *("centered", 1e-3, "passed", ("Source coordinate",), "passes selection", "λ", 0.003, 0.88, 0.8, 100),
                confirmed="accepted",
            ),
            ArmResult("standard", 1e-3, "stopped", (), "its rejection was certain: max ‖g‖₂ × 5", steps=31),
            ArmResult("factorized", 1e-3, "left out", (), "the budget has no room for it"),
        ),
        confirmation=(accepted,),
        selection_seed=1,
        confirmation_seeds=(2, 3),
        tolerance_ppl=0.24,
        budget_seconds=2700.0,
        seconds=2412.5,
        notes=("the budget had no room for seed 4",),
        provenance=Provenance(zloss="0", torch="0", command="zloss recommend", started="2026-01-01T00:00:00+00:00", seconds=1.0),
    )  # fmt: skip
    return with_verdict(found)


def made_up_plan() -> RecommendPlan:
    return RecommendPlan(
        identity="0123",
        model="tiny",
        text="a text",
        arms=(Arm("ce", 0.0, (), "the baseline", "zloss.CrossEntropy()"), Arm("centered", 1e-3, ("Source coordinate",), "λ")),
        left_out=(LeftOut("standard", 1e-3, "the budget has no room for it"),),
        seeds=(1, 2, 3),
        steps=100,
        settings={"lr": 5e-5, "schedule": "cosine"},
        request="budget 2700.0",
        checkpoint_every=25,
        budget_seconds=2700.0,
        seconds=2000.0,
        step_seconds=1.5,
        run_seconds=60.0,
    )  # fmt: skip
