"""What the page shows of a comparison of training runs."""

from __future__ import annotations

from dataclasses import dataclass

from zloss.decide.quality import JudgedComparison, QualityJudgement
from zloss.report.charts.panel import legend
from zloss.report.charts.svg import Drawing, drawings
from zloss.report.charts.training import training_panels
from zloss.report.tables.comparison import ShownTable, paired_table, router_table
from zloss.report.tables.method_verdicts import VerdictLine, answer, verdict_line, verdict_notes
from zloss.report.tables.plain import Lines, flat_lines
from zloss.results.comparison import Comparison


@dataclass(frozen=True)
class ComparisonView:
    """What the template shows of a comparison."""

    comparison: Comparison
    baseline: str
    answer: str
    """The verdicts in one sentence."""
    metrics: list[str]
    """Keys of all metrics, in their order in the file."""
    quality: tuple[tuple[QualityJudgement, VerdictLine], ...]
    notes: list[str]
    """Tolerance, number of methods, what a seed varies."""
    paired: ShownTable | None
    routers: ShownTable | None
    figures: list[Drawing]
    legend: list[tuple[str, str]]
    """(method, colour)."""
    lines: Lines


def comparison_view(judged: JudgedComparison, key: str) -> ComparisonView:
    """The view of one comparison; `key` is the prefix of its element ids."""
    comparison = judged.comparison
    baseline = comparison.baseline_method
    panels = training_panels(comparison.curves)
    return ComparisonView(
        comparison=comparison,
        baseline="baseline" if baseline is None else baseline.label,
        answer=answer(comparison),
        metrics=list(dict.fromkeys(name for method in comparison.methods for name in method.metrics)),
        quality=tuple((item, verdict_line(item.verdict)) for item in judged.quality),
        notes=verdict_notes(comparison),
        paired=paired_table(comparison),
        routers=router_table(comparison),
        figures=drawings(panels, key),
        legend=legend(panels),
        lines=flat_lines(comparison.to_dict(), skip=("schema", "methods", "quality", "router", "curves")),
    )
