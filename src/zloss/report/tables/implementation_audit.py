"""Tables of an implementation audit: stored logits, implementations, updates, fp16 margin."""

from __future__ import annotations

from dataclasses import dataclass

from zloss.report.tables.comparison import Cell, ShownTable
from zloss.report.text.numbers import MISSING, number
from zloss.results.implementation_audit import ImplementationAudit
from zloss.results.method_label import method_label

PARTS = {"total": "CE+Z", "z": "Z"}
SCOPES = {"head": "head", "all": "all"}
STORED, APPLIED, UPDATED, ROOM = (
    "Stored logits: the Z source against fp64",
    "Implementations: the gradient they return, against fp64",
    "Update: gradient and first Adam direction",
    "fp16: full-model gradients before clipping",
)
LEGENDS = {
    STORED: {
        "forward": "relative error of the loss value",
        "Δ_src, p99, max": "relative error of a token's Z source: mean, 99 % quantile and largest over tokens",
        "1 − cos": "1 minus the cosine with the fp64 source",
    },
    APPLIED: {
        "Δ_tot, Δ_Z": "relative error of the gradient of CE+Z, and of its Z part",
        "own Δ_Z": "Δ_Z against fp64 on the same stored logits: what the implementation itself adds",
    },
    UPDATED: {
        "Δ_θ, Adam error": "relative error of the parameter gradient, and of the first Adam direction",
    },
    ROOM: {
        "κ_min": "smallest over batches of the largest safe static fp16 loss scale",
        "Ψ": "share of batches whose gradient overflows fp16 at that loss scale",
    },
}
"""Title of a section → the symbols of its columns and what they mean."""


@dataclass(frozen=True)
class TitledTable:
    """One section with what stands above it."""

    title: str
    first: str
    """Title of the first column."""
    table: ShownTable
    missing: str
    """Why there is no line; empty where there are some."""


def implementation_tables(audit: ImplementationAudit, *, narrow: bool = False) -> tuple[TitledTable, ...]:
    """The four sections; `narrow` ones have two digits and the short names of implementations, and fit 80 columns."""
    show = _Show(2 if narrow else 3)
    return (
        TitledTable(STORED, "logits", _stored(audit, show), _why(audit, "source")),
        TitledTable(
            APPLIED,
            "loss",
            _applied(audit, show, titles=not narrow),
            _why(audit, "implementations"),
        ),
        TitledTable(UPDATED, "logits", _updates(audit, show), _why(audit, "updates")),
        TitledTable(ROOM, "method", _rooms(audit, show), _why(audit, "overflow")),
    )


@dataclass(frozen=True)
class _Show:
    """Numbers as cells."""

    digits: int

    def cell(self, value: float | None) -> Cell:
        return number(value, self.digits), value

    def distance(self, cosine: float | None) -> Cell:
        """1 − cosine, which rounding may make a little negative."""
        return (MISSING, None) if cosine is None else self.cell(max(1 - cosine, 0.0))


def _why(audit: ImplementationAudit, section: str) -> str:
    return "" if getattr(audit, section) else audit.reasons.get(section, "not measured")


def _stored(audit: ImplementationAudit, show: _Show) -> ShownTable:
    lines = tuple(
        (
            _scaled(line.storage, line.logit_scale),
            (
                show.cell(line.forward_rel_error),
                show.cell(line.delta_src),
                show.cell(line.delta_src_p99),
                show.cell(line.delta_src_max),
                show.distance(line.backward_cosine),
                show.cell(line.nonfinite),
            ),
        )
        for line in audit.source
    )
    return ShownTable(("forward", "Δ_src", "p99", "max", "1 − cos", "nonfinite"), lines)


def _applied(audit: ImplementationAudit, show: _Show, *, titles: bool) -> ShownTable:
    lines = tuple(
        (
            f"{line.title if titles else line.implementation}{' *' if line.interpreted else ''}",
            (
                (line.storage, None),
                show.cell(line.rel_forward_error),
                show.cell(line.delta_total),
                show.distance(line.total_cosine),
                show.cell(line.delta_z),
                show.cell(line.kernel_delta_z),
            ),
        )
        for line in audit.implementations
    )
    return ShownTable(("dtype", "forward", "Δ_tot", "1 − cos", "Δ_Z", "own Δ_Z"), lines)


def _updates(audit: ImplementationAudit, show: _Show) -> ShownTable:
    lines = tuple(
        (
            _scaled(line.storage, line.logit_scale),
            (
                (PARTS[line.part], None),
                (SCOPES[line.scope], None),
                show.cell(line.grad_rel_error),
                show.distance(line.grad_cosine),
                show.cell(line.adam_dir_rel_error),
                show.distance(line.adam_dir_cosine),
            ),
        )
        for line in audit.updates
    )
    return ShownTable(("gradient", "of", "Δ_θ", "1 − cos", "Adam error", "1 − cos"), lines)


def _rooms(audit: ImplementationAudit, show: _Show) -> ShownTable:
    scales = [key.removeprefix("psi_") for line in audit.overflow for key in line.psi]
    largest = max((int(scale) for scale in scales if scale.isdecimal()), default=65536)
    lines = tuple(
        (
            method_label(line.method, line.coef),
            (
                show.cell(line.batches),
                show.cell(line.grad_norm_mean),
                show.cell(line.grad_inf_mean),
                show.cell(line.kappa_min),
                show.cell(line.psi.get(f"psi_{largest}")),
            ),
        )
        for line in audit.overflow
    )
    return ShownTable(("batches", "mean ‖g‖₂", "mean ‖g‖∞", "κ_min", f"Ψ_{largest}"), lines)


def _scaled(storage: str, scale: float) -> str:
    return storage if scale == 1 else f"{storage} × {scale:g}"
