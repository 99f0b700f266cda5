"""The implementation stage: errors of the backward source and of the update, and the findings of loss audits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from zloss.decide.remedies import remedies_for
from zloss.decide.stage_outcome import StageOutcome, joined_sentence, unevaluated
from zloss.decide.stages import IMPLEMENTATION
from zloss.decide.thresholds import Thresholds
from zloss.results.decision import Effect
from zloss.results.implementation_audit import ImplementationAudit
from zloss.results.loss_audit import LossAudit
from zloss.results.update_error import UpdateError


@dataclass(frozen=True)
class _SourceError:
    """Δ_src of an audited loss, or of logits stored in one dtype."""

    name: str
    """Where the logits were stored; empty for an audited loss."""
    delta_src: float
    forward: float | None


def implementation(
    loss_audits: Sequence[LossAudit],
    thresholds: Thresholds,
    update_errors: Sequence[UpdateError] = (),
    implementation_audits: Sequence[ImplementationAudit] = (),
) -> StageOutcome:
    """The largest Δ_src and Δ_θ of the audited losses and storage dtypes, and the findings of the losses' audits.

    Δ_θ is that of `update_errors` and of the implementation audits, and of a linear loss the error of dW on bf16 operands.
    """
    if not loss_audits and not update_errors and not implementation_audits:
        return unevaluated(IMPLEMENTATION, "no audit of a loss or of an implementation was given")
    sources, updates = _sources(loss_audits, implementation_audits), _updates(loss_audits, implementation_audits)
    worst_source = max(sources, key=lambda source: source.delta_src, default=None)
    worst_update = max([*update_errors, *updates], key=lambda update: update.delta_theta, default=None)
    found = [finding.id for audit in loss_audits for finding in audit.errors]
    lesser = [finding.id for audit in loss_audits for finding in audit.found if finding not in audit.errors]
    if worst_source is None and worst_update is None and not found:
        beside = f" (warnings and notes: {', '.join(lesser)})" if lesser else ""
        return unevaluated(IMPLEMENTATION, f"the audits hold neither Δ_src nor Δ_θ{beside}")
    parts, far = [], []
    if worst_source is not None:
        far.append(worst_source.delta_src > thresholds.delta_src)
        where = f" ({worst_source.name})" if worst_source.name else ""
        verb = "exceeds" if far[-1] else "stays within"
        parts.append(f"Δ_src = {worst_source.delta_src:.3g}{where} {verb} {thresholds.delta_src:g}")
        within = [source.name for source in sources if source.name and source.delta_src <= thresholds.delta_src]
        if far[-1] and within:
            parts.append(f"within it: {', '.join(within)}")
    if worst_update is not None:
        far.append(worst_update.delta_theta > thresholds.delta_theta)
        verb = "exceeds" if far[-1] else "stays within"
        parts.append(f"Δ_θ = {worst_update.delta_theta:.3g} ({worst_update.name}) {verb} {thresholds.delta_theta:g}")
    if loss_audits:
        parts.append("errors: " + ", ".join(found) if found else "no errors" if lesser else "no findings")
    parts += ["warnings and notes: " + ", ".join(lesser)] if lesser else []
    effects = tuple(
        Effect("Relative error: forward value → backward source", source.forward, source.delta_src, note=source.name)
        for source in sources
        # Beside another finding the two errors are no before and after: its remedy changes neither.
        if source.forward is not None and source.delta_src > thresholds.delta_src
    )
    # Errors beyond a limit without a finding are those of stored precision.
    causes = found if found else ["low_precision_source"]
    return StageOutcome(
        worst_source.delta_src if worst_source else worst_update.delta_theta if worst_update else None,
        thresholds.delta_src if worst_source or not worst_update else thresholds.delta_theta,
        any(far) or bool(found),
        joined_sentence(parts),
        effects,
        action=remedies_for(causes),
    )


def _sources(loss_audits: Sequence[LossAudit], audits: Sequence[ImplementationAudit]) -> list[_SourceError]:
    found = [
        _SourceError("", audit.source.delta_src, audit.source.forward_rel_error)
        for audit in loss_audits
        if audit.source.delta_src is not None
    ]
    # On a model's own logits a Z far smaller than CE may drown in the rounding of CE, which is no fault of the loss.
    found += [
        _SourceError(f"the loss on {one.model}", one.delta_src, one.forward_rel_error)
        for audit in loss_audits
        if (one := audit.target_model) is not None and one.delta_src is not None and one.beyond_rounding
    ]
    return found + [
        _SourceError(f"logits of {audit.model.name} stored in {line.storage}", line.delta_src, line.forward_rel_error)
        for audit in audits
        for line in audit.own_source
        if line.delta_src is not None
    ]


def _updates(loss_audits: Sequence[LossAudit], audits: Sequence[ImplementationAudit]) -> list[UpdateError]:
    errors = [audit.source.bf16_inputs for audit in loss_audits]
    return [UpdateError("dW", error) for error in errors if error is not None] + [
        update for audit in audits for update in audit.update_errors
    ]
