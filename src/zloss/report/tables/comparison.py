"""Tables of a comparison's page beside the plain metrics: paired differences, and the scales of router variants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zloss.report.formatting import MISSING, number
from zloss.results.comparison_view import FEW_STEPS, label
from zloss.results.quantities import symbol, titled

PAIRED = titled(
    (
        "ppl",
        "p_z_999",
        "a_p_99",
        "diag_z",
        "mu_abs_99",
        "grad_norm_p99",
        "grad_norm_max",
        "clip_rate",
        "phi_10",
        "adam_v_max",
    )
)
PAIRED_ROUTED = titled(
    (
        "ce",
        "ppl",
        "entropy",
        "load_cv",
        "load_balance",
        "router_z",
        "router_log_z_p999",
        "router_correction_norm",
        "grad_norm_p99",
        "clip_rate",
    )
)
ROUTERS = (
    symbol("router.coef"),
    symbol("applied_coef"),
    symbol("s_rel"),
    f"{symbol('absolute')} per decision",
    f"{symbol('entropy')} by seed",
    f"{symbol('load_cv')} by seed",
    symbol("max_loss_difference"),
)


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
