"""A centering on a terminal: what changed, before and after."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from zloss.report.terminal.fitting import print_legend, print_sentence, print_table
from zloss.report.text.numbers import number
from zloss.results.centering import Centering

LINES = (
    ("ppl", "PPL"),
    ("mu_abs_99", "p99 |μ| (nat)"),
    ("p_z_999", "P_Z^99.9 (nat)"),
    ("a_p_99", "A_p^99"),
    ("row_max_999", "p99.9 largest logit (nat)"),
    ("bf16_spacing", "bf16 spacing there (nat)"),
    ("fp16_spacing", "fp16 spacing there (nat)"),
    ("bf16_ce_error", "|ΔCE| of bf16 logits (nat)"),
    ("fp16_ce_error", "|ΔCE| of fp16 logits (nat)"),
)


def print_centering(result: Centering, folder: str, console: Console | None = None) -> None:
    """The table, what happened to the tie, and whether the copy was verified."""
    console = console or Console(markup=False)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for title, justify in (("", "left"), ("before", "right"), ("after", "right")):
        table.add_column(title, justify=justify)  # type: ignore[arg-type]
    for key, label in LINES:
        table.add_row(label, *(number(getattr(side, key)) for side in (result.before, result.after)))
    print_table(console, table)
    print_legend(console, ("mu_abs_99", "p_z_999", "a_p_99"))
    for note in result.notes:
        print_sentence(console, note)
    if result.tied_before and not result.tied_after:
        print_sentence(
            console, f"The head was tied and is a separate tensor in the copy: {result.extra_bytes / 1e6:.1f} MB more."
        )
    for finding in result.findings:
        print_sentence(console, finding)
    console.print(folder, markup=False, highlight=False)
