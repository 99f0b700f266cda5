"""Whether what a stage found matters for the training run at hand, and the one verdict that follows.

A stage of the paper's decision map fires on a ratio. A ratio can be large and harmless, so advice rests on a second number: what
the finding does to log-probabilities or gradients at the λ, c and logit precision that the user trains with. These consequences
and their limits are ours; the paper has the stages. The verdict, by precedence:

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
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from zloss.decide.recommend import CONFIRMED, accepted_sentence, evaluate_arms, one_digit, ranked
from zloss.decide.stages import (
    DECOMPOSITION,
    IMPLEMENTATION,
    OPTIMIZER,
    PATHWAY,
    QUALITY,
    ROUTER,
    SOURCE,
    TRANSPORT,
    inside,
    sentence,
)
from zloss.decide.thresholds import Thresholds
from zloss.decide.verdict import CE, CENTERED_HEAD
from zloss.results.audit import AuditReport, NoiseNumbers, PlannedLoss
from zloss.results.comparison import Comparison
from zloss.results.decision import ActionVerdict, Consequence, Decision
from zloss.results.implementation_audit import ImplementationAudit
from zloss.results.loss_audit import LossAudit
from zloss.results.quantities import coefficient
from zloss.results.recommendation import NOT_TESTED, Recommendation
from zloss.results.run_config import UNPENALIZED

OLD_REPORT = "this report was written before consequences were measured; run the audit again"
NOISE = "Error of the target's log-probability from 16-bit logits (RMS)"
FINDINGS = {
    SOURCE.name: "a common shift of the logits",
    DECOMPOSITION.name: "a log-normalizer off its target",
    TRANSPORT.name: "a high output-to-hidden gain",
    PATHWAY.name: "a strong input path",
}
"""Stage of the checkpoint → what it found, inside a sentence."""
UNFIRED = {
    DECOMPOSITION.name: "the 16-bit noise of the logits",
    TRANSPORT.name: "the strength of the planned Z-loss",
}
"""Stage of the checkpoint → what matters although the stage is quiet."""


# Consequences


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
    said = f"{storage} logits perturb log-probabilities by {raw:.3f} nat (RMS)"
    if raw < limits.shift_noise:
        worth = f"less than {limits.shift_noise:g} nat does not matter"
    else:
        worth = f"centering would {'lose' if bits < 0 else 'recover'} {abs(bits):.2g} bits of logit precision"
        more = "" if enough else f"; {limits.shift_bits:g} or more would matter"
        worth += f" (log₂ of error before/after{more})"
    return found(raw, matters=enough, reason=f"{said}; {worth}.")


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
    said = f"{storage} logits perturb log-probabilities by {value:.3f} nat (RMS)"
    said = said if noise.centered is None else f"With a centered head, the {storage} error is {value:.3f} nat"
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


def router_consequence(report: AuditReport, limits: Thresholds) -> Consequence:
    """Router Z gradient over the CE gradient on the router weights."""
    quantity, limit, planned = "‖g_RZ‖ / ‖g_CE‖ on the router weights", limits.router_share, report.planned
    if report.router is None:
        # A partial audit, or one that left the routers out, does not know.
        why = report.reason("router") or ("the audit was interrupted" if report.status == "partial" else None)
        said = "The model has no router." if why is None else sentence(why)
        return Consequence(quantity, None, limit, "", False if why is None else None, said)
    if planned is None or planned.router_coef is None:
        return Consequence(quantity, None, limit, "", None, "No router coefficient was given (`--router-coef`).")
    why = "the routers have no softmax normalizer, or no gradient"
    at = f"At λ_R = {coefficient(planned.router_coef)} ({planned.router_convention})"
    said = f"{at} the router Z gradient is {{}} of the CE gradient on the router weights"
    return _share(quantity, planned.router_share, limit, said, why)


def _share(quantity: str, value: float | None, limit: float, said: str, why: str) -> Consequence:
    """A share of a CE gradient, which matters from `limit` on; `why` it is missing."""
    if value is None:
        return Consequence(quantity, None, limit, "", None, sentence(why))
    matters = value >= limit
    reason = f"{said.format(_percent(value))} ({_limit(matters, _percent(limit))})."
    return Consequence(quantity, value, limit, "", matters, reason)


def implementation_consequence(
    report: AuditReport | None,
    loss_audits: Sequence[LossAudit],
    implementation_audits: Sequence[ImplementationAudit],
    limits: Thresholds,
) -> Consequence:
    """Error of the CE+Z gradient together, or an error among the findings; only what was joined counts.

    In an implementation audit, only logits stored as the training stack stores them count.
    """
    quantity, limit = "Relative error of the CE+Z gradient", limits.implementation_error
    if not loss_audits and not implementation_audits:
        return Consequence(quantity, None, limit, "", None, "The training loss itself was not audited.")
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
    value, where = max(((error, where) for error, where in errors if error is not None), default=(None, ""))
    if value is None and not found:
        reason = "The joined audits have neither a gradient error nor an error finding."
        return Consequence(quantity, None, limit, "", None, reason)
    parts, beyond = list[str](), False
    if value is not None:
        beyond = value > limit
        parts.append(f"the CE+Z gradient of {where} is off by {_percent(value)} (limit {_percent(limit)})")
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
    """What to do, from decisions that have their consequences; runs of a model other than the audited one do not count.

    A planned λ or λ_R above its limit is in the sentence, unless runs accepted another one.
    """
    found = _action(report, decisions, limits, comparisons, recommendations)
    above = [] if report is None or found.action == "train" else _above_limits(report, limits)
    if report is None or not above:
        return found
    trained = tuple(dict.fromkeys((*_coefficients(report, limits), *(found.if_trained or ()))))
    why = (*found.why, *(said for said in trained if said not in found.why))
    said = f"{found.sentence} The planned {', and '.join(above)}."
    return replace(found, sentence=said, why=why, if_trained=trained)


def _action(
    report: AuditReport | None,
    decisions: Sequence[Decision],
    limits: Thresholds,
    comparisons: Sequence[Comparison],
    recommendations: Sequence[Recommendation],
) -> ActionVerdict:
    """The verdict by precedence."""
    mattering = {one.stage: one for one in decisions if one.consequence is not None and one.consequence.matters}
    name = None if report is None else report.model.name
    same = [one for one in comparisons if name is None or one.model in (None, name)]
    recommended = [one for one in recommendations if name is None or one.tested.model == name]
    confidence = "" if report is None else _confidence(report, decisions, limits)
    if found := mattering.get(IMPLEMENTATION.name):
        return ActionVerdict(
            "fix_implementation",
            f"Fix the training loss before anything else: {inside(found.action)}.",
            (*_reasons([found]), *_findings(decisions)),
            f"Measured on the loss itself. {confidence}".strip(),
            ("It changes what λ means and what the model is trained on.", "It does not change this checkpoint."),
        )
    if report is not None and (found := mattering.get(SOURCE.name)):
        storage, noise, _ = _noise(report)
        assert noise is not None
        size = "" if found.value is None else f" (p99 |μ| = {found.value:.4g} nats)"
        return ActionVerdict(
            "center",
            f"Center the output head: {storage} logits then perturb a token's log-probability by {noise.centered:.3f} instead "
            f"of {noise.raw:.3f} nat.",
            (*_reasons([found]), *_findings(decisions, skip=[found])),
            confidence,
            (
                f"It removes the common shift{size}.",
                "It does not change predictions beyond rounding, and needs no training.",
            ),
        )
    if (accepted := _accepted(same, recommended)) is not None:
        method, coef, why, tested = accepted
        return ActionVerdict(
            "train",
            accepted_sentence(method, coef, decisions, "matched runs accepted it"),
            (*why, *_findings(decisions)),
            tested,
            (
                "It lowers what it lowered in the accepted runs, named above.",
                "It does not promise the same at another scale or length.",
            ),
        )
    settled = next((one for one in recommended if one.objective == CE and one.level == CONFIRMED), None)
    if report is not None and settled is None and (doubt := _doubt(report, decisions, mattering, limits)) is not None:
        said, reasons = doubt
        rest = _findings(decisions, skip=list(mattering.values()))
        trained = tuple(_coefficients(report, limits))
        return ActionVerdict(
            "not_enough_evidence", said, (*reasons, *rest, *trained), confidence, if_trained=trained or None
        )
    limiting = [mattering[stage] for stage in (PATHWAY.name, ROUTER.name) if stage in mattering]
    rest = _findings(decisions, skip=limiting, of=(SOURCE.name, DECOMPOSITION.name))
    if settled is not None:
        rest.insert(0, f"Matched runs found no Z-loss that helps: {settled.why[0]}")
        confidence = f"{settled.confidence}."
    if report is None:
        return ActionVerdict("nothing", "Nothing in these results calls for a change.", tuple(rest), confidence)
    said = "Nothing measured in this checkpoint calls for a Z-loss or a centered head."
    known = (
        one.consequence for one in decisions if one.stage in (TRANSPORT.name, PATHWAY.name) and one not in limiting
    )
    trained = (*_coefficients(report, limits), *_reasons(limiting))
    trained += tuple(one.reason for one in known if one is not None and one.value is not None)
    return ActionVerdict("nothing", said, (*rest, *trained), confidence, if_trained=trained or None)


def _doubt(
    report: AuditReport, decisions: Sequence[Decision], mattering: Mapping[str, Decision], limits: Thresholds
) -> tuple[str, list[str]] | None:
    """(sentence, reasons) where the audit cannot settle the question; None if it does."""
    if report.status == "partial":
        done = f"{report.finished_blocks or 0} of {report.corpus.blocks} blocks are done."
        return "Not enough evidence: this audit was interrupted. Resume it with `--resume`.", [done]
    if report.ppl is None:
        return "Not enough evidence: the perplexity is not finite on this text.", []
    training = [mattering[stage] for stage in (DECOMPOSITION.name, TRANSPORT.name) if stage in mattering]
    if training:
        now = " Keep the logits in fp32 now." if DECOMPOSITION.name in mattering else ""
        return (
            f"Not enough evidence to choose a Z-loss: {_named(*training)} matters here, and only training runs can tell what "
            f"helps. Run `zloss recommend`.{now}",
            _reasons(training),
        )
    if report.corpus.predictions < limits.least_tokens:
        said = (
            f"{report.corpus.predictions:,} tokens were measured, and tails need at least {limits.least_tokens:,.0f}."
        )
        return "Not enough evidence: the text is too short. Audit more of it.", [said]
    unknown = [
        one for one in decisions if one.stage in FINDINGS and one.fired and one.consequence and one.consequence.matters is None
    ]  # fmt: skip
    if unknown:
        said = f"there is {_named(*unknown)}, but what it does to training could not be computed"
        return f"Not enough evidence: {said}.", _reasons(unknown)
    return None


def _accepted(
    comparisons: Sequence[Comparison], recommendations: Sequence[Recommendation]
) -> tuple[str, float, Sequence[str], str] | None:
    """(method, λ, why, how sure) of an accepted Z-loss on the head: a recommendation's before a comparison's.

    A centered head, or an untied head that is centered after every step, is accepted by construction, since it predicts what
    CE predicts; whether it is worthwhile depends on the consequence of the shift. Router variants do not count: they are not a
    Z-loss on the head.
    """
    for one in recommendations:
        if one.objective not in (None, CE, CENTERED_HEAD) and one.level == CONFIRMED and one.coef is not None:
            return str(one.objective), one.coef, one.why[:1], f"{one.confidence}."
    for comparison in comparisons:
        arms = evaluate_arms(comparison) if comparison.router is None else ()
        for arm in ranked(arms):
            if arm.verdict.verdict == "accepted" and arm.verdict.method not in UNPENALIZED:
                steps = "" if comparison.steps is None else f" of {comparison.steps} steps"
                tested = f"From matched runs{steps}; {NOT_TESTED}."
                return arm.verdict.method, arm.verdict.coef, arm.verdict.reasons or (), tested
    return None


def _named(*decisions: Decision) -> str:
    """What stages found; of a quiet stage, what matters nevertheless."""
    return " and ".join((FINDINGS if one.fired else FINDINGS | UNFIRED)[one.stage] for one in decisions)


def _findings(
    decisions: Sequence[Decision], skip: Sequence[Decision] = (), of: Collection[str] = tuple(FINDINGS)
) -> list[str]:
    """What fired and does not matter, in one sentence, and the measured consequence of each of the stages `of`."""
    known = [
        (one, one.consequence)
        for one in decisions
        if one.stage in FINDINGS and one not in skip
        if one.consequence is not None and one.consequence.matters is not None
    ]
    fired = [FINDINGS[one.stage] for one, consequence in known if one.fired and not consequence.matters]
    said = [f"Present, but harmless here: {', '.join(fired)}."] if fired else []
    return said + [found.reason for one, found in known if one.stage in of and found.value is not None]


def _reasons(decisions: Sequence[Decision]) -> list[str]:
    """The consequence of each stage, after what was found."""
    found = []
    for one in decisions:
        assert one.consequence is not None
        named = one.consequence.matters and one.stage in FINDINGS
        lead = sentence(f"{_named(one)} matters here") + " " if named else ""
        found.append(lead + one.consequence.reason)
    return found


def lambda_limit(report: AuditReport, limits: Thresholds) -> tuple[float, str] | None:
    """(λ, what it limits) for the planned Z-loss: the only limit of λ that is advised; None if nothing is measured.

    The Z gradient is linear in λ. R is the larger of R_Z of the head and of the whole model; its budget is `r_z_budget`, that
    of the input path of a tied table is `input_path_share`, and the smaller λ counts.
    """
    planned = report.planned
    if planned is None or not planned.coef:
        return None
    share, scope = strongest(planned)
    found = [
        (limit / value, f"the Z gradient {where} is {_percent(value)} of {its} CE gradient (limit {_percent(limit)})")
        for value, limit, where, its in (
            (share, limits.r_z_budget, f"of the {scope}", "its"),
            (planned.input_path, limits.input_path_share, "through the input embedding", "the table's"),
        )
        if value
    ]
    if not found:
        return None
    factor, why = min(found)
    if not 0 < planned.coef * factor < math.inf:
        return None
    return planned.coef * factor, f"at {coefficient(planned.coef)} {why}"


def _above_limits(report: AuditReport, limits: Thresholds) -> list[str]:
    """The planned λ and λ_R that are above their limits, as phrases."""
    planned, limit = report.planned, lambda_limit(report, limits)
    if planned is None:
        return []
    share, found = planned.router_share or 0.0, list[tuple[str, float, float]]()
    if limit is not None:
        found.append(("λ", planned.coef, limit[0]))
    if planned.router_coef and share:
        found.append(("λ_R", planned.router_coef, planned.router_coef * limits.router_share / share))
    return [
        f"{name} = {coefficient(coef)} is above its limit of {coefficient(one_digit(most))}"
        for name, coef, most in found
        if coef > most * (1 + 1e-9)  # not at the limit, whatever the rounding
    ]


def strongest(planned: PlannedLoss) -> tuple[float, str]:
    """The larger R_Z of the planned Z-loss, and whether it is that of the head or of the whole model."""
    head, model = planned.r_z or 0.0, planned.r_z_model or 0.0
    return (model, "whole model") if model >= head else (head, "head")


def _coefficients(report: AuditReport, limits: Thresholds) -> list[str]:
    """What λ and λ_R of the planned training would do, as advice about them alone."""
    planned, found = report.planned, list[str]()
    if planned is None:
        return found
    share, scope = strongest(planned)
    limit = lambda_limit(report, limits)
    if limit is not None and limit[0] <= planned.coef * (1 + 1e-9):  # at the limit too, whatever the rounding
        most, why = limit
        said = f"Keep λ at {coefficient(one_digit(most))} or below (for c = {_target(report)}): {why}, too strong."
        found.append(said + (_at_zero(report, most) if planned.target else ""))
    elif planned.coef and 0 < share < limits.negligible_r_z:
        said = (
            f"At λ = {coefficient(planned.coef)} the Z gradient of the {scope} is {_percent(share)} of its CE gradient"
        )
        tokens = "" if planned.tokens is None else f" ({planned.tokens:,} tokens)"
        found.append(f"{said}{tokens}: a Z-loss this weak would do nothing.")
    router, budget = planned.router_share, limits.router_share
    if planned.router_coef and router and router >= budget:
        kept = coefficient(one_digit(planned.router_coef * budget / router))
        found.append(
            f"Keep λ_R at {kept} or below: that is {_percent(budget)} of the CE gradient on the router weights."
        )
    return found


def _at_zero(report: AuditReport, most: float) -> str:
    """The limit of λ for c = 0: the Z gradient is proportional to log Z − c, so its RMS for both targets scales the limit."""
    raw, log_v = report.heads.raw, report.target
    c = None if report.planned is None else report.planned.target
    lead = " For c = 0, the target of most codebases,"
    if (
        c is not None
        and log_v is not None
        and raw.log_z_mean is not None
        and raw.diag_z is not None
        and report.diag_coef
    ):
        square = raw.diag_z / report.diag_coef + log_v * (2 * raw.log_z_mean - log_v)  # E (log Z)²
        from_c = square - c * (2 * raw.log_z_mean - c)  # E (log Z − c)²
        if 0 < square < math.inf and 0 < from_c < math.inf:
            ratio = math.sqrt(square / from_c)
            lower = coefficient(one_digit(most / ratio))
            return f"{lead} about {lower}: log Z − c is {ratio:.2g} times as large (RMS); `--target 0` measures it."
    return f"{lead} the limit differs; rerun with `--target 0`."


def _target(report: AuditReport) -> str:
    planned = report.planned
    if planned is None:
        return ""
    return "log V" if planned.target in (None, report.target) else f"{planned.target:g}"


def _confidence(report: AuditReport, decisions: Sequence[Decision], limits: Thresholds) -> str:
    planned, vocab, noise = report.planned, report.model.valid_vocab or report.model.vocab, report.logit_noise
    text = "Python's documentation" if report.corpus.name == "pydoc" else report.corpus.name
    said = f"From one checkpoint on {report.corpus.predictions:,} tokens of {text}"
    fewer = []
    if noise is not None:
        products = min((row.gap.tokens for row in noise.rows), default=noise.tokens)
        more = f" ({products:,} for rounded inputs)" if products < noise.tokens else ""
        fewer.append(f"16-bit errors on {noise.tokens:,}{more}")
    if report.gradient is not None:
        tokens = "" if planned is None or planned.tokens is None else f" ({planned.tokens:,} tokens)"
        fewer.append(f"gradients on {report.gradient.blocks} blocks{tokens}")
    said += f"; {', '.join(fewer)}." if fewer else "."
    if planned is not None:
        said += f" Assumed: {planned.logits} logits, λ = {coefficient(planned.coef)}, c = {_target(report)}."
    applicable = [one for one in decisions if applies(one)]
    done = sum(one.fired is not None for one in applicable)
    trained = any(one.fired is not None for one in decisions if one.stage in (OPTIMIZER.name, QUALITY.name))
    said += f" {done} of {len(applicable)} applicable checks ran"
    said += "." if trained else "; training was not tested."
    said += " Consequences and limits are ours, not the paper's."
    if report.corpus.predictions < limits.least_tokens:
        said += f" The text is short: tails need at least {limits.least_tokens:,.0f} tokens."
    if report.ppl is not None and report.ppl > vocab:
        said += (
            f" A perplexity of {report.ppl:,.0f} is worse than guessing among {vocab:,} tokens: check text, tokenizer and "
            "weights."
        )
    return said


def applies(decision: Decision) -> bool:
    """Whether the stage can be evaluated for this model; one that cannot, such as the router's of a dense model, is harmless."""
    return decision.fired is not None or decision.consequence is None or decision.consequence.matters is not False


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"
