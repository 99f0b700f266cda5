"""report.html of a comparison: verdicts and metrics, the stages of the decision map, training curves and tails."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from zloss.report.comparison_view import label
from zloss.report.formatting import number
from zloss.report.html import Page, render_page
from zloss.report.writing import write_text
from zloss.train.finished_run import FinishedRun
from zloss.train.training_figures import training_section

COMPARISONS = 'id="comparisons"'
"""The section of the page that lists every metric; curves and differences go in front of it."""
ROWS = (
    ("ppl", "PPL"),
    ("p_z_999", "P_Z^99.9"),
    ("a_p_99", "A_p^99"),
    ("diag_z", "Diag Z"),
    ("mu_abs_99", "p99 |μ|"),
    ("grad_norm_p99", "p99 ‖g‖₂"),
    ("grad_norm_max", "max ‖g‖₂"),
    ("clip_rate", "clip rate"),
    ("phi_10", "Φ_10"),
    ("adam_v_max", "max ‖v‖∞"),
)


ROUTER_ROWS = (
    ("ce", "CE"),
    ("ppl", "PPL"),
    ("entropy", "entropy"),
    ("load_cv", "load CV"),
    ("load_balance", "load balancing"),
    ("router_z", "router Z"),
    ("router_log_z_p999", "p99.9 log Z_R"),
    ("router_correction_norm", "mean ‖δ_h‖"),
    ("grad_norm_p99", "p99 ‖g‖₂"),
    ("clip_rate", "clip rate"),
)


def write_comparison_page(folder: Path, data: dict[str, Any], runs: Sequence[FinishedRun]) -> Path:
    """The page beside comparison.json; the curves come from the step records, which comparison.json does not repeat."""
    place = folder / "report.html"
    text = render_page(Page(comparisons=(data,)))
    start = text.rindex("<section", 0, text.index(COMPARISONS, text.index("<main>")))
    write_text(
        place, text[:start] + paired_section(data) + router_section(data) + training_section(runs) + text[start:]
    )
    return place


def paired_section(data: dict[str, Any]) -> str:
    """Target minus baseline; tails in the coordinate the method deploys, for both."""
    methods = [method for method in data["methods"] if method["paired"] is not None]
    if not methods:
        return ""
    columns = ROUTER_ROWS if "router" in data else ROWS
    head = "".join(f'<th class="n">{escape(title)}</th>' for _, title in columns)
    body = "".join(
        f"<tr><td>{escape(label(method['method'], method['coef']))}</td>{_cells(method, columns)}</tr>"
        for method in methods
    )
    return (
        f'<section id="paired"><h2>Paired differences</h2><p class="lead">Target minus {escape(str(data["baseline"]))}, '
        "seed by seed, mean ± standard deviation; quantities of the head in the coordinate the method deploys, for both.</p>"
        f'<div class="scroll"><table class="sortable numbers"><thead><tr><th>method</th>{head}</tr></thead>'
        f"<tbody>{body}</tbody></table></div></section>"
    )


def router_section(data: dict[str, Any]) -> str:
    """Scale and routing of every router variant, seed by seed."""
    if "router" not in data:
        return ""
    rows = []
    for record in (*data["router"]["off"], *data["router"]["conventions"]):
        seeds = " ".join(f"{value:.4f}" for value in record["entropy"] if value is not None)
        loads = " ".join(f"{value:.3f}" for value in record["load_cv"] if value is not None)
        gaps = [gap for gap in record["max_loss_difference"] if gap is not None]
        cells = (
            number(record["coef"]),
            number(record["applied_coef"]),
            number(record["s_rel"]),
            number(record["absolute"]),
            seeds,
            loads,
            number(max(gaps)) if gaps else "–",
        )
        numbers = "".join(f'<td class="n">{escape(text)}</td>' for text in cells)
        rows.append(f"<tr><td>{escape(record['convention'])}</td>{numbers}</tr>")
    names = ("λ_R", "λ_R applied", "s_rel", "λα per decision", "entropy by seed", "load CV by seed", "max |ΔL|")
    head = "".join(f'<th class="n">{escape(name)}</th>' for name in names)
    return (
        '<section id="routers"><h2>Router losses</h2><p class="lead">Entropy in nat and load on the validation blocks; max '
        f"|ΔL| is the largest difference of a training loss from {escape(str(data['router']['baseline']))}, over all steps "
        "and seeds. No route is dropped.</p>"
        f'<div class="scroll"><table class="numbers"><thead><tr><th>router loss</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div></section>"
    )


def _cells(method: dict[str, Any], columns: Sequence[tuple[str, str]]) -> str:
    paired, side = method["paired"], method["coordinate"] or "raw"
    found = []
    for key, _ in columns:
        difference = paired["same_coordinate"].get(side, {}).get(key) or paired["deployed"].get(key)
        if difference is None:
            found.append('<td class="n">–</td>')
            continue
        spread = "" if difference["std"] is None else f" ± {number(difference['std'], 2)}"
        found.append(f'<td class="n" data-value="{difference["mean"]}">{number(difference["mean"])}{spread}</td>')
    return "".join(found)
