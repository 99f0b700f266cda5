"""Log-probabilities from 16-bit logits as a table, for the pages of audits and of implementation audits."""

from __future__ import annotations

from collections.abc import Sequence

from zloss.report.document import Cell, Column, Columns, Document, Text, cell, table
from zloss.report.numbers import MISSING, number, percent
from zloss.results.logprobs import LogprobNoise

CASES = {"storage": "logits", "product": "inputs, head, logits", "operands": "inputs and head"}
"""What is rounded to 16 bits."""
HEADS = {"raw": "as it is", "centered": "centered", "softcapped": "capped at 30"}
MEANINGS = {
    "RMS, p99": "root mean square and 99 % quantile of |δ| over the tokens of the text, in nats",
    "mean": "mean of δ and its standard error, with tokens taken as independent",
    "tight, ±1 %, ±5 %": "share of tokens whose ratio e^δ is outside [0.999, 1.002], ±1 %, ±5 %",
    "on policy": "RMS of δ for tokens that the model itself samples, summed exactly over the vocabulary",
    "KL": "KL divergence of the fp32 from the 16-bit distribution, exact, mean over positions",
    "Σδ": "largest |Σδ| of a block: the log-ratio of a whole sequence",
    "head": "as it is; centered: with its mean row subtracted; capped at 30: logits 30·tanh(z/30)",
}
SHARES = {"tight": "outside_tight", "±1 %": "outside_1", "±5 %": "outside_5"}
WHAT_IT_IS = (
    "δ is the log-probability of a token from 16-bit logits minus that from fp32 logits of the same weights: the share of the "
    "output head alone. It is the log-ratio between a 16-bit trainer and an exact sampler (−δ the other way round). Two 16-bit "
    "heads that compute the same bits cancel; two independent ones differ by √2 times as much. What is left between a trainer "
    "and a sampler comes from the body of the model."
)


def logprob_document(rows: Sequence[LogprobNoise], *, verdict_format: str = "") -> Document:
    """What 16-bit logits do to log-probabilities, and what fp32 logits, centering and a soft cap would leave.

    `verdict_format`: the format that the verdict uses.
    """

    def mean(row: LogprobNoise) -> Cell:
        if row.gap.mean is None or row.gap.mean_se is None:
            return cell(row.gap.mean, 3)
        return Cell(f"{row.gap.mean:.4f} ± {row.gap.mean_se:.4f}", row.gap.mean)

    def share(row: LogprobNoise, name: str) -> Cell:
        value = getattr(row.gap, name)
        return Cell(MISSING if value is None else percent(value), value)

    columns: Columns = (
        (Column("format", "text"), lambda row: row.format),
        (Column("rounded", "text"), lambda row: CASES[row.case]),
        (Column("head", "text"), lambda row: HEADS[row.head]),
        ("tokens", lambda row: cell(row.gap.tokens)),
        ("RMS", lambda row: cell(row.gap.rms, 3)),
        ("p99", lambda row: cell(row.gap.p99_abs, 3)),
        ("mean", mean),
        *((title, lambda row, name=name: share(row, name)) for title, name in SHARES.items()),
        ("on policy", lambda row: cell(row.on_policy_rms, 3)),
        ("KL", lambda row: cell(row.kl, 2)),
        ("Σδ", lambda row: cell(max(map(abs, row.gap.sequence_sums), default=None), 3)),
    )
    shown = table(rows, columns, meanings=MEANINGS, name="logprobs", stack=True)
    return [Text(WHAT_IT_IS, "lead"), *([Text(said)] if (said := _remarks(rows, verdict_format)) else []), shown]


def _remarks(rows: Sequence[LogprobNoise], verdict_format: str) -> str:
    """Which rows the verdict uses, and where the error of the centered head is larger."""
    rms: dict[tuple[str, str, str], float | None] = {(row.format, row.case, row.head): row.gap.rms for row in rows}
    said = []
    if rms.get((verdict_format, "storage", "raw")) is not None:
        said.append(
            f"The verdict uses the RMS of the {verdict_format} rows in which only the logits are rounded, as it is and centered."
        )
    for format_, case in dict.fromkeys((row.format, row.case) for row in rows):
        raw, centered = rms.get((format_, case, "raw")), rms.get((format_, case, "centered"))
        if raw is not None and centered is not None and centered > raw:
            errors = f"{number(centered, 3)} nat, {number(raw, 3)} nat as it is"
            said.append(
                f"Where {CASES[case]} are rounded to {format_}, the error of the centered head is larger: {errors}."
            )
    return " ".join(said)
