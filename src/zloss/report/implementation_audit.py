"""An implementation audit as a document: stored logits, implementations, updates, fp16 margin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from zloss.report.audit import stage_item
from zloss.report.document import Cell, Column, Document, Group, Heading, Items, Plain, Text, cell, table, terms
from zloss.report.logprobs import logprob_document
from zloss.report.numbers import number
from zloss.results.comparison import method_label
from zloss.results.decision import Decision
from zloss.results.implementation_audit import ImplementationAudit

PARTS = {"total": "CE+Z", "z": "Z"}
TEXTS = ("logits", "loss", "dtype", "gradient", "of", "method")
"""Columns that hold names."""
INTERPRETED = "* on Triton's interpreter, which truncates bf16 where a GPU rounds."


def implementation_audit_document(audit: ImplementationAudit) -> Document:
    """Everything about one audit."""
    status = " It was interrupted." if audit.status == "partial" else ""
    plain = audit.to_dict()
    # On the page only: the table is too wide for a terminal.
    noise: Document = [Heading("Log-probabilities from 16-bit logits", 3), *logprob_document(audit.logprobs)]
    titles = {"model": "Model", "corpus": "Text", "provenance": "Provenance", "timings": "Seconds"}
    return [
        Text(
            f"{audit.model.name} on {number(audit.corpus.predictions)} tokens of {audit.corpus.name}, λ {audit.coef:g}, "
            f"c {number(audit.target)}.{status}",
            "lead",
        ),
        *_sections(audit, digits=3),
        *(noise if audit.logprobs else []),
        Group("columns", tuple(terms(title, plain[key]) for key, title in titles.items())),
    ]


def implementation_audit_summary(audit: ImplementationAudit, decisions: Sequence[Decision] = ()) -> Document:
    """What a terminal shows: a table per section, notes, and the stages that the audit evaluates."""
    shape = f"{number(audit.corpus.predictions)} tokens, V {number(audit.model.vocab)}, λ {audit.coef:g}, c {audit.target:.4g}"
    return [
        Heading(Plain(f"{audit.model.name} on {audit.corpus.name}"), 1),
        Text(shape, "soft"),
        *_sections(audit, digits=2),
        *([Items(tuple(map(stage_item, decisions)))] if decisions else []),
    ]


def _sections(audit: ImplementationAudit, *, digits: int) -> Document:
    """The four sections and the notes; with two digits and the short names of implementations they fit 80 columns."""
    scales = [key.removeprefix("psi_") for line in audit.overflow for key in line.psi]
    psi = f"psi_{max((int(scale) for scale in scales if scale.isdecimal()), default=65536)}"
    overflows = psi.replace("psi", "Ψ")

    def distance(cosine: float | None) -> Cell:
        """1 − cosine, which rounding may make a little negative."""
        return cell(None if cosine is None else max(1 - cosine, 0.0), digits)

    def implementation(line: Any) -> str:
        return Plain(f"{line.title if digits > 2 else line.implementation}{' *' if line.interpreted else ''}")

    sections: tuple[tuple[str, str, Sequence[Any], tuple[tuple[str, Any], ...], dict[str, str]], ...] = (
        (
            "source", "Stored logits: the Z source against fp64", audit.source,
            (
                ("logits", _scaled), ("forward", "forward_rel_error"), ("Δ_src", "delta_src"), ("p99", "delta_src_p99"),
                ("max", "delta_src_max"), ("1 − cos", lambda line: distance(line.backward_cosine)), ("nonfinite", "nonfinite"),
            ),
            {
                "forward": "relative error of the loss value",
                "Δ_src, p99, max": "relative error of a token's Z source: mean, 99 % quantile and largest over tokens",
                "1 − cos": "1 minus the cosine with the fp64 source",
            },
        ),
        (
            "implementations", "Implementations: the gradient they return, against fp64", audit.implementations,
            (
                ("loss", implementation), ("dtype", lambda line: line.storage), ("forward", "rel_forward_error"),
                ("Δ_tot", "delta_total"), ("1 − cos", lambda line: distance(line.total_cosine)), ("Δ_Z", "delta_z"),
                ("own Δ_Z", "kernel_delta_z"),
            ),
            {
                "Δ_tot, Δ_Z": "relative error of the gradient of CE+Z, and of its Z part",
                "own Δ_Z": "Δ_Z against fp64 on the same stored logits: what the implementation itself adds",
            },
        ),
        (
            "updates", "Update: gradient and first Adam direction", audit.updates,
            (
                ("logits", _scaled), ("gradient", lambda line: PARTS[line.part]), ("of", lambda line: line.scope),
                ("Δ_θ", "grad_rel_error"), ("1 − cos", lambda line: distance(line.grad_cosine)),
                ("Adam error", "adam_dir_rel_error"), ("1 − cos", lambda line: distance(line.adam_dir_cosine)),
            ),
            {"Δ_θ, Adam error": "relative error of the parameter gradient, and of the first Adam direction"},
        ),
        (
            "overflow", "fp16: full-model gradients before clipping", audit.overflow,
            (
                ("method", lambda line: Plain(method_label(line.method, line.coef))), ("batches", "batches"),
                ("mean ‖g‖₂", "grad_norm_mean"), ("mean ‖g‖∞", "grad_inf_mean"), ("κ_min", "kappa_min"),
                (overflows, lambda line: cell(line.psi.get(psi), digits)),
            ),
            {
                "κ_min": "smallest over batches of the largest safe static fp16 loss scale",
                overflows: "share of batches whose gradient overflows fp16 at that loss scale",
            },
        ),
    )  # fmt: skip
    document: Document = []
    for key, title, lines, columns, meanings in sections:
        document.append(Heading(title, 3))
        if not lines:
            document.append(Text(f"Not measured: {audit.reasons.get(key, 'it was left out')}.", "soft"))
            continue
        shown = [(Column(name, "text") if name in TEXTS else name, made) for name, made in columns]
        document.append(table(lines, shown, digits=digits, meanings=meanings, name="numbers"))
    notes = [note if note.endswith(".") else f"{note}." for note in audit.notes]
    starred = [INTERPRETED] if any(line.interpreted for line in audit.implementations) else []
    return [*document, *(Text(note, "soft") for note in starred + notes)]


def _scaled(line: Any) -> str:
    return Plain(line.storage if line.logit_scale == 1 else f"{line.storage} × {line.logit_scale:g}")
