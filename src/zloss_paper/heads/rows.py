"""Rows of the raw/centered tables out of an audit report."""

from __future__ import annotations

from collections.abc import Sequence

from zloss.results.audit import AuditReport
from zloss_paper.engine.recipe import Measured
from zloss_paper.engine.table import Key, Row, Table, measured
from zloss_paper.engine.workbench import DEPLOYED, Workbench
from zloss_paper.heads.audit_rows import AuditRow, AuditTableConfig


def head_rows(row: AuditRow, report: AuditReport, columns: Sequence[str], *, with_corpus: bool = False) -> list[Row]:
    """The raw and the centered line of one audit."""
    lines = []
    for head in ("raw", "centered"):
        key: dict[str, Key] = {"model": row.model, "head": head}
        beside: dict[str, Key] = {"model": row.beside, "head": head}
        if with_corpus:
            key = {"model": row.model, "corpus": row.corpus, "head": head}
            beside["corpus"] = row.beside_corpus
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
        lines.append(Row(key, measured(values), reasons, row.deviations, beside))
    return lines


def _perplexity(report: AuditReport, head: str) -> tuple[float | None, str]:
    """The audit's for the raw head; for the centered one that of its logits as deployed."""
    if head == "raw":
        return report.ppl, "" if report.ppl is not None else report.reason("ppl") or "not measured"
    deployed = report.extra.get(DEPLOYED) or {}
    return deployed.get("centered"), deployed.get("reason") or ""


def run_head_table(
    config: AuditTableConfig, bench: Workbench, columns: Sequence[str], *, with_corpus: bool = False
) -> Measured:
    """Audit every row of the table."""
    rows: list[Row] = []
    audits = []
    for row in config.rows:
        report = bench.audit(row.audit, deployed=config.deployed)
        rows += head_rows(row, report, columns, with_corpus=with_corpus)
        audits.append(audit_summary(row, report))
    return Measured(Table(tuple(rows)), texts=config.texts, details={"audits": audits})


def audit_summary(row: AuditRow, report: AuditReport) -> dict[str, object]:
    """What the rows of one audit rest on."""
    return {
        "model": row.model,
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
