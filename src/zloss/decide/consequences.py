"""Whether what a stage found matters for the training run at hand, and the one verdict that follows.

A stage of the paper's decision map fires on a ratio. A ratio can be large and harmless, so advice rests on a second number: what
the finding does to log-probabilities or gradients at the λ, c and logit precision that the user trains with. The verdict, by
precedence:

| action | when |
|---|---|
| `fix_implementation` | a joined audit shows that the training loss applies something else |
| `center` | 16-bit logits lose precision that centering would recover |
| `train` | joined runs accepted a Z-loss on this model |
| `not_enough_evidence` | noise or gain that only training runs can settle; too few tokens; a finding that could not be weighed |
| `nothing` | anything else |

A checkpoint alone never justifies `train`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from zloss.decide.recommend import CE as CE_METHOD
from zloss.decide.recommend import (
    CENTERED_HEAD,
    CONFIRMED,
    OF_THE_MEAN_ROW,
    evaluate_arms,
    method_title,
    one_digit,
    ranked,
    recipe,
)
from zloss.decide.stages import DECOMPOSITION, IMPLEMENTATION, PATHWAY, ROUTER, SOURCE, TRANSPORT, inside, sentence
from zloss.decide.thresholds import Thresholds
from zloss.decide.verdict import evaluated_comparison
from zloss.results.audit import AuditReport, NoiseNumbers, PlannedLoss
from zloss.results.comparison import Comparison
from zloss.results.decision import ActionVerdict, Consequence, Decision
from zloss.results.implementation_audit import ImplementationAudit
from zloss.results.loss_audit import LossAudit
from zloss.results.recommendation import Recommendation
from zloss.results.run_config import UNPENALIZED

OLD_REPORT = "this report was written before consequences were measured; run the audit again"
NOISE = "Error of the target's log-probability from 16-bit logits (RMS)"
FINDINGS = {
    SOURCE.name: "a common shift of the logits",
    DECOMPOSITION.name: "a log-normalizer away from its target",
    TRANSPORT.name: "a high output-to-hidden gain",
    PATHWAY.name: "a Z gradient through the input embedding",
}
"""Stage of the checkpoint → what it found, inside a sentence."""


# Consequences


def consequence_of(
    decision: Decision,
    report: AuditReport | None,
    limits: Thresholds,
    loss_audits: Sequence[LossAudit] = (),
    implementation_audits: Sequence[ImplementationAudit] = (),
) -> Consequence:
    """What the finding of one stage means for the planned training."""
    on_checkpoint = {
        SOURCE.name: shift_consequence,
        DECOMPOSITION.name: normalizer_consequence,
        TRANSPORT.name: gain_consequence,
        PATHWAY.name: input_path_consequence,
        ROUTER.name: router_consequence,
    }
    if decision.stage == IMPLEMENTATION.name:
        return implementation_consequence(report, loss_audits, implementation_audits, limits)
    if decision.stage in on_checkpoint:
        if report is None:
            return Consequence("", None, None, "", None, "No audit of a checkpoint was given.")
        return on_checkpoint[decision.stage](report, limits)
    why = "Measured on training runs." if decision.fired is not None else "No training runs were compared."
    return Consequence(decision.trigger, decision.value, decision.threshold, "", decision.fired, why)


def shift_consequence(report: AuditReport, limits: Thresholds) -> Consequence:
    """Bits of log-probability that centering would recover: S ≥ `shift_noise` and log₂(S/S̃) ≥ `shift_bits`."""
    found = partial(Consequence, NOISE, limit=limits.shift_noise, unit="nat")
    if report.model.softcap is not None:
        return found(None, matters=False, reason="The logits are soft-capped, so the head cannot be centered.")
    storage, noise, missing = _noise(report)
    if noise is None:
        return found(None, **missing)
    raw, centered = noise.raw, noise.centered
    if raw is None or centered is None:
        why = report.reason("heads.centered")
        return found(raw, matters=False if why else None, reason=sentence(why or f"{storage} logits overflow"))
    bits = math.log2(raw / centered) if raw > 0 and centered > 0 else 0.0
    enough = raw >= limits.shift_noise and bits >= limits.shift_bits
    said = f"{storage} logits blur a token's log-probability by {raw:.3f} nat (RMS), {centered:.3f} nat once the head is centered"
    if raw < limits.shift_noise:
        worth = f"less than {limits.shift_noise:g} nat does not matter"
    elif bits < 0:
        worth = f"centering would lose {-bits:.1f} bits"
    else:
        worth = f"centering would recover {bits:.2g} bits"
        worth += "" if enough else f" ({limits.shift_bits:g} or more would matter)"
    return found(raw, matters=enough, reason=f"{said}: {worth}.")


def normalizer_consequence(report: AuditReport, limits: Thresholds) -> Consequence:
    """16-bit noise that centering cannot remove: S̃, or S where the head cannot be centered."""
    limit = limits.normalizer_noise
    found = partial(Consequence, f"{NOISE}, centered head", limit=limit, unit="nat")
    storage, noise, missing = _noise(report)
    if noise is None:
        return found(None, **missing)
    value = noise.raw if noise.centered is None else noise.centered
    if value is None:
        return found(None, matters=None, reason=f"{storage} logits overflow.")
    said = f"{storage} rounding leaves an error of {value:.3f} nat"
    said = said if noise.centered is None else f"Even with a centered head, {said}"
    return found(value, matters=value >= limit, reason=f"{said} ({_limit(value >= limit, f'{limit:g}')}).")


def gain_consequence(report: AuditReport, limits: Thresholds) -> Consequence:
    """Tail of the Z gradient at the hidden states over that of CE: a ratio of two p99s."""
    planned, value, why = report.planned, None, OLD_REPORT
    if planned is not None:
        why = "the tail of a gradient is not finite"
        if planned.delta_u_99 is not None and planned.delta_u_ce_99:
            value = planned.delta_u_99 / planned.delta_u_ce_99
    said = "The largest Z gradients at the hidden states are {} of the largest cross-entropy gradients"
    return _share("p99 ‖δ_u‖ of Z / p99 ‖δ_u‖ of CE", value, limits.gain_share, said, why)


def input_path_consequence(report: AuditReport, limits: Thresholds) -> Consequence:
    """Input path of the Z gradient over the CE gradient of a tied table."""
    quantity, limit, planned = "Input-path ‖g_Z‖ / ‖g_CE‖ of the tied table", limits.input_path_share, report.planned
    if not report.model.tied:
        return Consequence(quantity, None, limit, "", False, "The head is untied: there is no input path.")
    why = OLD_REPORT if planned is None else report.reason("tied_paths") or "it was not measured"
    said = "The Z gradient through the input embedding is {} of the CE gradient of the tied table"
    return _share(quantity, None if planned is None else planned.input_path, limit, said, why)


def _share(quantity: str, value: float | None, limit: float, said: str, why: str) -> Consequence:
    """A share of a CE gradient, which matters from `limit` on; `why` it is missing."""
    if value is None:
        return Consequence(quantity, None, limit, "", None, sentence(why))
    matters = value >= limit
    reason = f"{said.format(_percent(value))} ({_limit(matters, _percent(limit))})."
    return Consequence(quantity, value, limit, "", matters, reason)


def router_consequence(report: AuditReport, limits: Thresholds) -> Consequence:
    """Router Z gradient over the CE gradient on the router weights."""
    limit, planned = limits.router_share, report.planned
    found = partial(Consequence, "‖g_RZ‖ / ‖g_CE‖ on the router weights", limit=limit, unit="")
    if report.router is None:
        return found(None, matters=False, reason="The model has no router.")
    if planned is None or planned.router_coef is None:
        return found(None, matters=None, reason="No router coefficient was given (`--router-coef`).")
    if planned.router_share is None:
        return found(None, matters=None, reason="The routers have no softmax normalizer, or no gradient.")
    value, matters = planned.router_share, planned.router_share > limit
    said = (
        f"At λ_R = {planned.router_coef:g} ({planned.router_convention}) the router Z gradient is {_percent(value)} of the CE "
        f"gradient on the router weights ({'above' if matters else 'within'} {_percent(limit)})."
    )
    return found(value, matters=matters, reason=said)


def implementation_consequence(
    report: AuditReport | None,
    loss_audits: Sequence[LossAudit],
    implementation_audits: Sequence[ImplementationAudit],
    limits: Thresholds,
) -> Consequence:
    """Error of the CE+Z gradient together, or an error among the findings; only what was joined counts.

    Of an implementation audit the stored logits count that the training stack uses.
    """
    quantity, limit = "Relative error of the CE+Z gradient", limits.implementation_error
    if not loss_audits and not implementation_audits:
        return Consequence(quantity, None, limit, "", None, "No audit of the training loss was joined.")
    used = None if report is None or report.planned is None else report.planned.logits
    found = [error.id for audit in loss_audits for error in audit.errors]
    errors = [
        (source.delta_total, "the loss")
        for audit in loss_audits
        for source in (audit.source, audit.target_model)
        if source
    ]
    errors += [
        (line.grad_rel_error, f"{line.storage} logits")
        for audit in implementation_audits
        for line in audit.updates
        if line.part == "total" and line.logit_scale == 1 and used in (None, line.storage)
    ]
    known = [(error, where) for error, where in errors if error is not None]
    value, where = max(known, default=(None, ""))
    beyond = value is not None and value > limit
    if not known and not found:
        return Consequence(
            quantity, None, limit, "", None, "The joined audits have neither a gradient error nor an error finding."
        )
    parts = (
        [] if value is None else [f"the CE+Z gradient of {where} is off by {_percent(value)} (limit {_percent(limit)})"]
    )
    parts += [f"the audit of the loss found {', '.join(found)}"] if found else []
    return Consequence(quantity, value, limit, "", bool(found) or beyond, sentence(*parts))


def _limit(matters: bool, limit: str) -> str:
    return f"the limit is {limit}" if matters else f"{limit} or more would matter"


def _noise(report: AuditReport) -> tuple[str, NoiseNumbers | None, dict[str, Any]]:
    """(logit precision, its noise, or whether that matters and why there is none)."""
    planned, measured = report.planned, report.logit_noise
    if planned is None:
        return "", None, {"matters": None, "reason": sentence(OLD_REPORT)}
    if planned.logits == "fp32":
        return "fp32", None, {"matters": False, "reason": "The logits are kept in fp32, so there is no 16-bit noise."}
    why = sentence(report.reason("logit_noise") or "it was not measured")
    noise = None if measured is None else getattr(measured, planned.logits)
    return planned.logits, noise, {"matters": None, "reason": why}


# Verdict


def give_verdict(
    report: AuditReport | None,
    decisions: Sequence[Decision],
    limits: Thresholds,
    comparisons: Sequence[Comparison] = (),
    recommendations: Sequence[Recommendation] = (),
) -> ActionVerdict:
    """What to do, from decisions that have their consequences; runs of another model than the audited one do not count."""
    by_stage = {decision.stage: decision for decision in decisions}
    matters = {name: one.consequence is not None and one.consequence.matters for name, one in by_stage.items()}
    name = None if report is None else report.model.name
    same = [one for one in comparisons if name is None or one.model in (None, name)]
    recommended = [one for one in recommendations if name is None or one.tested.model == name]
    confidence = "" if report is None else _confidence(report, limits)
    if matters.get(IMPLEMENTATION.name):
        found = by_stage[IMPLEMENTATION.name]
        return ActionVerdict(
            "fix_implementation",
            f"Fix the training loss before anything else: {inside(found.action)}.",
            (_reason(found), *_findings(decisions, skip=IMPLEMENTATION.name)),
            f"Measured on the loss itself. {confidence}".strip(),
            ("It changes what λ means and what the model is trained on.", "It does not change this checkpoint."),
        )
    if report is not None and matters.get(SOURCE.name):
        return _center(report, by_stage[SOURCE.name], decisions, confidence)
    if (accepted := _accepted(same, recommended, limits)) is not None:
        method, coef, why, tested = accepted
        named = recipe(method, coef) if method in OF_THE_MEAN_ROW else f"{method_title(method)} at λ = {coef:g}"
        return ActionVerdict(
            "train",
            f"Train with {named}: matched runs accepted it.",
            (*why, *_findings(decisions)),
            tested,
            (
                "It lowers what it lowered in the accepted runs, named above.",
                "It does not promise the same at another scale or length.",
            ),
        )
    settled = next((one for one in recommended if one.objective == CE_METHOD and one.level == CONFIRMED), None)
    if report is not None and settled is None and (doubt := _doubt(report, decisions, matters, limits)) is not None:
        said, why = doubt
        rest = _findings(decisions, skip=tuple(stage for stage, yes in matters.items() if yes))
        return ActionVerdict("not_enough_evidence", said, (*why, *rest), confidence)
    limiting = [stage for stage in (PATHWAY.name, ROUTER.name) if matters.get(stage)]
    why = list(_findings(decisions, skip=limiting))
    if settled is not None:
        why.insert(0, f"Matched runs found no Z-loss that helps: {settled.why[0]}")
        confidence = f"{settled.confidence}."
    if report is None:
        return ActionVerdict("nothing", "Nothing in these results calls for a change.", tuple(why), confidence)
    planned = report.planned
    said = "Nothing to do: this model needs neither a Z-loss nor a centered head."
    if limiting:
        said = "Nothing to change in this checkpoint; if you train with Z-loss, keep its coefficient low."
        why = [*(_reason(by_stage[stage]) for stage in limiting), *why]
        why += _ceilings(planned, limits) if planned is not None else []
    return ActionVerdict("nothing", said, tuple(dict.fromkeys((*why, *_coefficient(planned, limits)))), confidence)


def _center(report: AuditReport, source: Decision, decisions: Sequence[Decision], confidence: str) -> ActionVerdict:
    storage, noise, _ = _noise(report)
    assert noise is not None
    return ActionVerdict(
        "center",
        f"Center the output head: {storage} logits then blur a token's log-probability by {noise.centered:.3f} instead of "
        f"{noise.raw:.3f} nat.",
        (_reason(source), *_findings(decisions, skip=SOURCE.name)),
        confidence,
        (
            f"It removes the common shift (p99 |μ| = {source.value:.4g} nats)." if source.value is not None else "",
            "It does not change predictions beyond rounding, and needs no training.",
        ),
    )


def _doubt(
    report: AuditReport, decisions: Sequence[Decision], matters: dict[str, bool | None], limits: Thresholds
) -> tuple[str, list[str]] | None:
    """(sentence, reasons) where the audit cannot settle the question; None if it does."""
    by_stage = {decision.stage: decision for decision in decisions}
    if report.status == "partial":
        done = f"{report.finished_blocks or 0} of {report.corpus.blocks} blocks are done"
        return "Not enough evidence: this audit was interrupted. Resume it with `--resume`.", [sentence(done)]
    if report.ppl is None:
        return "Not enough evidence: the perplexity is not finite on this text.", [
            "There are no finite numbers to decide on."
        ]
    training = [stage for stage in (DECOMPOSITION.name, TRANSPORT.name) if matters.get(stage)]
    if training:
        now = " Keep the logits in fp32 now." if matters.get(DECOMPOSITION.name) else ""
        return (
            f"Not enough evidence to choose a Z-loss: {' and '.join(FINDINGS[stage] for stage in training)} matters here, and "
            f"only training runs can tell what helps. Run `zloss recommend`.{now}",
            [_reason(by_stage[stage]) for stage in training],
        )
    if report.corpus.predictions < limits.least_tokens:
        said = f"{report.corpus.predictions:,} tokens were measured, and tails need at least {limits.least_tokens:,.0f}"
        return "Not enough evidence: the text is too short. Audit more of it.", [sentence(said)]
    unknown = [
        decision
        for decision in decisions
        if decision.stage in FINDINGS
        and decision.fired
        and decision.consequence
        and decision.consequence.matters is None
    ]
    if unknown:
        named = " and ".join(FINDINGS[decision.stage] for decision in unknown)
        return (
            f"Not enough evidence: there is {named}, but what it does to training could not be computed.",
            [_reason(decision) for decision in unknown],
        )
    return None


def _accepted(
    comparisons: Sequence[Comparison], recommendations: Sequence[Recommendation], limits: Thresholds
) -> tuple[str, float, list[str], str] | None:
    """(method, λ, why, how sure) of an accepted Z-loss on the head: a recommendation's before a comparison's.

    A centered head, or an untied head that is centered after every step, is accepted by construction, since it predicts what
    CE predicts; whether it is worth having is the consequence of the shift. Router variants do not count: they are not a
    Z-loss on the head.
    """
    for one in recommendations:
        if one.objective not in (None, CE_METHOD, CENTERED_HEAD) and one.level == CONFIRMED and one.coef is not None:
            return str(one.objective), one.coef, list(one.why[:1]), f"{one.confidence}."
    for comparison in comparisons:
        if comparison.router is not None:
            continue
        evaluated = evaluated_comparison(comparison, limits)
        for arm in ranked(evaluate_arms(evaluated)):
            if arm.verdict.verdict == "accepted" and arm.verdict.method not in UNPENALIZED:
                steps = "" if comparison.steps is None else f" of {comparison.steps} steps"
                tested = f"From matched runs{steps}; longer training and other scales were not tested."
                return arm.verdict.method, arm.verdict.coef, list(arm.verdict.reasons or ()), tested
    return None


def _findings(decisions: Sequence[Decision], skip: str | Sequence[str] = ()) -> list[str]:
    """What fired and is harmless, in one sentence, and the known consequence of every stage of the checkpoint."""
    skipped = (skip,) if isinstance(skip, str) else tuple(skip)
    known = [
        (decision, decision.consequence)
        for decision in decisions
        if decision.stage in FINDINGS and decision.stage not in skipped
        if decision.consequence is not None and decision.consequence.matters is not None
    ]
    harmless = [
        FINDINGS[decision.stage] for decision, consequence in known if decision.fired and not consequence.matters
    ]
    said = [f"Present, but harmless here: {', '.join(harmless)}."] if harmless else []
    return said + [consequence.reason for _, consequence in known if consequence.value is not None]


def _reason(decision: Decision) -> str:
    found = FINDINGS.get(decision.stage)
    reason = "" if decision.consequence is None else decision.consequence.reason
    matters = decision.consequence is not None and decision.consequence.matters
    return f"{_upper(found)} matters here. {reason}" if found and matters else reason


def _coefficient(planned: PlannedLoss | None, limits: Thresholds) -> list[str]:
    """What λ would do, as advice about λ alone."""
    shares = [] if planned is None else [share for share in (planned.r_z, planned.r_z_model) if share is not None]
    if planned is None or not shares or not planned.coef:
        return []
    share = max(shares)
    scope = "whole model" if share == planned.r_z_model else "head"
    tokens = f"{planned.tokens:,} tokens"
    said = f"At λ = {planned.coef:g} the Z gradient of the {scope} is {_percent(share)} of its CE gradient ({tokens})"
    if share < limits.negligible_r_z:
        return [f"{said}: a Z-loss this weak would do nothing."]
    if share > limits.r_z_budget:
        ceiling = one_digit(planned.coef * limits.r_z_budget / share)
        budget = _percent(limits.r_z_budget)
        return [
            f"{said}, which is too strong. If you train with a Z-loss, stay below {budget}: λ = {ceiling:g} or less."
        ]
    return []


def _ceilings(planned: PlannedLoss, limits: Thresholds) -> list[str]:
    """The largest coefficients that keep the input path and the router within their limits."""
    found = []
    for name, coef, share, limit in (
        ("λ", planned.coef, planned.input_path, limits.input_path_share),
        ("λ_R", planned.router_coef, planned.router_share, limits.router_share),
    ):
        if coef and share and share >= limit:
            found.append(f"Keep {name} at {one_digit(coef * limit / share):g} or below to stay within that limit.")
    return found


def _confidence(report: AuditReport, limits: Thresholds) -> str:
    planned = report.planned
    text = "pydoc (Python's documentation)" if report.corpus.name == "pydoc" else report.corpus.name
    measured = f"From one checkpoint on {report.corpus.predictions:,} tokens of {text}"
    caveats, vocab = list[str](), report.model.valid_vocab or report.model.vocab
    if report.corpus.predictions < limits.least_tokens:
        caveats.append(f"The text is short: tails need at least {limits.least_tokens:,.0f} tokens.")
    if report.ppl is not None and report.ppl > vocab:
        caveats.append(
            f"A perplexity of {report.ppl:,.0f} is worse than guessing among {vocab:,} tokens: check that text, tokenizer and "
            "weights belong together."
        )
    if planned is None:
        return " ".join((f"{measured}. Training was not tested.", *caveats))
    c = "log V" if planned.target == report.target else f"{planned.target:g}"
    assumed = f"assuming {planned.logits} logits, λ = {planned.coef:g} and c = {c}"
    return " ".join((f"{measured}, {assumed}. Training was not tested.", *caveats))


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
