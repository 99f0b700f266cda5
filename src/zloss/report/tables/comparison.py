"""Tables of a comparison's page beside the plain metrics: paired differences, and the scales of router variants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zloss.report.formatting import MISSING, number
from zloss.results.comparison_view import FEW_STEPS, label

PAIRED = (
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
PAIRED_ROUTED = (
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
ROUTERS = ("λ_R", "λ_R applied", "s_rel", "λα per decision", "entropy by seed", "load CV by seed", "max |ΔL|")


def told_columns(columns: Sequence[tuple[str, str]], data: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """The columns without percentiles over steps that a short run cannot tell."""
    steps = data.get("steps")
    short = isinstance(steps, int) and steps < FEW_STEPS
    return tuple((key, title) for key, title in columns if not (short and key == "grad_norm_p99"))


@dataclass(frozen=True)
class ShownTable:
    """A table as the page prints it: (text, value to sort by or None) per cell."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, tuple[tuple[str, float | None], ...]], ...]


def paired_table(data: dict[str, Any]) -> ShownTable | None:
    """Target minus baseline; quantities of the head in the coordinate the method deploys, for both."""
    records = data.get("methods")
    methods = [m for m in records if isinstance(m, dict) and m.get("paired")] if isinstance(records, list) else []
    if not methods:
        return None
    columns = told_columns(PAIRED_ROUTED if "router" in data else PAIRED, data)
    rows = tuple((label(m["method"], m.get("coef")), _differences(m, [key for key, _ in columns])) for m in methods)
    return ShownTable(tuple(title for _, title in columns), rows)


def router_table(data: dict[str, Any]) -> ShownTable | None:
    """Scale and routing of every router variant, seed by seed."""
    routers = data.get("router")
    if not isinstance(routers, dict) or "off" not in routers:
        return None
    rows = []
    for record in (*routers["off"], *routers["conventions"]):
        gaps = [gap for gap in record["max_loss_difference"] if gap is not None]
        largest = max(gaps) if gaps else None
        plain = (record["coef"], record["applied_coef"], record["s_rel"], record["absolute"])
        cells = (
            *((number(value), value) for value in plain),
            (_by_seed(record["entropy"], 4), None),
            (_by_seed(record["load_cv"], 3), None),
            (number(largest), largest),
        )
        rows.append((str(record["convention"]), cells))
    return ShownTable(ROUTERS, tuple(rows))


def _differences(method: dict[str, Any], keys: Sequence[str]) -> tuple[tuple[str, float | None], ...]:
    paired, side = method["paired"], method.get("coordinate") or "raw"
    cells: list[tuple[str, float | None]] = []
    for key in keys:
        difference = paired.get("same_coordinate", {}).get(side, {}).get(key) or paired.get("deployed", {}).get(key)
        if difference is None:
            cells.append((MISSING, None))
            continue
        spread = "" if difference["std"] is None else f" ± {number(difference['std'], 2)}"
        cells.append((f"{number(difference['mean'])}{spread}", difference["mean"]))
    return tuple(cells)


def _by_seed(values: Sequence[float | None], digits: int) -> str:
    return " ".join(f"{value:.{digits}f}" for value in values if value is not None)
