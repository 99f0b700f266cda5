"""The raw and the centered line of a table, read from an audit report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from zloss.results.audit import AuditReport
from zloss_paper.engine.audited_models import AuditedModel, AuditTableConfig
from zloss_paper.engine.recipe import RecipeResult
from zloss_paper.engine.table import Key, Line, Table, cells_of
from zloss_paper.engine.workbench import Workbench, text_blocks
from zloss_paper.heads.deployed import deployed_perplexity

DEPLOYED = "deployed_ppl"
"""Key of the deployed perplexities among the extras of a kept report."""


def run_head_table(
    config: AuditTableConfig, bench: Workbench, columns: Sequence[str], *, with_corpus: bool = False
) -> RecipeResult:
    """Audit every model of the table: two lines each."""
    lines: list[Line] = []
    audits = []
    for model in config.rows:
        report = head_audit(model, bench, deployed=config.deployed)
        lines += head_lines(model, report, columns, with_corpus=with_corpus)
        audits.append(audit_summary(model, report))
    return RecipeResult(Table(tuple(lines)), texts=config.texts, details={"audits": audits})


def head_audit(model: AuditedModel, bench: Workbench, *, deployed: bool) -> AuditReport:
    """The audit of a model; with `deployed` both perplexities of its head are among the report's extras."""

    def perplexities() -> dict[str, object]:
        checkpoint = bench.checkpoint(model.audit)
        return asdict(deployed_perplexity(checkpoint, text_blocks(model.audit, checkpoint), bench.progress))

    return bench.audit(model.audit, {DEPLOYED: perplexities} if deployed else None)


def head_lines(
    model: AuditedModel, report: AuditReport, columns: Sequence[str], *, with_corpus: bool = False
) -> list[Line]:
    """The raw and the centered line of one audit."""
    lines = []
    for head in ("raw", "centered"):
        key: dict[str, Key] = {"model": model.model, "head": head}
        beside: dict[str, Key] = {"model": model.beside, "head": head}
        if with_corpus:
            key = {"model": model.model, "corpus": model.corpus, "head": head}
            beside["corpus"] = model.beside_corpus
        numbers = getattr(report.heads, head)
        values = {column: getattr(numbers, column) for column in columns if column != "ppl"}
        reasons = {
            column: report.reason(f"heads.{head}.{column}") or "not measured"
            for column, value in values.items()
            if value is None
        }
        if "ppl" in columns:
            values["ppl"], why = _perplexity(report, head)
            reasons |= {"ppl": why} if why else {}
        lines.append(Line(key, cells_of(values), reasons, model.deviations, beside))
    return lines


def _perplexity(report: AuditReport, head: str) -> tuple[float | None, str]:
    """The audit's for the raw head; for the centered one that of its logits as deployed."""
    if head == "raw":
        return report.ppl, "" if report.ppl is not None else report.reason("ppl") or "not measured"
    deployed = report.extra.get(DEPLOYED) or {}
    return deployed.get("centered"), deployed.get("reason") or ""


def audit_summary(model: AuditedModel, report: AuditReport) -> dict[str, object]:
    """Weights, text and time of one audit, for the JSON file."""
    return {
        "model": model.model,
        "weights": report.model.extra.get("source"),
        "vocab": report.model.vocab,
        "width": report.model.width,
        "tied": report.model.tied,
        "target": report.target,
        "predictions": report.corpus.predictions,
        "bos": report.corpus.bos,
        "nonfinite": {"nan": report.nonfinite.nan, "inf": report.nonfinite.inf},
        "seconds": {step: round(value, 1) for step, value in report.timings.items()},
    }
