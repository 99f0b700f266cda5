"""`report.html`: one self-contained page that opens offline; its content policy forbids every request."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from zloss.decide.bottom_line import bottom_line
from zloss.decide.decided_results import DecidedResults, audit_names
from zloss.decide.drift.limits import DriftLimits
from zloss.decide.quality import JudgedComparison, QualityJudgement
from zloss.errors import MissingDependencyError
from zloss.report.charts.audits_compared import compared_panels
from zloss.report.charts.drift import drift_panels
from zloss.report.charts.geometry import geometry_panels
from zloss.report.charts.panel import legend
from zloss.report.charts.spectrum import spectrum_panels
from zloss.report.charts.svg import Drawing, drawings
from zloss.report.charts.tails import tail_panels
from zloss.report.charts.training import training_panels
from zloss.report.html.cards import Card, cards
from zloss.report.html.content_policy import colour_class, content_policy, generated_rules, width_class
from zloss.report.html.further_views import measured_view, reproduction_view, router_scale_view
from zloss.report.html.recommendation_view import recommendation_view
from zloss.report.html.thinning import thin
from zloss.report.html.visible import visible_text
from zloss.report.tables.comparison import ShownTable, paired_table, router_table
from zloss.report.tables.drift import STATES, DriftLine, drift_lines, drift_titles, movement_name
from zloss.report.tables.head import HeadLine, head_lines
from zloss.report.tables.implementation_audit import TitledTable, implementation_tables
from zloss.report.tables.method_verdicts import VerdictLine, answer, verdict_line, verdict_notes
from zloss.report.tables.plain import flat_lines
from zloss.report.tables.router import RouterView, router_view
from zloss.report.tables.side_by_side import differences
from zloss.report.tables.verdicts import WORDS, effect_number, status, tally
from zloss.report.text import numbers, symbols
from zloss.report.text.loss_answer import bottom_line as bottom_line_of_loss
from zloss.report.text.loss_answer import headline
from zloss.report.text.summary import summarize
from zloss.results.audit import AuditReport
from zloss.results.comparison import Comparison
from zloss.results.drift import Drift, Movement
from zloss.results.figure_data import ExtremeTable
from zloss.results.implementation_audit import ImplementationAudit
from zloss.results.loss_audit import Finding, LossAudit
from zloss.results.quantities import BY_KEY, HEAD, HEADLINE, define, symbol
from zloss.results.quantities.notation import LETTERS
from zloss.results.quantities.notation import WORDS as GLOSSARY_WORDS
from zloss.results.record import to_plain
from zloss.results.writing import write_text

MAX_BYTES = 3_000_000
EXTREME_TITLES = {
    ("violation", "raw"): "|log Z − c|, raw",
    ("violation", "centered"): "|log Z̃ − c|, centered",
    ("gain", "raw"): "A_p, raw",
    ("gain", "centered"): "A_p, centered",
    ("shift", "raw"): "|μ|",
    ("delta_u", "raw"): "‖δ_u‖, raw",
    ("delta_u", "centered"): "‖δ_u‖, centered",
}


Lines = list[tuple[str, str]]
"""(key, text) of a small table."""


@dataclass(frozen=True)
class AuditView:
    """What the template shows of one audit."""

    report: AuditReport
    name: str
    key: str
    """Prefix of its element ids."""
    summary: list[str]
    tally: str
    cards: list[Card]
    geometry: list[Drawing]
    tails: list[Drawing]
    spectrum: list[Drawing]
    head_lines: list[HeadLine]
    extremes: list[tuple[str, ExtremeTable]]
    model_lines: Lines
    corpus_lines: Lines
    provenance_lines: Lines
    router: RouterView | None


@dataclass(frozen=True)
class LossAuditView:
    """What the template shows of an audit of a loss."""

    name: str
    answer: list[str]
    """What the loss applies, and how many findings there are."""
    findings: list[Finding]
    blocks: list[tuple[str, Lines]]
    """(title, lines) of every section."""


@dataclass(frozen=True)
class ImplementationAuditView:
    """What the template shows of an audit of the implementation."""

    lead: str
    """Model, text and setting in one sentence."""
    sections: tuple[TitledTable, ...]
    notes: tuple[str, ...]
    blocks: list[tuple[str, Lines]]
    """(title, lines) of model, text and provenance."""


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


@dataclass(frozen=True)
class DriftView:
    """What the template shows of the drift over a run."""

    drift: Drift
    rule: str
    figures: list[Drawing]
    movements: list[tuple[str, str, Movement]]
    """(name, verdict in words, movement)."""
    titles: list[str]
    lines: list[DriftLine]
    limits: Lines
    provenance: Lines


def write_page(path: Path, results: DecidedResults) -> None:
    """Render the page and put it at `path` atomically."""
    write_text(path, render_page(results))


def render_page(results: DecidedResults) -> str:
    """The page under 3 MB: the tokens of the scatter panels are thinned, extremes kept, until it fits."""
    for share in (1.0, 0.5, 0.25, 0.1, 0.03, 0.0):
        audits = tuple(thin(report, share) for report in results.audits)
        text = _render(dataclasses.replace(results, audits=audits))
        if len(text.encode("utf-8", errors="replace")) < MAX_BYTES:
            break
    return text


def _render(results: DecidedResults) -> str:
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup
    except ImportError as error:
        raise MissingDependencyError("jinja2", "The HTML page", "audit") from error

    environment = Environment(
        loader=PackageLoader("zloss.report.html", "templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters.update(
        number=numbers.number,
        coefficient=numbers.coefficient,
        factor=numbers.factor,
        seconds=numbers.seconds,
        prose=lambda text: Markup(symbols.html_text(str(text))),
        before=lambda effect: effect_number(effect, effect.before),
        after=lambda effect: effect_number(effect, effect.after),
        drawn=Markup,
        symbol=symbol,
        hint=lambda key: definition.hint if (definition := define(key)) else "",
        visible=visible_text,
        bottom_line=bottom_line,
        colour_class=colour_class,
        width_class=width_class,
    )
    names = audit_names(results.audits)
    audits = [
        _audit_view(report, name, f"a{i}") for i, (name, report) in enumerate(zip(names, results.audits, strict=True))
    ]
    assets = files("zloss.report.html") / "assets"
    style = (assets / "page.css").read_text(encoding="utf-8") + generated_rules()
    script = (assets / "page.js").read_text(encoding="utf-8")
    shared = None if results.shared is None else results.shared.decisions
    return environment.get_template("page.html").render(
        title=_title(names, results),
        policy=Markup(content_policy(style, script)),
        style=Markup(style),
        script=Markup(script),
        audits=audits,
        dumbbells=drawings(compared_panels([(view.name, view.report) for view in audits]), "compare")
        if len(audits) > 1
        else [],
        headline=[BY_KEY[key] for key in HEADLINE],
        differing=differences([(view.name, view.report) for view in audits]),
        shared_decisions=shared,
        shared_tally=tally(shared) if shared else "",
        loss_audits=[_loss_audit_view(audit) for audit in results.loss_audits],
        implementation_audits=[_implementation_view(audit) for audit in results.implementation_audits],
        comparisons=[_comparison_view(judged, f"c{i}") for i, judged in enumerate(results.comparisons)],
        recommendations=[recommendation_view(found) for found in results.recommendations],
        drifts=[_drift_view(drift, f"d{i}") for i, drift in enumerate(results.drifts)],
        router_scales=[router_scale_view(table) for table in results.router_scales],
        measured_routers=[measured_view(scale) for scale in results.measured_routers],
        reproductions=[reproduction_view(record) for record in results.reproductions],
        status=status,
        words=WORDS,
        glossary=(*LETTERS, *GLOSSARY_WORDS, *((entry.symbol, entry.hint) for entry in HEAD)),
    )


def _title(names: Sequence[str], results: DecidedResults) -> str:
    if names:
        return " vs ".join(names)
    if results.comparisons:
        return "Comparison of training runs"
    if results.loss_audits:
        return "Audit of a loss"
    if results.implementation_audits:
        return "Audit of the implementation"
    if results.router_scales or results.measured_routers:
        return "Scale of a router Z-loss"
    if results.recommendations:
        return "Recommendation for " + ", ".join(found.tested.model for found in results.recommendations)
    if results.drifts:
        return "Drift of " + ", ".join(drift.model for drift in results.drifts)
    labels = [record.label for record in results.reproductions]
    return f"Reproduction of {labels[0]}" if len(labels) == 1 else "Reproductions of the paper"


def _audit_view(report: AuditReport, name: str, key: str) -> AuditView:
    return AuditView(
        report=report,
        name=name,
        key=key,
        summary=summarize(report),
        tally=tally(report.decisions),
        cards=cards(report),
        geometry=drawings(geometry_panels(report), key),
        tails=drawings(tail_panels(report), key),
        spectrum=drawings(spectrum_panels(report), key),
        head_lines=head_lines(report),
        extremes=[(_extreme_title(table), table) for table in report.extreme_tokens if table.tokens],
        model_lines=flat_lines(to_plain(report.model)),
        corpus_lines=flat_lines(to_plain(report.corpus)),
        provenance_lines=flat_lines(to_plain(report.provenance)),
        router=None if report.router is None else router_view(report.router),
    )


def _extreme_title(table: ExtremeTable) -> str:
    return EXTREME_TITLES.get((table.quantity, table.coordinate), f"{table.quantity}, {table.coordinate}")


def _loss_audit_view(audit: LossAudit) -> LossAuditView:
    order = {"error": 0, "finding": 0, "warning": 1, "note": 2, "pass": 3, "not_applicable": 4}
    plain = audit.to_dict()
    titles = {
        "identified": "Identified",
        "source": "Source against fp64",
        "target_model": "Source on the model's own logits",
        "provenance": "Provenance",
    }
    blocks = [(title, flat_lines(plain[key])) for key, title in titles.items() if plain[key] is not None]
    rest = flat_lines(plain, skip=("schema", "findings", *titles))
    return LossAuditView(
        name=str(audit.provenance.get("loss", "loss")),
        answer=[headline(audit), bottom_line_of_loss(audit)[0]],
        findings=sorted(audit.findings, key=lambda finding: order[finding.severity or finding.verdict]),
        blocks=[*blocks, *([("Further", rest)] if rest else [])],
    )


def _implementation_view(audit: ImplementationAudit) -> ImplementationAuditView:
    status = " It was interrupted." if audit.status == "partial" else ""
    stars = any(line.interpreted for line in audit.implementations)
    starred = ("* on Triton's interpreter, which cuts bf16 off where a GPU rounds",) if stars else ()
    plain = audit.to_dict()
    titles = {"model": "Model", "corpus": "Text", "provenance": "Provenance", "timings": "Seconds"}
    return ImplementationAuditView(
        lead=f"{audit.model.name} on {numbers.number(audit.corpus.predictions)} tokens of {audit.corpus.name}, "
        f"λ {audit.coef:g}, c {numbers.number(audit.target)}.{status}",
        sections=implementation_tables(audit),
        notes=starred + audit.notes,
        blocks=[(title, flat_lines(plain[key])) for key, title in titles.items()],
    )


def _comparison_view(judged: JudgedComparison, key: str) -> ComparisonView:
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


def _drift_view(drift: Drift, key: str) -> DriftView:
    tolerance = drift.limits.get("ppl_tolerance", DriftLimits.ppl_tolerance)
    return DriftView(
        drift=drift,
        rule="A number moved where its change, less the noise of the text, exceeds the limits below. CE stood still where the "
        f"95 % interval of its paired change lies within {numbers.number(100 * tolerance)} % of PPL.",
        figures=drawings(drift_panels(drift), key),
        movements=[(movement_name(movement), STATES[movement.state], movement) for movement in drift.movements],
        titles=drift_titles(),
        lines=drift_lines(drift),
        limits=flat_lines(drift.limits),
        provenance=flat_lines(to_plain(drift.provenance)),
    )
