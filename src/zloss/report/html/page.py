"""`report.html`: one self-contained page that opens offline; its content policy forbids every request."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

from zloss.decide.bottom_line import bottom_line
from zloss.decide.decided_results import DecidedResults, audit_names
from zloss.errors import MissingDependencyError
from zloss.report.charts.audits_compared import compared_panels
from zloss.report.charts.svg import drawings
from zloss.report.html.audit_view import audit_view
from zloss.report.html.comparison_view import comparison_view
from zloss.report.html.content_policy import colour_class, content_policy, generated_rules, width_class
from zloss.report.html.drift_view import drift_view
from zloss.report.html.implementation_audit_view import implementation_audit_view
from zloss.report.html.loss_audit_view import loss_audit_view
from zloss.report.html.recommendation_view import recommendation_view
from zloss.report.html.reproduction_view import reproduction_view
from zloss.report.html.router_views import measured_view, router_scale_view
from zloss.report.html.thinning import thin
from zloss.report.html.visible import visible_text
from zloss.report.tables.side_by_side import differences
from zloss.report.tables.verdicts import WORDS, effect_number, status, tally
from zloss.report.text import numbers, symbols
from zloss.results.quantities import BY_KEY, HEAD, HEADLINE, define, symbol
from zloss.results.quantities.notation import LETTERS
from zloss.results.quantities.notation import WORDS as GLOSSARY_WORDS
from zloss.results.writing import write_text

MAX_BYTES = 3_000_000


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
        audit_view(report, name, f"a{i}", models=one.models)
        for i, (name, report, one) in enumerate(zip(names, results.audits, results.maps if names else (), strict=True))
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
        shared_models=None if shared is None else results.maps[0].models,
        shared_tally=tally(shared) if shared else "",
        loss_audits=[loss_audit_view(audit) for audit in results.loss_audits],
        implementation_audits=[implementation_audit_view(audit) for audit in results.implementation_audits],
        comparisons=[comparison_view(judged, f"c{i}") for i, judged in enumerate(results.comparisons)],
        recommendations=[recommendation_view(found) for found in results.recommendations],
        drifts=[drift_view(drift, f"d{i}") for i, drift in enumerate(results.drifts)],
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
