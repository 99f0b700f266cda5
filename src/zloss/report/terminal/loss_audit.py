"""The audit of a loss on a terminal: what it applies, then the verdicts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from zloss.results.loss_audit import LossAudit

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MARKS = {
    "finding": ("✗ finding", "bold red"),
    "pass": ("✓ pass", "green"),
    "not_applicable": ("· not applicable", "dim"),
}


def print_loss_audit(audit: LossAudit, console: Console | None = None) -> None:
    """Headline, identified objective, source error, verdict table."""
    from rich.console import Console
    from rich.text import Text

    console = console or Console()
    # `Text`, not markup: names of losses may hold square brackets.
    console.print(Text(str(audit.provenance.get("loss", "loss")), style="bold"))
    console.print(Text(headline(audit)))
    console.print(Text(source_line(audit), style="dim"))
    console.print(verdict_table(audit))
    found = [finding.id for finding in audit.found]
    text = f"{len(found)} finding{'s' * (len(found) != 1)}: {', '.join(found)}" if found else "No finding."
    console.print(Text(text, style="bold red" if found else "bold green"))


def headline(audit: LossAudit) -> str:
    """The identified objective in one line."""
    got = audit.identified
    ce = f"CE over {got.ce_denominator}"
    if got.label_smoothing:
        ce += f" (label smoothing {got.label_smoothing:.4g})"
    if not got.has_z:
        tail = "no Z" if got.coordinate is None else "no Z, but a gradient that is not cross-entropy"
        return f"{ce}; {tail}."
    if got.coef is None:
        return f"{ce}; a Z that is {got.penalty}."
    error = got.uncertainty
    coef = f"λ = {got.coef:.6g}{_half_width(error.coef)}"
    target = "c unknown" if got.target is None else f"c = {got.target:.6g}{_half_width(error.target)}"
    rule = " (log V)" if got.target_rule == "log_v" else ""
    extra = "".join(f", {key} = {value:.6g}" for key, value in got.extra.items())
    return f"{ce}; Z on {got.penalty} [{got.coordinate}]: {coef}, {target}{rule}{extra}, over {got.z_denominator}."


def _half_width(value: float | None) -> str:
    return "" if value is None else f" ± {value:.1g}"


def source_line(audit: LossAudit) -> str:
    """Forward error, Δ_src and cosine in one line."""
    source = audit.source
    if source.delta_src is None:
        return f"Source against fp64: not measured ({source.reason})."
    what = "Z source" if source.of == "z" else "total gradient"
    return (
        f"Against fp64 on {source.tokens} {source.dtype} tokens: "
        f"forward {_number(source.forward_rel_error)}, {what} Δ_src {_number(source.delta_src)}, "
        f"1 − cosine {_number(_one_minus(source.cosine))}."
    )


def verdict_table(audit: LossAudit) -> Table:
    """One line per question: findings first, then passes, then what does not apply."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=False, pad_edge=False)
    for column in ("verdict", "id", "sentence"):
        table.add_column(column, no_wrap=column != "sentence")
    order = list(MARKS)
    for finding in sorted(audit.findings, key=lambda item: order.index(item.verdict)):
        mark, style = MARKS[finding.verdict]
        table.add_row(Text(mark, style=style), finding.id, Text(finding.sentence))
    return table


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def _one_minus(cosine: float | None) -> float | None:
    return None if cosine is None else max(1.0 - cosine, 0.0)
