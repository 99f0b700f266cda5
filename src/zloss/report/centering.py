"""A centering as a document: the numbers before and after, what happened to the tie, and whether to keep the copy."""

from __future__ import annotations

from zloss.report.document import Column, Document, Plain, Table, Text, cell
from zloss.results.centering import Centering
from zloss.results.quantities import BY_KEY, symbol

LINES = {
    "ppl": "PPL",
    "mu_abs_99": "p99 |μ| (nat)",
    "p_z_999": f"{symbol('p_z_999')} (nat)",
    "a_p_99": symbol("a_p_99"),
    "row_max_999": "p99.9 largest logit (nat)",
    "bf16_spacing": "bf16 spacing there (nat)",
    "fp16_spacing": "fp16 spacing there (nat)",
    "bf16_noise": "bf16 error of log p (nat)",
    "fp16_noise": "fp16 error of log p (nat)",
}

TWO_COORDINATES = (
    "The tails of log Z and of the gain are in two coordinates of the same predictions, raw before and centered after: their "
    "difference is not a gain. Perplexity and the errors of log p are of the predictions."
)


def centering_summary(result: Centering, folder: str) -> Document:
    """What a terminal shows; `folder` has the copy."""
    rows = tuple(
        (title, cell(getattr(result.before, key)), cell(getattr(result.after, key))) for key, title in LINES.items()
    )
    legend = tuple(BY_KEY[key] for key in ("mu_abs_99", "p_z_999", "a_p_99"))
    untied = f"The head was tied and is a separate tensor in the copy: {result.extra_bytes / 1e6:.1f} MB more."
    return [
        Table((Column("", "text"), Column("before"), Column("after")), rows, legend=legend),
        Text(TWO_COORDINATES, "soft"),
        *(Text(note) for note in result.notes),
        *([Text(untied)] if result.tied_before and not result.tied_after else []),
        *(Text(finding) for finding in result.findings),
        Text(Plain(folder), "code"),
        *([Text(result.verdict.sentence, "strong")] if result.verdict is not None else []),
    ]
