"""What keeps audits that stand side by side from being compared number by number."""

from __future__ import annotations

from collections.abc import Sequence

from zloss.report.text.numbers import coefficient, number
from zloss.results.audit import AuditReport


def differences(named: Sequence[tuple[str, AuditReport]]) -> list[str]:
    """A sentence where the audits have different texts or amounts of text, and one where λ_diag differs."""
    sentences = []
    texts = [_text(report) for _, report in named]
    if len(set(texts)) > 1:
        listed = "; ".join(f"{name}: {_described(report)}" for name, report in named)
        sentences.append(
            f"Not on the same text, so PPL and tails are not comparable between the audits ({listed}). "
            "σ_1 and E_16 depend on the weights alone."
        )
    coefs = [report.diag_coef for _, report in named]
    if len(set(coefs)) > 1:
        listed = ", ".join(f"{name} {coefficient(coef)}" for (name, _), coef in zip(named, coefs, strict=True))
        sentences.append(f"Diag Z, ‖δ_u‖ and R_Z are in proportion to λ_diag, which differs: {listed}.")
    if any(report.status == "partial" for _, report in named):
        partial = ", ".join(name for name, report in named if report.status == "partial")
        sentences.append(f"Interrupted, so on a part of the text: {partial}.")
    return sentences


def _text(report: AuditReport) -> tuple[object, ...]:
    """What identifies the tokens up to the tokenizer; two models read one text as different tokens."""
    corpus = report.corpus
    files = corpus.extra.get("files")
    content = [file.get("sha256") for file in files if isinstance(file, dict)] if isinstance(files, list) else []
    return (corpus.name, corpus.blocks, corpus.block_size, corpus.extra.get("offset"), tuple(map(str, content)))


def _described(report: AuditReport) -> str:
    corpus = report.corpus
    return f"{corpus.name}, {number(corpus.predictions)} predictions in blocks of {corpus.block_size}"
