"""A comparison as a Markdown page: how it was made, mean ± std, paired differences, verdicts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from zloss.report.tables.comparison import ShownTable, estimable_columns, paired_table, router_table
from zloss.report.tables.method_verdicts import NO_VERDICT, TITLES, verdict_line, verdict_notes
from zloss.report.text.numbers import MISSING, number
from zloss.results.comparison import ComparedProvenance, Comparison, SeedSummary
from zloss.results.quality import QualityVerdict
from zloss.results.quantities import titled

MEANS = titled(
    ("ppl", "p_z_999", "a_p_99", "mu_abs_99", "r_aux", "c_aux", "grad_norm_p99", "grad_norm_max", "clip_rate")
)
MEANS_ROUTED = titled(("ce", "ppl", "s_rel", "entropy", "load_cv", "router_absolute", "grad_norm_p99", "grad_norm_max"))


def comparison_markdown(comparison: Comparison) -> str:
    """The page; it holds nothing that comparison.json does not."""
    seeds = ", ".join(str(seed) for seed in comparison.seeds)
    parts = ["# Matched training runs", *_made(comparison.provenance)]
    parts.append(f"Mean ± standard deviation (of a sample) over seeds {seeds}, in the coordinate each method deploys:")
    parts.append(
        _means(comparison, estimable_columns(MEANS if comparison.router is None else MEANS_ROUTED, comparison))
    )
    paired, routers = paired_table(comparison), router_table(comparison)
    if paired is not None:
        parts += [
            f"Paired differences, method minus {comparison.baseline}; quantities of the head in one coordinate for both:",
            _shown(paired, "method"),
        ]
    if routers is not None:
        parts.append(_shown(routers, "router loss"))
    quality, tokens = comparison.quality, comparison.tokens
    parts.append("\n".join(_verdict(verdict) for verdict in quality.methods))
    parts.append("\n".join(f"- {note}" for note in verdict_notes(comparison)))
    parts.append(
        f"Tokens per run: {number(tokens.consumed)} consumed of {number(tokens.available)} available, reuse "
        f"{number(tokens.reuse)}."
    )
    return "\n\n".join(part for part in parts if part) + "\n"


def _made(provenance: ComparedProvenance | None) -> list[str]:
    if provenance is None:
        return []
    return [
        "\n".join(f"    {command}" for command in provenance.commands),
        f"{provenance.runs} runs in {provenance.seconds / 60:.0f} minutes, training and validation, on "
        f"{provenance.threads} thread{'' if provenance.threads == 1 else 's'}; zloss {provenance.zloss}, "
        f"torch {provenance.torch}.",
    ]


def _means(comparison: Comparison, columns: Sequence[tuple[str, str]]) -> str:
    lines = [(method.label, *(_mean(method.metrics.get(key)) for key, _ in columns)) for method in comparison.methods]
    return _table(("method", *(title for _, title in columns)), lines)


def _mean(summary: SeedSummary | None) -> str:
    if summary is None:
        return MISSING
    spread = "" if not summary.std else f" ± {number(summary.std, 2)}"
    return f"{number(summary.mean)}{spread}"


def _shown(table: ShownTable, first: str) -> str:
    lines = [(name, *(text for text, _ in cells)) for name, cells in table.lines]
    return _table((first, *table.columns), lines)


def _table(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    whole = [header, ["---", *["---:"] * (len(header) - 1)], *lines]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in whole)


def _verdict(verdict: QualityVerdict) -> str:
    line = verdict_line(verdict)
    word = line.word if line.word == NO_VERDICT else f"**{line.word}**"
    head = f"- {line.label}: {word}" + (f"; {line.note}" if line.note else "")
    return "\n".join([head, *(f"  - {TITLES[part.name]} *{part.state}*: {part.reason}" for part in line.parts)])
