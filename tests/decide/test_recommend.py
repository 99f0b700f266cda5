"""Candidates, the time plan, early stopping, and the answer of a recommendation, on made-up numbers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.decide.made_up_recommendation import made_up_recommendation
from tests.measured_reports import with_fired
from zloss.decide.recommend import (
    CE_ARM,
    EvaluatedArm,
    Speed,
    budget_coef,
    candidates,
    certain_rejection,
    choose,
    confirming_runs,
    decide_answer,
    evaluate_arms,
    extra_seeds,
    least_endpoints,
    named_arms,
    nothing_calls_for_it,
    part_sentences,
    plan_time,
    planned_runs,
    ranked,
    with_references,
    with_verdict,
)
from zloss.decide.thresholds import Thresholds
from zloss.decide.verdict_parts import endpoint_limits, judge_endpoints
from zloss.errors import InputError
from zloss.optimizer.endpoints import endpoints
from zloss.protocol.recommend_answer import added_seeds, confirming_verdict
from zloss.results.audit import AuditReport
from zloss.results.comparison import (
    ComparedMethod,
    Comparison,
    HeadSummaries,
    Interval,
    Quality,
    SeedSummary,
    Verdict,
    VerdictName,
    VerdictPart,
    VerdictParts,
)
from zloss.results.decision import Consequence, LambdaBudget
from zloss.results.recommendation import Arm, Recommendation
from zloss.results.record import to_plain
from zloss.results.steps import AdamSample, StepRecord

BUDGET = LambdaBudget(r_z=0.05, raw=3.7e-4, centered=8.2e-3)


CHECKPOINT = ("Source coordinate", "Objective decomposition", "Architectural transport", "Shared pathway")
CENTERED, FACTORIZED, STANDARD = ([(name, coef), (name, tenth)] for name, coef, tenth in (
    ("centered", 1e-3, 1e-4), ("factorized", 3e-4, 3e-5), ("standard", 3e-4, 3e-5)
))  # fmt: skip


@pytest.mark.parametrize(
    ("fired", "wanted"),
    [
        (CHECKPOINT, [CENTERED[0], FACTORIZED[0], STANDARD[0], ("gain-aware", 3e-4), CENTERED[1], FACTORIZED[1], STANDARD[1]]),
        (("Source coordinate",), CENTERED),
        (("Shared pathway",), STANDARD),
        (("Objective decomposition",), FACTORIZED),
        ((), STANDARD),  # the usual recipe, to compare with
    ],
)  # fmt: skip
def test_every_stage_proposes_its_method_in_the_order_of_actions(
    report: AuditReport, fired: tuple[str, ...], wanted: list[tuple[str, float]]
) -> None:
    found = candidates(with_fired(report, *fired, lambda_budget=BUDGET))
    assert [arm.key for arm in found] == wanted
    assert ("no stage fired" in found[0].note) is (not fired)
    # An arm names the stages that proposed it.
    assert {stage for arm in found for stage in arm.stages} == set(fired)


@pytest.mark.parametrize(
    ("solved", "coef", "said"),
    [
        (3.7e-4, 3e-4, "λ of R_Z = 0.05"),
        (0.0873, 1e-3, "would allow 0.087"),
        (2.2e-6, 2e-6, "below the usual range"),
        (9.99e-4, 9e-4, "λ of R_Z = 0.05"),
        (1e-5, 1e-5, "λ of R_Z = 0.05"),
        (None, 1e-4, "was not measured"),
    ],
)
def test_a_coefficient_never_exceeds_its_budget(solved: float | None, coef: float, said: str) -> None:
    found, note = budget_coef(solved, 0.05)
    assert found == coef
    assert said in note


def test_gain_aware_comes_with_standard_at_its_coefficient() -> None:
    arms = (Arm("gain-aware", 1e-4), Arm("standard", 1e-3))
    assert [arm.key for arm in with_references(arms)] == [("standard", 1e-4), *(arm.key for arm in arms)]
    assert with_references(arms[1:]) == arms[1:]
    planned, seeds, _ = plan_time(arms[:1], (1, 2), SPEED, budget=None)
    assert planned_runs(planned, seeds) == 3 + 3  # the confirmation has room for the reference


ARMS = (Arm("centered", 1e-3), Arm("standard", 1e-3), Arm("factorized", 1e-3))
SPEED = Speed(step=1.0, run=20.0, fixed=60.0)
"""A run of 100 steps takes 120 s."""
SEEDS = (1, 2, 3)


@pytest.mark.parametrize(
    ("runs", "arms", "seeds"), [(8, 3, 3), (7, 2, 3), (6, 1, 3), (5, 2, 2), (4, 1, 2)], ids=lambda value: str(value)
)
def test_arms_are_left_out_before_seeds_and_no_run_is_shorter(runs: int, arms: int, seeds: int) -> None:
    budget = (60 + runs * 120) / 0.9 + 1
    assert plan_time(ARMS, SEEDS, SPEED, budget=budget) == (ARMS[:arms], SEEDS[:seeds], 100)
    assert planned_runs(ARMS[:arms], SEEDS[:seeds]) == runs
    assert SPEED.seconds(runs, 100) <= 0.9 * budget


@pytest.mark.parametrize(
    ("budget", "steps", "planned"), [(4000, None, 400), (1e6, None, 1000), (4000, 100, 100), (None, 150, 150)]
)
def test_room_behind_all_arms_makes_the_runs_longer_up_to_a_limit(
    budget: float | None, steps: int | None, planned: int
) -> None:
    assert plan_time(ARMS, SEEDS, SPEED, budget=budget, steps=steps) == (ARMS, SEEDS, planned)
    assert SPEED.seconds(8, planned) == 60 + 8 * (20 + planned) <= 0.9 * (budget or math.inf)


def test_kept_runs_of_a_folder_cost_nothing_and_the_time_spent_there_is_said() -> None:
    """Nine minutes were refused for one more seed, because the six runs in the folder were counted as runs to train."""
    kept = {(*arm.key, 1) for arm in (CE_ARM, *ARMS)} | {
        (*arm.key, seed) for arm in (CE_ARM, ARMS[0]) for seed in (2, 3)
    }
    assert planned_runs(ARMS, SEEDS, kept) == 0
    assert planned_runs(ARMS, (*SEEDS, 4), kept) == 2
    # All arms with a run on a seed do not make more than the runs that it needs.
    assert confirming_runs(ARMS, 2, {(*arm.key, 2) for arm in ARMS}) == 1
    spent = replace(SPEED, fixed=960.0, spent=900.0)
    budget = 900 + (60 + 2 * 120) / 0.9 + 1
    assert plan_time(ARMS, (*SEEDS, 4), spent, budget=budget, steps=100, kept=kept) == (ARMS, (*SEEDS, 4), 100)
    # An answer from kept runs alone needs no time.
    assert plan_time(ARMS, SEEDS, spent, budget=1.0, steps=100, kept=kept) == (ARMS, SEEDS, 100)
    with pytest.raises(InputError, match="need about 25 min, of which 15 min are already spent in this folder"):
        plan_time(ARMS[:1], SEEDS, spent, budget=budget, steps=100)


def test_too_small_a_budget_is_one_sentence_that_names_what_is_needed() -> None:
    wanted = r"`budget` is 9 min, but CE and one arm on two seeds, 4 runs of 100 steps .* need about 10 min"
    with pytest.raises(InputError, match=wanted):
        plan_time(ARMS, SEEDS, SPEED, budget=540)
    with pytest.raises(InputError, match="200 steps"):
        plan_time(ARMS[:1], (1, 2), SPEED, budget=540, steps=200)
    # The reference of Gain-aware was not counted: the time that was named was too short again.
    with pytest.raises(InputError, match=r"6 runs of 100 steps .* need about 15 min"):
        plan_time((Arm("gain-aware", 1e-4),), (1, 2), SPEED, budget=540)
    assert plan_time(ARMS[:1], (1, 2), SPEED, budget=601, steps=100) == (ARMS[:1], (1, 2), 100)


@pytest.mark.parametrize(
    ("seeds", "wanted"),
    [((1, 2), (3, 4, 5, 6)), ((1, 2, 3), (4, 5, 6)), ((9, 4), (10, 11, 12, 13)), (range(6), ()), (range(9), ())],
)
def test_time_left_over_buys_seeds_until_five_have_confirmed(seeds: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    assert extra_seeds(seeds) == wanted


STEPS = 100


def step(number: int, norm: float = 1.0, loss: float = 3.0) -> StepRecord:
    adam = AdamSample(1e-4, 1.0, 1.0, 1.0, 1.0, 10.0)
    return StepRecord(number, loss, loss, 0.0, norm, norm / 10, 10.0, norm, norm / 10, adam=adam)


CALM = [step(i) for i in range(1, STEPS + 1)]
BASELINE = to_plain(endpoints(CALM, clip=1.0))


def reason(records: list[StepRecord]) -> str | None:
    return certain_rejection(records, BASELINE, steps=STEPS, spike=0.5, thresholds=Thresholds())


NONFINITE = replace(step(2), gradient="nan", grad_norm=math.nan, grad_inf=math.nan)
SPIKES = [step(1), step(2, loss=4.0), step(3), step(4, loss=4.0)]


@pytest.mark.parametrize(
    ("records", "said"),
    [
        (CALM, ""),
        ([*CALM[:4], step(5, norm=3.5)], "max ‖g‖₂ × 3.5"),
        ([*CALM[:4], step(5, norm=2.9)], ""),
        ([CALM[0], NONFINITE], "share of steps with a nonfinite gradient"),
        # Events count over the whole run: two of 99 pairs are 0.0202, just above the limit of 0.02, and one is below.
        (SPIKES, "spike rate"),
        (SPIKES[:3], ""),
    ],
)
def test_an_arm_stops_as_soon_as_its_rejection_is_certain(records: list[StepRecord], said: str) -> None:
    assert all(reason(records[:done]) is None for done in range(1, len(records)))
    assert (reason(records) or "").startswith(said)
    assert bool(reason(records)) is bool(said)


def test_no_arm_is_stopped_that_the_whole_run_would_not_reject() -> None:
    """Whatever the remaining steps are, the least endpoints are not above those of the finished run."""
    wild = [step(i, norm=1 + (i * 7919 % 23), loss=3 + (i * 31 % 5) / 4) for i in range(1, STEPS + 1)]
    events = [key for key in BASELINE if key.startswith("phi_")]
    whole = to_plain(endpoints(wild, clip=1.0))
    for done in range(1, STEPS + 1):
        least = least_endpoints(wild[:done], events, steps=STEPS, spike=0.5)
        assert all(value is None or value <= whole[key] + 1e-12 for key, value in least.items()), done
    assert reason(wild) is not None
    limits = endpoint_limits(Thresholds(), BASELINE.keys() & whole.keys(), STEPS)
    assert judge_endpoints(limits, [(BASELINE, whole)]).state == "fails"


def arm(
    method: str = "centered", coef: float = 1e-3, *, passes: bool = True, verdict: VerdictName = "inconclusive"
) -> EvaluatedArm:
    found = Verdict(method, coef, delta_ppl=0.0, accepted=None, verdict=verdict, reasons=())
    return EvaluatedArm(found, 0.0, 0.9, 0.8, "" if passes else "ΔCE is above the tolerance")


HEAD = arm("centered-head", 0.0, verdict="accepted")


FAILS, REJECTED = arm(passes=False), arm(passes=False, verdict="rejected")
ACCEPTED = arm(verdict="accepted")
Made = EvaluatedArm | None


@pytest.mark.parametrize(
    ("chosen", "confirmed", "head", "options", "wanted"),
    [
        (arm(), ACCEPTED, None, {}, ("confirmed here", "centered", 1e-3)),
        (arm(), arm(), HEAD, {}, ("direction only", "centered", 1e-3)),
        (arm(), FAILS, None, {}, ("undecided", None, None)),
        (arm(), FAILS, HEAD, {}, ("confirmed here", "centered-head", 0.0)),
        (FAILS, REJECTED, None, {}, ("confirmed here", "ce", 0.0)),
        (FAILS, FAILS, None, {}, ("direction only", "ce", 0.0)),
        (FAILS, arm(), None, {}, ("undecided", None, None)),
        (FAILS, FAILS, HEAD, {}, ("confirmed here", "centered-head", 0.0)),
        (FAILS, arm(), HEAD, {}, ("confirmed here", "centered-head", 0.0)),
        (HEAD, HEAD, HEAD, {}, ("confirmed here", "centered-head", 0.0)),
        (arm(), None, None, {}, ("undecided", None, None)),
        (None, None, None, {}, ("undecided", None, None)),
        (None, None, None, {"stopped": 2}, ("direction only", "ce", 0.0)),
        (None, None, HEAD, {"stopped": 2}, ("confirmed here", "centered-head", 0.0)),
        (arm(), ACCEPTED, None, {"diagnosed": False}, ("direction only", "ce", 0.0)),
        (arm(), REJECTED, None, {"diagnosed": False}, ("confirmed here", "ce", 0.0)),
    ],
)
def test_every_row_of_the_table(
    chosen: Made, confirmed: Made, head: Made, options: dict[str, Any], wanted: tuple[str, str | None, float | None]
) -> None:
    found = decide_answer(chosen, confirmed, head, **{"diagnosed": True, **options})
    assert (found.level, found.method, found.coef) == wanted
    assert found.why
    assert all(sentence.endswith(".") for sentence in found.why)


def test_an_arm_that_passed_confirmation_was_said_not_to() -> None:
    found = decide_answer(FAILS, arm(), HEAD, diagnosed=True)
    assert found.why[-1] == "No arm passed selection; the nearest, Centered, λ 0.001, passed confirmation."


@pytest.mark.parametrize(
    ("objective", "level", "action", "sentence"),
    [
        ("centered", "confirmed here", "train", "Train with Centered Z-loss at λ = 1e-4, c = log V."),
        ("factorized", "confirmed here", "train", "Train with Factorized Z-loss at λ_μ = λ_rel = 1e-4, c_μ = 0, c_rel = log V."),
        ("gain-aware", "confirmed here", "train", "Train with Gain-aware Z-loss at λ = 1e-4, β = 0.01, c = log V."),
        ("mine", "confirmed here", "train", "Train with mine at λ = 1e-4."),
        ("standard", "direction only", "not_enough_evidence", "Not enough evidence to train with Standard Z-loss at λ = 1e-4"),
        (None, "undecided", "not_enough_evidence", "Not enough evidence: the runs did not decide."),
        ("ce", "confirmed here", "nothing", "Use no Z-loss: "),
        ("ce", "direction only", "nothing", "Use no Z-loss: "),
        ("centered-head", "direction only", "center", "Center the output head and use no Z-loss."),
    ],
)  # fmt: skip
def test_only_a_confirmed_z_loss_is_trained_with(objective: str | None, level: Any, action: str, sentence: str) -> None:
    given = replace(made_up_recommendation(), objective=objective, coef=1e-4, level=level, verdict=None)
    found = with_verdict(given)
    assert found.verdict is not None
    assert found.verdict.action == action
    assert found.verdict.sentence.startswith(sentence)
    assert (found.action, f"{found.confidence}.") == (found.verdict.sentence, found.verdict.confidence)
    assert found.verdict.why == given.why
    assert bool(found.verdict.changes) is (action in ("train", "center"))


def with_consequences(found: Recommendation, *, matters: bool) -> Recommendation:
    """The recommendation with a known consequence of every stage."""
    known = Consequence("noise", 0.001, 0.01, "nat", matters, "It is small.")
    return replace(found, stages=tuple(replace(stage, fired=True, consequence=known) for stage in found.stages))


def test_a_confirmed_z_loss_contradicted_the_audit_that_found_nothing_that_matters() -> None:
    """Runs said "train", the audit of the same checkpoint said that nothing needs to be done."""
    given = replace(made_up_recommendation(), objective="factorized", verdict=None)
    found = with_verdict(with_consequences(given, matters=False))
    assert found.verdict is not None
    assert found.verdict.action == "train"
    assert found.verdict.sentence == (
        "Factorized Z-loss at λ = 1e-3 passed, but nothing measured in this model calls for it: no consequence measured in "
        "its audit reaches our limit. Its penalty is on the mean logit (λ_μ, toward c_μ = 0) and on log Z − mean logit (λ_rel, "
        "toward c_rel = log V), both 1e-3."
    )
    assert nothing_calls_for_it(found)
    for other in (given, with_consequences(given, matters=True)):
        assert with_verdict(other).action.startswith("Train with Factorized Z-loss at λ_μ = λ_rel = 1e-3, ")
        assert not nothing_calls_for_it(with_verdict(other))


def test_a_z_loss_that_lowers_ce_is_called_for_by_that() -> None:
    given = with_consequences(made_up_recommendation(), matters=False)
    (verdict,) = given.confirmation
    assert verdict.parts is not None
    assert verdict.parts.quality is not None
    assert with_verdict(given).action.startswith("Centered Z-loss at λ = 1e-3, c = log V passed, but nothing")
    lower = replace(verdict.parts.quality, interval=Interval(-0.02, -0.01, "nats per token"))
    better = replace(verdict, parts=replace(verdict.parts, quality=lower))
    assert (
        with_verdict(replace(given, confirmation=(better,))).action
        == "Train with Centered Z-loss at λ = 1e-3, c = log V."
    )


def test_a_z_loss_that_is_not_confirmed_says_what_it_lowered_and_what_that_did_to_ce() -> None:
    """ "It looks right on 2 fresh seeds" said neither."""
    found = with_verdict(replace(made_up_recommendation(), level="direction only"))
    assert found.action == (
        "Not enough evidence to train with Centered Z-loss at λ = 1e-3, c = log V: on 2 fresh seeds p99 of |log Z̃ − c| was × "
        "0.881 that of CE (0.868 to 0.894) at ΔCE = +0.00341 ± 0.0079 nat, which does not confirm it. Keep what you have."
    )


def test_reasons_are_short_sentences_with_one_number_each_and_no_jargon() -> None:
    """They were one sentence: "quality (holds): … coordinate (open): …"."""
    (verdict,) = made_up_recommendation().confirmation
    lowered, quality, optimizer = part_sentences(EvaluatedArm(verdict, 0.0, 0.9, 0.8, ""))
    assert lowered.startswith("It lowered what it is meant to lower: p99 of |log Z̃ − c|")
    assert quality.startswith("Cross-entropy is not settled: ΔCE = +0.003412 ± 0.0079 nat (")
    assert optimizer == "The optimizer is not stressed: all 12 endpoints are within their limits."
    assert verdict.parts is not None
    assert verdict.parts.quality is not None
    held = replace(verdict.parts.quality, state="holds")
    made = replace(verdict, parts=replace(verdict.parts, quality=held))
    _, quality, _ = part_sentences(EvaluatedArm(made, 0.0, 0.9, 0.8, ""))
    assert quality == (
        "Cross-entropy stayed within the tolerance: ΔCE = +0.003412 ± 0.0079 nat (−0.106 to +0.27 PPL; tolerance 0.238 PPL)."
    )


def test_seeds_that_were_added_after_an_answer_are_named_and_stay_named() -> None:
    """Adding a seed after looking favors good answers, and nothing said that it was done."""
    earlier = replace(made_up_recommendation(), confirmation_seeds=(2, 3))
    assert added_seeds((2, 3), earlier) == added_seeds((2, 3, 4), None) == added_seeds((8, 9), earlier) == ()
    added = added_seeds((2, 3, 4), earlier)
    later = with_verdict(replace(earlier, confirmation_seeds=(2, 3, 4), added_seeds=added))
    assert (
        "tokens per run. Seed 4 was added after an earlier answer, which makes a good answer likelier"
        in later.confidence
    )
    assert added_seeds((2, 3, 4), later) == (4,)
    assert added_seeds((2, 3, 4, 5), later) == (4, 5)


def test_how_sure_names_fresh_seeds_steps_learning_rate_and_assumptions() -> None:
    found = made_up_recommendation()
    assert found.confidence == (
        "Confirmed on 2 fresh seeds, 100 steps of 128 tokens each, at learning rate 5e-05, on validation blocks that selection "
        "had not seen: tiny <model> on a text, 12,800 tokens per run. Assuming a cosine schedule and a fresh Adam state, because "
        "the checkpoint does not say. Longer training and other scales were not tested"
    )
    bare = replace(
        found.tested, lr=None, steps=None, tokens=None, assumed=(), known=("learning rate 3e-05 at step 5 (a file)",)
    )
    said = with_verdict(replace(found, level="undecided", confirmation_seeds=(), tested=bare)).confidence
    assert said.startswith(
        "Not decided without a fresh seed, an unknown number of steps, at an unknown learning rate: "
    )
    assert "From the checkpoint: learning rate 3e-05 at step 5 (a file). Longer" in said
    assert (
        "Not confirmed: seen on 1 fresh seed,"
        in with_verdict(replace(found, level="direction only", confirmation_seeds=(2,))).confidence
    )


def test_the_guide_had_other_rows_than_the_rule() -> None:
    guide = (Path(__file__).parents[2] / "docs" / "recommend.md").read_text(encoding="utf-8")
    lines = [line.strip() for line in (decide_answer.__doc__ or "").splitlines()]
    rows = [line for line in lines if line.startswith("| ") and "| answer |" not in line]
    assert len(rows) == 9
    for row in rows:
        assert row in guide, row


def test_arms_that_pass_come_first_by_what_reaches_the_hidden_state() -> None:
    small, large = replace(arm("a"), transported=0.5), replace(arm("b"), transported=0.9)
    near, far = replace(arm("c", passes=False), delta_ce=0.01), replace(arm("d", passes=False), delta_ce=0.5)
    assert ranked((far, large, near, small)) == (small, large, near, far)
    # Centered head is chosen only where the shift was diagnosed and only if it passes.
    head, failed = replace(HEAD, transported=0.1), replace(arm("centered-head", 0.0, passes=False), delta_ce=0.0)
    assert choose((small, head), centered_head=True) == head
    assert choose((small, head), centered_head=False) == small
    assert choose((far, failed, near), centered_head=True) == near
    assert choose((failed,), centered_head=True) is None


OBJECTIONS = [
    ({}, {}, {}, ""),
    ({"delta_ce": None}, {}, {}, "its validation CE is not finite"),
    ({"delta_ce": 0.02}, {}, {}, "ΔCE = +0.02 nat is above the tolerance of 0.01"),
    ({}, {"ratio": None}, {}, "the quantity it is meant to lower could not be measured"),
    ({}, {"questions": [{"ratio": 0.5}, {"ratio": 0.995}]}, {}, "the quantity it is meant to lower is × 0.995, not"),
    ({}, {}, {"delta_u_99": SeedSummary(4.0, None, 1)}, "p99 ‖δ_u‖ as deployed is × 2 that of CE"),
]


@pytest.mark.parametrize(("quality", "coordinate", "head", "said"), OBJECTIONS)
def test_what_is_held_against_an_arm(
    quality: dict[str, Any], coordinate: dict[str, Any], head: dict[str, SeedSummary], said: str
) -> None:
    parts = VerdictParts(
        coordinate=VerdictPart("open", "", {"ratio": 0.9, **coordinate}),
        quality=VerdictPart("open", "", {"delta_ce": 0.0, "tolerance_ce": 0.01, **quality}),
    )
    verdict = Verdict("standard", 1e-3, delta_ppl=0.0, accepted=None, verdict="inconclusive", reasons=(), parts=parts)
    base = {"delta_u_99": SeedSummary(2.0, None, 1)}
    methods = [
        ComparedMethod("ce", 0.0, heads=HeadSummaries(base)),
        ComparedMethod("standard", 1e-3, heads=HeadSummaries({**base, **head})),
    ]
    given = Comparison(baseline="ce", seeds=(1,), methods=tuple(methods), quality=Quality(methods=(verdict,)))
    (found,) = evaluate_arms(given)
    assert found.objection.startswith(said)
    assert found.passes is (not said)
    rejected = replace(verdict, verdict="rejected", reasons=("quality: why.",))
    (found,) = evaluate_arms(replace(given, quality=Quality(methods=(rejected,))))
    assert found.objection == "rejected: quality: why"


@pytest.mark.parametrize("method", ["centered", "centered-head"])
def test_what_was_held_against_a_centered_arm_was_a_ratio_of_centered_to_raw_logits(method: str) -> None:
    """ "p99 ‖δ_u‖ as deployed is × 5.985 that of CE": now both numbers, each with its coordinate, and whose rule it is."""
    parts = VerdictParts(
        coordinate=VerdictPart("open", "", {"ratio": 0.9}),
        quality=VerdictPart("open", "", {"delta_ce": 0.0, "tolerance_ce": 0.01}),
    )
    verdict = Verdict(method, 1e-3, delta_ppl=0.0, accepted=None, verdict="inconclusive", reasons=(), parts=parts)
    raw, centered = ({"delta_u_99": SeedSummary(mean, None, 1)} for mean in (2.0, 12.5))
    methods = (
        ComparedMethod("ce", 0.0, heads=HeadSummaries(raw)),
        ComparedMethod(method, 1e-3, heads=HeadSummaries(raw, centered), coordinate="centered"),
    )
    (found,) = evaluate_arms(
        Comparison(baseline="ce", seeds=(1,), methods=methods, quality=Quality(methods=(verdict,)))
    )
    assert found.transported == 6.25  # what arms are ranked by, as before
    assert "6.25" not in found.objection
    said = "p99 ‖δ_u‖ is 12.5 on the centered logits it deploys, 2 on CE's raw logits: by our rule"
    assert found.objection.startswith(said)


@pytest.mark.parametrize(
    "named", ["ce", "centered-head", "standard:-1e-4", "standard:0", "mu-centering:1", "mu-loss:inf"]
)
def test_arms_that_cannot_be_run_are_refused(named: str) -> None:
    with pytest.raises(InputError, match=named):
        named_arms([named])
    # One that is named twice is run once.
    assert len(named_arms(["mu-loss", "mu-loss", "mu-loss:1e-4", "mu-loss:1e-3"])) == 2


def test_an_arm_that_does_not_pass_is_never_accepted() -> None:
    verdict = replace(ACCEPTED.verdict, accepted=True, reasons=("all hold.",))
    passing = replace(ACCEPTED, verdict=verdict)
    assert confirming_verdict(passing) == verdict
    found = confirming_verdict(replace(passing, objection="p99 ‖δ_u‖ as deployed is × 2 that of CE"))
    assert (found.verdict, found.accepted) == ("inconclusive", None)
    assert found.reasons == ("It does not pass: p99 ‖δ_u‖ as deployed is × 2 that of CE.", "all hold.")
    assert REJECTED.outcome == "rejected"
