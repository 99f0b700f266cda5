"""What the joined results say together: decisions and verdict of every result, and the next command."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from zloss.decide import stages
from zloss.decide.consequences import give_verdict
from zloss.decide.decision_map import Joined, decide, with_decisions
from zloss.decide.thresholds import Thresholds, stored_thresholds
from zloss.decide.verdict import evaluated_comparison
from zloss.errors import InputError
from zloss.results.audit import AuditReport
from zloss.results.comparison import Comparison
from zloss.results.decision import ActionVerdict, Decision, DecisionMap
from zloss.results.drift import Drift
from zloss.results.files import PLURALS, Reported
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
"""The order in which to check stages that fired: first what every other number depends on, last what follows from the others."""


def ordered_stages(decisions: Sequence[Decision]) -> tuple[str, ...]:
    """Names of the fired stages in the order in which to check them."""
    return tuple(sorted((decision.stage for decision in decisions if decision.fired), key=ORDER.index))


RECOMMENDED_ON = 256
"""Default block size of `zloss recommend`, in tokens."""


def next_command(
    report: AuditReport,
    model: str,
    *,
    texts: Sequence[str] = (),
    corpus: str | None = None,
    valid_vocab: int | str | None = None,
    dtype: str = "fp32",
    tokenizer: str | None = None,
    argv: Sequence[str] = (),
) -> tuple[str, str]:
    """(the command that follows from the verdict of `report`, what to do and learn with it); the first rule that applies.

    Model, text and options are as the user passed them; `argv` is the command line of the audit after `zloss`, if it is known.

    1. The audit was interrupted, or has nonfinite numbers and ran in 16 bits: repeat it, whole or in fp32.
    2. The verdict is `center`, or training runs must settle it: `zloss center`, `zloss recommend`.
    3. The text was too short, or the gradients of a tied head were left out: the audit with more of it.
    4. The reduction of the router loss is off: `zloss router-scale`.
    5. Otherwise: the audit of the loss, which the numbers of a checkpoint cannot replace.
    """
    text = [word for name in texts for word in ("--text", name)] + ([] if corpus is None else ["--corpus", corpus])
    vocab = [] if valid_vocab is None else ["--valid-vocab", str(valid_vocab)]
    # If an option is given twice, the last one counts.
    audit = ["zloss", *(argv or ["audit", model, *text, *vocab])]
    size, router, bad = report.corpus.block_size, report.router, report.nonfinite.nan + report.nonfinite.inf
    decided = {decision.stage: decision for decision in report.decisions}
    mattering = {name for name, one in decided.items() if one.consequence is not None and one.consequence.matters}
    action = None if report.verdict is None else report.verdict.action
    doubtful = action == "not_enough_evidence"
    command = ["zloss", "audit-loss", "MODULE:FUNCTION"]
    why = "check that your training loss applies the λ, c and denominator that you believe it does"
    if report.status == "partial":
        command = audit if "--resume" in audit else [*audit, "--resume"]
        why = "finish the text, because this audit was interrupted"
    elif bad and dtype == "bf16":
        command = [*audit, "--dtype", "fp32"]
        why = f"find out whether the {bad} tokens with nonfinite statistics come from {dtype} or from the weights"
    elif action == "center":
        command = ["zloss", "center", model, *text, *vocab, "--out", "zloss-centered"]
        why = "write a copy with a centered head, and compare perplexity and 16-bit noise before and after"
    elif doubtful and mattering & {stages.DECOMPOSITION.name, stages.TRANSPORT.name}:
        # A model with few positions needs shorter blocks; a size that the user set is for the audit alone.
        short = size < RECOMMENDED_ON and "--block-size" not in argv
        more = ["--block-size", str(size)] if short else []
        more += [] if tokenizer is None else ["--tokenizer", tokenizer]
        command = ["zloss", "recommend", model, *text, *more, "--out", "zloss-recommend"]
        why = "train short matched runs with and without Z-loss, and confirm the best one on fresh seeds"
    elif doubtful and report.corpus.predictions < stored_thresholds(report.thresholds).least_tokens:
        place = audit.index("--blocks") if "--blocks" in audit else len(audit)
        command = [*audit[:place], *audit[place + 2 :], "--blocks", "64"]
        why = "measure more of the text"
    elif report.model.tied and report.gradient is None and decided[stages.PATHWAY.name].fired is None:
        command = [*audit, "--gradient-blocks", "8"]
        why = "measure how much of the Z gradient reaches the tied table through the input embedding"
    elif decided[stages.ROUTER.name].fired and router is not None:
        command = ["zloss", "router-scale", "--coef", f"{router.coef:g}", "--from", router.convention]
        command += ["--layers", str(router.layers), "--top-k", str(router.top_k)]
        why = "see which coefficient has the same strength under every convention of the router loss"
    return shlex.join(command), why


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
    named = [
        *([] if audit is None else [("audit", audit.model.name)]),
        *(("loss audit", target.model) for target in targets if target is not None),
        *(("implementation audit", one.model.name) for one in implementation_audits),
        *(("comparison", one.model) for one in comparisons if one.model is not None),
    ]
    if len({model for _, model in named}) < 2:
        return None
    said = ", ".join(f"the {kind} is of {model}" for kind, model in dict.fromkeys(named))
    return f"The joined results are of different models: {said}."


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
    """The one map of results without an audit; None if there is an audit, or nothing to make a map from."""
    router_scales: tuple[RouterScaleTable, ...] = ()
    measured_routers: tuple[MeasuredScale, ...] = ()
    reproductions: tuple[ReproductionRecord, ...] = ()
    """Shown with their own claims and verdicts; no stage reads them."""
    implementation_audits: tuple[ImplementationAudit, ...] = ()
    drifts: tuple[Drift, ...] = ()
    """Each with its own verdict, reached when it was measured; no stage reads them."""
    recommendations: tuple[Recommendation, ...] = ()
    """Each with its own map of eight stages."""

    def __post_init__(self) -> None:
        if any(not audit.decisions for audit in self.audits):
            raise InputError("the audit has no decisions yet: call `decide_results` or `with_decisions` first.")

    @property
    def maps(self) -> tuple[DecisionMap, ...]:
        """The map of each audit by its name, or the shared one."""
        others = (self.loss_audits, self.implementation_audits, self.comparisons)
        if self.shared is not None:
            return (self.shared,)
        return tuple(
            _map(name, audit.thresholds, audit.decisions, audit.verdict, joined_models(audit, *others))
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
    given: Joined = {
        "loss_audits": loss_audits, "comparisons": comparisons, "implementation_audits": implementation_audits,
        "routers": routers,
    }  # fmt: skip
    if not audits and (any(given.values()) or not (reproductions or drifts or recommendations)):
        decisions = decide(None, **given, thresholds=limits)
        verdict = give_verdict(None, decisions, limits, comparisons, recommendations)
        models = joined_models(None, loss_audits, implementation_audits, comparisons)
        shared = _map(None, limits.to_dict(), decisions, verdict, models)
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


def decide_records(records: Iterable[Reported], thresholds: Thresholds | None = None) -> DecidedResults:
    """`decide_results` for results of any kind, in any order."""
    given: dict[str, Any] = {}
    for record in records:
        given.setdefault(PLURALS[type(record)], []).append(record)
    return decide_results(**given, thresholds=thresholds)


def _map(
    name: str | None,
    thresholds: dict[str, float | None],
    decisions: tuple[Decision, ...],
    verdict: ActionVerdict | None,
    models: str | None,
) -> DecisionMap:
    sentence = None if verdict is None else verdict.sentence
    return DecisionMap(name, thresholds, decisions, sentence, ordered_stages(decisions), models, verdict)


def audit_names(audits: Sequence[AuditReport]) -> list[str]:
    """Short, distinct names: the model, with the corpus or a number where models repeat."""
    models = [report.model.name for report in audits]
    names = [
        m if models.count(m) == 1 else f"{m} · {report.corpus.name}" for m, report in zip(models, audits, strict=True)
    ]
    return [name if names.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(names)]
