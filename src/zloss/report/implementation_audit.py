"""An implementation audit as a document: stored logits, implementations, updates, fp16 margin."""

from __future__ import annotations

from collections.abc import Sequence

from zloss.report.audit import VERDICTS
from zloss.report.document import (
    Cell,
    Column,
    Document,
    Group,
    Heading,
    Item,
    Items,
    Plain,
    Row,
    Table,
    Text,
    cell,
    terms,
)
from zloss.report.numbers import MISSING, number
from zloss.results.comparison import method_label
from zloss.results.decision import Decision
from zloss.results.implementation_audit import ImplementationAudit
from zloss.results.quantities import Definition

PARTS = {"total": "CE+Z", "z": "Z"}
TEXTS = ("logits", "loss", "dtype", "gradient", "of", "method")
"""Columns that hold names."""
INTERPRETED = "* on Triton's interpreter, which truncates bf16 where a GPU rounds."


def implementation_audit_document(audit: ImplementationAudit) -> Document:
    """Everything about one audit."""
    status = " It was interrupted." if audit.status == "partial" else ""
    plain = audit.to_dict()
    titles = {"model": "Model", "corpus": "Text", "provenance": "Provenance", "timings": "Seconds"}
    return [
        Text(
            f"{audit.model.name} on {number(audit.corpus.predictions)} tokens of {audit.corpus.name}, λ {audit.coef:g}, "
            f"c {number(audit.target)}.{status}",
            "lead",
        ),
        *_tables(audit, digits=3),
        *(Text(note, "soft") for note in _notes(audit)),
        Group("columns", tuple(terms(title, plain[key]) for key, title in titles.items())),
    ]


def implementation_audit_summary(audit: ImplementationAudit, decisions: Sequence[Decision] = ()) -> Document:
    """What a terminal shows: a table per section, notes, and the stages that the audit evaluates."""
    stages = tuple(
        Item(
            decision.stage,
            VERDICTS[decision.fired][1],
            VERDICTS[decision.fired][0],
            decision.reason,
            ((f"→ {decision.action}", "strong"),) if decision.fired else (),
        )
        for decision in decisions
    )
    shape = f"{number(audit.corpus.predictions)} tokens, V {number(audit.model.vocab)}, λ {audit.coef:g}, c {audit.target:.4g}"
    return [
        Heading(Plain(f"{audit.model.name} on {audit.corpus.name}"), 1),
        Text(shape, "soft"),
        *_tables(audit, digits=2),
        *(Text(note, "soft") for note in _notes(audit)),
        *([Items(stages)] if stages else []),
    ]


def _notes(audit: ImplementationAudit) -> tuple[str, ...]:
    stars = any(line.interpreted for line in audit.implementations)
    notes = tuple(note if note.endswith(".") else f"{note}." for note in audit.notes)
    return ((INTERPRETED,) if stars else ()) + notes


def _tables(audit: ImplementationAudit, *, digits: int) -> Document:
    """The four sections; those of two digits have the short names of implementations, and fit 80 columns."""

    def n(value: float | None) -> Cell:
        return cell(value, digits)

    def distance(cosine: float | None) -> Cell:
        """1 − cosine, which rounding may make a little negative."""
        return Cell(MISSING) if cosine is None else n(max(1 - cosine, 0.0))

    stored: list[Row] = [
        (
            _scaled(line.storage, line.logit_scale), n(line.forward_rel_error), n(line.delta_src), n(line.delta_src_p99),
            n(line.delta_src_max), distance(line.backward_cosine), n(line.nonfinite),
        )
        for line in audit.source
    ]  # fmt: skip
    applied: list[Row] = [
        (
            Plain(f"{line.title if digits > 2 else line.implementation}{' *' if line.interpreted else ''}"), line.storage,
            n(line.rel_forward_error), n(line.delta_total), distance(line.total_cosine), n(line.delta_z),
            n(line.kernel_delta_z),
        )
        for line in audit.implementations
    ]  # fmt: skip
    updates: list[Row] = [
        (
            _scaled(line.storage, line.logit_scale), PARTS[line.part], line.scope, n(line.grad_rel_error),
            distance(line.grad_cosine), n(line.adam_dir_rel_error), distance(line.adam_dir_cosine),
        )
        for line in audit.updates
    ]  # fmt: skip
    scales = [key.removeprefix("psi_") for line in audit.overflow for key in line.psi]
    largest = max((int(scale) for scale in scales if scale.isdecimal()), default=65536)
    overflow: list[Row] = [
        (
            Plain(method_label(line.method, line.coef)), n(line.batches), n(line.grad_norm_mean), n(line.grad_inf_mean),
            n(line.kappa_min), n(line.psi.get(f"psi_{largest}")),
        )
        for line in audit.overflow
    ]  # fmt: skip
    sections = (
        (
            "source", "Stored logits: the Z source against fp64", stored,
            ("logits", "forward", "Δ_src", "p99", "max", "1 − cos", "nonfinite"),
            {
                "forward": "relative error of the loss value",
                "Δ_src, p99, max": "relative error of a token's Z source: mean, 99 % quantile and largest over tokens",
                "1 − cos": "1 minus the cosine with the fp64 source",
            },
        ),
        (
            "implementations", "Implementations: the gradient they return, against fp64", applied,
            ("loss", "dtype", "forward", "Δ_tot", "1 − cos", "Δ_Z", "own Δ_Z"),
            {
                "Δ_tot, Δ_Z": "relative error of the gradient of CE+Z, and of its Z part",
                "own Δ_Z": "Δ_Z against fp64 on the same stored logits: what the implementation itself adds",
            },
        ),
        (
            "updates", "Update: gradient and first Adam direction", updates,
            ("logits", "gradient", "of", "Δ_θ", "1 − cos", "Adam error", "1 − cos"),
            {"Δ_θ, Adam error": "relative error of the parameter gradient, and of the first Adam direction"},
        ),
        (
            "overflow", "fp16: full-model gradients before clipping", overflow,
            ("method", "batches", "mean ‖g‖₂", "mean ‖g‖∞", "κ_min", f"Ψ_{largest}"),
            {
                "κ_min": "smallest over batches of the largest safe static fp16 loss scale",
                f"Ψ_{largest}": "share of batches whose gradient overflows fp16 at that loss scale",
            },
        ),
    )  # fmt: skip
    document: Document = []
    for key, title, rows, columns, meanings in sections:
        document.append(Heading(title, 3))
        if not rows:
            document.append(Text(f"Not measured: {audit.reasons.get(key, 'it was left out')}.", "soft"))
            continue
        legend = tuple(Definition(name, name, meaning) for name, meaning in meanings.items())
        shown = tuple(Column(title, "text" if title in TEXTS else "number", _entry(title, legend)) for title in columns)
        document.append(Table(shown, tuple(rows), legend=legend, name="numbers"))
    return document


def _entry(title: str, legend: Sequence[Definition]) -> Definition | None:
    return next((entry for entry in legend if title in entry.symbol.split(", ")), None)


def _scaled(storage: str, scale: float) -> Plain:
    return Plain(storage if scale == 1 else f"{storage} × {scale:g}")
