"""What the joined results say together: decisions and verdict of every result, and the next command."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from zloss.decide import stages
from zloss.decide.consequences import give_verdict
from zloss.decide.decision_map import decide, with_decisions
from zloss.decide.thresholds import Thresholds, stored_thresholds
from zloss.decide.verdict import evaluated_comparison
from zloss.errors import InputError
from zloss.results.audit import AuditReport
from zloss.results.comparison import Comparison
from zloss.results.decision import ActionVerdict, Decision, DecisionMap
from zloss.results.drift import Drift
from zloss.results.implementation_audit import ImplementationAudit
from zloss.results.loss_audit import LossAudit
from zloss.results.recommendation import Recommendation
from zloss.results.reproduction import ReproductionRecord
from zloss.results.router import MeasuredScale, RouterScaleTable

ORDER = tuple(
    stage.name
    for stage in (
        *(stages.IMPLEMENTATION, stages.ROUTER, stages.QUALITY, stages.SOURCE),
        *(stages.DECOMPOSITION, stages.TRANSPORT, stages.PATHWAY, stages.OPTIMIZER),
    )
)
"""The order in which to look at stages that fired: first what every other number rests on, last what follows from the others."""


def ordered_stages(decisions: Sequence[Decision]) -> tuple[str, ...]:
    """Names of the fired stages in the order in which to look at them."""
    fired = [decision.stage for decision in decisions if decision.fired]
    return tuple(sorted(fired, key=lambda stage: ORDER.index(stage) if stage in ORDER else len(ORDER)))


@dataclass(frozen=True)
class AuditedInput:
    """Model and text as the user passed them, for the next command."""

    model: str
    texts: tuple[str, ...] = ()
    corpus: str | None = None
    valid_vocab: int | str | None = None
    dtype: str = "fp32"
    tokenizer: str | None = None
    argv: tuple[str, ...] = ()
    """The command line of the audit after `zloss`, for a command that repeats it; empty if it is unknown."""


@dataclass(frozen=True)
class NextCommand:
    """The command and what it tells."""

    argv: Sequence[str]
    why: str
    """What to do and learn with it, in one sentence without a full stop."""

    @property
    def line(self) -> str:
        """The command as it is typed."""
        return " ".join(word if word in PLACEHOLDERS else shlex.quote(word) for word in self.argv)


RECOMMENDED_ON = 256
"""Default block size of `zloss recommend`, in tokens."""
PLACEHOLDERS = ("MODULE:FUNCTION",)
"""Arguments that the user replaces."""


def next_command(report: AuditReport, given: AuditedInput) -> NextCommand:
    """The command that follows from the verdict of `report`; the first rule that applies.

    1. The audit was interrupted, or has nonfinite numbers and ran in 16 bits: repeat it, whole or in fp32.
    2. The verdict is `center`, or training runs must settle it: `zloss center`, `zloss recommend`.
    3. The text was too short, or the gradients of a tied head were left out: the audit with more of it.
    4. The reduction of the router loss is off: `zloss router-scale`.
    5. Otherwise: the audit of the loss, which the numbers of a checkpoint cannot replace.
    """
    text = [word for name in given.texts for word in ("--text", name)]
    text += [] if given.corpus is None else ["--corpus", given.corpus]
    valid_vocab = [] if given.valid_vocab is None else ["--valid-vocab", str(given.valid_vocab)]
    # If an option is given twice, the last one counts.
    audit = ["zloss", *(given.argv or ["audit", given.model, *text, *valid_vocab])]
    size, router, bad = report.corpus.block_size, report.router, report.nonfinite.nan + report.nonfinite.inf
    if report.status == "partial":
        whole = audit if "--resume" in audit else [*audit, "--resume"]
        return NextCommand(whole, "finish the text, because this audit was interrupted")
    if bad and given.dtype == "bf16":
        why = f"find out whether the {bad} tokens with nonfinite statistics come from {given.dtype} or from the weights"
        return NextCommand([*audit, "--dtype", "fp32"], why)
    decided = {decision.stage: decision for decision in report.decisions}
    mattering = {name for name, one in decided.items() if one.consequence is not None and one.consequence.matters}
    action = None if report.verdict is None else report.verdict.action
    if action == "center":
        return NextCommand(
            ["zloss", "center", given.model, *text, *valid_vocab, "--out", "zloss-centered"],
            "write a copy with a centered head, and compare perplexity and 16-bit noise before and after",
        )
    if action == "not_enough_evidence" and mattering & {stages.DECOMPOSITION.name, stages.TRANSPORT.name}:
        # A model with few positions needs shorter blocks; a size that the user set is for the audit alone.
        short = size < RECOMMENDED_ON and "--block-size" not in given.argv
        blocks = ["--block-size", str(size)] if short else []
        blocks += [] if given.tokenizer is None else ["--tokenizer", given.tokenizer]
        return NextCommand(
            ["zloss", "recommend", given.model, *text, *blocks, "--out", "zloss-recommend"],
            "train short matched runs with and without Z-loss, and confirm the best one on further seeds",
        )
    if (
        action == "not_enough_evidence"
        and report.corpus.predictions < stored_thresholds(report.thresholds).least_tokens
    ):
        if "--blocks" in audit:
            place = audit.index("--blocks")
            audit = audit[:place] + audit[place + 2 :]
        return NextCommand([*audit, "--blocks", "64"], "measure more of the text")
    if report.model.tied and report.gradient is None and decided[stages.PATHWAY.name].fired is None:
        return NextCommand(
            [*audit, "--gradient-blocks", "8"],
            "measure how much of the Z gradient reaches the tied table through the input embedding",
        )
    if decided[stages.ROUTER.name].fired and router is not None:
        return NextCommand(
            [
                *("zloss", "router-scale", "--coef", f"{router.coef:g}", "--from", router.convention),
                *("--layers", str(router.layers), "--top-k", str(router.top_k)),
            ],
            "see which coefficient has the same strength under every convention of the router loss",
        )
    return NextCommand(
        ["zloss", "audit-loss", "MODULE:FUNCTION"],
        "check that your training loss applies the λ, c and denominator that you believe it does",
    )


def joined_models(
    audit: AuditReport | None,
    loss_audits: Sequence[LossAudit] = (),
    implementation_audits: Sequence[ImplementationAudit] = (),
    comparisons: Sequence[Comparison] = (),
) -> str | None:
    """One sentence that names the model of every result that records one; None if it is one model.

    One decision map is filled from all results. A stage of a comparison then says nothing about another model that was audited.
    """
    targets = [one.target_model for one in loss_audits]
    named: dict[str, list[str]] = {
        "audit": [] if audit is None else [audit.model.name],
        "loss audit": [target.model for target in targets if target is not None],
        "implementation audit": [one.model.name for one in implementation_audits],
        "comparison": [one.model for one in comparisons if one.model is not None],
    }
    if len({model for models in named.values() for model in models}) < 2:
        return None
    parts = []
    for kind, models in named.items():
        if models:
            several = f"the {kind}s are" if len(models) > 1 else f"the {kind} is"
            parts.append(f"{several} of {' and '.join(dict.fromkeys(models))}")
    return f"The joined results are of different models: {', '.join(parts)}."


@dataclass(frozen=True)
class DecidedResults:
    """Audits, audits of losses and implementations, comparisons and router scales, decided together; reproductions,
    drifts and recommendations with them."""

    audits: tuple[AuditReport, ...] = ()
    """Each with its own decision map, which the other results fill too."""
    loss_audits: tuple[LossAudit, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    """Each with a verdict on every method."""
    shared: DecisionMap | None = None
    """The one map where there is no audit; None without audits means that nothing was given that a map is made of."""
    router_scales: tuple[RouterScaleTable, ...] = ()
    measured_routers: tuple[MeasuredScale, ...] = ()
    reproductions: tuple[ReproductionRecord, ...] = ()
    """Shown with their own claims and verdicts; no stage reads them."""
    implementation_audits: tuple[ImplementationAudit, ...] = ()
    drifts: tuple[Drift, ...] = ()
    """Each with its own judgement, made when it was measured; no stage reads them."""
    recommendations: tuple[Recommendation, ...] = ()
    """Each with its own map of eight stages."""

    def __post_init__(self) -> None:
        if any(not audit.decisions for audit in self.audits):
            raise InputError("an audit without decisions was given: call `decide_results` or `with_decisions` first.")

    @property
    def maps(self) -> tuple[DecisionMap, ...]:
        """The map of each audit by its name, or the shared one."""
        others = (self.loss_audits, self.implementation_audits, self.comparisons)
        if self.shared is not None:
            return (replace(self.shared, models=joined_models(None, *others)),)
        return tuple(
            replace(_map(name, audit.thresholds, audit.decisions, audit.verdict), models=joined_models(audit, *others))
            for name, audit in zip(audit_names(self.audits), self.audits, strict=True)
        )


def decide_results(
    audits: Sequence[AuditReport] = (),
    loss_audits: Sequence[LossAudit] = (),
    comparisons: Sequence[Comparison] = (),
    thresholds: Thresholds | None = None,
    *,
    router_scales: Sequence[RouterScaleTable] = (),
    measured_routers: Sequence[MeasuredScale] = (),
    reproductions: Sequence[ReproductionRecord] = (),
    implementation_audits: Sequence[ImplementationAudit] = (),
    drifts: Sequence[Drift] = (),
    recommendations: Sequence[Recommendation] = (),
) -> DecidedResults:
    """Evaluate the decision map of each audit, or one map; without `thresholds` an audit keeps those stored in it."""
    limits = thresholds or Thresholds()
    shared = None
    routers: list[MeasuredScale | RouterScaleTable] = [*measured_routers, *router_scales]
    given: dict[str, Any] = {
        "loss_audits": loss_audits,
        "comparisons": comparisons,
        "implementation_audits": implementation_audits,
        "routers": routers,
    }
    if not audits and (any(given.values()) or not (reproductions or drifts or recommendations)):
        decisions = decide(None, **given, thresholds=limits)
        verdict = give_verdict(None, decisions, limits, comparisons=comparisons, recommendations=recommendations)
        shared = _map(None, limits.to_dict(), decisions, verdict)
    return DecidedResults(
        audits=tuple(
            with_decisions(audit, **given, recommendations=recommendations, thresholds=thresholds) for audit in audits
        ),
        loss_audits=tuple(loss_audits),
        comparisons=tuple(
            evaluated_comparison(comparison, limits, stated_thresholds=thresholds is not None)
            for comparison in comparisons
        ),
        shared=shared,
        router_scales=tuple(router_scales),
        measured_routers=tuple(measured_routers),
        reproductions=tuple(reproductions),
        implementation_audits=tuple(implementation_audits),
        drifts=tuple(drifts),
        recommendations=tuple(recommendations),
    )


def _map(
    name: str | None,
    thresholds: dict[str, float | None],
    decisions: tuple[Decision, ...],
    verdict: ActionVerdict | None,
) -> DecisionMap:
    sentence = None if verdict is None else verdict.sentence
    return DecisionMap(name, thresholds, decisions, sentence, ordered_stages(decisions), verdict=verdict)


def audit_names(audits: Sequence[AuditReport]) -> list[str]:
    """Short, distinct names: the model, with the corpus or a number where models repeat."""
    models = [report.model.name for report in audits]
    names = [
        m if models.count(m) == 1 else f"{m} · {report.corpus.name}" for m, report in zip(models, audits, strict=True)
    ]
    return [name if names.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(names)]
