"""`report.html`: one self-contained page that opens offline; no request leaves it, and its policy forbids any."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from zloss.decide.decision_map import decide, with_decisions
from zloss.decide.thresholds import Thresholds
from zloss.decide.training_stages import judge_quality
from zloss.errors import MissingDependencyError
from zloss.report import formatting
from zloss.report.charts.audits_compared import compared_panels
from zloss.report.charts.geometry import geometry_panels
from zloss.report.charts.panel import legend
from zloss.report.charts.spectrum import spectrum_panels
from zloss.report.charts.svg import drawings
from zloss.report.charts.tails import tail_panels
from zloss.report.charts.training import training_panels
from zloss.report.html.page_data import cards, effect_number, flat_rows, head_rows, status, visible_text
from zloss.report.html.thinning import thin
from zloss.report.summary import summarize, tally
from zloss.report.tables.comparison import paired_table, router_table
from zloss.results.audit import AuditReport
from zloss.results.comparison_view import view_comparison
from zloss.results.figure_data import ExtremeTable
from zloss.results.quantities import BY_KEY, HEADLINE, define, symbol
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


@dataclass(frozen=True)
class Page:
    """What one page shows; several audits stand side by side, the rest fills the decision map of each."""

    audits: tuple[AuditReport, ...] = ()
    loss_audits: tuple[dict[str, Any], ...] = ()
    comparisons: tuple[dict[str, Any], ...] = ()
    thresholds: Thresholds | None = None
    """None: each audit keeps the thresholds stored in it."""


def write_page(path: Path, page: Page) -> None:
    """Render `page` and put it at `path` atomically."""
    write_text(path, render_page(page))


def render_page(page: Page) -> str:
    """The page under 3 MB: the tokens of the scatter panels are thinned, extremes kept, until it fits."""
    audits = page.audits
    for share in (1.0, 0.5, 0.25, 0.1, 0.03, 0.0):
        text = _render(dataclasses.replace(page, audits=tuple(thin(report, share) for report in audits)))
        if len(text.encode("utf-8", errors="replace")) < MAX_BYTES:
            break
    return text


def _render(page: Page) -> str:
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
        number=formatting.number,
        coefficient=formatting.coefficient,
        factor=formatting.factor,
        seconds=formatting.seconds,
        prose=lambda text: Markup(formatting.html_text(str(text))),
        before=lambda effect: effect_number(effect, effect.before),
        after=lambda effect: effect_number(effect, effect.after),
        drawn=Markup,
        symbol=symbol,
        hint=lambda key: definition.hint if (definition := define(key)) else "",
        visible=visible_text,
    )
    names = audit_names(page.audits)
    audits = [
        _audit_view(report, name, f"a{i}", page)
        for i, (name, report) in enumerate(zip(names, page.audits, strict=True))
    ]
    assets = files("zloss.report.html") / "assets"
    several = len(audits) > 1
    shared = (
        None
        if audits
        else decide(None, loss_audits=page.loss_audits, comparisons=page.comparisons, thresholds=page.thresholds)
    )
    return environment.get_template("page.html").render(
        title=_title(names, page),
        style=Markup((assets / "page.css").read_text(encoding="utf-8")),
        script=Markup((assets / "page.js").read_text(encoding="utf-8")),
        audits=audits,
        dumbbells=drawings(compared_panels([(view["name"], view["report"]) for view in audits]), "compare")
        if several
        else [],
        headline=[BY_KEY[key] for key in HEADLINE],
        shared_decisions=shared,
        shared_tally=tally(shared) if shared else "",
        loss_audits=[_loss_audit_view(data) for data in page.loss_audits],
        comparisons=[
            _comparison_view(data, f"c{i}", page.thresholds or Thresholds()) for i, data in enumerate(page.comparisons)
        ],
        status=status,
    )


def audit_names(audits: Sequence[AuditReport]) -> list[str]:
    """Short names that tell the audits apart: the model, with the corpus or a number where models repeat."""
    models = [report.model.name for report in audits]
    names = [
        m if models.count(m) == 1 else f"{m} · {report.corpus.name}" for m, report in zip(models, audits, strict=True)
    ]
    return [name if names.count(name) == 1 else f"{name} ({i + 1})" for i, name in enumerate(names)]


def _title(names: Sequence[str], page: Page) -> str:
    if names:
        return " vs ".join(names)
    return "Comparison of training runs" if page.comparisons else "Audit of a loss"


def _audit_view(report: AuditReport, name: str, key: str, page: Page) -> dict[str, Any]:
    report = with_decisions(
        report, loss_audits=page.loss_audits, comparisons=page.comparisons, thresholds=page.thresholds
    )
    return {
        "report": report,
        "name": name,
        "key": key,
        "summary": summarize(report),
        "tally": tally(report.decisions),
        "cards": cards(report),
        "geometry": drawings(geometry_panels(report), key),
        "tails": drawings(tail_panels(report), key),
        "spectrum": drawings(spectrum_panels(report), key),
        "head_rows": head_rows(report),
        "extremes": [(_extreme_title(table), table) for table in report.extreme_tokens if table.tokens],
        "model_rows": flat_rows(dataclasses.asdict(report.model)),
        "corpus_rows": flat_rows(dataclasses.asdict(report.corpus)),
        "provenance_rows": flat_rows(dataclasses.asdict(report.provenance)),
        "router_rows": flat_rows(report.router) if report.router else [],
    }


def _extreme_title(table: ExtremeTable) -> str:
    return EXTREME_TITLES.get((table.quantity, table.coordinate), f"{table.quantity}, {table.coordinate}")


def _loss_audit_view(data: dict[str, Any]) -> dict[str, Any]:
    order = {"finding": 0, "pass": 1, "not_applicable": 2}
    findings = sorted(data.get("findings") or (), key=lambda item: order.get(str(item.get("verdict")), 3))
    titles = {"identified": "Identified", "source": "Source against fp64", "provenance": "Provenance"}
    blocks = [(title, flat_rows(data[key])) for key, title in titles.items() if isinstance(data.get(key), dict)]
    rest = flat_rows(data, skip=("schema", "findings", *(key for key in titles if isinstance(data.get(key), dict))))
    return {"findings": findings, "blocks": [*blocks, *([("Further", rest)] if rest else [])]}


def _comparison_view(data: dict[str, Any], key: str, thresholds: Thresholds) -> dict[str, Any]:
    view = view_comparison(data)
    metrics = list(dict.fromkeys(name for method in view.methods for name in method.metrics if name != "coef"))
    curves = data.get("curves")
    groups = [group for group in curves if isinstance(group, dict)] if isinstance(curves, list) else []
    panels = training_panels(groups)
    return {
        "view": view,
        "metrics": metrics,
        "quality": [(row, *judge_quality(view, row.delta_ppl, row.accepted, thresholds)) for row in view.quality],
        "paired": paired_table(data),
        "routers": router_table(data),
        "figures": drawings(panels, key),
        "legend": legend(panels),
        "rows": flat_rows(data, skip=("schema", "methods", "quality", "router", "curves")),
    }
